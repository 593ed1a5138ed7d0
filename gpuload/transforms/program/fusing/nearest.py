"""Which pixels a projective map shows if the nearest ones are taken, as Pillow finds them; on the host, in float64."""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["nearest_ways", "scaled_pixels"]

FIXED_LIMIT: Final = 32768.0  # for coordinates beyond it fixed point is not used


def nearest_ways(coefficients: np.ndarray, ends_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For which maps, float64 (N, 8), nearest pixels are found by adding up steps, and for which in fixed point, bool
    (N,); for the others in float64. `ends_hw`, int64 (N, 2): where the results end."""
    _, b, _, d, _, _, g, h = coefficients.T
    affine = (g == 0) & (h == 0)
    scaling = affine & (b == 0) & (d == 0)
    maps = coefficients[:, :6].reshape(-1, 2, 3, 1)
    corners_hw = np.zeros((len(maps), 2, 1, 2))  # along each axis, the first and the last
    corners_hw[:, :, 0, 1] = ends_hw
    across, down = maps[:, :, 0] * corners_hw[:, 1], maps[:, :, 1] * corners_hw[:, 0]
    shown = across[:, :, None] + down[..., None] + maps[:, :, 2, None]  # by all four corners
    return scaling, affine & ~scaling & (abs(shown) < FIXED_LIMIT).all(axis=(1, 2, 3))


def scaled_pixels(
    coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest pixels of maps that only scale and shift: rows int64 (N, H') and columns (N, W'); -1 before the
    image, and any number after it."""
    a, _, c, _, e, f, _, _ = coefficients.T
    found = []
    for step, first, corner, count in ((e, f, corners[:, 0], size_hw[0]), (a, c, corners[:, 1], size_hw[1])):
        # Sums always begin at the first pixel, as their rounding is part of the result; a window takes its own.
        steps = np.repeat(step[:, None], int(corner.max()) + count, axis=1)
        steps[:, 0] = first + step * 0.5
        sums = np.take_along_axis(np.add.accumulate(steps, axis=1), corner[:, None] + np.arange(count), axis=1)
        found.append(np.where(sums < 0, -1, np.minimum(sums, 2.0**31)).astype(np.int64))
    return found[0], found[1]
