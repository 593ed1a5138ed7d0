"""How far the results of two backends may lie apart, for what was drawn for one image, in levels.

A step takes images that already lie some levels apart, makes more or less of it, and adds what the two backends
themselves do differently there (`STEPS`). An operation with jumps makes any number of levels of one, and then nothing
can be said: so chains are also tried step by step, from images that are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuload import transforms as T
from gpuload.transforms.program.ops import FILTERS, NOTHING, OPS, Box, Branches, Mixture, Ops, Warp

__all__ = ["ANY", "STEPS", "bound"]

ANY = 255.0
# What the sum of a filter's weights, without their signs, comes to at most, in both directions.
REACH = {"nearest": 1.0, "bilinear": 1.0, "bicubic": 2.0}

# How far a backend may be from the reference's runner of single images in one step, in levels; none: equal to the last
# bit. The reason of each stands in the table of parity.
STEPS: dict[str, Mapping[str, float]] = {
    "torch": {},
    "batches": {"resize bilinear": 2, "resize bicubic": 3},
    "kornia": {
        "contrast": 1,
        "saturation": 1,  # blends of float32 that should be whole numbers may lie below
        "sharpness": 1,
        "hue": 8,
        "blur": 1,
        "warp bilinear": 1,
        "mixture": 1,
    },
    "fused": {"resize bilinear": 2, "resize bicubic": 3, "blur": 1},
    "dali": {
        "resize bilinear": 2,
        "resize bicubic": 4,
        "warp nearest": 255,
        "warp bilinear": 255,
        "contrast": 1,
        "saturation": 1,
        "grayscale": 1,
        "hue": 8,
        "autocontrast": 1,
        "blur": 1,
    },
}


def bound(own: Mapping[str, float], draws: T.Draws, row: int, apart: float = 0.0) -> float:
    """How far the results for an image may be from each other, of inputs that are `apart`.

    Args:
        own: what the backend does differently: one of `STEPS`.
        draws: for transforms that work on levels.
        row: of the image.
        apart: the greatest difference of the inputs.
    """
    for transform, params, sizes in zip(draws.transforms, draws.params, draws.sizes_hw, strict=False):
        apart = min(_step(own, transform, params, sizes, row, apart), ANY)
    return apart


def _step(own: Mapping[str, float], transform: Any, params: Any, sizes_hw: np.ndarray, row: int, apart: float) -> float:
    match params:
        case Box() if not transform.pads:
            if np.array_equal(params.box_tlhw[row, 2:], params.size_hw[row]):
                return apart
            return _resampled(own, "resize", _filter(transform, params, row), apart)
        case Warp() if params.warped[row]:
            return _resampled(own, "warp", _filter(transform, params, row), apart)
        case Ops():
            return _operations(own, transform, params.codes[row], params.values[row], _codes(params, row), apart)
        case Mixture():
            shares = params.weights[row].tolist()
            total = shares[0] * apart
            for codes, values, share in zip(params.codes[row], params.values[row], shares[1:], strict=True):
                total += share * _operations(own, transform, codes, values, None, apart)
            return total + own.get("mixture", 0.0) + (total > 0)
        case Branches():
            for rows, draws in zip(params.rows, params.draws, strict=True):
                for place in np.flatnonzero(rows == row).tolist():
                    return bound(own, draws, place, apart)
    return apart


def _filter(transform: Any, params: Any, row: int) -> str:
    return transform.interpolation if params.filters is None else FILTERS[params.filters[row]]


def _codes(params: Ops, row: int) -> list[int] | None:
    return None if params.filters is None else params.filters[row].tolist()


def _resampled(own: Mapping[str, float], kind: str, name: str, apart: float) -> float:
    """Both passes round, so two that were apart by a part of a level may be so by a whole one."""
    rounding = 2.0 if apart and name != "nearest" else 0.0
    return REACH[name] * apart + rounding + own.get(f"{kind} {name}", 0.0)


def _operations(
    own: Mapping[str, float], transform: Any, codes: np.ndarray, values: np.ndarray, filters: Any, apart: float
) -> float:
    for number, code in enumerate(codes.tolist()):
        if code == NOTHING:
            continue
        name, first = OPS[code], float(values[number, 0])
        if name == "warp":
            filter_ = transform.interpolation if filters is None else FILTERS[filters[number]]
            apart = _resampled(own, "warp", filter_, apart)
        elif apart == 0:
            apart = own.get(name, 0.0)
        else:
            apart = _operation(name, first, apart) + own.get(name, 0.0)
        apart = min(apart, ANY)
    return apart


def _operation(name: str, value: float, apart: float) -> float:
    """What an operation makes of a difference."""
    match name:
        case "brightness":
            return value * apart + 1
        case "contrast" | "saturation" | "sharpness":
            return value * apart + abs(1 - value) * (apart + 1) + 1
        case "posterize":
            return apart + 2.0 ** (8 - value)
        case "invert" | "permute" | "identity" | "noise":
            return apart
        case "grayscale" | "blur":
            return apart + 1
        case "pillow_blur":
            return apart + 6  # three box blurs in each direction, each of which rounds
    return ANY
