"""How places move when an image does: the geometry of parameters, as 3×3 matrices, for boxes and keypoints.

A point is (x, y) in pixels, measured from the top left corner of the image; the centre of pixel (0, 0) is at (½, ½).
Every geometric transform is a projective map, so one matrix an image says it all. Boxes are (left, top, right, bottom);
what a map makes of one is the smallest box around its four corners, cut to the image, as torchvision has it.

Runs in workers, whose draws may hang on boxes, and in the main process; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.transforms.base import Transform
from gpuload.transforms.params import Box, Branches, Flip, Params, Warp

__all__ = ["matrix", "move", "move_boxes"]


def matrix(params: Params | None, row: int, size_hw: np.ndarray) -> np.ndarray | None:
    """The map from the input of an image to its output, float64 (3, 3); None where every point stays.

    Args:
        params: of a transform that holds no others.
        row: which image.
        size_hw: of its input.
    """
    if isinstance(params, Box):
        top, left, height, width = params.box_tlhw[row].tolist()
        new_height, new_width = params.size_hw[row].tolist()
        across, down = new_width / width, new_height / height
        return np.array([[across, 0, -left * across], [0, down, -top * down], [0, 0, 1.0]])
    if isinstance(params, Flip):
        if not params.flipped[row]:
            return None
        height, width = size_hw.tolist()
        if params.axis == 1:
            return np.array([[-1.0, 0, width], [0, 1, 0], [0, 0, 1]])
        return np.array([[1.0, 0, 0], [0, -1, height], [0, 0, 1]])
    if isinstance(params, Warp):
        if not params.warped[row]:
            return None
        return np.linalg.inv(np.append(params.coefficients[row], 1.0).reshape(3, 3))
    return None


def move(points_xy: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Points (…, 2) moved by a matrix."""
    homogeneous = points_xy @ by[:, :2].T + by[:, 2]
    return homogeneous[..., :2] / homogeneous[..., 2:]


def move_boxes(
    transform: Transform, params: Any, boxes: Sequence[np.ndarray], sizes_hw: np.ndarray, after_hw: np.ndarray
) -> list[np.ndarray]:
    """The boxes of each sample after a transform; one that drops boxes leaves fewer."""
    moved = list(boxes)
    if isinstance(params, Branches):
        for rows, draws in zip(params.rows, params.draws, strict=True):
            some = [moved[row] for row in rows.tolist()]
            for number, inner in enumerate(draws.transforms):
                some = move_boxes(inner, draws[number], some, draws.sizes_hw[number], draws.sizes_hw[number + 1])
            for row, found in zip(rows.tolist(), some, strict=True):
                moved[row] = found
        return moved
    for row, found in enumerate(moved):
        kept = transform.keeps(params, row, found)
        if kept is not None:
            found = found[kept]
        by = matrix(params, row, sizes_hw[row])
        if by is not None and len(found):
            corners = move(found[:, [[0, 1], [2, 1], [2, 3], [0, 3]]], by)
            found = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
            height, width = after_hw[row].tolist()
            found = np.clip(found, 0, [width, height, width, height])
        moved[row] = found
    return moved
