"""A module at the end of the transforms: what it draws hangs on the seed, the epoch and the batch."""

from __future__ import annotations

import random

import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.backends.module import apply_module

NORMALIZE = T.Normalize([0.5] * 3, [0.5] * 3)


class Noisy(torch.nn.Module):
    def forward(self, batch):
        return batch + torch.randn(len(batch), 1, 1, 1, device=batch.device)


def test_generators_are_seeded_for_the_call_and_put_back():
    batch = torch.zeros(4, 3, 2, 2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = apply_module(Noisy(), batch, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(apply_module(Noisy(), batch, 7), first)
    assert not torch.equal(apply_module(Noisy(), batch, 8), first)


def test_they_are_put_back_when_the_module_raises():
    class Broken(torch.nn.Module):
        def forward(self, batch):
            raise OSError("no")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no"):
        apply_module(Broken(), torch.zeros(1, 3, 2, 2), 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_they_are_left_alone():
    batch = torch.zeros(4, 3, 2, 2)
    torch.manual_seed(5)
    expected = batch + torch.randn(4, 1, 1, 1)
    torch.manual_seed(5)
    assert torch.equal(apply_module(Noisy(), batch, None), expected)


def test_a_module_with_parameters_is_differentiable():
    module = torch.nn.Conv2d(3, 3, 1)
    with torch.no_grad():
        result = apply_module(module, torch.ones(2, 3, 4, 4), 0)
    result.sum().backward()
    assert module.weight.grad is not None
    module.requires_grad_(False)
    assert not apply_module(module, torch.ones(2, 3, 4, 4), 0).requires_grad


def loader(jpeg_folder, module, workers=0, **options):
    return gl.Loader(
        gl.ImageFolder(jpeg_folder),
        batch_size=8,
        shuffle=True,
        transforms=[T.RandomResizedCrop(24), NORMALIZE, module],
        num_workers=workers,
        device="cpu",
        **options,
    )


@pytest.mark.parametrize("backend", ["torch", "kornia"])
def test_kornias_own_augmentation_is_the_same_with_any_workers_and_after_a_resume(jpeg_folder, backend):
    augmentation = pytest.importorskip("kornia.augmentation")
    module = augmentation.AugmentationSequential(
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.ColorJiggle(0.3, 0.3, 0.3, 0.1, p=0.8),
        augmentation.RandomAffine(20.0, p=0.7),
        data_keys=["input"],
    )
    with loader(jpeg_folder, module, backend=backend) as first:
        torch.manual_seed(1)
        expected = [images for images, _ in first]
        again = [images for images, _ in first]
    assert not torch.equal(expected[0], again[0])  # another epoch
    assert not torch.equal(expected[0], expected[1])
    with loader(jpeg_folder, module, workers=2, backend=backend) as second:
        torch.manual_seed(2)
        random.seed(3)
        batches = iter(second)
        for images, other in zip((next(batches)[0] for _ in range(3)), expected, strict=False):
            assert torch.equal(images, other)
        state = second.state_dict()
    with loader(jpeg_folder, module, backend=backend) as third:
        third.load_state_dict(state)
        for (images, _), other in zip(third, expected[3:], strict=True):
            assert torch.equal(images, other)


def test_views_draw_each_their_own(jpeg_folder):
    views = T.MultiView([[T.CenterCrop(24)], [T.CenterCrop(24)]])
    made = gl.Loader(
        gl.ImageFolder(jpeg_folder), batch_size=8, transforms=[views, NORMALIZE, Noisy()], num_workers=0, device="cpu"
    )
    with made:
        one, other = next(iter(made))[0]
    assert not torch.equal(one, other)
