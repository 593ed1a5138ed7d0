"""The leaves of a batch from any loader: which are images, which are targets, and which pass through.

A batch is a tree of tuples, lists, dicts and dataclasses. Its images are tensors N×C×H×W, clips N×T×C×H×W, or lists of
N tensors C×H×W. Its targets are declared by type, `gpuload.Mask` or torchvision's `Mask` say, for the whole batch (N×…,
or a list of N) or in a list with one dict for each image. Leaves are told apart by types and shapes; values are not
looked at, for they may be on a device. Runs in the process of the caller; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from gpuload.datasets.recognise import tv_target
from gpuload.datasets.sample import Boxes, Encoded, Keypoints, Mask
from gpuload.datasets.tree import LEAF, Structure, describe, flatten, leaf_count, places_of, unflatten

__all__ = ["BatchTree", "Leaf", "Sample"]

Kind = Literal["images", "mask", "points", "value"]
KINDS: Final[dict[str, Kind]] = {
    "Mask": "mask", "Boxes": "points", "BoundingBoxes": "points", "Keypoints": "points", "KeyPoints": "points",
}  # fmt: skip
DTYPES: Final = "uint8, uint16, or floats of 0 … 1"


@dataclass(slots=True, eq=False)
class Leaf:
    """A leaf of a batch.

    Attributes:
        kind: what it is.
        value: as it came; a list of N is one leaf, if it holds images or targets.
        place: where it is, for errors.
        row: which image it belongs to, in a list with one dict for each image; None: to all.
    """

    kind: Kind
    value: Any
    place: str
    row: int | None = None

    def of(self, row: int, count: int) -> Any:
        """Return what of it belongs to one of `count` images: of a value that has no entry for each, all of it."""
        value = self.value
        if self.row is None:
            of_batch = value.array if isinstance(value, Mask | Boxes | Keypoints) else value
            if isinstance(of_batch, list | torch.Tensor | np.ndarray) and len(of_batch) == count:
                value = value[row] if of_batch is value else type(value)(of_batch[row])
        return value if self.kind != "points" else _points(value, self.place)


@dataclass(slots=True, eq=False)
class Sample:
    """One image's part of a batch: its tree, with a structure of its own; and of each leaf of it the number in the
    batch."""

    structure: Structure
    numbers: list[int]
    leaves: list[Any]

    @property
    def tree(self) -> Any:
        return unflatten(self.structure, self.leaves)


class BatchTree:
    """A batch, taken apart.

    Args:
        batch: the tree.

    Attributes:
        leaves: its leaves, depth first.
        count: the number of images, or clips, N.

    Raises:
        TypeError, ValueError: it holds no images, or images that are laid out otherwise, or it is unclear to which
            images a target belongs.
    """

    def __init__(self, batch: Any) -> None:
        values: list[Any] = []
        structure = flatten(batch, values)
        folded: list[Any] = []
        self._structure = _fold_lists(structure, iter(values), folded)
        places = [place.replace("sample", "batch", 1) for place in places_of(self._structure)]
        self.leaves = [Leaf(_kind_of(value, place), value, place) for value, place in zip(folded, places, strict=True)]
        if not (images := self.images):
            raise TypeError(_no_images(structure, values))
        self.count = len(images[0].value)
        self._of_rows: set[tuple[int, ...]] = set()  # paths of the lists that have a dict for each image
        self._find_rows(self._structure, (), 0)
        for leaf in self.leaves:
            self._check(leaf, images[0].place)

    @property
    def images(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == "images"]

    @property
    def has_targets(self) -> bool:
        return any(leaf.kind in ("mask", "points") for leaf in self.leaves)

    def sample(self, row: int) -> Sample:
        """Return one image's part of the batch."""
        numbers: list[int] = []
        structure = self._sample(self._structure, (), 0, row, numbers)
        return Sample(structure, numbers, [self.leaves[number].of(row, self.count) for number in numbers])

    def rebuilt(self, values: Sequence[Any]) -> Any:
        """Return a tree like the batch with other leaves."""
        return unflatten(self._structure, values)

    def _check(self, leaf: Leaf, first: str) -> None:
        """Refuse images, and targets of all images, that are not as many as the first images."""
        value = leaf.value.array if isinstance(leaf.value, Mask | Boxes | Keypoints) else leaf.value
        if leaf.kind == "value" or leaf.row is not None or isinstance(value, Encoded):
            return
        if len(value) != self.count:
            kind = "images" if leaf.kind == "images" else f"{type(leaf.value).__name__} of all images"
            raise ValueError(
                f"{leaf.place} has {len(value)} {kind}, but {first} has {self.count}; give one entry for each image, "
                "along the first axis or in a list"
            )
        if leaf.kind == "points" and not isinstance(leaf.value, list | Keypoints) and not _is_tv_points(leaf.value):
            raise TypeError(
                f"{leaf.place} holds boxes of {self.count} images at once; give a list with gpuload.Boxes for each"
            )

    def _find_rows(self, node: Structure, path: tuple[int, ...], at: int, row: int | None = None) -> None:
        """Find the lists that have a dict for each image, and note whose leaves are in them."""
        if node == LEAF:
            self.leaves[at].row = row
            return
        kind, cls, _, children = node
        inside = self.leaves[at : at + leaf_count(node)]
        of_rows = (
            row is None
            and kind in ("list", "tuple")
            and cls is None
            and len(children) == self.count
            and all(child != LEAF and child[0] in ("dict", "dataclass") for child in children)
            and not any(leaf.kind == "images" for leaf in inside)
        )
        if of_rows:
            self._of_rows.add(path)
        for number, child in enumerate(children):
            self._find_rows(child, (*path, number), at, number if of_rows else row)
            at += leaf_count(child)

    def _sample(self, node: Structure, path: tuple[int, ...], at: int, row: int, numbers: list[int]) -> Structure:
        """Return the part of a node that belongs to one image, and append the numbers of its leaves."""
        if node == LEAF:
            numbers.append(at)
            return LEAF
        kind, cls, keys, children = node
        parts = []
        for number, child in enumerate(children):
            if path not in self._of_rows or number == row:
                parts.append(self._sample(child, (*path, number), at, row, numbers))
            at += leaf_count(child)
        return parts[0] if path in self._of_rows else (kind, cls, keys, tuple(parts))


