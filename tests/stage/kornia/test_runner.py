"""Whole chains on Kornia, beside the reference: windows, sizes that differ, layouts, and what is cut into runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.kornia.runner import CPU_PIECE

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Behind each, the greatest difference in levels, and that of the mean.
CHAINS = [
    ([T.RandomCrop(28, 4, pad_if_needed=True, fill=(1, 2, 3)), T.RandomHorizontalFlip()], 0, 0),
    ([T.RandomHorizontalFlip(), T.RandomCrop(28, 4, pad_if_needed=True, padding_mode="reflect")], 0, 0),
    ([T.Pad((3, 40), padding_mode="edge"), T.RandomVerticalFlip(), T.CenterCrop((90, 20))], 0, 0),
    ([T.RandomZoomOut(fill=9, p=1), T.CenterCrop(40)], 0, 0),
    ([T.RandomRotation(40, expand=True, fill=(9, 99, 199)), T.CenterCrop((30, 40)), T.RandomVerticalFlip()], 0, 0),
    ([T.RandomAffine(40, (0.2, 0.2), (0.5, 2), 20, "bilinear", fill=50), T.RandomCrop(28)], 1, 1e-3),
    ([T.RandomPerspective(0.6, 0.7), T.Pad((3, 4), fill=7), T.RandomCrop(24)], 1, 1e-3),
    ([T.RandomResizedCrop(24), T.ColorJitter(0.4, 0.4, 0.4), T.RandomHorizontalFlip()], 2, 1),
    ([T.ColorJitter(hue=0.5), T.RandomResizedCrop(24)], 5, 0.1),
    ([T.RandomCrop(24), T.RandomErasing(1.0, value=(1, 2, 3)), T.RandomHorizontalFlip()], 0, 0),
    ([T.RandomCrop(24), T.GaussianBlur(9), T.RandomSolarize(128, 0.5)], 255, 0.1),
    ([T.RandomCrop(26), T.RandomAdjustSharpness(2), T.RandomPosterize(3), T.RandomInvert()], 0, 0),
    ([T.RandomApply([T.RandomCrop(24), T.Pad(4)], 0.5), T.CenterCrop(20)], 0, 0),
    ([T.RandomChoice([T.RandomRotation(90), T.RandomEqualize(1), T.RandomAutocontrast(1)]), T.CenterCrop(21)], 0, 0),
    ([T.RandomOrder([T.RandomGrayscale(0.5), T.RandomSolarize(99), T.RandomHorizontalFlip()]), T.RandomCrop(9)], 0, 0),
    ([T.Grayscale(1), T.RandomCrop(20)], 0, 0),
    ([T.RandomCrop(24), T.GaussianNoise(sigma=0.2), T.RandomHorizontalFlip()], 0, 0),
    ([T.RandomCrop(24), T.AugMix(interpolation="nearest")], 5, 0.1),
    ([T.Resize(40), T.RandomRotation(20, "bicubic"), T.RandomInvert(), T.Resize(20), T.CenterCrop(20)], 0, 0),
]


@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize(("transforms", "most", "mean"), CHAINS, ids=str)
def test_levels_are_those_of_the_reference(transforms, most, mean, same_size, make_images, make_batch):
    chain = T.Chain(transforms)
    images = make_images(3, 2 * CPU_PIECE + 3, low=50)
    if same_size:
        images = [np.ascontiguousarray(image[:50, :50]) for image in images]
    ragged, program = make_batch(chain, images)
    before = ragged.pixels.clone()
    expected = compile_stage(chain, device="cpu")(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia")(ragged, program)
    assert torch.equal(ragged.pixels, before)
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= most
    assert difference.double().mean() <= mean


AUTOMATIC = [
    T.RandAugment(9, 25),
    T.TrivialAugmentWide(),
    T.AutoAugment(interpolation="bilinear"),
    T.TimmRandAugment("rand-m9-n2-mstd0.5-inc1", {"interpolation": ("nearest", "bilinear")}),
]


@pytest.mark.parametrize("transform", AUTOMATIC, ids=str)
def test_automatic_augmentation(transform, make_images, make_batch):
    """A level less of a contrast may be many levels behind it; so most images are the same, and all are in the mean."""
    chain = T.Chain([T.RandomCrop(40), transform])
    ragged, program = make_batch(chain, make_images(8, 60, low=45))
    expected = compile_stage(chain, device="cpu")(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia")(ragged, program)
    difference = (found.int() - expected.int()).abs().double().mean(dim=(1, 2, 3))
    assert (difference == 0).double().mean() > 0.9
    assert difference.mean() < 0.01


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("end", [[NORMALIZE], [T.ToDtype("float32", scale=True)], [T.ToDtype("float32")]], ids=str)
def test_floats(end, memory_format, dtype, make_images, make_batch):
    chain = T.Chain([T.RandomCrop(20), *end, T.RandomErasing(0.5, value="random"), T.MixUp(num_classes=3)])
    ragged, program = make_batch(chain, make_images(1, 6))
    options = {"dtype": dtype, "memory_format": memory_format}
    expected = compile_stage(chain, device="cpu", **options)(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia", **options)(ragged, program)
    assert found.dtype == expected.dtype
    assert found.is_contiguous(memory_format=getattr(torch, memory_format))
    # One unit in the last place, of a float32 and behind it of the dtype.
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=2e-6)


@pytest.mark.parametrize("option", ["list", "pad"])
def test_results_of_different_sizes(option, make_images, make_batch):
    chain = T.Chain([T.RandomRotation(30, expand=True), T.Pad(2), NORMALIZE, T.RandomErasing(0.8)])
    ragged, program = make_batch(chain, make_images(2, 7))
    expected = compile_stage(chain, device="cpu", ragged=option)(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia", ragged=option)(ragged, program)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_bits_do_not_depend_on_the_batch(make_images, make_batch):
    transforms = [T.RandomCrop(40), T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.GaussianBlur(5), T.RandAugment(), NORMALIZE]
    chain, images = T.Chain(transforms), make_images(3, 2 * CPU_PIECE + 1, low=40)
    stage = compile_stage(chain, device="cpu", backend="kornia")
    together = stage(*make_batch(chain, images))
    for row, image in enumerate(images):
        assert torch.equal(stage(*make_batch(chain, [image], first=row))[0], together[row])
