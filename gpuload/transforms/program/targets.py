"""Moves boxes and keypoints together with their image.

A point is (x, y) in pixels, measured from the top left corner of the image; the centre of pixel (0, 0) is at (½, ½).
Boxes are (left, top, right, bottom). A warp moves a box's four corners and returns their bounding box. As in
torchvision, boxes are clipped to the image after crops, padding and warps, but not after a flip or a plain resize.
Keypoints are never clipped; a flip treats them as pixel indices (x becomes width − 1 − x), as in torchvision.

All computations are in float64. Integer coordinates are truncated to integers after each transform, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuload.transforms.program.fields import displace
from gpuload.transforms.program.ops import (
    Box,
    Call,
    Clamp,
    ClampPoints,
    Elastic,
    Flip,
    Record,
    Reformat,
    Tidy,
    TidyPoints,
    Turn,
    Warp,
    map_params,
)

__all__ = ["SampleTargets", "apply_records", "move_boxes"]

TARGET_RECORDS = (Box, Call, Clamp, ClampPoints, Elastic, Flip, Reformat, Tidy, TidyPoints, Turn, Warp)
CORNERS = [[0, 1], [2, 1], [2, 3], [0, 3]]  # the indices of (x, y) of each corner in a box


@dataclass(slots=True, eq=False)
class SampleTargets:
    """The current boxes and keypoints of one sample while the records of a chain are applied.

    Attributes:
        boxes: one array per `Boxes` of the sample, float64 or int64 (n, 4).
        points: one array per `Keypoints` of the sample, float64 or int64 (…, 2).
        format: the box format set by `ConvertBoundingBoxFormat`; None means unchanged.
        kept_indices: int64 (n,), the indices of the original boxes that remain; None means all.
        valid: bool (n,), whether each keypoint, or group of keypoints, remains; None means that all remain.
    """

    boxes: list[np.ndarray]
    points: list[np.ndarray] = field(default_factory=list)
    format: str | None = None
    kept_indices: np.ndarray | None = None
    valid: np.ndarray | None = None

    def filter_boxes(self, mask: np.ndarray) -> None:
        """Drop the boxes where `mask`, bool (n,), is False."""
        if not mask.all():
            self.kept_indices = np.flatnonzero(mask) if self.kept_indices is None else self.kept_indices[mask]
            self.boxes = [boxes[mask] for boxes in self.boxes]


def move_boxes(records: Iterable[Record], boxes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return each sample's boxes after applying the records."""
    samples = [SampleTargets([array]) for array in boxes]
    apply_records(records, samples)
    return [sample.boxes[0] for sample in samples]


def apply_records(records: Iterable[Record], samples: Sequence[SampleTargets]) -> None:
    """Apply the records to each sample's boxes and keypoints, in place."""
    for record in records:
        if isinstance(record, TARGET_RECORDS):
            rows = range(len(samples)) if record.rows is None else record.rows.tolist()
            for i, row in enumerate(rows):
                _apply_record(record, i, samples[row])


def _apply_record(record: Record, i: int, sample: SampleTargets) -> None:
    """Apply a record to the targets of one sample; `i` is the sample's index in the record's arrays."""
    size_hw = record.sizes_hw[i]
    match record:
        case Reformat():
            sample.format = record.format
        case Clamp():
            sample.boxes = [_clip_boxes(boxes, size_hw) for boxes in sample.boxes]
        case Tidy():
            if sample.boxes:
                sample.filter_boxes(_valid_boxes_mask(record, sample.boxes[0], size_hw))
        case Call():
            sample.boxes = [_apply_call(record, "apply_boxes", i, boxes, size_hw) for boxes in sample.boxes]
            sample.points = [_apply_call(record, "apply_keypoints", i, points, size_hw) for points in sample.points]
        case ClampPoints():
            last_xy = np.maximum(size_hw[::-1] - 1, 0)
            sample.points = [np.clip(points, 0, last_xy).astype(points.dtype) for points in sample.points]
        case TidyPoints():
            for points in sample.points:
                inside = ((points >= 0) & (points < size_hw[::-1])).all(axis=tuple(range(1, points.ndim)))
                sample.valid = inside if sample.valid is None else sample.valid & inside
        case Flip():
            if record.flipped[i]:
                _mirror(sample, record.axis, size_hw)
        case Turn():
            if record.transposed[i]:
                sample.boxes = [boxes[:, [1, 0, 3, 2]] for boxes in sample.boxes]
                sample.points = [points[..., ::-1] for points in sample.points]
                size_hw = size_hw[::-1]
            for axis in np.flatnonzero(record.flipped[i]).tolist():
                _mirror(sample, axis, size_hw)
        case Box() | Elastic() | Warp():
            if isinstance(record, Box) and record.kept_boxes is not None and sample.boxes:
                sample.filter_boxes(record.kept_boxes[i, : len(sample.boxes[0])])
            sample.boxes = [_move_boxes(record, i, boxes) for boxes in sample.boxes]
            sample.points = [_move_points(record, i, points) for points in sample.points]


