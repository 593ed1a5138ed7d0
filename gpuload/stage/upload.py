"""Small arrays to the device, without waiting for it.

A copy from pageable memory makes the host wait for all that was issued on the stream before, and a stage uploads dozens
of small arrays for each batch. So they go through torch's cache of page-locked memory, which knows the stream that
reads it and keeps the memory until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final

import numpy as np
import torch

from gpuload.ring.ring import align

__all__ = ["upload", "upload_together"]

ALIGNMENT: Final = 16  # bytes, for a GPU's vector loads


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on the device; on the CPU a view of the array."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray | Sequence[np.ndarray]], device: torch.device) -> list[torch.Tensor]:
    """The same for several arrays, by one copy: a copy takes some ten microseconds, however small it is. Where several
    arrays of one type are given for one, they become one flat tensor, one after the other."""
    entries = [(own, None) if isinstance(own, Sequence) else ([own], own.shape) for own in arrays]
    sizes = [sum([array.nbytes for array in own]) for own, _ in entries]
    starts = list(accumulate([align(size, ALIGNMENT) for size in sizes], initial=0))
    flat = np.empty(starts[-1], np.uint8)
    for start, (own, _) in zip(starts, entries, strict=False):
        for array in own:
            np.ndarray(array.shape, array.dtype, flat, start)[...] = array
            start += array.nbytes
    there, found = upload(flat, device), []
    typed: dict[np.dtype, torch.Tensor] = {}  # each view takes some microseconds
    for start, size, ([first, *_], shape) in zip(starts, sizes, entries, strict=False):
        kind = first.dtype
        if kind not in typed:
            typed[kind] = there.view(_torch_dtype(kind))
        tensor = typed[kind][start // kind.itemsize : (start + size) // kind.itemsize]
        found.append(tensor if shape is None or len(shape) == 1 else tensor.view(shape))
    return found


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return getattr(torch, dtype.name)
