"""Transforms that move pixels, and whose only random parameters are boxes and flips: resizing, cropping, padding and
flipping.

Names, arguments, defaults and semantics are torchvision's (`torchvision.transforms.v2`), but random parameters are
drawn per sample. Workers draw the boxes too, and decode only the pixels inside the boxes. Padding works like numpy's
`pad`: a constant, the edge pixels, or the image mirrored as often as needed.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from gpuload.checks import argument, flag, integer, interval, is_sequence, numbers, one_of, probability
from gpuload.transforms.arguments import (
    RESAMPLING,
    antialias_flag,
    fill_values,
    interpolation_name,
    size_pair,
)
from gpuload.transforms.base import (
    EVERYWHERE,
    DrawError,
    Padding,
    Resampling,
    Transform,
    Uniforms,
    declaration,
    scale_to_range,
)
from gpuload.transforms.program.ops import Box, Flip, Record, Turn
from gpuload.transforms.program.windows import full_windows
from gpuload.transforms.varying import Varying

__all__ = [
    "CenterCrop",
    "Pad",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotate90",
    "RandomTranspose",
    "RandomVerticalFlip",
    "RandomZoomOut",
    "Resize",
]

# Row k describes the rotation by k · 90° counterclockwise, like numpy's `rot90`: whether rows and columns are swapped,
# whether the image is then mirrored vertically, and whether it is mirrored horizontally.
QUARTER_TURNS: Final = np.array([[False, False, False], [True, True, False], [False, True, True], [True, False, True]])

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
PADDING_MODES: Final = get_args(PaddingMode)


def _check_length_or_size(name: str, value: Any) -> int | tuple[int, int] | None:
    if value is None:
        return None
    if is_sequence(value):
        pair = size_pair(name, value)
        return pair[0] if len(value) == 1 else pair
    return integer(name, value, minimum=1)


@declaration
class Resize(Resampling):
    """Resize the image to a given size, with Pillow's antialiasing.

    Args:
        size: an integer, the new length of the shorter side (the aspect ratio is preserved); or (height, width); or
            None, if `max_size` is the new length of the longer side; or `by_epoch`, `by_batch`, or `bucket_size`.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"`` draws bilinear or
            bicubic for each image.
        max_size: the maximum length of the longer side; allowed only if `size` is an integer or None.
        antialias: if False, bilinear and bicubic work like `torch.nn.functional.interpolate` without antialiasing.

    Example:
        >>> Resize(256).output_size((375, 500))
        (256, 341)
    """

    size: int | tuple[int, int] | None = argument(_check_length_or_size, by_epoch=True)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=RESAMPLING)
    max_size: int | None = argument(integer, default=None, by_epoch=True, minimum=1)
    antialias: bool = argument(antialias_flag, default=True)

    def check_arguments(self) -> None:
        size, max_size = self.size, self.max_size
        if max_size is not None:
            if isinstance(size, tuple):
                raise ValueError(
                    f"Resize(max_size={max_size}) needs a single integer as size, the length of the shorter side; got "
                    f"size={size}, which fixes both sides"
                )
            if size is not None and max_size <= size:
                raise ValueError(
                    f"Resize(max_size={max_size}) must be greater than size={size}, which is the shorter side"
                )
        elif size is None:
            raise ValueError("Resize(size=None) needs max_size=…, the new length of the longer side")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        filters = self.filters(uniforms(1)[:, 0] if self.interpolation == "random" else None)
        return Box(full_windows(sizes_hw), self._sizes(sizes_hw), filters, clips_boxes=False)

    def _sizes(self, sizes_hw: np.ndarray) -> np.ndarray:
        if isinstance(self.size, tuple):
            return np.broadcast_to(np.array(self.size, np.int64), sizes_hw.shape)
        if self.size is not None:
            return sizes_by_shorter_side(sizes_hw, np.full(len(sizes_hw), self.size), self.max_size)
        short, long = sizes_hw.min(axis=1), sizes_hw.max(axis=1)
        return _orient(sizes_hw, (self.max_size * short / long).astype(np.int64), np.full_like(long, self.max_size))

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        if isinstance(self.size, Varying) or isinstance(self.max_size, Varying):
            return None
        if size_hw is not None and not isinstance(self.size, tuple):
            height, width = self._sizes(np.array([size_hw], np.int64))[0].tolist()
            return height, width
        return self.size if isinstance(self.size, tuple) else None

    @property
    def min_output_hw(self) -> tuple[int, int]:
        is_shorter_side = isinstance(self.size, int) and self.max_size is None
        return (self.size, self.size) if is_shorter_side else super().min_output_hw  # pyright: ignore[reportReturnType]


def sizes_by_shorter_side(sizes_hw: np.ndarray, sides: np.ndarray, max_size: int | None = None) -> np.ndarray:
    """Scale sizes (B, 2) so that the shorter sides become `sides` (B,), or less where the longer side would exceed
    `max_size`."""
    short, long = sizes_hw.min(axis=1), sizes_hw.max(axis=1)
    new_short, new_long = sides, (sides * long / short).astype(np.int64)
    if max_size is not None:
        exceeds = new_long > max_size
        new_short = np.where(exceeds, (max_size * new_short / new_long).astype(np.int64), new_short)
        new_long = np.where(exceeds, max_size, new_long)
    return _orient(sizes_hw, new_short, new_long)


def _orient(sizes_hw: np.ndarray, short: np.ndarray, long: np.ndarray) -> np.ndarray:
    short, is_wide = np.maximum(short, 1), sizes_hw[:, 0] <= sizes_hw[:, 1]
    return np.stack([np.where(is_wide, short, long), np.where(is_wide, long, short)], axis=1)


@declaration
class FixedSizeCrop(Padding):
    """Base class of crops to a fixed size, which draw only a box."""

    is_crop: ClassVar[bool] = True

    size: int | tuple[int, int] = argument(size_pair, by_epoch=True)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size if isinstance(self.size, tuple) else None

    @property
    def min_input_hw(self) -> tuple[int, int] | None:
        return self.size if isinstance(self.size, tuple) else None

    def box_record_at(self, starts: np.ndarray) -> Box:
        """Return a `Box` record for crops with these top left corners (B, 2)."""
        return self.box_record(starts, np.broadcast_to(np.array(self.size, np.int64), starts.shape))


@declaration
class CenterCrop(FixedSizeCrop):
    """Crop the centre of the image; pad the image with zeros first if it is smaller.

    Args:
        size: an integer (a square), or (height, width), or `by_epoch`, `by_batch`, or `bucket_size`.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        return self.box_record_at(self._starts(sizes_hw))

    def _starts(self, sizes_hw: np.ndarray) -> np.ndarray:
        spare = sizes_hw - np.array(self.size, np.int64)
        # torchvision pads by ⌊missing / 2⌋ at the top and left, and rounds the corner of a crop half to even.
        return np.where(spare < 0, -(-spare // 2), np.rint(spare / 2).astype(np.int64))


def padding_sides(name: str, value: Any, **bounds: int) -> tuple[int, int, int, int]:
    """Return padding as (left, top, right, bottom); `value` has one, two or four numbers, as in torchvision."""
    sides = numbers(name, value, form="2 or 4 numbers", counts=(1, 2, 4), single=True, entry=integer, **bounds)
    left, top, right, bottom = sides * (4 // len(sides))
    return left, top, right, bottom


@declaration
class RandomCrop(FixedSizeCrop):
    """Crop a box of a given size at a random position.

    Args:
        size: an integer (a square), or (height, width), or `by_epoch`, `by_batch`, or `bucket_size`.
        padding: the number of pixels to add around the image first: one number for all sides, (left and right, top and
            bottom), or (left, top, right, bottom). None means no padding.
        pad_if_needed: if the image is smaller than the crop, whether to pad each side by the number of missing pixels.
        fill: the pixel value of the padding, 0 … 255, or a sequence with one value per channel; only for
            ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"`` (the last pixel is repeated), ``"reflect"`` (mirrored without repeating
            the last pixel), ``"symmetric"`` (mirrored, repeating the last pixel).

    Raises:
        TypeError, ValueError: an argument is invalid.
        DrawError: in `draw`: an image is smaller than the crop, and `pad_if_needed` is False.
    """

    padding: int | tuple[int, ...] | None = argument(padding_sides, default=None, minimum=0)
    pad_if_needed: bool = argument(flag, default=False)
    fill: int | tuple[int, ...] = argument(fill_values, default=0)
    padding_mode: PaddingMode = argument(one_of, default="constant", choices=PADDING_MODES)

    @property
    def may_refuse(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.pad_if_needed

    @property
    def min_input_hw(self) -> tuple[int, int] | None:
        if self.padding is not None:
            return None
        return super().min_input_hw if self.pad_if_needed else (1, 1)  # smaller images are refused

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        left, top, right, bottom = self.padding or (0, 0, 0, 0)  # pyright: ignore[reportGeneralTypeIssues]
        padding_before = np.broadcast_to(np.array([top, left], np.int64), sizes_hw.shape)
        padded = sizes_hw + padding_before + np.array([bottom, right], np.int64)
        missing_hw = np.array(self.size, np.int64) - padded
        if self.pad_if_needed:
            missing_hw = np.maximum(missing_hw, 0)
            padding_before, padded = padding_before + missing_hw, padded + 2 * missing_hw
        elif (missing_hw > 0).any():
            row = int((missing_hw > 0).any(axis=1).argmax())
            (height, width), size = sizes_hw[row].tolist(), self.size
            raise DrawError(
                f"RandomCrop(size={size}): the image of {height}×{width} (height × width) is smaller than the crop"
                f"{f', even with its padding ({padded[row, 0]}×{padded[row, 1]})' if self.padding else ''}; "
                "use pad_if_needed=True, or put a Resize before it",
                row,
            )
        spare = padded - np.array(self.size, np.int64)
        starts = (uniforms(2) * (spare + 1)).astype(np.int64)
        return self.box_record_at(starts - padding_before)


@declaration
class _RandomFlip(Transform):
    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = Flip
    axis: ClassVar[int]

    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Flip:
        return Flip(uniforms(1)[:, 0] < self.p, self.axis)


@declaration
class RandomHorizontalFlip(_RandomFlip):
    """Flip the image horizontally (left to right), with probability `p`."""

    axis: ClassVar[int] = 1


@declaration
class RandomVerticalFlip(_RandomFlip):
    """Flip the image vertically (upside down), with probability `p`."""

    axis: ClassVar[int] = 0


@declaration
class _RandomTurn(Transform):
    record: ClassVar[type[Record]] = Turn

    p: float = argument(probability, default=0.5, by_epoch=True)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if size_hw is not None and size_hw[0] == size_hw[1] else None


@declaration
class RandomRotate90(_RandomTurn):
    """Rotate by 0°, 90°, 180° or 270°, equally likely, with probability `p`.

    So even with ``p=1``, a quarter of the images are unchanged, as in albumentations (where the default for `p` has
    been 1 since version 2, and was 0.5 before). If an image is not square, its size can change, so end the chain with a
    crop or a ``Resize((height, width))``.

    Args:
        p: the probability.

    Example:
        >>> RandomRotate90().output_size((224, 224))
        (224, 224)
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Turn:
        numbers = uniforms(2)
        quarters = QUARTER_TURNS[np.where(numbers[:, 0] < self.p, (4 * numbers[:, 1]).astype(np.int64), 0)]
        return Turn(quarters[:, 0], quarters[:, 1:])


@declaration
class RandomTranspose(_RandomTurn):
    """Swap rows and columns, with probability `p`: mirror the image across the diagonal through its top left corner.

    If an image is not square, its size changes, so end the chain with a crop or a ``Resize((height, width))``.

    Args:
        p: the probability.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Turn:
        return Turn(uniforms(1)[:, 0] < self.p, np.zeros(sizes_hw.shape, np.bool_))


# torchvision (transforms/v2/_geometry.py, `RandomResizedCrop.make_params`) draws an area and an aspect ratio up to ten
# times until the box fits into the image, and falls back to the largest central box with an allowed ratio. Here each
# sample uses 22 random numbers: two for the corner of the box, ten for areas, ten for ratios (and one more for a random
# filter). All ten boxes are computed in one step, which takes 250 µs for a chunk of 16 images. Computing the other nine
# boxes only for images where the first box does not fit took 600 µs.
TRIES: Final = 10


@declaration
class RandomResizedCrop(Resampling):
    """Crop a box of random area and aspect ratio, and resize it.

    The resampling filter is cut off at the box: pixels outside the box have no effect on the result.

    Args:
        size: the size of the result: an integer (a square), or (height, width), or `by_epoch`, `by_batch`, or
            `bucket_size`.
        scale: the minimum and maximum area of the box, as fractions of the image's area.
        ratio: the minimum and maximum aspect ratio (width / height) of the box, which is drawn log-uniformly.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"`` draws bilinear or
            bicubic for each image.
        antialias: if False, bilinear and bicubic work like `torch.nn.functional.interpolate` without antialiasing.
    """

    is_crop: ClassVar[bool] = True

    size: int | tuple[int, int] = argument(size_pair, by_epoch=True)
    scale: tuple[float, float] = argument(interval, default=(0.08, 1.0), by_epoch=True, above=0)
    ratio: tuple[float, float] = argument(interval, default=(3 / 4, 4 / 3), by_epoch=True, above=0)
    interpolation: str = argument(interpolation_name, default="bilinear", allowed=RESAMPLING)
    antialias: bool = argument(antialias_flag, default=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(2 + 2 * TRIES + (self.interpolation == "random"))
        area = (sizes_hw[:, :1] * sizes_hw[:, 1:]) * scale_to_range(self.scale, numbers[:, 2 : 2 + TRIES])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        root = np.exp((0.5 * low) + numbers[:, 2 + TRIES : 2 + 2 * TRIES] * (0.5 * (high - low)))
        side = np.sqrt(area)
        heights, widths = np.rint(side / root), np.rint(side * root)
        fits = (heights > 0) & (heights <= sizes_hw[:, :1]) & (widths > 0) & (widths <= sizes_hw[:, 1:])
        rows, tries = np.arange(len(fits)), fits.argmax(axis=1)
        boxes_hw = np.stack([heights[rows, tries], widths[rows, tries]], axis=1).astype(np.int64)
        starts = (numbers[:, :2] * (sizes_hw - boxes_hw + 1)).astype(np.int64)
        has_no_fit = ~fits[rows, tries]
        if has_no_fit.any():
            boxes_hw[has_no_fit] = self._largest_sizes(sizes_hw[has_no_fit])
            starts[has_no_fit] = (sizes_hw[has_no_fit] - boxes_hw[has_no_fit]) // 2
        return self._make_record(np.concatenate([starts, boxes_hw], axis=1), numbers[:, -1])

    def record_from_regions(self, uniforms: Uniforms, regions_tlhw: np.ndarray) -> Box:
        # The regions are the boxes, so only the random numbers for the filter are needed.
        return self._make_record(
            regions_tlhw, uniforms(3 + 2 * TRIES)[:, -1] if self.interpolation == "random" else None
        )

    def _make_record(self, boxes_tlhw: np.ndarray, numbers: np.ndarray | None) -> Box:
        sizes_hw = np.empty((len(boxes_tlhw), 2), np.int64)
        sizes_hw[:] = self.size
        return Box(boxes_tlhw, sizes_hw, self.filters(numbers))

    def _largest_sizes(self, sizes_hw: np.ndarray) -> np.ndarray:
        """Return the sizes of the largest boxes with an allowed aspect ratio."""
        height, width = sizes_hw[:, 0], sizes_hw[:, 1]
        low, high = self.ratio
        ratio = width / height
        boxes_hw = sizes_hw.copy()
        boxes_hw[:, 0] = np.where(ratio < low, np.rint(width / low), height)
        boxes_hw[:, 1] = np.where(ratio > high, np.rint(height * high), width)
        return np.clip(boxes_hw, 1, sizes_hw)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size if isinstance(self.size, tuple) else None


@declaration
class Pad(Padding):
    """Add a border around the image.

    Args:
        padding: the width of the border: one number for all sides, (left and right, top and bottom), or (left, top,
            right, bottom). Negative numbers crop the image.
        fill: the pixel value of the border, 0 … 255, or a sequence with one value per channel, or a dict that maps
            types such as `gl.Image` and `gl.Mask` to these. The range is 0 … 65535 for uint16 images, and unlimited for
            float32 images. Only for ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"`` (the last pixel is repeated), ``"reflect"`` (mirrored without repeating
            the last pixel), ``"symmetric"`` (mirrored, repeating the last pixel).

    Raises:
        TypeError, ValueError: an argument is invalid.
        DrawError: in `draw`: negative padding removes the entire image.

    Example:
        >>> Pad(4).output_size((32, 32))
        (40, 40)
    """

    padding: int | tuple[int, ...] = argument(padding_sides)
    fill: Any = argument(fill_values, default=0)
    padding_mode: PaddingMode = argument(one_of, default="constant", choices=PADDING_MODES)

    @property
    def is_crop(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return min(self._sides) < 0

    @property
    def may_refuse(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.is_crop

    @property
    def _sides(self) -> tuple[int, int, int, int]:
        return self.padding  # pyright: ignore[reportReturnType]

    @property
    def _growth(self) -> np.ndarray:
        left, top, right, bottom = self._sides
        return np.array([top + bottom, left + right], np.int64)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        sizes = sizes_hw + self._growth
        if (sizes < 1).any():
            row = int((sizes < 1).any(axis=1).argmax())
            height, width = sizes_hw[row].tolist()
            raise DrawError(
                f"Pad({self._sides}) has negative padding that would remove an entire image of {height}×{width} "
                "(height × width); reduce the padding, or put a Resize before it",
                row,
            )
        return self.box_record(np.broadcast_to(-np.array(self._sides[1::-1], np.int64), sizes.shape), sizes)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        if size_hw is None:
            return None
        height, width = (np.array(size_hw) + self._growth).tolist()
        return height, width


@declaration
class RandomZoomOut(Padding):
    """Place the image at a random position on a larger canvas, with probability `p`.

    Args:
        fill: the pixel value of the canvas, 0 … 255, or a sequence with one value per channel, or a dict that maps
            types such as `gl.Image` and `gl.Mask` to these.
        side_range: the minimum and maximum factor by which both sides grow, at least 1.
        p: the probability.
    """

    fill: Any = argument(fill_values, default=0)
    side_range: tuple[float, float] = argument(interval, default=(1.0, 4.0), by_epoch=True, minimum=1)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(4)
        factors = np.where(numbers[:, 0] < self.p, scale_to_range(self.side_range, numbers[:, 1]), 1.0)
        sizes = (sizes_hw * factors[:, None]).astype(np.int64)
        # columns 3, 2: torchvision draws the left offset before the top offset
        starts = ((sizes - sizes_hw) * numbers[:, [3, 2]]).astype(np.int64)
        return self.box_record(-starts, sizes)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if self.p == 0 else None
