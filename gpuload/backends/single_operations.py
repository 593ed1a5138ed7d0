"""The operations of `gpuload.transforms.params.OPS` on one image on the CPU.

Each has a batched meaning in `gpuload.backends.operations`, which is used here with a batch of one where nothing faster
is known; where something is, both have the same results. Runs in the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpuload.backends.canvas import Canvas
from gpuload.backends.color_single import SingleColor
from gpuload.backends.operations import OPERATIONS
from gpuload.backends.warp import warp_image
from gpuload.transforms.params import OPS

__all__ = ["SingleOperations"]

Operation = Callable[[Canvas, Sequence[float], Any], None]


class SingleOperations:
    """Applies operations to a canvas."""

    def __init__(self) -> None:
        color = SingleColor()
        tuned: dict[str, Operation] = {name: _factor(adjust) for name, adjust in color.adjust.items()}
        tuned["warp"] = _warp
        tuned["identity"] = lambda canvas, values, transform: None
        self._by_code = [tuned.get(name) or (_batched(name) if name in OPERATIONS else None) for name in OPS]

    def apply(self, canvas: Canvas, code: int, values: Sequence[float], transform: Any) -> None:
        """Do the operation with this code; `transform` has the interpolation and the fill of a warp."""
        operation = self._by_code[code]
        assert operation is not None, f"there is no {OPS[code]} on the CPU"
        operation(canvas, values, transform)


def _factor(adjust: Callable[[Any, float], None]) -> Operation:
    return lambda canvas, values, transform: adjust(canvas.floats(), values[0])


def _batched(name: str) -> Operation:
    operation = OPERATIONS[name]

    def apply(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
        floats = canvas.floats()
        result = operation(floats.tensor[None], torch.tensor([values], dtype=torch.float64))
        if result.data_ptr() != floats.tensor.data_ptr():
            floats.tensor.copy_(result[0])

    return apply


def _warp(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    image = canvas.image()
    height, width = image.shape[:2]
    canvas.set(warp_image(image, values, (height, width), transform.interpolation, transform.outside(masks=False)))
