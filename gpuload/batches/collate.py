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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import default_collate, default_convert

from gpuload.batches.mixing import Pairing
from gpuload.batches.pad import remedy_for
from gpuload.checks import argument, check_fields, flag, function, one_of
from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.sample import META, Boxes, Keypoints, plain_meta, with_values
from gpuload.datasets.tree import (
    LEAF,
    Structure,
    assemble,
    describe,
    describe_leaf,
    difference,
    key_paths_of,
    leaf_count,
    names_of,
    unflatten,
)
from gpuload.errors import CollateError, error_class_names
from gpuload.ring.columns import Columns, TensorBits, entry
from gpuload.stage.device import upload
from gpuload.stage.stage import check_ragged, padded_hw
from gpuload.transforms import Chain, Program
from gpuload.transforms.program.targets import final_format
from gpuload.workers.box_fields import explain_format_conflict

__all__ = [
    "BatchOptions", "FinishedColumns", "Outline", "collate", "convert_arrays", "keep_meta", "move_merged", "outline_of",
    "stack_masks", "unwrap",
]  # fmt: skip

MAX_MERGED_BYTES = 1 << 16  # larger tensors are copied to the device one by one
ToDevice = Callable[[torch.Tensor], torch.Tensor]
# The kind of a leaf, and an index: "image" and its index among the sample's images; "clip" and the index of its first
# frame; or "mask", "points", "column", "group" or "value" and 0.
LeafKind = tuple[str, int]
VALUE: LeafKind = ("value", 0)
GROUP: LeafKind = ("group", 0)  # a container that becomes a list with one entry per image
POINTS: LeafKind = ("points", 0)  # boxes and keypoints that turn their container into a group
COLUMN: LeafKind = ("column", 0)  # boxes and keypoints that are padded or stacked
Ragged = Literal["error", "list", "pad"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of a `Loader` that define how samples become batches.

    Args:
        collate_fn, ragged, pad_to, boxes, pin_memory: as for `Loader`.
        chain, seed, single, planned, repeats: values from other groups: the transforms, the seed of their random
            parameters, whether samples are yielded one by one, whether gpuload itself decides which sample is at which
            position, and how many consecutive positions have the same sample.

    Raises:
        TypeError, ValueError: an argument is invalid, or two arguments cannot be combined.
    """

    collate_fn: Callable[[Any], Any] | None = argument(function, optional=True)
    ragged: Ragged
    pad_to: int | None
    boxes: Literal["list", "padded"] = argument(one_of, choices=("list", "padded"))
    pin_memory: bool = argument(flag)
    chain: Chain
    seed: int
    single: bool
    planned: bool
    repeats: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        defaults = {"ragged": "error", "pad_to": None, "boxes": "list"}
        arguments = [f"{name}={value!r}" for name in defaults if (value := getattr(self, name)) != defaults[name]]
        if self.rebuilds_samples and arguments:
            raise ValueError(
                f"{arguments[0]} cannot be combined with {'batch_size=None' if self.single else 'a collate_fn'}, "
                f"which gets {'the boxes of each image' if arguments[0][0] == 'b' else 'each image in its own size'}; "
                f"leave out {arguments[0]} (gpuload.pad_collate pads)"
            )
        if self.boxes == "padded" and (conflict := explain_format_conflict(self.chain)) is not None:
            raise ValueError(conflict)
        object.__setattr__(self, "pad_to", check_ragged(self.ragged, self.pad_to))

    @property
    def rebuilds_samples(self) -> bool:
        """Whether samples are rebuilt one by one, for a collate_fn or batch_size=None."""
        return self.collate_fn is not None or self.single


def unwrap(value: object) -> Any:
    """Return a value as the dataset returned it, with metadata as plain objects."""
    return value.tensor() if isinstance(value, TensorBits) else plain_meta(value)


def keep_meta(value: object) -> Any:
    """Return a value as the dataset returned it, with metadata still in `MetaInt` and the like."""
    return value.tensor() if isinstance(value, TensorBits) else value


@dataclass(slots=True)
class FinishedColumns:
    """A batch's columns, and the leaves that are finished.

    Attributes:
        columns: the batch.
        has_views: whether a `MultiView` makes several views of each image.
        programs: the random parameters, for each of `Columns.images` and each view; empty if a worker planned the
            batch.
        pairing: how the samples are mixed; None if they are not.
        images: the results of the stage, for each of `Columns.images` and each view.
        cells: the leaves that were finished one by one, keyed by leaf and row.
        full_columns: the leaves that were finished for all rows together: blocks, integers that a worker stored with
            its plan, masks of one shape as one tensor, and boxes and keypoints that were padded.
        padded: the values of all leaves of a batch whose boxes and keypoints came padded, on the device; empty
            otherwise. `Columns.points` then has placeholders.
    """

    columns: Columns
    has_views: bool = False
    programs: Sequence[Sequence[Program]] = ()
    pairing: Pairing | None = None
    images: list[list[Any]] = field(default_factory=list)
    cells: defaultdict[int, dict[int, Any]] = field(default_factory=partial(defaultdict, dict))
    full_columns: dict[int, Any] = field(default_factory=dict)
    padded: Sequence[Any] = ()

    def parts(self) -> list[FinishedColumns]:
        """Return the parts of the batch that share random parameters. They store their results in this object."""
        programs: dict[int, list[Any]] = {}
        for images, views in zip(self.columns.images, self.programs, strict=True):
            programs.setdefault(images.draws[0], []).append(views)
        return [replace(self, columns=self.columns.with_draws(draws), programs=programs[draws]) for draws in programs]

    @property
    def first_programs(self) -> Sequence[Program]:
        """Return the programs for the first column of images, one per view."""
        return self.programs[0] if self.programs else ()

    def combine_views(self, results: Sequence[object]) -> Any:
        """Return the batch's entry for one result per view: a list, or the only result without a `MultiView`."""
        return list(results) if self.has_views else results[0]

    def split_views(self, entries: Sequence[object]) -> list[list[Any]]:
        """Return the parts of each view of entries from `combine_views`."""
        return [list(view) for view in zip(*entries, strict=True)] if self.has_views else [list(entries)]

    def split_images(self) -> None:
        """Put each image into a cell. In a batch of padded images, an image's size is read from the program on the
        host, since the stage's sizes may be on a device."""
        for images, views, programs in zip(self.columns.images, self.images, self.programs, strict=True):
            for position, (row, leaf) in enumerate(images.rows_and_leaves()):
                results = []
                for view, program in zip(views, programs, strict=True):
                    if isinstance(view, tuple):
                        height, width = program.results_hw[position].tolist()
                        results.append(view[0][position][:, :height, :width])
                    else:
                        results.append(view[position])
                self.cells[leaf][row] = self.combine_views(results)

    def cell(self, row: int, leaf: int, to_plain: Callable[[Any], object] = unwrap) -> Any:
        """Return the finished leaf of a row, or its value as the dataset returned it."""
        cells = self.cells.get(leaf, {})
        return cells[row] if row in cells else to_plain(self.columns.values[leaf].get(row))

    def entries(self, leaves: Sequence[int]) -> list[Any]:
        """Return the finished leaves or the values of all rows, given the leaf of each row."""
        leaf = leaves[0]
        column = None if leaf in self.cells or leaves.count(leaf) < len(leaves) else self.columns.values.get(leaf)
        if column is not None and column.rows is None:
            return list(map(keep_meta, column.values) if TensorBits in set(map(type, column.values)) else column.values)
        return [self.cell(row, leaf, keep_meta) for row, leaf in enumerate(leaves)]

    def samples(self, to_plain: Callable[[Any], object] = unwrap) -> list[Any]:
        """Rebuild the samples one by one. `to_plain` is applied to values that are not finished."""
        columns = self.columns
        rows: list[dict[int, Any]] = [{} for _ in range(len(columns))]
        for leaf, column in (*columns.values.items(), *columns.points.items()):
            for row, value in column.items():
                rows[row][leaf] = to_plain(value)
        for leaf, cells in self.cells.items():
            for row, value in cells.items():
                rows[row][leaf] = value
        return [
            unflatten(columns.structure(row), [leaves[leaf] for leaf in range(len(leaves))])
            for row, leaves in enumerate(rows)
        ]

    def full_column(self, leaves: Sequence[int]) -> Any:
        """Return the result for all rows together, given the leaf of each row; None if there is none."""
        return self.full_columns.get(leaves[0]) if leaves.count(leaves[0]) == len(leaves) else None


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
        kinds: the kind of each leaf of this structure.
        leaves: for each leaf of this structure and each row, the leaf index in the sample, or the group or clip.
    """

    structure: Structure
    kinds: list[LeafKind]
    leaves: list[list[Any]]


def outline_of(columns: Columns, *, pads_boxes: bool) -> Outline:
    """Return the outline of a batch. With `pads_boxes`, containers with boxes do not become groups.

    Raises:
        CollateError: samples differ in their structure, or in the paths of their images; the message names two of
            them.
    """
    kinds, structures = _find_kinds(columns, pads_boxes), columns.structures
    outlines: list[Outline] = []
    for row in range(max(len(kinds), len(structures))):
        row_kinds, structure = entry(kinds, row), entry(structures, row)
        if row and row_kinds == kinds[0] and structure == structures[0]:
            outlines.append(outlines[0])
            continue
        leaves: list[tuple[LeafKind, Any]] = []
        folded_structure = _fold(structure, 0, row_kinds, leaves)
        outline = Outline(folded_structure, [kind for kind, _ in leaves], [[leaf] for _, leaf in leaves])
        outlines.append(outline)
        if (outline.structure, outline.kinds) != (outlines[0].structure, outlines[0].kinds):
            scope_note = ", outside the dicts that hold boxes or keypoints" if columns.points else ""
            raise CollateError(
                f"{columns.name(0)} is {_describe_sample(outlines[0], structures[0])}, but {columns.name(row)} is "
                f"{_describe_sample(outline, structure)}"
                f"{difference(outlines[0].structure, outline.structure)}: all samples of a batch must have the same "
                "structure, with images at the same paths"
                f"{scope_note}; make the dataset return every sample with the same structure"
            )
    leaf_columns = zip(*(outline.leaves for outline in outlines), strict=True)
    repeats = len(columns) if len(outlines) == 1 else 1
    return Outline(
        outlines[0].structure, outlines[0].kinds, [[*itertools.chain(*column)] * repeats for column in leaf_columns]
    )


def _find_kinds(columns: Columns, pads_boxes: bool) -> list[dict[int, LeafKind]]:
    """Return the kinds of the leaves of each sample, keyed by leaf index; a single entry in the usual case that all
    rows are the same."""
    images = [("image", index, column) for index, column in enumerate(columns.images)]
    images += [("mask", 0, column) for column in columns.masks]
    points = columns.points
    points_kinds = {leaf: {_points_kind(value, pads_boxes) for value in points[leaf].values} for leaf in points}
    is_common = all(column.rows is None and len(points_kinds[leaf]) == 1 for leaf, column in points.items())
    common_kinds = {column.leaf: (kind, index) for kind, index, column in images}
    if None not in common_kinds and is_common:
        common_kinds |= {leaf: next(iter(leaf_kinds)) for leaf, leaf_kinds in points_kinds.items()}
        return [common_kinds]  # pyright: ignore[reportReturnType]
    kinds: list[dict[int, LeafKind]] = [{} for _ in range(len(columns))]
    for kind, index, column in images:
        for row, leaf in column.rows_and_leaves():
            kinds[row][leaf] = (kind, index)
    for leaf, column in points.items():
        for row, value in column.items():
            kinds[row][leaf] = _points_kind(value, pads_boxes)
    return kinds


def _points_kind(value: Boxes | Keypoints, pads_boxes: bool) -> LeafKind:
    return COLUMN if pads_boxes or (isinstance(value, Keypoints) and value.pairs is not None) else POINTS


def _fold(node: Structure, start: int, kinds: dict[int, LeafKind], leaves: list[tuple[LeafKind, Any]]) -> Structure:
    """Fold each group and clip within a node of a sample into one leaf, and return the new structure. The node's leaves
    begin at index `start`. Append the new structure's leaves to `leaves`, each with its kind."""
    if node == LEAF:
        leaves.append((kinds.get(start, VALUE), start))
        return LEAF
    container, cls, keys, children = node
    starts = itertools.accumulate(map(leaf_count, children), initial=start)
    located = list(zip(children, starts, strict=False))
    holds_points = any(child == LEAF and kinds.get(leaf) == POINTS for child, leaf in located)
    if container == "clip" or (holds_points and container in ("dict", "dataclass")):
        leaves.append((("clip", kinds[start][1]) if container == "clip" else GROUP, Group(node, start)))
        return LEAF
    return container, cls, keys, tuple([_fold(child, leaf, kinds, leaves) for child, leaf in located])


def collate(finished: FinishedColumns, outline: Outline, options: BatchOptions, to_device: ToDevice) -> Any:
    """Build the batch from its finished columns and its outline. `to_device` moves a tensor to the device.

    Raises:
        CollateError: masks differ in size, or the values of a leaf cannot be collated; the message names two samples.
    """
    columns, ragged = finished.columns, options.ragged
    lengths = _pad_entries(finished, outline, ragged) if options.boxes == "padded" else {}
    collated: dict[int, Any] = {}
    for number, (leaves, (kind, image_index)) in enumerate(zip(outline.leaves, outline.kinds, strict=True)):
        if kind == "group":
            collated[number] = [
                [convert_arrays(finished.cell(row, leaf), partial(columns.name, row)) for leaf in group.leaf_indices]
                for row, group in enumerate(leaves)
            ]
        elif kind == "clip":
            collated[number] = _stack_clips(finished, leaves, image_index)
        elif kind == "image":
            collated[number] = finished.combine_views(finished.images[image_index])
        elif (full_column := finished.full_column(leaves)) is not None and (kind != "mask" or ragged == "error"):
            collated[number] = full_column
        elif kind != "value":
            views = finished.split_views(finished.entries(leaves))
            if kind == "column":
                views = [_stack_points(view, leaves, columns, is_padded=number in lengths) for view in views]
                if number in lengths:
                    is_valid = np.arange(max(lengths[number])) < np.array(lengths[number])[:, None]
                    make_target = partial(_make_target, columns, leaves, to_device(torch.from_numpy(is_valid)))
                    views = list(map(make_target, map(to_device, views), finished.first_programs))
            elif kind == "mask":
                names = [partial(columns.name, row, leaf) for row, leaf in enumerate(leaves)]
                views = [stack_masks(view, names, ragged, options.pad_to) for view in views]
            collated[number] = finished.combine_views(views)
    collated = move_merged(collated, to_device)
    for number, kind in enumerate(outline.kinds):
        if kind == GROUP:
            groups = zip(outline.leaves[number], collated[number], strict=True)
            collated[number] = [unflatten(group.node, entries) for group, entries in groups]
    numbers = itertools.count()

    def collate_leaf(container_kind: str) -> Any:
        number = next(numbers)
        if number in collated:
            return collated[number]
        # default_collate returns strings as a tuple within a tuple or list, otherwise as a list.
        column = finished.entries(outline.leaves[number])
        entries = tuple(column) if container_kind in ("tuple", "list") else column
        return _collate_column(entries, lambda: names_of(outline.structure)[number], to_device, columns.name)

    return assemble(outline.structure, collate_leaf, keep_tuples=False)  # like default_collate


def _pad_entries(finished: FinishedColumns, outline: Outline, ragged: str) -> dict[int, list[int]]:
    """Pad the boxes of a batch, and the values with an entry for each box in every sample, with zeros to one number of
    entries. Masks are not padded if they become a list. Return the number of boxes of each sample, for each leaf of the
    outline that was padded."""
    boxes_lengths, columns = [], {}
    for number, (leaves, kind) in enumerate(zip(outline.leaves, outline.kinds, strict=True)):
        target: Any = finished.columns.points[leaves[0]].get(0) if kind == COLUMN else None
        if isinstance(target, Keypoints) and target.array.ndim < 3:
            continue  # the keypoints of an image
        is_padded = kind in (VALUE, COLUMN) or (kind[0] == "mask" and ragged != "list")
        if is_padded and finished.full_column(leaves) is None:
            entries = finished.entries(leaves)
            has_views = finished.has_views and leaves[0] in finished.cells
            columns[number] = finished.split_views(entries) if has_views else [entries], has_views
            if isinstance(target, Boxes):
                boxes_lengths.append(list(map(len, columns[number][0][0])))
    padded = {}
    for number, (views, has_views) in columns.items():
        lengths = [_length_of(entry) for entry in views[0]]
        if lengths not in boxes_lengths:
            continue
        padded[number] = lengths
        views = [_pad_rows(convert_arrays(view, partial(finished.columns.name, 0)), max(lengths)) for view in views]
        for row, (leaf, *entries) in enumerate(zip(outline.leaves[number], *views, strict=True)):
            finished.cells[leaf][row] = entries if has_views else entries[0]
    return padded


def _length_of(value: Any) -> int:
    """Return the length of an array of numbers or a tensor; -1 for anything else."""
    is_array = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf")
    return len(value) if is_array and value.ndim else -1


def _pad_rows(tensors: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Pad tensors with zeros to one number of rows."""
    first = next(filter(len, tensors), tensors[0])
    padded = []
    for tensor in tensors:
        # An empty array's dtype and shape are meaningless, but the size of an empty mask is that of its image.
        if not len(tensor) and (tensor.dtype, tensor.dim()) != (first.dtype, first.dim()):
            tensor = first[:0]
        padded.append(torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, length - len(tensor)]))
    return padded


def _make_target(
    columns: Columns, leaves: Sequence[int], valid: torch.Tensor, array: torch.Tensor, program: Program
) -> Boxes | Keypoints:
    """Return padded boxes or keypoints.

    Raises:
        CollateError: boxes have different formats.
    """
    targets = [columns.points[leaf].get(row) for row, leaf in enumerate(leaves)]
    if isinstance(targets[0], Keypoints):
        return with_values(targets[0], array=array, valid=valid)
    final = final_format(program.records)
    formats = [final or target.format for target in targets]
    for row, box_format in enumerate(formats):
        if box_format != formats[0]:
            names = columns.name(0, leaves[0]), columns.name(row, leaves[row])
            raise CollateError(
                f"padded boxes must have one format, but {names[0]} is {formats[0]!r}, and {names[1]} is "
                f"{box_format!r}; put a ConvertBoundingBoxFormat into the transforms"
            )
    return with_values(targets[0], array=array, format=formats[0], valid=valid, canvas_hw=None)


def _stack_points(entries: Sequence[torch.Tensor], leaves: Sequence[int], columns: Columns, *, is_padded: bool) -> Any:
    """Stack boxes or keypoints; if they differ and are neither padded nor have `pairs`, return a list.

    Raises:
        CollateError: padded boxes or keypoints, or keypoints with pairs, differ in shape or dtype.
    """
    target: Any = columns.points[leaves[0]].get(0)
    for row, entry_of_row in enumerate(entries):
        if (entry_of_row.shape, entry_of_row.dtype) == (entries[0].shape, entries[0].dtype):
            continue
        if not is_padded and target.pairs is None:
            return list(entries)
        raise CollateError(
            f"padded boxes, and keypoints with pairs=, are stacked, but {columns.name(0, leaves[0])} is "
            f"{describe_leaf(entries[0])}, and {columns.name(row, leaves[row])} is {describe_leaf(entry_of_row)}; "
            "return one dtype, and the same number of points for each image; put keypoints of objects next to their "
            "boxes"
        )
    return torch.stack(list(entries))


def _describe_sample(outline: Outline, structure: Structure) -> str:
    paths, located = key_paths_of(structure), list(zip(outline.kinds, outline.leaves, strict=True))

    def paths_of(*kinds: str) -> str:
        leaves = [leaf for (kind, _), [leaf] in located if kind in kinds]
        return ", ".join(paths[leaf.first_leaf if isinstance(leaf, Group) else leaf] for leaf in leaves)

    images, masks = paths_of("image", "clip"), paths_of("mask")
    images_note = f"with its images at {images}" if images else "without images"
    return f"{describe(outline.structure)} {images_note}" + (f" and masks at {masks}" if masks else "")


def _collate_column(
    column: Sequence[object],
    get_field_name: Callable[[], str],
    to_device: ToDevice,
    get_sample_name: Callable[[int], str],
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


def _stack_clips(finished: FinishedColumns, clips: list[Group], first_column: int) -> Any:
    """Return the clips of a batch. The frames are consecutive columns of images, from index `first_column`."""
    lengths, name = [len(clip.node[3]) for clip in clips], finished.columns.name
    mismatch = next((row for row, length in enumerate(lengths) if length != lengths[0]), None)
    if mismatch is not None:
        raise CollateError(
            f"the clips of a batch differ in length: {name(0)} has {lengths[0]} frames, and {name(mismatch)} has "
            f"{lengths[mismatch]}; cut clips to one length in the dataset, or pass a collate_fn"
        )
    frames = finished.images[first_column : first_column + lengths[0]]
    return finished.combine_views([_stack_frames(view) for view in zip(*frames, strict=True)])


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


def _describe_kind(value: object) -> str:
    return f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def convert_arrays(value: object, name: Callable[[], str]) -> Any:
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
    leaves, structure = (list(values.values()), None) if is_flat else tree_flatten(values)
    small: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
            if leaf.nbytes <= MAX_MERGED_BYTES:
                small[leaf.dtype].append(index)
            else:
                leaves[index] = to_device(leaf)
    probe = next((leaves[indices[0]] for indices in small.values()), None)
    if probe is not None and to_device(probe) is probe:  # the device is the CPU
        return values
    for indices in small.values():
        tensors = [leaves[index] for index in indices]
        flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        for index, tensor, part in zip(indices, tensors, parts, strict=True):
            leaves[index] = part.view(tensor.shape)
    return dict(zip(values, leaves, strict=True)) if structure is None else tree_unflatten(leaves, structure)
