"""The leaves of a batch from any loader: which are images, which are targets, and which pass through.

A batch is a tree of tuples, lists, dicts and dataclasses. Its images are N×C×H×W tensors, N×T×C×H×W clips, or lists of
N C×H×W tensors. Its targets are declared by their type, such as `gpuload.Mask` or torchvision's `Mask`. They are one
N×… object, a list of N objects, or entries of a list with one dict per image. Leaves are classified by type and shape,
never by value, since values may be on a device. This module runs in the caller's process, and keeps no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from gpuload.datasets.recognise import MASK_NAME, with_draws
from gpuload.datasets.sample import Boxes, Encoded, Image, Keypoints, Mask, is_batch_form, with_values
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    describe,
    describe_leaf,
    flatten,
    innermost_names_of,
    key_paths_of,
    leaf_count,
    rebuild,
    unflatten,
)

__all__ = ["BatchTree", "Leaf"]

TARGETS: Final = {"Mask": "mask"} | dict.fromkeys(("Boxes", "BoundingBoxes", "Keypoints", "KeyPoints"), "points")
PER_IMAGE: Final = "per image"  # the structure kind of a list of dicts and of a tuple of values
IMAGE_DTYPES: Final = (torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES_TEXT: Final = "uint8, uint16, or floats from 0 to 1"
IMAGES_TEXT: Final = (
    f"Augment needs N×C×H×W tensors, N×T×C×H×W clips, or lists of N C×H×W tensors, of dtype {DTYPES_TEXT}"
)


@dataclass(slots=True, eq=False)
class Leaf:
    """A leaf of a batch.

    Attributes:
        kind: ``"images"``, ``"mask"``, ``"points"`` (boxes or keypoints) or ``"value"``.
        value: the unchanged value; a list is one leaf unless it contains batched tensors.
        path: the path to the leaf, for errors.
        per_image: whether the value collects one entry per image, from a field of a list of dicts or from a tuple.
        draws: the number of the images' or targets' draws, see `Encoded`; None means as the value says.
    """

    kind: str
    value: Any
    path: str
    per_image: bool = False
    draws: int | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether the images are floats with another number of channels than three."""
        image = self.value[0] if isinstance(self.value, list) else self.value
        return image.is_floating_point() and image.shape[-3] != 3

    @property
    def entries(self) -> list[tuple[str, Any]]:
        """Return the leaf's parts, each with its path: the entries of a list, or the array of a `Mask`."""
        if not isinstance(self.value, list):
            return [(self.path, getattr(self.value, "array", self.value))]
        arrays = [getattr(item, "array", item) for item in self.value]
        if self.kind == "mask":
            arrays = [array[:, 0] if getattr(array, "ndim", 0) == 4 else array for array in arrays]  # N×1×H×W
        return [(f"{self.path}[{n}]", array) for n, array in enumerate(arrays)]

    @property
    def is_padded(self) -> bool:
        """Whether these are boxes or keypoints that can only be transformed as those of an entire batch."""
        return isinstance(self.value, Boxes | Keypoints) and is_batch_form(self.value)

    def entry(self, row: int, count: int) -> Any:
        """Return one image's entry if the value has one entry for each of `count` images, otherwise the entire value.
        For a list of another length, return None: in a sample, the list would become several leaves, and shift the
        indices of all later leaves."""
        entries = getattr(self.value, "array", self.value)
        is_list = isinstance(entries, list)
        if (is_list or getattr(entries, "ndim", 0) > 0) and len(entries) == count:
            return entries[row]
        return None if is_list else self.value

    def sample_entry(self, row: int, count: int) -> Any:
        """Return the entry of one image as a dataset would return it. Pixels and padded targets, which may be on a
        device, become float32 placeholders: targets of the same shape, and pixels of the same height and width."""
        if self.is_padded:
            return with_values(self.value, array=np.zeros(tuple(self.value.array.shape[1:]), np.float32), valid=None)
        value = self.entry(row, count)
        if self.kind == "images":
            return Image(np.broadcast_to(np.float32(0), (*value.shape[-2:], 1)), "HWC")
        if self.kind == "mask":
            mask = getattr(value, "array", value)
            if isinstance(mask, Encoded):
                raise TypeError(
                    f"{self.path} is an encoded file, but Augment needs decoded masks; gpuload.Loader decodes files"
                )
            zero = np.zeros((), str(mask.dtype).removeprefix("torch."))
            return Mask(np.broadcast_to(zero, tuple(mask.shape)), getattr(value, "draws", None))
        if self.kind == "points" and not isinstance(value, Boxes | Keypoints):
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                raise ValueError(
                    f"{self.path} is on {value.device}, where boxes and keypoints have to be those of the entire "
                    "batch; pass gpuload.Boxes(N×M×4, valid=…) or gpuload.Keypoints(N×M×…×2, valid=…), or pass them as "
                    "the loader returned them, on the CPU, and the results will be on the device of the images"
                )
            if type(value).__name__ not in TARGETS:  # an entry of a `Keypoints` or of a TVTensor
                return Keypoints(value, pairs=getattr(self.value, "pairs", None))
        return value


