"""Masks, boxes and keypoints of a batch, moved as their images are, and put together.

Runs in the main process, within the transfer's stream, after the draws were made. Boxes and keypoints are moved here by
numpy (a few numbers for each sample); masks by the stage's runner. What transforms leave out is left out of the leaves
that the worker found to belong to it (`gpuload.workers.belongings`).

How a batch holds them: a dict (or dataclass) that holds boxes or keypoints comes as a list, one for each image; boxes
and keypoints that stand elsewhere as a list of tensors; masks outside such a dict as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_convert

from gpuload.batches.collate import collate
from gpuload.batches.rows import Harvest
from gpuload.datasets.box_formats import from_xyxy, to_xyxy
from gpuload.datasets.sample import Boxes, Keypoints
from gpuload.datasets.tree import LEAF, Structure, describe, unflatten
from gpuload.errors import CollateError
from gpuload.ring.chunk import TensorBits
from gpuload.stage import RaggedImages
from gpuload.stage.masks import MaskStage
from gpuload.transforms import Chain, Program
from gpuload.transforms.program.targets import Trail, follow

__all__ = ["TargetStage", "collate_targets"]

GROUP = "boxes of an image"  # in the place of a container that comes as a list, one for each image
TOGETHER_BYTES = 1 << 16  # larger tensors go to the device one by one


class TargetStage:
    """Moves the targets of batches.

    Args:
        chain: the transforms.
        device: where masks are.
    """

    def __init__(self, chain: Chain, device: torch.device) -> None:
        self._views = chain.views
        self._masks = MaskStage(device)

    def __call__(
        self, rows: Harvest, drawn: Sequence[Program], masks_of: Callable[[int, np.ndarray], RaggedImages]
    ) -> tuple[list[dict[int, Any]], dict[int, Any]]:
        """Move what a batch has.

        Args:
            rows: the batch, without blocks.
            drawn: for each view the draws for the rows that have images, in their order.
            masks_of: gives the masks at a number among the rows' images and masks.

        Returns:
            For each row the leaves that are finished, by their place: masks, boxes, keypoints and what belongs to
            boxes that were left out, as tensors (arrays stay arrays); with a `MultiView` a list for each but the last.
            And masks of all rows as one tensor, by their place, where they are of one dtype and shape.
        """
        finished: list[dict[int, Any]] = [{} for _ in range(len(rows))]
        having = rows.images(0)
        whole = self._move_masks(rows, drawn, having, finished, masks_of)
        for leaf in self._move_points(rows, drawn, having.tolist(), finished):
            whole.pop(leaf, None)
        return finished, whole

    def _move_masks(
        self,
        rows: Harvest,
        drawn: Sequence[Program],
        having: np.ndarray,
        finished: list[dict[int, Any]],
        masks_of: Callable[[int, np.ndarray], RaggedImages],
    ) -> dict[int, Any]:
        whole = {}
        for number in range(max(map(len, rows.places))):
            which = rows.masks(number)
            if not len(which):
                continue
            masks = masks_of(number, which)
            belongings = [rows.belongings[row] for row in which.tolist()]
            kinds = [
                own.masks[number - rows.count(row)]
                for own, row in zip(belongings, which.tolist(), strict=True)
                if own is not None
            ]
            places = np.searchsorted(having, which)
            views = [self._masks(masks, program.take(places), kinds) for program in drawn]
            for row, results in zip(which.tolist(), zip(*(found for found, _ in views), strict=True), strict=True):
                finished[row][rows.places[row][number]] = self._viewed(results)
            place = rows.places[which[0]][number]
            tensors = [one for _, one in views if one is not None]
            everywhere = len(which) == len(rows) == sum(places[number] == place for places in rows.places)
            if everywhere and len(tensors) == len(views):
                whole[place] = self._viewed(tensors)
        return whole

    def _move_points(
        self, rows: Harvest, drawn: Sequence[Program], having: list[int], finished: list[dict[int, Any]]
    ) -> set[int]:
        """Boxes and keypoints; returns the leaves of which something was left out."""
        changed: set[int] = set()
        found = [_points(rows, row) for row in having]
        if not any(found):
            return changed
        moved: list[list[Trail]] = []
        for program in drawn:
            trails = [
                Trail(
                    [to_xyxy(leaf.array, leaf.format) for leaf in own.values() if isinstance(leaf, Boxes)],
                    [_wide(leaf.array) for leaf in own.values() if isinstance(leaf, Keypoints)],
                )
                for own in found
            ]
            follow(program, trails)
            moved.append(trails)
        for place, (row, own) in enumerate(zip(having, found, strict=True)):
            trails = [view[place] for view in moved]
            number = {Boxes: 0, Keypoints: 0}
            for leaf, value in own.items():
                at = number[type(value)]
                number[type(value)] += 1
                finished[row][leaf] = self._viewed([_result(value, trail, at) for trail in trails])
            if self._views is None:
                changed |= self._drop(rows, row, trails[0], own, finished[row])
        return changed

    def _drop(
        self, rows: Harvest, row: int, trail: Trail, own: Mapping[int, Any], finished: dict[int, Any]
    ) -> set[int]:
        """Leave out what belongs to boxes that were left out; returns which leaves."""
        belongings, left = rows.belongings[row], trail.left
        if left is None or belongings is None:
            return set()
        leaves = belongings.fields[0]  # of all transforms that leave out boxes the same
        values = dict(zip(others(rows, row), rows.values[row], strict=True))
        for leaf in leaves:
            if not isinstance(own.get(leaf), Boxes):
                value = finished[leaf] if leaf in finished else unwrapped(values[leaf])
                finished[leaf] = (
                    value[torch.from_numpy(left).to(value.device)] if isinstance(value, torch.Tensor) else value[left]
                )
        return set(leaves)

    def _viewed(self, results: Sequence[Any]) -> Any:
        return results[0] if self._views is None else list(results)


def others(rows: Harvest, row: int) -> list[int]:
    """The places of the leaves of a row that are no images and no masks, as its values stand."""
    away = set(rows.places[row])
    return [leaf for leaf in range(len(away) + len(rows.values[row])) if leaf not in away]


def unwrapped(value: Any) -> Any:
    """A value as the dataset gave it."""
    return value.tensor() if isinstance(value, TensorBits) else value


def _points(rows: Harvest, row: int) -> dict[int, Boxes | Keypoints]:
    """The leaves of a row that are boxes or keypoints."""
    return {
        leaf: value
        for leaf, value in zip(others(rows, row), rows.values[row], strict=True)
        if isinstance(value, Boxes | Keypoints)
    }


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float64)


def _result(value: Boxes | Keypoints, trail: Trail, number: int) -> torch.Tensor:
    if isinstance(value, Boxes):
        found = from_xyxy(trail.boxes[number], trail.format or value.format, value.array.dtype)
    else:
        found = trail.points[number].astype(value.array.dtype)
    return torch.from_numpy(np.ascontiguousarray(found))


# -- batches ----------------------------------------------------------------------------------------------------------


def collate_targets(
    rows: Harvest,
    images: Sequence[Any],
    finished: Sequence[Mapping[int, Any]],
    whole: Mapping[int, Any],
    *,
    views: int | None,
    ragged: str,
    place: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """Put a batch together whose samples have targets.

    Args:
        rows: the batch.
        images: for each image of a sample those of the batch, as the stage gave them.
        finished, whole: what `TargetStage` gave.
        views: how many a `MultiView` makes.
        ragged: what becomes of masks of different sizes: as of images.
        place: moves tensors to the device.

    Raises:
        CollateError: samples differ in their structure, or masks in their size.
    """
    structures, columns = [], []
    for row in range(len(rows)):
        values = dict(zip(others(rows, row), map(unwrapped, rows.values[row]), strict=True))
        for number in range(rows.count(row)):
            values[rows.places[row][number]] = _Image(number)
        values.update(finished[row])
        pictures = [_one(batch, views, row) for batch in images]
        outer: list[Any] = []
        structures.append(_take_apart(rows.structures[row], _Leaves(rows, row, values, pictures), outer))
        columns.append(outer)
    for row, structure in enumerate(structures):
        if structure != structures[0]:
            raise CollateError(
                f"{rows.name(0)} is {describe(_leaves_only(structures[0]))}, but {rows.name(row)} is "
                f"{describe(_leaves_only(structure))}: all samples of a batch must have the same structure, outside "
                "the dicts that hold boxes or keypoints; let the dataset return one form"
            )
    ready: dict[int, Any] = {}
    for number, column in enumerate(zip(*columns, strict=True)):
        first = column[0]
        if isinstance(first, _Image):
            if any(leaf != first for leaf in column):
                raise CollateError("the images of the samples of a batch must stand in the same places")
            ready[number] = images[first.number]
        elif isinstance(first, _Mask):
            found = whole.get(first.leaf) if ragged == "error" else None
            ready[number] = _masks(column, rows, views, ragged) if found is None else found
        elif isinstance(first, _Points):
            tensors = [leaf.value for leaf in column]
            ready[number] = tensors if views is None else [list(view) for view in zip(*tensors, strict=True)]
        elif isinstance(first, _Group):
            ready[number] = [leaf.value for leaf in column]
    ready = _placed(ready, place)
    for number, column in enumerate(zip(*columns, strict=True)):
        if isinstance(column[0], _Group):
            ready[number] = [unflatten(own.node, found) for own, found in zip(column, ready[number], strict=True)]
    rest = [[leaf for number, leaf in enumerate(outer) if number not in ready] for outer in columns]
    return collate(_leaves_only(structures[0]), ready, rest, place, rows.name)


class _Leaf:
    """A leaf of a sample that is treated by itself."""

    def __init__(self, value: Any = None, leaf: int = 0) -> None:
        self.value = value
        self.leaf = leaf


class _Mask(_Leaf): ...


class _Points(_Leaf): ...


class _Group(_Leaf):
    """A container that comes as a list, one for each image: its structure, and its leaves."""

    node: Structure = None


class _Image:
    """The image with a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Image) and other.number == self.number

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class _Leaves:
    """The leaves of a row, depth first, as they are asked for."""

    def __init__(self, rows: Harvest, row: int, values: Mapping[int, Any], pictures: Sequence[Any]) -> None:
        self._values = values
        self._pictures = pictures
        self.masks = set(rows.places[row][rows.count(row) :])
        self.points = set(_points(rows, row))
        self.at = 0

    def next(self) -> Any:
        """For the batch."""
        leaf, value = self.at, self._values[self.at]
        self.at += 1
        if leaf in self.masks:
            return _Mask(value, leaf)
        return _Points(value) if leaf in self.points else value

    def finished(self) -> Any:
        """For this image alone."""
        value = self._values[self.at]
        self.at += 1
        return self._pictures[value.number] if isinstance(value, _Image) else value

    def holds_points(self, node: Structure) -> bool:
        """Whether the container that comes next has boxes or keypoints right in it."""
        at = self.at
        for child in node[3]:
            if child == LEAF and at in self.points:
                return True
            at += _size(child)
        return False


