"""Finds the images and targets in a sample. This module runs in workers without torch, so it recognises types by
attributes.

Only a leaf that is declared as an image is an image: `Encoded`, `Image`, a PIL image, torchvision's `Image` or `Video`.
A plain array is data. There is one exception: if the transforms need an image and the sample declares none, the only
array that can be an image is used: a uint8 H×W×C array or C×H×W tensor of one to four channels, a list of such frames,
or a clip with one more axis. If another leaf could also be the image, or if the array has the name of a mask, a
TypeError is raised instead.

*Unrecognized targets* are leaves that were probably meant to be targets: masks, boxes and keypoints in plain arrays,
which stay unchanged while the transforms move their image, and images that look like masks. Workers look for them in
their first few samples, and warn once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import numpy as np

from gpuload.datasets.sample import (
    LEAVES,
    META,
    PIXELS,
    Boxes,
    Encoded,
    Image,
    Keypoints,
    Mask,
    Target,
    explain_deep_pixels,
    is_batch_form,
)
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    describe_leaf,
    dtype_of,
    innermost_names_of,
    is_tensor,
    key_paths_of,
    leaf_count,
    walk_key_paths,
)
from gpuload.errors import DecodeError, list_some

__all__ = [
    "BOX_NAME",
    "MASK_NAME",
    "POINT_NAME",
    "SHARED_DRAWS",
    "find_leaves",
    "find_shared_draws",
    "find_unrecognized_targets",
    "is_image_array",
    "is_pillow_image",
    "unfold_clips",
    "with_draws",
]

MASK_NAME: Final = re.compile(r"mask|segm|semantic|trimap", re.IGNORECASE)
BOX_NAME: Final = re.compile(r"^(gt_?|true_?)?(b|bounding_?)?box(es)?(_xy\w+)?$", re.IGNORECASE)
POINT_NAME: Final = re.compile(r"keypoint|landmark|^kpts?$", re.IGNORECASE)
MAX_LISTED: Final = 3  # unrecognized targets, or images, that a warning names
SHARED_DRAWS: Final = "all images of a sample share their random parameters"  # the start of `find_shared_draws`
NEVER_IMAGES = frozenset({int, float, bool, str, bytes, type(None)})
UNDECLARED = NEVER_IMAGES | META | {np.ndarray}  # types that do not declare an image
Images = dict[int, Encoded | Image]
Targets = dict[int, Target]


def find_leaves(
    structure: Structure, leaves: Sequence[Any], *, plain: bool, keeps_pillow_images: bool = False
) -> tuple[Images, Targets]:
    """Return the images and the targets of a sample, each keyed by leaf index.

    Args:
        structure, leaves: the flattened sample.
        plain: whether there are no gpuload transforms. If so, only declared images count as images, and TVTensors that
            gpuload cannot transform stay unchanged.
        keeps_pillow_images: whether PIL images are values like any others, unless the sample has gpuload's targets,
            which need an image.

    Raises:
        DecodeError: a PIL image has more than 8 bits per channel.
        TypeError: the transforms need an image, but it is unclear which leaf is the image; the message names the leaf.
    """
    images: Images = {}
    targets: Targets = {}
    keeps_pillow_images = keeps_pillow_images and not any(isinstance(leaf, Target) for leaf in leaves)
    for index, leaf in enumerate(leaves):
        leaf_type = type(leaf)
        if leaf_type is Encoded or leaf_type is Image:
            images[index] = leaf
        elif leaf_type is Mask or leaf_type is Boxes or leaf_type is Keypoints:
            targets[index] = _drop_channel_axis(leaf)
        elif leaf_type not in UNDECLARED:
            module = leaf_type.__module__
            if is_pillow_image(leaf):
                if not keeps_pillow_images:
                    images[index] = _convert_pil_image(leaf, key_paths_of(structure)[index])
            elif module.startswith("torchvision.tv_tensors"):
                try:
                    if leaf_type.__name__ in ("Image", "Video"):
                        if not plain or is_image_array(leaf):
                            images[index] = Image(leaf.numpy(), layout="CHW")
                    elif (target := _convert_tv_target(leaf_type.__name__, leaf, plain)) is not None:
                        targets[index] = _drop_channel_axis(target)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{key_paths_of(structure)[index]}: {error}") from None
    if plain and not images:  # torchvision's targets have no image to move with
        targets = {index: target for index, target in targets.items() if type(target) is type(leaves[index])}
    elif not images:
        images = {**_find_undeclared_image(structure, leaves, targets)}
    return images, targets


def _drop_channel_axis(target: Target) -> Target:
    """Return the target, with a mask of N×1×H×W as N×H×W."""
    is_deep = isinstance(target, Mask) and getattr(target.array, "ndim", 0) == 4 and not is_batch_form(target)
    return Mask(target.array[:, 0], target.draws) if is_deep else target


def with_draws(leaf: Any, draws: int) -> Any:
    """Return an image or a target of gpuload or torchvision as gpuload's, with these `draws`."""
    target: Any = leaf if isinstance(leaf, LEAVES) else _convert_tv_target(type(leaf).__name__, leaf, False)
    return replace(target, draws=draws)


