"""Transforms that resize to a random size, each drawn as a `Box` around the whole image.

Names, arguments, defaults and distributions are torchvision's. A side never becomes shorter than one pixel, where
torchvision raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.transforms.arguments import antialias_flag, interpolation_name, interval, is_sequence, size_pair, whole
from gpuload.transforms.base import Resampling, Uniforms, declaration
from gpuload.transforms.geometry import sizes_by_shorter_side
from gpuload.transforms.program.ops import Box
from gpuload.transforms.program.windows import full_windows

__all__ = ["RandomResize", "RandomShortestSize", "ScaleJitter"]


@declaration
class _Resizing(Resampling):
    """Base of these transforms: two numbers are drawn, one for the size and one for a random filter."""

    def sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of the results, from a uniform number for each image."""
        raise NotImplementedError

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(2)
        sizes = np.maximum(self.sizes(numbers[:, 0], sizes_hw), 1)
        return Box(full_windows(sizes_hw), sizes, self.filters(numbers[:, 1]), cuts=False)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None

    def _check(self) -> None:
        """Check the arguments that all of them have."""
        own: Any = self
        name = type(self).__name__
        filters = interpolation_name(f"{name}(interpolation=…)", own.interpolation, resizing=True)
        object.__setattr__(self, "interpolation", filters)
        object.__setattr__(self, "antialias", antialias_flag(f"{name}(antialias=…)", own.antialias, own.interpolation))


@declaration
class ScaleJitter(_Resizing):
    """Resize to fit into a target, times a random factor: large scale jittering.

    Args:
        target_size: (height, width). As in torchvision, its width is compared with the image's height, and its height
            with the image's width.
        scale_range: the least and the greatest factor.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        antialias: False: bilinear and bicubic as `torch.nn.functional.interpolate` does without antialiasing.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    target_size: tuple[int, int]
    scale_range: tuple[float, float] = (0.1, 2.0)
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        name = "ScaleJitter(target_size=…)"
        if not is_sequence(self.target_size) or len(self.target_size) != 2:
            raise TypeError(f"{name} must be (height, width), got {self.target_size!r}")
        object.__setattr__(self, "target_size", size_pair(name, self.target_size))
        object.__setattr__(self, "scale_range", interval("ScaleJitter(scale_range=…)", self.scale_range, positive=True))
        self._check()

    def sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        low, high = self.scale_range
        fit = (np.array(self.target_size[::-1]) / sizes_hw).min(axis=1)
        return (sizes_hw * (fit * (low + numbers * (high - low)))[:, None]).astype(np.int64)


@declaration
class RandomShortestSize(_Resizing):
    """Resize so that the shorter side has one of several lengths.

    Args:
        min_size: the lengths to draw from, or one length.
        max_size: the longer side does not become longer than this.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        antialias: False: bilinear and bicubic as `torch.nn.functional.interpolate` does without antialiasing.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    min_size: int | Sequence[int]
    max_size: int | None = None
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        name = "RandomShortestSize(min_size=…)"
        given: Any = self.min_size if is_sequence(self.min_size) else (self.min_size,)
        if not len(given):
            raise ValueError(f"{name} must be a length or several, got {self.min_size!r}")
        object.__setattr__(self, "min_size", tuple(whole(name, length, least=1) for length in given))
        if self.max_size is not None:
            object.__setattr__(self, "max_size", whole("RandomShortestSize(max_size=…)", self.max_size, least=1))
        self._check()

    def sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        lengths = np.array(self.min_size, np.int64)
        factors = lengths[(numbers * len(lengths)).astype(np.int64)] / sizes_hw.min(axis=1)
        if self.max_size is not None:
            factors = np.minimum(factors, self.max_size / sizes_hw.max(axis=1))
        return (sizes_hw * factors[:, None]).astype(np.int64)


@declaration
class RandomResize(_Resizing):
    """Resize so that the shorter side has a random length.

    Args:
        min_size: the least length.
        max_size: the greatest length is one less.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        antialias: False: bilinear and bicubic as `torch.nn.functional.interpolate` does without antialiasing.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    min_size: int
    max_size: int
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", whole("RandomResize(min_size=…)", self.min_size, least=1))
        object.__setattr__(self, "max_size", whole("RandomResize(max_size=…)", self.max_size, least=1))
        if self.max_size <= self.min_size:
            raise ValueError(
                f"RandomResize(max_size={self.max_size}) must be greater than min_size={self.min_size}: the longest "
                "side that is drawn is one less than max_size"
            )
        self._check()

    def sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        lengths = self.min_size + (numbers * (self.max_size - self.min_size)).astype(np.int64)
        return sizes_by_shorter_side(sizes_hw, lengths)
