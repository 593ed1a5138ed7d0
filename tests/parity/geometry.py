"""Geometric transforms, compared with Pillow's resize, rotate, transform, expand and crop, and NumPy's pad.

Oracles apply the recorded boxes, flips and maps to the complete image, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from parity.case import BATCHES, Case, Oracle, Tolerance
from parity.color import as_levels, as_pillow
from PIL import Image, ImageOps

from gpuload import transforms as T
from gpuload.transforms.program.ops import FILTERS, Box, Flip, Turn, Warp

__all__ = [
    "FILL", "MIDDLE_CROP", "NUMPY_PAD", "ONE_CALL", "TWO_PASSES", "WARPING", "aliased", "bicubic", "by_pillow_call",
    "by_torchvision", "geometry_oracle", "moved", "resized", "rotated", "timm_section", "warped",
]  # fmt: skip

WARPING = ("nearest", "bilinear", "bicubic")
PILLOW_FILTERS = {name: getattr(Image.Resampling, name.upper()) for name in (*WARPING, "lanczos")}


def filter_of(transform: Any, params: Any, row: int) -> str:
    return params.filters if isinstance(params.filters, str) else FILTERS[params.filters[row]]


def fill_color(transform: Any, image: Image.Image) -> Any:
    fill = transform.outside.image
    return fill[0] if image.mode == "L" else tuple(fill) * (3 // len(fill))


def padded_crop(transform: Any, params: Box, row: int, image: Image.Image) -> Image.Image:
    top, left, height, width = params.box_tlhw[row].tolist()
    margin = max(0, -top, -left, top + height - image.height, left + width - image.width)
    if transform.padding_mode == "constant":
        image = ImageOps.expand(image, margin, fill_color(transform, image))
    else:
        widths = ((margin, margin), (margin, margin), (0, 0))
        image = as_pillow(np.pad(as_levels(image), widths, mode=transform.padding_mode))
    return image.crop((left + margin, top + margin, left + margin + width, top + margin + height))


def resized_crop(transform: Any, params: Box, row: int, image: Image.Image) -> Image.Image:
    top, left, height, width = params.box_tlhw[row].tolist()
    new_height, new_width = params.size_hw[row].tolist()
    interpolation = filter_of(transform, params, row)
    image = image.crop((left, top, left + width, top + height))
    if interpolation.startswith("plain"):
        batch = torch.tensor(as_levels(image)).permute(2, 0, 1)[None].float()
        resized_batch = torch.nn.functional.interpolate(batch, (new_height, new_width), mode=interpolation.split()[1])
        return as_pillow(resized_batch.round().clamp(0, 255)[0].permute(1, 2, 0).to(torch.uint8).numpy())
    if interpolation != "nearest":  # a single call resizes the cheaper axis first, since Pillow 13
        image = image.resize((new_width, height), PILLOW_FILTERS[interpolation])
    return image.resize((new_width, new_height), PILLOW_FILTERS[interpolation])


def resize_by_one_call(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """Resize a crop by one call of `Image.resize`, as users of Pillow do."""
    ((transform, params),) = steps
    top, left, height, width = params.box_tlhw[row].tolist()
    new_height, new_width = params.size_hw[row].tolist()
    filter_ = PILLOW_FILTERS[filter_of(transform, params, row)]
    return np.asarray(
        Image.fromarray(image).crop((left, top, left + width, top + height)).resize((new_width, new_height), filter_)
    )


def resize_by_torchvision(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """Resize a crop by torchvision's `resized_crop` of a uint8 tensor."""
    from helpers.peers import torchvision

    ((transform, params),) = steps
    functional = torchvision().transforms.v2.functional
    interpolation = functional.InterpolationMode(filter_of(transform, params, row))
    box, size = params.box_tlhw[row].tolist(), params.size_hw[row].tolist()
    result = functional.resized_crop(torch.tensor(image).permute(2, 0, 1), *box, size, interpolation, antialias=True)
    return result.permute(1, 2, 0).numpy()


def warp_by_pillow(transform: Any, params: Warp, row: int, image: Image.Image) -> Image.Image:
    if not params.warped[row]:
        return image
    height, width = params.size_hw[row].tolist()
    coefficients = params.coefficients[row].tolist()
    is_affine = not isinstance(transform, T.RandomPerspective)
    method = Image.Transform.AFFINE if is_affine else Image.Transform.PERSPECTIVE
    filter_ = PILLOW_FILTERS[filter_of(transform, params, row)]
    fill = fill_color(transform, image)
    return image.transform((width, height), method, coefficients[: 6 if is_affine else 8], filter_, fillcolor=fill)


def rotate_by_pillow(transform: Any, params: Warp, row: int, image: Image.Image) -> Image.Image:
    """Rotate by `Image.rotate` and the recorded angle."""
    cosine, sine = params.coefficients[row, 0], params.coefficients[row, 3]
    filter_, fill = PILLOW_FILTERS[filter_of(transform, params, row)], fill_color(transform, image)
    angle = math.degrees(math.atan2(sine, cosine))
    return image.rotate(angle, filter_, transform.expand, transform.center, fillcolor=fill)


def turn_by_pillow(params: Turn, row: int, image: Image.Image) -> Image.Image:
    if params.transposed[row]:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    upside_down, mirrored = params.flipped[row]
    image = ImageOps.flip(image) if upside_down else image
    return ImageOps.mirror(image) if mirrored else image


