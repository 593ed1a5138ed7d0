"""Transforming the boxes and keypoints of a batch on its device, in padded form: N×M×4 boxes and N×M×…×2 keypoints.

This module runs in the caller's process, on the current stream. The formulas are those of
`gpuload.transforms.program.targets`, which the host applies to one sample after the other. All parameters are copied to
the device together, and the host never waits: boxes and keypoints that are dropped stay in place, and become invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuload.batches.targets import exchange_order
from gpuload.datasets.sample import Boxes, Keypoints, from_xyxy, make_target, to_xyxy
from gpuload.datasets.tree import dtype_of
from gpuload.stage.device import upload, upload_arrays
from gpuload.stage.noise import philox_words
from gpuload.transforms import Chain, Program
from gpuload.transforms.program.fields import displace_flat, kernel_size
from gpuload.transforms.program.ops import Elastic, Reformat, Tidy, TidyPoints
from gpuload.transforms.program.targets import (
    TARGET_RECORDS,
    Motion,
    motion_of,
    move_points,
    move_spans,
    valid_boxes,
    valid_points,
)

__all__ = ["check_padded", "exchange_pairs", "transform_padded"]

PIECE = 1 << 20  # the number of noise values that are computed together, each of which needs some 100 bytes


@dataclass(slots=True)
class Padded:
    """The current boxes or keypoints of a batch: points on the device, float64 or int64. Boxes are spans, N×M×2×2."""

    target: Boxes | Keypoints
    points: torch.Tensor
    valid: torch.Tensor | None

    @property
    def is_boxes(self) -> bool:
        return isinstance(self.target, Boxes)


def check_padded(chain: Chain, targets: Sequence[Boxes | Keypoints]) -> None:
    """Raise a ValueError if a chain cannot transform padded boxes or keypoints."""
    remedy = (
        "; remove {0}, use it in the Loader that makes the batch, or pass a list with the {1} of each image on the CPU"
    )
    lines = [transform for line in chain.lines for transform in line.transforms]
    if chain.reads_boxes or chain.is_combining:
        name = next((type(transform).__name__ for transform in lines if transform.reads_boxes), chain.group[0])
        needs = "draws its crop from the boxes" if chain.reads_boxes else "moves boxes from image to image"
        raise ValueError(
            f"{name} {needs} on the CPU, but boxes and keypoints of a batch, such as Boxes(N×M×4), are transformed on "
            "the device without waiting for it" + remedy.format(name, "boxes")
        )
    for call in chain.calls:
        for method, cls, noun in (("apply_boxes", Boxes, "boxes"), ("apply_keypoints", Keypoints, "keypoints")):
            if call.has(method) and any(isinstance(target, cls) for target in targets):
                raise ValueError(
                    f"{call.display_name}.{method} gets NumPy arrays, but {noun} of a batch are transformed on the "
                    "device without waiting for it" + remedy.format(call.display_name, noun)
                )
    if any(transform.children and Reformat in {outline.kind for outline in transform.outline} for transform in lines):
        raise ValueError(
            "ConvertBoundingBoxFormat inside another transform may convert the boxes of only some images, but all "
            "boxes of a batch have one format; put it outside"
        )
    drops_points = any(transform.drops_points for transform in lines)
    if drops_points and any(isinstance(target, Keypoints) and target.valid is None for target in targets):
        raise ValueError(
            "SanitizeKeyPoints drops keypoints, which makes keypoints of a batch invalid, but these have no valid=; "
            "pass Keypoints(N×M×…×2, valid=…), such as valid=torch.ones(N, M, dtype=torch.bool)"
        )


def transform_padded(
    program: Program, targets: Mapping[int, Boxes | Keypoints], fields: Sequence[int], device: torch.device
) -> tuple[dict[int, Any], np.ndarray]:
    """Transform the padded boxes and keypoints of a batch.

    Args:
        program: the random parameters of the batch.
        targets: the boxes and keypoints of all images, keyed by leaf.
        fields: the leaves that become invalid with their boxes.
        device: the device of the results.

    Returns:
        The transformed targets, and which images were mirrored, bool (N,). Boxes are `Boxes`, and keypoints with
        `valid` are `Keypoints`; other keypoints are tensors.
    """
    count = len(program)
    records = [record for record in program.records if isinstance(record, TARGET_RECORDS)]
    motions = [_for_all_rows(motion_of(record), count) for record in records]
    motions = [motion for motion in motions if motion.changes.any()]
    is_mirrored = np.logical_xor.reduce([np.zeros(count, np.bool_), *(motion.mirrors for motion in motions)])
    arrays = [array for motion in motions for array in motion.arrays.values()]
    uploads = iter(upload_arrays(arrays, device) if arrays else ())
    padded = {leaf: _load(target, device) for leaf, target in targets.items()}
    box_format = None
    for motion in motions:
        motion.arrays = {name: next(uploads) for name in motion.arrays}
        if isinstance(motion.record, Reformat):
            box_format = motion.record.format
        for leaf, entry in padded.items():
            _apply(motion, entry, leaf in fields, padded)
    results = {}
    for leaf, entry in padded.items():
        target, points, valid = entry.target, entry.points, entry.valid
        if isinstance(target, Boxes):
            final_format = box_format or target.format
            boxes = from_xyxy(points.flatten(-2), final_format, dtype_of(target.array))
            valid = torch.ones(boxes.shape[:2], dtype=torch.bool, device=device) if valid is None else valid
            results[leaf] = make_target(Boxes, array=boxes, format=final_format, valid=valid, draws=target.draws)
            continue
        points = points.to(getattr(torch, dtype_of(target.array)))
        points = exchange_pairs(points, target, points.dim() - 2, is_mirrored)
        if valid is not None and points.dim() == 3:  # one list of points per image
            valid = exchange_pairs(valid, target, 1, is_mirrored)
        if valid is not None:
            points = make_target(Keypoints, array=points, pairs=target.pairs, valid=valid, draws=target.draws)
        results[leaf] = points
    return results, is_mirrored


def exchange_pairs(values: torch.Tensor, target: Keypoints, axis: int, is_mirrored: np.ndarray) -> torch.Tensor:
    """Exchange the entries of a target's `pairs` along an axis of N×… values where `is_mirrored`, bool (N,)."""
    if not target.pairs or not is_mirrored.any():
        return values
    order, mirrored = upload_arrays([exchange_order(target), is_mirrored[:, None]], values.device)
    return torch.where(_broadcast(mirrored, values), values.index_select(axis, order), values)


