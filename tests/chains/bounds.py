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
    steps = STEPS["batches"] | STEPS[backend]
    return (
        steps
        if backend == "fused"
        else steps | {name: max(levels, steps.get(name, 0)) for name, levels in ON_CUDA.items()}
    )


def bound(steps: Mapping[str, float], program: Program, row: int, input_difference: float = 0.0) -> float:
    """How far the results for an image may be from each other, of inputs that are `apart`.

    Args:
        own: what the backend does differently: one of `STEPS`.
        program: of transforms that work on levels.
        row: of the image.
        apart: the greatest difference of the inputs.
    """
    for record in program.records:
        record_row = row if record.rows is None else next(iter(np.flatnonzero(record.rows == row).tolist()), None)
        if record_row is not None:
            input_difference = min(_step(steps, record, record_row, input_difference), ANY)
    return input_difference


def _step(steps: Mapping[str, float], record: Record, row: int, difference: float) -> float:
    match record:
        case Box(padding_mode=None):
            if np.array_equal(record.box_tlhw[row, 2:], record.size_hw[row]):
                return difference
            return _resampled(steps, "resize", _filter(record, row), difference)
        case Warp() if record.warped[row]:
            return _resampled(steps, "warp", _filter(record, row), difference)
        case Ops():
            return _operations(steps, record, row, difference)
        case ChainMixture():
            shares = record.weights[row].tolist()
            total = shares[0] * difference
            for number, share in enumerate(shares[1:]):
                total += share * _operations(steps, record.chain(number), row, difference)
            return total + steps.get("mixture", 0.0) + (total > 0)
    return difference


def _filter(record: Box | Warp, row: int) -> str:
    return FILTERS[filter_codes(record.filters, row + 1)[row]]


def _resampled(steps: Mapping[str, float], kind: str, name: str, difference: float) -> float:
    """Both passes round, so two that were apart by a part of a level may be so by a whole one."""
    rounding = 2.0 if difference and name != "nearest" else 0.0
    return REACH[name] * difference + rounding + steps.get(f"{kind} {name}", 0.0)


def _operations(steps: Mapping[str, float], record: Ops, row: int, difference: float) -> float:
    codes, values = record.codes[row], record.values[row]
    filters = filter_codes(record.filters, record.codes.shape)[row]
    for number, code in enumerate(codes.tolist()):
        if code == NOTHING:
            continue
        name, first = OPS[code], float(values[number, 0])
        if name == "warp":
            difference = _resampled(steps, "warp", FILTERS[filters[number]], difference)
        elif difference == 0:
            difference = steps.get(name, 0.0)
        else:
            difference = _operation(name, first, difference) + steps.get(name, 0.0)
        difference = min(difference, ANY)
    return difference


def _operation(name: str, value: float, difference: float) -> float:
    """What an operation makes of a difference."""
    match name:
        case "brightness":
            return value * difference + 1
        case "contrast" | "saturation" | "sharpness":
            return value * difference + abs(1 - value) * (difference + 1) + 1
        case "posterize":
            return difference + 2.0 ** (8 - value)
        case "invert" | "permute" | "identity" | "noise":
            return difference
        case "grayscale" | "blur":
            return difference + 1
        case "pillow_blur":
            return difference + 6  # three box blurs in each direction, each of which rounds
    return ANY
