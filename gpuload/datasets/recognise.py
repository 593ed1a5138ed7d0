"""Finds the images and targets in a sample. Runs in workers without torch, so types are recognised by attributes.

Only a leaf that is declared as an image is an image: `Encoded`, `Image`, a PIL image, torchvision's `Image` or `Video`.
A plain array is data. There is one exception: if the transforms need an image and the sample declares none, the only
array that can be an image is used. This can be a uint8 array H×W×C or tensor C×H×W of one to four channels, a list of
such frames, or a clip with one more axis. If another leaf could also be the image, or if the array has the name of a
mask, a TypeError is raised instead.

*Strays* are leaves that were probably meant to be targets: masks, boxes and keypoints in plain arrays, which stay
unchanged while the transforms move their image, and images that look like masks. Workers look for strays in their first
few samples, and warn once.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from gpuload.datasets.sample import META, PIXELS, Boxes, Encoded, Image, Keypoints, Mask, Target, explain_deep_pixels
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    describe_leaf,
    dtype_of,
    is_tensor,
    key_paths_of,
    leaf_count,
    unfold,
    walk_key_paths,
)
from gpuload.errors import DecodeError

__all__ = ["MASK_NAME", "fewer_frames", "find_leaves", "find_unrecognized_targets", "is_image_array", "unfold_clips"]

MASK_NAME: Final = re.compile(r"mask|segm|semantic|trimap", re.IGNORECASE)
BOX_NAME: Final = re.compile(r"^(gt_?|true_?)?(b|bounding_?)?box(es)?(_xy\w+)?$", re.IGNORECASE)
POINT_NAME: Final = re.compile(r"keypoint|landmark|^kpts?$", re.IGNORECASE)
MAX_NAMED: Final = 3  # strays that a warning names
NEVER_IMAGES = frozenset({int, float, bool, str, bytes, type(None)})
UNDECLARED = NEVER_IMAGES | META | {np.ndarray}  # types that do not declare an image
Images = dict[int, Encoded | Image]
Targets = dict[int, Target]


def find_leaves(structure: Structure, leaves: Sequence[Any], *, plain: bool) -> tuple[Images, Targets]:
    """Return the images and the targets of a sample, each keyed by leaf number.

    Args:
        structure, leaves: the flattened sample.
        plain: whether there are no gpuload transforms. If so, only declared images count as images, and TVTensors that
            gpuload cannot transform stay unchanged.

    Raises:
        DecodeError: a PIL image has more than 8 bits per channel.
        TypeError: the transforms need an image, but it is unclear which leaf is the image; the message names the leaf.
    """
    images: Images = {}
    targets: Targets = {}
    for number, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind is Encoded or kind is Image:
            images[number] = leaf
        elif kind is Mask or kind is Boxes or kind is Keypoints:
            targets[number] = leaf
        elif kind not in UNDECLARED:
            module = kind.__module__
            if module.startswith("PIL.") and hasattr(leaf, "getbands"):
                images[number] = _from_pil(leaf, key_paths_of(structure)[number])
            elif module.startswith("torchvision.tv_tensors"):
                try:
                    if kind.__name__ in ("Image", "Video"):
                        if not plain or is_image_array(leaf):
                            images[number] = Image(leaf.numpy(), layout="CHW")
                    elif (target := _tv_target(kind.__name__, leaf, plain)) is not None:
                        targets[number] = target
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{key_paths_of(structure)[number]}: {error}") from None
    if plain and not images:  # torchvision's targets have no image to move with
        targets = {number: target for number, target in targets.items() if target is leaves[number]}
    elif not images:
        images = {**_find_array(structure, leaves, targets)}
    return images, targets


def is_image_array(leaf: Any, *, axes: int = 3) -> bool:
    """Return whether a leaf is a uint8 array H×W×C or tensor C×H×W of one to four channels; with 4 `axes`, whether it
    is a clip of such frames."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype == np.uint8 and leaf.ndim == axes and leaf.size > 0 and 1 <= leaf.shape[-1] <= 4
    return (
        is_tensor(leaf)
        and leaf.dim() == axes
        and leaf.numel() > 0
        and 1 <= leaf.shape[-3] <= 4
        and dtype_of(leaf) == "uint8"
    )


