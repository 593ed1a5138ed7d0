"""Kornia's operations on levels: what `gpuload.stage.kornia.functions` gives, brought back to whole numbers.

As in the reference's `operations`, levels are float32 N×C×H×W and hold whole numbers in 0 … 255, and so do results.
Runs on any device, in the process of the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from gpuload.stage.kornia import functions
from gpuload.stage.kornia.finished import weighted
from gpuload.stage.reference.mixture import GUARD
from gpuload.stage.reference.operations import Operation
from gpuload.stage.reference.points import permute
from gpuload.stage.upload import upload
from gpuload.transforms.program.ops import Mixture, Ops

__all__ = ["OPERATIONS", "mix"]

Function = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def _cut(function: Function, guard: float = 0.0) -> Operation:
    """Cut off behind the decimal point, as Pillow's blends are."""

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        return torch.floor(function(levels, values) + guard).clamp(0, 255).to(levels.dtype)

    return operation


def _rounded(function: Function) -> Operation:
    """Rounded to the nearest whole number, and halves to the even one."""

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        return torch.round(function(levels, values)).clamp(0, 255).to(levels.dtype)

    return operation


def _half_up(function: Function) -> Operation:
    """Rounded to the nearest whole number, and halves up."""
    return _cut(function, 0.5)


OPERATIONS: Final[dict[str, Operation]] = {
    "brightness": _cut(functions.brightness),
    "contrast": _cut(functions.contrast),
    "saturation": _cut(functions.saturation),
    "sharpness": _cut(functions.sharpness),
    "hue": _half_up(functions.hue),
    "grayscale": _half_up(functions.grayscale),
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
    """The mixture of images with what chains of operations make of them: AugMix, as
    `gpuload.stage.reference.mixture.mix_batch` has it; `operate` may work in place."""
    shares = upload(record.weights.astype(np.float32), levels.device)[:, :, None, None, None]
    total = levels * shares[:, 0]
    for chain in range(record.codes.shape[1]):
        made = operate(levels.clone(), record.chain(chain))
        total = weighted(total, 1.0, made, shares[:, 1 + chain])
    return torch.floor(total + GUARD)
