"""Transforms that rotate, shear and tilt an image, each drawn as a `Warp`, and functions that compute the coefficients.

Names, arguments, defaults and distributions are torchvision's. Maps are those that torchvision uses for Pillow images,
as defined by Pillow's `Image.rotate` and `Image.transform`. A pixel of a result can come from anywhere in the image, so
images are decoded completely.

Maps are inverse: they map points of the result to points of the image. Angles are in degrees. As in torchvision, a
positive angle rotates clockwise in `RandomAffine` and counterclockwise in `RandomRotation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.checks import argument, finite_number, flag, interval, is_sequence, pair, probability
from gpuload.transforms.arguments import fill_values, interpolation_name
from gpuload.transforms.base import Transform, Uniforms, declaration, scale_to_range
from gpuload.transforms.program.ops import Record, Warp

__all__ = [
    "IDENTITY",
    "RandomAffine",
    "RandomPerspective",
    "RandomRotation",
    "affine_coefficients",
    "perspective_coefficients",
    "rotation_coefficients",
]

IDENTITY: Final = np.array([1.0, 0, 0, 0, 1, 0, 0, 0])


def affine_coefficients(
    angle_degrees: np.ndarray | float,
    translate_xy: np.ndarray,
    scale: np.ndarray | float,
    shear_xy_degrees: np.ndarray,
    center_xy: Sequence[float] | np.ndarray | None,
    size_hw: np.ndarray,
) -> np.ndarray:
    """Return the maps, float64 (B, 8), that rotate and shear around a centre, scale, and then translate.

    A map is the inverse of T · C · R(angle) · S(scale) · SHy(shear y) · SHx(shear x) · C⁻¹, where C⁻¹ moves the
    centre to the origin. Angles and scales are (B,) or scalars; points are (B, 2), in pixels from the top left corner.
    The default centre is the middle of each image.
    """
    center = size_hw[:, ::-1] * 0.5 if center_xy is None else np.broadcast_to(center_xy, size_hw.shape)
    angle = np.radians(angle_degrees)
    # Made contiguous, since numpy's sines of strided and contiguous arrays can differ in the last bit.
    shear_x, shear_y = np.ascontiguousarray(np.radians(np.broadcast_to(shear_xy_degrees, size_hw.shape)).T)
    # Without the scale, the determinant of the 2×2 part is 1, so its inverse needs no division.
    cosine, sine = np.cos(angle - shear_y) / np.cos(shear_y), np.sin(angle - shear_y) / np.cos(shear_y)
    tangent = np.tan(shear_x)
    coefficients = np.zeros((len(size_hw), 8))
    coefficients[:, 0] = (np.cos(angle) - sine * tangent) / scale
    coefficients[:, 1] = (np.sin(angle) + cosine * tangent) / scale
    coefficients[:, 3] = -sine / scale
    coefficients[:, 4] = cosine / scale
    new_center = center + translate_xy
    coefficients[:, 2] = center[:, 0] - coefficients[:, 0] * new_center[:, 0] - coefficients[:, 1] * new_center[:, 1]
    coefficients[:, 5] = center[:, 1] - coefficients[:, 3] * new_center[:, 0] - coefficients[:, 4] * new_center[:, 1]
    return coefficients


def rotation_coefficients(
    angle_degrees: np.ndarray,
    center_xy: Sequence[float] | np.ndarray | None,
    size_hw: np.ndarray,
    *,
    expand: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the maps (B, 8) that rotate counterclockwise around a centre, like Pillow's `Image.rotate`, and the sizes
    of the results, int64 (B, 2). If `expand`, results contain the entire rotated image. Other arguments are as for
    `affine_coefficients`."""
    sizes = size_hw[:, ::-1].astype(np.float64)  # width, height
    center = sizes / 2 if center_xy is None else np.broadcast_to(np.asarray(center_xy, np.float64), sizes.shape)
    angle = np.radians(np.mod(angle_degrees, 360.0))
    # Rounded to 15 digits, so that a right angle maps pixels exactly to pixels.
    cosine, sine = np.cos(angle).round(15), np.sin(angle).round(15)
    coefficients = np.zeros((len(size_hw), 8))
    coefficients[:, 0], coefficients[:, 1], coefficients[:, 3], coefficients[:, 4] = cosine, -sine, sine, cosine
    shift = center - _apply_linear(center, coefficients)
    result_sizes = size_hw
    if expand:
        corners = (
            np.stack([_apply_linear(sizes * corner, coefficients) for corner in ((0, 0), (1, 0), (1, 1), (0, 1))])
            + shift
        )
        expanded_sizes = np.ceil(corners.max(axis=0)) - np.floor(corners.min(axis=0))
        if (
            center_xy is None
        ):  # Pillow swaps the sides for right angles; rounding half pixels up at both ends would enlarge the result
            expanded_sizes = np.where((cosine == 0)[:, None], sizes[:, ::-1], expanded_sizes)
        shift = shift - _apply_linear((expanded_sizes - sizes) / 2, coefficients)
        result_sizes = expanded_sizes[:, ::-1].astype(np.int64)
    coefficients[:, 2], coefficients[:, 5] = shift.T
    return coefficients, result_sizes


