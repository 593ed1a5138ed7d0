"""Transforming the targets of a batch (masks, boxes and keypoints) like their images.

This module runs in the main process, on the transfer stream, after the random parameters have been drawn. It transforms
boxes and keypoints with numpy (a few numbers per sample); the stage's runner transforms masks. Entries that belong to
dropped boxes are removed from the leaves that the worker identified (`gpuload.workers.box_fields`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import FinishedColumns
from gpuload.datasets.sample import Boxes, Keypoints, Mask, from_xyxy, to_xyxy
from gpuload.datasets.tree import Structure, find_sibling
from gpuload.ring.columns import Columns, ImageColumn
from gpuload.stage import RaggedImages
from gpuload.stage.device import upload, upload_arrays
from gpuload.stage.masks import MaskStage
from gpuload.transforms import Chain
from gpuload.transforms.arguments import is_module, name_of
from gpuload.transforms.program.targets import SampleTargets, apply_records

__all__ = [
    "exchange",
    "restore_targets",
    "sample_targets_of",
    "select_rows",
    "target_warning",
    "transform_targets",
    "visibilities_of",
]

# The methods that a user-defined transform needs for targets, each with the name and type of the targets.
METHODS = (("apply_masks", "masks", Mask), ("apply_boxes", "boxes", Boxes), ("apply_keypoints", "keypoints", Keypoints))


def transform_targets(finished: FinishedColumns, stage: MaskStage, read: Callable[[ImageColumn], RaggedImages]) -> None:
    """Transform the targets of a batch, and store the results in `finished`.

    The cells receive masks, boxes and keypoints as tensors (with a `MultiView`, as lists of tensors), and the remaining
    entries of leaves that belong to dropped boxes, as tensors or arrays. Masks that are the same leaf in all rows, with
    one dtype and shape, are also stored in the full columns, as one tensor.

    Args:
        finished: contains the batch, without blocks, and its random parameters; receives the results.
        stage: transforms masks.
        read: returns the pixels of masks.
    """
    for masks in finished.columns.masks:
        pixels = read(masks)
        rows = np.searchsorted(finished.columns.images[0].row_indices, masks.row_indices)
        views = [stage(pixels, program.take(rows), masks.kinds_per_image) for program in finished.first_programs]
        results_of_masks = zip(*(view_results for view_results, _ in views), strict=True)
        for (row, leaf), results in zip(masks.rows_and_leaves(), results_of_masks, strict=True):
            finished.cells[leaf][row] = finished.combine_views(results)
        leaf, tensors = masks.leaf, [stacked for _, stacked in views if stacked is not None]
        if leaf is not None and len(tensors) == len(views):
            finished.full_columns[leaf] = finished.combine_views(tensors)
    if finished.columns.points and not finished.padded:
        _move_points(finished)


def _move_points(finished: FinishedColumns) -> None:
    """Transform boxes and keypoints, and remove entries that belong to dropped boxes or keypoints."""
    columns, cells = finished.columns, finished.cells
    points: dict[int, dict[int, Boxes | Keypoints]] = {row: {} for row in columns.images[0].row_indices.tolist()}
    for leaf in sorted(columns.points):
        for row, value in columns.points[leaf].items():
            points[row][leaf] = value
    samples_of_views: list[list[SampleTargets]] = []
    for program in finished.first_programs:
        samples = [sample_targets_of(targets.values()) for targets in points.values()]
        apply_records(program.records, samples)
        samples_of_views.append(samples)
    selections = []
    for (row, targets), *samples in zip(points.items(), *samples_of_views, strict=True):
        views = [restore_targets(targets, sample_targets) for sample_targets in samples]
        for leaf in targets:
            cells[leaf][row] = finished.combine_views([results[leaf] for results in views])
        for leaf, target in visibilities_of(columns.structure(row), targets).items():
            finished.full_columns.pop(leaf, None)
            value = finished.cell(row, leaf)
            entries = [exchange(value, target, sample.is_mirrored) for sample in samples]
            cells[leaf][row] = finished.combine_views(entries)
        if not finished.has_views:
            selections += [(row, leaf, entries) for leaf, entries in _remaining_entries(columns, row, samples[0])]
    values = select_rows((finished.cell(row, leaf), entries) for row, leaf, entries in selections)
    for (row, leaf, _), value in zip(selections, values, strict=True):
        finished.full_columns.pop(leaf, None)
        cells[leaf][row] = value


def _remaining_entries(columns: Columns, row: int, sample_targets: SampleTargets) -> Iterator[tuple[int, np.ndarray]]:
    """If boxes or keypoints of a row were dropped, yield each leaf that belongs to them, and the indices of its
    remaining entries."""
    valid = None if sample_targets.valid is None else np.flatnonzero(sample_targets.valid)
    for leaf in columns.fields_of(row):
        leaf, remaining = (leaf, sample_targets.kept_indices) if leaf >= 0 else (~leaf, valid)
        column = columns.points.get(leaf)
        if remaining is not None and (column is None or not isinstance(column.get(row), Boxes)):
            yield leaf, remaining


def visibilities_of(structure: Structure, targets: Mapping[int, Boxes | Keypoints]) -> dict[int, Keypoints]:
    """Return the keypoints in a sample with whose `pairs` the entries of a visibility are exchanged, keyed by the leaf
    of the visibility."""
    keypoints = {leaf: target for leaf, target in targets.items() if isinstance(target, Keypoints) and target.pairs}
    siblings = {leaf: find_sibling(structure, leaf, "visibility") for leaf in keypoints}
    return {sibling[0]: keypoints[leaf] for leaf, sibling in siblings.items() if sibling is not None}


def exchange(values: Any, target: Keypoints, is_mirrored: bool) -> Any:
    """Exchange the entries of points, or of their visibility, by the `pairs` of keypoints if the image is mirrored."""
    if not (is_mirrored and target.pairs):
        return values
    order, axis = np.arange(target.array.shape[-2]), target.array.ndim - 2
    for left, right in target.pairs:
        order[[left, right]] = right, left
    if isinstance(values, torch.Tensor):
        return values.index_select(axis, upload(order, values.device))
    return np.take(values, order, axis)


def select_rows(entries: Iterable[tuple[Any, np.ndarray]]) -> Iterator[Any]:
    """Yield, for each tensor or array, the entries at these indices (int64). All indices are copied to the device
    together."""
    entries = list(entries)
    uploads = [(value.device, rows) for value, rows in entries if isinstance(value, torch.Tensor) and not value.is_cpu]
    device_rows = iter(upload_arrays([rows for _, rows in uploads], uploads[0][0]) if uploads else ())
    for value, rows in entries:
        if not isinstance(value, torch.Tensor):
            yield value[rows]
        else:
            yield value[torch.from_numpy(rows)] if value.is_cpu else value.index_select(0, next(device_rows))


def sample_targets_of(values: Iterable[Boxes | Keypoints]) -> SampleTargets:
    """Return the boxes and keypoints of a sample as `SampleTargets`, which `apply_records` transforms."""
    sample_targets = SampleTargets([])
    for value in values:
        if isinstance(value, Boxes):
            sample_targets.boxes.append(to_xyxy(value.array, value.format))
        else:
            dtype = np.int64 if np.issubdtype(value.array.dtype, np.integer) else np.float64
            sample_targets.points.append(value.array.astype(dtype))
    return sample_targets


def target_warning(chain: Chain, columns: Columns) -> str:
    """Return a warning if user-defined transforms may move the images of a batch but not its targets; otherwise "".

    Raises:
        ValueError: a transform has `moves_pixels = True`, but lacks a method for the batch's targets.
    """
    target_types = {type(value) for column in columns.points.values() for value in column.values}
    target_types |= {Mask} if columns.masks else set()
    required_methods = [(method, noun) for method, noun, target_type in METHODS if target_type in target_types]
    warnings: dict[str, None] = {}
    for call in chain.calls:
        missing_methods = [(method, noun) for method, noun in required_methods if not call.has(method)]
        if not missing_methods or call.moves_pixels is False:
            continue
        (method, noun), *_ = missing_methods
        if call.moves_pixels:
            raise ValueError(
                f"{call.display_name} moves pixels (moves_pixels = True) but has no {method}, which {noun} need; write "
                f"this method, or return no {noun}"
            )
        warnings[_images_only_message(call.display_name) if call.per != "images" else (
            f"{call.display_name} has no {method}, so {noun} are not moved. If it moves pixels, write this method; if "
            "not, set moves_pixels = False in its class"
        )] = None  # fmt: skip
    for module, short_name in zip(chain.modules, chain.module_names, strict=True):
        name = f"the module {name_of(module)}" if is_module(module) else short_name
        warnings[_images_only_message(f"{name} at the end of the transforms")] = None
    return "\n".join(warnings)


def _images_only_message(display_name: str) -> str:
    return (
        f"{display_name} gets only the images; masks, boxes and keypoints are not moved. If it moves pixels, use "
        "gpuload's transforms instead, which move both"
    )


def restore_targets(values: Mapping[int, Boxes | Keypoints], sample_targets: SampleTargets) -> dict[int, torch.Tensor]:
    """Return a sample's transformed boxes and keypoints, keyed by leaf, in their original formats and dtypes."""
    boxes, points = iter(sample_targets.boxes), iter(sample_targets.points)
    results = {}
    for leaf, value in values.items():
        if isinstance(value, Boxes):
            array = from_xyxy(next(boxes), sample_targets.format or value.format, value.array.dtype)
        else:
            array = exchange(next(points).astype(value.array.dtype), value, sample_targets.is_mirrored)
            array = array if sample_targets.valid is None else array[sample_targets.valid]
        results[leaf] = torch.from_numpy(np.ascontiguousarray(array))
    return results
