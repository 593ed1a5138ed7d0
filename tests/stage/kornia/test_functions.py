"""Kornia's functions as they are called here leave their input as it is, and gradients flow through them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.kornia import functions
from gpuload.transforms.program.ops import VALUES

SMOOTH = (
    "brightness",
    "contrast",
    "saturation",
    "sharpness",
    "grayscale",
    "invert",
    "solarize",
    "autocontrast",
    "blur",
)


def images(seed: int, shape: tuple[int, ...] = (2, 3, 4, 5)) -> torch.Tensor:
    """Levels that are no whole numbers, far from where a definition jumps."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(10, 240, shape) + rng.uniform(0.2, 0.3, shape))


def values(name: str, count: int = 2) -> np.ndarray:
    found = np.zeros((count, VALUES))
    found[:, :4] = {"blur": (5, 3, 0.8, 1.3), "solarize": (128, 0, 0, 0)}.get(name, (0.7, 0, 0, 0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_the_definition(name):
    function = getattr(functions, name)
    given = images(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda numbers: function(numbers, values(name)), given, atol=1e-4)


def test_the_gradient_of_brightness_is_its_factor():
    given = images(2).requires_grad_()
    factors = values("brightness")
    factors[:, 0] = 0.5, 1.5
    functions.brightness(given, factors).sum().backward()
    for row, factor in enumerate(factors[:, 0]):
        torch.testing.assert_close(given.grad[row], torch.full_like(given[row], factor))


@pytest.mark.parametrize("name", functions.__all__)
def test_the_input_stays_as_it_is(name):
    given = images(3).to(torch.float32).floor()
    before, numbers = given.clone(), values(name)
    if name == "posterize":
        numbers[:, 0] = 3
    getattr(functions, name)(given, numbers)
    torch.testing.assert_close(given, before, rtol=0, atol=0)


def test_a_kernel_wider_than_the_image_mirrors_it_again_and_again():
    given, numbers = images(4, (2, 1, 3, 4)), values("blur")
    numbers[:, :4] = 31, 23, 6.0, 4.0
    found = functions.blur(given, numbers)
    tiles = torch.cat([given, given.flip(2)[:, :, 1:-1]], 2).repeat(1, 1, 9, 1)
    tiles = torch.cat([tiles, tiles.flip(3)[:, :, :, 1:-1]], 3).repeat(1, 1, 1, 9)
    wide = functions.blur(tiles, numbers)[:, :, 16:19, 24:28]
    torch.testing.assert_close(found, wide)
