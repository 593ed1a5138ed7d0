"""Kornia's operations on levels: the results of `gpuload.stage.kornia.functions`, rounded.

As in the reference's `operations`, levels and results are float32 N×C×H×W, whole numbers in 0 … 255. Runs on any
device, in the process of the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.kornia import functions
from gpuload.stage.kornia.finished import weighted
from gpuload.stage.reference.color import permute
from gpuload.stage.reference.operations import GUARD, Operation
from gpuload.transforms.program.ops import Mixture, Ops

__all__ = ["OPERATIONS", "mix"]

Function = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def _cut(function: Function, guard: float = 0.0) -> Operation:
    """Truncated, as Pillow's blends are; with a guard of 0.5, rounded, halves up."""

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        return torch.floor(function(levels, values) + guard).clamp(0, 255).to(levels.dtype)

    return operation


def _rounded(function: Function) -> Operation:
    """Rounded to the nearest whole number, halves to the even one."""

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        return torch.round(function(levels, values)).clamp(0, 255).to(levels.dtype)

    return operation


OPERATIONS: Final[dict[str, Operation]] = {
    "brightness": _cut(functions.brightness),
    "contrast": _cut(functions.contrast),
    "saturation": _cut(functions.saturation),
    "sharpness": _cut(functions.sharpness),
    "hue": _cut(functions.hue, 0.5),
    "grayscale": _cut(functions.grayscale, 0.5),
    "autocontrast": _cut(functions.autocontrast),
    "blur": _rounded(functions.blur),
    "invert": _rounded(functions.invert),
    "solarize": _rounded(functions.solarize),
    "solarize_add": _rounded(functions.solarize_add),
    "posterize": _rounded(functions.posterize),
    "equalize": _rounded(functions.equalize),
    "noise": _rounded(functions.noise),
    "permute": permute,  # picks channels by their numbers, as Kornia's channel shuffle does
}


def mix(levels: torch.Tensor, record: Mixture, operate: Callable[[torch.Tensor, Ops], torch.Tensor]) -> torch.Tensor:
    """AugMix; arguments as for `gpuload.stage.reference.operations.mix_batch`."""
    shares = upload(record.weights.astype(np.float32), levels.device)[:, :, None, None, None]
    total = levels * shares[:, 0]
    for chain in range(record.codes.shape[1]):
        made = operate(levels.clone(), record.chain(chain))
        total = weighted(total, 1.0, made, shares[:, 1 + chain])
    return torch.floor(total + GUARD)
