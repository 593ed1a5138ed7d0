"""Small arrays to the device, without waiting for it.

A copy from pageable memory makes the host wait for all that was issued on the stream before, and a stage uploads dozens
of small arrays for each batch. So they go through torch's cache of page-locked memory, which knows the stream that
reads it and keeps the memory until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from gpuload.ring.packing import ALIGNMENT, Span, spans_of, write_arrays
from gpuload.ring.ring import align

__all__ = ["upload", "upload_together", "views_of"]

Name = TypeVar("Name")


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on the device; on the CPU a view of the array."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray | Sequence[np.ndarray]], device: torch.device) -> list[torch.Tensor]:
    """The same for several arrays, by one copy: a copy takes some ten microseconds, however small it is. Where several
    arrays of one type are given for one, they become one flat tensor, one after the other."""
    entries = [own if isinstance(own, Sequence) else [own] for own in arrays]
    spans, nbytes = spans_of(entries)
    flat = np.empty(nbytes, np.uint8)
    write_arrays(entries, spans, flat)
    found = views_of(upload(flat, device), dict(enumerate(spans)))
    return [
        tensor if isinstance(own, Sequence) or own.ndim == 1 else tensor.view(own.shape)
        for own, tensor in zip(arrays, found.values(), strict=True)
    ]


def views_of(memory: torch.Tensor, spans: Mapping[Name, Span], at: int = 0) -> dict[Name, torch.Tensor]:
    """The arrays that lie in a memory, uint8, from byte `at` on: flat tensors."""
    found, typed = {}, {}  # each view of a type takes some microseconds
    memory = memory[at : at + align(max([start + nbytes for start, nbytes, _ in spans.values()]), ALIGNMENT)]
    for name, (start, nbytes, kind) in spans.items():
        if kind not in typed:
            dtype: torch.dtype = getattr(torch, kind)
            typed[kind] = memory.view(dtype), dtype.itemsize
        tensor, size = typed[kind]
        found[name] = tensor[start // size : (start + nbytes) // size]
    return found