def _apply_call(record: Call, method: str, i: int, points: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    """Move boxes or keypoints with a user-defined transform."""
    if not record.transform.has(method):
        return points
    height, width = size_hw.tolist()
    result = getattr(record.transform, method)(
        points.copy(), map_params(record.params, lambda array: array[i]), (height, width)
    )
    if not isinstance(result, np.ndarray) or result.shape != points.shape:
        actual = f"an array of shape {result.shape}" if isinstance(result, np.ndarray) else type(result).__name__
        raise ValueError(
            f"{record.name}.{method} must return a numpy array with the shape of its input, {points.shape}; "
            f"got {actual}"
        )
    return result.astype(points.dtype)


def _valid_boxes_mask(record: Tidy, boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    """Return a mask of the boxes that are large enough and within the image."""
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    is_large = (width >= record.min_size) & (height >= record.min_size) & (width * height >= record.min_area)
    return is_large & ((boxes >= 0) & (boxes <= np.tile(size_hw[::-1], 2))).all(axis=1)


def _mirror(sample: SampleTargets, axis: int, size_hw: np.ndarray) -> None:
    """Mirror the targets of an image of size `size_hw`: vertically for `axis` 0, horizontally for 1."""
    first, second, length = 1 - axis, 3 - axis, size_hw[axis]
    for index, boxes in enumerate(sample.boxes):
        sample.boxes[index] = moved = boxes.copy()
        moved[:, [first, second]] = length - boxes[:, [second, first]]
    for index, points in enumerate(sample.points):
        sample.points[index] = moved = points.copy()
        moved[..., first] = length - 1 - points[..., first]


def _move_boxes(record: Box | Elastic | Warp, i: int, boxes: np.ndarray) -> np.ndarray:
    if not len(boxes) or _is_unchanged(record, i):
        return boxes
    if isinstance(record, Box):
        moved = boxes - np.tile(record.box_tlhw[i, 1::-1], 2)
        if record.clips_boxes or not _covers_image(record, i):
            moved = _clip_boxes(moved, record.box_tlhw[i, 2:])
        return _scale_points(moved, record, i)
    corners = boxes[:, CORNERS]
    corners = _warp_points(record, i, corners) if isinstance(record, Warp) else displace(record, i, corners, np.ceil)
    moved = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    return _clip_boxes(moved, record.output_hw[i]).astype(boxes.dtype)


def _move_points(record: Box | Elastic | Warp, i: int, points: np.ndarray) -> np.ndarray:
    if not points.size or _is_unchanged(record, i):
        return points
    if isinstance(record, Box):
        return _scale_points(points - record.box_tlhw[i, 1::-1], record, i)
    moved = _warp_points(record, i, points) if isinstance(record, Warp) else displace(record, i, points, np.trunc)
    return moved.astype(points.dtype)


def _is_unchanged(record: Box | Elastic | Warp, i: int) -> bool:
    if isinstance(record, Box):
        return _covers_image(record, i) and np.array_equal(record.size_hw[i], record.sizes_hw[i])
    return isinstance(record, Warp) and not record.warped[i]


def _covers_image(record: Box, i: int) -> bool:
    return np.array_equal(record.box_tlhw[i], [0, 0, *record.sizes_hw[i]])


def _scale_points(points: np.ndarray, record: Box, i: int) -> np.ndarray:
    """Scale points from the box to the result. Multiply before dividing, so that results that are integers are
    exact."""
    old_size, new_size = record.box_tlhw[i, 3:1:-1], record.size_hw[i, ::-1]
    if (old_size == new_size).all():
        return points
    repeats = points.shape[-1] // 2
    return (points * np.tile(new_size, repeats) / np.tile(old_size, repeats)).astype(points.dtype)


def _warp_points(record: Warp, i: int, points: np.ndarray) -> np.ndarray:
    """Move points (…, 2) by a warp, whose coefficients map output coordinates to input coordinates.

    The adjugate of the warp's matrix is its inverse up to a factor, which the division cancels. Every operation
    here is rounded as IEEE 754 specifies. `np.linalg.inv` and `@` are not used, because their rounding depends on the
    processor's BLAS kernel, which made boxes differ between CPUs.
    """
    a, b, c, d, e, f, g, h = record.coefficients[i].tolist()
    x, y = points[..., 0].astype(np.float64), points[..., 1].astype(np.float64)
    moved = np.stack(
        [(e - f * h) * x + (c * h - b) * y + (b * f - c * e), (f * g - d) * x + (a - c * g) * y + (c * d - a * f)],
        axis=-1,
    )
    return moved / ((d * h - e * g) * x + (b * g - a * h) * y + (a * e - b * d))[..., None]


def _clip_boxes(boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    height, width = size_hw.tolist()
    return np.clip(boxes, 0, [width, height, width, height])
