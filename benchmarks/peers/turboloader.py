"""TurboLoader: its fused C++ pass (decode, RandomResizedCrop, flip, resize, normalise) over a tar archive.

It does less work than the other peers, and has no option to do as much. The crops are drawn as torchvision draws them,
but from an image that libjpeg has decoded at the least n/8 of its size at which the *whole image* covers the output: a
crop of 160 pixels out of 512 becomes one of 80, which is enlarged to 224. It also decodes with the fast DCT, which is
up to 17 levels off. `tests/project/benchmarks/test_turboloader.py` shows both. It is asked for antialiasing.

It reads JPEGs from a tar archive only, which `tar_copy` makes of the folder beforehand, and gives a sample's place in
it, from which the label follows. It has a thread for each CPU, so the process is bound to as many CPUs as workers.
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
        for images, about in loader:
            if about["decode_failures"]:
                raise RuntimeError(f"TurboLoader could not decode {about['decode_failures']} files of {archive}")
            yield torch.from_numpy(images), targets[about["indices"]]

    return Peer(epoch, {"turboloader": library.__version__})
