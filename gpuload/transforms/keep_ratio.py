"""timm's ways to bring an image to a size: scaled with its aspect ratio kept, then cut or padded.

Names, arguments, defaults and meaning are those of `timm.data.transforms` (1.0); `from_timm` uses them. torchvision's
Resize rounds sides down and makes the shorter side fit, timm's rounds to the nearest and can make the longer one fit;
timm's crops pad with a colour, or with the mirrored image.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from gpuload.transforms.arguments import (
    fill_values,
    finite,
    interpolation_name,
    interval,
    probability,
    size_pair,
    whole,
)
from gpuload.transforms.base import DrawError, Padding, Resampling, Uniforms, declaration
from gpuload.transforms.geometry import FixedSizeCrop, PaddingMode, central_starts, padding_mode_of
from gpuload.transforms.program.ops import Box
from gpuload.transforms.program.windows import full_windows

__all__ = ["CenterCropOrPad", "RandomCropOrPad", "ResizeKeepRatio", "TrimBorder"]


@declaration
class ResizeKeepRatio(Resampling):
    """Resize with the aspect ratio kept, so that the result covers a size or fits into it.

    Args:
        size: an integer (a square), or (height, width).
        longest: 0: the result covers the size; 1: it fits into it; other fractions: in between.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        random_scale_prob: the probability of scaling by a random factor too.
        random_scale_range: the least and the greatest factor, greater than 0.
        random_scale_area: the factor is 1 / √x, with x from the range, as for the area of a crop.
        random_aspect_prob: the probability of changing the aspect ratio by a random factor.
        random_aspect_range: the least and the greatest factor; drawn log-uniformly.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> ResizeKeepRatio(256, longest=1).output_size((375, 500))
        (192, 256)
    """

    size: int | tuple[int, int]
    longest: float = 0.0
    interpolation: str = "bilinear"
    random_scale_prob: float = 0.0
    random_scale_range: tuple[float, float] = (0.85, 1.05)
    random_scale_area: bool = False
    random_aspect_prob: float = 0.0
    random_aspect_range: tuple[float, float] = (0.9, 1.11)

    def __post_init__(self) -> None:
        own = "ResizeKeepRatio"
        object.__setattr__(self, "size", size_pair(f"{own}(size=…)", self.size))
        longest = finite(f"{own}(longest=…)", self.longest)
        if not 0 <= longest <= 1:
            raise ValueError(f"{own}(longest=…) must lie in 0 … 1, got {longest}")
        object.__setattr__(self, "longest", longest)
        filter_name = interpolation_name(f"{own}(interpolation=…)", self.interpolation, resizing=True)
        object.__setattr__(self, "interpolation", filter_name)
        for name in ("random_scale_prob", "random_aspect_prob"):
            object.__setattr__(self, name, probability(f"{own}({name}=…)", getattr(self, name)))
        for name in ("random_scale_range", "random_aspect_range"):
            object.__setattr__(self, name, interval(f"{own}({name}=…)", getattr(self, name), positive=True))
        if not isinstance(self.random_scale_area, bool):
            raise TypeError(f"{own}(random_scale_area=…) must be True or False, got {self.random_scale_area!r}")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers, factors = uniforms(5), np.ones(sizes_hw.shape)
        low, high = self.random_scale_range
        scale = low + numbers[:, 1] * (high - low)
        if self.random_scale_area:
            scale = 1 / np.sqrt(scale)
        factors *= np.where(numbers[:, 0] < self.random_scale_prob, scale, 1.0)[:, None]
        low, high = (math.log(end) for end in self.random_aspect_range)
        root = np.exp((low + numbers[:, 3] * (high - low)) / 2)
        root = np.where(numbers[:, 2] < self.random_aspect_prob, root, 1.0)
        factors *= np.stack([1 / root, root], axis=1)
        return Box(full_windows(sizes_hw), self._sizes(sizes_hw, factors), self.filters(numbers[:, 4]), cuts=False)

    def _sizes(self, sizes_hw: np.ndarray, factors: np.ndarray | float) -> np.ndarray:
        ratios = sizes_hw / np.array(self.size)
        ratio = ratios.max(axis=1) * self.longest + ratios.min(axis=1) * (1 - self.longest)
        return np.maximum(np.rint(sizes_hw * factors / ratio[:, None]), 1).astype(np.int64)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        if size_hw is None or self.random_scale_prob or self.random_aspect_prob:
            return None
        height, width = self._sizes(np.array([size_hw]), 1.0)[0].tolist()
        return height, width


@declaration
class _CropOrPad(FixedSizeCrop):
    fill: int | tuple[int, ...] = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        own = type(self).__name__
        object.__setattr__(self, "fill", fill_values(f"{own}(fill=…)", self.fill))
        padding_mode_of(f"{own}(padding_mode=…)", self.padding_mode)


@declaration
class CenterCropOrPad(_CropOrPad):
    """Cut out the middle; a smaller image is padded on both sides first.

    Arguments and errors are those of `RandomCropOrPad`.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        return self.boxes(central_starts(sizes_hw, self.size))


@declaration
class RandomCropOrPad(_CropOrPad):
    """Cut out a box at a random place; a smaller image is padded, itself at a random place.

    Args:
        size: an integer (a square), or (height, width).
        fill: the level of padding in 0 … 255, or one for each channel; for ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``, as for `RandomCrop`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        spare = sizes_hw - np.array(self.size, np.int64)
        return self.boxes((uniforms(2) * (abs(spare) + 1)).astype(np.int64) * np.sign(spare))


@declaration
class TrimBorder(Padding):
    """Cut off a border of the same width on all sides.

    Args:
        border_size: in pixels.

    Raises:
        TypeError, ValueError: it is not an integer, or negative.
        DrawError: (when drawn) nothing of an image would be left.
    """

    crops: ClassVar[bool] = True
    may_refuse: ClassVar[bool] = True

    border_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "border_size", whole("TrimBorder(border_size=…)", self.border_size, least=0))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        left = sizes_hw - 2 * self.border_size
        if (left < 1).any():
            row = int((left < 1).any(axis=1).argmax())
            height, width = sizes_hw[row].tolist()
            raise DrawError(
                f"TrimBorder({self.border_size}) leaves nothing of an image of {height}×{width} (height × width)", row
            )
        return self.box(np.full_like(left, self.border_size), left)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if size_hw is None else (size_hw[0] - 2 * self.border_size, size_hw[1] - 2 * self.border_size)
