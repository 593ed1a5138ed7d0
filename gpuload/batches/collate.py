"""Collation: building a batch from its finished columns. A column of images becomes one tensor, and other columns are
collated as by `default_collate`.

This module runs in the main process, after the stage. Nesting follows torch's `default_collate`: tuples become lists,
named tuples and mappings keep their type. A dict (or dataclass) that holds boxes or keypoints becomes a list with one
dict for each image, so its contents may differ between samples; boxes and keypoints elsewhere become a list of tensors;
masks outside such dicts become one tensor. The frames of a clip are stacked to N×T×C×H×W.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate, default_convert

from gpuload.batches.mixing import Pairing
from gpuload.batches.pad import remedy_for
from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.sample import META, plain_meta
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    assemble,
    describe,
    difference,
    key_paths_of,
    leaf_count,
    names_of,
    unflatten,
)
from gpuload.errors import CollateError, error_class_names
from gpuload.order.options import check_flag
from gpuload.ring.columns import Columns, TensorBits, entry
from gpuload.stage.device import upload
from gpuload.stage.stage import check_ragged, padded_hw
from gpuload.transforms import Chain, Program

__all__ = [
    "BatchOptions", "FinishedColumns", "Outline", "collate", "convert_arrays", "keep_meta", "move_merged", "outline_of",
    "samples_of", "stack_masks", "unwrap",
]  # fmt: skip

MAX_MERGED_BYTES = 1 << 16  # larger tensors are copied to the device one by one
ToDevice = Callable[[torch.Tensor], torch.Tensor]
# The kind of a leaf, and an index: "image" and its index among the sample's images; "clip" and the index of its first
# frame; or "mask", "points" or "group" and 0.
LeafKind = tuple[str, int]
GROUP: LeafKind = ("group", 0)  # a container that becomes a list with one entry per image
POINTS: LeafKind = ("points", 0)
Ragged = Literal["error", "list", "pad"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of a `Loader` that define how samples become batches.

    Args:
        collate_fn, ragged, pad_to, pin_memory: as for `Loader`.
        chain, seed, single, planned, repeats: values from other groups: the transforms, the seed of their random
            parameters, whether samples are yielded one by one, whether gpuload itself decides which sample is at which
            position, and how many consecutive positions have the same sample.

    Raises:
        TypeError, ValueError: an argument is invalid, or two arguments cannot be combined.
    """

    collate_fn: Callable[[Any], Any] | None
    ragged: Ragged
    pad_to: int | None
    pin_memory: bool
    chain: Chain
    seed: int
    single: bool
    planned: bool
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(
                f"collate_fn must be callable or None, got {type(self.collate_fn).__name__}: {self.collate_fn!r}"
            )
        if self.rebuilds_samples and (self.ragged != "error" or self.pad_to is not None):
            argument = f"ragged={self.ragged!r}" if self.ragged != "error" else f"pad_to={self.pad_to!r}"
            raise ValueError(
                f"{argument} cannot be combined with {'batch_size=None' if self.single else 'a collate_fn'}, "
                f"which gets each image in its own size; leave out {argument} (gpuload.pad_collate pads)"
            )
        object.__setattr__(self, "pad_to", check_ragged(self.ragged, self.pad_to))
        object.__setattr__(self, "pin_memory", check_flag("pin_memory", self.pin_memory))

    @property
    def rebuilds_samples(self) -> bool:
        """Whether samples are rebuilt one by one, for a collate_fn or batch_size=None."""
        return self.collate_fn is not None or self.single


