"""Transforming the boxes and keypoints of a batch on its device, in padded form: N×M×4 boxes and N×M×…×2 keypoints.

This module runs in the caller's process, on the current stream. The formulas are those of
`gpuload.transforms.program.targets`, which the host applies to the targets of each sample. All parameters are copied to
the device together, and the host never waits: boxes and keypoints that are dropped stay in place, and become invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import FinishedColumns
from gpuload.batches.targets import exchange, visibilities_of
from gpuload.datasets.sample import Boxes, Keypoints, from_xyxy, to_xyxy, with_values
from gpuload.stage.device import upload, upload_arrays
from gpuload.stage.noise import philox_words
from gpuload.transforms import Chain, Program
from gpuload.transforms.program.fields import displace, kernel_size
from gpuload.transforms.program.ops import Elastic, Tidy, TidyPoints
from gpuload.transforms.program.targets import (
    TARGET_RECORDS,
    Motion,
    final_format,
    motion_of,
    move_points,
    move_spans,
    valid_boxes,
    valid_points,
)
from gpuload.workers.box_fields import explain_format_conflict, leaf_transforms

__all__ = ["check_padded", "transform_padded"]

PIECE = 1 << 20  # the number of noise values that are computed together, each of which needs some 100 bytes


def check_padded(chain: Chain, values: Sequence[Any]) -> None:
    """Raise a ValueError if a chain cannot transform the padded boxes or keypoints among the values of a batch."""
    readers = [type(transform).__name__ for transform in leaf_transforms(chain) if transform.reads_boxes]
    needs = dict.fromkeys(readers, "draws its crop from the boxes")
    if chain.is_combining:
        needs[chain.group[0]] = "moves boxes from image to image"
    for method, cls in (("apply_boxes", Boxes), ("apply_keypoints", Keypoints)):
        if any(isinstance(value, cls) for value in values):
            needs |= {f"{call.display_name}.{method}": "gets arrays" for call in chain.calls if call.has(method)}
    for name, need in needs.items():
        raise ValueError(
            f"{name} {need} on the CPU, but boxes and keypoints of a batch, such as Boxes(N×M×4), are transformed on "
            f"the device without waiting for it; remove {name.partition('.')[0]}, use it in the Loader that makes the "
            "batch, or pass a list with the boxes or keypoints of each image on the CPU"
        )
    if (conflict := explain_format_conflict(chain)) is not None:
        raise ValueError(conflict)


def transform_padded(finished: FinishedColumns) -> None:
    """Transform the padded boxes and keypoints of a batch, and the visibility of keypoints, and store the results in
    the full columns. Boxes become `Boxes`, and keypoints with `valid` become `Keypoints`; other keypoints become
    tensors."""
    columns, views = finished.columns, []
    targets: dict[int, Any] = {leaf: finished.padded[leaf] for leaf in columns.points}
    visibilities = visibilities_of(columns.structure(0), targets)
    for program in finished.first_programs:
        view, is_mirrored = _move(program, targets, columns.fields_of(0))
        for leaf, target in visibilities.items():
            view[leaf] = _exchange_pairs(torch.as_tensor(finished.padded[leaf]), target, is_mirrored)
        views.append(view)
    for leaf in views[0]:
        finished.full_columns[leaf] = finished.combine_views([view[leaf] for view in views])


def _move(
    program: Program, targets: Mapping[int, Boxes | Keypoints], fields: Sequence[int]
) -> tuple[dict[int, Any], np.ndarray]:
    """Transform boxes and keypoints, keyed by leaf. Keypoints whose leaf is in `fields` become invalid with their
    boxes. Also return which images were mirrored, bool (N,)."""
    device = next(iter(targets.values())).array.device
    motions = [motion_of(record) for record in program.records if isinstance(record, TARGET_RECORDS)]
    motions = [_spread(motion, len(program)) for motion in motions if motion.changes.any()]
    is_mirrored = np.logical_xor.reduce([np.zeros(len(program), np.bool_), *(motion.mirrors for motion in motions)])
    arrays = [array for motion in motions for array in motion.arrays.values()]
    uploads = iter(upload_arrays(arrays, device) if arrays else ())
    for motion in motions:
        motion.arrays = {name: next(uploads) for name in motion.arrays}
    results, valid_of_boxes = {}, None
    for leaf, target in sorted(targets.items(), key=lambda item: isinstance(item[1], Keypoints)):
        if isinstance(target, Boxes):
            spans, valid_of_boxes = _apply(motions, target, to_xyxy(target.array, target.format).unflatten(-1, (2, 2)))
            box_format = final_format(program.records) or target.format
            boxes = from_xyxy(spans.flatten(-2), box_format, target.array.dtype)
            results[leaf] = with_values(target, array=boxes, format=box_format, valid=valid_of_boxes, canvas_hw=None)
            continue
        dtype = target.array.dtype
        points, valid = _apply(
            motions, target, target.array.to(torch.float64 if dtype.is_floating_point else torch.int64)
        )
        points = _exchange_pairs(points.to(dtype), target, is_mirrored)
        if target.valid is not None:
            valid = valid & valid_of_boxes if leaf in fields else valid
            valid = _exchange_pairs(valid, target, is_mirrored) if points.dim() == 3 else valid  # a list of points each
            points = with_values(target, array=points, valid=valid)
        results[leaf] = points
    return results, is_mirrored


def _apply(motions: Sequence[Motion], target: Boxes | Keypoints, points: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return points, or boxes as spans, N×M×2×2, after all records, and which are valid, bool (N, M) or None."""
    is_boxes = isinstance(target, Boxes)
    move: Any = move_spans if is_boxes else move_points
    valid = target.valid
    for motion in motions:
        placed = _broadcast_motion(motion, points)
        if isinstance(motion.record, Tidy if is_boxes else TidyPoints):
            is_valid = valid_boxes(placed, points) if is_boxes else valid_points(placed, points)
            while is_valid.dim() > 2:  # a group of keypoints
                is_valid = is_valid.all(-1)
            valid = valid & (is_valid | ~motion.arrays["changes"])
            continue
        moved = move(placed, points)
        is_complete = moved is points or motion.changes.all()
        points = moved if is_complete else torch.where(placed.arrays["changes"], moved, points)
    return points, valid


