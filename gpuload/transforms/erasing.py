"""Random erasing: overwrites boxes of an image, as in torchvision and timm.

The values that are written depend on the transform's position in the chain, to which `standing` binds it: they are
levels before `ToDtype`, otherwise values of finished images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from gpuload.transforms.arguments import finite, integer, interval, is_sequence, probability
from gpuload.transforms.base import EVERYWHERE, Standing, Transform, Uniforms, argument, between, declaration
from gpuload.transforms.program.ops import Erase, Outline

__all__ = ["Mode", "RandomErasing"]

Mode = Literal["const", "rand", "pixel"]

TRIES: Final = 10  # as in torchvision and timm
WORDS: Final = 2.0**32  # a uniform number is (word + ½) / 2**32


def _value(name: str, value: Any) -> float | tuple[float, ...] | str:
    if isinstance(value, str):
        if value != "random":
            raise ValueError(f"{name} must be 'random' if it is a string, got {value!r}")
        return value
    if not is_sequence(value):
        return finite(name, value)
    numbers = tuple(finite(name, number) for number in value)
    if not numbers:
        raise ValueError(f"{name} must be one number, or one for each channel, got {value!r}")
    return numbers


@declaration
class RandomErasing(Transform):
    """Overwrite a box of an image, with probability `p`.

    After `Normalize`, or after `ToDtype` if no later transform needs levels, it overwrites finished images, and `value`
    is in their units. After `ToDtype` but before a transform that needs levels, `value` is in the units of `ToDtype`,
    but rounded to a level. Before `ToDtype`, `value` is a level, a whole number in 0 … 255.

    Zhong et al., "Random erasing data augmentation", AAAI 2020; with torchvision's distribution: the first of 10 drawn
    boxes that is smaller than the image. `mode` and the counts are timm's.

    Args:
        p: the probability.
        scale: the range of a box's area as a fraction of the image's area, within 0 … 1; for several boxes, of their
            total area.
        ratio: the range of a box's height / width, greater than 0; drawn log-uniformly.
        value: a number, one for each channel, or ``"random"``: a standard normal number for each pixel and channel,
            which only finished images can hold.
        inplace: for compatibility with torchvision; has no effect.
        mode: timm's modes: ``"const"`` writes `value`; ``"pixel"`` is the same as ``value="random"``; ``"rand"`` writes
            one random colour per box, of standard normal numbers. None means that `value` decides.
        min_count, max_count: bounds of the number of boxes, drawn uniformly; `max_count` is `min_count` if None.

    Raises:
        TypeError, ValueError: an argument is invalid, or (in a chain) `value` cannot be used there.

    Example:
        >>> RandomErasing(0.25, value="random")
        RandomErasing(p=0.25, value='random')
    """

    works_on: ClassVar[tuple[str, ...]] = EVERYWHERE

    p: float = argument(probability, default=0.5)
    scale: tuple[float, float] = argument(interval, default=(0.02, 0.33))
    ratio: tuple[float, float] = argument(interval, default=(0.3, 3.3), positive=True)
    value: float | Sequence[float] | str = argument(_value, default=0.0)
    inplace: bool = field(default=False, compare=False)
    mode: str | None = field(default=None, kw_only=True)
    min_count: int = argument(integer, default=1, kw_only=True, minimum=1)
    max_count: int | None = argument(integer, default=None, kw_only=True, minimum=None)
    where: Standing | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "RandomErasing"
        if not 0 <= self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                f"{name}(scale=…) is a fraction of the image's area and must lie in 0 … 1, got {self.scale}"
            )
        modes = get_args(Mode)
        if self.mode is not None and self.mode not in modes:
            raise ValueError(f"{name}(mode=…) must be one of {', '.join(map(repr, modes))} or None, got {self.mode!r}")
        if self.mode == "const" and self.value == "random":
            raise ValueError(
                f"{name}(value='random') cannot be combined with mode='const'; give a number, or leave mode out"
            )
        if self.mode in ("rand", "pixel") and self.value not in ("random", 0.0):
            raise ValueError(
                f"{name}(value={self.value!r}) cannot be combined with mode={self.mode!r}; leave one of them out"
            )
        if self.max_count is not None:
            integer(f"{name}(max_count=…)", self.max_count, minimum=self.min_count)

    @property
    def kind(self) -> str:
        """The kind of values to write: ``"const"``, ``"rand"`` or ``"pixel"``."""
        return self.mode or ("pixel" if self.value == "random" else "const")

    @property
    def works_on_finished(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.where is not None and self.where.finished

    def standing(self, where: Standing) -> RandomErasing:
        bound = replace(self)
        object.__setattr__(bound, "where", where)
        if not where.finished:
            bound._check_levels(where)
        return bound

    def _check_levels(self, where: Standing) -> None:
        if self.kind != "const":
            option = f"mode={self.mode!r}" if self.mode else "value='random'"
            raise ValueError(
                f"RandomErasing({option}) draws normal numbers, which levels cannot hold, but is "
                + ("before ToDtype or Normalize" if where.state == "uint8" else "before a transform that needs levels")
                + ("; put it after Normalize" if where.state == "uint8" else "; put it last, after Normalize")
            )
        for number in _numbers(self.value):
            level = number * where.unit
            if not 0 <= level <= 255 or (where.state == "uint8" and level != int(level)):
                bounds = (
                    f"numbers in 0 … {255 / where.unit:g}" if where.state == "float" else "whole numbers in 0 … 255"
                )
                raise ValueError(
                    f"RandomErasing(value={self.value!r}) is used where images are "
                    f"{'levels' if where.state == 'uint8' else 'floats that are still to be transformed'}, so it takes "
                    f"{bounds}; put it after Normalize to give a value of finished images"
                )

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values that ``"const"`` writes, one or one per channel: levels, or values of finished images."""
        if self.kind != "const":
            return (0.0,)
        assert self.where is not None
        if self.where.finished:
            return _numbers(self.value)
        return tuple(float(round(number * self.where.unit)) for number in _numbers(self.value))

    def fits(self, channels: int) -> bool:
        """Return whether the transform can be applied to images with this number of channels."""
        return self.kind != "const" or len(self.numbers) in (1, channels)

    @property
    def outline(self) -> tuple[Outline, ...]:
        return (Outline(kind=Erase, name=type(self).__name__, written=self.kind),)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Erase:
        max_count = self.max_count or self.min_count
        all_numbers = uniforms(4 + max_count * (2 + 2 * TRIES))
        erase_numbers, count_numbers, words, numbers = np.split(all_numbers, [1, 2, 4], axis=1)
        numbers = numbers.reshape(len(all_numbers), max_count, 2 + 2 * TRIES)
        counts = self.min_count + (count_numbers * (max_count - self.min_count + 1)).astype(np.int64)
        areas = (sizes_hw.prod(axis=1, keepdims=True) / counts)[:, :, None]
        areas = areas * between(self.scale, numbers[:, :, 2 : 2 + TRIES])
        ratios = np.exp(between(map(math.log, self.ratio), numbers[:, :, 2 + TRIES :]))
        tried_hw = np.rint(np.sqrt(np.stack([areas * ratios, areas / ratios], axis=3))).astype(np.int64)
        fits = (tried_hw < sizes_hw[:, None, None]).all(axis=3)
        first_fitting = fits.argmax(axis=2)[:, :, None, None]
        boxes_hw = np.take_along_axis(tried_hw, first_fitting, axis=2)[:, :, 0]
        starts = (numbers[:, :, :2] * (sizes_hw[:, None] - boxes_hw + 1)).astype(np.int64)
        boxes = np.concatenate([starts, boxes_hw], axis=2)
        exists = (
            (erase_numbers < self.p)
            & (np.arange(max_count) < counts)
            & np.take_along_axis(fits, first_fitting[..., 0], axis=2)[:, :, 0]
            & (boxes_hw > 0).all(axis=2)
        )
        boxes[~exists] = 0
        values = _numbers(self.value) if self.kind == "const" else (0.0,)
        scaled = self.where is not None and self.where.unit != 1
        return Erase(boxes, (words * WORDS).astype(np.uint64), self.kind, self.numbers, values, scaled)


def _numbers(value: Any) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)
