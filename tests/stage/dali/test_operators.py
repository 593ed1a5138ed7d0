"""Each kind of record on DALI against the reference, on real photographs and made-up pictures of many sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.stage import compile_stage

# What DALI does to the level; and what has floats on its way, of which some lie near a whole number.
EXACT = {
    "crop": [T.RandomCrop(80, padding=6, pad_if_needed=True, fill=(1, 2, 3))],
    "pad": [T.Pad((3, 4, 5, 6), fill=7)],
    "flips": [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomHorizontalFlip()],
    "crops of flips": [T.RandomHorizontalFlip(), T.RandomCrop(30, pad_if_needed=True), T.RandomVerticalFlip()],
    "erase levels": [T.RandomErasing(0.8, value=(3, 4, 5), max_count=3), T.RandomHorizontalFlip()],
}
CLOSE = {
    "brightness": [T.ColorJitter(brightness=0.8)],
    "blur": [T.GaussianBlur(23, (0.1, 2.0))],
    "blur, wide and low, beyond the image": [T.GaussianBlur((5, 61), (5.0, 8.0))],
    "a crop behind what needs all": [T.GaussianBlur(3), T.CenterCrop(20)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_same_levels(name, compare, images):
    compared = compare(EXACT[name], images)
    assert compared.native == ["dali"]
    assert compared.most == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSE)
def test_a_level_in_a_few_hundred(name, compare, images):
    compared = compare(CLOSE[name], images)
    assert compared.native == ["dali"]
    assert compared.mean < 0.004
    assert compared.most <= 1


@pytest.mark.parametrize(
    ("transforms", "mean", "most"),
    [
        ([T.Resize((64, 80))], 0.25, 1),
        ([T.Resize((9, 7))], 0.3, 1),
        ([T.RandomResizedCrop(48)], 0.25, 1),
        ([T.ScaleJitter((64, 64))], 0.25, 1),
        ([T.Resize((210, 280))], 0.25, 1),
        ([T.Resize(72), T.CenterCrop((72, 40))], 0.25, 1),  # two borders are seen, and two are not
    ],
)
def test_resampling(transforms, mean, most, compare, images):
    """A level, since DALI does not round between columns and rows; at the borders too."""
    compared = compare(transforms, images)
    assert compared.native == ["dali"]
    assert compared.mean < mean
    assert compared.most <= most


def test_windows_of_what_is_resampled(compare, images):
    """Only the part of the image is there that the crop is made from; nothing of it is at a border."""
    compared = compare([T.Resize(72), T.CenterCrop(40), T.RandomHorizontalFlip()], images)
    assert compared.mean < 0.25
    assert compared.most <= 1


def test_a_part_of_the_image_gives_what_the_whole_gives(compare, images):
    transforms = [T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.RandomCrop(30)]
    part, whole = (compare(transforms, images, whole=whole) for whole in (False, True))
    for one, other in zip(part.ours, whole.ours, strict=True):
        assert int((one.int() - other.int()).abs().max()) <= 1


BRANCHES = [
    [T.RandomApply([T.ColorJitter(0.4)], p=0.5)],
    [T.RandomChoice([T.ColorJitter(0.4), T.RandomHorizontalFlip(1.0), T.RandomErasing(1.0, value=4), T.Identity()])],
    [T.RandomOrder([T.RandomHorizontalFlip(), T.ColorJitter(0.4), T.RandomErasing(0.5)])],
    [T.RandomApply([T.RandomApply([T.ColorJitter(0.4)], p=0.5), T.RandomVerticalFlip(1.0)], p=0.5)],
    [T.RandomApply([T.CenterCrop(20)], p=0.5), T.RandomChoice([T.Pad(3), T.Identity()])],
]


@pytest.mark.slow
@pytest.mark.parametrize("transforms", BRANCHES, ids=str)
def test_a_branch_leaves_all_other_images_as_they_are(transforms, compare, images):
    """They go through its operators, with what changes nothing."""
    compared = compare(transforms, images * 2)
    assert compared.native == ["dali"]
    assert compared.mean < 1e-4
    assert compared.most <= 1


@pytest.mark.slow
def test_branches_that_resize_or_blur(compare, images):
    """An image that is in neither has the bits that it came with; and a part of an image has the place that it had."""
    transforms = [T.RandomChoice([T.Resize(40), T.Identity(), T.GaussianBlur(5)]), T.RandomApply([T.CenterCrop(30)])]
    compared = compare(transforms, images * 3)
    assert compared.native == ["dali"]
    assert compared.most <= 1
    assert sum(bool(apart.max() == 0) for apart in compared.apart) >= len(images) // 2


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_images(channels, compare, make_images):
    grey = make_images(5, 6, channels=1)
    transforms = [
        T.RandomResizedCrop(40),
        T.ColorJitter(0.4),
        T.RandomErasing(value=9),
        T.GaussianBlur(5),
        T.Grayscale(channels),
    ]
    compared = compare(transforms, grey)
    assert compared.native == ["dali", "torch"]
    assert compared.ours[0].shape[0] == channels
    assert compared.most <= 3


@pytest.mark.parametrize("channels", [2, 4])
def test_images_of_other_channels(channels, compare, make_images):
    compared = compare(
        [T.Resize((40, 50)), T.CenterCrop(30), T.RandomVerticalFlip()], make_images(6, 5, channels=channels)
    )
    assert compared.native == ["dali"]
    assert compared.most <= 1


def test_tiny_images(compare):
    """A blur of images that are smaller than their kernels, and sizes of one pixel."""
    rng = np.random.default_rng(1)
    tiny = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((1, 1), (2, 5), (7, 2), (3, 3), (1, 40))]
    compared = compare([T.ColorJitter(0.4), T.GaussianBlur(7), T.Pad(2)], tiny)
    assert compared.native == ["dali"]
    assert compared.most <= 1


# All of DALI's operators, also in branches, which other images go through.
ALONE = [
    [T.RandomChoice([T.Resize(60), T.Resize((40, 41))]), T.RandomCrop(40)],  # of some images a border is seen
    [T.Resize(50), T.RandomCrop(40), T.GaussianBlur(5)],
    [
        T.RandomApply([T.RandomResizedCrop(50), T.ColorJitter(0.4)]),
        T.RandomApply([T.GaussianBlur(5)]),
        T.CenterCrop(40),
    ],
]


@pytest.mark.parametrize("transforms", ALONE, ids=str)
def test_an_image_comes_out_the_same_alone_and_among_256(transforms, make_images, make_batch):
    chain = T.Chain([*transforms, T.RandomErasing(), T.RandomHorizontalFlip()])
    noise = np.random.default_rng(0)
    images = [noise.integers(0, 256, image.shape, np.uint8) for image in make_images(4, 16, low=60) * 16]
    stage = compile_stage(chain, device="cpu", backend="dali")
    together = stage(*make_batch(chain, images))
    for position in range(0, 256, 9):
        alone = stage(*make_batch(chain, images[position : position + 1], first=position))
        assert torch.equal(alone[0], together[position])
