"""gpuload over the same photographs, made cuttable."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers import gpuload
from benchmarks.peers.protocol import Peer, Recipe, main


def build(recipe: Recipe) -> Peer:
    return gpuload.build(replace(recipe, root=recipe.cuttable))


if __name__ == "__main__":
    main(build)
