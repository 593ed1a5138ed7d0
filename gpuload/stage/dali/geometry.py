"""What moves pixels, by DALI's operators: crops and padding, resampling, affine maps.

**Resampling** is DALI's with antialiasing, whose filters are Pillow's (triangular; cubic with a = -½), but for two
things. Where a filter reaches beyond the image, DALI repeats the last pixel, and Pillow leaves out what is beyond: up
to 25 levels at the borders. So the image is laid into zeros, and the result divided by the share of the weights that
fell on the image, which takes 0.8 ms more for a crop of 500×375 to 224. And DALI keeps floats between the columns and
the rows, where Pillow rounds to levels and cuts off what bicubic overshoots: up to 23 levels on photographs. So bicubic
goes in two passes, along the rows first as the reference does. What is left is a level, rarely two.

**Warps** fill what lies outside the image with one number and blend with it at the border, where Pillow goes on with
the last pixel up to the border and fills behind it. So the image is warped with its last pixels repeated, and beside it
an image of ones by the nearest pixel, which says what is inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpuload.stage.dali.color import to_levels
from gpuload.stage.dali.engine import ndd, numbers, types
from gpuload.stage.dali.images import Images, grouped
from gpuload.transforms.program.ops import Box, Warp, filter_codes
from gpuload.transforms.program.windows import FILTERS, SUPPORT

__all__ = ["crop", "resize", "warp"]

KERNELS: Final = {
    "nearest": types.INTERP_NN,  # of maps
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
}
GUARD: Final = 1e-3  # what a blend of four equal levels may lose before it is cut off


def crop(images: Images, record: Box, before: np.ndarray, after: np.ndarray) -> Images:
    """Boxes that may reach beyond the image; windows as for `gpuload.stage.backend.Levels`."""
    corners = record.box_tlhw[:, :2] + after[:, :2] - before[:, :2]
    boxes = np.hstack([corners, after[:, 2:]])
    if not corners.any() and np.array_equal(after[:, 2:], before[:, 2:]):
        return images
    if record.padding_mode == "constant":
        return images.cut(boxes, record.fill)
    inside = (corners >= 0).all() and (corners + after[:, 2:] <= before[:, 2:]).all()
    if inside:
        return images.cut(boxes)
    # The border's pixels are repeated by what looks up the nearest pixel of a map that only shifts.
    maps = np.zeros((len(boxes), 2, 3), np.float32)
    maps[:, 0, 0] = maps[:, 1, 1] = 1
    maps[:, :, 2] = corners[:, ::-1]
    return Images(
        ndd.warp_affine(
            images.batch,
            ndd.as_batch(maps),
            size=ndd.as_batch(after[:, 2:].astype(np.float32)),
            interp_type=types.INTERP_NN,
        )
    )


def resize(images: Images, record: Box, before: np.ndarray, after: np.ndarray) -> Images:
    """Windows of resized boxes, each image with its filter."""
    scale = record.box_tlhw[:, 2:] / record.size_hw
    corners = before[:, :2] - record.box_tlhw[:, :2]
    starts = after[:, :2] * scale - corners
    ends = (after[:, :2] + after[:, 2:]) * scale - corners

    def resized(some: Images, rows: np.ndarray, number: int) -> Images:
        return _resized(some, FILTERS[number], starts[rows], ends[rows], before[rows, 2:], after[rows, 2:])

    return grouped(images, filter_codes(record.filters, len(images)), resized)


def _resized(
    images: Images, interpolation: str, starts: np.ndarray, ends: np.ndarray, given_hw: np.ndarray, size_hw: np.ndarray
) -> Images:
    """The parts between starts and ends, in pixels, brought to sizes."""
    batch = images.batch
    if interpolation == "bicubic":
        (top, left), (bottom, right) = starts.T, ends.T
        height, width, zero = given_hw[:, 0], size_hw[:, 1], np.zeros(len(starts))
        narrow = [np.column_stack(pair) for pair in ((zero, left), (height, right), (height, width))]
        batch = _pass(batch, interpolation, *narrow)
        starts, ends = np.column_stack([top, zero]), np.column_stack([bottom, width])
    return Images(_pass(batch, interpolation, starts, ends, size_hw))


def _pass(batch: ndd.Batch, interpolation: str, starts: np.ndarray, ends: np.ndarray, size_hw: np.ndarray) -> ndd.Batch:
    """The same, for images that are zero beyond their borders; what that takes away at the borders is made up for.

    Whether it does is asked of each image by itself, or its bits would depend on the others of its batch.
    """
    images = Images(batch)
    shares = _shares(interpolation, starts, ends, size_hw, images.sizes_hw)
    short = np.array([any((share != 1).any() for share in pair) for pair in shares])

    def sampled(some: Images, rows: np.ndarray, short: bool) -> Images:
        regions = starts[rows], ends[rows], size_hw[rows]
        if short:
            return Images(_made_up(some, interpolation, *regions, [shares[row] for row in rows.tolist()]))
        return Images(_sampled(some.batch, interpolation, *regions))

    return grouped(images, short, sampled).batch


def _made_up(
    images: Images,
    interpolation: str,
    starts: np.ndarray,
    ends: np.ndarray,
    size_hw: np.ndarray,
    shares: Sequence[tuple[np.ndarray, np.ndarray]],
) -> ndd.Batch:
    margin = np.ceil(SUPPORT[interpolation] * np.maximum((ends - starts) / size_hw, 1)).astype(np.int64) + 1
    padded = images.cut(np.hstack([-margin, images.sizes_hw + 2 * margin])).batch
    # Bicubic overshoots, and a level that is cut off could not be made up for.
    dtype = ndd.float32 if interpolation == "bicubic" else None
    found = _sampled(padded, interpolation, starts + margin, ends + margin, size_hw, dtype)
    down = ndd.as_batch([share.astype(np.float32)[:, None, None] for share, _ in shares]).to_device(found.device)
    across = ndd.as_batch([share.astype(np.float32)[None, :, None] for _, share in shares]).to_device(found.device)
    return to_levels(found * down * across)


def _shares(
    interpolation: str, starts: np.ndarray, ends: np.ndarray, size_hw: np.ndarray, lengths_hw: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each image, for the rows and the columns of its result, all weights of the filter over those that lie within
    the image."""
    axes = []
    for axis in (0, 1):
        columns = (part[:, axis].tolist() for part in (starts, ends, size_hw, lengths_hw))
        axes.append([_share(interpolation, *row) for row in zip(*columns, strict=True)])
    return list(zip(*axes, strict=True))


