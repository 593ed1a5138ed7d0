"""torch's DataLoader over arrays in memory."""

from __future__ import annotations

import torch

from benchmarks.peers.arrays import Arrays
from benchmarks.peers.protocol import Peer, Recipe, main


def build(recipe: Recipe) -> Peer:
    loader = torch.utils.data.DataLoader(
        Arrays(recipe.samples, recipe.size),  # pyright: ignore[reportArgumentType]  a map dataset without its base
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=recipe.workers,
        persistent_workers=True,
    )
    return Peer(lambda: loader, {})


if __name__ == "__main__":
    main(build, torch.uint8)
