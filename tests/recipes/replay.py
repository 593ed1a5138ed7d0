"""gpuload's draws applied by torchvision's functions, to Pillow images, masks and bounding boxes.

A recipe is correct if its result equals that of the original recipe with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from helpers import peers
from PIL import Image, ImageFilter

from gpuload.transforms.program.ops import NOTHING, OPS, Box, ChainMixture, Erase, Flip, Numbers, Ops, Record, Warp
from gpuload.transforms.program.windows import FILTERS

vision = peers.torchvision()
F = vision.transforms.v2.functional
tv_tensors = vision.tv_tensors

__all__ = ["replay_records"]


def replay_records(records: Sequence[Record], row: int, image: Image.Image, *targets: Any) -> list[Any]:
    """Return an image, with masks and boxes (TVTensors), after all records; the image as a float64 tensor C×H×W."""
    leaves = [image, *targets]
    for record in records:
        leaves = apply_record(record, row, leaves)
    return [as_tensor(leaves[0]), *leaves[1:]]


def as_tensor(image: Any) -> torch.Tensor:
    return image if isinstance(image, torch.Tensor) else F.pil_to_tensor(image).double()


def apply_record(record: Record, row: int, leaves: list[Any]) -> list[Any]:
    if record.rows is not None:
        record_rows = np.flatnonzero(record.rows == row).tolist()
        if not record_rows:
            return leaves
        [row] = record_rows
    match record:
        case Box():
            return [drop_boxes(record, row, apply_box(record, row, leaf), leaf) for leaf in leaves]
        case Flip():
            if not record.flipped[row]:
                return leaves
            return [(F.horizontal_flip if record.axis == 1 else F.vertical_flip)(leaf) for leaf in leaves]
        case Warp():
            return [apply_warp(record, row, leaf) for leaf in leaves] if record.warped[row] else leaves
        case Ops():
            return [apply_ops(record, row, leaves[0]), *leaves[1:]]
        case ChainMixture():
            return [apply_mixture(record, row, leaves[0]), *leaves[1:]]
        case Erase():
            return [apply_erase(record, row, leaves[0]), *leaves[1:]]
        case Numbers():
            return [apply_numbers(record, leaves[0]), *leaves[1:]]
    raise AssertionError(f"no torchvision function is known for {record!r}")


def apply_numbers(record: Numbers, image: Any) -> Any:
    if record.dtype not in (None, "uint8"):
        return F.to_dtype(F.to_image(image), torch.float64, scale=record.scale).as_subclass(torch.Tensor)
    if not record.mean:
        return image
    if isinstance(image, Image.Image):
        image = as_tensor(image) / 255
    return F.normalize(image, list(record.mean), list(record.std))


def filter_of(record: Box | Ops | Warp, row: Any) -> Any:
    name = record.filters if isinstance(record.filters, str) else FILTERS[int(record.filters[row])]
    return vision.transforms.InterpolationMode(name)


def fill_of(record: Any, leaf: Any) -> Any:
    if isinstance(leaf, tv_tensors.Mask):
        return record.mask_fill
    return list(record.fill) if len(record.fill) > 1 else record.fill[0]


def apply_box(record: Box, row: int, leaf: Any) -> Any:
    top, left, height, width = record.box_tlhw[row].tolist()
    if record.padding_mode is None:
        size, mode = record.size_hw[row].tolist(), filter_of(record, row)
        return F.resized_crop(leaf, top, left, height, width, size, interpolation=mode)
    old_height, old_width = F.get_size(leaf)
    if (top, left, height, width) == (0, 0, old_height, old_width):
        return leaf  # no change, not even clamping of boxes
    right, bottom = left + width - old_width, top + height - old_height
    padding = [max(-left, 0), max(-top, 0), max(right, 0), max(bottom, 0)]
    if any(padding):
        fill = fill_of(record, leaf)
        if isinstance(leaf, Image.Image) and isinstance(fill, list):
            fill = tuple(fill)
        leaf = F.pad(leaf, padding, fill=fill, padding_mode=record.padding_mode)
    return F.crop(leaf, top + padding[1], left + padding[0], height, width)


def drop_boxes(record: Box, row: int, leaf: Any, boxes_before: Any) -> Any:
    """Make boxes empty whose centers are outside of RandomIoUCrop's crop, so that SanitizeBoundingBoxes drops them."""
    if record.kept_boxes is None or not isinstance(leaf, tv_tensors.BoundingBoxes):
        return leaf
    top, left, height, width = record.box_tlhw[row].tolist()
    centers = F.convert_bounding_box_format(boxes_before, new_format="CXCYWH")
    is_inside = (centers[:, 0] > left) & (centers[:, 0] < left + width)
    is_inside &= (centers[:, 1] > top) & (centers[:, 1] < top + height)
    leaf[~is_inside] = 0
    return leaf


