"""The samples of the cases: images of many sizes, from fixed formulas or files of this folder, with masks, boxes and
keypoints. They depend on nothing but the version of the decoder.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import gpuload as gl

__all__ = ["DAMAGED", "FILES", "Samples", "Stream", "collate_to_lists"]

FILES = Path(__file__).parent / "data"
SIZES_HW = ((48, 64), (90, 52), (37, 41), (61, 88), (20, 75), (70, 70), (33, 29), (57, 43))
SMALL_SIZES_HW = ((24, 32), (31, 22), (28, 28), (36, 30))  # where kernels are interpreted
DAMAGED = b"\xff\xd8\xff\xe0 no image at all"  # begins like a JPEG


class Samples:
    """Images and targets by number.

    Args:
        small: whether to use only a few small images.

    Attributes:
        count: the number of images, which is even.
    """

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._sizes = SMALL_SIZES_HW if small else SIZES_HW
        self.count = len(self._sizes)

    def make(self, function: Callable[[int], Any], *, odd: bool = False) -> list[Any]:
        """Make a dataset of ``function(number)``; `odd` leaves out one sample, so that the last batch is smaller."""
        return [function(number) for number in range(self.count - odd)]

    def jpeg(self, number: int) -> bytes:
        """Read a file of this folder. The files have all subsamplings; one is progressive, one has an EXIF orientation,
        and one is grayscale."""
        return (FILES / f"{'small' if self.small else ''}{number}.jpg").read_bytes()

    def labeled_jpeg(self, number: int) -> Any:
        return gl.Encoded(self.jpeg(number)), number % 5

    def array(self, number: int, channels: int = 3, size: tuple[int, int] | None = None) -> np.ndarray:
        """Make a uint8 H×W×C image of waves, edges and a little noise, with integer arithmetic only."""
        height, width = size or self._sizes[number]
        rng = np.random.default_rng(100 + number)
        y, x = np.mgrid[0:height, 0:width]
        planes = []
        for _ in range(channels):
            x_factor, y_factor, shift = rng.integers(2, 12, 3).tolist()
            wave = abs((x * x_factor + y * y_factor + shift * 40) % 510 - 255)
            planes.append(np.where((x // 9 + y // 7) % 5 == 0, 255 - wave, wave))
        noise = rng.integers(-4, 5, (height, width, channels))
        return np.clip(np.stack(planes, -1) + noise, 0, 255).astype(np.uint8)

    def png(self, number: int, mode: str = "RGB") -> bytes:
        """Make a PNG file in Pillow's mode L, RGB, RGBA or P."""
        array = self.array(number, {"L": 1, "P": 1, "RGB": 3, "RGBA": 4}[mode])
        array = np.ascontiguousarray(array[:, :, 0] if array.shape[2] == 1 else array)
        image = Image.frombytes(mode, array.shape[1::-1], array.tobytes())
        if mode == "P":
            image.putpalette(np.random.default_rng(number).integers(0, 256, 768, np.uint8).tobytes())
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    def size(self, number: int) -> tuple[int, int]:
        return self._sizes[number]

    def boxes(self, number: int, box_format: str = "xyxy", dtype: Any = np.float32) -> np.ndarray:
        """Make one to five boxes (N, 4), some of them very small."""
        rng, (height, width) = np.random.default_rng(200 + number), self._sizes[number]
        count = 1 + number % 5
        start = rng.integers(0, 60, (count, 2)) * (width, height) // 100  # in percent of the image
        extent = np.maximum(rng.integers(1, 50, (count, 2)) * (width, height) // 100, 1)
        extent = np.minimum(extent, np.array((width, height)) - start)
        if box_format == "xywh":
            return np.hstack([start, extent]).astype(dtype)
        if box_format == "cxcywh":
            return np.hstack([start + extent / 2, extent]).astype(dtype)
        return np.hstack([start, start + extent]).astype(dtype)

    def masks(self, number: int, count: int, dtype: Any = np.uint8) -> np.ndarray:
        """Make N×H×W masks with three discs each, of random labels."""
        rng, (height, width) = np.random.default_rng(300 + number), self._sizes[number]
        y, x = np.mgrid[0:height, 0:width]
        masks = np.zeros((count, height, width), dtype)
        for mask in masks:
            for value in rng.integers(1, 100, 3).tolist():
                top, left, radius = int(rng.integers(height)), int(rng.integers(width)), int(rng.integers(5, 20))
                mask[(y - top) ** 2 + (x - left) ** 2 < radius**2] = value
        return masks

    def points(self, number: int, count: int) -> np.ndarray:
        """Make keypoints (N, 2), some of them outside the image."""
        height, width = self._sizes[number]
        return np.random.default_rng(400 + number).integers(-3, 100, (count, 2)) * (width, height) / np.float32(97)

    def scene(self, number: int, box_format: str = "xyxy", *, masks: bool = False, points: bool = False) -> Any:
        """Make an image with a dict of boxes, labels and, optionally, masks and keypoints."""
        target: dict[str, Any] = {"boxes": gl.Boxes(self.boxes(number, box_format), box_format)}
        count = len(target["boxes"].array)
        target["labels"] = np.arange(1, count + 1)
        target["image_id"] = number
        if masks:
            target["masks"] = gl.Mask(self.masks(number, count, np.bool_))
        if points:
            target["keypoints"] = gl.Keypoints(self.points(number, 2 * count).reshape(count, 2, 2))
        return gl.Encoded(self.png(number)), target


class Stream:
    """An iterable dataset, whose samples several workers share."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        return iter(self.samples if info is None else self.samples[info.id :: info.num_workers])


def collate_to_lists(samples: list[Any]) -> Any:
    return {"images": [image for image, _ in samples], "labels": [label for _, label in samples], "count": len(samples)}
