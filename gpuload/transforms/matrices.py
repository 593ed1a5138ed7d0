"""Coefficients of affine and projective maps, for many images at once, as in `program.ops.Warp`.

A map is given backwards: from points of the result to points of the image. Angles are in degrees; a positive one turns
clockwise in an affine map and counterclockwise in a rotation, as in torchvision. Pure functions.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["IDENTITY", "affine_coefficients", "perspective_coefficients", "rotation_coefficients"]

IDENTITY: Final = np.array([1.0, 0, 0, 0, 1, 0, 0, 0])


def affine_coefficients(
    angle_degrees: np.ndarray | float,
    translate_xy: np.ndarray,
    scale: np.ndarray | float,
    shear_xy_degrees: np.ndarray,
    center_xy: np.ndarray | None,
    size_hw: np.ndarray,
) -> np.ndarray:
    """The map that turns and shears around a centre, scales, then moves.

    The inverse of T · C · R(angle) · S(scale) · SHy(shear y) · SHx(shear x) · C⁻¹, where C brings the centre to 0.

    Args:
        angle_degrees: (B,) or one for all.
        translate_xy: (B, 2), in pixels.
        scale: (B,) or one for all, greater than 0.
        shear_xy_degrees: (B, 2).
        center_xy: (B, 2) or (2,), from the top left corner; None for the middle of each image.
        size_hw: int64 (B, 2).

    Returns:
        float64 (B, 8).
    """
    center = size_hw[:, ::-1] * 0.5 if center_xy is None else np.broadcast_to(center_xy, size_hw.shape)
    angle = np.radians(angle_degrees)
    # Contiguous, since numpy's sines of strided arrays may differ from others in the last bit.
    shear_x, shear_y = np.ascontiguousarray(np.radians(np.broadcast_to(shear_xy_degrees, size_hw.shape)).T)
    # The 2×2 part without its scale has a determinant of 1, so its inverse needs no division.
    cosine, sine = np.cos(angle - shear_y) / np.cos(shear_y), np.sin(angle - shear_y) / np.cos(shear_y)
    tangent = np.tan(shear_x)
    found = np.zeros((len(size_hw), 8))
    found[:, 0] = (np.cos(angle) - sine * tangent) / scale
    found[:, 1] = (np.sin(angle) + cosine * tangent) / scale
    found[:, 3] = -sine / scale
    found[:, 4] = cosine / scale
    back = center + translate_xy
    found[:, 2] = center[:, 0] - found[:, 0] * back[:, 0] - found[:, 1] * back[:, 1]
    found[:, 5] = center[:, 1] - found[:, 3] * back[:, 0] - found[:, 4] * back[:, 1]
    return found


def rotation_coefficients(
    angle_degrees: np.ndarray, center_xy: np.ndarray | None, size_hw: np.ndarray, *, expand: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The map that turns counterclockwise around a centre, as Pillow's `Image.rotate`.

    Args:
        angle_degrees: (B,).
        center_xy: (2,) or (B, 2), from the top left corner; None for the middle of each image.
        size_hw: int64 (B, 2).
        expand: make the result as large as the turned image.

    Returns:
        (coefficients float64 (B, 8), sizes of the results int64 (B, 2)).
    """
    sizes = size_hw[:, ::-1].astype(np.float64)  # width, height
    center = sizes / 2 if center_xy is None else np.broadcast_to(np.asarray(center_xy, np.float64), sizes.shape)
    angle = np.radians(np.mod(angle_degrees, 360.0))
    # 15 places, so that a right angle moves pixels to pixels.
    cosine, sine = np.cos(angle).round(15), np.sin(angle).round(15)
    found = np.zeros((len(size_hw), 8))
    found[:, 0], found[:, 1], found[:, 3], found[:, 4] = cosine, -sine, sine, cosine
    shift = center - _turned(center, found)
    results = size_hw
    if expand:
        corners = np.stack([_turned(sizes * corner, found) for corner in ((0, 0), (1, 0), (1, 1), (0, 1))]) + shift
        grown = np.ceil(corners.max(axis=0)) - np.floor(corners.min(axis=0))
        if center_xy is None:  # Pillow only swaps the sides at a right angle; half pixels would round up at both ends
            grown = np.where((cosine == 0)[:, None], sizes[:, ::-1], grown)
        shift = shift - _turned((grown - sizes) / 2, found)
        results = grown[:, ::-1].astype(np.int64)
    found[:, 2], found[:, 5] = shift.T
    return found, results


def _turned(points_xy: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Points (B, 2) moved by the linear part of a map."""
    x, y = points_xy.T
    a, b, _, d, e = coefficients.T[:5]
    found = np.empty_like(points_xy)
    found[:, 0], found[:, 1] = a * x + b * y, d * x + e * y
    return found


def perspective_coefficients(size_hw: np.ndarray, corners_xy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The map that brings the four corner pixels of an image elsewhere.

    Args:
        size_hw: int64 (B, 2).
        corners_xy: (B, 4, 2), where the corners go: top left, top right, bottom right, bottom left.

    Returns:
        (coefficients float64 (B, 8), whether there is such a map, bool (B,)): there is none if three of the corners,
        before or after, lie on one line, or if the result's first pixel would show a point at infinity.
    """
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners_xy.astype(np.float64).transpose(1, 2, 0)
    bottom, right = (size_hw - 1).astype(np.float64).T
    # From the unit square to the corners (Heckbert 1989), times a common factor: whole numbers, so 0 is exact.
    i = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    skew_x, skew_y = x0 - x1 + x2 - x3, y0 - y1 + y2 - y3
    g = skew_x * (y3 - y2) - (x3 - x2) * skew_y
    h = (x1 - x2) * skew_y - skew_x * (y1 - y2)
    a, b, c = (x1 - x0) * i + g * x1, (x3 - x0) * i + h * x3, x0 * i
    d, e, f = (y1 - y0) * i + g * y1, (y3 - y0) * i + h * y3, y0 * i
    # Its inverse, from the image instead of the square.
    found = np.stack(
        [
            (e * i - f * h) * right,
            (c * h - b * i) * right,
            (b * f - c * e) * right,
            (f * g - d * i) * bottom,
            (a * i - c * g) * bottom,
            (c * d - a * f) * bottom,
            d * h - e * g,
            b * g - a * h,
        ],
        axis=1,
    )
    last = a * e - b * d
    turn_0 = (x1 - x0) * (y3 - y0) - (x3 - x0) * (y1 - y0)
    turn_1 = (x1 - x0) * (y2 - y1) - (x2 - x1) * (y1 - y0)
    turn_3 = (x3 - x2) * (y0 - y3) - (x0 - x3) * (y3 - y2)
    exists = (i != 0) & (turn_0 != 0) & (turn_1 != 0) & (turn_3 != 0) & (last != 0) & (right > 0) & (bottom > 0)
    found /= np.where(exists, last, 1.0)[:, None]
    found[~exists] = IDENTITY
    return found, exists
