"""Gaussian blur and Gaussian noise, drawn for each sample. Arguments, defaults and meaning are torchvision's."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from gpuload.transforms.arguments import finite, interval, is_sequence, size_pair
from gpuload.transforms.base import Uniforms, declaration
from gpuload.transforms.color_random import OneOperation
from gpuload.transforms.program.ops import Ops

__all__ = ["GaussianBlur", "GaussianNoise"]


@declaration
class GaussianBlur(OneOperation):
    """Blur with a Gaussian kernel whose sigma is drawn uniformly.

    Borders are mirrored, several times if the kernel is larger than the image.

    Args:
        kernel_size: an odd number of pixels, or (width, height), as in torchvision.
        sigma: the standard deviation in pixels, greater than 0, or (low, high).

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    operations: ClassVar[tuple[str, ...]] = ("blur",)
    needs_whole: ClassVar[bool] = True

    kernel_size: int | tuple[int, int]
    sigma: float | tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        sizes = size_pair("GaussianBlur(kernel_size=…)", self.kernel_size)
        if not all(size % 2 for size in sizes):
            raise ValueError(f"GaussianBlur(kernel_size=…) must be odd, so that it has a middle, got {sizes}")
        object.__setattr__(self, "kernel_size", sizes)
        object.__setattr__(self, "sigma", _sigmas(self.sigma))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        low, high = self.sigma  # pyright: ignore[reportGeneralTypeIssues]
        sigma = low + uniforms(1) * (high - low)
        kernel = np.broadcast_to(np.array(self.kernel_size, np.float64), (len(sigma), 2))
        return self.ops(np.ones(len(sigma), bool), np.hstack([kernel, sigma, sigma]))


def _sigmas(value: Any) -> tuple[float, float]:
    name = "GaussianBlur(sigma=…)"
    if is_sequence(value) and len(value) == 1:
        value = value[0]
    if is_sequence(value):
        return interval(name, value, positive=True)
    number = finite(name, value)
    return interval(name, (number, number), positive=True)


@declaration
class GaussianNoise(OneOperation):
    """Add a normal number to each level of an image.

    Works on levels, as torchvision does on uint8 images, also between `ToDtype` and `Normalize`: what is added is
    truncated to a whole number. The numbers are the same on every device.

    Args:
        mean, sigma: of the noise on an image in 0 … 1; `sigma` is not negative.
        clip: levels end at 0 and 255; False: they wrap around there, as torchvision's uint8 images do.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    operations: ClassVar[tuple[str, ...]] = ("noise",)
    needs_whole: ClassVar[bool] = True  # pixels are numbered from the first of the image

    mean: float = 0.0
    sigma: float = 0.1
    clip: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", finite("GaussianNoise(mean=…)", self.mean))
        sigma = finite("GaussianNoise(sigma=…)", self.sigma)
        if sigma < 0:
            raise ValueError(f"GaussianNoise(sigma=…) must not be negative, got {sigma:g}")
        object.__setattr__(self, "sigma", sigma)
        if not isinstance(self.clip, bool):
            raise TypeError(f"GaussianNoise(clip=…) must be True or False, got {self.clip!r}")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        # A uniform number is a 32-bit word and a half, over 2**32: the word comes back whole.
        key_words = np.floor(uniforms(2) * 2.0**32)
        values = np.broadcast_to(np.array([self.mean * 255, self.sigma * 255]), (len(key_words), 2))
        wraps = np.full((len(key_words), 1), float(not self.clip))
        return self.ops(np.ones(len(key_words), bool), np.hstack([values, key_words, wraps]))
