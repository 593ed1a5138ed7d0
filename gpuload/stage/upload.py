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

__all__ = ["upload", "upload_together"]

ALIGNMENT: Final = 16  # bytes, for a GPU's vector loads


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on the device; on the CPU a view of the array."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The same for several arrays, by one copy: a copy takes some ten microseconds, however small it is."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    flat = np.empty(sum(sizes), np.uint8)
    for start, array in zip(accumulate(sizes, initial=0), arrays, strict=False):
        flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    # Each view takes some microseconds, a split as long as one.
    found = upload(flat, device).split(sizes)
    return [
        (own if own.numel() == array.nbytes else own[: array.nbytes]).view(_torch_dtype(array.dtype)).view(array.shape)
        for own, array in zip(found, arrays, strict=True)
    ]


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return getattr(torch, dtype.name)
