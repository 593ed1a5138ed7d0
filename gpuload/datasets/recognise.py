"""Which leaves of a sample are images or targets. In workers, so no torch: types are recognised by their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.datasets.bit_depth import too_deep
from gpuload.datasets.sample import Boxes, Encoded, Image, Keypoints, Mask, Target
from gpuload.datasets.tree import dtype_of, is_tensor
from gpuload.errors import DecodeError

__all__ = ["find_leaves"]

NEVER_IMAGES = frozenset({int, float, bool, str, bytes, type(None)})


def find_leaves(leaves: Sequence[Any]) -> tuple[dict[int, Encoded | Image], dict[int, Target]]:
    """The leaves that are images, and those that are targets, by their number.

    Images are every `Encoded`, `Image`, PIL image and TVTensor image; in a sample with none of these, the first uint8
    C×H×W tensor or H×W×C array (1 to 4 channels). Targets are `Mask`, `Boxes`, `Keypoints` and their TVTensors.

    Raises:
        DecodeError: a PIL image holds more than 8 bits.
    """
    found: dict[int, Encoded | Image] = {}
    targets: dict[int, Target] = {}
    for number, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind is Encoded or kind is Image:
            found[number] = leaf
        elif kind is Mask or kind is Boxes or kind is Keypoints:
            targets[number] = leaf
        elif kind not in NEVER_IMAGES:
            module = kind.__module__
            if module.startswith("PIL.") and hasattr(leaf, "getbands"):
                found[number] = _from_pil(leaf)
            elif module.startswith("torchvision.tv_tensors"):
                if kind.__name__ == "Image":
                    found[number] = Image(leaf.numpy(), layout="CHW")
                elif (target := _tv_target(kind.__name__, leaf)) is not None:
                    targets[number] = target
    if found:
        return found, targets
    for number, leaf in enumerate(leaves):
        if number in targets:
            continue
        if isinstance(leaf, np.ndarray):
            if leaf.dtype == np.uint8 and leaf.ndim == 3 and leaf.size and 1 <= leaf.shape[2] <= 4:
                return {number: Image(leaf)}, targets
        elif is_tensor(leaf) and leaf.dim() == 3 and 1 <= leaf.shape[0] <= 4 and dtype_of(leaf) == "uint8":
            return {number: Image(leaf.numpy(), layout="CHW")}, targets
    return found, targets


def _from_pil(image: Any) -> Image:
    if image.mode not in ("L", "RGB", "RGBA"):
        if (complaint := too_deep("this PIL image", image.mode)) is not None:
            raise DecodeError(complaint)
        image = image.convert("RGB")
    return Image(np.asarray(image))


def _tv_target(name: str, leaf: Any) -> Target | None:
    """A target of torchvision's as one of ours."""
    if name == "Mask":
        return Mask(leaf.numpy())
    if name == "BoundingBoxes":
        if getattr(leaf, "clamping_mode", "soft") is None:
            raise ValueError(
                "the sample has BoundingBoxes with clamping_mode=None, but gpuload clips boxes to the image, as "
                "torchvision does by default; leave clamping_mode out"
            )
        return Boxes(leaf.numpy(), leaf.format)
    return Keypoints(leaf.numpy()) if name == "KeyPoints" else None
