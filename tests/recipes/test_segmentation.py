"""torchvision's reference for segmentation, with palette masks like those of Pascal VOC."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from helpers import peers
from PIL import Image
from recipes.comparison import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    draws_of,
    first_batch,
    levels_apart,
    resized_within,
    shape_of,
    side,
)
from recipes.replay import replay_records
from torch.utils.data import DataLoader

import gpuload as gl
from gpuload import transforms as T

vision = peers.torchvision()
v2, tv_tensors = vision.transforms.v2, vision.tv_tensors
FILL = {tv_tensors.Image: 0, tv_tensors.Mask: 255}
DTYPES = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
END = [v2.ToDtype(DTYPES, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD), v2.ToPureTensor()]
GPULOAD_END = [T.ToDtype({gl.Image: "float32", gl.Mask: "int64"}, scale=True), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def training(backend: str = "torch"):
    """Return torchvision's recipe and gpuload's."""
    min_size, max_size, size = (side(backend, length) for length in (130, 520, 240))
    original = [
        v2.RandomResize(min_size=min_size, max_size=max_size),
        v2.RandomHorizontalFlip(0.5),
        v2.RandomCrop(size, pad_if_needed=True, fill=FILL),
        v2.ToImage(),
        *END,
    ]
    chain = [
        T.RandomResize(min_size=min_size, max_size=max_size),
        T.RandomHorizontalFlip(0.5),
        T.RandomCrop(size, pad_if_needed=True, fill={gl.Image: 0, gl.Mask: 255}),
        *GPULOAD_END,
    ]
    return v2.Compose(original), chain


def evaluation(backend: str = "torch"):
    size = side(backend, 240), side(backend, 320)
    return v2.Compose([v2.Resize(size), v2.ToImage(), *END]), [T.Resize(size), *GPULOAD_END]


def palette_mask(image: Image.Image, seed: int) -> Image.Image:
    """Return a mask of circular regions, stored with a palette like Pascal VOC's: pixels are class numbers."""
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


class TorchScenes:
    def __init__(self, images, transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image = self.images[index]
        mask = tv_tensors.Mask(torch.from_numpy(np.array(palette_mask(image, index))))
        return self.transform(image, mask)


class GpuloadScenes:
    """A dataset whose masks are encoded files."""

    def __init__(self, images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image = self.images[index]
        return image, gl.Mask(gl.Encoded(as_png(palette_mask(image, index))))


def segmentation_batch(images, transforms, backend, workers: int = 0):
    return first_batch(GpuloadScenes(images), len(images), transforms, num_workers=workers, backend=backend)


def test_from_torchvision_converts_the_segmentation_presets():
    for original, chain in (training(), evaluation()):
        assert T.from_torchvision(original) == chain


def test_segmentation_evaluation_equals_torchvisions(pictures, backend):
    images, (original, chain) = pictures, evaluation(backend)
    expected = next(iter(DataLoader(TorchScenes(images, original), len(images))))
    batch = segmentation_batch(images, chain, backend)
    assert shape_of(batch) == shape_of(expected)
    assert levels_apart(batch[0], expected[0]).max() <= resized_within(backend)
    # For a mask, torchvision takes the pixel at the upper left, and gpuload (like Pillow) the nearest pixel, so borders
    # of regions may differ by one pixel.
    assert (batch[1] != expected[1]).float().mean() < 0.02
    for mask, image, row in zip(batch[1], images, range(len(images)), strict=True):
        nearest = palette_mask(image, row).resize(chain[0].size[::-1], Image.Resampling.NEAREST)
        assert torch.equal(mask, torch.from_numpy(np.array(nearest)).long())


@pytest.mark.usefixtures("warm_torchvision")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_segmentation_training_equals_torchvisions_for_the_same_draws(pictures, backend, workers):
    images, (original, chain) = pictures, training(backend)
    batch_images, masks = segmentation_batch(images, chain, backend, workers)
    torch_batch = next(iter(DataLoader(TorchScenes(images, original), len(images))))
    assert shape_of([batch_images, masks]) == shape_of(torch_batch)
    _, draws = draws_of(chain, images)
    padded_count = 0
    for row, image in enumerate(images):
        tv_mask = tv_tensors.Mask(torch.from_numpy(np.array(palette_mask(image, row))))
        expected, mask = replay_records(draws.records, row, image, tv_mask)
        assert levels_apart(batch_images[row], expected).max() <= resized_within(backend)
        outside = mask == 255
        assert torch.equal(masks[row] == 255, outside)
        padded_count += int(outside.any())
        assert (masks[row] != mask).float().mean() < 0.03
        assert set(masks[row].unique().tolist()) <= {*np.unique(np.array(palette_mask(image, row))).tolist(), 255}
    assert padded_count > 0, "no image was smaller than the crop, so padding was not tested"
