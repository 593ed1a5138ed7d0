"""The operations of `gpuload.transforms.program.ops` in DALI, in each image's own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from gpuload.stage.dali import color, neighbourhood
from gpuload.stage.dali.engine import ndd
from gpuload.stage.dali.images import Images, grouped
from gpuload.transforms.program.ops import NOTHING, OPS, Ops, code

__all__ = ["OPERATIONS", "operate"]

Operation = Callable[[ndd.Batch, np.ndarray], ndd.Batch]

# None leaves images as they are. The others are in `gpuload.stage.dali.backend.LACKING`.
OPERATIONS: Final[dict[str, Operation | None]] = {
    "brightness": color.brightness,
    "contrast": color.contrast,
    "saturation": color.saturation,
    "hue": color.hue,
    "sharpness": neighbourhood.sharpness,
    "solarize": color.solarize,
    "posterize": color.posterize,
    "autocontrast": color.autocontrast,
    "invert": color.invert,
    "grayscale": color.grayscale,
    "blur": neighbourhood.blur,
    "permute": color.permute,
    "identity": None,
    "solarize_add": color.solarize_add,
}


def operate(images: Images, record: Ops) -> Images:
    """Do each image's operations; images with the same n-th one go together. TypeError if DALI lacks one."""
    codes = np.where(record.codes == NOTHING, code("identity"), record.codes)
    for turn in range(codes.shape[1]):
        images = _turn(images, codes[:, turn], record.values[:, turn])
    if record.channels in (None, images.channels):
        return images
    return Images(color.in_channels(images.batch, record.channels))


def _turn(images: Images, codes: np.ndarray, values: np.ndarray) -> Images:
    def operated(some: Images, rows: np.ndarray, number: int) -> Images:
        if OPS[number] not in OPERATIONS:
            raise TypeError(f"DALI has no operators for {OPS[number]}")
        operation = OPERATIONS[OPS[number]]
        return some if operation is None else Images(operation(some.batch, values[rows]))

    return images if (codes == code("identity")).all() else grouped(images, codes, operated)
