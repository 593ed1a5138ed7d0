"""torch DataLoader + torchvision v2, decoding with Pillow: what most training scripts do."""

from __future__ import annotations

import PIL

from benchmarks.peers import torch_loader
from benchmarks.peers.protocol import Peer, Recipe, main
from benchmarks.peers.torchvision_import import torchvision, v2


def build(recipe: Recipe) -> Peer:
    load = torchvision.datasets.folder.pil_loader
    return torch_loader.build(recipe, load, [v2.ToImage()], {"pillow": PIL.__version__})


if __name__ == "__main__":
    main(build)