@dataclass(slots=True)
class FinishedColumns:
    """The finished columns of a batch.

    Attributes:
        views: the number of views of a `MultiView`; None without a `MultiView`.
        cells: for each row, the leaves that were finished one by one, keyed by leaf index.
        numbers: int64 (N,), which define the samples that are combined: those whose numbers differ only in the last bit
            (for pairs) or the last two bits (for groups of four).
        full_columns: leaves that were finished for all rows together: blocks, and masks of one shape as one tensor.
        planned_columns: columns of integers that a worker stored with its plan, on the device of the images.
        images: the results of the stage, for each of `Columns.images` and each view.
        programs: the random parameters, for each of `Columns.images` and each view; empty if a worker planned the
            batch.
        pairing: how the samples were mixed; None if they were not.
    """

    views: int | None
    cells: list[dict[int, Any]]
    numbers: np.ndarray
    full_columns: dict[int, Any] = field(default_factory=dict)
    planned_columns: dict[int, torch.Tensor] = field(default_factory=dict)
    images: list[list[Any]] = field(default_factory=list)
    programs: Sequence[Sequence[Program]] = ()
    pairing: Pairing | None = None

    @property
    def first_programs(self) -> Sequence[Program]:
        """Return the programs for the first column of images, one per view."""
        return self.programs[0] if self.programs else ()

    @property
    def results(self) -> list[Any]:
        """Return all results that may be on the device."""
        return [self.images, self.cells, self.full_columns, self.planned_columns]

    def combine_views(self, results: Sequence[Any]) -> Any:
        """Return the batch's entry for one result per view: a list, or the only result without a `MultiView`."""
        return results[0] if self.views is None else list(results)


@dataclass(slots=True)
class Group:
    """A container that becomes a list, or a clip: its structure, and the index of its first leaf."""

    node: Structure
    first_leaf: int

    @property
    def leaf_indices(self) -> range:
        """Return the indices of the group's leaves."""
        return range(self.first_leaf, self.first_leaf + leaf_count(self.node))


@dataclass(slots=True)
class Outline:
    """The structure of a batch, and where its leaves are in the samples.

    Attributes:
        structure: the batch's structure, in which a group or clip is one leaf.
        marks: the kind of each leaf of this structure; None means a value.
        leaves: for each leaf of this structure and each row, the leaf index in the sample, or the group or clip.
    """

    structure: Structure
    marks: list[LeafKind | None]
    leaves: list[list[Any]]


def outline_of(columns: Columns) -> Outline:
    """Return the outline of a batch.

    Raises:
        CollateError: samples differ in their structure, or in the paths of their images; the message names two of
            them.
    """
    marks = _find_marks(columns)
    structures = columns.structures
    outlines = [_outline_sample(structures[0], marks[0])]
    for row in range(1, max(len(marks), len(structures))):
        row_marks, structure = entry(marks, row), entry(structures, row)
        is_same = row_marks == marks[0] and structure == structures[0]
        outline = outlines[0] if is_same else _outline_sample(structure, row_marks)
        if (outline.structure, outline.marks) != (outlines[0].structure, outlines[0].marks):
            scope_note = ", outside the dicts that hold boxes or keypoints" if columns.points else ""
            raise CollateError(
                f"{columns.name(0)} is {_describe_sample(outlines[0], structures[0])}, but {columns.name(row)} is "
                f"{_describe_sample(outline, structure)}"
                f"{difference(outlines[0].structure, outline.structure)}: all samples of a batch must have the same "
                "structure, with images at the same paths"
                f"{scope_note}; make the dataset return every sample with the same structure"
            )
        outlines.append(outline)
    leaves = [list(itertools.chain(*column)) for column in zip(*(outline.leaves for outline in outlines), strict=True)]
    if len(outlines) == 1:
        leaves = [column * len(columns) for column in leaves]
    return Outline(outlines[0].structure, outlines[0].marks, leaves)


