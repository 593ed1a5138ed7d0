"""Transforms that move pixels and draw only a box or a coin: sizes, crops and flips.

Names, arguments, defaults and meaning are torchvision's (`torchvision.transforms.v2`), but draws are made for each
sample: in workers, which decode no more than the boxes, and in the main process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from gpuload.transforms.arguments import (
    antialias_flag,
    depends_on_epoch,
    fill_values,
    interpolation_name,
    is_sequence,
    probability,
    size_pair,
    whole,
)
from gpuload.transforms.base import EVERYWHERE, DrawError, Padding, Resampling, Transform, Uniforms, declaration
from gpuload.transforms.program.ops import Box, Flip, Record
from gpuload.transforms.program.windows import full_windows

__all__ = ["CenterCrop", "RandomCrop", "RandomHorizontalFlip", "RandomVerticalFlip", "Resize"]

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
    interpolation: str = "bilinear"
    max_size: int | None = None
    antialias: bool = True

    def __post_init__(self) -> None:
        size, max_size = self.size, self.max_size
        if depends_on_epoch(size):
            each = size.checked(lambda size: replace(self, size=size).size)  # pyright: ignore
            object.__setattr__(self, "size", each)
            self._check_filter()
            return
        if is_sequence(size):
            pair = size_pair("Resize(size=…)", size)
            size = pair[0] if len(self.size) == 1 else pair  # pyright: ignore[reportArgumentType]
        elif size is not None:
            size = whole("Resize(size=…)", size, least=1)
        if max_size is not None:
            max_size = whole("Resize(max_size=…)", max_size, least=1)
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
        object.__setattr__(self, "max_size", max_size)
        self._check_filter()

    def _check_filter(self) -> None:
        name = "Resize(interpolation=…)"
        object.__setattr__(self, "interpolation", interpolation_name(name, self.interpolation, resizing=True))
        object.__setattr__(self, "antialias", antialias_flag("Resize(antialias=…)", self.antialias, self.interpolation))

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

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", size_pair(f"{type(self).__name__}(size=…)", self.size))

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
        return self.boxes(central_starts(sizes_hw, self.size))


def central_starts(sizes_hw: np.ndarray, size: Any) -> np.ndarray:
    """The top left corners of central crops of a size; negative where the image is smaller."""
    spare = sizes_hw - np.array(size, np.int64)
    # torchvision pads ⌊missing / 2⌋ on the top and left, and rounds the corner of a crop half to even.
    return np.where(spare < 0, -(-spare // 2), np.rint(spare / 2).astype(np.int64))


@declaration
class RandomCrop(FixedSizeCrop):
    """Cut out a box of a given size at a random place.

    Args:
        size: an integer (a square), or (height, width), or `by_epoch`.
        padding: pixels added around the image first: one number for all sides, (left and right, top and bottom), or
            (left, top, right, bottom). None: none.
        pad_if_needed: pad an image that is smaller than the crop by the missing pixels, on both sides.
        fill: the level of padding in 0 … 255, or one for each channel; for ``padding_mode="constant"``.
        padding_mode: ``"constant"``, ``"edge"`` (the last pixel is repeated), ``"reflect"`` (mirrored, the last pixel
            not repeated), ``"symmetric"`` (mirrored, the last pixel repeated).

    Raises:
        TypeError, ValueError: an argument is invalid.
        DrawError: (when drawn) an image is smaller than the crop, and `pad_if_needed` is False.
    """

    padding: int | tuple[int, ...] | None = None
    pad_if_needed: bool = False
    fill: int | tuple[int, ...] = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding is not None:
            object.__setattr__(self, "padding", sides_of("RandomCrop(padding=…)", self.padding, least=0))
        object.__setattr__(self, "fill", fill_values("RandomCrop(fill=…)", self.fill))
        padding_mode_of("RandomCrop(padding_mode=…)", self.padding_mode)
        if not isinstance(self.pad_if_needed, bool):
            raise TypeError(f"RandomCrop(pad_if_needed=…) must be True or False, got {self.pad_if_needed!r}")

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


def sides_of(name: str, value: Any, *, least: int | None) -> tuple[int, int, int, int]:
    """Padding as torchvision reads it, as (left, top, right, bottom)."""
    if not is_sequence(value):
        value = (value,)
    if len(value) not in (1, 2, 4):
        raise ValueError(f"{name} must be 1, 2 or 4 numbers, got {len(value)}: {value!r}")
    numbers = [whole(name, entry, least=least) for entry in value]
    left, top, right, bottom = numbers * (4 // len(numbers))
    return left, top, right, bottom


def padding_mode_of(name: str, value: Any) -> PaddingMode:
    if not isinstance(value, str) or value not in PADDING_MODES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, PADDING_MODES))}, got {value!r}")
    return value


@declaration
class _RandomFlip(Transform):
    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE
    record: ClassVar[type[Record]] = Flip
    axis: ClassVar[int]

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", probability(f"{type(self).__name__}(p=…)", self.p))

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
