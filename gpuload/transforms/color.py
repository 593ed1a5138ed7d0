"""ColorJitter. Levels stay whole numbers in 0 … 255 after every step, as in a Pillow image."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.transforms.arguments import finite, interval, is_sequence
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.program.ops import VALUES, Ops, Record, code

__all__ = ["ADJUSTMENTS", "ColorJitter"]

ADJUSTMENTS: Final = ("brightness", "contrast", "saturation", "hue")


@declaration
class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue by random factors, in a random order.

    Each factor is drawn uniformly: from the pair (low, high), or, for a number x, from max(0, 1 - x) … 1 + x (hue:
    -x … x, in turns of the colour circle). None, or a range that changes nothing, leaves an adjustment out.

    Args:
        brightness, contrast, saturation: a number ≥ 0, or (low, high) with 0 ≤ low ≤ high.
        hue: a number in 0 … 0.5, or (low, high) with -0.5 ≤ low ≤ high ≤ 0.5.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> ColorJitter(0.4, hue=0.1)
        ColorJitter(brightness=(0.6, 1.4), hue=(-0.1, 0.1))
    """

    record: ClassVar[type[Record]] = Ops

    brightness: float | tuple[float, float] | None = None
    contrast: float | tuple[float, float] | None = None
    saturation: float | tuple[float, float] | None = None
    hue: float | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ADJUSTMENTS[:3]:
            object.__setattr__(self, name, _factor_range(name, getattr(self, name), 1.0, (0.0, float("inf"))))
        object.__setattr__(self, "hue", _factor_range("hue", self.hue, 0.0, (-0.5, 0.5)))

    @property
    def adjustments(self) -> tuple[str, ...]:
        """The names of the adjustments that are made."""
        return tuple(name for name in ADJUSTMENTS if getattr(self, name) is not None)

    @property
    def operations(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(sorted(self.adjustments))

    @property
    def needs_whole(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Contrast is relative to the mean of the image.
        return self.contrast is not None

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        columns, low, width, codes = self._constants
        numbers = uniforms(8)
        factors = low + numbers[:, columns] * width
        order = numbers[:, columns + 4].argsort(axis=1, kind="stable")
        values = np.zeros((*order.shape, VALUES))
        values[:, :, 0] = factors[np.arange(len(order))[:, None], order]
        return Ops(codes[order], values, whole=self.needs_whole)

    @cached_property
    def _constants(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each adjustment that is made: its number, the least factor, the distance to the greatest, its code."""
        names = self.adjustments
        ranges = np.array([getattr(self, name) for name in names]).reshape(-1, 2)
        columns = np.array([ADJUSTMENTS.index(name) for name in names], np.int64)
        codes = np.array([code(name) for name in names], np.int64)
        return columns, ranges[:, 0], ranges[:, 1] - ranges[:, 0], codes


def _factor_range(
    adjustment: str, value: Any, center: float, bounds: tuple[float, float]
) -> tuple[float, float] | None:
    """The range of a factor, or None if it would change nothing."""
    name = f"ColorJitter({adjustment}=…)"
    if value is None:
        return None
    if is_sequence(value):
        low, high = interval(name, value)
    else:
        number = finite(name, value)
        if number < 0:
            raise ValueError(f"{name} as a single number must not be negative, got {number:g}")
        low, high = center - number, center + number
        if adjustment != "hue":
            low = max(low, 0.0)
    if not bounds[0] <= low <= high <= bounds[1]:
        raise ValueError(f"{name} must lie in {bounds[0]:g} … {bounds[1]:g}, got {value!r}")
    return None if low == high == center else (low, high)
