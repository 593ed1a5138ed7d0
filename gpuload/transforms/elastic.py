"""Elastic deformation. Names, arguments, defaults and distribution are torchvision's.

Source: Simard, Steinkraus, Platt, "Best practices for convolutional neural networks applied to visual document
analysis", ICDAR 2003.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.arguments import fill_values, finite, interpolation_name, is_sequence
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.program.ops import Elastic, Outline

__all__ = ["ElasticTransform"]


@declaration
class ElasticTransform(Transform):
    """Show at each pixel what lies at a random displacement from it; neighbours have similar ones.

    Displacements are smoothed noise. Boxes and keypoints move by the displacement of their pixel, with the sign turned
    round, which is close to right where the field is smooth.

    Args:
        alpha: how strong they are, or (along x, along y): noise in -1 … 1 is multiplied by half of it, in pixels.
        sigma: the standard deviation of the smoothing, in pixels, or (along x, along y); 0: none.
        interpolation: ``"nearest"`` or ``"bilinear"``.
        fill: the level outside the image in 0 … 255, or one for each channel, or a dict of them by type.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> ElasticTransform(alpha=120.0, sigma=4.0)
        ElasticTransform(alpha=(120.0, 120.0), sigma=(4.0, 4.0), fill=(0,))
    """

    needs_whole: ClassVar[bool] = True

    alpha: float | Sequence[float] = 50.0
    sigma: float | Sequence[float] = 5.0
    interpolation: str = "bilinear"
    fill: Any = 0

    def __post_init__(self) -> None:
        for name in ("alpha", "sigma"):
            object.__setattr__(self, name, _pair(f"ElasticTransform({name}=…)", getattr(self, name)))
        if bool(self.sigma[0]) != bool(self.sigma[1]):  # pyright: ignore[reportIndexIssue]
            raise ValueError(f"ElasticTransform(sigma=…) must be 0 along both axes or none, got {self.sigma}")
        name = "ElasticTransform(interpolation=…)"
        interpolation = interpolation_name(name, self.interpolation)
        if interpolation == "bicubic":
            raise ValueError(f"{name} must be one of 'nearest', 'bilinear', got {self.interpolation!r}")
        object.__setattr__(self, "interpolation", interpolation)
        object.__setattr__(self, "fill", fill_values("ElasticTransform(fill=…)", self.fill))

    @property
    def outline(self) -> tuple[Outline, ...]:
        return (Outline(kind=Elastic, name=type(self).__name__, filters=(self.interpolation,)),)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Elastic:
        keys = np.floor(uniforms(2) * 2.0**32).astype(np.uint64)  # a word and a half, over 2**32: the word comes back
        alpha: Any = self.alpha
        sigma: Any = self.sigma
        fill, mask_fill = self.outside(masks=False), self.outside(masks=True)[0]
        return Elastic(keys, alpha, sigma, self.interpolation, fill, mask_fill)


def _pair(name: str, value: Any) -> tuple[float, float]:
    given = tuple(value) if is_sequence(value) else (value,)
    numbers = tuple(finite(name, number) for number in given)
    if len(numbers) not in (1, 2) or min(numbers) < 0:
        raise ValueError(f"{name} must be a number from 0 on, or (along x, along y), got {value!r}")
    return numbers[0], numbers[-1]
