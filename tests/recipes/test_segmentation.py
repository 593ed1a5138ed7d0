"""Segmentation with palette masks, as Pascal VOC's, by torchvision's reference for it."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from helpers import peers
from PIL import Image
from recipes.common import IMAGENET_MEAN, IMAGENET_STD, SEED, draws_of, levels_apart, resized_within, shape_of, side
from recipes.replay import replayed
from torch.utils.data import DataLoader

import gpuload as gl
from gpuload import transforms as T

vision = peers.torchvision()
v2, tv_tensors = vision.transforms.v2, vision.tv_tensors
FILL = {tv_tensors.Image: 0, tv_tensors.Mask: 255}
DTYPES = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
END = [v2.ToDtype(DTYPES, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD), v2.ToPureTensor()]
OUR_END = [
    T.ToDtype({gl.Image: "float32", gl.Mask: "int64"}, scale=True),
    T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
]


def training(backend: str = "torch"):
    """torchvision's, and ours."""
    least, most, size = (side(backend, length) for length in (130, 520, 240))
    original = [
        v2.RandomResize(min_size=least, max_size=most),
        v2.RandomHorizontalFlip(0.5),
        v2.RandomCrop(size, pad_if_needed=True, fill=FILL),
        v2.ToImage(),
        *END,
    ]
    own = [
        T.RandomResize(min_size=least, max_size=most),
        T.RandomHorizontalFlip(0.5),
        T.RandomCrop(size, pad_if_needed=True, fill={gl.Image: 0, gl.Mask: 255}),
        *OUR_END,
    ]
    return v2.Compose(original), own


def evaluation(backend: str = "torch"):
    """The same."""
    size = side(backend, 240), side(backend, 320)
    return v2.Compose([v2.Resize(size), v2.ToImage(), *END]), [T.Resize(size), *OUR_END]


def palette_mask(image: Image.Image, seed: int) -> Image.Image:
    """Regions of one class, stored with a palette, as Pascal VOC's masks are: the numbers are classes, not colours."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : image.height, 0 : image.width]
    classes = np.zeros((image.height, image.width), np.uint8)
    for number in rng.integers(1, 21, 5).tolist():
        top, left = rng.uniform(0, image.height), rng.uniform(0, image.width)
        radius = rng.uniform(20, 120)
        classes[(y - top) ** 2 + (x - left) ** 2 < radius**2] = number
    mask = Image.frombytes("P", image.size, classes.tobytes())
    mask.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
    return mask


def as_png(mask: Image.Image) -> bytes:
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


class Theirs:
    def __init__(self, images, transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image = self.images[index]
        mask = tv_tensors.Mask(torch.from_numpy(np.array(palette_mask(image, index))))
        return self.transform(image, mask)


class Ours:
    """The masks are encoded files."""

    def __init__(self, images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image = self.images[index]
        return image, gl.Mask(gl.Encoded(as_png(palette_mask(image, index))))


def first_batch(images, transforms, workers: int = 0, backend: str = "torch"):
    same = {"num_workers": workers, "device": "cpu", "seed": SEED}
    with gl.Loader(Ours(images), len(images), transforms=transforms, backend=backend, **same) as loader:
        loader.set_epoch(0)
        return next(iter(loader))


def test_conversion():
    for original, own in (training(), evaluation()):
        assert T.from_torchvision(original) == own


def test_evaluation(pictures, backend):
    images, (original, own) = pictures, evaluation(backend)
    expected = next(iter(DataLoader(Theirs(images, original), len(images))))
    found = first_batch(images, own, backend=backend)
    assert shape_of(found) == shape_of(expected)
    assert levels_apart(found[0], expected[0]).max() <= resized_within(backend)
    # torchvision takes the pixel at the upper left of where a mask's new pixel lies, gpuload (and Pillow) the nearest:
    # borders of regions may lie one pixel apart.
    assert (found[1] != expected[1]).float().mean() < 0.02
    for mask, image, row in zip(found[1], images, range(len(images)), strict=True):
        nearest = palette_mask(image, row).resize(own[0].size[::-1], Image.Resampling.NEAREST)
        assert torch.equal(mask, torch.from_numpy(np.array(nearest)).long())


@pytest.mark.usefixtures("warm_torchvision")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_training(pictures, backend, workers):
    images, (original, recipe) = pictures, training(backend)
    found, masks = first_batch(images, recipe, workers, backend)
    expected = next(iter(DataLoader(Theirs(images, original), len(images))))
    assert shape_of([found, masks]) == shape_of(expected)
    _, draws = draws_of(recipe, images)
    padded = 0
    for row, image in enumerate(images):
        own = tv_tensors.Mask(torch.from_numpy(np.array(palette_mask(image, row))))
        result, mask = replayed(draws.records, row, image, own)
        assert levels_apart(found[row], result).max() <= resized_within(backend)
        outside = mask == 255
        assert torch.equal(masks[row] == 255, outside)
        padded += int(outside.any())
        assert (masks[row] != mask).float().mean() < 0.03
        assert set(masks[row].unique().tolist()) <= {*np.unique(np.array(palette_mask(image, row))).tolist(), 255}
    assert padded  # some were smaller than the crop