def _sampled(
    batch: ndd.Batch, interpolation: str, starts: np.ndarray, ends: np.ndarray, size_hw: np.ndarray, dtype: Any = None
) -> ndd.Batch:
    start, end, size = (ndd.as_batch(values.astype(np.float32)) for values in (starts, ends, size_hw))
    kernel = KERNELS[interpolation]
    return ndd.resize(batch, roi_start=start, roi_end=end, size=size, interp_type=kernel, antialias=True, dtype=dtype)


def _share(interpolation: str, start: float, end: float, count: int, length: int) -> np.ndarray:
    """The same along one axis."""
    scale = (end - start) / count
    stretch = max(scale, 1.0)
    reach = SUPPORT[interpolation] * stretch
    centres = start + (np.arange(count) + 0.5) * scale
    found = np.ones(count)
    edge = np.flatnonzero((centres < reach) | (centres > length - reach))
    taps = np.floor(centres[edge, None] - reach) + np.arange(math.ceil(2 * reach) + 1)
    weights = _weights(np.abs(taps + 0.5 - centres[edge, None]) / stretch, interpolation)
    found[edge] = weights.sum(axis=1) / np.where((taps >= 0) & (taps < length), weights, 0.0).sum(axis=1)
    return found


def _weights(distance: np.ndarray, interpolation: str) -> np.ndarray:
    """DALI's filters, which are Pillow's."""
    if interpolation == "bilinear":
        return np.maximum(1 - distance, 0)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def warp(images: Images, record: Warp, after: np.ndarray) -> Images:
    """Affine maps; what lies outside is filled. `after` are the windows of the results.

    Raises:
        ValueError: a map is not affine.
    """
    coefficients = np.where(record.warped[:, None], record.coefficients, np.eye(3).ravel()[:8])
    if coefficients[:, 6:].any():
        row = int(coefficients[:, 6:].any(axis=1).argmax())
        raise ValueError(
            f"DALI's warp is affine, but what {record.name} drew for row {row} of the batch has the "
            f"coefficients g, h = {coefficients[row, 6:].tolist()}, which must be 0; use another backend"
        )
    maps = coefficients[:, :6].reshape(-1, 2, 3).copy()
    maps[:, :, 2] += maps[:, :, 0] * after[:, 1, None] + maps[:, :, 1] * after[:, 0, None]
    matrix = ndd.as_batch(maps.astype(np.float32))
    size = ndd.as_batch(after[:, 2:].astype(np.float32))
    kernel = KERNELS[str(record.filters)]
    pixels = images.batch
    warped = ndd.warp_affine(pixels, matrix, size=size, interp_type=kernel, dtype=ndd.float32)
    ones = [np.ones((height, width, 1), np.uint8) for height, width in images.sizes_hw.tolist()]
    there = ndd.as_batch(ones, layout="HWC").to_device(pixels.device)
    inside = ndd.warp_affine(there, matrix, size=size, interp_type=types.INTERP_NN, fill_value=0.0)
    fill = np.array(record.fill, np.float32)
    outside = numbers(np.tile(fill, (len(images), 1, 1, 1)), pixels)
    # Pillow cuts filtered levels off behind the decimal point.
    cut = GUARD - 0.5 if record.filters == "bilinear" else 0.0
    return Images(to_levels((warped + cut - outside) * inside + outside))
