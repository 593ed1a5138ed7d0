"""Transforms that change the colours of an image: jitter, grayscale, inversion, contrast, channel permutation.

Names, arguments, defaults and semantics are torchvision's, but random parameters are drawn per sample, and the results
are exactly Pillow's: pixel values are rounded to integers in 0 … 255 after every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.checks import argument, finite_number, integer, interval, is_sequence, probability
from gpuload.transforms.base import ChainPosition, Transform, Uniforms, declaration
from gpuload.transforms.program.ops import NOTHING, VALUES, Ops, Record, code
from gpuload.transforms.varying import Varying

__all__ = [
    "ADJUSTMENTS",
    "ColorJitter",
    "Grayscale",
    "OneOperation",
    "RandomAdjustSharpness",
    "RandomAutocontrast",
    "RandomChannelPermutation",
    "RandomEqualize",
    "RandomGrayscale",
    "RandomInvert",
    "RandomPhotometricDistort",
    "RandomPosterize",
    "RandomSolarize",
]

ADJUSTMENTS: Final = ("brightness", "contrast", "saturation", "hue")


def _check_factor_range(
    name: str, value: object, *, center: float, minimum: float = 0.0, maximum: float = math.inf
) -> tuple[float, float] | None:
    """Return the range (low, high) of a factor, or None if this range leaves images unchanged."""
    if not is_sequence(value):
        number = finite_number(name, value, minimum=0)
        value = max(center - number, minimum), center + number
    low, high = interval(name, value, minimum=minimum, maximum=maximum)
    return None if low == high == center else (low, high)


@declaration
class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue by random factors, in a random order.

    Each factor is drawn uniformly, from the range (low, high) or, for a number x, from max(0, 1 - x) … 1 + x (hue:
    -x … x, as a fraction of a full turn of the colour wheel). None or 0 disables an adjustment, as does (1, 1).

    Args:
        brightness, contrast, saturation: a number ≥ 0, or (low, high) with 0 ≤ low ≤ high.
        hue: a number in 0 … 0.5, or (low, high) with -0.5 ≤ low ≤ high ≤ 0.5.

    Example:
        >>> ColorJitter(0.4, hue=0.1)
        ColorJitter(brightness=(0.6, 1.4), hue=(-0.1, 0.1))
    """

    record: ClassVar[type[Record]] = Ops

    brightness: float | tuple[float, float] | None = argument(
        _check_factor_range, default=None, by_epoch=True, center=1.0
    )
    contrast: float | tuple[float, float] | None = argument(
        _check_factor_range, default=None, by_epoch=True, center=1.0
    )
    saturation: float | tuple[float, float] | None = argument(
        _check_factor_range, default=None, by_epoch=True, center=1.0
    )
    hue: float | tuple[float, float] | None = argument(
        _check_factor_range, default=None, by_epoch=True, center=0.0, minimum=-0.5, maximum=0.5
    )

    @property
    def adjustments(self) -> tuple[str, ...]:
        """The names of the enabled adjustments."""
        return tuple(name for name in ADJUSTMENTS if getattr(self, name) is not None)

    @property
    def operations(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(sorted(self.adjustments))

    @property
    def is_optional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # In some epochs, an adjustment that depends on the epoch can be disabled.
        return any(isinstance(getattr(self, name), Varying) for name in ADJUSTMENTS)

    @property
    def needs_full_image(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Contrast is relative to the mean of the image.
        return self.contrast is not None

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        columns, low, width, codes = self._constants
        numbers = uniforms(8)
        factors = low + numbers[:, columns] * width
        order = numbers[:, columns + 4].argsort(axis=1, kind="stable")
        values = np.zeros((*order.shape, VALUES))
        values[:, :, 0] = factors[np.arange(len(order))[:, None], order]
        return Ops(codes[order], values, needs_full_image=self.needs_full_image)

    @cached_property
    def _constants(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The index, minimum factor, width of the factor's range, and code of each enabled adjustment, as arrays."""
        names = self.adjustments
        ranges = np.array([getattr(self, name) for name in names]).reshape(-1, 2)
        columns = np.array([ADJUSTMENTS.index(name) for name in names], np.int64)
        codes = np.array([code(name) for name in names], np.int64)
        return columns, ranges[:, 0], ranges[:, 1] - ranges[:, 0], codes


class OneOperation(Transform):
    """Base class of transforms with one operation. It is not a dataclass, so that `p` can be the last argument."""

    record: ClassVar[type[Record]] = Ops
    p: float

    @property
    def is_optional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self, "p", 1.0) != 1  # most transforms without a `p` change every image

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        return self.ops_record(uniforms(1)[:, 0] < self.p)

    def ops_record(
        self, applied: np.ndarray, values: Sequence[float] | np.ndarray = (), *, channels: int | None = None
    ) -> Ops:
        """Return a record that applies the operation to samples where `applied`, bool (B,), is True. `values` are the
        operation's parameters, (n,) for all samples or (B, n)."""
        codes = np.where(applied, code(self.operations[0]), NOTHING)[:, None]
        parameters = np.asarray(values, np.float64)
        padded = np.zeros((len(applied), 1, VALUES))
        padded[:, 0, : parameters.shape[-1]] = parameters
        return Ops(codes.astype(np.int64), padded, needs_full_image=self.needs_full_image, channels=channels)


@declaration
class Grayscale(OneOperation):
    """Convert images to grayscale.

    Args:
        num_output_channels: 1, or 3 for three equal channels (also for images with one channel).
    """

    operations: ClassVar[tuple[str, ...]] = ("grayscale",)

    num_output_channels: int = argument(integer, default=1, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_output_channels not in (1, 3):
            raise ValueError(f"Grayscale(num_output_channels=…) must be 1 or 3, got {self.num_output_channels}")

    def output_channels(self, channels: int) -> int:
        return self.num_output_channels

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        return self.ops_record(np.ones(len(sizes_hw), bool), channels=self.num_output_channels)


@declaration
class _RandomOperation(OneOperation):
    p: float = argument(probability, default=0.5, by_epoch=True)


@declaration
class RandomGrayscale(_RandomOperation):
    """Convert an image to grayscale but keep its three channels, with probability `p`."""

    operations: ClassVar[tuple[str, ...]] = ("grayscale",)

    p: float = argument(probability, default=0.1, by_epoch=True)


@declaration
class RandomInvert(_RandomOperation):
    """Invert the pixel values of an image, with probability `p`."""

    operations: ClassVar[tuple[str, ...]] = ("invert",)


@declaration
class RandomAutocontrast(_RandomOperation):
    """Stretch the pixel values of each channel to the full range 0 … 255, with probability `p`."""

    operations: ClassVar[tuple[str, ...]] = ("autocontrast",)
    needs_full_image: ClassVar[bool] = True


@declaration
class RandomEqualize(_RandomOperation):
    """Equalize the histogram of each channel, with probability `p`."""

    operations: ClassVar[tuple[str, ...]] = ("equalize",)
    needs_full_image: ClassVar[bool] = True


def _bind_threshold(threshold: float, position: ChainPosition) -> float:
    """Return the threshold as a pixel value in 0 … 255."""
    if position.state == "float" and position.unit > 1 and threshold <= 1:
        return threshold * position.unit
    if 0 < threshold < 1:
        raise ValueError(
            f"RandomSolarize(threshold={threshold:g}) is used where pixel values are in 0 … 255; write "
            f"threshold={threshold * 255:g}, or put it after ToDtype('float32', scale=True)"
        )
    return threshold


@declaration
class RandomSolarize(OneOperation):
    """Invert pixel values at or above a threshold, with probability `p`.

    Args:
        threshold: a pixel value in 0 … 255; after a `ToDtype` that scales, a threshold of at most 1 is on the
            scaled range 0 … 1.
        p: the probability.

    Raises:
        TypeError, ValueError: an argument is invalid, or, in a chain, the threshold is between 0 and 1 but images are
            not scaled to 0 … 1.
    """

    operations: ClassVar[tuple[str, ...]] = ("solarize",)

    threshold: float = argument(finite_number, by_epoch=True, minimum=0, maximum=255)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def bind(self, position: ChainPosition) -> Transform:
        threshold: Any = self.threshold
        if isinstance(threshold, Varying):
            return replace(
                self, threshold=threshold.map(lambda moment: _bind_threshold(threshold.at(moment), position))
            )
        return replace(self, threshold=_bind_threshold(threshold, position))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        return self.ops_record(uniforms(1)[:, 0] < self.p, (self.threshold,))


@declaration
class RandomPosterize(OneOperation):
    """Keep only the upper bits of each pixel value, with probability `p`.

    Args:
        bits: the number of bits to keep, 0 … 8.
        p: the probability.
    """

    operations: ClassVar[tuple[str, ...]] = ("posterize",)

    bits: int = argument(integer, by_epoch=True, minimum=0, maximum=8)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        return self.ops_record(uniforms(1)[:, 0] < self.p, (self.bits,))


@declaration
class RandomAdjustSharpness(OneOperation):
    """Make an image sharper or smoother, with probability `p`.

    Args:
        sharpness_factor: 0 smooths the image, 1 leaves it unchanged, 2 doubles its sharpness. Must not be negative.
        p: the probability.
    """

    operations: ClassVar[tuple[str, ...]] = ("sharpness",)
    needs_full_image: ClassVar[bool] = True  # pixels at the image's border are not changed, so the border must be known

    sharpness_factor: float = argument(finite_number, minimum=0, by_epoch=True)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        return self.ops_record(uniforms(1)[:, 0] < self.p, (self.sharpness_factor,))


@declaration
class RandomChannelPermutation(OneOperation):
    """Permute the three channels of each image randomly; all orders are equally likely. Grey images do not change."""

    operations: ClassVar[tuple[str, ...]] = ("permute",)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        return self.ops_record(np.ones(len(sizes_hw), bool), np.argsort(uniforms(3), axis=1, kind="stable"))


@declaration
class RandomPhotometricDistort(Transform):
    """Distort colours as SSD does: brightness, contrast, saturation, hue, and the order of the channels.

    Each adjustment is applied with probability `p`, with a uniformly drawn factor. Contrast is changed either second or
    after the hue, with equal probabilities. Finally, with probability `p`, the channels are permuted; all orders are
    equally likely.

    Args:
        brightness, contrast, saturation: (low, high) with 0 ≤ low ≤ high.
        hue: (low, high) with -0.5 ≤ low ≤ high ≤ 0.5, as fractions of a full turn of the colour wheel.
        p: the probability of each adjustment.
    """

    record: ClassVar[type[Record]] = Ops
    operations: ClassVar[tuple[str, ...]] = tuple(sorted((*ADJUSTMENTS, "permute")))
    is_optional: ClassVar[bool] = True
    needs_full_image: ClassVar[bool] = True  # contrast is relative to the mean of the image

    brightness: tuple[float, float] = argument(interval, default=(0.875, 1.125), by_epoch=True, minimum=0)
    contrast: tuple[float, float] = argument(interval, default=(0.5, 1.5), by_epoch=True, minimum=0)
    saturation: tuple[float, float] = argument(interval, default=(0.5, 1.5), by_epoch=True, minimum=0)
    hue: tuple[float, float] = argument(interval, default=(-0.05, 0.05), by_epoch=True, minimum=-0.5, maximum=0.5)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        numbers = uniforms(13)
        ranges = np.array([getattr(self, name) for name in ADJUSTMENTS])
        factors = ranges[:, 0] + numbers[:, :4] * (ranges[:, 1] - ranges[:, 0])
        applies = numbers[:, 4:9] < self.p
        is_contrast_first = numbers[:, 9] < 0.5
        # Columns: brightness, contrast, saturation, hue, contrast after the hue, permutation.
        applies = np.column_stack([applies[:, :4], applies[:, 1] & ~is_contrast_first, applies[:, 4]])
        applies[:, 1] &= is_contrast_first
        codes = np.array([code(name) for name in (*ADJUSTMENTS, "contrast", "permute")])
        values = np.zeros((*applies.shape, VALUES))
        values[:, :4, 0] = factors
        values[:, 4, 0] = factors[:, 1]
        values[:, 5, :3] = np.argsort(numbers[:, 10:13], axis=1, kind="stable")
        return Ops(np.where(applies, codes, NOTHING).astype(np.int64), values)
