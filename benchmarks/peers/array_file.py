"""gpuload over a file of decoded images, which is in the page cache: shuffled, brought to the recipe's device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import gpuload as gl
from benchmarks.peers.protocol import Peer, Recipe, main

KEPT = 8192  # images, 1.6 GB of 256×256; an epoch goes round them


class Rounds:
    """Keys of an epoch: all of `count` in a random order, and again, until there are `length`."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        for start in range(0, self.length, self.count):
            yield from rng.permutation(self.count)[: self.length - start].tolist()


def stored(folder: Path, count: int, size: int) -> Path:
    """The file; written if it is not there."""
    path = folder / f"array-{count}-{size}.npy"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished.npy")
        shape = (count, size, size, 3)
        images = np.lib.format.open_memmap(unfinished, "w+", np.uint8, shape)
        for start in range(0, count, 256):
            images[start : start + 256] = np.random.default_rng(start).integers(0, 256, shape[1:], np.uint8)
        images.flush()
        unfinished.rename(path)
    return path


def build(recipe: Recipe) -> Peer:
    count = min(KEPT, recipe.samples)
    path = stored(Path(recipe.root).parent, count, recipe.size)
    loader = gl.Loader(
        gl.ArrayFile(path, labels=np.arange(count)),
        batch_size=recipe.batch_size,
        sampler=Rounds(count, recipe.samples),
        drop_last=True,
        num_workers=recipe.workers,
        device=recipe.device,
    )
    return Peer(lambda: loader, {"gpuload": gl.__version__})


if __name__ == "__main__":
    main(build, torch.uint8)
