"""Transforms that move pixels and draw only a box or a coin: sizes, crops, borders and flips.

Names, arguments, defaults and meaning are torchvision's (`torchvision.transforms.v2`), but draws are made for each
sample: in workers, which decode no more than the boxes, and in the main process. Borders are those of numpy's `pad`: a
constant, the edge, or the image mirrored as often as needed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import numpy as np

from gpuload.transforms.arguments import (
    RESAMPLING,
    antialias_flag,
    depends_on_epoch,
    fill_values,
    flag,
    interpolation_name,
    interval,
    is_sequence,
    probability,
    size_pair,
    whole,
)
from gpuload.transforms.base import (
    EVERYWHERE,
    DrawError,
    Padding,
    Resampling,
    Transform,
    Uniforms,
    argument,
    between,
    declaration,
)
from gpuload.transforms.program.ops import Box, Flip, Record, Turn
from gpuload.transforms.program.windows import full_windows

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

# A turn by k · 90° against the clock, as numpy's `rot90` turns: whether rows and columns are swapped, then whether the
# image is mirrored upside down and left to right.
QUARTERS: Final = np.array([[False, False, False], [True, True, False], [False, True, True], [True, False, True]])

PADDING_MODES = ("constant", "edge", "reflect", "symmetric")
PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]


@declaration
class Resize(Resampling):
    """Resize to a size, with antialiasing as Pillow does it.

    Args:
        size: an integer, the new length of the shorter side, with the aspect ratio kept; or (height, width); or None,
            with `max_size` as the new length of the longer side. Or `by_epoch`.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        max_size: the longer side does not become longer than this; only for an integer (or None) as `size`.
        antialias: False: bilinear and bicubic as `torch.nn.functional.interpolate` does without antialiasing.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> Resize(256).output_size((375, 500))
        (256, 341)
    """

    size: int | tuple[int, int] | None
    interpolation: str = argument(interpolation_name, default="bilinear", known=RESAMPLING)
    max_size: int | None = argument(whole, default=None, minimum=1)
    antialias: bool = argument(antialias_flag, default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        size, max_size = self.size, self.max_size
        if depends_on_epoch(size):
            each = size.checked(lambda size: replace(self, size=size).size)  # pyright: ignore
            object.__setattr__(self, "size", each)
            return
        if is_sequence(size):
            pair = size_pair("Resize(size=…)", size)
            size = pair[0] if len(self.size) == 1 else pair  # pyright: ignore[reportArgumentType]
        elif size is not None:
            size = whole("Resize(size=…)", size, minimum=1)
        if max_size is not None:
            if isinstance(size, tuple):
                raise ValueError(
                    f"Resize(max_size={max_size}) goes with one integer as size, which is the shorter side; got "
                    f"size={size}, which fixes both"
                )
            if size is not None and max_size <= size:
                raise ValueError(
                    f"Resize(max_size={max_size}) must be greater than size={size}, which is the shorter side"
                )
        elif size is None:
            raise ValueError("Resize(size=None) needs max_size=…, the length that the longer side is brought to")
        object.__setattr__(self, "size", size)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        filters = self.filters(uniforms(1)[:, 0] if self.interpolation == "random" else None)
        return Box(full_windows(sizes_hw), self._sizes(sizes_hw), filters, cuts=False)

    def _sizes(self, sizes_hw: np.ndarray) -> np.ndarray:
        if isinstance(self.size, tuple):
            return np.broadcast_to(np.array(self.size, np.int64), sizes_hw.shape)
        if self.size is not None:
            return sizes_by_shorter_side(sizes_hw, np.full(len(sizes_hw), self.size), self.max_size)
        short, long = sizes_hw.min(axis=1), sizes_hw.max(axis=1)
        return _oriented(sizes_hw, (self.max_size * short / long).astype(np.int64), np.full_like(long, self.max_size))

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        if size_hw is not None and not isinstance(self.size, tuple):
            height, width = self._sizes(np.array([size_hw], np.int64))[0].tolist()
            return height, width
        return self.size if isinstance(self.size, tuple) else None


def sizes_by_shorter_side(sizes_hw: np.ndarray, sides: np.ndarray, max_size: int | None = None) -> np.ndarray:
    """Sizes with the shorter side `sides` (B,), or less where the longer one would exceed `max_size`."""
    short, long = sizes_hw.min(axis=1), sizes_hw.max(axis=1)
    new_short, new_long = sides, (sides * long / short).astype(np.int64)
    if max_size is not None:
        over = new_long > max_size
        new_short = np.where(over, (max_size * new_short / new_long).astype(np.int64), new_short)
        new_long = np.where(over, max_size, new_long)
    return _oriented(sizes_hw, new_short, new_long)


def _oriented(sizes_hw: np.ndarray, short: np.ndarray, long: np.ndarray) -> np.ndarray:
    short, wide = np.maximum(short, 1), sizes_hw[:, 0] <= sizes_hw[:, 1]
    return np.stack([np.where(wide, short, long), np.where(wide, long, short)], axis=1)


@declaration
class FixedSizeCrop(Padding):
    """Base of the crops: the box is all that is drawn, and all results have its size."""

    crops: ClassVar[bool] = True

    size: int | tuple[int, int] = argument(size_pair)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size  # pyright: ignore[reportReturnType]

    def boxes(self, starts: np.ndarray) -> Box:
        """The record, from the top left corners (B, 2)."""
        return self.box(starts, np.broadcast_to(np.array(self.size, np.int64), starts.shape))


@declaration
class CenterCrop(FixedSizeCrop):
    """Cut out the middle; a smaller image is padded with zeros first.

    Args:
        size: an integer (a square), or (height, width), or `by_epoch`.

    Raises:
        TypeError, ValueError: it is neither.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        spare = sizes_hw - np.array(self.size, np.int64)
        # torchvision pads ⌊missing / 2⌋ on the top and left, and rounds the corner of a crop half to even.
        return self.boxes(np.where(spare < 0, -(-spare // 2), np.rint(spare / 2).astype(np.int64)))


def sides_of(name: str, value: Any, *, minimum: int | None) -> tuple[int, int, int, int]:
    """Padding as torchvision reads it, as (left, top, right, bottom)."""
    if not is_sequence(value):
        value = (value,)
    if len(value) not in (1, 2, 4):
        raise ValueError(f"{name} must be 1, 2 or 4 numbers, got {len(value)}: {value!r}")
    numbers = [whole(name, entry, minimum=minimum) for entry in value]
    left, top, right, bottom = numbers * (4 // len(numbers))
    return left, top, right, bottom


def padding_mode_of(name: str, value: Any) -> PaddingMode:
    if not isinstance(value, str) or value not in PADDING_MODES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, PADDING_MODES))}, got {value!r}")
    return value


@declaration
class RandomCrop(FixedSizeCrop):
    """Cut out a box of a given size at a random place.

    Args:
        size: an integer (a square), or (height, width), or `by_epoch`.
        padding: pixels added around the image first: one number for all sides, (left and right, top and bottom), or
            (left, top, right, bottom). None means none.
        pad_if_needed: pad an image that is smaller than the crop by the missing pixels, on both sides.
        fill: the level of padding in 0 … 255, or one for each channel; for ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"`` (the last pixel is repeated), ``"reflect"`` (mirrored, the last pixel
            not repeated), ``"symmetric"`` (mirrored, the last pixel repeated).

    Raises:
        TypeError, ValueError: an argument is invalid.
        DrawError: (when drawn) an image is smaller than the crop, and `pad_if_needed` is False.
    """

    padding: int | tuple[int, ...] | None = argument(sides_of, default=None, minimum=0)
    pad_if_needed: bool = argument(flag, default=False)
    fill: int | tuple[int, ...] = argument(fill_values, default=0)
    padding_mode: PaddingMode = argument(padding_mode_of, default="constant")

    @property
    def may_refuse(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.pad_if_needed

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        left, top, right, bottom = self.padding or (0, 0, 0, 0)  # pyright: ignore[reportGeneralTypeIssues]
        before = np.broadcast_to(np.array([top, left], np.int64), sizes_hw.shape)
        padded = sizes_hw + before + np.array([bottom, right], np.int64)
        missing = np.array(self.size, np.int64) - padded
        if self.pad_if_needed:
            missing = np.maximum(missing, 0)
            before, padded = before + missing, padded + 2 * missing
        elif (missing > 0).any():
            row = int((missing > 0).any(axis=1).argmax())
            (height, width), size = sizes_hw[row].tolist(), self.size
            raise DrawError(
                f"RandomCrop(size={size}): the image is smaller than the crop, {height}×{width} (height × width)"
                f"{f', with its padding {padded[row, 0]}×{padded[row, 1]}' if self.padding else ''}; "
                "use pad_if_needed=True, or a Resize before it",
                row,
            )
        spare = padded - np.array(self.size, np.int64)
        starts = (uniforms(2) * (spare + 1)).astype(np.int64)
        return self.boxes(starts - before)


@declaration
class _RandomFlip(Transform):
    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = Flip
    axis: ClassVar[int]

    p: float = argument(probability, default=0.5)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Flip:
        return Flip(uniforms(1)[:, 0] < self.p, self.axis)


@declaration
class RandomHorizontalFlip(_RandomFlip):
    """Mirror left and right, with probability `p`."""

    axis: ClassVar[int] = 1


@declaration
class RandomVerticalFlip(_RandomFlip):
    """Mirror top and bottom, with probability `p`."""

    axis: ClassVar[int] = 0


@declaration
class _RandomTurn(Transform):
    record: ClassVar[type[Record]] = Turn

    p: float = argument(probability, default=0.5)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if size_hw is not None and size_hw[0] == size_hw[1] else None


@declaration
class RandomRotate90(_RandomTurn):
    """Turn by a multiple of 90°, with probability `p`; 0°, 90°, 180° and 270° are equally likely then.

    So with ``p=1`` a quarter of the images stay as they are, as in albumentations (whose `p` is 1 unless given since
    version 2, and was 0.5 before). An image of another height than width changes its size: end with a crop or a
    ``Resize((height, width))``.

    Args:
        p: the probability.

    Raises:
        TypeError, ValueError: it is not a number in 0 … 1.

    Example:
        >>> RandomRotate90().output_size((224, 224))
        (224, 224)
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Turn:
        numbers = uniforms(2)
        quarters = QUARTERS[np.where(numbers[:, 0] < self.p, (4 * numbers[:, 1]).astype(np.int64), 0)]
        return Turn(quarters[:, 0], quarters[:, 1:])


@declaration
class RandomTranspose(_RandomTurn):
    """Swap rows and columns, with probability `p`: the image is mirrored at the line from its top left corner.

    An image of another height than width changes its size: end with a crop or a ``Resize((height, width))``.

    Args:
        p: the probability.

    Raises:
        TypeError, ValueError: it is not a number in 0 … 1.
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Turn:
        return Turn(uniforms(1)[:, 0] < self.p, np.zeros(sizes_hw.shape, np.bool_))


# torchvision (transforms/v2/_geometry.py, `RandomResizedCrop.make_params`) tries ten times to draw an area and an
# aspect ratio whose box fits into the image, then takes the largest central box with an allowed ratio. Here each sample
# has 22 numbers: two for the corner of the box, ten for areas, ten for ratios (and one more for a random filter). All
# ten boxes are made at once: drawing later ones only where the first does not fit took 600 µs instead of 250 µs for a
# chunk of 16.
TRIES: Final = 10


@declaration
class RandomResizedCrop(Resampling):
    """Cut out a box of random area and aspect ratio, and resize it.

    The filter is cut at the box: pixels outside have no effect on the result.

    Args:
        size: of the result: an integer (a square), or (height, width), or `by_epoch`.
        scale: the least and the greatest area of the box, as fractions of the image's.
        ratio: the least and the greatest aspect ratio (width / height) of the box; drawn log-uniformly.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"`` or ``"nearest"``; ``"random"``: bilinear or bicubic,
            drawn.
        antialias: False: bilinear and bicubic as `torch.nn.functional.interpolate` does without antialiasing.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    crops: ClassVar[bool] = True

    size: int | tuple[int, int] = argument(size_pair)
    scale: tuple[float, float] = argument(interval, default=(0.08, 1.0), positive=True)
    ratio: tuple[float, float] = argument(interval, default=(3 / 4, 4 / 3), positive=True)
    interpolation: str = argument(interpolation_name, default="bilinear", known=RESAMPLING)
    antialias: bool = argument(antialias_flag, default=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(2 + 2 * TRIES + (self.interpolation == "random"))
        area = (sizes_hw[:, :1] * sizes_hw[:, 1:]) * between(self.scale, numbers[:, 2 : 2 + TRIES])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        root = np.exp((0.5 * low) + numbers[:, 2 + TRIES : 2 + 2 * TRIES] * (0.5 * (high - low)))
        side = np.sqrt(area)
        heights, widths = np.rint(side / root), np.rint(side * root)
        fits = (heights > 0) & (heights <= sizes_hw[:, :1]) & (widths > 0) & (widths <= sizes_hw[:, 1:])
        rows, tries = np.arange(len(fits)), fits.argmax(axis=1)
        boxes_hw = np.stack([heights[rows, tries], widths[rows, tries]], axis=1).astype(np.int64)
        starts = (numbers[:, :2] * (sizes_hw - boxes_hw + 1)).astype(np.int64)
        failed = ~fits[rows, tries]
        if failed.any():
            boxes_hw[failed] = self._central(sizes_hw[failed])
            starts[failed] = (sizes_hw[failed] - boxes_hw[failed]) // 2
        return self._box(np.concatenate([starts, boxes_hw], axis=1), numbers[:, -1])

    def drawn_again(self, uniforms: Uniforms, regions_tlhw: np.ndarray) -> Box:
        # Most of the numbers are for the box, which is the region.
        return self._box(regions_tlhw, uniforms(3 + 2 * TRIES)[:, -1] if self.interpolation == "random" else None)

    def _box(self, boxes_tlhw: np.ndarray, numbers: np.ndarray | None) -> Box:
        sizes_hw = np.empty((len(boxes_tlhw), 2), np.int64)
        sizes_hw[:] = self.size
        return Box(boxes_tlhw, sizes_hw, self.filters(numbers))

    def _central(self, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of the largest boxes with an allowed ratio."""
        height, width = sizes_hw[:, 0], sizes_hw[:, 1]
        low, high = self.ratio
        ratio = width / height
        boxes_hw = sizes_hw.copy()
        boxes_hw[:, 0] = np.where(ratio < low, np.rint(width / low), height)
        boxes_hw[:, 1] = np.where(ratio > high, np.rint(height * high), width)
        return np.clip(boxes_hw, 1, sizes_hw)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.size  # pyright: ignore[reportReturnType]


@declaration
class Pad(Padding):
    """Put a border around the image.

    Args:
        padding: the width: one number for all sides, (left and right, top and bottom), or (left, top, right, bottom). A
            negative one cuts off.
        fill: the level of the border in 0 … 255, or one for each channel, or a dict of them by type (for images of
            uint16 a level in 0 … 65535, of float32 any number); for
            ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"`` (the last pixel is repeated), ``"reflect"`` (mirrored, the last pixel
            not repeated), ``"symmetric"`` (mirrored, the last pixel repeated).

    Raises:
        TypeError, ValueError: an argument is invalid.
        DrawError: (when drawn) negative padding leaves nothing of an image.

    Example:
        >>> Pad(4).output_size((32, 32))
        (40, 40)
    """

    padding: int | tuple[int, ...] = argument(sides_of, minimum=None)
    fill: Any = argument(fill_values, default=0)
    padding_mode: PaddingMode = argument(padding_mode_of, default="constant")

    @property
    def crops(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return min(self._sides) < 0

    @property
    def may_refuse(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.crops

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
                f"Pad({self._sides}) with its negative padding leaves nothing of an image of {height}×{width} "
                "(height × width)",
                row,
            )
        return self.box(np.broadcast_to(-np.array(self._sides[1::-1], np.int64), sizes.shape), sizes)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        if size_hw is None:
            return None
        height, width = (np.array(size_hw) + self._growth).tolist()
        return height, width


@declaration
class RandomZoomOut(Padding):
    """Put the image at a random place on a larger canvas, with probability `p`.

    Args:
        fill: the level of the canvas in 0 … 255, or one for each channel, or a dict of them by type.
        side_range: the least and the greatest factor of the sides, at least 1.
        p: the probability.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    fill: Any = argument(fill_values, default=0)
    side_range: tuple[float, float] = argument(interval, default=(1.0, 4.0))
    p: float = argument(probability, default=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side_range[0] < 1:
            raise ValueError(f"RandomZoomOut(side_range=…) must not be less than 1, got {self.side_range}")

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(4)
        factors = np.where(numbers[:, 0] < self.p, between(self.side_range, numbers[:, 1]), 1.0)
        sizes = (sizes_hw * factors[:, None]).astype(np.int64)
        # torchvision draws left first.
        starts = ((sizes - sizes_hw) * numbers[:, [3, 2]]).astype(np.int64)
        return self.box(-starts, sizes)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if self.p == 0 else None
