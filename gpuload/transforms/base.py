"""What every transform is: a frozen declaration, and a function from uniform numbers to draws.

A transform knows four things, all vectorised over the samples of a batch: how its parameters come from uniform
numbers and image sizes (`draw`), what size it makes of an image (`output_sizes`), which part of its input it must see
to give a part of its output (`input_windows`), and where in a chain it may stand (`works_on`, `makes`). It never
touches pixels: that is a backend's work. Imported by workers, so there is no torch here; nothing here holds state.

Sizes are int64 (B, 2), height and width. Boxes and windows are int64 (B, 4): top, left, height, width, in the frame of
the image they belong to; they may reach beyond it where a crop pads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

__all__ = ["Box", "DrawError", "Flip", "Params", "Transform", "Uniforms", "clipped", "full_windows", "take"]

# How many numbers a sample needs → float64 (B, count) in the open interval (0, 1).
Uniforms = Callable[[int], np.ndarray]


class DrawError(ValueError):
    """A transform cannot be drawn for one image of a batch.

    Attributes:
        row: which image, counted from 0 in the arrays that were given.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message, row)
        self.message = message
        self.row = row

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, eq=False)
class Params:
    """The parameters of one transform for a batch: a dataclass of arrays whose first axis is the sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Box(Params):
    """A box is cut out and resampled to a size; where both sizes are equal, nothing is resampled.

    `box_tlhw`: (B, 4), may reach beyond the image where the transform pads. `size_hw`: (B, 2).
    """

    box_tlhw: np.ndarray
    size_hw: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Flip(Params):
    """`flipped`: bool (B,), which images are mirrored."""

    flipped: np.ndarray


def take(params: Params | None, rows: np.ndarray) -> Params | None:
    """The parameters of some samples of a batch."""
    if params is None:
        return None
    return replace(params, **{field.name: getattr(params, field.name)[rows] for field in fields(params)})


@dataclass(frozen=True, repr=False)
class Transform:
    """Base of all declarations."""

    # In which states an image may come: "uint8" levels, "float" numbers, "normalized" ones.
    works_on: ClassVar[tuple[str, ...]] = ("uint8",)

    @property
    def makes(self) -> str | None:
        """The state that it brings an image to; None: as it was."""
        return None

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Params | None:
        """The parameters for images of these sizes; None where there are none."""
        return None

    def output_sizes(self, params: Any, sizes_hw: np.ndarray) -> np.ndarray:
        """The sizes of the results."""
        return sizes_hw

    def output_size(self, size_hw: tuple[int, int] | None) -> tuple[int, int] | None:
        """The size of every result, where it is known before any image is seen."""
        return size_hw

    def input_windows(self, params: Any, sizes_hw: np.ndarray, windows_tlhw: np.ndarray) -> np.ndarray:
        """The part of each input that these parts of the outputs are made from."""
        return windows_tlhw

    @property
    def crops(self) -> bool:
        """Whether some of the input may not matter to the output."""
        return False

    @property
    def needs_whole(self) -> bool:
        """Whether every pixel of the output depends on the whole input."""
        return False

    @property
    def may_refuse(self) -> bool:
        """Whether drawing can raise a `DrawError` for some images."""
        return False

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def full_windows(sizes_hw: np.ndarray) -> np.ndarray:
    """The windows that are the whole images."""
    windows = np.zeros((len(sizes_hw), 4), np.int64)
    windows[:, 2:] = sizes_hw
    return windows


def clipped(windows_tlhw: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
    """The windows cut to the images, but never to nothing: at least one pixel is left of each."""
    start = np.clip(windows_tlhw[:, :2], 0, sizes_hw - 1)
    end = np.clip(windows_tlhw[:, :2] + windows_tlhw[:, 2:], start + 1, sizes_hw)
    return np.concatenate([start, end - start], axis=1)