class BatchTree:
    """A batch, split into leaves.

    Args:
        batch: the batch.
        images: the names of the leaves that are images, as dict keys, fields, or paths such as ``batch[0]``. None means
            all leaves that can be images.
        draws: the `draws` of images and targets, keyed by such names.

    Attributes:
        leaves: all leaves, depth first; images: the leaves that are images.
        count: the number N of images or clips.

    Raises:
        TypeError, ValueError: the batch has no images, or images in an unsupported layout, or the numbers of images and
            targets differ.
    """

    def __init__(self, batch: Any, images: Set[str] | None = None, draws: Mapping[str, int] | None = None) -> None:
        values: list[Any] = []
        folded_leaves: list[tuple[Any, bool]] = []
        structure = flatten(batch, values)
        self._structure = _fold_lists(structure, iter(values), folded_leaves)
        self._sample_structure = _sample_structure(self._structure)
        paths = [path.replace("sample", "batch", 1) for path in key_paths_of(self._sample_structure)]
        located = list(zip(paths, innermost_names_of(self._sample_structure), strict=True))
        draws = draws or {}
        for argument, names in (("images", images or ()), ("draws", draws)):
            _check_names(argument, names, located)
        self.leaves = []
        for (value, per_image), (path, name) in zip(folded_leaves, located, strict=True):
            if type(value).__name__ == "KeyPoints" and _is_target(value) and not value.is_cpu:
                value = Keypoints(value.as_subclass(torch.Tensor))
            is_selected = images is None or not images.isdisjoint((path, name))
            kind = _kind_of(value, path) if is_selected or _has_target(value) else "value"
            if images is not None and is_selected and kind == "value":
                raise TypeError(
                    f"Augment(images=…) selects {path}, {describe_leaf(value)}, but {IMAGES_TEXT}; leave it out"
                )
            number = draws.get(path, draws.get(name))
            if number is not None and kind == "value":
                raise TypeError(
                    f"Augment(draws=…) selects {path}, {describe_leaf(value)}, which is neither an image nor a mask, "
                    "boxes or keypoints; leave it out"
                )
            if number is None and kind != "value":
                number = getattr(value, "draws", None)
            self.leaves.append(Leaf(kind, value, path, per_image, number))
        self.images = [leaf for leaf in self.leaves if leaf.kind == "images"]
        if not self.images:
            raise TypeError(_describe_missing_images(structure, values))
        self.count = len(self.images[0].value)
        for leaf in self.leaves:
            self._check_count(leaf)

    @property
    def has_targets(self) -> bool:
        return any(leaf.kind in ("mask", "points") for leaf in self.leaves)

    @property
    def warning(self) -> str:
        """A warning for the user about the first leaf that is probably not an image, such as a heat map; "" if there is
        none. A leaf of floats with another number of channels than three is suspected beside other images."""
        suspects = [leaf for leaf in self.images if leaf.is_suspect]
        if not suspects or len(suspects) == len(self.images):
            return ""
        suspect, names = suspects[0], [leaf.path for leaf in self.images if not leaf.is_suspect]
        return (
            f"{suspect.path}, {describe_leaf(suspect.entries[0][1])}, is transformed and normalized as an image, like "
            f"{names[0]}; select the images by name, as in Augment(…, images=('image',)): all others stay unchanged, "
            "and masks can be declared as gpuload.Mask"
        )

    @property
    def padded(self) -> list[Any]:
        """The values of all leaves if boxes and keypoints are transformed on the device; otherwise empty. If some can
        only be transformed there, all are.

        Raises:
            ValueError: some boxes or keypoints are in a list with an entry for each image.
        """
        padded = next((leaf for leaf in self.leaves if leaf.is_padded), None)
        if padded is None:
            return []
        for leaf in self.leaves:
            if leaf.kind == "points" and not isinstance(leaf.value, Boxes | Keypoints):
                raise ValueError(
                    f"{padded.path} has the {type(padded.value).__name__.lower()} of all images together, but "
                    f"{leaf.path} is {describe_leaf(leaf.value)}; pass both with one entry per image in a list on the "
                    "CPU, or both as gpuload.Boxes(N×M×4, valid=…) or gpuload.Keypoints(N×M×…×2, valid=…)"
                )
        return [leaf.value for leaf in self.leaves]

    def sample(self, row: int) -> Any:
        """Return one image's part of the batch as a sample of a dataset, with the same number of leaves."""
        entries = [leaf.sample_entry(row, self.count) for leaf in self.leaves]
        pairs = zip(entries, self.leaves, strict=True)
        leaves = [entry if leaf.draws is None else with_draws(entry, leaf.draws) for entry, leaf in pairs]
        return unflatten(self._sample_structure, leaves)

    def rebuild(self, values: Sequence[object]) -> Any:
        """Return a tree with the batch's structure and these values as leaves."""
        return _rebuild(self._structure, iter(values))

    def _check_count(self, leaf: Leaf) -> None:
        if leaf.kind == "value":
            return
        type_name, first_images = type(leaf.value).__name__, self.images[0]
        if type_name in ("Boxes", "BoundingBoxes") and not leaf.is_padded:
            raise TypeError(
                f"{leaf.path} is the {type_name} of a single image; pass a list with one {type_name} per image, empty "
                "for images without boxes, or gpuload.Boxes of shape N×M×4"
            )
        entries = getattr(leaf.value, "array", leaf.value)
        if hasattr(entries, "__len__") and len(entries) != self.count:
            noun = "images" if leaf.kind == "images" else "entries"
            raise ValueError(
                f"{leaf.path} has {len(entries)} {noun}, but {first_images.path} has {self.count} images; pass one "
                "entry per image, along the first axis or in a list"
            )


