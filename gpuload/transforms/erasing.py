"""Random erasing: overwrites boxes of an image, as in torchvision and timm.

The units of the written values depend on the transform's position in the chain, which `bind` sets. They are integer
pixel values (0 … 255), or, after the last transform that works on integer pixel values, the units of the final type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from gpuload.checks import argument, finite_number, flag, integer, interval, is_sequence, numbers, one_of, probability
from gpuload.transforms.base import EVERYWHERE, ChainPosition, Transform, Uniforms, declaration, scale_to_range
from gpuload.transforms.program.ops import Erase, RecordOutline

__all__ = ["Mode", "RandomErasing"]

Mode = Literal["const", "rand", "pixel"]

TRIES: Final = 10  # as in torchvision and timm
# A uniform number is (n + ½) / 2**32. Multiplied by this and truncated, it gives n, which is used as a seed.
SEED_RANGE: Final = 2.0**32


def _check_value(name: str, value: Any) -> float | tuple[float, ...] | str:
    if isinstance(value, str):
        return one_of(name, value, ("random",))
    return numbers(name, value) if is_sequence(value) else finite_number(name, value)


@declaration
class RandomErasing(Transform):
    """Overwrite one or more boxes of an image, with probability `p`.

    The units of `value` depend on the position in the chain. Before `ToDtype`, `value` is an integer in 0 … 255. After
    `Normalize`, or after `ToDtype` if no later transform works on integer pixel values, `value` is in the units of the
    converted images. Between `ToDtype` and a transform that works on integer pixel values, `value` is in the units of
    `ToDtype`, but rounded to the nearest integer pixel value.

    Zhong et al., "Random erasing data augmentation", AAAI 2020. As in torchvision, up to 10 boxes are drawn, and the
    first one that is smaller than the image is erased. `mode`, `min_count` and `max_count` are as in timm.

    Args:
        p: the probability.
        scale: the range of a box's area as a fraction of the image's area, within 0 … 1. If there are several boxes, it
            applies to their total area.
        ratio: the range of a box's height / width, greater than 0; drawn log-uniformly.
        value: a number, a sequence with one number per channel, or ``"random"``, which draws a standard normal number
            for each pixel and channel. ``"random"`` must come after all transforms that work on integer pixel values.
        inplace: for compatibility with torchvision; has no effect.
        mode: timm's modes: ``"const"`` writes `value`; ``"pixel"`` is the same as ``value="random"``; ``"rand"`` writes
            one random colour per box, of standard normal numbers. None means ``"pixel"`` if `value` is ``"random"``,
            otherwise ``"const"``.
        min_count, max_count: the minimum and maximum number of boxes, which is drawn uniformly; a `max_count` of None
            means `min_count`.

    Raises:
        TypeError, ValueError: an argument is invalid, or `value` cannot be used at this position in a chain.

    Example:
        >>> RandomErasing(0.25, value="random")
        RandomErasing(p=0.25, value='random')
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    p: float = argument(probability, default=0.5, by_epoch=True)
    scale: tuple[float, float] = argument(interval, default=(0.02, 0.33), by_epoch=True, minimum=0, maximum=1)
    ratio: tuple[float, float] = argument(interval, default=(0.3, 3.3), by_epoch=True, above=0)
    value: float | Sequence[float] | str = argument(_check_value, default=0.0)
    inplace: bool = argument(flag, default=False, compare=False)
    mode: str | None = argument(one_of, default=None, kw_only=True, choices=get_args(Mode))
    min_count: int = argument(integer, default=1, kw_only=True, minimum=1)
    max_count: int | None = argument(integer, default=None, kw_only=True)
    position: ChainPosition | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "RandomErasing"
        if self.mode == "const" and self.value == "random":
            raise ValueError(
                f"{name}(value='random') cannot be combined with mode='const'; pass a number as value, or omit mode"
            )
        if self.mode in ("rand", "pixel") and self.value not in ("random", 0.0):
            raise ValueError(
                f"{name}(value={self.value!r}) cannot be combined with mode={self.mode!r}; omit value or mode"
            )
        if self.max_count is not None:
            integer(f"{name}(max_count=…)", self.max_count, minimum=self.min_count)

    @property
    def kind(self) -> str:
        """The effective mode: ``"const"``, ``"rand"`` or ``"pixel"``."""
        return self.mode or ("pixel" if self.value == "random" else "const")

    @property
    def works_on_finished(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.position is not None and self.position.finished

    def bind(self, position: ChainPosition) -> RandomErasing:
        bound = replace(self)
        object.__setattr__(bound, "position", position)
        if not position.finished:
            bound._check_value_at(position)
        return bound

    def _check_value_at(self, position: ChainPosition) -> None:
        is_uint8 = position.state == "uint8"
        if self.kind != "const":
            option = f"mode={self.mode!r}" if self.mode else "value='random'"
            raise ValueError(
                f"RandomErasing({option}) draws normal numbers, which need float images, but is "
                + (
                    "before ToDtype or Normalize"
                    if is_uint8
                    else "before a transform that needs pixel values in 0 … 255"
                )
                + ("; put it after Normalize" if is_uint8 else "; put it last, after Normalize")
            )
        for number in _as_tuple(self.value):
            pixel_value = number * position.unit
            if not 0 <= pixel_value <= 255 or (is_uint8 and pixel_value != int(pixel_value)):
                valid_values = "an integer in 0 … 255"
                if position.state == "float":
                    valid_values = f"a number in 0 … {255 / position.unit:g}"
                raise ValueError(
                    f"RandomErasing(value={self.value!r}) is used where images are "
                    f"{'uint8' if is_uint8 else 'floats that later transforms change'}, so value must be "
                    f"{valid_values}; to use normalized values, put it after Normalize"
                )

    @property
    def written_values(self) -> tuple[float, ...]:
        """The values that ``"const"`` writes, one for all channels or one per channel. If erasing comes after the last
        transform that works on integer pixel values, they are in the units of the final type; otherwise in 0 … 255."""
        if self.kind != "const":
            return (0.0,)
        assert self.position is not None
        if self.position.finished:
            return _as_tuple(self.value)
        return tuple(float(round(number * self.position.unit)) for number in _as_tuple(self.value))

    def fits(self, channels: int) -> bool:
        """Return whether the transform can be applied to images with this number of channels."""
        return self.kind != "const" or len(self.written_values) in (1, channels)

    @property
    def outline(self) -> tuple[RecordOutline, ...]:
        return (RecordOutline(kind=Erase, name=type(self).__name__, written=self.kind),)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Erase:
        max_count = self.max_count or self.min_count
        numbers = uniforms(4 + max_count * (2 + 2 * TRIES))
        erase_numbers, count_numbers, noise_seed_numbers, box_numbers = np.split(numbers, [1, 2, 4], axis=1)
        box_numbers = box_numbers.reshape(len(numbers), max_count, 2 + 2 * TRIES)
        counts = self.min_count + (count_numbers * (max_count - self.min_count + 1)).astype(np.int64)
        areas = (sizes_hw.prod(axis=1, keepdims=True) / counts)[:, :, None]
        areas = areas * scale_to_range(self.scale, box_numbers[:, :, 2 : 2 + TRIES])
        ratios = np.exp(scale_to_range(map(math.log, self.ratio), box_numbers[:, :, 2 + TRIES :]))
        tried_hw = np.rint(np.sqrt(np.stack([areas * ratios, areas / ratios], axis=3))).astype(np.int64)
        fits = (tried_hw < sizes_hw[:, None, None]).all(axis=3)
        first_fitting = fits.argmax(axis=2)[:, :, None, None]
        boxes_hw = np.take_along_axis(tried_hw, first_fitting, axis=2)[:, :, 0]
        starts = (box_numbers[:, :, :2] * (sizes_hw[:, None] - boxes_hw + 1)).astype(np.int64)
        boxes = np.concatenate([starts, boxes_hw], axis=2)
        exists = (
            (erase_numbers < self.p)
            & (np.arange(max_count) < counts)
            & np.take_along_axis(fits, first_fitting[..., 0], axis=2)[:, :, 0]
            & (boxes_hw > 0).all(axis=2)
        )
        boxes[~exists] = 0
        user_values = _as_tuple(self.value) if self.kind == "const" else (0.0,)
        is_scaled = self.position is not None and self.position.unit != 1
        return Erase(
            boxes,
            (noise_seed_numbers * SEED_RANGE).astype(np.uint64),
            self.kind,
            self.written_values,
            user_values,
            is_scaled,
        )


def _as_tuple(value: Any) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)
