"""Resampling of one image at a time on the CPU.

uint8 images go through torch's antialiasing kernels (AVX2; Pillow's algorithm in 16-bit fixed point, within a level of
Pillow's), which cost a third of Pillow's time. Like Pillow up to version 12 they go along the rows first; newer
versions begin with the cheaper axis, which differs where bicubic overshoots 0 … 255 in between. The kernels always
start at the image's first pixel. So for a part of a result (the window of a crop after a resize) the source is put
where it is in the whole image, next to pixels that nothing depends on, and the result is computed up to the window's
end with the scale given: it equals that part of the whole result to the last bit.

Where torch has no kernel (images that are not uint8, and uint8 by lanczos and plain filters), `_resampled` does it. For
uint8 it is Pillow's fixed point: along the rows, rounded to levels, then along the columns; with plain filters whole
numbers in between that may lie beyond 0 … 255, since torch clips only at the end. Other images have these weights
divided by their sum, in float32. Products and sums are rounded one after the other; results of uint16 become levels
once, at the end. Taps of no weight are left out, so a NaN reaches as far as the filter does.
`gpuload.stage.reference.gather` does the same to batches, with the same bits.

Used by the process that runs the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.finish import TOPS
from gpuload.stage.reference.canvas import planes
from gpuload.transforms.program.windows import PLAIN, PRECISION_BITS, filter_weights, nearest_indices

__all__ = ["exact", "image_on_grid", "on_grid", "resized"]

# As called by torch.nn.functional.interpolate(antialias=True); through torch.ops a call takes 12 µs longer.
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "bilinear": torch._C._nn._upsample_bilinear2d_aa,  # pyright: ignore[reportAttributeAccessIssue]
    "bicubic": torch._C._nn._upsample_bicubic2d_aa,  # pyright: ignore[reportAttributeAccessIssue]
}


def resized(
    image: np.ndarray,
    corner: Sequence[int],
    box_hw: Sequence[int],
    size_hw: Sequence[int],
    window: Sequence[int],
    interpolation: str,
) -> np.ndarray:
    """A window of a resized box.

    Args:
        image: h×w×C, a part of the box.
        corner: its top and left in the box.
        box_hw, size_hw: the size of the whole box before and after.
        window: the part of the result that is wanted.
        interpolation: the filter.

    Returns:
        H×W×C, of the image's dtype; it may be a view of the image.
    """
    (top, left), (height, width) = corner, window[2:]
    if box_hw == size_hw:
        start, first = window[0] - top, window[1] - left
        return image[start : start + height, first : first + width]
    if interpolation == "nearest":
        rows = nearest_indices(box_hw[0], size_hw[0], window[0], height) - top
        columns = nearest_indices(box_hw[1], size_hw[1], window[1], width) - left
        return image[rows].take(columns, axis=1)  # one index for both took five times as long
    if interpolation not in KERNELS or image.dtype != np.uint8:
        return _resampled(image, corner, box_hw, size_hw, window, interpolation)
    if window == [0, 0, *size_hw]:
        return KERNELS[interpolation](planes(image), size_hw, False, None, None).numpy()[0].transpose(1, 2, 0)
    ends, source_hw = [], []
    for axis in (0, 1):
        end, there = window[axis] + window[axis + 2], corner[axis] + image.shape[axis]
        if size_hw[axis] == box_hw[axis]:
            there = end  # equal lengths tell the kernel to leave out an axis that is not resized
        elif end == there:
            end += 1  # so here they must differ; there is one more pixel, or this would be the whole axis
        ends.append(end)
        source_hw.append(there)
    source = np.empty((*source_hw, image.shape[2]), np.uint8)
    source[top:, left:] = image[: source_hw[0] - top, : source_hw[1] - left]
    scales = (size_hw[0] / box_hw[0], size_hw[1] / box_hw[1])
    result = KERNELS[interpolation](planes(source), ends, False, *scales).numpy()[0].transpose(1, 2, 0)
    return result[window[0] :, window[1] :][:height, :width]


def exact(weights: np.ndarray) -> np.ndarray:
    """Weights in fixed point (…, taps) as float32 numbers whose sum is 1."""
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def _resampled(
    image: np.ndarray,
    corner: Sequence[int],
    box_hw: Sequence[int],
    size_hw: Sequence[int],
    window: Sequence[int],
    interpolation: str,
) -> np.ndarray:
    """A window of a resized box, H×W×C; arguments as for `resized`."""
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
    """Round a tensor to the grid: float32, which stays that, or uint8; `top` is the highest level, see
    `gpuload.stage.finish.TOPS`."""
    return numbers if top is None or numbers.dtype == torch.uint8 else numbers.round().clamp_(0, top)
