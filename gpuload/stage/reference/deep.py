"""Resampling one image on the CPU where torch has no kernel for it: images that are not uint8, and uint8 by lanczos and
plain filters.

For uint8 it is Pillow's fixed point: along the rows, rounded to levels, then along the columns; with plain filters
whole numbers in between that may lie beyond 0 … 255, since torch clips only at the end. Other images have these weights
divided by their sum, in float32. Products and sums are rounded one after the other; results of uint16 become levels
once, at the end. Taps of no weight are left out, so a NaN reaches as far as the filter does.
`gpuload.stage.reference.gather` does the same to batches, with the same bits.

Nothing is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gpuload.stage.finish import TOPS
from gpuload.transforms.program.windows import PLAIN, PRECISION_BITS, filter_weights

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
    dtype, plain = image.dtype, interpolation in PLAIN.values()
    for axis in (1, 0):
        start, count, length = window[axis], window[axis + 2], image.shape[axis]
        if box_hw[axis] == size_hw[axis]:
            image = image.take(range(start - corner[axis], start - corner[axis] + count), axis)
            continue
        lengths = (np.array([number]) for number in (box_hw[axis], size_hw[axis], start))
        firsts, weights = filter_weights(*lengths, count, interpolation)
        places = (firsts[0] - corner[axis] + np.arange(weights.shape[2])[:, None]).clip(0, length - 1)
        taps = (image.take(place, axis) for place in places)
        shape = (-1, count, 1, 1) if axis == 0 else (-1, count, 1)
        if dtype != np.uint8:
            image = _float_sum(taps, exact(weights[0]).T.reshape(shape))
            continue
        image = _whole_sum(taps, weights[0].T.reshape(shape))
        if not plain:
            image = image_on_grid(image, dtype)
    return image_on_grid(image, dtype)


def _float_sum(taps: Iterator[np.ndarray], weights: np.ndarray) -> np.ndarray:
    total = np.float32(0)
    for levels, weight in zip(taps, weights, strict=True):
        counts = weight != 0
        sums = levels * weight + total
        total = sums if counts.all() else np.where(counts, sums, total)
    return np.asarray(total)


def _whole_sum(taps: Iterator[np.ndarray], weights: np.ndarray) -> np.ndarray:
    total = np.int32(1 << (PRECISION_BITS - 1))
    for levels, weight in zip(taps, weights, strict=True):
        total = total + levels * weight
    return np.asarray(total) >> PRECISION_BITS


def image_on_grid(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers as levels of a dtype: rounded and clamped, if these are whole numbers."""
    top = TOPS[dtype.name]
    if top is None or numbers.dtype == dtype:
        return numbers.astype(dtype, copy=False)
    return (numbers if numbers.dtype.kind == "i" else np.rint(numbers)).clip(0, top).astype(dtype)


def on_grid(numbers: torch.Tensor, top: int | None) -> torch.Tensor:
    """The same for a tensor, which stays float32; `top` is the highest level, see `gpuload.stage.finish.TOPS`."""
    return numbers if top is None else numbers.round().clamp_(0, top)