def unfold_clips(
    structure: Structure, leaves: list[Any], images: Images, targets: Targets, counts: Sequence[int] = ()
) -> tuple[Structure, list[Any], Images, Targets]:
    """Turn each frame of a sample's clips into a separate image leaf. With `counts`, keep only the frames that
    `fewer_frames` chooses."""
    clips = {leaf: image.array for leaf, image in images.items() if type(image) is Image and image.array.ndim == 4}
    if not clips:
        return structure, leaves, images, targets
    chosen_frames = {leaf: _spaced_evenly(counts, len(clip)) for leaf, clip in clips.items()}
    unfolded: list[Any] = []
    unfolded_images: Images = {}
    unfolded_targets: Targets = {}
    for number, leaf in enumerate(leaves):
        if number in clips:
            frames = [Image(clips[number][frame], "HWC") for frame in chosen_frames[number]]
            unfolded_images |= enumerate(frames, len(unfolded))
            unfolded += frames
            continue
        if number in images:
            unfolded_images[len(unfolded)] = images[number]
        elif number in targets:
            unfolded_targets[len(unfolded)] = targets[number]
        unfolded.append(leaf)
    return (
        unfold(structure, {leaf: len(frames) for leaf, frames in chosen_frames.items()}),
        unfolded,
        unfolded_images,
        unfolded_targets,
    )


def fewer_frames(
    counts: Sequence[int], structure: Structure, leaves: list[Any], images: Images, targets: Targets
) -> tuple[Structure, list[Any], Images, Targets]:
    """Reduce each clip of a sample to this many frames, spaced evenly as by torch's ``linspace``. Several counts are
    applied one after the other. A clip is either a list of images, or comes from `unfold_clips`, which has already
    chosen its frames.

    Raises:
        TypeError: there is no clip.
    """
    remaining: list[int] = []  # the numbers of the leaves to keep, in order
    clips: list[range] = []

    def walk(node: Structure, at: int) -> Structure:
        if node == LEAF:
            remaining.append(at)
            return LEAF
        kind, cls, keys, children = node
        frames = range(at, at + len(children))
        if kind in ("list", "clip") and children and set(children) == {LEAF} and images.keys() >= set(frames):
            clips.append(frames)
            chosen = [*frames] if kind == "clip" else [frames[number] for number in _spaced_evenly(counts, len(frames))]
            remaining.extend(chosen)
            return (kind, cls, keys, (LEAF,) * len(chosen))
        parts = []
        for child in children:
            parts.append(walk(child, at))
            at += leaf_count(child)
        return (kind, cls, keys, tuple(parts))

    structure = walk(structure, 0)
    if not clips:
        raise TypeError(
            "UniformTemporalSubsample takes a video clip, gpuload.Image(array) of T×H×W×C, an array of that shape or "
            "a list of images, but this sample has none; remove the transform, or return a clip"
        )
    remaining_images = {number: images[leaf] for number, leaf in enumerate(remaining) if leaf in images}
    remaining_targets = {number: targets[leaf] for number, leaf in enumerate(remaining) if leaf in targets}
    return structure, [leaves[leaf] for leaf in remaining], remaining_images, remaining_targets


