"""Transforms that resize to a random size, and timm's resizing and cropping transforms.

Names, arguments, defaults and distributions are torchvision's, except for `CenterCropOrPad`, `RandomCropOrPad`,
`ResizeKeepRatio` and `TrimBorder`, which come from `timm.data.transforms` (1.0) and which `from_timm` uses.
torchvision's Resize rounds sides down and fits the shorter side; timm's resize rounds to the nearest integer and can
fit the longer side. timm's crops pad with a colour or with the mirrored image. A side is at least one pixel long,
even if torchvision would raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from gpuload.checks import argument, finite_number, flag, integer, interval, numbers, one_of, probability
from gpuload.transforms.arguments import (
    RESAMPLING,
    antialias_flag,
    fill_values,
    interpolation_name,
    size_pair,
)
from gpuload.transforms.base import DrawError, Padding, Resampling, Uniforms, declaration, scale_to_range
from gpuload.transforms.geometry import PADDING_MODES, CenterCrop, FixedSizeCrop, PaddingMode, sizes_by_shorter_side
from gpuload.transforms.program.ops import Box
from gpuload.transforms.program.windows import full_windows
from gpuload.transforms.varying import Varying

__all__ = [
    "CenterCropOrPad",
    "RandomCropOrPad",
    "RandomResize",
    "RandomShortestSize",
    "ResizeKeepRatio",
    "ScaleJitter",
    "TrimBorder",
]


@declaration
class _Resizing(Resampling):
    """Base class of the random resizes, which use two random numbers: one for the size, one for a random filter."""

    def compute_sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """Return the sizes of the results, given one uniform number per image."""
        raise NotImplementedError

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(2)
        sizes = np.maximum(self.compute_sizes(numbers[:, 0], sizes_hw), 1)
        return Box(full_windows(sizes_hw), sizes, self.filters(numbers[:, 1]), clips_boxes=False)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None


@declaration
class ScaleJitter(_Resizing):
    """Resize to fit into a target size multiplied by a random factor (large scale jittering).

    Args:
        target_size: (height, width). As in torchvision, the target width limits the image's height, and the target
            height limits the image's width.
        scale_range: the minimum and maximum factor.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"`` draws bilinear or
            bicubic for each image.
        antialias: if False, bilinear and bicubic work like `torch.nn.functional.interpolate` without antialiasing.
    """

    target_size: tuple[int, int] = argument(size_pair, by_epoch=True, single=False)
    scale_range: tuple[float, float] = argument(interval, default=(0.1, 2.0), by_epoch=True, above=0)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=RESAMPLING)
    antialias: bool = argument(antialias_flag, default=True)

    def compute_sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        fit = (np.array(self.target_size[::-1]) / sizes_hw).min(axis=1)
        return (sizes_hw * (fit * scale_to_range(self.scale_range, numbers))[:, None]).astype(np.int64)


@declaration
class RandomShortestSize(_Resizing):
    """Resize so that the shorter side has one of several lengths.

    Args:
        min_size: the lengths to draw from, or one length.
        max_size: the maximum length of the longer side.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"`` draws bilinear or
            bicubic for each image.
        antialias: if False, bilinear and bicubic work like `torch.nn.functional.interpolate` without antialiasing.
    """

    min_size: int | Sequence[int] = argument(numbers, by_epoch=True, single=True, entry=integer, minimum=1)
    max_size: int | None = argument(integer, default=None, by_epoch=True, minimum=1)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=RESAMPLING)
    antialias: bool = argument(antialias_flag, default=True)

    def compute_sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        lengths = np.array(self.min_size, np.int64)
        factors = lengths[(numbers * len(lengths)).astype(np.int64)] / sizes_hw.min(axis=1)
        if self.max_size is not None:
            factors = np.minimum(factors, self.max_size / sizes_hw.max(axis=1))
        return (sizes_hw * factors[:, None]).astype(np.int64)


@declaration
class RandomResize(_Resizing):
    """Resize so that the shorter side has a random length.

    Args:
        min_size: the minimum length.
        max_size: one more than the maximum length.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"`` draws bilinear or
            bicubic for each image.
        antialias: if False, bilinear and bicubic work like `torch.nn.functional.interpolate` without antialiasing.
    """

    min_size: int = argument(integer, by_epoch=True, minimum=1)
    max_size: int = argument(integer, by_epoch=True, minimum=1)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=RESAMPLING)
    antialias: bool = argument(antialias_flag, default=True)

    def check_arguments(self) -> None:
        if self.max_size <= self.min_size:
            raise ValueError(
                f"RandomResize(max_size={self.max_size}) must be greater than min_size={self.min_size}: the maximum "
                "length is max_size - 1"
            )

    def compute_sizes(self, numbers: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        lengths = self.min_size + (numbers * (self.max_size - self.min_size)).astype(np.int64)
        return sizes_by_shorter_side(sizes_hw, lengths)


@declaration
class ResizeKeepRatio(Resampling):
    """Resize an image so that it covers a size or fits into it, keeping its aspect ratio.

    Args:
        size: an integer (a square), or (height, width).
        longest: 0 means that the result covers the size, 1 that the result fits into it; fractions interpolate.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"`` draws bilinear or
            bicubic for each image.
        random_scale_prob: the probability of scaling the result by a random factor.
        random_scale_range: the minimum and maximum factor, greater than 0.
        random_scale_area: whether `random_scale_range` is a range of crop areas; the factor is then 1 / √x, with x
            drawn from the range.
        random_aspect_prob: the probability of changing the aspect ratio by a random factor.
        random_aspect_range: the minimum and maximum factor, which is drawn log-uniformly.

    Example:
        >>> ResizeKeepRatio(256, longest=1).output_size((375, 500))
        (192, 256)
    """

    size: int | tuple[int, int] = argument(size_pair, by_epoch=True)
    longest: float = argument(finite_number, default=0.0, by_epoch=True, minimum=0, maximum=1)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=RESAMPLING)
    random_scale_prob: float = argument(probability, default=0.0, by_epoch=True)
    random_scale_range: tuple[float, float] = argument(interval, default=(0.85, 1.05), by_epoch=True, above=0)
    random_scale_area: bool = argument(flag, default=False)
    random_aspect_prob: float = argument(probability, default=0.0, by_epoch=True)
    random_aspect_range: tuple[float, float] = argument(interval, default=(0.9, 1.11), by_epoch=True, above=0)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers, factors = uniforms(5), np.ones(sizes_hw.shape)
        scale = scale_to_range(self.random_scale_range, numbers[:, 1])
        if self.random_scale_area:
            scale = 1 / np.sqrt(scale)
        factors *= np.where(numbers[:, 0] < self.random_scale_prob, scale, 1.0)[:, None]
        root = np.exp(scale_to_range(map(math.log, self.random_aspect_range), numbers[:, 3]) / 2)
        root = np.where(numbers[:, 2] < self.random_aspect_prob, root, 1.0)
        factors *= np.stack([1 / root, root], axis=1)
        return Box(
            full_windows(sizes_hw), self._sizes(sizes_hw, factors), self.filters(numbers[:, 4]), clips_boxes=False
        )

    def _sizes(self, sizes_hw: np.ndarray, factors: np.ndarray | float) -> np.ndarray:
        ratios = sizes_hw / np.array(self.size)
        ratio = ratios.max(axis=1) * self.longest + ratios.min(axis=1) * (1 - self.longest)
        return np.maximum(np.rint(sizes_hw * factors / ratio[:, None]), 1).astype(np.int64)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        if size_hw is None or self.random_scale_prob or self.random_aspect_prob:
            return None
        if isinstance(self.size, Varying) or isinstance(self.longest, Varying):
            return None
        height, width = self._sizes(np.array([size_hw]), 1.0)[0].tolist()
        return height, width


@declaration
class CenterCropOrPad(CenterCrop):
    """Crop the centre of the image; a smaller image is padded on both sides first.

    Other arguments and errors are as for `RandomCropOrPad`.

    Args:
        position: ``"left"`` keeps the left side of the image and pads only the right side, as for lines of text;
            vertically, the image is in the centre as for ``"center"``.
    """

    fill: int | tuple[int, ...] = argument(fill_values, default=0)
    padding_mode: PaddingMode = argument(one_of, default="constant", choices=PADDING_MODES)
    position: Literal["center", "left"] = argument(one_of, default="center", choices=("center", "left"))

    def _starts(self, sizes_hw: np.ndarray) -> np.ndarray:
        starts = super()._starts(sizes_hw)
        return starts if self.position == "center" else starts * np.array([1, 0])


@declaration
class RandomCropOrPad(FixedSizeCrop):
    """Crop a box at a random position; a smaller image is placed at a random position and padded.

    Args:
        size: an integer (a square), or (height, width).
        fill: the pixel value of the padding, 0 … 255, or a sequence with one value per channel; only for
            ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``, as for `RandomCrop`.
    """

    fill: int | tuple[int, ...] = argument(fill_values, default=0)
    padding_mode: PaddingMode = argument(one_of, default="constant", choices=PADDING_MODES)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        spare = sizes_hw - np.array(self.size, np.int64)
        return self.box_record_at((uniforms(2) * (abs(spare) + 1)).astype(np.int64) * np.sign(spare))


@declaration
class TrimBorder(Padding):
    """Crop a border of the same width on all sides.

    Args:
        border_size: the width of the border in pixels.

    Raises:
        TypeError, ValueError: the width is not an integer, or is negative.
        DrawError: (when drawn) the border covers the entire image.
    """

    is_crop: ClassVar[bool] = True
    may_refuse: ClassVar[bool] = True

    border_size: int = argument(integer, minimum=0)

    @property
    def min_input_hw(self) -> tuple[int, int]:
        return 1, 1  # images that are too small are refused

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        cropped_hw = sizes_hw - 2 * self.border_size
        if (cropped_hw < 1).any():
            row = int((cropped_hw < 1).any(axis=1).argmax())
            height, width = sizes_hw[row].tolist()
            raise DrawError(
                f"TrimBorder({self.border_size}) would remove an entire image of {height}×{width} (height × width); "
                "use a smaller border, or put a Resize before it",
                row,
            )
        return self.box_record(np.full_like(cropped_hw, self.border_size), cropped_hw)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if size_hw is None else (size_hw[0] - 2 * self.border_size, size_hw[1] - 2 * self.border_size)