def _apply(motion: Motion, entry: Padded, belongs_to_boxes: bool, padded: Mapping[int, Padded]) -> None:
    """Apply a record to boxes or keypoints."""
    record, changed = motion.record, motion.arrays["changes"]
    if isinstance(record, Tidy | TidyPoints):
        if isinstance(record, Tidy) and (entry.is_boxes or belongs_to_boxes):
            boxes = next(other for other in padded.values() if other.is_boxes)
            valid = valid_boxes(_broadcast_motion(motion, boxes.points), boxes.points)
        elif isinstance(record, TidyPoints) and not entry.is_boxes:
            valid = valid_points(_broadcast_motion(motion, entry.points), entry.points, 2)
        else:
            return
        valid = valid | ~changed
        if entry.valid is not None or entry.is_boxes:
            entry.valid = valid if entry.valid is None else entry.valid & valid
        return
    moved = (move_spans if entry.is_boxes else move_points)(_broadcast_motion(motion, entry.points), entry.points)
    entry.points = moved if motion.changes.all() else torch.where(_broadcast(changed, moved), moved, entry.points)


def _load(target: Boxes | Keypoints, device: torch.device) -> Padded:
    """Copy boxes or keypoints to the device."""
    array = _to_device(target.array, device)
    valid = None if target.valid is None else _to_device(target.valid, device)
    if isinstance(target, Boxes):
        return Padded(target, to_xyxy(array, target.format).unflatten(-1, (2, 2)), valid)
    return Padded(target, array.to(torch.float64 if array.is_floating_point() else torch.int64), valid)