def _find_marks(columns: Columns) -> list[dict[int, LeafKind]]:
    """Return the marks of the leaves of each sample, keyed by leaf index; a single entry in the usual case that all
    rows are the same."""
    images = [("image", index, column) for index, column in enumerate(columns.images)]
    images += [("mask", 0, column) for column in columns.masks]
    points = columns.points
    common_marks = {column.leaf: (kind, index) for kind, index, column in images} | dict.fromkeys(points, POINTS)
    if None not in common_marks and all(column.rows is None for column in points.values()):
        return [common_marks]  # pyright: ignore[reportReturnType]
    marks: list[dict[int, LeafKind]] = [{} for _ in range(len(columns))]
    for kind, index, column in images:
        for row, leaf in column.rows_and_leaves():
            marks[row][leaf] = (kind, index)
    for leaf, column in points.items():
        for row in column.row_indices.tolist():
            marks[row][leaf] = POINTS
    return marks


def _outline_sample(structure: Structure, marks: dict[int, LeafKind]) -> Outline:
    """Return the outline of one sample."""
    leaves: list[int | Group] = []
    folded_structure, _ = _fold(structure, 0, marks, leaves)
    folded_marks = [_mark_of_group(entry, marks) if isinstance(entry, Group) else marks.get(entry) for entry in leaves]
    return Outline(folded_structure, folded_marks, [[entry] for entry in leaves])


def _mark_of_group(group: Group, marks: dict[int, LeafKind]) -> LeafKind:
    return ("clip", marks[group.first_leaf][1]) if group.node[0] == "clip" else GROUP


def _fold(node: Structure, start: int, marks: dict[int, LeafKind], leaves: list[int | Group]) -> tuple[Structure, int]:
    """Fold each group within a node of a sample into one leaf. The node's leaves begin at index `start`. Append the new
    structure's leaves to `leaves`; return the new structure, and the index of the leaf after the node."""
    if node == LEAF:
        leaves.append(start)
        return LEAF, start + 1
    kind, cls, keys, children = node
    starts = list(itertools.accumulate(map(leaf_count, children), initial=start))
    indexed_children = zip(children, starts, strict=False)
    if kind == "clip" or (
        kind in ("dict", "dataclass")
        and any(child == LEAF and marks.get(leaf) == POINTS for child, leaf in indexed_children)
    ):
        leaves.append(Group(node, start))
        return LEAF, starts[-1]
    folded_children = [_fold(child, leaf, marks, leaves)[0] for child, leaf in zip(children, starts, strict=False)]
    return (kind, cls, keys, tuple(folded_children)), starts[-1]


def collate(
    columns: Columns,
    outline: Outline,
    outputs: FinishedColumns,
    *,
    ragged: str,
    pad_to: int | None,
    to_device: ToDevice,
) -> Any:
    """Build the batch.

    Args:
        columns, outline, outputs: the batch as columns, its outline, and its finished columns.
        ragged, pad_to: how masks of different sizes are collated, as for images.
        to_device: moves a tensor to the device.

    Raises:
        CollateError: masks differ in size, or the values of a leaf cannot be collated; the message names two samples.
    """
    collated: dict[int, Any] = {}
    on_device: dict[int, torch.Tensor] = {}
    for number, (leaves, mark) in enumerate(zip(outline.leaves, outline.marks, strict=True)):
        kind, image_index = mark or ("", 0)
        if mark is None and leaves[0] in outputs.planned_columns:  # the leaf has the same index in all rows
            on_device[number] = outputs.planned_columns[leaves[0]]
            continue
        if kind == "group":
            collated[number] = [
                [
                    convert_arrays(_cell(columns, outputs, row, leaf), partial(columns.name, row))
                    for leaf in group.leaf_indices
                ]
                for row, group in enumerate(leaves)
            ]
            continue
        if kind == "clip":
            collated[number] = _stack_clips(columns, outputs, leaves, image_index)
            continue
        full_column = outputs.full_columns.get(leaves[0]) if leaves.count(leaves[0]) == len(leaves) else None
        if kind == "image":
            collated[number] = outputs.combine_views(outputs.images[image_index])
        elif kind == "mask" and (full_column is None or ragged != "error"):
            names = [partial(columns.name, row, leaf) for row, leaf in enumerate(leaves)]
            masks = _views_of_leaf(columns, outputs, leaves)
            collated[number] = outputs.combine_views([stack_masks(view, names, ragged, pad_to) for view in masks])
        elif full_column is not None:
            collated[number] = full_column
        elif kind == "points":
            collated[number] = outputs.combine_views(_views_of_leaf(columns, outputs, leaves))
    collated = move_merged(collated, to_device) | on_device
    for number, mark in enumerate(outline.marks):
        if mark == GROUP:
            groups = zip(outline.leaves[number], collated[number], strict=True)
            collated[number] = [unflatten(group.node, entries) for group, entries in groups]
    numbers = itertools.count()

    def collate_leaf(container_kind: str) -> Any:
        number = next(numbers)
        if number in collated:
            return collated[number]
        # default_collate returns strings as a tuple within a tuple or list, otherwise as a list.
        column = _column_cells(columns, outputs, outline.leaves[number])
        entries = tuple(column) if container_kind in ("tuple", "list") else column
        return _collate_column(entries, lambda: names_of(outline.structure)[number], to_device, columns.name)

    return assemble(outline.structure, collate_leaf, keep_tuples=False)  # like default_collate


