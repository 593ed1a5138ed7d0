"""The operations of `gpuload.transforms.params.OPS` on one image on the CPU.

Each has a batched meaning in `gpuload.backends.operations`, which is used here with a batch of one where nothing faster
is known; where something is, both have the same results. Runs in the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpuload.backends.box_blur import box_blur_image
from gpuload.backends.canvas import Canvas
from gpuload.backends.color_single import SingleColor
from gpuload.backends.operations import OPERATIONS
from gpuload.backends.single_blur import blur_image
from gpuload.backends.single_points import POINTS
from gpuload.backends.warp import warp_image
from gpuload.noise import normals
from gpuload.transforms.params import OPS

__all__ = ["SingleOperations", "in_channels", "warp_canvas"]

Operation = Callable[[Canvas, Sequence[float], Any], None]


class SingleOperations:
    """Applies operations to a canvas."""

    def __init__(self) -> None:
        color = SingleColor()
        tuned: dict[str, Operation] = {name: _factor(adjust) for name, adjust in color.adjust.items()}
        tuned.update(POINTS)
        tuned["grayscale"] = lambda canvas, values, transform: color.grayscale(canvas.floats())
        tuned["blur"] = _blur
        tuned["noise"] = _noise
        tuned["pillow_blur"] = box_blur_image
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
        result = operation(floats.tensor[None], np.array([values]))
        if result.data_ptr() != floats.tensor.data_ptr():
            floats.tensor.copy_(result[0])

    return apply


def in_channels(canvas: Canvas, transform: Any) -> None:
    """Bring grey levels to as many channels as the transform gives."""
    channels = canvas.floats().array.shape[0] if canvas.is_float else canvas.image().shape[2]
    count = transform.output_channels(channels)
    if count != channels:
        canvas.set(np.repeat(canvas.image()[:, :, :1], count, axis=2))


def _blur(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    width, height, sigma_x, sigma_y = values[:4]
    blur_image(canvas.floats(), int(width), int(height), sigma_x, sigma_y)


def _noise(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    levels = canvas.floats()
    added = torch.from_numpy(normals((int(values[2]), int(values[3])), levels.array.size)).view(levels.tensor.shape)
    added.mul_(float(np.float32(values[1]))).add_(float(np.float32(values[0]))).trunc_()
    levels.tensor.add_(added).clamp_(0, 255)


def _warp(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    warp_canvas(canvas, values, transform.interpolation, transform)


def warp_canvas(canvas: Canvas, values: Sequence[float], interpolation: str, transform: Any) -> None:
    """Do a warp by this filter, with the transform's fill."""
    image = canvas.image()
    height, width = image.shape[:2]
    canvas.set(warp_image(image, values, (height, width), interpolation, transform.outside(masks=False)))
