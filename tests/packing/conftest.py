"""A small folder of class folders, and packed sets of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl

from .packed_sets import COUNT, Packing


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
def packed(folder: Path, tmp_path: Path) -> Packing:
    """A function that packs the folder in this process, as several parts; in an array, images are 16 × 16."""

    def make(to: str, name: str = "set", **options: Any) -> Path:
        path = tmp_path / name
        defaults = {"workers": 0, "shard_bytes": 12_500}
        if to == "array":
            defaults |= {"short_side": 16, "shard_bytes": 1600}
        arguments = {**defaults, **options}
        gl.pack(arguments.pop("dataset", None) or gl.ImageFolder(folder), path, to=to, **arguments)
        return path

    return make
