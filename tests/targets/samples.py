"""Samples with targets, and a loader that makes a batch of them."""

from __future__ import annotations

import numpy as np
from helpers.generated_images import encode
from helpers.map_datasets import MapDataset

import gpuload as gl


def only_batch(function, length=3, **options):
    options = {"device": "cpu", "num_workers": 0, "batch_size": length, **options}
    with gl.Loader(MapDataset(function, length), **options) as loader:
        [batch] = list(loader)
    return batch


def image(height=40, width=50) -> gl.Image:
    return gl.Image(pixels(height, width))


def pixels(height=40, width=50) -> np.ndarray:
    return np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)


def boxes(count: int) -> np.ndarray:
    return np.array([[5, 5, 15 + n, 20] for n in range(count)], np.float32).reshape(count, 4)


def png(array: np.ndarray, **options) -> gl.Encoded:
    return gl.Encoded(encode(array, "PNG", **options), source="mask.png")
