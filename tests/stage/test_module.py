"""A module at the end of the transforms: what it draws depends on the seed, the epoch and the batch."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.module import apply_module

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


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["torch", "kornia"])
def test_kornias_own_augmentation_is_the_same_with_any_workers_and_after_a_resume(jpeg_folder, backend):
    from kornia import augmentation

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


@pytest.mark.parametrize("backend", ["torch", "kornia"])
def test_kornias_own_definition_of_an_operation(jpeg_folder, backend):
    """A module is called with the batch as it is, so its contrast is Kornia's, not Pillow's, on every backend."""
    from kornia import augmentation, enhance

    def batch(*jitter):
        chain = [T.CenterCrop(24), *jitter, T.Normalize([0.0] * 3, [1.0] * 3)]
        options = {"transforms": chain, "num_workers": 0, "device": "cpu", "backend": backend}
        with gl.Loader(gl.ImageFolder(jpeg_folder), batch_size=8, **options) as made:
            return next(iter(made))[0]

    as_float = T.ToDtype("float32", scale=True)
    found = batch(as_float, augmentation.RandomContrast((2.0, 2.0), p=1.0))
    torch.testing.assert_close(found, enhance.adjust_contrast(batch(as_float), 2.0))
    assert (found - batch(T.ColorJitter(contrast=(2.0, 2.0)))).abs().max() > 20 / 255


def test_views_draw_each_their_own(jpeg_folder):
    views = T.MultiView([[T.CenterCrop(24)], [T.CenterCrop(24)]])
    made = gl.Loader(
        gl.ImageFolder(jpeg_folder), batch_size=8, transforms=[views, NORMALIZE, Noisy()], num_workers=0, device="cpu"
    )
    with made:
        one, other = next(iter(made))[0]
    assert not torch.equal(one, other)


class Shifted(torch.nn.Module):
    __module__ = "kornia.augmentation"

    def forward(self, batch):
        return batch.roll(1, -1)


def with_targets(sample, module, **options):
    options = {"num_workers": 0, "device": "cpu", **options}
    return gl.Loader([sample] * 4, batch_size=2, transforms=[NORMALIZE, *module], **options)


IMAGE = np.zeros((8, 8, 3), np.uint8)
TARGETS = {
    "masks": (IMAGE, gl.Mask(IMAGE[..., 0])),
    "boxes": (IMAGE, {"boxes": gl.Boxes([[1, 1, 3, 3]], "xyxy"), "labels": np.array([1])}),
    "keypoints": (IMAGE, gl.Keypoints([[1, 1]])),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("collate_fn", [None, list])
def test_targets_that_do_not_move_with_the_module_are_told_of_once(name, collate_fn):
    text = (
        "the module kornia's Shifted at the end of the transforms gets the images alone; masks, boxes and "
        "keypoints stay where they are. If it moves pixels, use transforms of gpuload instead, which move both"
    )
    with with_targets(TARGETS[name], [Shifted()], collate_fn=collate_fn) as loader:
        with pytest.warns(RuntimeWarning, match=re.escape(text)) as caught:
            assert len(list(loader)) == 2
        assert len(caught) == 1
        assert caught[0].filename == __file__
        list(loader)  # another epoch: warnings are errors


def test_the_warning_as_an_error_loses_no_batch():
    with with_targets(TARGETS["masks"], [Shifted()]) as loader:
        batches = iter(loader)
        with pytest.raises(RuntimeWarning, match="gets the images alone"):
            next(batches)
        assert len(list(batches)) == 2


@pytest.mark.parametrize(("sample", "module"), [((IMAGE, 3), [Shifted()]), (TARGETS["masks"], [])])
def test_labels_alone_or_no_module_are_nothing_to_warn_of(sample, module):
    with with_targets(sample, module) as loader:
        assert len(list(loader)) == 2
