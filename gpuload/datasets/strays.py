"""Leaves that stay as they are while the transforms move the image that they belong to: masks, boxes and keypoints that
are plain arrays. And pictures that look like masks.

It only finds words for one warning; what becomes of a leaf is up to `recognise` alone. Workers look at their first few
samples. No torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuload.datasets.recognise import MASK_NAME
from gpuload.datasets.sample import PIXELS
from gpuload.datasets.tree import LEAF, Structure, dtype_of, is_tensor, kind_of, located

__all__ = ["find_strays"]

BOX_NAME: Final = re.compile(r"^(gt_?|true_?)?(b|bounding_?)?box(es)?(_xy\w+)?$", re.IGNORECASE)
POINT_NAME: Final = re.compile(r"keypoint|landmark|^kpts?$", re.IGNORECASE)
MOST: Final = 3  # leaves that are named


def find_strays(
    structure: Structure,
    leaves: Sequence[Any],
    sizes_hw: Mapping[int, tuple[int, int]],
    files: Mapping[int, tuple[str, str]],
    targets: Mapping[int, Any],
    *,
    moves: bool,
) -> str:
    """What to tell the user; empty if there is nothing.

    Args:
        structure, leaves: the sample, taken apart.
        sizes_hw: of its images, by leaf.
        files: format and Pillow's mode of those images that are files to be decoded to RGB, by leaf.
        targets: the leaves that are targets.
        moves: whether what is applied moves pixels.
    """
    files = dict(files)
    for leaf in sizes_hw:
        if hasattr(leaves[leaf], "getbands"):
            files[leaf] = getattr(leaves[leaf], "format", None) or "", leaves[leaf].mode
    grey = {leaf for leaf, (kind, mode) in files.items() if mode in ("1", "P") or (mode == "L" and kind != "JPEG")}
    coloured = {size for leaf, size in sizes_hw.items() if leaf not in grey}
    numbers = itertools.count()
    found: dict[str, str] = {}
    for node, place, name in located(structure):
        what = ""
        if node != LEAF:
            if moves and _are_boxes(node) and BOX_NAME.search(name):
                what = _stays("a list", "gpuload.Boxes(boxes, format='xyxy')")
        elif (leaf := next(numbers)) in files:
            named = bool(MASK_NAME.search(name)) and len(sizes_hw) > 1
            if named or (leaf in grey and sizes_hw[leaf] in coloured):
                what = (
                    f"of Pillow's mode {files[leaf][1]!r}, is taken as a photograph, and its values as colours; if it "
                    "is a mask, return gpuload.Mask(picture)"
                )
        elif moves and leaf not in sizes_hw and leaf not in targets:
            what = _left_behind(leaves[leaf], name, set(sizes_hw.values()))
        if what:
            found.setdefault(place, what)
    told = [f"{place}, {what}" for place, what in found.items()]
    more = f"; and {len(told) - MOST} more" if len(told) > MOST else ""
    return "; ".join(told[:MOST]) + more


def _left_behind(value: Any, name: str, sizes_hw: set[tuple[int, int]]) -> str:
    """For a leaf that is data, beside an image whose pixels move."""
    if not isinstance(value, np.ndarray) and not is_tensor(value):
        return ""
    shape = tuple(value.shape)
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    if BOX_NAME.search(name) and len(shape) == 2 and shape[1] == 4:
        return _stays(kind_of(value), f"gpuload.Boxes({kind}, format='xyxy')")
    if POINT_NAME.search(name) and len(shape) > 1 and shape[-1] in (2, 3):
        return _stays(kind_of(value), f"gpuload.Keypoints({kind}{'' if shape[-1] == 2 else '[..., :2]'})")
    first, last = shape[-2:] in sizes_hw, shape[-3:-1] in sizes_hw
    if not first and not last:
        return ""
    mask = f"gpuload.Mask({kind}{'' if first else '[..., 0]'})"
    layout = ", layout='CHW'" if first and len(shape) > 2 else ""
    may_be_image = dtype_of(value) in PIXELS and not MASK_NAME.search(name)
    image = f"; if it is an image, gpuload.Image({kind}{layout})" if may_be_image else ""
    return _stays(f"{kind_of(value)} of the image's size", mask, "it is a mask") + image


def _stays(what: str, remedy: str, condition: str = "it belongs to the image") -> str:
    return f"{what}, stays as it is while the transforms move the image's pixels; if {condition}, return {remedy}"


def _are_boxes(node: Structure) -> bool:
    """Whether it is a list of lists of four leaves each."""
    rows = node[3]
    return bool(rows) and all(row != LEAF and row[0] in ("list", "tuple") and row[3] == (LEAF,) * 4 for row in rows)
