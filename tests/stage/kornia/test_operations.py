"""Kornia's operations on levels: those of the reference within a few levels, the same in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.kornia.operations import OPERATIONS
from gpuload.stage.reference import operations as reference
from gpuload.transforms.program.ops import OPS, VALUES

# The greatest difference, and how many numbers of a million may differ; those of all others are the same. Contrast: the
# mean of rounded grey levels, as Pillow has it, in place of the grey level of the mean colour. Saturation: the blend of
# the reference is in another order. Hue: one step of 8 bits. Blur: weights that are no multiples of 2**-16.
APART = {"contrast": (1, 1e6), "saturation": (1, 1000), "hue": (5, 2000), "blur": (1, 2000)}


def drawn(name: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.zeros((count, VALUES))
    match name:
        case "hue":
            found[:, 0] = rng.uniform(-0.5, 0.5, count)
        case "solarize":
            found[:, 0] = rng.choice([0, 34 + 1e-14, 127.5, 255, 256, 100], count)
        case "solarize_add":
            found[:, :2] = np.stack([np.full(count, 128), rng.integers(0, 111, count)], 1)
        case "posterize":
            found[:, 0] = rng.integers(0, 9, count)
        case "blur":
            found[:, :2] = rng.choice([1, 3, 9], (count, 2))
            found[:, 2:4] = rng.uniform(0.1, 3, (count, 2))
        case "noise":
            found[:, :4] = np.column_stack([rng.uniform(-9, 9, (count, 2)) ** 2, rng.integers(0, 2**32, (count, 2))])
        case "permute":
            found[:, :3] = rng.permuted(np.tile(np.arange(3), (count, 1)), axis=1)
        case _:
            found[:, 0] = rng.choice([0, 0.3, 0.9, 1, 1.5, 2], count)
    return found


def levels(make_images, channels: int) -> torch.Tensor:
    images = [image[:31, :37] for image in make_images(5, 9, channels, 40)]
    noise = np.random.default_rng(2).integers(0, 256, (2, 31, 37, channels), np.uint8)
    flat = np.full((1, 31, 37, channels), 77, np.uint8)
    return torch.from_numpy(np.concatenate([np.stack(images), noise, flat])).permute(0, 3, 1, 2).float().contiguous()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_as_the_reference(name, channels, make_images):
    given = levels(make_images, channels)
    most, per_million = APART.get(name, (0, 0))
    for seed in range(4):
        values = drawn(name, len(given), seed)
        found = OPERATIONS[name](given.clone(), values)
        expected = reference.OPERATIONS[name](given.clone(), values)
        assert found.dtype == torch.float32
        assert (found == found.round()).all()
        assert found.min() >= 0
        assert found.max() <= 255
        difference = (found - expected).abs()
        assert difference.max() <= most
        assert (difference > 0).double().mean() * 1e6 <= per_million


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_image_does_not_depend_on_its_batch(name, make_images):
    given = levels(make_images, 3)
    values = drawn(name, len(given), 9)
    together = OPERATIONS[name](given.clone(), values)
    apart = [OPERATIONS[name](given[[row]], values[[row]]) for row in range(len(given))]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 2), (3, 3)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_small_images(name, size):
    given = torch.randint(0, 256, (4, 3, *size), generator=torch.Generator().manual_seed(1)).float()
    values = drawn(name, 4, 3)
    difference = OPERATIONS[name](given.clone(), values) - reference.OPERATIONS[name](given.clone(), values)
    assert difference.abs().max() <= APART.get(name, (0, 0))[0]


def test_all_operations_but_one_are_there():
    assert set(OPS) - set(OPERATIONS) == {"warp", "identity", "jpeg", "pillow_blur"}