def _take_apart(node: Structure, leaves: _Leaves, outer: list[Any]) -> Structure:
    """The structure of a sample in which each container that comes as a list is one leaf; the leaves to `outer`."""
    if node == LEAF:
        outer.append(leaves.next())
        return LEAF
    kind, cls, keys, children = node
    if kind in ("dict", "dataclass") and leaves.holds_points(node):
        group = _Group([default_convert(leaves.finished()) for _ in range(_size(node))])
        group.node = node
        outer.append(group)
        return GROUP
    return kind, cls, keys, tuple([_take_apart(child, leaves, outer) for child in children])


def _leaves_only(node: Structure) -> Structure:
    if node in (LEAF, GROUP):
        return LEAF
    kind, cls, keys, children = node
    return kind, cls, keys, tuple([_leaves_only(child) for child in children])


def _size(node: Structure) -> int:
    """How many leaves there are in a structure."""
    return 1 if node == LEAF else sum(map(_size, node[3]))


def _one(batch: Any, views: int | None, row: int) -> Any:
    """An image of a batch, as the stage gave it: N×C×H×W, a list, or (N×C×H×W, sizes)."""
    if views is not None:
        return [_one(view, None, row) for view in batch]
    if isinstance(batch, tuple):
        height, width = batch[1][row].tolist()
        return batch[0][row][:, :height, :width]
    return batch[row]


