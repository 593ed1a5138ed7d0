"""The operations of `gpuload.transforms.program.ops` that are made of DALI's, and each image's own order of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuload.stage.dali import color, neighbourhood
from gpuload.stage.dali.engine import ndd
from gpuload.stage.dali.images import Images, merged
from gpuload.transforms.program.ops import NOTHING, OPS, Ops

__all__ = ["OPERATIONS", "operate"]

Operation = Callable[[ndd.Batch, np.ndarray], ndd.Batch]

# None leaves images as they are. What is not here is in `gpuload.stage.dali.backend.LACKING`.
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


def operate(images: Images, transform: Any, params: Ops) -> Images:
    """Do the operations, the first of all images first; images with the same one go together.

    Raises:
        TypeError: one of them is not made of DALI's.
    """
    for turn in range(params.codes.shape[1]):
        images = _turn(images, params.codes[:, turn], params.values[:, turn])
    channels = transform.output_channels(images.channels)
    return images if channels == images.channels else Images(color.in_channels(images.batch, channels))


def _turn(images: Images, codes: np.ndarray, values: np.ndarray) -> Images:
    operations = [None if code == NOTHING else _operation(OPS[code]) for code in codes.tolist()]
    wanted = dict.fromkeys(operations)
    if set(wanted) == {None}:
        return images
    images, parts = Images(images.batch), []
    for operation in wanted:
        rows = np.array([row for row, found in enumerate(operations) if found is operation], np.int64)
        some = images if len(wanted) == 1 else images.take(rows)
        parts.append((rows, some if operation is None else Images(operation(some.batch, values[rows]))))
    return merged(parts)


def _operation(name: str) -> Operation | None:
    try:
        return OPERATIONS[name]
    except KeyError:
        raise TypeError(f"{name} is no operation that is made of DALI's") from None
