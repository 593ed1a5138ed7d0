"""How far the results of two backends may lie apart, for what was drawn for one image, in levels.

A step takes images that already lie some levels apart, makes more or less of it, and adds what the two backends
themselves do differently there (`STEPS`). An operation with jumps makes any number of levels of one, and then nothing
can be said: so chains are also tried step by step, from images that are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import NOTHING, OPS, Box, ChainMixture, Ops, Record, Warp, filter_codes
from gpuload.transforms.program.windows import FILTERS

__all__ = ["ANY", "STEPS", "bound", "on_cuda"]

ANY = 255.0
# What the sum of a filter's weights, without their signs, comes to at most, in both directions.
REACH = {"nearest": 1.0, "bilinear": 1.0, "bicubic": 2.0}

# How far a backend may be from the reference's runner of single images in one step, in levels; none: equal to the last
# bit. The reason of each stands in the table of parity.
STEPS: dict[str, dict[str, float]] = {
    "torch": {},
    "batches": {"resize bilinear": 2, "resize bicubic": 3},
    "fused": {"resize bilinear": 2, "resize bicubic": 3, "blur": 1},
}

# What torch's kernels for CUDA do otherwise than those for the CPU: a hue, of 256, may be the next one.
ON_CUDA = {"hue": 8}


def on_cuda(backend: str) -> Mapping[str, float]:
    """How far a backend on CUDA may be in one step from the reference on the CPU. Its own kernels are those of `STEPS`
    on any device; what it leaves to the reference is done for whole batches there."""
    own = STEPS["batches"] | STEPS[backend]
    return own if backend == "fused" else own | {name: max(most, own.get(name, 0)) for name, most in ON_CUDA.items()}


def bound(own: Mapping[str, float], program: Program, row: int, apart: float = 0.0) -> float:
    """How far the results for an image may be from each other, of inputs that are `apart`.

    Args:
        own: what the backend does differently: one of `STEPS`.
        program: of transforms that work on levels.
        row: of the image.
        apart: the greatest difference of the inputs.
    """
    for record in program.records:
        place = row if record.rows is None else next(iter(np.flatnonzero(record.rows == row).tolist()), None)
        if place is not None:
            apart = min(_step(own, record, place, apart), ANY)
    return apart


def _step(own: Mapping[str, float], record: Record, row: int, apart: float) -> float:
    match record:
        case Box(padding_mode=None):
            if np.array_equal(record.box_tlhw[row, 2:], record.size_hw[row]):
                return apart
            return _resampled(own, "resize", _filter(record, row), apart)
        case Warp() if record.warped[row]:
            return _resampled(own, "warp", _filter(record, row), apart)
        case Ops():
            return _operations(own, record, row, apart)
        case ChainMixture():
            shares = record.weights[row].tolist()
            total = shares[0] * apart
            for number, share in enumerate(shares[1:]):
                total += share * _operations(own, record.chain(number), row, apart)
            return total + own.get("mixture", 0.0) + (total > 0)
    return apart


def _filter(record: Box | Warp, row: int) -> str:
    return FILTERS[filter_codes(record.filters, row + 1)[row]]


def _resampled(own: Mapping[str, float], kind: str, name: str, apart: float) -> float:
    """Both passes round, so two that were apart by a part of a level may be so by a whole one."""
    rounding = 2.0 if apart and name != "nearest" else 0.0
    return REACH[name] * apart + rounding + own.get(f"{kind} {name}", 0.0)


def _operations(own: Mapping[str, float], record: Ops, row: int, apart: float) -> float:
    codes, values = record.codes[row], record.values[row]
    filters = filter_codes(record.filters, record.codes.shape)[row]
    for number, code in enumerate(codes.tolist()):
        if code == NOTHING:
            continue
        name, first = OPS[code], float(values[number, 0])
        if name == "warp":
            apart = _resampled(own, "warp", FILTERS[filters[number]], apart)
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
