"""Batches of ten recipes on a GPU equal the CPU's batches, within the bounds of the parity table or of Kornia."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chains.bounds import bound, steps_on_cuda
from helpers import lacking
from helpers.cut_batches import smooth_images

import gpuload as gl
from benchmarks.startup import recipes
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

pytestmark = pytest.mark.cuda

SIZE, COUNT, SEED = 24, 8, 3
RECIPES = recipes(SIZE)


IMAGES = smooth_images(4, COUNT, low=30, high=60)


def batches(recipe: str, device: str, backend: str) -> torch.Tensor:
    options: dict[str, Any] = {"transforms": RECIPES[recipe], "num_workers": 2, "seed": SEED, "shuffle": False}
    with gl.Loader(IMAGES, 4, device=device, backend=backend, chunk_size=2, ring_bytes=1 << 16, **options) as loader:
        return torch.cat([batch.cpu() for batch in loader])


@pytest.mark.parametrize("recipe", RECIPES)
def test_kornia_batches_of_recipes_on_a_gpu_equal_those_of_the_cpu(recipe):
    """On CUDA, resizing uses another operator, and sums another order; solarize can amplify a difference."""
    lacking.require("kornia")
    difference = (batches(recipe, "cuda", "kornia").int() - batches(recipe, "cpu", "kornia").int()).abs().float()
    assert difference.mean() <= 0.1
    assert (difference > 1).float().mean() <= 0.01


@pytest.mark.parametrize("backend", ["torch", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_of_recipes_on_a_gpu_equal_those_of_the_cpu_within_bounds(recipe, backend):
    on_gpu, expected = batches(recipe, "cuda", backend), batches(recipe, "cpu", "torch")
    sizes_hw = np.array([image.shape[:2] for image in IMAGES])
    draws = T.Chain(RECIPES[recipe]).draw(epoch_key(SEED, 0), np.arange(COUNT), sizes_hw)
    difference = (on_gpu.int() - expected.int()).abs()
    allowed = torch.tensor([bound(steps_on_cuda(backend), draws, row) for row in range(COUNT)])
    assert (difference.amax(dim=(1, 2, 3)) <= allowed).all()
    assert difference.float().mean() <= 1.0
