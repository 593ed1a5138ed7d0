"""Bounds on the difference between the results of two backends for one image, in levels, given its draws.

A step scales the difference of its inputs, and adds the difference that the two backends make in this step (`STEPS`).
An operation with jumps can turn one level into any number of levels, so that there is no bound: therefore, chains are
also compared step by step, with equal inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import NOTHING, OPS, Box, ChainMixture, Ops, Record, Warp, filter_codes
from gpuload.transforms.program.windows import FILTERS

__all__ = ["STEPS", "UNBOUNDED", "bound", "steps_on_cuda"]

UNBOUNDED = 255.0
# The maximum of the sum of a filter's absolute weights, over both directions.
WEIGHT_SUMS = {"nearest": 1.0, "bilinear": 1.0, "bicubic": 2.0}

# Permitted differences from the reference's runner of single images in one step, in levels; steps that are not listed
# must be equal to the last bit. docs/parity.md gives the reasons.
STEPS: dict[str, dict[str, float]] = {
    "torch": {},
    "batches": {"resize bilinear": 2, "resize bicubic": 3},
    "fused": {"resize bilinear": 2, "resize bicubic": 3, "blur": 1, "gamma": 1},
}

# Differences between torch's kernels for CUDA and for the CPU: a hue (of 256) may be off by one, a value by 8 levels.
CUDA_DIFFERENCES = {"hue": 8}


def steps_on_cuda(backend: str) -> Mapping[str, float]:
    """Return the permitted differences of a backend on CUDA from the reference on the CPU, per step. gpuload's own
    kernels give equal results on any device; the reference's batched runner runs all other steps."""
    steps = STEPS["batches"] | STEPS[backend]
    if backend == "fused":
        return steps
    return steps | {name: max(levels, steps.get(name, 0)) for name, levels in CUDA_DIFFERENCES.items()}


def bound(steps: Mapping[str, float], program: Program, row: int, input_difference: float = 0.0) -> float:
    """Return the greatest permitted difference between the results for an image.

    Args:
        steps: the differences that the backend makes: one of `STEPS`.
        program: a program of transforms that work on levels.
        row: the row of the image.
        input_difference: the greatest difference of the inputs.
    """
    for record in program.records:
        record_row = row if record.rows is None else next(iter(np.flatnonzero(record.rows == row).tolist()), None)
        if record_row is not None:
            input_difference = min(_bound_step(steps, record, record_row, input_difference), UNBOUNDED)
    return input_difference


def _bound_step(steps: Mapping[str, float], record: Record, row: int, difference: float) -> float:
    match record:
        case Box(padding_mode=None):
            if np.array_equal(record.box_tlhw[row, 2:], record.size_hw[row]):
                return difference
            return _bound_resampling(steps, "resize", _filter_name(record, row), difference)
        case Warp() if record.warped[row]:
            return _bound_resampling(steps, "warp", _filter_name(record, row), difference)
        case Ops():
            return _bound_operations(steps, record, row, difference)
        case ChainMixture():
            shares = record.weights[row].tolist()
            total = shares[0] * difference
            for number, share in enumerate(shares[1:]):
                total += share * _bound_operations(steps, record.chain(number), row, difference)
            return total + steps.get("mixture", 0.0) + (total > 0)
    return difference


def _filter_name(record: Box | Warp, row: int) -> str:
    return FILTERS[filter_codes(record.filters, row + 1)[row]]


def _bound_resampling(steps: Mapping[str, float], kind: str, name: str, difference: float) -> float:
    # Both passes round, so a difference of less than a level can become an entire level in each.
    rounding = 2.0 if difference and name != "nearest" else 0.0
    return WEIGHT_SUMS[name] * difference + rounding + steps.get(f"{kind} {name}", 0.0)


def _bound_operations(steps: Mapping[str, float], record: Ops, row: int, difference: float) -> float:
    codes, values = record.codes[row], record.values[row]
    filters = filter_codes(record.filters, record.codes.shape)[row]
    for number, code in enumerate(codes.tolist()):
        if code == NOTHING:
            continue
        name, value = OPS[code], float(values[number, 0])
        if name == "warp":
            difference = _bound_resampling(steps, "warp", FILTERS[filters[number]], difference)
        elif difference == 0:
            difference = steps.get(name, 0.0)
        else:
            difference = _bound_operation(name, value, difference) + steps.get(name, 0.0)
        difference = min(difference, UNBOUNDED)
    return difference


def _bound_operation(name: str, value: float, difference: float) -> float:
    match name:
        case "brightness":
            return value * difference + 1
        case "contrast" | "saturation" | "sharpness":
            return value * difference + abs(1 - value) * (difference + 1) + 1
        case "posterize":
            return difference + 2.0 ** (8 - value)
        case "invert" | "permute" | "identity" | "noise":
            return difference
        case "white_balance":
            return max(1.0, value) * difference + 1  # the least factor of blue, 0.003, goes with the greatest of red
        case "motion_blur" | "grayscale" | "blur":
            return difference + 1
        case "pillow_blur":
            return difference + 6  # three box blurs in each direction round
    return UNBOUNDED