def is_pillow_image(leaf: object) -> bool:
    """Return whether a leaf is a PIL image."""
    return type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "getbands")


def is_image_array(leaf: Any, *, axes: int = 3) -> bool:
    """Return whether a leaf is a uint8 H×W×C array or C×H×W tensor of one to four channels; with 4 `axes`, whether it
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
    """Turn each frame of a sample's clip arrays into a separate image leaf. With `counts`, also reduce each clip, an
    array or a list of images, to evenly spaced frames, as torch's ``linspace`` spaces them. `counts` are the numbers of
    frames of consecutive reductions.

    Raises:
        TypeError: there are `counts`, but no clip.
    """
    clips = {index: image.array for index, image in images.items() if type(image) is Image and image.array.ndim == 4}
    if not clips and not counts:
        return structure, leaves, images, targets
    single_images, has_clip = images.keys() - clips.keys(), bool(clips)
    unfolded: list[Any] = []
    unfolded_images: Images = {}
    unfolded_targets: Targets = {}

    def add(index: int) -> None:
        if index in images:
            unfolded_images[len(unfolded)] = images[index]
        elif index in targets:
            unfolded_targets[len(unfolded)] = targets[index]
        unfolded.append(leaves[index])

    def walk(node: Structure, index: int) -> Structure:
        nonlocal has_clip
        if node == LEAF:
            if index not in clips:
                add(index)
                return LEAF
            chosen = _evenly_spaced_frames(counts, len(clips[index]))
            frames = [Image(clips[index][frame], "HWC", images[index].draws) for frame in chosen]
            unfolded_images.update(enumerate(frames, len(unfolded)))
            unfolded.extend(frames)
            return ("clip", None, None, (LEAF,) * len(frames))
        kind, cls, keys, children = node
        indices = range(index, index + len(children))
        if counts and kind == "list" and set(children) == {LEAF} and single_images >= set(indices):
            has_clip = True
            chosen = _evenly_spaced_frames(counts, len(indices))
            for frame in chosen:
                add(indices[frame])
            return (kind, cls, keys, (LEAF,) * len(chosen))
        parts = []
        for child in children:
            parts.append(walk(child, index))
            index += leaf_count(child)
        return (kind, cls, keys, tuple(parts))

    structure = walk(structure, 0)
    if not has_clip:
        raise TypeError(
            "UniformTemporalSubsample takes a video clip, gpuload.Image(array) of T×H×W×C, an array of that shape or "
            "a list of images, but this sample has none; remove the transform, or return a clip"
        )
    return structure, unfolded, unfolded_images, unfolded_targets


def _evenly_spaced_frames(counts: Sequence[int], length: int) -> list[int]:
    """Return the indices of the frames to keep in a clip of this length. The arithmetic is the same as in
    ``torch.linspace`` with its fused multiply-add: in single precision, from both ends, rounded once."""
    frames = np.arange(length)
    for count in counts:
        last, steps = np.float32(len(frames) - 1), np.arange(count)
        step = last / np.float32(count - 1) if count > 1 else np.float32(0)
        from_start, from_end = np.float64(step) * steps, np.float64(last) - np.float64(step) * (count - 1 - steps)
        positions = np.where((steps < count // 2) | (count == 1), from_start, from_end).astype(np.float32)
        frames = frames[positions.astype(np.int64)]
    return frames.tolist()


def _find_undeclared_image(structure: Structure, leaves: Sequence[Any], targets: Targets) -> dict[int, Image]:
    """Return the array that must be the image, or all frames of the list that must be the clip, keyed by leaf index.
    The result is empty if there is no candidate.

    Raises:
        TypeError: there are several candidates, or the only one has the name of a mask.
    """
    possible_indices = [
        index for index, leaf in enumerate(leaves) if index not in targets and type(leaf) not in NEVER_IMAGES
    ]
    candidates = [n for n in possible_indices if is_image_array(leaves[n]) or is_image_array(leaves[n], axes=4)]
    if not candidates:
        return {}
    key_paths, names = key_paths_of(structure), innermost_names_of(structure)
    unmasked = [n for n in candidates if not MASK_NAME.search(names[n])]
    if not unmasked:
        _refuse(key_paths[candidates[0]], leaves[candidates[0]], "has the name of a mask")
    index = unmasked[0]
    lists = (frames for frames in _find_leaf_lists(structure) if index in frames)
    frames = next(
        (indices for indices in lists if all(is_image_array(leaves[n]) for n in indices)), range(index, index + 1)
    )
    for rival in possible_indices:
        is_unmasked = rival not in frames and not MASK_NAME.search(names[rival])
        if is_unmasked and (rival in unmasked or _fits_image(leaves[rival], leaves[index])):
            reason = f"may be the image, and so may {key_paths[rival]}, {describe_leaf(leaves[rival])}"
            _refuse(key_paths[index], leaves[index], reason)
    images = {frame: leaves[frame] for frame in frames}
    return {frame: Image(leaf.numpy(), "CHW") if is_tensor(leaf) else Image(leaf) for frame, leaf in images.items()}


def _fits_image(leaf: Any, image: Any) -> bool:
    """Return whether a leaf is a float or uint16 array with an image's height and width and one to four channels."""
    if not isinstance(leaf, np.ndarray) and not is_tensor(leaf):
        return False
    shape, size_hw = tuple(leaf.shape), tuple(image.shape[-2:] if is_tensor(image) else image.shape[-3:-1])
    if len(shape) not in (3, 4) or not dtype_of(leaf).startswith(("float", "bfloat", "uint16")):
        return False
    return (shape[-2:] == size_hw and shape[-3] <= 4) or (shape[-3:-1] == size_hw and shape[-1] <= 4)


