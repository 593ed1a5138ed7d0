"""Images that are not 8-bit RGB: floats, 16 bits, and more than four channels."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers.both_loaders import gpuload_batches
from helpers.map_datasets import MapDataset
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

COUNT, CHANNELS = 22, 13


def pixels(i: int, dtype: str, channels: int = CHANNELS) -> np.ndarray:
    rng = np.random.default_rng(i)
    height, width = rng.integers(40, 70, 2)
    if dtype == "float32":
        return rng.standard_normal((height, width, channels), np.float32)
    return rng.integers(0, np.iinfo(dtype).max, (height, width, channels), dtype)


def channels_first(i: int) -> gl.Image:
    return gl.Image(torch.from_numpy(pixels(i, "float32")).permute(2, 0, 1), layout="CHW")


def grey_png(i: int) -> gl.Encoded:
    file = io.BytesIO()
    Image.fromarray(pixels(i, "uint16", 1)[:, :, 0]).save(file, "PNG")
    return gl.Encoded(file.getvalue(), mode="unchanged")


SCENES = {
    "float32": lambda i: gl.Image(pixels(i, "float32")),
    "float32 tensor": channels_first,
    "uint16": lambda i: gl.Image(pixels(i, "uint16")),
    "uint8": lambda i: gl.Image(pixels(i, "uint8")),
    "uint16 PNG": grey_png,
}


@dataclass(frozen=True)
class Gain(T.Custom):
    """A transform that multiplies each image by a random factor."""

    def draw(self, uniforms, sizes_hw):
        return 0.5 + uniforms(1)[:, 0] / 2

    def apply(self, images, params):
        return (images * params[:, None, None, None]).to(images.dtype)


CHAINS = {
    "nothing": [T.CenterCrop(32)],
    "geometry": [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.RandomRotation(20, fill=9)],
    "custom": [T.RandomCrop(32), T.ToDtype("float32", scale=True), T.RandomApply([Gain()])],
    "mixed": [
        T.RandomResizedCrop(32),
        T.ToDtype("float32", scale=True),
        T.RandomErasing(1),
        T.MixUp(labels_getter=None),
    ],
}


def batches(make, transforms, **options):
    dataset = MapDataset(lambda index: (make(index), index), COUNT)
    return gpuload_batches(dataset, transforms=transforms, **{"batch_size": 4, **options})


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("scenes", "chain"),
    [*((scenes, "geometry") for scenes in SCENES), ("uint8", "nothing"), ("uint16", "custom"), ("float32", "mixed")],
)
def test_pixels_of_any_format_do_not_depend_on_workers_or_batch_size(scenes, chain):
    all_images = torch.cat([images for images, _ in batches(SCENES[scenes], CHAINS[chain])])
    for options in ({"num_workers": 2}, {"num_workers": 2, "batch_size": 10}):
        images_with_options = torch.cat([images for images, _ in batches(SCENES[scenes], CHAINS[chain], **options)])
        assert torch.equal(all_images, images_with_options)
    first_scene = SCENES[scenes](0)
    dtype = torch.uint16 if isinstance(first_scene, gl.Encoded) else getattr(torch, first_scene.hwc.dtype.name)
    assert all_images.dtype == (torch.float32 if chain in ("custom", "mixed") else dtype)
    assert all_images.shape == (COUNT, 1 if isinstance(first_scene, gl.Encoded) else CHANNELS, 32, 32)
    assert len(all_images.flatten(1).float().mean(1).unique()) > COUNT // 2, "most images are the same"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize("scenes", ["float32", "uint16", "uint16 PNG"])
@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_images_of_any_format_without_transforms_are_unchanged(scenes, ragged, workers):
    dtype, channels = scenes.split()[0], 1 if "PNG" in scenes else CHANNELS
    for images, numbers in batches(SCENES[scenes], [], ragged=ragged, num_workers=workers):
        for row, i in enumerate(numbers.tolist()):
            expected = torch.from_numpy(pixels(i, dtype, channels).transpose(2, 0, 1).copy())
            image = images[row] if ragged == "list" else images[0][row][:, : expected.shape[1], : expected.shape[2]]
            assert torch.equal(image, expected)


def test_float_images_in_a_ring_smaller_than_a_batch_are_unchanged():
    """Parts that are moved out of a full ring are merged in memory in which each part is aligned."""
    expected = batches(lambda i: gl.Image(pixels(i, "float32", 3)), [T.CenterCrop(40)], batch_size=22)
    options = {"batch_size": 22, "num_workers": 1, "ring_bytes": 1 << 20}
    with_bytes = batches(lambda i: (gl.Image(pixels(i, "float32", 3)), b"odd" * 7), [T.CenterCrop(40)], **options)
    [((images, _bytes), _numbers)], [(expected_images, _)] = with_bytes, expected
    assert torch.equal(images, expected_images)


def test_two_images_of_a_sample_keep_their_dtypes_and_share_draws():
    def make(i):
        height, width = 50 + i, 60
        column = np.broadcast_to(np.arange(width)[None, :, None], (height, width, 1))
        return gl.Image(np.repeat(column, 3, 2).astype(np.uint8)), gl.Image(column.astype(np.float32))

    for (photos, depths), _ in batches(make, [T.RandomCrop(32), T.RandomHorizontalFlip()]):
        assert (photos.dtype, depths.dtype) == (torch.uint8, torch.float32)
        assert torch.equal(photos[:, :1].float(), depths)
        assert len(depths[:, 0, 0, 0].unique()) > 1


def test_masks_follow_float_images():
    def make(i):
        image = pixels(i, "float32", 6)
        return gl.Image(image), gl.Mask((image[:, :, 0] > 0).astype(np.int64))

    for (images, masks), _ in batches(make, [T.RandomCrop(32), T.RandomVerticalFlip()]):
        assert torch.equal(masks, (images[:, 0] > 0).long())


def test_images_of_different_dtypes_in_a_batch_raise():
    def make(i):
        return gl.Image(pixels(i, "float32" if i == 2 else "uint8", 3))

    text = "images of a batch must have the same dtype, but sample[0] of sample 0 is uint8 and sample[0] of sample 2"
    with pytest.raises(ValueError, match=re.escape(text)):
        batches(make, [T.CenterCrop(32)])
    with pytest.raises(ValueError, match=re.escape(text)):
        batches(make, [], ragged="list")


def test_color_jitter_of_float_images_raises():
    def make(i):
        return gl.Image(np.abs(pixels(i, "float32", 3)) % 1)

    text = "ColorJitter takes uint8 images, but sample[0] of sample 0 is float32; put T.ToDtype('uint8', "
    with pytest.raises(ValueError, match=re.escape(text)):
        batches(make, [T.CenterCrop(32), T.ColorJitter(0.4)])


@pytest.mark.parametrize("scenes", SCENES)
def test_random_rotate90_equals_numpys_rot90(scenes):
    turns_seen = set()
    for images, numbers in batches(SCENES[scenes], [T.RandomRotate90(p=1)], ragged="list"):
        for image, i in zip(images, numbers.tolist(), strict=True):
            dtype, channels = scenes.split()[0], 1 if "PNG" in scenes else CHANNELS
            rotated = [np.rot90(pixels(i, dtype, channels), turns) for turns in range(4)]
            is_equal = [np.array_equal(image.permute(1, 2, 0).numpy(), expected) for expected in rotated]
            assert sum(is_equal) == 1
            turns_seen.add(is_equal.index(True))
    assert turns_seen == {0, 1, 2, 3}