def _masks(column: Sequence[_Leaf], rows: Harvest, views: int | None, ragged: str) -> Any:
    """The masks of a batch, as its images are given."""
    masks = [leaf.value for leaf in column]
    if views is not None:
        return [_together(view, rows, ragged) for view in zip(*masks, strict=True)]
    return _together(masks, rows, ragged)


def _together(masks: Sequence[torch.Tensor], rows: Harvest, ragged: str) -> Any:
    if ragged == "list":
        return list(masks)
    shapes = [tuple(mask.shape) for mask in masks]
    other = next((row for row, mask in enumerate(masks) if mask.dtype != masks[0].dtype), None)
    if other is not None:
        raise CollateError(
            f"the mask of {rows.name(0)} is {masks[0].dtype}, that of {rows.name(other)} {masks[other].dtype}; return "
            "masks of one dtype"
        )
    if ragged == "pad" and len({shape[:-2] for shape in shapes}) == 1:
        height, width = (max(shape[axis] for shape in shapes) for axis in (-2, -1))
        batch = masks[0].new_zeros((len(masks), *shapes[0][:-2], height, width))
        for row, mask in zip(batch, masks, strict=True):
            row[..., : mask.shape[-2], : mask.shape[-1]] = mask
        return batch, torch.tensor([shape[-2:] for shape in shapes]).to(batch.device)
    other = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise CollateError(
            f"the masks of a batch have different shapes: that of {rows.name(0)} has {shapes[0]}, that of "
            f"{rows.name(other)} {shapes[other]}; end the transforms with a crop or a Resize((height, width)), use "
            "ragged='list', or, for masks of instances, put them into the dict that holds the boxes"
        )
    return torch.stack(list(masks))


def _placed(ready: dict[int, Any], place: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Any]:
    """All small tensors on the device, by one copy for each dtype: a batch has some hundred of them."""
    small: dict[torch.dtype, list[torch.Tensor]] = {}

    def note(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.nbytes <= TOGETHER_BYTES:
            small.setdefault(value.dtype, []).append(value)
        return value

    tree_map(note, ready)
    probe = next((tensors[0] for tensors in small.values()), None)
    if probe is not None and place(probe) is probe:  # they are where they shall be
        return ready
    there: dict[int, torch.Tensor] = {}
    for tensors in small.values():
        flat = place(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            there[id(tensor)] = part.view(tensor.shape)

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return there[id(value)] if id(value) in there else place(value)
        return value

    return tree_map(move, ready)
