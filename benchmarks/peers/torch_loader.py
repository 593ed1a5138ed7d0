"""torch's DataLoader over torchvision's ImageFolder and v2 transforms: what its peers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe
from benchmarks.peers.torchvision_import import torchvision, v2

__all__ = ["build"]

Finish = Callable[[torch.Tensor], torch.Tensor]


def build(
    recipe: Recipe,
    load: Callable[[str], Any],
    to_image: list[Any],
    versions: dict[str, str],
    *,
    on_device: Finish | None = None,
) -> Peer:
    """A DataLoader whose workers `load` a path, then transform each sample by itself.

    `to_image` turns what `load` gave into a tensor, once it is cropped and flipped. `on_device`: what makes normalised
    floats of a batch of uint8 on the device; without it the workers do that too.
    """
    strengths = [recipe.jitter] * 3
    here = [
        *([v2.ColorJitter(*strengths)] if recipe.jitter else []),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD, inplace=True),  # spares an allocation: 3% of the whole
    ]
    chain = v2.Compose(
        [
            v2.RandomResizedCrop(recipe.size, antialias=True),
            v2.RandomHorizontalFlip(),
            *to_image,
            *(here if on_device is None else []),
        ]
    )
    loader = torch.utils.data.DataLoader(
        torchvision.datasets.ImageFolder(recipe.root, transform=chain, loader=load),
        batch_size=recipe.batch_size,
        shuffle=True,
        num_workers=recipe.workers,
        drop_last=True,
        persistent_workers=True,
        pin_memory=recipe.device != "cpu",
    )
    dtype = getattr(torch, recipe.dtype)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in loader:
            images = images.to(recipe.device, non_blocking=True)
            if on_device is not None:
                images = on_device(images)
            yield images.to(dtype, memory_format=layout), labels.to(recipe.device, non_blocking=True)

    return Peer(epoch, {"torchvision": torchvision.__version__, **versions})
