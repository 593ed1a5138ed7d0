"""Pillow's `ImageFilter.GaussianBlur`: three box blurs, along rows and then along columns, on batches on any device and
on one image on the CPU, where it is Pillow itself.

A box has a whole radius and a share of the pixel on either side beyond it, in units of 2**-24; sums are whole numbers
below 2**33, exact in float64, so that both ways give the same levels. It stands beside the Gaussian kernel of
torchvision (`gpuload.backends.neighbourhood.blur`), whose results differ by some levels. Source: Gwosdek et al., SSVM
2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, ImageFilter

from gpuload.backends.canvas import Canvas
from gpuload.backends.upload import upload

__all__ = ["box_blur", "box_blur_image"]

PASSES: Final = 3
UNIT: Final = 1 << 24


def box_blur_image(canvas: Canvas, values: Sequence[float], transform: Any) -> None:
    """Blur the image on a canvas; `values` begins with the radius of Pillow's filter, in pixels."""
    image = canvas.image()
    blur = ImageFilter.GaussianBlur(values[0])
    if image.shape[2] == 3:
        canvas.set(np.array(Image.fromarray(image).filter(blur)))
        return
    planes = [np.array(Image.fromarray(image[:, :, channel]).filter(blur)) for channel in range(image.shape[2])]
    canvas.set(np.stack(planes, axis=2))


def box_blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The same for levels N×C×H×W, float32; `values` are float64 (N, …), a radius first."""
    boxes = [_box(radius) for radius in values[:, 0].tolist()]
    radius = max(whole for whole, _, _ in boxes) + 1
    weights = np.zeros((len(boxes), radius + 1))
    for row, (whole, inside, edge) in enumerate(boxes):
        weights[row, : whole + 1] = inside
        weights[row, whole + 1] = edge
    taps = upload(weights, levels.device)[:, :, None, None, None]
    blurred = levels.to(torch.float64)
    for axis in (3, 2):
        length = levels.shape[axis]
        places = upload(np.clip(np.arange(-radius, length + radius), 0, length - 1), levels.device)
        for _ in range(PASSES):
            padded = blurred.index_select(axis, places)
            blurred = padded.narrow(axis, radius, length) * taps[:, 0]
            for far in range(1, radius + 1):
                pair = padded.narrow(axis, radius - far, length) + padded.narrow(axis, radius + far, length)
                blurred += pair.mul_(taps[:, far])
            blurred.add_(UNIT // 2).div_(UNIT).floor_()
    return blurred.to(levels.dtype)


def _box(radius: float) -> tuple[int, int, int]:
    """The whole radius of the boxes, the weight of a pixel inside, and that of the two beyond; Pillow has float32."""
    deviation = np.float32(radius)
    variance = deviation * deviation / np.float32(PASSES)
    whole = np.float32(np.floor((np.sqrt(12.0 * float(variance) + 1.0).astype(np.float32) - 1.0) / 2.0))
    one, two, three, six = (np.float32(number) for number in (1, 2, 3, 6))
    share = (two * whole + one) * (whole * (whole + one) - three * variance)
    share /= six * (variance - (whole + one) * (whole + one))
    real = whole + share
    inside = int(np.float32(UNIT) / (real * two + one))
    return int(real), inside, (UNIT - (2 * int(real) + 1) * inside) // 2
