"""Transforms that change colours, against Pillow's enhancers and operations."""

from __future__ import annotations

from typing import Any

import numpy as np
from parity.case import Case, Oracle
from PIL import Image, ImageEnhance

from gpuload import transforms as T
from gpuload.transforms.params import NOTHING, OPS

__all__ = ["CASES", "operations"]


def as_pillow(levels: np.ndarray) -> Image.Image:
    return Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels)


def as_levels(image: Image.Image) -> np.ndarray:
    levels = np.asarray(image)
    return levels[:, :, None] if levels.ndim == 2 else levels


def hue(image: Image.Image, turns: float) -> Image.Image:
    """As torchvision does it on Pillow images."""
    if image.mode == "L":
        return image
    channel, saturation, value = image.convert("HSV").split()
    turned = (np.asarray(channel).astype(np.int32) + int(turns * 255)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


PILLOW: dict[str, Any] = {
    "brightness": lambda image, values: ImageEnhance.Brightness(image).enhance(values[0]),
    "contrast": lambda image, values: ImageEnhance.Contrast(image).enhance(values[0]),
    "saturation": lambda image, values: ImageEnhance.Color(image).enhance(values[0]),
    "hue": lambda image, values: hue(image, values[0]),
}


def operations(image: np.ndarray, drawn: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """The drawn operations of all transforms, by Pillow, one after the other."""
    result = as_pillow(image)
    for _, params in drawn:
        for code, values in zip(params.codes[row].tolist(), params.values[row].tolist(), strict=True):
            if code != NOTHING:
                result = PILLOW[OPS[code]](result, values)
    return as_levels(result)


_: Oracle = operations

CASES: list[Case] = [
    Case(
        "ColorJitter(brightness)",
        [T.ColorJitter(brightness=0.8)],
        operations,
        mean=0.01,
        max=1,
        against="Pillow ImageEnhance.Brightness",
        reason="the product in float32 may lie on the other side of a whole number",
    ),
]
