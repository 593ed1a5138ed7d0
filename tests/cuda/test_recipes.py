"""Whole batches of ten recipes on a device: those of the CPU, as far apart as the table of parity says."""

from __future__ import annotations

from typing import Any

import lacking
import numpy as np
import pytest
import torch
from chains.bounds import bound, on_cuda
from stage.conftest import smooth_images

import gpuload as gl
from benchmarks.startup import recipes
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

pytestmark = pytest.mark.cuda

SIZE, COUNT, SEED = 24, 8, 3
RECIPES = recipes(SIZE)


@pytest.mark.parametrize("backend", ["torch", "fused", "kornia"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_are_those_of_the_cpu(recipe, backend):
    if backend == "kornia":
        lacking.require("kornia")
    images, chain = smooth_images(4, COUNT, low=30, high=60), T.Chain(RECIPES[recipe])

    def batches(device: str, on: str) -> torch.Tensor:
        options: dict[str, Any] = {"transforms": RECIPES[recipe], "num_workers": 2, "seed": SEED, "shuffle": False}
        with gl.Loader(images, 4, device=device, backend=on, chunk_size=2, ring_bytes=1 << 16, **options) as loader:
            return torch.cat([batch.cpu() for batch in loader])

    found, expected = batches("cuda", backend), batches("cpu", "torch")
    draws = chain.draw(epoch_key(SEED, 0), np.arange(COUNT), np.array([image.shape[:2] for image in images]))
    difference = (found.int() - expected.int()).abs()
    allowed = torch.tensor([bound(on_cuda(backend), draws, row) for row in range(COUNT)])
    assert (difference.amax(dim=(1, 2, 3)) <= allowed).all()
    assert difference.float().mean() <= 1.0
