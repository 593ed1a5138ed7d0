"""Datasets that the tests pack, and the packed sets that they compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl
from gpuload.packing.manifest import open_packed

COUNT = 12
STORES = ["tar", "parquet", "lmdb", "array"]
Packing = Callable[..., Path]


class Samples:
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def small_jpeg(number: int = 0) -> gl.Encoded:
    return gl.Encoded(jpeg_bytes(smooth_image(16, 16, number)))


def pack_and_open(dataset: Any, path: Path, to: str, **options: Any) -> Any:
    """Pack a dataset without workers, and return the dataset that reads the set."""
    gl.pack(dataset, path, to=to, workers=0, **options)
    return open_packed(str(path))


def content(path: Path) -> dict[str, bytes]:
    """Return all files of a set except those that contain timestamps."""
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.is_file() and not file.name.endswith((".gpuload-index", "manifest-sources.json"))
    }
