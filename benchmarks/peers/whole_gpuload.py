"""gpuload over whole images: a list of uint8 tensors, each as it was decoded."""

from __future__ import annotations

import torch

import gpuload as gl
from benchmarks.peers.protocol import Peer, Recipe, main


def build(recipe: Recipe) -> Peer:
    loader = gl.Loader(
        gl.ImageFolder(recipe.root),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        ragged="list",
        num_workers=recipe.workers,
        device="cpu",
    )
    return Peer(lambda: loader, {"gpuload": gl.__version__})


if __name__ == "__main__":
    main(build, torch.uint8)