def _fold_lists(node: Structure, values: Iterator[object], folded_leaves: list[tuple[Any, bool]]) -> Structure:
    """Return the structure in which each list of images, targets or other values is a single leaf, and each list of
    dicts is one dict of lists. Lists that contain batched values keep their structure. Append each leaf, and whether it
    is per image, to `folded_leaves`."""
    if node == LEAF:
        folded_leaves.append((next(values), False))
        return LEAF
    kind, cls, keys, children = node
    entries: list[Any] = []
    if kind in ("list", "tuple") and cls is None and children and all(child == children[0] for child in children):
        entries = [[next(values) for _ in range(leaf_count(child))] for child in children]
        if children[0] == LEAF:
            entries = [entry for [entry] in entries]
            if all(map(_is_image, entries)) or all(map(_is_target, entries)):
                folded_leaves.append((entries, False))
                return LEAF
            if not any(_is_target(entry) or getattr(entry, "ndim", 0) > 3 for entry in entries):
                folded_leaves.append((entries, kind == "tuple"))
                return LEAF if kind == "list" else (PER_IMAGE, None, kind, (LEAF,))
            folded_leaves += [(entry, False) for entry in entries]
            return node
        is_batched = any(isinstance(value, torch.Tensor) and value.ndim > 3 for entry in entries for value in entry)
        if children[0][0] in ("dict", "dataclass") and not is_batched:
            folded_leaves += [(list(column), True) for column in zip(*entries, strict=True)]
            return PER_IMAGE, None, kind, (children[0],)
        values = iter([value for entry in entries for value in entry])
    return kind, cls, keys, tuple([_fold_lists(child, values, folded_leaves) for child in children])