def geometry_oracle(image: np.ndarray, steps: list[tuple[Any, Any]], row: int) -> np.ndarray:
    result = as_pillow(image)
    for transform, params in steps:
        match params:
            case Box(padding_mode=str()):
                result = padded_crop(transform, params, row, result)
            case Box():
                result = resized_crop(transform, params, row, result)
            case Flip() if params.flipped[row]:
                result = ImageOps.mirror(result) if params.axis else ImageOps.flip(result)
            case Turn():
                result = turn_by_pillow(params, row, result)
            case Warp() if isinstance(transform, T.RandomRotation):
                result = rotate_by_pillow(transform, params, row, result)
            case Warp():
                result = warp_by_pillow(transform, params, row, result)
    return as_levels(result)


_: Oracle = geometry_oracle

EXACT_REASON = "pixels are only moved, or are computed in Pillow's integer arithmetic"
ALIASED_REASON = "gpuload computes with 22-bit integers and rounds between columns and rows; torch sums floats"
RESIZE_REASON = "the reference resizes with torch's kernel, whose weights have 16 bits; Pillow's weights have 22 bits"
AXES_REASON = (
    "Pillow 13 resizes along the cheaper axis first, and gpuload along rows first; the results differ most where "
    "bicubic overshoots 0 … 255 between the two passes"
)
SAME_KERNEL_REASON = "the oracle uses the same torch kernel as the reference"
TENSORS_REASON = "the backend's weights have 22 bits; those of the oracle's torch kernel have 16 bits"
PILLOW_REASON = (
    "the backend uses Pillow's integer arithmetic, and so equals the oracle, but not the reference, whose weights have "
    "16 bits"
)
WARP_REASON = "gpuload uses Pillow's float64 arithmetic; single images are processed by Pillow itself"
ANGLE_REASON = "the oracle computes the angle from the recorded parameters, so a coordinate may differ in its last bit"

# Names of oracles.
PILLOW_CROP = "Pillow ImageOps.expand, Image.crop"
NUMPY_PAD = "numpy.pad, Pillow Image.crop"
TWO_PASSES = "Pillow Image.resize along rows, then along columns"
ONE_CALL = "Pillow Image.resize"

FILL = (9, 99, 199)
MIDDLE_CROP = T.CenterCrop((140, 171))  # so that batches on the CPU do not take minutes


def geometry_case(
    name: str, transforms: Sequence[Any], against: str, reason: str, *, mean: float = 0, max: float = 0, **options: Any
) -> Case:
    options = {"oracle": geometry_oracle, **options}
    return Case("geometry", name, list(transforms), mean=mean, max=max, against=against, reason=reason, **options)


def batched_tolerances(mean: float, max: float, apart: float, reason: str) -> dict[str, Tolerance]:
    return dict.fromkeys((BATCHES, "fused"), Tolerance(mean, max, apart, reason))


def moved(name: str, *transforms: Any, against: str = PILLOW_CROP, channels: int = 3) -> Case:
    return geometry_case(name, transforms, against, EXACT_REASON, channels=channels)


def resized(name: str, *transforms: Any, against: str = TWO_PASSES, channels: int = 3, apart: int = 1) -> Case:
    options = {"backends": batched_tolerances(0, 0, apart, PILLOW_REASON), "between": 1, "channels": channels}
    return geometry_case(name, transforms, against, RESIZE_REASON, mean=0.03, max=1, **options)


def bicubic(name: str, *transforms: Any) -> Case:
    """Return a case whose four taps along each axis, some of them negative, amplify the last bits of weights."""
    options = {"backends": batched_tolerances(0, 0, 2, PILLOW_REASON), "between": 2}
    return geometry_case(name, transforms, TWO_PASSES, RESIZE_REASON, mean=0.1, max=2, **options)


def by_pillow_call(name: str, transform: Any, mean: float, max: float) -> Case:
    """Return a case against the call that users of Pillow images make."""
    options = {"oracle": resize_by_one_call, "between": 2}
    return geometry_case(name, [transform], ONE_CALL, AXES_REASON, mean=mean, max=max, **options)


def by_torchvision(name: str, transform: Any, apart: int) -> Case:
    options = {"oracle": resize_by_torchvision, "backends": batched_tolerances(0.3, apart, apart, TENSORS_REASON)}
    against = "torchvision v2.functional.resized_crop of tensors"
    return geometry_case(name, [transform], against, SAME_KERNEL_REASON, **options)


def aliased(name: str, *transforms: Any) -> Case:
    return geometry_case(name, transforms, "torch.nn.functional.interpolate", ALIASED_REASON, mean=0.3, max=1)


def warped(name: str, *transforms: Any, channels: int = 3) -> Case:
    return geometry_case(name, [MIDDLE_CROP, *transforms], "Pillow Image.transform", WARP_REASON, channels=channels)


def rotated(name: str, transform: Any, *, channels: int = 3) -> Case:
    options = {"mean": 1e-4, "max": 1, "channels": channels}
    return geometry_case(name, [MIDDLE_CROP, transform], "Pillow Image.rotate", ANGLE_REASON, **options)


def timm_section(*cases: Case) -> list[Case]:
    return [replace(case, topic="timm") for case in cases]
