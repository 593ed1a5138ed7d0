"""Each kind of record on DALI against the reference, on real photographs and made-up pictures of many sizes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.stage import compile_stage

# What DALI does to the level: the mean and the greatest difference. One level apart is a float near a whole number.
EXACT = {
    "crop": [T.RandomCrop(80, padding=6, pad_if_needed=True, fill=(1, 2, 3))],
    "crop with the border repeated": [T.RandomCrop(80, padding=6, pad_if_needed=True, padding_mode="edge")],
    "pad": [T.Pad((3, 4, 5, 6), fill=7)],
    "flips": [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomHorizontalFlip()],
    "crops of flips": [T.RandomHorizontalFlip(), T.RandomCrop(30, pad_if_needed=True), T.RandomVerticalFlip()],
    "contrast": [T.ColorJitter(contrast=0.8)],
    "hue": [T.ColorJitter(hue=0.5)],
    "sharpness": [T.RandomAdjustSharpness(2.0, 0.7)],
    "solarize": [T.RandomSolarize(100.5, 0.6)],
    "posterize": [T.RandomPosterize(3, 0.6)],
    "invert": [T.RandomInvert()],
    "erase levels": [T.RandomErasing(0.8, value=(3, 4, 5), max_count=3), T.RandomHorizontalFlip()],
}
CLOSE = {
    "brightness": [T.ColorJitter(brightness=0.8)],
    "saturation": [T.ColorJitter(saturation=0.8)],
    "gray": [T.Grayscale(3)],
    "one channel": [T.Grayscale()],
    "autocontrast": [T.RandomAutocontrast(0.7)],
    "blur": [T.GaussianBlur(23, (0.1, 2.0))],
    "blur, wide and low, beyond the image": [T.GaussianBlur((5, 61), (5.0, 8.0))],
    "a crop behind what needs all": [T.GaussianBlur(3), T.CenterCrop(20)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_same_levels(name, compare, images):
    compared = compare(EXACT[name], images)
    assert compared.native == ["dali"]
    assert compared.mean < 1e-4
    assert compared.most <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSE)
def test_a_level_in_a_few_hundred(name, compare, images):
    compared = compare(CLOSE[name], images)
    assert compared.native == ["dali"]
    assert compared.mean < 0.004
    assert compared.most <= 1


@pytest.mark.slow
def test_color_jitter_has_each_samples_order(compare, images):
    compared = compare([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], images * 2)
    assert compared.native == ["dali"]
    assert compared.mean < 0.01
    assert compared.most <= 12  # a level in the saturation of what is nearly grey, whose hue is turned next


@pytest.mark.parametrize(
    ("transforms", "mean", "most"),
    [
        ([T.Resize((64, 80))], 0.25, 1),
        ([T.Resize((9, 7))], 0.3, 1),
        ([T.RandomResizedCrop(48)], 0.25, 1),
        ([T.ScaleJitter((64, 64))], 0.25, 1),
        ([T.Resize((64, 80), "bicubic")], 0.02, 2),
        ([T.Resize((210, 280), "bicubic")], 0.02, 2),
        ([T.Resize((40, 50), "random")], 0.2, 2),
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


@pytest.mark.parametrize("fill", [0, (9, 100, 200)])
def test_warps(fill, compare, images):
    turned = compare([T.RandomRotation(40, "bilinear", fill=fill)], images)
    moved = compare([T.RandomAffine(20, (0.1, 0.2), (0.7, 1.3), 10, interpolation="bilinear", fill=fill)], images)
    for compared in (turned, moved):
        assert compared.native == ["dali"]
        assert compared.mean < 0.02
        # Which pixels at the border are inside is found in float32, and in float64 by the reference.
        assert np.mean([float((image > 1).double().mean()) for image in compared.apart]) < 2e-4


def test_warps_by_the_nearest_pixel(compare, images):
    """Places come in 16.16 fixed point in Pillow, so a pixel in some hundreds is that beside it."""
    compared = compare([T.RandomRotation(40, fill=7)], images)
    assert compared.native == ["dali"]
    assert np.mean([float((image > 0).double().mean()) for image in compared.apart]) < 0.01


class Bent(T.RandomRotation):
    """Its maps are not affine."""

    def draw(self, uniforms, sizes_hw):
        drawn = super().draw(uniforms, sizes_hw)
        drawn.coefficients[1:2, 6:] = 0, 0.25
        return drawn


def test_maps_that_are_not_affine_are_refused(compare, make_images):
    text = (
        "DALI's warp is affine, but Bent drew the coefficients g, h = [0.0, 0.25] for row 1 of the batch, "
        "which must be 0; use another backend"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        compare([Bent(30)], make_images(4, 3))


@pytest.mark.slow
def test_branches(compare, images):
    jitter = T.ColorJitter(0.4, 0.4, 0.4)
    for transforms in (
        [T.RandomApply([jitter], p=0.5)],
        [T.RandomChoice([T.Grayscale(3), jitter, T.RandomHorizontalFlip(1.0), T.Identity()])],
        [T.RandomOrder([T.RandomHorizontalFlip(), jitter, T.GaussianBlur(5)])],
        [T.RandomApply([T.RandomApply([T.RandomInvert(1.0)], p=0.5), T.RandomVerticalFlip(1.0)], p=0.5)],
    ):
        compared = compare(transforms, images)
        assert compared.native == ["dali"]
        assert compared.mean < 0.01
        assert compared.most <= 3


def test_branches_of_other_sizes(compare, images):
    compared = compare([T.RandomApply([T.CenterCrop(20)], p=0.5), T.RandomChoice([T.Pad(3), T.Identity()])], images)
    assert compared.native == ["dali"]
    assert len({image.shape for image in compared.ours}) > 5
    assert compared.most == 0


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_images(channels, compare, make_images):
    grey = make_images(5, 6, channels=1)
    transforms = [
        T.RandomResizedCrop(40),
        T.ColorJitter(0.4, 0.4, 0.4, 0.1),
        T.RandomErasing(value=9),
        T.GaussianBlur(5),
        T.RandomAutocontrast(),
        T.Grayscale(channels),
    ]
    compared = compare(transforms, grey)
    assert compared.native == ["dali"]
    assert compared.ours[0].shape[0] == channels
    assert compared.mean < 1


@pytest.mark.parametrize("channels", [2, 4])
def test_images_of_other_channels(channels, compare, make_images):
    compared = compare(
        [T.Resize((40, 50)), T.CenterCrop(30), T.RandomVerticalFlip()], make_images(6, 5, channels=channels)
    )
    assert compared.native == ["dali"]
    assert compared.most <= 1


def test_tiny_images(compare):
    """Sharpness and blur of images that are smaller than their kernels, and sizes of one pixel."""
    rng = np.random.default_rng(1)
    tiny = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((1, 1), (2, 5), (7, 2), (3, 3), (1, 40))]
    transforms = [T.RandomAdjustSharpness(1.7, 1.0), T.ColorJitter(0.4, 0.4), T.GaussianBlur(7), T.Pad(2)]
    compared = compare(transforms, tiny)
    assert compared.native == ["dali"]
    assert compared.most <= 2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_bits_do_not_depend_on_the_batch(interpolation, make_images, make_batch):
    chain = T.Chain([T.Resize(50, interpolation), T.RandomCrop(40)])
    noise = np.random.default_rng(0)
    images = [noise.integers(0, 256, image.shape, np.uint8) for image in make_images(4, 16, low=60)]
    stage = compile_stage(chain, device="cpu", backend="dali")
    together = stage(*make_batch(chain, images))
    for position in range(16):
        alone = stage(*make_batch(chain, images[position : position + 1], first=position))
        assert torch.equal(alone[0], together[position])
