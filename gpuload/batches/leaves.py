"""The leaves of a batch from any loader: which are images, which are targets, and which pass through.

A batch is a tree of tuples, lists, dicts and dataclasses. Its images are tensors N×C×H×W, clips N×T×C×H×W, or lists of
N tensors C×H×W. Its targets are declared by type, `gpuload.Mask` or torchvision's `Mask` say: for the whole batch, as
N×… or a list of N, or in a list with one dict for each image. Leaves are told apart by types and shapes; values are not
looked at, for they may be on a device. Runs in the caller's process; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from gpuload.datasets.sample import Boxes, Encoded, Image, Keypoints, Mask
from gpuload.datasets.tree import LEAF, Structure, describe, flatten, leaf_count, places_of, unflatten

__all__ = ["BatchTree", "Leaf"]

TARGETS: Final = {"Mask": "mask"} | dict.fromkeys(("Boxes", "BoundingBoxes", "Keypoints", "KeyPoints"), "points")
OF_IMAGES: Final = "per image"  # the kind of a list that has a dict for each image, in a structure
DTYPES: Final = "uint8, uint16, or floats of 0 … 1"


@dataclass(slots=True, eq=False)
class Leaf:
    """A leaf of a batch.

    Attributes:
        kind: ``"images"``, ``"mask"``, ``"points"`` (boxes or keypoints) or ``"value"``.
        value: as it came; lists of images, of targets and of small tensors are one leaf.
        place: where it is, for errors.
        row: the image that it belongs to, in a list with one dict for each image; None: all.
    """

    kind: str
    value: Any
    place: str
    row: int | None = None

    @property
    def entries(self) -> list[tuple[str, Any]]:
        """What it consists of, each with its place: the entries of a list, the array of a `Mask`."""
        if not isinstance(self.value, list):
            return [(self.place, getattr(self.value, "array", self.value))]
        return [(f"{self.place}[{n}]", getattr(one, "array", one)) for n, one in enumerate(self.value)]

    def of(self, row: int, count: int) -> Any:
        """Return what belongs to one of `count` images: of a value that has no entry for each, all of it."""
        entries = getattr(self.value, "array", self.value)
        if self.row is None and isinstance(entries, list | torch.Tensor | np.ndarray) and len(entries) == count:
            return entries[row]
        return self.value

    def declared(self, row: int, count: int) -> Any:
        """Return the same as a sample of a dataset has it: of pixels, which may be on a device, the shape alone."""
        value = self.of(row, count)
        if self.kind == "images":
            return Image(np.broadcast_to(np.uint8(0), (*value.shape[-2:], 1)), "HWC")
        if self.kind == "mask":
            mask = getattr(value, "array", value)
            if isinstance(mask, Encoded):
                raise TypeError(
                    f"{self.place} holds a file, but Augment takes decoded masks; gpuload.Loader decodes files"
                )
            zero = np.zeros((), str(mask.dtype).removeprefix("torch."))
            return Mask(np.broadcast_to(zero, tuple(mask.shape)))
        if self.kind == "points" and not isinstance(value, Boxes | Keypoints):
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                raise ValueError(
                    f"{self.place} is on {value.device}, but boxes and keypoints are moved on the CPU, so that nothing "
                    "waits for the device; pass them as they come from the loader, and they come back where the images "
                    "are"
                )
            return value if type(value).__name__ in TARGETS else Keypoints(value)  # one of many is no TVTensor
        return value


class BatchTree:
    """A batch, taken apart.

    Attributes:
        leaves: its leaves, depth first; images: those of them that are images.
        count: the number of images, or clips, N.

    Raises:
        TypeError, ValueError: it holds no images, or images that are laid out otherwise, or images or targets that are
            not N.
    """

    def __init__(self, batch: Any) -> None:
        values: list[Any] = []
        folded: list[Any] = []
        structure = flatten(batch, values)
        self._structure = _fold_lists(structure, iter(values), folded)
        places = [place.replace("sample", "batch", 1) for place in places_of(self._structure)]
        self.leaves = [Leaf(_kind_of(value, place), value, place) for value, place in zip(folded, places, strict=True)]
        self.images = [leaf for leaf in self.leaves if leaf.kind == "images"]
        if not self.images:
            raise TypeError(_no_images(structure, values))
        self.count = len(self.images[0].value)
        self._marked = self._mark(self._structure, 0)
        for leaf in self.leaves:
            self._check_count(leaf)

    @property
    def has_targets(self) -> bool:
        return any(leaf.kind in ("mask", "points") for leaf in self.leaves)

    def sample(self, row: int) -> tuple[Any, list[int]]:
        """Return one image's part of the batch as a sample of a dataset, and of each of its leaves the number in the
        batch."""
        numbers: list[int] = []
        structure = _part_of(self._marked, 0, row, numbers)
        values = [self.leaves[number].declared(row, self.count) for number in numbers]
        sizes = [len(tree_leaves(value)) if isinstance(value, list) else 1 for value in values]
        return unflatten(structure, values), np.repeat(numbers, sizes).tolist()

    def rebuilt(self, values: Sequence[Any]) -> Any:
        """Return a tree like the batch with other leaves."""
        return unflatten(self._structure, values)

    def _check_count(self, leaf: Leaf) -> None:
        if leaf.kind == "value" or leaf.row is not None:
            return
        kind, first = type(leaf.value).__name__, self.images[0]
        if kind in ("Boxes", "BoundingBoxes"):
            raise TypeError(f"{leaf.place} holds the boxes of one image, {kind}; give a list with one for each image")
        entries = getattr(leaf.value, "array", leaf.value)
        if hasattr(entries, "__len__") and len(entries) != self.count:
            what = "images" if leaf.kind == "images" else "targets, of all images"
            raise ValueError(
                f"{leaf.place} has {len(entries)} {what}, but {first.place} has {self.count} images; give one entry "
                "for each image, along the first axis or in a list"
            )

    def _mark(self, node: Structure, at: int, row: int | None = None) -> Structure:
        """Return the structure with the lists marked that have a dict for each image, and note whose leaves are in
        them."""
        if node == LEAF:
            self.leaves[at].row = row
            return LEAF
        kind, cls, keys, children = node
        per_image = (
            row is None
            and kind in ("list", "tuple")
            and len(children) == self.count
            and all(child != LEAF and child[0] in ("dict", "dataclass") for child in children)
            and not any(leaf.kind == "images" for leaf in self.leaves[at : at + leaf_count(node)])
        )
        parts = []
        for number, child in enumerate(children):
            parts.append(self._mark(child, at, number if per_image else row))
            at += leaf_count(child)
        return OF_IMAGES if per_image else kind, cls, keys, tuple(parts)


def _part_of(node: Structure, at: int, row: int, numbers: list[int]) -> Structure:
    """Return the part of a marked structure that belongs to one image; `numbers` takes those of its leaves."""
    if node == LEAF:
        numbers.append(at)
        return LEAF
    kind, cls, keys, children = node
    parts = []
    for number, child in enumerate(children):
        if kind != OF_IMAGES or number == row:
            parts.append(_part_of(child, at, row, numbers))
        at += leaf_count(child)
    return parts[0] if kind == OF_IMAGES else (kind, cls, keys, tuple(parts))


def _fold_lists(node: Structure, values: Iterator[Any], folded: list[Any]) -> Structure:
    """Return a structure in which lists of images, of targets and of small tensors are leaves; `folded` takes them."""
    if node == LEAF:
        folded.append(next(values))
        return LEAF
    kind, cls, keys, children = node
    if kind not in ("list", "tuple") or cls is not None or not children or any(child != LEAF for child in children):
        return kind, cls, keys, tuple([_fold_lists(child, values, folded) for child in children])
    entries = [next(values) for _ in children]
    small = kind == "list" and all(isinstance(one, torch.Tensor | np.ndarray) and one.ndim < 4 for one in entries)
    if small or all(map(_is_image, entries)) or all(map(_is_target, entries)):
        folded.append(entries)
        return LEAF
    folded += entries
    return node


def _kind_of(value: Any, place: str) -> str:
    """Return what a leaf is.

    Raises:
        TypeError, ValueError: it looks like images of another dtype or layout.
    """
    entries: list[Any] = value if isinstance(value, list) else [value]
    if _is_target(entries[0]):
        return TARGETS[type(entries[0]).__name__]
    if not isinstance(entries[0], torch.Tensor) or entries[0].dim() not in ((3,) if entries is value else (4, 5)):
        return "value"
    if not all(map(_has_pixels, entries)):
        if entries is value:
            return "value"
        assert isinstance(value, torch.Tensor)
        raise TypeError(
            f"{place} is {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}, but images are "
            f"{DTYPES}; convert it, or declare a mask as gpuload.Mask(tensor) or torchvision's Mask"
        )
    for images in entries:
        *_, channels, _, width = images.shape
        if channels > 4 >= width:
            layout, axes = {3: ("", "2, 0, 1"), 4: ("N×", "0, 3, 1, 2"), 5: ("N×T×", "0, 1, 4, 2, 3")}[images.dim()]
            raise ValueError(
                f"{place} has shape {tuple(images.shape)}, which by its looks has its channels last, but images are "
                f"{layout}C×H×W; write images.permute({axes}), which copies nothing"
            )
        if 0 in images.shape:
            raise ValueError(f"{place} has no pixels: its shape is {tuple(images.shape)}")
    return "images"


def _is_target(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ in TARGETS and kind.__module__.startswith(("gpuload.", "torchvision.tv_tensors"))


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and _has_pixels(value) and not _is_target(value)


def _has_pixels(value: torch.Tensor) -> bool:
    return value.dtype in (torch.uint8, torch.uint16) or value.is_floating_point()


def _no_images(structure: Structure, values: Sequence[Any]) -> str:
    if len(values) == 1 and _is_image(values[0]):
        return f"Augment takes batches, got one image of shape {tuple(values[0].shape)}; write augment(image[None])[0]"
    return (
        f"there are no images in {describe(structure, values)}: Augment takes tensors N×C×H×W, clips N×T×C×H×W, or "
        f"lists of N tensors C×H×W, of {DTYPES}; arrays become tensors by torch.from_numpy"
    )
