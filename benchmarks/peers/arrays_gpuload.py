"""gpuload over arrays in memory, brought to the recipe's device."""

from __future__ import annotations

import torch

import gpuload as gl
from benchmarks.peers.arrays import Arrays
from benchmarks.peers.protocol import Peer, Recipe, main


def build(recipe: Recipe) -> Peer:
    loader = gl.Loader(
        Arrays(recipe.samples, recipe.size),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=recipe.workers,
        device=recipe.device,
    )
    return Peer(lambda: loader, {"gpuload": gl.__version__})


if __name__ == "__main__":
    main(build, torch.uint8)
