"""Masks, boxes and keypoints of a batch, moved like their images.

Runs in the main process, within the transfer's stream, after the draws. Boxes and keypoints are moved here by numpy (a
few numbers for each sample), masks by the stage's runner. Boxes that transforms leave out are left out of the leaves
that the worker found to belong to them, too (`gpuload.workers.box_fields`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import Finished, unwrapped
from gpuload.datasets.sample import Boxes, Keypoints, Mask, from_xyxy, to_xyxy
from gpuload.ring.columns import Columns, ImageColumn, entry
from gpuload.stage import RaggedImages
from gpuload.stage.device import upload_together
from gpuload.stage.masks import MaskStage
from gpuload.transforms import Chain
from gpuload.transforms.arguments import is_module
from gpuload.transforms.program.targets import Trail, follow

__all__ = ["TargetStage", "left_behind", "moved_results", "selected", "trail_of"]

# What a transform of the user's own needs for targets: the method, their name, and their type.
METHODS = (("apply_masks", "masks", Mask), ("apply_boxes", "boxes", Boxes), ("apply_keypoints", "keypoints", Keypoints))


class TargetStage:
    """Moves the targets of batches.

    Args:
        chain: the transforms.
        device: where masks are.
    """

    def __init__(self, chain: Chain, device: torch.device) -> None:
        self._masks = MaskStage(device)

    def __call__(
        self,
        columns: Columns,
        finished: Finished,
        pixels_of: Callable[[ImageColumn], RaggedImages],
    ) -> None:
        """Move the targets of a batch, into `finished`.

        Its cells get masks, boxes and keypoints as tensors (with a `MultiView` a list of them), and what belongs to
        boxes that were left out, as tensors or arrays. Masks that are the same leaf in all rows, of one dtype and
        shape, also go to the whole leaves, as one tensor.

        Args:
            columns: the batch, without blocks.
            finished: has what was drawn, and takes the results.
            pixels_of: gives the pixels of masks.
        """
        for masks in columns.masks:
            self._move_masks(columns, finished, masks, pixels_of(masks))
        if columns.points:
            _move_points(columns, finished)

    def _move_masks(self, columns: Columns, finished: Finished, masks: ImageColumn, pixels: RaggedImages) -> None:
        rows = np.searchsorted(columns.images[0].row_numbers, masks.row_numbers)
        views = [self._masks(pixels, program.take(rows), masks.each_kind) for program in finished.drawn]
        each = zip(*(results_of_view for results_of_view, _ in views), strict=True)
        for (row, leaf), results in zip(masks.places(), each, strict=True):
            finished.cells[row][leaf] = finished.of_views(results)
        leaf, tensors = masks.leaf, [one for _, one in views if one is not None]
        if leaf is not None and len(tensors) == len(views):
            finished.whole[leaf] = finished.of_views(tensors)


def _move_points(columns: Columns, finished: Finished) -> None:
    """Move boxes and keypoints, and leave out what belongs to those that are left out."""
    points: dict[int, dict[int, Boxes | Keypoints]] = {row: {} for row in columns.images[0].row_numbers.tolist()}
    for leaf in sorted(columns.points):
        for row, value in columns.points[leaf].items():
            points[row][leaf] = value
    moved: list[list[Trail]] = []
    for program in finished.drawn:
        trails = [trail_of(targets.values()) for targets in points.values()]
        follow(program.records, trails)
        moved.append(trails)
    cells, left = finished.cells, []
    for (row, targets), *trails in zip(points.items(), *moved, strict=True):
        views = [moved_results(targets, trail) for trail in trails]
        cells[row] |= {leaf: finished.of_views([results[leaf] for results in views]) for leaf in targets}
        if finished.views is None and columns.fields:
            left += [(row, leaf, entries) for leaf, entries in _left(columns, row, trails[0])]
    values = [
        (cells[row][leaf] if leaf in cells[row] else unwrapped(columns.values[leaf].get(row)), entries)
        for row, leaf, entries in left
    ]
    for (row, leaf, _), value in zip(left, selected(values), strict=True):
        finished.whole.pop(leaf, None)
        cells[row][leaf] = value


def _left(columns: Columns, row: int, trail: Trail) -> Iterator[tuple[int, np.ndarray]]:
    """Return what belongs to boxes and keypoints of a row, if some were left out: the leaf, and which entries are
    left."""
    valid = None if trail.valid is None else np.flatnonzero(trail.valid)
    for leaf in entry(columns.fields, row):
        leaf, left = (leaf, trail.left) if leaf >= 0 else (~leaf, valid)
        column = columns.points.get(leaf)
        if left is not None and (column is None or not isinstance(column.get(row), Boxes)):
            yield leaf, left


def selected(entries: Iterable[tuple[Any, np.ndarray]]) -> Iterator[Any]:
    """Give some rows, int64, of each of some tensors and arrays, one after the other; all rows go to the device by one
    copy."""
    entries = list(entries)
    there = [(value.device, rows) for value, rows in entries if isinstance(value, torch.Tensor) and not value.is_cpu]
    uploaded = iter(upload_together([rows for _, rows in there], there[0][0]) if there else ())
    for value, rows in entries:
        if not isinstance(value, torch.Tensor):
            yield value[rows]
        else:
            yield value[torch.from_numpy(rows)] if value.is_cpu else value.index_select(0, next(uploaded))


def trail_of(values: Iterable[Boxes | Keypoints]) -> Trail:
    """Return the boxes and keypoints of a sample, ready to be moved."""
    trail = Trail([])
    for value in values:
        if isinstance(value, Boxes):
            trail.boxes.append(to_xyxy(value.array, value.format))
        else:
            kind = np.int64 if np.issubdtype(value.array.dtype, np.integer) else np.float64
            trail.points.append(value.array.astype(kind))
    return trail


def left_behind(chain: Chain, columns: Columns) -> str:
    """Return a warning that what is the user's own may move the images of a batch, but not its targets; or nothing.

    Raises:
        ValueError: it says that it moves pixels, and has no method for targets that there are.
    """
    kinds = {type(value) for column in columns.points.values() for value in column.values}
    kinds |= {Mask} if columns.masks else set()
    there = [(method, kind) for method, kind, target in METHODS if target in kinds]
    warnings: dict[str, None] = {}
    for call in chain.calls:
        missing = [(method, kind) for method, kind in there if not call.has(method)]
        if not missing or call.moves_pixels is False:
            continue
        (method, kind), *_ = missing
        if call.moves_pixels:
            raise ValueError(
                f"{call.called} moves pixels (moves_pixels = True) and has no {method}, but there are {kind}; write "
                f"one, or return no {kind}"
            )
        warnings[_alone(call.called) if call.per != "images" else (
            f"{call.called} has no {method}: {kind} stay where they are. If it moves pixels, write one; if not, say so "
            "in its class, with moves_pixels = False"
        )] = None  # fmt: skip
    if chain.module is not None:
        last = f"the module {chain.module_name}" if is_module(chain.module) else chain.last
        warnings[_alone(f"{last} at the end of the transforms")] = None
    return "\n".join(warnings)


def _alone(called: str) -> str:
    return (
        f"{called} gets the images alone; masks, boxes and keypoints stay where they are. If it moves pixels, use "
        "transforms of gpuload instead, which move both"
    )


def moved_results(values: Mapping[int, Boxes | Keypoints], trail: Trail) -> dict[int, torch.Tensor]:
    """Return what becomes of a sample's boxes and keypoints, by leaf, each in its own format and dtype."""
    boxes, points = iter(trail.boxes), iter(trail.points)
    results = {}
    for leaf, value in values.items():
        if isinstance(value, Boxes):
            array = from_xyxy(next(boxes), trail.format or value.format, value.array.dtype)
        else:
            array = next(points).astype(value.array.dtype)
            array = array if trail.valid is None else array[trail.valid]
        results[leaf] = torch.from_numpy(np.ascontiguousarray(array))
    return results