def unwrap(value: Any) -> Any:
    """Return a value as the dataset returned it, with metadata as plain objects."""
    return value.tensor() if isinstance(value, TensorBits) else plain_meta(value)


def samples_of(columns: Columns, cells: Sequence[dict[int, Any]], to_plain: Callable[[Any], Any] = unwrap) -> list[Any]:
    """Rebuild the samples of a batch one by one. Finished leaves come from each row's `cells`; for all other leaves,
    `to_plain` is applied to the leaf's value."""
    rows: list[dict[int, Any]] = [{} for _ in range(len(columns))]
    for leaf, column in (*columns.values.items(), *columns.points.items()):
        for row, value in column.items():
            rows[row][leaf] = to_plain(value)
    samples = []
    for row, (leaves, row_cells) in enumerate(zip(rows, cells, strict=True)):
        leaves |= row_cells
        samples.append(unflatten(columns.structure(row), [leaves[leaf] for leaf in range(len(leaves))]))
    return samples


def _column_cells(columns: Columns, outputs: FinishedColumns, leaves: list[int]) -> list[Any]:
    """Return the finished cells or the values of a leaf for all rows."""
    leaf = leaves[0]
    column = columns.values.get(leaf) if leaves.count(leaf) == len(leaves) else None
    if (
        column is not None
        and column.rows is None
        and not any(leaf in row_cells for row_cells in filter(None, outputs.cells))
    ):
        return list(map(keep_meta, column.values) if TensorBits in set(map(type, column.values)) else column.values)
    return [_cell(columns, outputs, row, leaf, keep_meta) for row, leaf in enumerate(leaves)]


def _cell(
    columns: Columns, outputs: FinishedColumns, row: int, leaf: int, to_plain: Callable[[Any], Any] = unwrap
) -> Any:
    cells = outputs.cells[row]
    return cells[leaf] if leaf in cells else to_plain(columns.values[leaf].get(row))


def keep_meta(value: Any) -> Any:
    """Return a value as the dataset returned it, with metadata still in `MetaInt` and the like."""
    return value.tensor() if isinstance(value, TensorBits) else value


def _views_of_leaf(columns: Columns, outputs: FinishedColumns, leaves: list[int]) -> list[list[Any]]:
    """Return a leaf's values for all rows, for each view."""
    cells = _column_cells(columns, outputs, leaves)
    return [cells] if outputs.views is None else [list(view) for view in zip(*cells, strict=True)]


