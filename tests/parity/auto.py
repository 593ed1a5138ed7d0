"""Automatic augmentation, compared with a sequence of Pillow operations."""

from __future__ import annotations

from typing import Any

import numpy as np
from parity.case import Case
from parity.color import PILLOW_OPERATIONS, as_levels, as_pillow
from PIL import Image, ImageFilter

from gpuload import transforms as T
from gpuload.transforms.program.ops import FILTERS, NOTHING, OPS

__all__ = ["policy"]

RESAMPLING = {name: getattr(Image.Resampling, name.upper()) for name in FILTERS[:3]}


def warp(image: Image.Image, coefficients: list[float], interpolation: str, fill: Any) -> Image.Image:
    """Apply a shear, a shift or a rotation, which are all affine."""
    assert coefficients[6:] == [0, 0]
    color = fill[0] if image.mode == "L" or len(fill) == 1 else tuple(fill)
    color = (color,) * 3 if image.mode == "RGB" and len(fill) == 1 else color
    kind = Image.Transform.AFFINE
    return image.transform(image.size, kind, coefficients[:6], RESAMPLING[interpolation], fillcolor=color)


def apply_operations(
    image: Image.Image, transform: Any, codes: list[int], values: list[list[float]], filters: list[int] | None
) -> Image.Image:
    for number, (code, numbers) in enumerate(zip(codes, values, strict=True)):
        name = None if code == NOTHING else OPS[code]
        if name == "warp":
            interpolation = transform.interpolation if filters is None else FILTERS[filters[number]]
            image = warp(image, numbers, interpolation, transform.outside.image)
        elif name == "solarize_add":
            raised = [min(255, int(level + numbers[1])) if level < numbers[0] else level for level in range(256)]
            image = image.point(raised * len(image.getbands()))
        elif name == "pillow_blur":
            image = image.filter(ImageFilter.GaussianBlur(numbers[0]))
        elif name not in (None, "identity"):
            image = PILLOW_OPERATIONS[name](image, numbers)
    return image


def policy_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    ((transform, params),) = steps
    filters = None if isinstance(params.filters, str) else params.filters[row].tolist()
    result = apply_operations(
        as_pillow(image), transform, params.codes[row].tolist(), params.values[row].tolist(), filters
    )
    return as_levels(result)


def mixture_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """Apply each chain by Pillow, and mix the results in float64, truncated to integers."""
    ((transform, params),) = steps
    shares = params.weights[row]
    total = image * shares[0]
    for number, share in enumerate(shares[1:]):
        codes, values = params.codes[row, number].tolist(), params.values[row, number].tolist()
        filters = None if isinstance(params.filters, str) else params.filters[row, number].tolist()
        total += share * as_levels(apply_operations(as_pillow(image), transform, codes, values, filters))
    return np.floor(total + 1e-6)


ORACLE_NAME = "Pillow operations in sequence"
SEQUENCE_REASON = (
    "the mean grey level of a contrast operation, or a float32 blend, may round to a neighbouring value; later "
    "operations, such as equalize, may amplify the difference"
)
MIXTURE_REASON = (
    "the differences listed under a, scaled by the weight of the AugMix branch; in addition, a float32 sum may round "
    "to the other side of an integer"
)


def policy(name: str, transform: Any, *, max: float = 4, channels: int = 3) -> Case:
    if isinstance(transform, T.AugMix | T.TimmAugMix):
        return Case("auto", name, [transform], mixture_oracle, 0.1, 8, ORACLE_NAME, MIXTURE_REASON, channels=channels)
    return Case("auto", name, [transform], policy_oracle, 0.4, max, ORACLE_NAME, SEQUENCE_REASON, channels=channels)
