"""What moves pixels, by DALI's operators: crops and padding, resampling, affine maps.

**Resampling** is DALI's with antialiasing, whose filters are Pillow's (triangular; cubic with a = -½). Two things
differ. DALI repeats the last pixel where the filter reaches beyond the image, and Pillow leaves out what is beyond: so
the outermost pixels of a result may differ by some levels (25 were seen; all others by one). And DALI keeps floats
between the columns and the rows, where Pillow rounds to levels and cuts off what bicubic overshoots (up to 23 levels on
photographs): so bicubic goes in two passes, along the rows first as the reference does, and comes within two levels.

**Warps** fill what lies outside the image with one number and blend with it at the border, where Pillow goes on with
the last pixel up to the border and fills behind it. So the image is warped with its last pixels repeated, and beside it
an image of ones by the nearest pixel, which says what is inside.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpuload.backends.dali.color import to_levels
from gpuload.backends.dali.engine import ndd, numbers, types
from gpuload.backends.dali.images import Images, merged
from gpuload.transforms.matrices import IDENTITY
from gpuload.transforms.params import FILTERS, Box, Warp

__all__ = ["crop", "resize", "warp"]

KERNELS: Final = {
    "nearest": types.INTERP_NN,
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
}
GUARD: Final = 1e-3  # what a blend of four equal levels may lose before it is cut off


def crop(images: Images, transform: Any, params: Box, before: np.ndarray, after: np.ndarray) -> Images:
    """Boxes that may reach beyond the image; windows as for `gpuload.backends.backend.Levels`."""
    corners = params.box_tlhw[:, :2] + after[:, :2] - before[:, :2]
    boxes = np.hstack([corners, after[:, 2:]])
    if not corners.any() and np.array_equal(after[:, 2:], before[:, 2:]):
        return images
    if transform.padding_mode == "constant":
        return images.cut(boxes, transform.outside(masks=False))
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


def resize(images: Images, transform: Any, params: Box, before: np.ndarray, after: np.ndarray) -> Images:
    """Windows of resized boxes, each image with its filter."""
    scale = params.box_tlhw[:, 2:] / params.size_hw
    corners = before[:, :2] - params.box_tlhw[:, :2]
    starts = after[:, :2] * scale - corners
    ends = (after[:, :2] + after[:, 2:]) * scale - corners
    filters = params.filters
    if filters is None:
        filters = np.full(len(images), FILTERS.index(transform.interpolation))
    pixels, parts = Images(images.batch), []
    for number in np.unique(filters).tolist():
        rows = np.flatnonzero(filters == number)
        some = pixels if len(rows) == len(filters) else pixels.take(rows)
        regions = [values[rows] for values in (starts, ends, before[:, 2:], after[:, 2:])]
        parts.append((rows, _resized(some, FILTERS[number], *regions)))
    return merged(parts)


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
    start, end, size = (ndd.as_batch(values.astype(np.float32)) for values in (starts, ends, size_hw))
    kernel = KERNELS[interpolation]
    return ndd.resize(batch, roi_start=start, roi_end=end, size=size, interp_type=kernel, antialias=True)


def warp(images: Images, transform: Any, params: Warp, after: np.ndarray) -> Images:
    """Affine maps; what lies outside is filled. `after` are the windows of the results."""
    coefficients = np.where(params.warped[:, None], params.coefficients, IDENTITY)
    maps = coefficients[:, :6].reshape(-1, 2, 3).copy()
    maps[:, :, 2] += maps[:, :, 0] * after[:, 1, None] + maps[:, :, 1] * after[:, 0, None]
    matrix = ndd.as_batch(maps.astype(np.float32))
    size = ndd.as_batch(after[:, 2:].astype(np.float32))
    kernel = KERNELS[transform.interpolation]
    pixels = images.batch
    warped = ndd.warp_affine(pixels, matrix, size=size, interp_type=kernel, dtype=ndd.float32)
    ones = [np.ones((height, width, 1), np.uint8) for height, width in images.sizes_hw.tolist()]
    there = ndd.as_batch(ones, layout="HWC").to_device(pixels.device)
    inside = ndd.warp_affine(there, matrix, size=size, interp_type=types.INTERP_NN, fill_value=0.0)
    fill = np.array(transform.outside(masks=False), np.float32)
    outside = numbers(np.tile(fill, (len(images), 1, 1, 1)), pixels)
    # Pillow cuts filtered levels off behind the decimal point.
    cut = GUARD - 0.5 if transform.interpolation == "bilinear" else 0.0
    return Images(to_levels((warped + cut - outside) * inside + outside))
