"""What was drawn: a few kinds of parameters, which all transforms come to, and all that a backend must know.

A transform is torchvision's word for one of these with certain distributions: Resize, CenterCrop, RandomResizedCrop,
Pad and RandomZoomOut all come to a `Box`, rotations to a `Warp`, everything that changes colours to `Ops`, in an order
that is data. All arrays have the samples as their first axis. Imported by workers, so there is no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from gpuload.transforms.program.draws import Draws

__all__ = [
    "FILTERS",
    "NOTHING",
    "OPS",
    "VALUES",
    "Box",
    "Branches",
    "Erase",
    "Flip",
    "Mix",
    "Mixture",
    "Ops",
    "Params",
    "Warp",
    "code",
    "take",
]

# Codes of filters in arrays.
FILTERS: Final = ("nearest", "bilinear", "bicubic")

# The operations that leave an image's size as it is; their codes are their places here. Behind each, its values.
OPS: Final = (
    "brightness",  # factor
    "contrast",  # factor
    "saturation",  # factor
    "hue",  # turns of the colour circle
    "sharpness",  # factor
    "solarize",  # threshold: levels from it on are inverted
    "posterize",  # bits that are kept
    "equalize",
    "autocontrast",
    "invert",
    "grayscale",
    "blur",  # kernel width, kernel height (odd), sigma x, sigma y, in pixels
    "noise",  # mean, sigma (in levels), key word 0, key word 1
    "permute",  # the three channels that stand at red, green and blue afterwards
    "warp",  # the eight coefficients of `Warp`; by the transform's interpolation and fill
    "identity",
    "solarize_add",  # threshold, and what is added to levels below it
    "pillow_blur",  # radius, in pixels, of Pillow's GaussianBlur, which is made of box blurs
)
NOTHING: Final = -1  # the code of no operation
VALUES: Final = 8  # numbers that an operation has at most


def code(name: str) -> int:
    """The code of an operation."""
    return OPS.index(name)


@dataclass(frozen=True, slots=True, eq=False)
class Params:
    """The parameters of one transform for a batch: a dataclass of arrays whose first axis is the sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Box(Params):
    """A box is cut out and resampled to a size; where both sizes are equal, nothing is resampled.

    `box_tlhw`: int64 (B, 4), may reach beyond the image where the transform pads. `size_hw`: int64 (B, 2). `filters`:
    int64 (B,), codes of `FILTERS`, where each sample has its own; else it is the transform's ``interpolation``.
    """

    box_tlhw: np.ndarray
    size_hw: np.ndarray
    filters: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Flip(Params):
    """`flipped`: bool (B,), which images are mirrored; `axis`: 0 rows (upside down), 1 columns."""

    flipped: np.ndarray
    axis: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Warp(Params):
    """A projective map, given backwards as Pillow's `Image.transform(size, PERSPECTIVE, …)` takes it.

    `coefficients`: float64 (B, 8), a … h: the centre of output pixel (x, y), at (X, Y) = (x + ½, y + ½), shows the
    input at ((a X + b Y + c) / w, (d X + e Y + f) / w) with w = g X + h Y + 1. `size_hw`: int64 (B, 2). `warped`: bool
    (B,): others stay as they are. `filters`: as for `Box`. What lies outside the image is the transform's ``fill``.
    """

    coefficients: np.ndarray
    size_hw: np.ndarray
    warped: np.ndarray
    filters: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ops(Params):
    """Operations on each image, one after the other, in an order of its own.

    `codes`: int64 (B, n), of `OPS`, or `NOTHING`. `values`: float64 (B, n, `VALUES`), what each operation needs.
    `filters`: int64 (B, n), codes of `FILTERS`, where each warp has its own; else it is the transform's
    ``interpolation``.
    """

    codes: np.ndarray
    values: np.ndarray
    filters: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mixture(Params):
    """Several chains of operations on each image, whose results are mixed with it: AugMix.

    `codes`: int64 (B, width, depth) and `values`: float64 (B, width, depth, `VALUES`), as in `Ops`. `weights`: float64
    (B, 1 + width), the share of the image itself and of each chain.
    """

    codes: np.ndarray
    values: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Erase(Params):
    """Boxes that are erased: `boxes_tlhw` int64 (B, n, 4), of no height where there is none. `keys`: uint64 (B, 2), the
    words of the key that random pixels are made with."""

    boxes_tlhw: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Params):
    """Each image is mixed with that of its partner, the sample at position p XOR 1; which row of a batch that is, if
    any, is not drawn, but told to what applies it.

    `share`: float64 (B,), of the image itself, in its label too. `box_tlhw`: int64 (B, 4), what is pasted from the
    partner (CutMix); of no height for MixUp, which blends.
    """

    share: np.ndarray
    box_tlhw: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Branches(Params):
    """Different transforms for different samples: `rows[i]` are those that `draws[i]` is for, int64; the rest stay as
    they are. `count` is how many samples there are."""

    rows: tuple[np.ndarray, ...]
    draws: tuple[Draws, ...]
    count: int


def take(params: Params | None, rows: np.ndarray) -> Any:
    """The parameters of some samples of a batch."""
    if params is None:
        return None
    if isinstance(params, Branches):
        places = np.full(params.count, -1, np.int64)
        kept, draws = [], []
        for own, drawn in zip(params.rows, params.draws, strict=True):
            places[:] = -1
            places[own] = np.arange(len(own))
            there = places[rows]
            kept.append(np.flatnonzero(there >= 0))
            draws.append(drawn.take(there[there >= 0]))
        return Branches(tuple(kept), tuple(draws), len(rows))
    changes = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = value[rows]
    return replace(params, **changes)
