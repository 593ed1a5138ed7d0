"""torch DataLoader + torchvision v2, decoding with simplejpeg (libjpeg-turbo) straight to a uint8 tensor.

The tensor keeps the decoder's H×W×C memory, seen as C×H×W (channels last): torch resizes that layout fastest.
"""

from __future__ import annotations

from importlib.metadata import version

import simplejpeg
import torch

from benchmarks.peers import torch_loader
from benchmarks.peers.protocol import Peer, Recipe, main


def load(path: str) -> torch.Tensor:
    with open(path, "rb") as file:
        return torch.from_numpy(simplejpeg.decode_jpeg(file.read())).permute(2, 0, 1)


def build(recipe: Recipe) -> Peer:
    return torch_loader.build(recipe, load, [], {"simplejpeg": version("simplejpeg")})


if __name__ == "__main__":
    main(build)
