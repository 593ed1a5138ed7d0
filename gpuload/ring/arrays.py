"""Small arrays one after the other in one memory, so that one copy brings all of them to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpuload.ring.ring import align

__all__ = ["ALIGNMENT", "Span", "spans_of", "write"]

ALIGNMENT: Final = 16  # bytes, for a GPU's vector loads
Span = tuple[int, int, str]  # the first byte, the bytes, and numpy's name of the type


def spans_of(entries: Sequence[Sequence[np.ndarray]]) -> tuple[list[Span], int]:
    """Where entries lie, each of some arrays of one type, and where they end."""
    spans, at = [], 0
    for arrays in entries:
        nbytes = sum([array.nbytes for array in arrays])
        spans.append((at, nbytes, arrays[0].dtype.name))
        at = align(at + nbytes, ALIGNMENT)
    return spans, at


def write(entries: Sequence[Sequence[np.ndarray]], spans: Sequence[Span], memory: np.ndarray) -> None:
    """Write the arrays to a memory, uint8."""
    for arrays, (at, _, _) in zip(entries, spans, strict=True):
        for array in arrays:
            np.ndarray(array.shape, array.dtype, memory, at)[...] = array
            at += array.nbytes