def _to_device(value: Any, device: torch.device) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.require(value, requirements=["W"]))
    if tensor.device != device:
        tensor = (tensor.pin_memory() if tensor.is_cpu else tensor).to(device, non_blocking=True)
    return tensor.detach().as_subclass(torch.Tensor)


def _for_all_rows(motion: Motion, count: int) -> Motion:
    """Return parameters with an entry for each image of the batch."""

    def spread(array: np.ndarray) -> np.ndarray:
        array = array.astype(np.int64) if array.dtype == np.uint64 else array
        if motion.record.rows is None:
            return array
        result = np.zeros((count, *array.shape[1:]), array.dtype)
        result[motion.record.rows] = array
        return result

    arrays = motion.arrays | ({"keys": motion.record.keys} if isinstance(motion.record, Elastic) else {})
    arrays["changes"] = motion.changes[:, None]
    arrays = {name: spread(array) for name, array in arrays.items()}
    return replace(motion, arrays=arrays, changes=spread(motion.changes), mirrors=spread(motion.mirrors))


def _broadcast(array: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return an (N, k) tensor with the axes of `points` between its own."""
    return array.view(len(array), *[1] * (points.dim() - 2), array.shape[1])


def _broadcast_motion(motion: Motion, points: torch.Tensor) -> Motion:
    displace: Callable[..., Any] | None = None
    if isinstance(motion.record, Elastic):
        displace = partial(_displace, motion.record, motion.arrays["keys"], motion.arrays["size_xy"])
    arrays = {name: _broadcast(array, points) for name, array in motion.arrays.items()}
    return replace(motion, arrays=arrays, displace=displace)


def _displace(
    record: Elastic, keys: torch.Tensor, sizes_xy: torch.Tensor, points: torch.Tensor, to_pixels: Callable[[Any], Any]
) -> torch.Tensor:
    """Move N×…×2 points by an elastic deformation; `keys` and `sizes_xy` are those of all images, (N, 2)."""
    flat = points.reshape(-1, 2).to(torch.float64)
    keys, sizes_xy = (_broadcast(array, points).expand(points.shape).reshape(-1, 2) for array in (keys, sizes_xy))
    count = max(1, PIECE // kernel_size(max(record.sigma)) ** 2)
    pieces = []
    for start in range(0, len(flat), count):
        part = slice(start, start + count)
        weigh: Any = partial(_weigh, keys[part], sizes_xy[part])
        upload_constant = partial(upload, device=points.device)
        pieces.append(displace_flat(record, flat[part], sizes_xy[part], to_pixels, weigh, upload_constant))
    return torch.cat(pieces).view(points.shape) if pieces else flat.view(points.shape)


def _weigh(
    keys: torch.Tensor, sizes_xy: torch.Tensor, plane: int, rows: Any, columns: Any, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the noise of a plane, or weighted sums of it; see `displace_flat`."""
    width, height = (sizes_xy[:, axis].view(-1, *[1] * (rows.dim() - 1)) for axis in (0, 1))
    indices = plane * height * width + rows * width + columns
    words = philox_words(keys, (indices // 4).flatten(1) if indices.dim() > 1 else (indices // 4)[:, None])
    words = words.gather(2, (indices % 4).reshape(*words.shape[:2], 1)).view(indices.shape)
    noise = (words >> 8).to(torch.float64) * 2.0**-23 - (1 - 2.0**-24)
    for axis_weights in weights[::-1]:  # along x, then along y
        noise = (noise * axis_weights).sum(-1)
    return noise