def _refuse(key_path: str, leaf: object, reason: str) -> NoReturn:
    raise TypeError(
        f"{key_path}, {describe_leaf(leaf)}, {reason}: gpuload does not guess which leaf to transform; return "
        "gpuload.Image(array), or gpuload.Image(tensor, layout='CHW'), for the image, and gpuload.Mask(…) for a mask"
    )


def _find_leaf_lists(node: Structure, first: int = 0) -> Iterator[range]:
    """Yield, for each list that contains only leaves, the range of their indices. `first` is the index of the node's
    first leaf."""
    if node == LEAF:
        return
    kind, _, _, children = node
    if kind == "list" and set(children) == {LEAF}:
        yield range(first, first + len(children))
    for child in children:
        yield from _find_leaf_lists(child, first)
        first += leaf_count(child)


def _convert_pil_image(image: Any, key_path: str) -> Image:
    if image.mode not in ("L", "RGB", "RGBA"):
        name = "this PIL image" if key_path == "sample" else f"the PIL image {key_path}"
        if (explanation := explain_deep_pixels(name, image.mode)) is not None:
            raise DecodeError(explanation)
        image = image.convert("RGB")
    return Image(np.asarray(image))


def _convert_tv_target(name: str, leaf: Any, plain: bool) -> Target | None:
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


def find_shared_draws(structure: Structure, images: Mapping[int, Any]) -> str:
    """Return a warning if a sample has images of different files that do not say whether they share their random
    parameters; "" if not. A list of images counts as one. `images` are keyed by leaf index."""
    frames = {index for clip in _find_leaf_lists(structure) if images.keys() >= set(clip) for index in clip[1:]}
    names = {
        image.source: f"{key_paths_of(structure)[index]} ({image.source})"
        for index, image in images.items()
        if isinstance(image, Encoded) and image.source and image.draws is None and index not in frames
    }
    if len(names) < 2:
        return ""
    return (
        f"{SHARED_DRAWS}, so these get the same crop and flip: {list_some([*names.values()], MAX_LISTED)}. If they "
        "should differ, as an anchor and its positive, pass another draws= to each, as in gpuload.read(path, draws=1); "
        "if not, pass draws=0 to all"
    )


