"""How boxes and keypoints move when their image does.

A point is (x, y) in pixels, measured from the top left corner of the image; the centre of pixel (0, 0) is at (½, ½).
Boxes are (left, top, right, bottom); what a map makes of one is the smallest box around its four corners, cut to the
image where torchvision cuts it: after crops, padding and warps, and not after a flip or a mere resize. Keypoints are
never cut; a flip takes them as numbers of pixels (x becomes width − 1 − x), as torchvision has it.

Everything is worked out in float64. Integers stay integers: they are cut off after each transform, as torchvision does.

Runs in workers, whose draws may depend on boxes, and in the main process; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Box, Clamp, Flip, Record, Reformat, Tidy, Warp

__all__ = ["Trail", "follow", "move_boxes"]

CORNERS = [[0, 1], [2, 1], [2, 3], [0, 3]]


@dataclass(slots=True, eq=False)
class Trail:
    """The boxes and keypoints of one sample on their way through a chain.

    Attributes:
        boxes: for each of its leaves with boxes, float64 or int64 (n, 4).
        points: for each of its leaves with keypoints, float64 or int64 (…, 2).
        format: what a transform has said that boxes are to be given in; None: as they came.
        left: int64 (n,), which boxes are left, of those that there were at first; None: all.
    """

    boxes: list[np.ndarray]
    points: list[np.ndarray] = field(default_factory=list)
    format: str | None = None
    left: np.ndarray | None = None

    def keep(self, kept: np.ndarray) -> None:
        """Leave out the boxes that are not kept, bool (n,)."""
        if not kept.all():
            self.left = np.flatnonzero(kept) if self.left is None else self.left[kept]
            self.boxes = [boxes[kept] for boxes in self.boxes]


def follow(program: Program, trails: Sequence[Trail]) -> None:
    """Take the boxes and keypoints of each sample through a program, in place."""
    _follow(program.records, trails)


def move_boxes(records: Iterable[Record], boxes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The boxes of each sample after some records; what drops boxes leaves fewer."""
    trails = [Trail([found]) for found in boxes]
    _follow(records, trails)
    return [trail.boxes[0] for trail in trails]


def _follow(records: Iterable[Record], trails: Sequence[Trail]) -> None:
    for record in records:
        if isinstance(record, Box | Clamp | Flip | Reformat | Tidy | Warp):
            rows = range(len(trails)) if record.rows is None else record.rows.tolist()
            for place, row in enumerate(rows):
                _step(record, place, trails[row])


def _step(record: Box | Clamp | Flip | Reformat | Tidy | Warp, place: int, trail: Trail) -> None:
    """Take the targets of one sample through a record, in whose arrays it stands at a place."""
    size_hw = record.sizes_hw[place]
    match record:
        case Reformat():
            trail.format = record.format
        case Clamp():
            trail.boxes = [_clipped(boxes, size_hw) for boxes in trail.boxes]
        case Tidy():
            if trail.boxes:
                trail.keep(_tidy(record, trail.boxes[0], size_hw))
        case _:
            if isinstance(record, Box) and record.kept is not None and trail.boxes:
                trail.keep(record.kept[place, : len(trail.boxes[0])])
            trail.boxes = [_moved_boxes(record, place, boxes, size_hw) for boxes in trail.boxes]
            trail.points = [_moved_points(record, place, points, size_hw) for points in trail.points]


def _tidy(record: Tidy, boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    """Which boxes are large enough, and within the image."""
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    large = (width >= record.min_size) & (height >= record.min_size) & (width * height >= record.min_area)
    return large & ((boxes >= 0) & (boxes <= np.tile(size_hw[::-1], 2))).all(axis=1)


def _moved_boxes(record: Box | Flip | Warp, row: int, boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    if not len(boxes):
        return boxes
    if isinstance(record, Flip):
        if not record.flipped[row]:
            return boxes
        axis = record.axis  # 1: x, 0: y
        moved = boxes.copy()
        moved[:, [1 - axis, 3 - axis]] = size_hw[axis] - boxes[:, [3 - axis, 1 - axis]]
        return moved
    if isinstance(record, Warp):
        if not record.warped[row]:
            return boxes
        corners = _projected(record, row, boxes[:, CORNERS])
        moved = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        return _clipped(moved, record.size_hw[row]).astype(boxes.dtype)
    if _stays(record, row, size_hw):
        return boxes
    moved = boxes - np.tile(record.box_tlhw[row, 1::-1], 2)
    whole = (record.box_tlhw[row] == [0, 0, *size_hw]).all()
    if record.cuts or not whole:
        moved = _clipped(moved, record.box_tlhw[row, 2:])
    return _scaled(moved, record, row)


def _moved_points(record: Box | Flip | Warp, row: int, points: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    if isinstance(record, Flip):
        if not record.flipped[row]:
            return points
        moved, axis = points.copy(), record.axis
        moved[..., 1 - axis] = size_hw[axis] - 1 - points[..., 1 - axis]
        return moved
    if isinstance(record, Warp):
        if not record.warped[row] or not points.size:
            return points
        return _projected(record, row, points).astype(points.dtype)
    if _stays(record, row, size_hw):
        return points
    return _scaled(points - record.box_tlhw[row, 1::-1], record, row)


def _stays(record: Box, row: int, size_hw: np.ndarray) -> bool:
    """Whether the box is the whole image, and keeps its size."""
    return bool((record.box_tlhw[row] == [0, 0, *size_hw]).all() and (record.size_hw[row] == size_hw).all())


def _scaled(points: np.ndarray, record: Box, row: int) -> np.ndarray:
    """From the size of the box to that of the result; multiplied first, so that whole numbers come out exactly."""
    before, after = record.box_tlhw[row, 3:1:-1], record.size_hw[row, ::-1]
    if (before == after).all():
        return points
    times = points.shape[-1] // 2
    return (points * np.tile(after, times) / np.tile(before, times)).astype(points.dtype)


def _projected(record: Warp, row: int, points: np.ndarray) -> np.ndarray:
    """Points (…, 2) where a warp brings them; its coefficients lead the other way."""
    by = np.linalg.inv(np.append(record.coefficients[row], 1.0).reshape(3, 3))
    homogeneous = points @ by[:, :2].T + by[:, 2]
    return homogeneous[..., :2] / homogeneous[..., 2:]


def _clipped(boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    height, width = size_hw.tolist()
    return np.clip(boxes, 0, [width, height, width, height])
