"""How boxes and keypoints move when their image does.

A point is (x, y) in pixels, measured from the top left corner of the image; the centre of pixel (0, 0) is at (½, ½).
Boxes are (left, top, right, bottom); what a map makes of one is the smallest box around its four corners, cut to the
image where torchvision cuts it: after crops, padding and warps, and not after a flip or a mere resize. Keypoints are
never cut; a flip takes them as numbers of pixels (x becomes width − 1 − x), as torchvision has it.

Everything is worked out in float64. Integers stay integers: they are cut off after each transform, as torchvision does.

Runs in workers, whose draws may hang on boxes, and in the main process; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import Box, Branches, Flip, Params, Warp

__all__ = ["Trail", "follow", "move_boxes"]

CORNERS = [[0, 1], [2, 1], [2, 3], [0, 3]]


@dataclass(slots=True, eq=False)
class Trail:
    """The boxes and keypoints of one sample on their way through a chain.

    Attributes:
        boxes: for each of its leaves with boxes, float64 or int64 (n, 4).
        points: for each of its leaves with keypoints, float64 or int64 (…, 2).
        format: what a transform has said that boxes are to be given in; None: as they came.
        dropped: for each transform that left boxes out, and which of those that there were at first it left: bool (n,).
    """

    boxes: list[np.ndarray]
    points: list[np.ndarray] = field(default_factory=list)
    format: str | None = None
    dropped: list[tuple[Transform, np.ndarray]] = field(default_factory=list)
    _alive: np.ndarray | None = None

    def keep(self, transform: Transform, kept: np.ndarray) -> None:
        """Leave out the boxes that a transform does not keep."""
        if self._alive is None:
            self._alive = np.arange(len(kept))
        if kept.all():
            return
        first = np.ones(len(self._alive) if not self.dropped else len(self.dropped[0][1]), np.bool_)
        first[self._alive[~kept]] = False
        self._alive = self._alive[kept]
        self.boxes = [boxes[kept] for boxes in self.boxes]
        self.dropped.append((transform, first))


def follow(
    transforms: Iterable[Transform],
    params: Iterable[Params | None],
    sizes_hw: Sequence[np.ndarray],
    trails: Sequence[Trail],
) -> None:
    """Take the boxes and keypoints of each sample through transforms, in place.

    Args:
        transforms, params, sizes_hw: as in `gpuload.transforms.Draws`.
        trails: for each sample its own.
    """
    for number, (transform, drawn) in enumerate(zip(transforms, params, strict=True)):
        _step(transform, drawn, trails, sizes_hw[number], sizes_hw[number + 1])


def move_boxes(
    transform: Transform, params: Any, boxes: Sequence[np.ndarray], sizes_hw: np.ndarray, after_hw: np.ndarray
) -> list[np.ndarray]:
    """The boxes of each sample after a transform; one that drops boxes leaves fewer."""
    trails = [Trail([found]) for found in boxes]
    _step(transform, params, trails, sizes_hw, after_hw)
    return [trail.boxes[0] for trail in trails]


def _step(
    transform: Transform, params: Any, trails: Sequence[Trail], sizes_hw: np.ndarray, after_hw: np.ndarray
) -> None:
    if isinstance(params, Branches):
        for rows, draws in zip(params.rows, params.draws, strict=True):
            follow(draws.transforms, draws.params, draws.sizes_hw, [trails[row] for row in rows.tolist()])
        return
    geometric = isinstance(params, Box | Flip | Warp)
    if not (geometric or transform.drops_boxes or transform.clips_boxes or transform.box_format):
        return
    for row, trail in enumerate(trails):
        if transform.drops_boxes and trail.boxes:
            kept = transform.keeps(params, row, trail.boxes[0], sizes_hw[row])
            if kept is not None:
                trail.keep(transform, kept)
        if geometric:
            trail.boxes = [_moved_boxes(transform, params, row, boxes, sizes_hw[row]) for boxes in trail.boxes]
            trail.points = [_moved_points(params, row, points, sizes_hw[row]) for points in trail.points]
        if transform.clips_boxes:
            trail.boxes = [_clipped(boxes, after_hw[row]) for boxes in trail.boxes]
        trail.format = transform.box_format or trail.format


def _moved_boxes(transform: Transform, params: Any, row: int, boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    if not len(boxes):
        return boxes
    if isinstance(params, Flip):
        if not params.flipped[row]:
            return boxes
        axis = params.axis  # 1: x, 0: y
        moved = boxes.copy()
        moved[:, [1 - axis, 3 - axis]] = size_hw[axis] - boxes[:, [3 - axis, 1 - axis]]
        return moved
    if isinstance(params, Warp):
        if not params.warped[row]:
            return boxes
        corners = _projected(params, row, boxes[:, CORNERS])
        moved = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        return _clipped(moved, params.size_hw[row]).astype(boxes.dtype)
    if _stays(params, row, size_hw):
        return boxes
    moved = boxes - np.tile(params.box_tlhw[row, 1::-1], 2)
    whole = (params.box_tlhw[row] == [0, 0, *size_hw]).all()
    if transform.crops or transform.pads or not whole:
        moved = _clipped(moved, params.box_tlhw[row, 2:])
    return _scaled(moved, params, row)


def _moved_points(params: Any, row: int, points: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    if isinstance(params, Flip):
        if not params.flipped[row]:
            return points
        moved, axis = points.copy(), params.axis
        moved[..., 1 - axis] = size_hw[axis] - 1 - points[..., 1 - axis]
        return moved
    if isinstance(params, Warp):
        if not params.warped[row] or not points.size:
            return points
        return _projected(params, row, points).astype(points.dtype)
    if _stays(params, row, size_hw):
        return points
    return _scaled(points - params.box_tlhw[row, 1::-1], params, row)


def _stays(params: Box, row: int, size_hw: np.ndarray) -> bool:
    """Whether the box is the whole image, and keeps its size."""
    return bool((params.box_tlhw[row] == [0, 0, *size_hw]).all() and (params.size_hw[row] == size_hw).all())


def _scaled(points: np.ndarray, params: Box, row: int) -> np.ndarray:
    """From the size of the box to that of the result; multiplied first, so that whole numbers come out exactly."""
    before, after = params.box_tlhw[row, 3:1:-1], params.size_hw[row, ::-1]
    if (before == after).all():
        return points
    times = points.shape[-1] // 2
    return (points * np.tile(after, times) / np.tile(before, times)).astype(points.dtype)


def _projected(params: Warp, row: int, points: np.ndarray) -> np.ndarray:
    """Points (…, 2) where a warp brings them; its coefficients lead the other way."""
    by = np.linalg.inv(np.append(params.coefficients[row], 1.0).reshape(3, 3))
    homogeneous = points @ by[:, :2].T + by[:, 2]
    return homogeneous[..., :2] / homogeneous[..., 2:]


def _clipped(boxes: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    height, width = size_hw.tolist()
    return np.clip(boxes, 0, [width, height, width, height])