def find_unrecognized_targets(
    structure: Structure,
    leaves: Sequence[Any],
    pictures: Mapping[int, Any],
    targets: Collection[int],
    *,
    moves_pixels: bool,
) -> str:
    """Return a warning about a sample's unrecognized targets; "" if there are none.

    Args:
        structure, leaves: the flattened sample.
        pictures: the sample's images as `gpuload.workers.sample.Picture` objects, keyed by leaf index.
        targets: the indices of the leaves that are targets.
        moves_pixels: whether the transforms move pixels.
    """
    sizes_hw = {index: (picture.height, picture.width) for index, picture in pictures.items()}
    files = {}  # format and Pillow mode of each image that is decoded to RGB, keyed by leaf index
    for index, picture in pictures.items():
        if hasattr(image := leaves[index], "getbands"):
            files[index] = getattr(image, "format", None), image.mode
        elif isinstance(picture.leaf, Encoded) and picture.leaf.mode == "RGB":
            files[index] = picture.header.format, picture.header.mode
    grey_leaves = {
        index for index, (kind, mode) in files.items() if mode in ("1", "P") or (mode == "L" and kind != "JPEG")
    }
    coloured_sizes_hw = {size for index, size in sizes_hw.items() if index not in grey_leaves}
    leaf_indices, has_coco_box = itertools.count(), False
    warnings_by_path: dict[str, str] = {}
    for node, key_path, name in walk_key_paths(structure):
        warning = ""
        if node != LEAF:
            if moves_pixels and _are_boxes(node) and BOX_NAME.search(name):
                warning = _unchanged_warning("a list", _boxes_advice("boxes", name))
            elif moves_pixels and key_path.endswith('["bbox"]') and node[3] == (LEAF,) * 4 and not has_coco_box:
                has_coco_box = True  # the other objects' boxes need no warning each
                warning = _unchanged_warning(
                    "a list", "all boxes of the image as one gpuload.Boxes([o['bbox'] for o in objects], format='xywh')"
                )
        elif (index := next(leaf_indices)) in files:
            has_mask_name = MASK_NAME.search(name) and len(sizes_hw) > 1
            if has_mask_name or (index in grey_leaves and sizes_hw[index] in coloured_sizes_hw):
                warning = (
                    f"with Pillow mode {files[index][1]!r}, is treated as a photograph, and its values as colours; if "
                    "it is a mask, return gpuload.Mask(picture)"
                )
        elif moves_pixels and index not in sizes_hw and index not in targets:
            warning = _array_warning(leaves[index], name, set(sizes_hw.values()))
        if warning:
            warnings_by_path.setdefault(key_path, f"{key_path}, {warning}")
    return list_some([*warnings_by_path.values()], MAX_LISTED, "; ", "; and ")


def _array_warning(value: Any, name: str, sizes_hw: set[tuple[int, int]]) -> str:
    """Return a warning if a plain array seems to belong to an image whose pixels move, else ""."""
    if not isinstance(value, np.ndarray) and not is_tensor(value):
        return ""
    shape = tuple(value.shape)
    noun = "array" if isinstance(value, np.ndarray) else "tensor"
    if BOX_NAME.search(name) and len(shape) == 2 and shape[1] == 4:
        return _unchanged_warning(describe_leaf(value), _boxes_advice(noun, name))
    if POINT_NAME.search(name) and len(shape) > 1 and shape[-1] in (2, 3):
        return _unchanged_warning(
            describe_leaf(value), f"gpuload.Keypoints({noun}{'' if shape[-1] == 2 else '[..., :2]'})"
        )
    fits_chw, fits_hwc = shape[-2:] in sizes_hw, shape[-3:-1] in sizes_hw
    if not fits_chw and not fits_hwc:
        return ""
    mask = f"gpuload.Mask({noun}{'' if fits_chw else '[..., 0]'})"
    layout = ", layout='CHW'" if fits_chw and len(shape) > 2 else ""
    may_be_image = dtype_of(value) in PIXELS and not MASK_NAME.search(name)
    image = f"; if it is an image, gpuload.Image({noun}{layout})" if may_be_image else ""
    return _unchanged_warning(f"{describe_leaf(value)} of the image's size", mask, "it is a mask") + image


def _boxes_advice(boxes: str, name: str) -> str:
    return f"gpuload.Boxes({boxes}, format='xyxy')" + ", with 'xywh' if they are COCO's" * (name == "bbox")


def _unchanged_warning(leaf: str, remedy: str, condition: str = "it belongs to the image") -> str:
    return f"{leaf}, stays unchanged while the transforms move the image's pixels; if {condition}, return {remedy}"


def _are_boxes(node: Structure) -> bool:
    """Return whether a container is a list of lists or tuples with four leaves each."""
    rows = node[3]
    return bool(rows) and all(row != LEAF and row[0] in ("list", "tuple") and row[3] == (LEAF,) * 4 for row in rows)
