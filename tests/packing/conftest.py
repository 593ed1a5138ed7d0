"""A small folder of class folders, and the contents of packed sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl

COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """images/class/*.jpg: 12 images of two sizes in 3 classes."""
    root = tmp_path / "images"
    for number in range(COUNT):
        path = root / ("ant", "bee", "cät")[number % 3] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(smooth_image(24 + 8 * (number % 2), 48, number)))
    return root


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that packs the folder in this process, as several shards."""

    def make(to: str, name: str = "set", **options: Any) -> Path:
        path = tmp_path / name
        arguments = {"workers": 0, "shard_bytes": 12_500, **options}
        gl.pack(arguments.pop("dataset", None) or gl.ImageFolder(folder), path, to=to, **arguments)
        return path

    return make


def content(path: Path) -> dict[str, bytes]:
    """Return all files of a set except those that contain timestamps."""
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.is_file() and not file.name.endswith((".gpuload-index", "manifest-sources.json"))
    }
