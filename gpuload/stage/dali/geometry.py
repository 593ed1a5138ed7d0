"""Crops and padding, resampling and affine maps by DALI's operators.

**Resampling** is DALI's with antialiasing. Its filters are Pillow's (triangular; cubic with a = -½), with two
differences. Where a filter reaches beyond the image, DALI repeats the last pixel and Pillow leaves it out: up to 25
levels at the borders. So the image is padded with zeros, and the result divided by the share of the weights that fell
on the image, which takes 0.8 ms more for a crop of 500×375 to 224. And DALI keeps floats between columns and rows,
where Pillow rounds to levels and clamps what bicubic overshoots: up to 23 levels on photographs. So bicubic goes in two
passes, along the rows first as in the reference. A difference of a level is left, rarely two.

**Warps** fill the outside of the image with one number and blend with it at the border, where Pillow repeats the last
pixel up to the border and fills beyond it. So the image is warped with its last pixels repeated, and an image of ones
by the nearest pixel, which says what is inside.
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
    "nearest": types.INTERP_NN,  # of warps only
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
}
GUARD: Final = 1e-3  # more than a blend of four equal levels loses before it is truncated


def crop(images: Images, record: Box, before: np.ndarray, after: np.ndarray) -> Images:
    """Boxes that may reach beyond the image; windows as for `gpuload.stage.backend.Levels`."""
    corners = record.box_tlhw[:, :2] + after[:, :2] - before[:, :2]
    boxes = np.hstack([corners, after[:, 2:]])
    if not corners.any() and np.array_equal(after[:, 2:], before[:, 2:]):
        return images
    if record.padding_mode == "constant":
        return images.cut(boxes, record.fill)
    if (corners >= 0).all() and (corners + after[:, 2:] <= before[:, 2:]).all():
        return images.cut(boxes)
    # A shift by the nearest pixel repeats the border's pixels.
    maps = np.zeros((len(boxes), 2, 3), np.float32)
    maps[:, 0, 0] = maps[:, 1, 1] = 1
    maps[:, :, 2] = corners[:, ::-1]
    size = ndd.as_batch(after[:, 2:].astype(np.float32))
    return Images(ndd.warp_affine(images.batch, ndd.as_batch(maps), size=size, interp_type=types.INTERP_NN))


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
    """The parts of images between starts and ends, in pixels, resized."""
    batch = images.batch
    if interpolation == "bicubic":
        (top, left), (bottom, right) = starts.T, ends.T
        height, width, zero = given_hw[:, 0], size_hw[:, 1], np.zeros(len(starts))
        narrow = [np.column_stack(pair) for pair in ((zero, left), (height, right), (height, width))]
        batch = _pass(batch, interpolation, *narrow)
        starts, ends = np.column_stack([top, zero]), np.column_stack([bottom, width])
    return Images(_pass(batch, interpolation, starts, ends, size_hw))


def _pass(batch: ndd.Batch, interpolation: str, starts: np.ndarray, ends: np.ndarray, size_hw: np.ndarray) -> ndd.Batch:
    """The same in one pass. Results whose filter reaches beyond the image are corrected, and only in images
    that have any, so that the bits of an image do not depend on its batch."""
    images = Images(batch)
    shares = _shares(interpolation, starts, ends, size_hw, images.sizes_hw)
    short = np.array([any((share != 1).any() for share in pair) for pair in shares])

    def sampled(some: Images, rows: np.ndarray, short: bool) -> Images:
        regions = starts[rows], ends[rows], size_hw[rows]
        if short:
            return Images(_corrected(some, interpolation, *regions, [shares[row] for row in rows.tolist()]))
        return Images(_sampled(some.batch, interpolation, *regions))

    return grouped(images, short, sampled).batch


def _corrected(
    images: Images,
    interpolation: str,
    starts: np.ndarray,
    ends: np.ndarray,
    size_hw: np.ndarray,
    shares: Sequence[tuple[np.ndarray, np.ndarray]],
) -> ndd.Batch:
    margin = np.ceil(SUPPORT[interpolation] * np.maximum((ends - starts) / size_hw, 1)).astype(np.int64) + 1
    padded = images.cut(np.hstack([-margin, images.sizes_hw + 2 * margin])).batch
    # Bicubic overshoots, and a clamped level could not be corrected.
    dtype = ndd.float32 if interpolation == "bicubic" else None
    found = _sampled(padded, interpolation, starts + margin, ends + margin, size_hw, dtype)
    down = ndd.as_batch([share.astype(np.float32)[:, None, None] for share, _ in shares]).to_device(found.device)
    across = ndd.as_batch([share.astype(np.float32)[None, :, None] for _, share in shares]).to_device(found.device)
    return to_levels(found * down * across)


def _shares(
    interpolation: str, starts: np.ndarray, ends: np.ndarray, size_hw: np.ndarray, lengths_hw: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each image, for the rows and the columns of its result, the filter's weights over those within the image."""
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
    """Affine maps; the outside is filled. `after` are the windows of the results. ValueError if a map is not affine."""
    coefficients = np.where(record.warped[:, None], record.coefficients, np.eye(3).ravel()[:8])
    if coefficients[:, 6:].any():
        row = int(coefficients[:, 6:].any(axis=1).argmax())
        raise ValueError(
            f"DALI's warp is affine, but {record.name} drew the coefficients g, h = "
            f"{coefficients[row, 6:].tolist()} for row {row} of the batch, which must be 0; use another backend"
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
    outside = numbers(np.tile(np.array(record.fill, np.float32), (len(images), 1, 1, 1)), pixels)
    # Pillow truncates filtered levels.
    cut = GUARD - 0.5 if record.filters == "bilinear" else 0.0
    return Images(to_levels((warped + cut - outside) * inside + outside))
