"""Blur, noise, JPEG artefacts and elastic deformation, drawn for each sample.

Names, arguments, defaults and distributions are torchvision's; those of `MotionBlur` are Albumentations'. The elastic
deformation is from Simard, Steinkraus, Platt, "Best practices for convolutional neural networks applied to visual
document analysis", ICDAR 2003.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from gpuload.checks import argument, finite_number, flag, integer, interval, pair, probability
from gpuload.transforms.arguments import fill_values, interpolation_name, size_pair
from gpuload.transforms.base import Transform, Uniforms, declaration, scale_to_range
from gpuload.transforms.colour import OneOperation
from gpuload.transforms.program.ops import Elastic, Ops, Record

__all__ = ["JPEG", "ElasticTransform", "GaussianBlur", "GaussianNoise", "MotionBlur"]


def _check_odd_sizes(name: str, value: object) -> tuple[int, int]:
    sizes = size_pair(name, value)
    if not all(size % 2 for size in sizes):
        raise ValueError(f"{name} must be odd, so that the kernel has a centre pixel, got {sizes}")
    return sizes


@declaration
class GaussianBlur(OneOperation):
    """Blur with a Gaussian kernel whose sigma is drawn uniformly.

    Borders are mirrored, repeatedly if the kernel is larger than the image.

    Args:
        kernel_size: an odd number of pixels, or (width, height), as in torchvision.
        sigma: the standard deviation in pixels, greater than 0, or (low, high).
    """

    operations: ClassVar[tuple[str, ...]] = ("blur",)
    needs_full_image: ClassVar[bool] = True

    kernel_size: int | tuple[int, int] = argument(_check_odd_sizes, by_epoch=True)
    sigma: float | tuple[float, float] = argument(interval, default=(0.1, 2.0), by_epoch=True, single=True, above=0)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        sigma = scale_to_range(self.sigma, uniforms(1))
        kernel = np.broadcast_to(np.array(self.kernel_size, np.float64), (len(sigma), 2))
        return self.ops_record(np.ones(len(sigma), bool), np.hstack([kernel, sigma, sigma]))


def _check_kernel_range(name: str, value: object) -> tuple[int, int]:
    """Return the smallest and the largest odd size; a number means 3 … number."""
    low, high = interval(name, value, start=3, entry=integer, minimum=3)
    return low | 1, high | 1


@declaration
class MotionBlur(OneOperation):
    """Blur along a random line, as if the camera or the scene had moved, with probability `p`.

    A result is the mean of the pixels on a line through it; borders are mirrored. Names, arguments, defaults and the
    kernel are those of Albumentations 2.0.8.

    Args:
        blur_limit: the minimum and maximum length of the line in pixels, at least 3; a number x means 3 … x. Lengths
            are odd; an even limit is raised by one.
        allow_shifted: whether to move the line by up to a quarter of its length along both axes.
        angle_range: the minimum and maximum angle, in degrees, clockwise.
        direction_range: within -1 … 1: at 0 the line extends to both sides of the pixel, at -1 and 1 only to one side.
        p: the probability.

    Example:
        >>> MotionBlur(11)
        MotionBlur(blur_limit=(3, 11))
    """

    operations: ClassVar[tuple[str, ...]] = ("motion_blur",)
    needs_full_image: ClassVar[bool] = True

    blur_limit: int | tuple[int, int] = argument(_check_kernel_range, default=(3, 7), by_epoch=True)
    allow_shifted: bool = argument(flag, default=True)
    angle_range: tuple[float, float] = argument(interval, default=(0.0, 360.0), by_epoch=True)
    direction_range: tuple[float, float] = argument(interval, default=(-1.0, 1.0), by_epoch=True, minimum=-1, maximum=1)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        drawn, (low, high) = uniforms(6), self.blur_limit  # pyright: ignore[reportGeneralTypeIssues]
        sizes = low + 2 * np.floor(drawn[:, 1] * ((high - low) // 2 + 1))
        angles = scale_to_range(self.angle_range, drawn[:, 2])
        directions = scale_to_range(self.direction_range, drawn[:, 3])
        shifts = (2 * drawn[:, 4:] - 1) * ((sizes // 2) / 2 * self.allow_shifted)[:, None]
        return self.ops_record(drawn[:, 0] < self.p, np.column_stack([sizes, sizes, angles, directions, shifts]))


@declaration
class GaussianNoise(OneOperation):
    """Add Gaussian noise to an image.

    The noise is truncated to integers (for images in 0 … 255), as torchvision does for uint8 images, even between
    `ToDtype` and `Normalize`. The noise is the same on every device.

    Args:
        mean, sigma: the parameters of the noise, for an image in 0 … 1; `sigma` is not negative.
        clip: whether results are clipped to 0 … 255; otherwise they wrap around, as for torchvision's uint8 images.
    """

    operations: ClassVar[tuple[str, ...]] = ("noise",)
    needs_full_image: ClassVar[bool] = True  # a pixel's noise depends on the pixel's index in the image

    mean: float = argument(finite_number, default=0.0, by_epoch=True)
    sigma: float = argument(finite_number, default=0.1, minimum=0, by_epoch=True)
    clip: bool = argument(flag, default=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        # A uniform number is (n + ½) / 2**32, so this restores the 32-bit integer n.
        key_words = np.floor(uniforms(2) * 2.0**32)
        values = np.broadcast_to(np.array([self.mean * 255, self.sigma * 255]), (len(key_words), 2))
        wraps = np.full((len(key_words), 1), float(not self.clip))
        return self.ops_record(np.ones(len(key_words), bool), np.hstack([values, key_words, wraps]))


@declaration
class JPEG(OneOperation):
    """Compress images as JPEG, with colour channels at half the resolution, and decompress them.

    Images must have 1 or 3 channels.

    Args:
        quality: an integer in 1 … 100, or a range (lowest, highest), from which an integer is drawn for each image.

    Example:
        >>> JPEG((30, 90))
        JPEG(quality=(30, 90))
    """

    operations: ClassVar[tuple[str, ...]] = ("jpeg",)
    needs_full_image: ClassVar[bool] = True  # blocks start at the corner of the image

    quality: int | tuple[int, int] = argument(
        interval, by_epoch=True, entry=integer, single=True, minimum=1, maximum=100
    )

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        lowest, highest = self.quality  # pyright: ignore[reportGeneralTypeIssues]
        qualities = lowest + np.floor(uniforms(1) * (highest - lowest + 1))
        return self.ops_record(np.ones(len(qualities), bool), qualities)


non_negative_pair = partial(pair, form="(along x, along y)", single=True, minimum=0)


def _check_smoothing(name: str, value: object) -> tuple[float, float]:
    sigma = non_negative_pair(name, value)
    if bool(sigma[0]) != bool(sigma[1]):
        raise ValueError(f"{name} must be 0 along both axes or along neither, got {sigma}")
    return sigma


@declaration
class ElasticTransform(Transform):
    """Deform an image by a smooth field of random displacements.

    The displacements are smoothed noise. Each pixel of the result shows the image at the pixel's displaced position.
    Boxes and keypoints move by the negative of the displacement at their position, which is a good approximation where
    the field is smooth.

    Args:
        alpha: the strength of the displacements, or (along x, along y). Displacements are noise in -1 … 1 multiplied
            by half of `alpha`, in pixels.
        sigma: the standard deviation of the smoothing, in pixels, or (along x, along y); 0 means no smoothing.
        interpolation: ``"nearest"`` or ``"bilinear"``.
        fill: the pixel value outside the image, 0 … 255, or a sequence with one value per channel, or a dict of these
            by type.

    Example:
        >>> ElasticTransform(alpha=120.0, sigma=4.0)
        ElasticTransform(alpha=(120.0, 120.0), sigma=(4.0, 4.0), fill=(0,))
    """

    record: ClassVar[type[Record]] = Elastic
    needs_full_image: ClassVar[bool] = True

    alpha: float | Sequence[float] = argument(non_negative_pair, default=50.0, by_epoch=True)
    sigma: float | Sequence[float] = argument(_check_smoothing, default=5.0, by_epoch=True)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=("nearest", "bilinear"))
    fill: Any = argument(fill_values, default=0)

    @property
    def filter_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.interpolation,)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Elastic:
        keys = np.floor(uniforms(2) * 2.0**32).astype(np.uint64)  # as in `GaussianNoise`
        fill, mask_fill = self.outside
        return Elastic(keys, self.alpha, self.sigma, self.interpolation, fill, mask_fill)  # pyright: ignore[reportArgumentType]