def _exchange_pairs(values: torch.Tensor, target: Keypoints, is_mirrored: np.ndarray) -> torch.Tensor:
    """Exchange the entries of a target's `pairs`, along the axis of its points, where `is_mirrored`, bool (N,)."""
    if not target.pairs or not is_mirrored.any():
        return values
    mirrored = upload(is_mirrored[:, None], values.device)
    return torch.where(_broadcast(mirrored, values), exchange(values, target, True), values)


def _spread(motion: Motion, count: int) -> Motion:
    """Return parameters with an entry for each image of the batch. Images without the record are not changed."""

    def spread(array: np.ndarray) -> np.ndarray:
        if motion.record.rows is None:
            return array
        result = np.zeros((count, *array.shape[1:]), array.dtype)
        result[motion.record.rows] = array
        return result

    arrays = {name: spread(array) for name, array in (motion.arrays | {"changes": motion.changes[:, None]}).items()}
    return replace(motion, arrays=arrays, changes=spread(motion.changes), mirrors=spread(motion.mirrors))


def _broadcast(array: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return an (N, k) tensor with the axes of `points` between its own."""
    return array.view(len(array), *[1] * (points.dim() - 2), array.shape[1])


def _broadcast_motion(motion: Motion, points: torch.Tensor) -> Motion:
    arrays = {name: _broadcast(array, points) for name, array in motion.arrays.items()}
    return replace(motion, arrays=arrays, displace=_displace)


def _displace(
    record: Elastic, points: torch.Tensor, keys: torch.Tensor, sizes_xy: torch.Tensor, to_pixels: Callable[[Any], Any]
) -> torch.Tensor:
    """Apply `displace` to a limited number of points at a time."""
    count = max(1, PIECE // kernel_size(max(record.sigma)) ** 2)
    arrays = (torch.broadcast_to(array, points.shape).reshape(-1, 2).split(count) for array in (points, keys, sizes_xy))
    displace_piece: Any = partial(
        displace, record, to_pixels=to_pixels, weigh=_weigh, to_array=partial(upload, device=points.device)
    )
    return torch.cat([displace_piece(*piece) for piece in zip(*arrays, strict=True)]).view(points.shape)


def _weigh(keys: torch.Tensor, indices: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weighted sums of noise; see `displace`."""
    words = philox_words(keys, (indices // 4).flatten(1)).gather(2, (indices % 4).flatten(1)[:, :, None])
    noise = ((words >> 8).to(torch.float64) * 2.0**-23 - (1 - 2.0**-24)).view(indices.shape)
    return ((noise * weights[1]).sum(-1) * weights[0]).sum(-1)
