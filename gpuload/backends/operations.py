"""The operations of `gpuload.transforms.params.OPS` on batches: what each means, on any device.

Levels are float32 N×C×H×W and hold whole numbers in 0 … 255; so do results. An operation may work in place, and returns
where its result is. `values` is float64 (N, `VALUES`), what was drawn for each image, in the host's memory: operations
take what they need to the device, since some must know a number before they issue anything. The meaning is Pillow's
wherever Pillow has the operation. Statistics of an image are sums and counts of whole numbers, so an image's result
never depends on the batch that it is in.

``"warp"`` and ``"identity"`` are not among them: whoever calls an operation does these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from gpuload.backends import neighbourhood, points
from gpuload.backends.box_blur import box_blur
from gpuload.backends.color import ADJUST
from gpuload.backends.noise import batch_normals
from gpuload.backends.upload import upload

__all__ = ["OPERATIONS", "Operation", "in_channels"]

Operation = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def _factor(name: str) -> Operation:
    adjust = ADJUST[name]
    # A turn is cut to 255ths, for which it must not be rounded before: 51 / 255 less its last bit is no 51.
    dtype = np.float64 if name == "hue" else np.float32

    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        adjust(levels, upload(values[:, 0].astype(dtype), levels.device)[:, None, None, None])
        return levels

    return operation


def noise(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Add normal numbers, cut off behind the decimal point as torchvision does it on uint8 images, and clip."""
    numbers = upload(values[:, :2].astype(np.float32), levels.device)[:, :, None, None, None]
    keys = upload(values[:, 2:4], levels.device)
    added = batch_normals(keys, levels[0].numel()).view_as(levels)
    added = added.mul_(numbers[:, 1]).add_(numbers[:, 0]).trunc_()
    return levels.add_(added).clamp_(0, 255)


def in_channels(levels: torch.Tensor, count: int) -> torch.Tensor:
    """Grey levels in so many channels."""
    return levels if count == levels.shape[1] else levels[:, :1].expand(-1, count, -1, -1)


OPERATIONS: Final[dict[str, Operation]] = {
    **{name: _factor(name) for name in ADJUST},
    "sharpness": neighbourhood.sharpness,
    "solarize": points.solarize,
    "posterize": points.posterize,
    "equalize": points.equalize,
    "autocontrast": points.autocontrast,
    "invert": points.invert,
    "grayscale": points.grayscale,
    "blur": neighbourhood.blur,
    "noise": noise,
    "permute": points.permute,
    "solarize_add": points.solarize_add,
    "pillow_blur": box_blur,
}