def _describe_sample(outline: Outline, structure: Structure) -> str:
    paths = key_paths_of(structure)
    paths_by_kind: dict[str, list[str]] = {"image": [], "mask": []}
    for mark, [leaf] in zip(outline.marks, outline.leaves, strict=True):
        if mark is not None and mark[0] == "clip":
            paths_by_kind["image"].append(paths[leaf.first_leaf])
        elif mark is not None and mark[0] in paths_by_kind:
            paths_by_kind[mark[0]].append(paths[leaf])
    images = f"with its images at {', '.join(paths_by_kind['image'])}" if paths_by_kind["image"] else "without images"
    masks = f" and masks at {', '.join(paths_by_kind['mask'])}" if paths_by_kind["mask"] else ""
    return f"{describe(outline.structure)} {images}{masks}"


def _collate_column(
    column: Sequence[Any], get_field_name: Callable[[], str], to_device: ToDevice, get_sample_name: Callable[[int], str]
) -> Any:
    types = set(map(type, column))
    if not types.isdisjoint(META):
        return list(map(plain_meta, column))
    if types == {int}:  # labels; default_collate would be slower
        with contextlib.suppress(OverflowError):
            return to_device(torch.from_numpy(np.array(column, np.int64)))
    try:
        result = default_collate(column)  # pyright: ignore[reportArgumentType]  tuples work too
    except (TypeError, RuntimeError, ValueError) as error:
        shapes = [None if getattr(value, "is_nested", False) else getattr(value, "shape", None) for value in column]
        mismatch = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
        reason = (
            f"{get_sample_name(0)} has shape {tuple(shapes[0] or ())} and {get_sample_name(mismatch)} has "
            f"{tuple(shapes[mismatch] or ())}"
            if mismatch is not None
            else f"{get_sample_name(0)} has a {_describe_kind(column[0])}"
        )
        field_name = get_field_name()
        subject = f"field {field_name!r} of the samples" if field_name else "the samples"
        remedy = _find_remedy(column, field_name, shapes)
        raise CollateError(
            f"{subject} cannot be collated into a batch: {reason} ({error}); {remedy}",
            error_class_names(error),
        ) from error
    return to_device(result) if isinstance(result, torch.Tensor) else result


def _stack_clips(columns: Columns, outputs: FinishedColumns, clips: list[Group], first_column: int) -> Any:
    """Return the clips of a batch. The frames are consecutive columns of images, from index `first_column`."""
    lengths = [len(clip.node[3]) for clip in clips]
    mismatch = next((row for row, length in enumerate(lengths) if length != lengths[0]), None)
    if mismatch is not None:
        raise CollateError(
            f"the clips of a batch differ in length: {columns.name(0)} has {lengths[0]} frames, and "
            f"{columns.name(mismatch)} has {lengths[mismatch]}; cut clips to one length in the dataset, or pass a "
            "collate_fn"
        )
    frames = outputs.images[first_column : first_column + lengths[0]]
    return outputs.combine_views([_stack_frames(view) for view in zip(*frames, strict=True)])


def _stack_frames(frames: Sequence[Any]) -> Any:
    """Stack frames along a new axis T after N. Each is an N×C×H×W tensor, a list, or an N×C×H×W tensor with sizes."""
    if isinstance(frames[0], tuple):
        return torch.stack([images for images, _ in frames], 1), frames[0][1]
    if isinstance(frames[0], list):
        return [torch.stack(clip) for clip in zip(*frames, strict=True)]
    return torch.stack(list(frames), 1)


def _find_remedy(column: Sequence[Any], name: str, shapes: Sequence[Any]) -> str:
    if name and any(value is None for value in column):
        return f"collate_fn=gpuload.keep({name!r}) keeps the values, including None, in a list"
    if isinstance(column[0], os.PathLike):
        return "return gpuload.read(path) for an image file, else str(path); gpuload.ImageFiles reads entire folders"
    if dtype_remedy := next(filter(None, map(remedy_for, column)), None):
        return dtype_remedy
    if all(shapes) and len({len(shape) for shape in shapes}) == 1:
        function = f"pad({name!r})" if name else "pad_collate"
        remedy = f"collate_fn=gpuload.{function} pads them"
        if is_image_array(column[0]):
            return remedy + "; if they are images, return gpuload.Image(array), which ragged='list' or 'pad' collates"
        boxes_note = "; boxes returned as gpuload.Boxes(array, format) are collated to a list"
        return remedy + boxes_note * (len(shapes[0]) == 2 and shapes[0][1] == 4)
    return "return values of one shape, of types that torch's default_collate knows"