def _sample_structure(node: Structure) -> Structure:
    """Return the structure of one sample of a batch."""
    if node == LEAF:
        return LEAF
    kind, cls, keys, children = node
    return children[0] if kind == PER_IMAGE else (kind, cls, keys, tuple(map(_sample_structure, children)))


def _rebuild(node: Structure, values: Iterator[object]) -> Any:
    if node == LEAF:
        return next(values)
    kind, _, container, children = node  # a `PER_IMAGE` node has the kind of its container in place of keys
    if kind != PER_IMAGE:
        return rebuild(node, [_rebuild(child, values) for child in children])
    columns = [next(values) for _ in range(leaf_count(children[0]))]
    parts = [unflatten(children[0], leaves) for leaves in zip(*columns, strict=True)]
    return parts if container == "list" else tuple(parts)


def _check_names(argument: str, selected: Iterable[str], located: Sequence[tuple[str, str]]) -> None:
    names = [name or path for path, name in located]
    if unknown := sorted(set(selected).difference(*located)):
        raise ValueError(
            f"Augment({argument}=…) has {', '.join(map(repr, unknown))}, but the batch has only "
            f"{', '.join(map(repr, names))}"
        )


def _has_target(value: object) -> bool:
    return _is_target(value[0] if isinstance(value, list) and value else value)


def _kind_of(value: object, path: str) -> str:
    """Return the kind of a leaf.

    Raises:
        TypeError, ValueError: the value looks like images of an unsupported dtype or layout.
    """
    entries: list[Any] = value if isinstance(value, list) else [value]
    if _is_target(entries[0]):
        return TARGETS[type(entries[0]).__name__]
    if entries is value:
        if not all(map(_is_image, entries)):
            return "value"
    elif not isinstance(value, torch.Tensor) or value.dim() not in (4, 5):
        return "value"
    elif value.dtype not in IMAGE_DTYPES:
        raise TypeError(
            f"{path} is {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}, but images must be "
            f"{DTYPES_TEXT}; convert it, or declare a mask as gpuload.Mask(tensor) or torchvision's Mask"
        )
    for images in entries:
        *_, channels, _, width = images.shape
        if channels > 4 >= width:
            layout, axes = {3: ("", "2, 0, 1"), 4: ("N×", "0, 3, 1, 2"), 5: ("N×T×", "0, 1, 4, 2, 3")}[images.dim()]
            raise ValueError(
                f"{path} has shape {tuple(images.shape)}, which looks like channels last, but images must be "
                f"{layout}C×H×W; use images.permute({axes}), which does not copy"
            )
        if 0 in images.shape:
            noun = "images" if images.dim() > 3 and not len(images) else "pixels"
            raise ValueError(f"{path} has no {noun}: its shape is {tuple(images.shape)}")
    if MASK_NAME.search(path.rpartition("[")[2]):
        raise ValueError(
            f"{path} is named like a mask, but would be resampled and normalized like an image; declare it as "
            "gpuload.Mask(tensor), N×H×W, or rename it if it contains images"
        )
    return "images"


def _is_target(value: object) -> bool:
    kind = type(value)
    return kind.__name__ in TARGETS and kind.__module__.startswith(("gpuload.", "torchvision.tv_tensors"))


def _is_image(value: object) -> bool:
    has_image_shape = isinstance(value, torch.Tensor) and value.dim() == 3 and value.dtype in IMAGE_DTYPES
    return has_image_shape and not _is_target(value)


def _describe_missing_images(structure: Structure, values: Sequence[Any]) -> str:
    if len(values) == 1 and _is_image(values[0]):
        return f"Augment needs a batch, got one image of shape {tuple(values[0].shape)}; use augment(image[None])[0]"
    return f"there are no images in {describe(structure, values)}: {IMAGES_TEXT}; convert arrays with torch.from_numpy"
