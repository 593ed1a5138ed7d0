"""Images whose targets can be computed from their colors: a rectangle, its mask and box, and dots for keypoints."""

from __future__ import annotations

import numpy as np

import gpuload as gl

COLOR = (200, 100, 50)  # of the rectangle
DOTS = ((0, 0, 250), (0, 250, 0), (250, 0, 250))


class Scenes:
    """A dataset of ``(image, target dict, semantic mask)``, with boxes in a format and dtype."""

    def __init__(self, length: int = 12, box_format: str = "xyxy", dtype: type = np.float32) -> None:
        self.length, self.box_format, self.dtype = length, box_format, dtype

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        image, mask, box, points = scene(index)
        boxes = as_format(box[None].astype(np.float64), self.box_format).astype(self.dtype)
        target = {
            "boxes": gl.Boxes(boxes, self.box_format),
            "labels": np.array([index]),
            "masks": gl.Mask(mask[None].astype(bool)),
            "keypoints": gl.Keypoints(points),
            "image_id": index,
        }
        return gl.Image(image), target, gl.Mask(mask)


def scene(index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return an image H×W×3, a mask H×W, a box (left, top, right, bottom) and points (3, 2)."""
    random = np.random.default_rng(index)
    height, width = 60 + int(random.integers(30)), 70 + int(random.integers(30))
    image = np.full((height, width, 3), 20, np.uint8)
    top, left = int(random.integers(5, 20)), int(random.integers(5, 20))
    bottom, right = int(random.integers(35, height - 4)), int(random.integers(40, width - 4))
    image[top:bottom, left:right] = COLOR
    points = np.array([[left + 6, top + 6], [right - 7, top + 7], [left + 8, bottom - 7]], np.float32)
    mask = np.zeros((height, width), np.uint8)
    mask[top:bottom, left:right] = 7
    for (x, y), color in zip(points.astype(int).tolist(), DOTS, strict=True):
        image[y - 2 : y + 3, x - 2 : x + 3] = color
        mask[y - 2 : y + 3, x - 2 : x + 3] = 9
    return image, mask, np.array([left, top, right, bottom]), points


def as_format(boxes: np.ndarray, box_format: str) -> np.ndarray:
    """Convert boxes (left, top, right, bottom) to a format."""
    size = boxes[:, 2:] - boxes[:, :2]
    if box_format == "xywh":
        return np.concatenate([boxes[:, :2], size], axis=1)
    return boxes if box_format == "xyxy" else np.concatenate([boxes[:, :2] + size / 2, size], axis=1)


def region(image: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Return where an image C×H×W has a color, as bool H×W."""
    return (image == np.array(color).reshape(3, 1, 1)).all(axis=0)
