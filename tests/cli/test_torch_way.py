"""What a DataLoader runs beside gpuload: torchvision's v2, or Pillow, said by name; the same work."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import originals
import pytest
import torch
from pictures import jpeg_bytes, smooth_image
from PIL import Image

import gpuload as gl
from gpuload.cli import torch_way
from gpuload.cli.torch_way import ByPillow, Pictures, by_torchvision, usual_way

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOW = [(0 - m) / s for m, s in zip(MEAN, STD, strict=True)]
HIGH = [(1 - m) / s for m, s in zip(MEAN, STD, strict=True)]


def check(image: torch.Tensor) -> None:
    assert image.shape == (3, 64, 64)
    assert image.dtype == torch.float32
    for channel in range(3):
        assert LOW[channel] - 1e-5 <= image[channel].min() < image[channel].max() <= HIGH[channel] + 1e-5


def test_pillow_does_the_same_work(jpeg_folder: Path) -> None:
    dataset = gl.ImageFolder(jpeg_folder)
    image, label = Pictures(dataset, ByPillow(64, MEAN, STD))[5]
    check(image)
    assert label == dataset.labels[5]


def test_torchvision_does_the_same_work(jpeg_folder: Path) -> None:
    originals.torchvision()
    check(Pictures(gl.ImageFolder(jpeg_folder), by_torchvision(64, MEAN, STD))[5][0])


def test_whatever_holds_the_image() -> None:
    pixels = smooth_image(60, 80, 0)
    encoded = gl.Encoded(jpeg_bytes(pixels))
    samples = [(encoded, 3), {"cls": np.int64(4), "jpg": encoded}, gl.Image(pixels), (pixels[..., :1], "a text")]
    taken: list[Image.Image] = []

    def change(picture: Image.Image) -> torch.Tensor:
        taken.append(picture)
        return torch.zeros(1)

    pictures = Pictures(samples, change)
    assert [pictures[number][1] for number in range(len(pictures))] == [3, 4, 0, 0]
    assert {(picture.mode, picture.size) for picture in taken} == {("RGB", (80, 60))}
    assert np.array_equal(np.asarray(taken[2]), pixels)
    with pytest.raises(TypeError, match="sample 0 has no image, but int, str"):
        Pictures([(3, "a")], change)[0]


def test_which_of_the_two_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torchvision": "0.99"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    def broken(*arguments: object) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torch_way.metadata, "version", version)
    monkeypatch.setattr(torch_way, "by_torchvision", lambda *arguments: len)
    assert usual_way(64, MEAN, STD) == ("torchvision v2", "torchvision 0.99", len)
    monkeypatch.setattr(torch_way, "by_torchvision", broken)
    way = usual_way(64, MEAN, STD)
    assert way.name == "Pillow"
    assert way.note == ("torchvision 0.99 cannot be imported: RuntimeError: operator torchvision::nms does not exist")
    versions.clear()
    assert usual_way(64, MEAN, STD)[:2] == ("Pillow", "torchvision is not installed")
