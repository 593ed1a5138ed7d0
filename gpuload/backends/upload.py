"""Small arrays to the device, without waiting for it.

A copy from pageable memory makes the host wait for all that was issued before it on the stream, and a stage uploads
some dozens of small arrays for each batch. So they go through torch's cache of page-locked memory, which knows the
stream that reads it and keeps the memory until then.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["upload"]


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on the CPU a view of it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