def _spaced_evenly(counts: Sequence[int], length: int) -> list[int]:
    """Return the numbers of the frames to keep in a clip of this length. The arithmetic is the same as in
    ``torch.linspace`` with its fused multiply-add: in single precision, from both ends, rounded once."""
    frames = np.arange(length)
    for count in counts:
        last, steps = np.float32(len(frames) - 1), np.arange(count)
        step = last / np.float32(count - 1) if count > 1 else np.float32(0)
        from_start, from_end = np.float64(step) * steps, np.float64(last) - np.float64(step) * (count - 1 - steps)
        positions = np.where((steps < count // 2) | (count == 1), from_start, from_end).astype(np.float32)
        frames = frames[positions.astype(np.int64)]
    return frames.tolist()


def _find_array(structure: Structure, leaves: Sequence[Any], targets: Targets) -> dict[int, Image]:
    """Return the array that must be the image, or all frames of the list that must be the clip, keyed by leaf number.
    The result is empty if there is no candidate.

    Raises:
        TypeError: there are several candidates, or the only one has the name of a mask.
    """
    possible_images = [
        number for number, leaf in enumerate(leaves) if number not in targets and type(leaf) not in NEVER_IMAGES
    ]
    candidates = [n for n in possible_images if is_image_array(leaves[n]) or is_image_array(leaves[n], axes=4)]
    if not candidates:
        return {}
    places, names = key_paths_of(structure), _names_of(structure)
    unmasked = [n for n in candidates if not MASK_NAME.search(names[n])]
    if not unmasked:
        _refuse(places[candidates[0]], leaves[candidates[0]], "has the name of a mask")
    number = unmasked[0]
    lists = (frames for frames in _lists_of_leaves(structure) if number in frames)
    frames = next(
        (numbers for numbers in lists if all(is_image_array(leaves[n]) for n in numbers)), range(number, number + 1)
    )
    for rival in possible_images:
        is_unmasked = rival not in frames and not MASK_NAME.search(names[rival])
        if is_unmasked and (rival in unmasked or _fits_image(leaves[rival], leaves[number])):
            reason = f"may be the image, and so may {places[rival]}, {describe_leaf(leaves[rival])}"
            _refuse(places[number], leaves[number], reason)
    images = {frame: leaves[frame] for frame in frames}
    return {frame: Image(leaf.numpy(), "CHW") if is_tensor(leaf) else Image(leaf) for frame, leaf in images.items()}


def _fits_image(leaf: Any, image: Any) -> bool:
    """Return whether a leaf of floats or uint16 has an image's height and width and one to four channels."""
    if not isinstance(leaf, np.ndarray) and not is_tensor(leaf):
        return False
    shape, size_hw = tuple(leaf.shape), tuple(image.shape[-2:] if is_tensor(image) else image.shape[-3:-1])
    if len(shape) not in (3, 4) or not dtype_of(leaf).startswith(("float", "bfloat", "uint16")):
        return False
    return (shape[-2:] == size_hw and shape[-3] <= 4) or (shape[-3:-1] == size_hw and shape[-1] <= 4)


def _refuse(place: str, leaf: Any, reason: str) -> NoReturn:
    raise TypeError(
        f"{place}, {describe_leaf(leaf)}, {reason}: gpuload does not guess which leaf to transform; return "
        "gpuload.Image(array), or gpuload.Image(tensor, layout='CHW'), for the image, and gpuload.Mask(…) for a mask"
    )


@functools.lru_cache(64)
def _names_of(structure: Structure) -> list[str]:
    """Return the innermost name in each leaf's place."""
    return [name for node, _, name in walk_key_paths(structure) if node == LEAF]


def _lists_of_leaves(node: Structure, first: int = 0) -> Iterator[range]:
    """Yield, for each list that contains leaves only, the range of their numbers. `first` is the number of the node's
    first leaf."""
    if node == LEAF:
        return
    kind, _, _, children = node
    if kind == "list" and set(children) == {LEAF}:
        yield range(first, first + len(children))
    for child in children:
        yield from _lists_of_leaves(child, first)
        first += leaf_count(child)


def _from_pil(image: Any, place: str) -> Image:
    if image.mode not in ("L", "RGB", "RGBA"):
        name = "this PIL image" if place == "sample" else f"the PIL image {place}"
        if (complaint := explain_deep_pixels(name, image.mode)) is not None:
            raise DecodeError(complaint)
        image = image.convert("RGB")
    return Image(np.asarray(image))


def _tv_target(name: str, leaf: Any, plain: bool) -> Target | None:
    """Convert a torchvision target to a gpuload target. If `plain`, return None for boxes that gpuload cannot
    transform, instead of raising an error."""
    if name == "Mask":
        return Mask(leaf.numpy())
    if name == "BoundingBoxes":
        if plain and (leaf.shape[-1] != 4 or getattr(leaf, "clamping_mode", "soft") is None):
            return None
        if getattr(leaf, "clamping_mode", "soft") is None:
            raise ValueError(
                "the sample has BoundingBoxes with clamping_mode=None, but gpuload clips boxes to the image, as "
                "torchvision does by default; remove clamping_mode"
            )
        return Boxes(leaf.numpy(), leaf.format, leaf.canvas_size)
    return Keypoints(leaf.numpy()) if name == "KeyPoints" else None


def find_unrecognized_targets(
    structure: Structure, leaves: Sequence[Any], pictures: Mapping[int, Any], targets: Collection[int], *, moves: bool
) -> str:
    """Return a warning about a sample's strays; "" if there are none.

    Args:
        structure, leaves: the flattened sample.
        pictures: the sample's images as `gpuload.workers.sample.Picture` objects, keyed by leaf number.
        targets: the leaves that are targets.
        moves: whether the transforms move pixels.
    """
    sizes_hw = {leaf: (picture.height, picture.width) for leaf, picture in pictures.items()}
    files = {}  # the formats and Pillow modes of images that are decoded to RGB
    for leaf, picture in pictures.items():
        if hasattr(image := leaves[leaf], "getbands"):
            files[leaf] = getattr(image, "format", None), image.mode
        elif isinstance(picture.leaf, Encoded) and picture.leaf.mode == "RGB":
            files[leaf] = picture.header.format, picture.header.mode
    grey = {leaf for leaf, (kind, mode) in files.items() if mode in ("1", "P") or (mode == "L" and kind != "JPEG")}
    coloured = {size for leaf, size in sizes_hw.items() if leaf not in grey}
    numbers = itertools.count()
    remarks: dict[str, str] = {}
    for node, place, name in walk_key_paths(structure):
        remark = ""
        if node != LEAF:
            if moves and _are_boxes(node) and BOX_NAME.search(name):
                remark = _unchanged_remark("a list", "gpuload.Boxes(boxes, format='xyxy')")
        elif (leaf := next(numbers)) in files:
            has_mask_name = MASK_NAME.search(name) and len(sizes_hw) > 1
            if has_mask_name or (leaf in grey and sizes_hw[leaf] in coloured):
                remark = (
                    f"of Pillow's mode {files[leaf][1]!r}, is treated as a photograph, and its values as colours; if "
                    "it is a mask, return gpuload.Mask(picture)"
                )
        elif moves and leaf not in sizes_hw and leaf not in targets:
            remark = _stray_remark(leaves[leaf], name, set(sizes_hw.values()))
        if remark:
            remarks.setdefault(place, f"{place}, {remark}")
    suffix = f"; and {len(remarks) - MAX_NAMED} more" if len(remarks) > MAX_NAMED else ""
    return "; ".join([*remarks.values()][:MAX_NAMED]) + suffix


def _stray_remark(value: Any, name: str, sizes_hw: set[tuple[int, int]]) -> str:
    """Return a remark if a plain array seems to belong to an image whose pixels move, else ""."""
    if not isinstance(value, np.ndarray) and not is_tensor(value):
        return ""
    shape = tuple(value.shape)
    kind = "array" if isinstance(value, np.ndarray) else "tensor"
    if BOX_NAME.search(name) and len(shape) == 2 and shape[1] == 4:
        return _unchanged_remark(describe_leaf(value), f"gpuload.Boxes({kind}, format='xyxy')")
    if POINT_NAME.search(name) and len(shape) > 1 and shape[-1] in (2, 3):
        return _unchanged_remark(
            describe_leaf(value), f"gpuload.Keypoints({kind}{'' if shape[-1] == 2 else '[..., :2]'})"
        )
    fits_chw, fits_hwc = shape[-2:] in sizes_hw, shape[-3:-1] in sizes_hw
    if not fits_chw and not fits_hwc:
        return ""
    mask = f"gpuload.Mask({kind}{'' if fits_chw else '[..., 0]'})"
    layout = ", layout='CHW'" if fits_chw and len(shape) > 2 else ""
    may_be_image = dtype_of(value) in PIXELS and not MASK_NAME.search(name)
    image = f"; if it is an image, gpuload.Image({kind}{layout})" if may_be_image else ""
    return _unchanged_remark(f"{describe_leaf(value)} of the image's size", mask, "it is a mask") + image


def _unchanged_remark(leaf: str, remedy: str, condition: str = "it belongs to the image") -> str:
    return f"{leaf}, stays unchanged while the transforms move the image's pixels; if {condition}, return {remedy}"


def _are_boxes(node: Structure) -> bool:
    """Return whether a container is a list of lists with four leaves each."""
    rows = node[3]
    return bool(rows) and all(row != LEAF and row[0] in ("list", "tuple") and row[3] == (LEAF,) * 4 for row in rows)
