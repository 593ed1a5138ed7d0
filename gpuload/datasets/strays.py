"""Leaves that look as if they belonged to the image of their sample, but stay as they are while it is changed: masks,
boxes, keypoints and more images that are plain arrays. And images that look like masks.

Nothing is certain here, so it only finds words for one warning; what is done with a leaf is up to `recognise` alone.
Workers look at their first few samples. No torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.tree import LEAF, Structure, dtype_of, is_tensor

__all__ = ["find_strays"]

MASK_NAME: Final = re.compile(r"mask|segm|semantic|trimap", re.IGNORECASE)
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
    changes: bool,
    moves: bool,
) -> str:
    """What to tell the user; empty if there is nothing.

    Args:
        structure, leaves: the sample, taken apart.
        sizes_hw: of its images, by leaf.
        files: format and Pillow's mode of those images that are files to be decoded to RGB, by leaf.
        targets: the leaves that are targets.
        changes: whether anything is applied to images.
        moves: whether that moves pixels.
    """
    files = dict(files)
    for leaf in sizes_hw:
        if hasattr(leaves[leaf], "getbands"):
            files[leaf] = getattr(leaves[leaf], "format", None) or "", leaves[leaf].mode
    grey = {leaf for leaf, (kind, mode) in files.items() if mode in ("1", "P") or (mode == "L" and kind != "JPEG")}
    coloured = {size for leaf, size in sizes_hw.items() if leaf not in grey}
    places = list(_nodes(structure, "sample", ""))
    image = [place for node, place, _ in places if node == LEAF][min(sizes_hw)]
    numbers = itertools.count()
    found: dict[str, str] = {}
    for node, place, name in places:
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
        elif changes and leaf not in sizes_hw and leaf not in targets:
            what = _left_behind(leaves[leaf], name, image, set(sizes_hw.values()), moves)
        if what:
            found.setdefault(place, what)
    told = [f"{place}, {what}" for place, what in found.items()]
    more = f"; and {len(told) - MOST} more" if len(told) > MOST else ""
    return "; ".join(told[:MOST]) + more


def _left_behind(value: Any, name: str, image: str, sizes_hw: set[tuple[int, int]], moves: bool) -> str:
    """For a leaf that is data."""
    if not isinstance(value, np.ndarray) and not is_tensor(value):
        return ""
    shape = tuple(value.shape)
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    what = f"{dtype_of(value)} {kind} {'×'.join(map(str, shape))}"
    if moves and BOX_NAME.search(name) and len(shape) == 2 and shape[1] == 4:
        return _stays(what, f"gpuload.Boxes({kind}, format='xyxy')")
    if moves and POINT_NAME.search(name) and len(shape) > 1 and shape[-1] in (2, 3):
        return _stays(what, f"gpuload.Keypoints({kind}{'' if shape[-1] == 2 else '[..., :2]'})")
    channels = shape[-1 if kind == "array" else -3] if len(shape) > 2 else 1
    deep = moves and dtype_of(value) in ("uint16", "float32") and len(shape) == 3 and channels <= 4
    if (
        channels > 1
        and not MASK_NAME.search(name)
        and (
            is_image_array(value)
            or is_image_array(value, axes=4)
            or (deep and (shape[:2] if kind == "array" else shape[1:]) in sizes_hw)
        )
    ):
        layout = "" if kind == "array" else ", layout='CHW'"
        return (
            f"{what}, stays as it is beside {image}, which is the image; if it is an image too, return "
            f"gpuload.Image({kind}{layout}) for each, and gpuload.Mask({kind}) for a mask"
        )
    if moves and (shape[-2:] in sizes_hw or shape[:2] in sizes_hw):
        plane = "" if shape[-2:] in sizes_hw else "[..., 0]"
        return _stays(f"{what} of the image's size", f"gpuload.Mask({kind}{plane})", "it is a mask")
    return ""


def _stays(what: str, remedy: str, condition: str = "it belongs to the image") -> str:
    return f"{what}, stays as it is while the transforms move the image's pixels; if {condition}, return {remedy}"


def _are_boxes(node: Structure) -> bool:
    """Whether it is a list of lists of four leaves each."""
    rows = node[3]
    return bool(rows) and all(row != LEAF and row[0] in ("list", "tuple") and row[3] == (LEAF,) * 4 for row in rows)


def _nodes(node: Structure, place: str, name: str) -> Iterator[tuple[Structure, str, str]]:
    """Every container and leaf, depth first, with where it is in the sample, and the innermost name there. The frames
    of a clip are in one place."""
    yield node, place, name
    if node != LEAF:
        for child, inner, own in _children(node, place, name):
            yield from _nodes(child, inner, own)


def _children(node: Structure, place: str, name: str) -> Iterator[tuple[Structure, str, str]]:
    """The parts of a container, each with its place and its name."""
    kind, cls, keys, children = node
    fields = getattr(cls, "_fields", None)
    for number, child in enumerate(children):
        if kind == "clip":
            yield child, place, name
        elif kind == "dict":
            key = keys[number]
            yield child, f"{place}[{key!r}]", key if isinstance(key, str) else name
        elif kind == "dataclass" or fields:
            own = (keys or fields or ())[number]
            yield child, f"{place}.{own}", own
        else:
            yield child, f"{place}[{number}]", name