def apply_warp(record: Warp, row: int, leaf: Any) -> Any:
    coefficients, size_hw = record.coefficients[row].tolist(), record.size_hw[row].tolist()
    mode = filter_of(record, row)
    if isinstance(leaf, Image.Image):
        return map_image(leaf, coefficients, mode, fill_of(record, leaf), size_hw)
    assert size_hw == list(F.get_size(leaf)), "an expanded rotation is not a perspective map"
    return F.perspective(leaf, None, None, mode, fill_of(record, leaf), coefficients)


def map_image(
    image: Image.Image, coefficients: list[float], mode: Any, fill: Any, size_hw: Sequence[int]
) -> Image.Image:
    """Call Pillow as torchvision's affine and perspective do, which take other arguments."""
    affine = coefficients[6:] == [0, 0]
    kind = Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE
    filter_ = Image.Resampling[mode.name]
    color = tuple(fill) if isinstance(fill, list) else (fill,) * len(image.getbands())
    return image.transform(size_hw[::-1], kind, coefficients[: 6 if affine else 8], filter_, fillcolor=color)


def apply_ops(record: Ops, row: int, image: Image.Image) -> Image.Image:
    for number, code in enumerate(record.codes[row].tolist()):
        if code != NOTHING:
            mode = None
            if OPS[code] == "warp":
                mode = filter_of(record, (row, number))
            image = apply_operation(record, OPS[code], record.values[row, number].tolist(), mode, image)
    return image


def apply_operation(record: Ops, name: str, values: list[float], mode: Any, image: Image.Image) -> Image.Image:
    match name:
        case "brightness":
            return F.adjust_brightness(image, values[0])
        case "contrast":
            return F.adjust_contrast(image, values[0])
        case "saturation":
            return F.adjust_saturation(image, values[0])
        case "hue":
            return F.adjust_hue(image, values[0])
        case "sharpness":
            return F.adjust_sharpness(image, values[0])
        case "solarize":
            return F.solarize(image, values[0])
        case "posterize":
            # Pillow refuses 0 bits, which means black.
            return F.posterize(image, int(values[0])) if values[0] else image.point([0] * 768)
        case "equalize":
            return F.equalize(image)
        case "autocontrast":
            return F.autocontrast(image)
        case "invert":
            return F.invert(image)
        case "grayscale":
            return F.rgb_to_grayscale(image, num_output_channels=3)
        case "blur":
            return F.gaussian_blur(image, [int(side) for side in values[:2]], values[2:4])
        case "permute":
            return Image.merge("RGB", [image.getchannel(int(channel)) for channel in values[:3]])
        case "warp":
            return map_image(image, values, mode, fill_of(record, image), image.size[::-1])
        case "solarize_add":
            table = [min(255, level + int(values[1])) if level < values[0] else level for level in range(256)]
            return image.point(table * len(image.getbands()))
        case "pillow_blur":
            return image.filter(ImageFilter.GaussianBlur(values[0]))
        case "identity":
            return image
    raise AssertionError(f"no torchvision function is known for {name}")


def apply_mixture(record: ChainMixture, row: int, image: Image.Image) -> Image.Image:
    """Compute AugMix like torchvision: sum integer levels as floats, and truncate the sum."""
    weights = record.weights[row]
    total = weights[0] * np.asarray(image, np.float64)
    for chain in range(record.codes.shape[1]):
        total = total + weights[1 + chain] * np.asarray(apply_ops(record.chain(chain), row, image), np.float64)
    return Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


def apply_erase(record: Erase, row: int, image: torch.Tensor) -> torch.Tensor:
    assert record.kind == "const", "random pixels have a test of their own"
    for top, left, height, width in record.boxes_tlhw[row].tolist():
        if height:
            value = torch.tensor(record.numbers, dtype=image.dtype)[:, None, None]
            image = F.erase(image, top, left, height, width, value)
    return image