def _apply_linear(points_xy: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Apply the linear part of each map to its point, (B, 2)."""
    x, y = points_xy.T
    a, b, _, d, e = coefficients.T[:5]
    mapped = np.empty_like(points_xy)
    mapped[:, 0], mapped[:, 1] = a * x + b * y, d * x + e * y
    return mapped


def perspective_coefficients(size_hw: np.ndarray, corners_xy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the maps (B, 8) that move the four corner pixels of each image to `corners_xy` (B, 4, 2): top left, top
    right, bottom right, bottom left; and whether such a map exists, bool (B,). No map exists if three of the old or new
    corners are collinear, or if the first pixel of the result would show a point at infinity."""
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners_xy.astype(np.float64).transpose(1, 2, 0)
    bottom, right = (size_hw - 1).astype(np.float64).T
    # The map from the unit square to the corners (Heckbert 1989), times a common factor. All values are integers, so
    # comparisons with 0 are exact.
    i = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    skew_x, skew_y = x0 - x1 + x2 - x3, y0 - y1 + y2 - y3
    g = skew_x * (y3 - y2) - (x3 - x2) * skew_y
    h = (x1 - x2) * skew_y - skew_x * (y1 - y2)
    a, b, c = (x1 - x0) * i + g * x1, (x3 - x0) * i + h * x3, x0 * i
    d, e, f = (y1 - y0) * i + g * y1, (y3 - y0) * i + h * y3, y0 * i
    # The inverse of that map, scaled from the unit square to the image.
    coefficients = np.stack(
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
    coefficients /= np.where(exists, last, 1.0)[:, None]
    coefficients[~exists] = IDENTITY
    return coefficients, exists


def _check_angles(name: str, value: object) -> tuple[float, float]:
    """Return a range (low, high) of angles; a single number x ≥ 0 means -x … x."""
    if is_sequence(value):
        return interval(name, value)
    number = finite_number(name, value, minimum=0)
    return 0.0 - number, number  # `-number` would be -0.0 for 0, whose repr is different


def _check_shears(name: str, value: Any) -> tuple[float, ...]:
    if is_sequence(value) and len(value) == 4:
        return *interval(f"{name} along x", value[:2]), *interval(f"{name} along y", value[2:])
    return _check_angles(name, value)


class _Warping(Transform):
    """Base class of the warps. It is not a dataclass, so that arguments can be declared in torchvision's order."""

    record: ClassVar[type[Record]] = Warp
    needs_full_image: ClassVar[bool] = True
    interpolation: str

    @property
    def filter_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.interpolation,)

    def warp_record(self, coefficients: np.ndarray, size_hw: np.ndarray, warped: np.ndarray | bool = True) -> Warp:
        """Return a `Warp` record with these maps; only images where `warped` is True are changed."""
        moves = (coefficients != IDENTITY).any(axis=1)
        fill, mask_fill = self.outside
        return Warp(coefficients, size_hw, moves & warped, self.interpolation, fill, mask_fill)


@declaration
class RandomRotation(_Warping):
    """Rotate by a random angle.

    Args:
        degrees: the minimum and maximum angle, counterclockwise; a number x ≥ 0 means -x … x.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        expand: whether to enlarge the result to contain the entire rotated image; sizes then differ between images.
        center: (x, y) from the top left corner, in pixels; None means the middle.
        fill: the pixel value outside the image, 0 … 255, or one per channel, or a dict of these by type.

    Example:
        >>> RandomRotation(10, "bilinear")
        RandomRotation(degrees=(-10.0, 10.0), interpolation='bilinear', fill=(0,))
    """

    degrees: float | tuple[float, float] = argument(_check_angles, by_epoch=True)
    interpolation: str = argument(interpolation_name, default="nearest")
    expand: bool = argument(flag, default=False)
    center: Sequence[float] | None = argument(pair, default=None, form="(x, y)")
    fill: Any = argument(fill_values, default=0)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Warp:
        angles = scale_to_range(self.degrees, uniforms(1)[:, 0])
        return self.warp_record(*rotation_coefficients(angles, self.center, sizes_hw, expand=self.expand))

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if self.expand else size_hw


@declaration
class RandomAffine(_Warping):
    """Rotate, translate, scale and shear around a centre by random amounts.

    Args:
        degrees: the minimum and maximum angle, clockwise; a number x ≥ 0 means -x … x.
        translate: the maximum translation along x and y, as fractions of the width and of the height in 0 … 1. Random
            translations are rounded to whole pixels.
        scale: the minimum and maximum factor.
        shear: angles in degrees: (min, max) along x, or (min x, max x, min y, max y); a number x ≥ 0 means -x … x
            along x.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the pixel value outside the image, 0 … 255, or one per channel, or a dict of these by type.
        center: (x, y) from the top left corner, in pixels; None means the middle.
    """

    degrees: float | tuple[float, float] = argument(_check_angles, by_epoch=True)
    translate: Sequence[float] | None = argument(pair, default=None, by_epoch=True, form="(x, y)", minimum=0, maximum=1)
    scale: Sequence[float] | None = argument(interval, default=None, by_epoch=True, above=0)
    shear: float | Sequence[float] | None = argument(_check_shears, default=None, by_epoch=True)
    interpolation: str = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=0)
    center: Sequence[float] | None = argument(pair, default=None, form="(x, y)")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Warp:
        numbers = uniforms(6)
        angles = scale_to_range(self.degrees, numbers[:, 0])
        reach = np.array(self.translate or (0.0, 0.0)) * sizes_hw[:, ::-1]
        translate = np.rint((2 * numbers[:, 1:3] - 1) * reach)
        scale = scale_to_range(self.scale or (1.0, 1.0), numbers[:, 3])
        ranges: Any = self.shear or (0.0, 0.0)
        shear = np.zeros((len(sizes_hw), 2))
        for axis in range(len(ranges) // 2):
            shear[:, axis] = scale_to_range(ranges[2 * axis : 2 * axis + 2], numbers[:, 4 + axis])
        return self.warp_record(affine_coefficients(angles, translate, scale, shear, self.center, sizes_hw), sizes_hw)


@declaration
class RandomPerspective(_Warping):
    """Tilt the image: move its four corners to random points inside the image, with probability `p`.

    Each corner moves by at most `distortion_scale` times half the width and half the height. If three of the new
    corners are collinear, no such map exists, and the image is unchanged.

    Args:
        distortion_scale: the maximum distance that corners move, relative to half of the sides, in 0 … 1.
        p: the probability.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the pixel value outside the image, 0 … 255, or one per channel, or a dict of these by type.
    """

    distortion_scale: float = argument(finite_number, default=0.5, by_epoch=True, minimum=0, maximum=1)
    p: float = argument(probability, default=0.5, by_epoch=True)
    interpolation: str = argument(interpolation_name, default="bilinear")
    fill: Any = argument(fill_values, default=0)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Warp:
        numbers = uniforms(9)
        reach_hw = (self.distortion_scale * (sizes_hw // 2)).astype(np.int64) + 1
        inward = (numbers[:, 1:].reshape(-1, 4, 2) * reach_hw[:, None, ::-1]).astype(np.int64)
        far = (sizes_hw - 1)[:, None, ::-1]
        corners = np.where([[False, False], [True, False], [True, True], [False, True]], far - inward, inward)
        coefficients, map_exists = perspective_coefficients(sizes_hw, corners)
        return self.warp_record(coefficients, sizes_hw, map_exists & (numbers[:, 0] < self.p))