def _describe_kind(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def convert_arrays(value: Any, name: Callable[[], str]) -> Any:
    """Convert the arrays in a sample, or in a part of it, to tensors, like `default_convert`.

    Raises:
        CollateError: torch does not support the dtype of an array; the message contains the sample's `name`.
    """
    try:
        return default_convert(value)
    except (TypeError, RuntimeError, ValueError) as error:
        leaf = next(filter(remedy_for, tree_leaves(value)), None)
        reason = "" if leaf is None else f": it has a {_describe_kind(leaf)}"
        remedy = remedy_for(leaf) or "return arrays of numbers"
        raise CollateError(
            f"{name()} cannot be converted to tensors{reason} ({error}); {remedy}", error_class_names(error)
        ) from error


def stack_masks(
    masks: Sequence[torch.Tensor], names: Sequence[Callable[[], str]], ragged: str, pad_to: int | None
) -> Any:
    """Collate the masks of a batch in the way that `ragged` and `pad_to` define for images. `names` has a function per
    mask that returns the mask's name, for errors."""
    if ragged == "list":
        return list(masks)
    shapes = [tuple(mask.shape) for mask in masks]
    mismatch = next((row for row, mask in enumerate(masks) if mask.dtype != masks[0].dtype), None)
    if mismatch is not None:
        raise CollateError(
            f"the masks of a batch differ in dtype: {names[0]()} has {masks[0].dtype}, {names[mismatch]()} has "
            f"{masks[mismatch].dtype}; return all masks with the same dtype"
        )
    if ragged == "pad" and len({shape[:-2] for shape in shapes}) == 1:
        sizes = np.array([shape[-2:] for shape in shapes])
        batch = masks[0].new_zeros((len(masks), *shapes[0][:-2], *padded_hw(sizes, pad_to)))
        for padded_mask, mask in zip(batch, masks, strict=True):
            padded_mask[..., : mask.shape[-2], : mask.shape[-1]] = mask
        return batch, upload(sizes, batch.device)
    mismatch = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
    if mismatch is not None:
        raise CollateError(
            f"the masks of a batch have different shapes: {names[0]()} has {shapes[0]}, {names[mismatch]()} has "
            f"{shapes[mismatch]}; end the transforms with a crop or a Resize((height, width)), use ragged='list', or "
            "put masks of instances into the dict that holds the boxes"
        )
    return torch.stack(list(masks))


def move_merged(values: dict[int, Any], to_device: ToDevice) -> dict[int, Any]:
    """Move all tensors to the device. Copy all small tensors of a dtype together, since a batch can have hundreds."""
    is_flat = set(map(type, values.values())) <= {torch.Tensor}  # the usual case; torch's tree functions take 40 µs
    leaves = values.values() if is_flat else tree_leaves(values)
    cpu_tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]
    if not cpu_tensors:
        return values
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in cpu_tensors:
        if tensor.nbytes <= MAX_MERGED_BYTES:
            small.setdefault(tensor.dtype, []).append(tensor)
    probe = next((tensors[0] for tensors in small.values()), None)
    if probe is not None and to_device(probe) is probe:  # the device is the CPU
        return values
    moved_tensors: dict[int, torch.Tensor] = {}
    for tensors in small.values():
        flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            moved_tensors[id(tensor)] = part.view(tensor.shape)

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return moved_tensors[id(value)] if id(value) in moved_tensors else to_device(value)
        return value

    return {number: move(value) for number, value in values.items()} if is_flat else tree_map(move, values)
