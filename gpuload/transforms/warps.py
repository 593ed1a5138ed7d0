"""Transforms that turn, shear and tilt an image, each drawn as a `Warp`.

Names, arguments, defaults and distributions are torchvision's; maps mean what they mean for Pillow images there:
Pillow's `Image.rotate` and `Image.transform`. A pixel of a result may come from anywhere: whole images are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.arguments import fill_values, finite, interpolation_name, interval, is_sequence, probability
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.matrices import IDENTITY, affine_coefficients, perspective_coefficients, rotation_coefficients
from gpuload.transforms.program.ops import Outline, Warp

__all__ = ["RandomAffine", "RandomPerspective", "RandomRotation"]


class _Warping(Transform):
    """Base of the warps; not a dataclass, so that each has its arguments where torchvision has them."""

    interpolation: str
    needs_whole: ClassVar[bool] = True

    @property
    def outline(self) -> tuple[Outline, ...]:
        name = type(self).__name__
        return (Outline(kind=Warp, name=name, filters=(self.interpolation,)),)

    def warp(self, coefficients: np.ndarray, size_hw: np.ndarray, warped: np.ndarray | bool = True) -> Warp:
        """The record of these maps, for images where `warped`."""
        moves = (coefficients != IDENTITY).any(axis=1)
        fill, mask_fill = self.outside(masks=False), self.outside(masks=True)[0]
        return Warp(coefficients, size_hw, moves & warped, self.interpolation, fill, mask_fill)

    def _check(self) -> None:
        """Check the arguments that all warps have."""
        own: Any = self
        name = type(self).__name__
        object.__setattr__(self, "interpolation", interpolation_name(f"{name}(interpolation=…)", own.interpolation))
        object.__setattr__(self, "fill", fill_values(f"{name}(fill=…)", own.fill))


@declaration
class RandomRotation(_Warping):
    """Turn by a random angle.

    Args:
        degrees: the least and the greatest angle, counterclockwise; a number x ≥ 0 means -x … x.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        expand: make the result as large as the turned image, so that sizes differ.
        center: (x, y) from the top left corner, in pixels; None for the middle.
        fill: the level outside the image in 0 … 255, or one for each channel, or a dict of them by type.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> RandomRotation(10, "bilinear")
        RandomRotation(degrees=(-10.0, 10.0), interpolation='bilinear', fill=(0,))
    """

    degrees: float | tuple[float, float]
    interpolation: str = "nearest"
    expand: bool = False
    center: Sequence[float] | None = None
    fill: Any = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", _angles("RandomRotation(degrees=…)", self.degrees))
        if not isinstance(self.expand, bool):
            raise TypeError(f"RandomRotation(expand=…) must be True or False, got {self.expand!r}")
        object.__setattr__(self, "center", _point("RandomRotation(center=…)", self.center))
        self._check()

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Warp:
        angles = _between(self.degrees, uniforms(1)[:, 0])
        center = None if self.center is None else np.array(self.center)
        return self.warp(*rotation_coefficients(angles, center, sizes_hw, expand=self.expand))

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if self.expand else size_hw


@declaration
class RandomAffine(_Warping):
    """Turn, move, scale and shear by random amounts, around a centre.

    Args:
        degrees: the least and the greatest angle, clockwise; a number x ≥ 0 means -x … x.
        translate: the farthest move, as fractions (of the width, of the height) in 0 … 1; by whole pixels.
        scale: the least and the greatest factor.
        shear: angles in degrees: (least, greatest) along x, or (least x, greatest x, least y, greatest y); a number
            x ≥ 0 means -x … x along x.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image in 0 … 255, or one for each channel, or a dict of them by type.
        center: (x, y) from the top left corner, in pixels; None for the middle.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    degrees: float | tuple[float, float]
    translate: Sequence[float] | None = None
    scale: Sequence[float] | None = None
    shear: float | Sequence[float] | None = None
    interpolation: str = "nearest"
    fill: Any = 0
    center: Sequence[float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", _angles("RandomAffine(degrees=…)", self.degrees))
        name = "RandomAffine(translate=…)"
        if self.translate is not None:
            fractions = _point(name, self.translate)
            if not all(0 <= fraction <= 1 for fraction in fractions or ()):
                raise ValueError(f"{name} is given in fractions of the width and height, 0 … 1, got {self.translate!r}")
            object.__setattr__(self, "translate", fractions)
        if self.scale is not None:
            object.__setattr__(self, "scale", interval("RandomAffine(scale=…)", self.scale, positive=True))
        if self.shear is not None:
            object.__setattr__(self, "shear", _shears("RandomAffine(shear=…)", self.shear))
        object.__setattr__(self, "center", _point("RandomAffine(center=…)", self.center))
        self._check()

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Warp:
        numbers = uniforms(6)
        angles = _between(self.degrees, numbers[:, 0])
        reach = np.array(self.translate or (0.0, 0.0)) * sizes_hw[:, ::-1]
        translate = np.rint((2 * numbers[:, 1:3] - 1) * reach)
        scale = _between(self.scale or (1.0, 1.0), numbers[:, 3])
        ranges: Any = self.shear or (0.0, 0.0)
        shear = np.zeros((len(sizes_hw), 2))
        for axis in range(len(ranges) // 2):
            shear[:, axis] = _between(ranges[2 * axis : 2 * axis + 2], numbers[:, 4 + axis])
        center = None if self.center is None else np.array(self.center)
        return self.warp(affine_coefficients(angles, translate, scale, shear, center, sizes_hw), sizes_hw)


@declaration
class RandomPerspective(_Warping):
    """Tilt: move the four corners to random places inside the image, with probability `p`.

    A corner moves at most `distortion_scale` times half the width and half the height. If three of them come to lie on
    one line, there is no such map, and the image stays as it is.

    Args:
        distortion_scale: how far the corners move, in 0 … 1.
        p: the probability.
        interpolation: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image in 0 … 255, or one for each channel, or a dict of them by type.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    distortion_scale: float = 0.5
    p: float = 0.5
    interpolation: str = "bilinear"
    fill: Any = 0

    def __post_init__(self) -> None:
        distortion = finite("RandomPerspective(distortion_scale=…)", self.distortion_scale)
        if not 0 <= distortion <= 1:
            raise ValueError(f"RandomPerspective(distortion_scale=…) must lie in 0 … 1, got {distortion:g}")
        object.__setattr__(self, "distortion_scale", distortion)
        object.__setattr__(self, "p", probability("RandomPerspective(p=…)", self.p))
        self._check()

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Warp:
        numbers = uniforms(9)
        reach_hw = (self.distortion_scale * (sizes_hw // 2)).astype(np.int64) + 1
        inward = (numbers[:, 1:].reshape(-1, 4, 2) * reach_hw[:, None, ::-1]).astype(np.int64)
        far = (sizes_hw - 1)[:, None, ::-1]
        corners = np.where([[False, False], [True, False], [True, True], [False, True]], far - inward, inward)
        coefficients, exist = perspective_coefficients(sizes_hw, corners)
        return self.warp(coefficients, sizes_hw, exist & (numbers[:, 0] < self.p))


def _between(bounds: Any, numbers: np.ndarray) -> np.ndarray:
    low, high = bounds
    return low + numbers * (high - low)


def _angles(name: str, value: Any) -> tuple[float, float]:
    """A range of angles; a number is a range around 0."""
    if is_sequence(value):
        return interval(name, value)
    number = finite(name, value)
    if number < 0:
        raise ValueError(f"{name} as a single number must not be negative, got {number:g}; or give (low, high)")
    return 0.0 - number, number  # not -0.0, which prints differently


def _shears(name: str, value: Any) -> tuple[float, ...]:
    if is_sequence(value) and len(value) == 4:
        return *interval(f"{name} along x", value[:2]), *interval(f"{name} along y", value[2:])
    if is_sequence(value) and len(value) != 2:
        raise ValueError(f"{name} must be one number, or 2 or 4 of them, got {len(value)}: {value!r}")
    return _angles(name, value)


def _point(name: str, value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    if not is_sequence(value) or len(value) != 2:
        raise TypeError(f"{name} must be a pair (x, y), got {value!r}")
    return finite(name, value[0]), finite(name, value[1])
