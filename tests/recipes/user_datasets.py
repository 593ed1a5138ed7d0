"""Small datasets as users write them, and their loading."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from helpers.both_loaders import gpuload_batches
from helpers.map_datasets import MapDataset
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

HEIGHT, WIDTH = 48, 64
MOVE = [T.RandomCrop(40), T.RandomHorizontalFlip()]
HALF = T.Normalize((0.5,) * 3, (0.5,) * 3)
FLOATS = T.ToDtype("float32", scale=True)


def scene(index: int, channels: int = 3) -> np.ndarray:
    """Return an image of a bright rectangle, whose position depends on the index."""
    levels = np.zeros((HEIGHT, WIDTH, channels), np.uint8)
    top, left = np.random.default_rng(index).integers(5, 20, 2)
    levels[top : top + 20, left : left + 24] = 200
    return levels


def mask(index: int) -> np.ndarray:
    return (scene(index)[:, :, 0] > 100).astype(np.uint8)


def box(index: int) -> np.ndarray:
    rows, columns = np.nonzero(mask(index))
    return np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float32)


def picture(index: int) -> Image.Image:
    return Image.fromarray(scene(index))


def chw(index: int) -> torch.Tensor:
    return torch.from_numpy(scene(index)).permute(2, 0, 1)


def bands(index: int) -> np.ndarray:
    return np.repeat(scene(index)[:, :, :1], 13, axis=2).astype(np.float32) / 200


def png16(index: int, **options: Any) -> gl.Encoded:
    file = io.BytesIO()
    Image.fromarray(scene(index)[:, :, 0].astype(np.uint16) * 256).save(file, "PNG")
    return gl.Encoded(file.getvalue(), **options)


def detection(index: int) -> Any:
    return scene(index), {"boxes": gl.Boxes(box(index)), "labels": np.ones(1, int), "masks": gl.Mask(mask(index)[None])}


def load(data: Any, transforms: Any = MOVE, *, batch_size: int | None = 4, workers: int = 0, **options: Any) -> list:
    dataset = MapDataset(data, 8) if callable(data) else data
    return gpuload_batches(dataset, batch_size, transforms=transforms, num_workers=workers, **options)


def scenes_and_masks(index):
    return scene(index), gl.Mask(mask(index))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, shared: bool) -> None:
        self.shared = shared

    def __iter__(self):
        info = gl.get_worker_info()
        for i in range(16):
            if not self.shared or i % info.num_workers == info.id:
                yield i
