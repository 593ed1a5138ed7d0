"""gpuload, with its own worker processes and the stage on the CPU."""

from __future__ import annotations

from importlib.metadata import version

import gpuload as gl
from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe, main
from gpuload import transforms as T


def build(recipe: Recipe) -> Peer:
    loader = gl.Loader(
        gl.ImageFolder(recipe.root),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        transforms=[T.RandomResizedCrop(recipe.size), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)],
        num_workers=recipe.workers,
        device="cpu",
    )
    return Peer(lambda: loader, {"gpuload": version("gpuload")})


if __name__ == "__main__":
    main(build)
