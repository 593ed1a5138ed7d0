"""What each of `gpuload.transforms.program.ops.OPS` means: on batches on any device, and on one image on the CPU.

`OPERATIONS` are for batches. Levels and results are float32 N×C×H×W, whole numbers in 0 … 255. An operation may work in
place, and returns its result. `values` is float64 (N, `VALUES`), what was drawn for each image, on the host, since some
operations need a number before they issue anything. The meaning is Pillow's if Pillow has the operation. Statistics of
an image are sums and counts of whole numbers, so an image's result never depends on its batch. The callers do
``"warp"`` and ``"identity"`` themselves.

`SingleOperations` does the same to one image with the same results, as a batch of one unless there is a faster way.
Runs in the process of the stage, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.noise import batch_normals, normals
from gpuload.stage.reference import points
from gpuload.stage.reference.blur import blur, blur_image, box_blur, box_blur_image, sharpness
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.color import ADJUST, SingleColor
from gpuload.stage.reference.jpeg import compress, compress_image
from gpuload.stage.reference.points import POINTS
from gpuload.stage.reference.warp import warp_image
from gpuload.transforms.program.ops import OPS

__all__ = ["OPERATIONS", "Operation", "SingleOperations", "canvas_in_channels", "in_channels", "warp_canvas"]

Operation = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def _factor(name: str) -> Operation:
    adjust = ADJUST[name]
    # A turn is truncated to 255ths, and must not be rounded before: 51 / 255 without its last bit would be 50.
    dtype = np.float64 if name == "hue" else np.float32

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        adjust(levels, upload(values[:, 0].astype(dtype), levels.device)[:, None, None, None])
        return levels

    return operation


def noise(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Add normal numbers, truncated as by torchvision on uint8 images; what leaves 0 … 255 is clamped, or wraps."""
    numbers = upload(values[:, :2].astype(np.float32), levels.device)[:, :, None, None, None]
    keys = upload(values[:, 2:4], levels.device)
    added = batch_normals(keys, levels[0].numel()).view_as(levels)
    levels.add_(added.mul_(numbers[:, 1]).add_(numbers[:, 0]).trunc_())
    if not values[:, 4].any():
        return levels.clamp_(0, 255)
    wraps = upload(values[:, 4] != 0, levels.device)[:, None, None, None]
    return torch.where(wraps, levels.remainder(256), levels.clamp(0, 255))


def in_channels(levels: torch.Tensor, count: int) -> torch.Tensor:
    """Grey levels in this many channels."""
    return levels if count == levels.shape[1] else levels[:, :1].expand(-1, count, -1, -1)


OPERATIONS: Final[dict[str, Operation]] = {
    **{name: _factor(name) for name in ADJUST},
    "sharpness": sharpness,
    "solarize": points.solarize,
    "posterize": points.posterize,
    "equalize": points.equalize,
    "autocontrast": points.autocontrast,
    "invert": points.invert,
    "grayscale": points.grayscale,
    "blur": blur,
    "noise": noise,
    "permute": points.permute,
    "solarize_add": points.solarize_add,
    "pillow_blur": box_blur,
    "jpeg": compress,
}


ImageOperation = Callable[[Canvas, Sequence[float]], None]


class SingleOperations:
    def __init__(self) -> None:
        color = SingleColor()
        tuned: dict[str, ImageOperation] = {name: _image_factor(adjust) for name, adjust in color.adjust.items()}
        tuned.update(POINTS)
        tuned["grayscale"] = lambda canvas, values: color.grayscale(canvas.floats())
        tuned["blur"] = _blur
        tuned["noise"] = _noise
        tuned["pillow_blur"] = box_blur_image
        tuned["jpeg"] = compress_image
        tuned["identity"] = lambda canvas, values: None
        self._by_code = [tuned.get(name) or (_batched(name) if name in OPERATIONS else None) for name in OPS]

    def apply(self, canvas: Canvas, code: int, values: Sequence[float]) -> None:
        """Do the operation with this code."""
        operation = self._by_code[code]
        assert operation is not None, f"there is no {OPS[code]} on the CPU"
        operation(canvas, values)


def _image_factor(adjust: Callable[[Any, float], None]) -> ImageOperation:
    return lambda canvas, values: adjust(canvas.floats(), values[0])


def _batched(name: str) -> ImageOperation:
    operation = OPERATIONS[name]

    def apply(canvas: Canvas, values: Sequence[float]) -> None:
        floats = canvas.floats()
        result = operation(floats.tensor[None], np.array([values]))
        if result.data_ptr() != floats.tensor.data_ptr():
            floats.tensor.copy_(result[0])

    return apply


def canvas_in_channels(canvas: Canvas, count: int) -> None:
    """Bring grey levels to this many channels."""
    channels = canvas.floats().array.shape[0] if canvas.is_float else canvas.image().shape[2]
    if count != channels:
        canvas.set(np.repeat(canvas.image()[:, :, :1], count, axis=2))


def _blur(canvas: Canvas, values: Sequence[float]) -> None:
    width, height, sigma_x, sigma_y = values[:4]
    blur_image(canvas.floats(), int(width), int(height), sigma_x, sigma_y)


def _noise(canvas: Canvas, values: Sequence[float]) -> None:
    levels = canvas.floats()
    added = torch.from_numpy(normals((int(values[2]), int(values[3])), levels.array.size)).view(levels.tensor.shape)
    added.mul_(float(np.float32(values[1]))).add_(float(np.float32(values[0]))).trunc_()
    levels.tensor.add_(added)
    if values[4]:
        levels.tensor.remainder_(256)
    else:
        levels.tensor.clamp_(0, 255)


def warp_canvas(canvas: Canvas, values: Sequence[float], interpolation: str, fill: Sequence[float]) -> None:
    """Warp an image to its own size."""
    image = canvas.image()
    canvas.set(warp_image(image, values, (image.shape[0], image.shape[1]), interpolation, fill))
