"""Transforms that put a border around an image, each drawn as a `Box` that reaches beyond it.

Names, arguments, defaults and distributions are torchvision's. Borders are those of numpy's `pad`: a constant, the
edge, or the image mirrored as often as needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.transforms.arguments import fill_values, interval, probability
from gpuload.transforms.base import DrawError, Padding, Uniforms, declaration
from gpuload.transforms.geometry import PaddingMode, padding_mode_of, sides_of
from gpuload.transforms.program.ops import Box

__all__ = ["Pad", "RandomZoomOut"]


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

    padding: int | tuple[int, ...]
    fill: Any = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        object.__setattr__(self, "padding", sides_of("Pad(padding=…)", self.padding, least=None))
        object.__setattr__(self, "fill", fill_values("Pad(fill=…)", self.fill))
        padding_mode_of("Pad(padding_mode=…)", self.padding_mode)

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

    fill: Any = 0
    side_range: tuple[float, float] = (1.0, 4.0)
    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "fill", fill_values("RandomZoomOut(fill=…)", self.fill))
        sides = interval("RandomZoomOut(side_range=…)", self.side_range)
        if sides[0] < 1:
            raise ValueError(f"RandomZoomOut(side_range=…) must not be less than 1, got {sides}")
        object.__setattr__(self, "side_range", sides)
        object.__setattr__(self, "p", probability("RandomZoomOut(p=…)", self.p))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Box:
        numbers = uniforms(4)
        low, high = self.side_range
        factors = np.where(numbers[:, 0] < self.p, low + numbers[:, 1] * (high - low), 1.0)
        sizes = (sizes_hw * factors[:, None]).astype(np.int64)
        # torchvision draws left first.
        starts = ((sizes - sizes_hw) * numbers[:, [3, 2]]).astype(np.int64)
        return self.box(-starts, sizes)

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        return size_hw if self.p == 0 else None