def _fold_lists(node: Structure, values: Iterator[Any], folded: list[Any]) -> Structure:
    """Return a structure in which each list of images, targets or small tensors is a leaf; `folded` takes all leaves."""
    if node == LEAF:
        folded.append(next(values))
        return LEAF
    kind, cls, keys, children = node
    if not (kind in ("list", "tuple") and cls is None and children and all(child == LEAF for child in children)):
        return kind, cls, keys, tuple([_fold_lists(child, values, folded) for child in children])
    entries = [next(values) for _ in children]
    images = all(_is_image_tensor(entry) and entry.dim() == 3 for entry in entries)
    labels = kind == "list" and all(
        isinstance(entry, torch.Tensor | np.ndarray) and entry.ndim < 4 for entry in entries
    )
    if images or labels or all(_is_target(entry) for entry in entries):
        folded.append(entries)
        return LEAF
    folded += entries
    return node


def _kind_of(value: Any, place: str) -> Kind:
    entry = value[0] if isinstance(value, list) else value
    if _is_target(entry):
        return KINDS[type(entry).__name__]
    if isinstance(value, list):
        if not all(_is_image_tensor(image) and image.dim() == 3 for image in value):
            return "value"
        for number, image in enumerate(value):
            _check_layout(image, f"{place}[{number}]")
        return "images"
    if isinstance(value, torch.Tensor) and value.dim() in (4, 5):
        if not _is_image_tensor(value):
            raise TypeError(
                f"{place} is {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}, but images are "
                f"{DTYPES}; convert it, or declare a mask as gpuload.Mask(tensor) or torchvision's Mask"
            )
        _check_layout(value, place)
        return "images"
    return "value"


def _check_layout(images: torch.Tensor, place: str) -> None:
    """Refuse …×H×W×C, by its looks, and images without pixels."""
    *_, channels, height, width = images.shape
    if channels > 4 >= width:
        axes = {3: "2, 0, 1", 4: "0, 3, 1, 2", 5: "0, 1, 4, 2, 3"}[images.dim()]
        raise ValueError(
            f"{place} has shape {tuple(images.shape)}, which by its looks has its channels last, but images are "
            f"{'N×' * (images.dim() > 3)}{'T×' * (images.dim() > 4)}C×H×W; write images.permute({axes}), which copies "
            "nothing"
        )
    if 0 in images.shape:
        raise ValueError(f"{place} has no pixels: its shape is {tuple(images.shape)}")


def _is_target(value: Any) -> bool:
    kind = type(value)
    return kind in (Mask, Boxes, Keypoints) or (
        kind.__name__ in KINDS and kind.__module__.startswith("torchvision.tv_tensors")
    )


def _is_tv_points(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value).__name__ == "KeyPoints"


def _is_image_tensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not _is_target(value)
        and (value.dtype in (torch.uint8, torch.uint16) or value.is_floating_point())
    )


def _points(value: Any, place: str) -> Boxes | Keypoints:
    """Return an image's boxes or keypoints, which are moved on the CPU."""
    if isinstance(value, Boxes | Keypoints):
        return value
    if not value.is_cpu:  # torchvision's
        raise ValueError(
            f"{place} is on {value.device}, but boxes and keypoints are moved on the CPU, so that nothing waits for "
            "the device; pass them as they come from the loader, and they come back on the images' device"
        )
    target = tv_target(type(value).__name__, value, False)
    return target if isinstance(target, Boxes) else Keypoints(value.numpy())  # one of many is a plain tensor


def _no_images(structure: Structure, values: Sequence[Any]) -> str:
    one = next((value for value in values if isinstance(value, torch.Tensor) and value.dim() == 3), None)
    if one is not None and len(values) == 1:
        return f"Augment takes batches, got one image of shape {tuple(one.shape)}; write augment(image[None])[0]"
    return (
        f"there are no images in {describe(structure, values)}: Augment takes tensors N×C×H×W, clips N×T×C×H×W, or "
        f"lists of N tensors C×H×W, of {DTYPES}; arrays become tensors by torch.from_numpy"
    )
