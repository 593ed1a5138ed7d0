"""Resampling of one image at a time on the CPU.

uint8 images go through torch's antialiasing kernels (AVX2; Pillow's algorithm in 16-bit fixed point, within one level
of Pillow's result), which take a third of Pillow's time. Like Pillow up to version 12, they process rows first; newer
versions of Pillow begin with the cheaper axis, which gives a different result if bicubic overshoots 0 … 255 between the
passes. The kernels always start at the image's first pixel. To compute part of a result (the window of a crop after a
resize), the source is placed at its position in the complete image, next to pixels that do not affect the window. The
result is computed up to the window's end with an explicit scale, and is bit-identical to that part of the complete
result.

`_resample` covers the cases for which torch has no kernel: images that are not uint8, and uint8 images with lanczos
or with plain filters (`PLAIN`: bilinear and bicubic without antialiasing). For uint8 images, it uses Pillow's fixed
point along the rows, rounds to uint8, and continues along the columns. Plain filters instead keep intermediate
integers outside 0 … 255, because torch clips only at the end. For all other dtypes, the weights are divided by their
sum, in float32. Products and sums are rounded separately, and uint16 results are rounded once, at the end.
Taps with zero weight are skipped, so a NaN spreads exactly as far as the filter reaches.
`gpuload.stage.reference.gather` processes batches with bit-identical results.

This module runs in the stage's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.finish import MAX_LEVELS
from gpuload.stage.reference.canvas import view_as_batch
from gpuload.transforms.program.windows import PLAIN, PRECISION_BITS, filter_weights, nearest_indices

__all__ = ["normalize_weights", "resize_window", "round_to_dtype", "round_to_levels"]

# The functions behind torch.nn.functional.interpolate(antialias=True); a call through torch.ops takes 12 µs longer.
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "bilinear": torch._C._nn._upsample_bilinear2d_aa,  # pyright: ignore[reportAttributeAccessIssue]
    "bicubic": torch._C._nn._upsample_bicubic2d_aa,  # pyright: ignore[reportAttributeAccessIssue]
}


def resize_window(
    image: np.ndarray,
    corner: Sequence[int],
    box_hw: Sequence[int],
    size_hw: Sequence[int],
    window: Sequence[int],
    interpolation: str,
) -> np.ndarray:
    """Return a window of a resized box.

    Args:
        image: an h×w×C part of the box.
        corner: the top and left of this part in the box.
        box_hw, size_hw: the size of the complete box before and after resizing.
        window: the requested part of the result: top, left, height, width.
        interpolation: the filter.

    Returns:
        An H×W×C array of the image's dtype, which can be a view of the image.
    """
    (top, left), (height, width) = corner, window[2:]
    if box_hw == size_hw:
        first_row, first_column = window[0] - top, window[1] - left
        return image[first_row : first_row + height, first_column : first_column + width]
    if interpolation == "nearest":
        rows = nearest_indices(box_hw[0], size_hw[0], window[0], height) - top
        columns = nearest_indices(box_hw[1], size_hw[1], window[1], width) - left
        return image[rows].take(columns, axis=1)  # indexing both axes together took five times as long
    if interpolation not in KERNELS or image.dtype != np.uint8:
        return _resample(image, corner, box_hw, size_hw, window, interpolation)
    if window == [0, 0, *size_hw]:
        return KERNELS[interpolation](view_as_batch(image), size_hw, False, None, None).numpy()[0].transpose(1, 2, 0)
    ends, source_hw = [], []
    for axis in (0, 1):
        end, source_end = window[axis] + window[axis + 2], corner[axis] + image.shape[axis]
        if size_hw[axis] == box_hw[axis]:
            source_end = end  # equal lengths make the kernel skip this axis, which is not resized
        elif end == source_end:
            # With equal lengths the kernel would skip this axis. There is another pixel, because the window does not
            # cover the entire axis.
            end += 1
        ends.append(end)
        source_hw.append(source_end)
    source = np.empty((*source_hw, image.shape[2]), np.uint8)
    source[top:, left:] = image[: source_hw[0] - top, : source_hw[1] - left]
    scales = (size_hw[0] / box_hw[0], size_hw[1] / box_hw[1])
    result = KERNELS[interpolation](view_as_batch(source), ends, False, *scales).numpy()[0].transpose(1, 2, 0)
    return result[window[0] :, window[1] :][:height, :width]


def normalize_weights(weights: np.ndarray) -> np.ndarray:
    """Convert fixed-point weights (…, taps) to float32 weights whose sum is 1."""
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def _resample(
    image: np.ndarray,
    corner: Sequence[int],
    box_hw: Sequence[int],
    size_hw: Sequence[int],
    window: Sequence[int],
    interpolation: str,
) -> np.ndarray:
    """Return a window of a resized box, H×W×C; the arguments are those of `resize_window`."""
    dtype, is_plain = image.dtype, interpolation in PLAIN.values()
    for axis in (1, 0):
        start, count, length = window[axis], window[axis + 2], image.shape[axis]
        if box_hw[axis] == size_hw[axis]:
            image = image.take(range(start - corner[axis], start - corner[axis] + count), axis)
            continue
        filter_arguments = (np.array([number]) for number in (box_hw[axis], size_hw[axis], start))
        firsts, weights = filter_weights(*filter_arguments, count, interpolation)
        tap_indices = (firsts[0] - corner[axis] + np.arange(weights.shape[2])[:, None]).clip(0, length - 1)
        taps = (image.take(indices, axis) for indices in tap_indices)
        shape = (-1, count, 1, 1) if axis == 0 else (-1, count, 1)
        if dtype != np.uint8:
            image = _float_sum(taps, normalize_weights(weights[0]).T.reshape(shape))
            continue
        image = _fixed_point_sum(taps, weights[0].T.reshape(shape))
        if not is_plain:
            image = round_to_dtype(image, dtype)
    return round_to_dtype(image, dtype)


def _float_sum(taps: Iterator[np.ndarray], weights: np.ndarray) -> np.ndarray:
    total = np.float32(0)
    for tap, weight in zip(taps, weights, strict=True):
        is_nonzero = weight != 0
        sums = tap * weight + total
        total = sums if is_nonzero.all() else np.where(is_nonzero, sums, total)
    return np.asarray(total)


def _fixed_point_sum(taps: Iterator[np.ndarray], weights: np.ndarray) -> np.ndarray:
    total = np.int32(1 << (PRECISION_BITS - 1))
    for tap, weight in zip(taps, weights, strict=True):
        total = total + tap * weight
    return np.asarray(total) >> PRECISION_BITS


def round_to_dtype(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert numbers to levels of a dtype; for integer dtypes, round and clamp them."""
    max_level = MAX_LEVELS[dtype.name]
    if max_level is None or numbers.dtype == dtype:
        return numbers.astype(dtype, copy=False)
    return (numbers if numbers.dtype.kind == "i" else np.rint(numbers)).clip(0, max_level).astype(dtype)


def round_to_levels(numbers: torch.Tensor, max_level: int | None) -> torch.Tensor:
    """Round a float32 tensor to levels and keep its dtype. `max_level` is an entry of
    `gpuload.stage.finish.MAX_LEVELS`; if it is None, or for a uint8 tensor, the tensor is returned unchanged."""
    return numbers if max_level is None or numbers.dtype == torch.uint8 else numbers.round().clamp_(0, max_level)
