"""Images that are not uint8 in the reference: their weights, and resampling one image on the CPU.

Weights are Pillow's, divided by their sum, in float32. Products and sums are rounded one after the other, along the
rows, then along the columns; results of uint16 become levels once, at the end. `gpuload.stage.reference.gather` does
the same to batches, with the same bits. Taps of no weight are left out, so a NaN reaches as far as the filter does.
Nothing is kept from call to call.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.finish import TOPS
from gpuload.transforms.program.windows import filter_weights

__all__ = ["exact", "image_on_grid", "on_grid", "resampled"]


def exact(weights: np.ndarray) -> np.ndarray:
    """Weights in fixed point (…, taps) as float32 numbers whose sum is 1."""
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def resampled(
    image: np.ndarray,
    corner: tuple[int, ...],
    box_hw: tuple[int, ...],
    size_hw: tuple[int, ...],
    window: tuple[int, ...],
    interpolation: str,
) -> np.ndarray:
    """A window of a resized box, H×W×C; arguments as for `gpuload.stage.reference.resample.Resampler.window`."""
    dtype = image.dtype
    for axis in (1, 0):
        start, count, length = window[axis], window[axis + 2], image.shape[axis]
        if box_hw[axis] == size_hw[axis]:
            image = image.take(range(start - corner[axis], start - corner[axis] + count), axis)
            continue
        lengths = (np.array([number]) for number in (box_hw[axis], size_hw[axis], start))
        firsts, weights = filter_weights(*lengths, count, interpolation)
        shape = (count, 1, 1) if axis == 0 else (count, 1)
        total = np.float32(0)
        for tap, weight in enumerate(exact(weights[0]).T):
            counts = weight.reshape(shape) != 0
            levels = image.take((firsts[0] - corner[axis] + tap).clip(0, length - 1), axis)
            sums = levels * weight.reshape(shape) + total
            total = sums if counts.all() else np.where(counts, sums, total)
        image = np.asarray(total)
    return image_on_grid(image, dtype)


def image_on_grid(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers as levels of a dtype: rounded and clamped, if these are whole numbers."""
    top = TOPS[dtype.name]
    return numbers.astype(dtype, copy=False) if top is None else np.rint(numbers).clip(0, top).astype(dtype)


def on_grid(numbers: torch.Tensor, top: int | None) -> torch.Tensor:
    """The same for a tensor, which stays float32; `top` is the highest level, see `gpuload.stage.finish.TOPS`."""
    return numbers if top is None else numbers.round().clamp_(0, top)
