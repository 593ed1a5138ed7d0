"""TurboLoader: its fused C++ pass (decode, RandomResizedCrop, flip, resize, normalise) over a tar archive.

It does less work than the other peers, and has no option to do the same. Crops are drawn as torchvision draws them, but
from an image that libjpeg has decoded at the smallest n/8 of its size at which the *full image* covers the output: a
crop of 160 pixels out of 512 becomes one of 80, which is enlarged to 224. It also decodes with the fast DCT, which
deviates by up to 17 levels. `tests/project/benchmarks/test_turboloader.py` shows both. Antialiasing is on.

It reads JPEGs only from a tar archive, which `tar_copy` makes from the folder beforehand, and returns a sample's index
in the archive, from which the label follows. It starts one thread per CPU, so the process is bound to as many CPUs as
the recipe has workers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import turboloader as library

from benchmarks.peers.protocol import Peer, Recipe
from benchmarks.photos import tar_copy


def turboloader(recipe: Recipe) -> Peer:
    if recipe.device != "cpu" or recipe.jitter or recipe.dtype != "float32" or recipe.channels_last:
        raise SystemExit(f"TurboLoader's fused pass makes float32 N×C×H×W on the CPU, without jitter; got {recipe}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: recipe.workers])
    archive, names = tar_copy(Path(recipe.root))
    classes = sorted({name.split("/")[0] for name in names})
    targets = torch.tensor([classes.index(name.split("/")[0]) for name in names])
    loader = library.DataLoader(
        str(archive),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        image_size=recipe.size,
        output_format="pytorch",
        transform=library.ImageNetNormalize(),
        train_aug=True,
        antialias=True,
    )
    epochs = itertools.count()

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader.set_epoch(next(epochs))
        for images, info in loader:
            if info["decode_failures"]:
                raise RuntimeError(f"TurboLoader could not decode {info['decode_failures']} files of {archive}")
            yield torch.from_numpy(images), targets[info["indices"]]

    return Peer(epoch, {"turboloader": library.__version__})
