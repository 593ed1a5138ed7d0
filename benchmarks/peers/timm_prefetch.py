"""timm's loader: a DataLoader whose workers augment Pillow's images, and its `PrefetchLoader`, which copies each batch
to the device on a side stream and normalises it there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.peers import torchvision_import  # noqa: F401  timm imports torchvision
from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe, main


def build(recipe: Recipe) -> Peer:
    import timm
    from timm.data.dataset import ImageDataset
    from timm.data.loader import create_loader

    loader = create_loader(
        ImageDataset(recipe.root),
        input_size=(3, recipe.size, recipe.size),
        batch_size=recipe.batch_size,
        is_training=True,
        color_jitter=recipe.jitter,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=recipe.workers,
        pin_memory=recipe.device != "cpu",
        img_dtype=getattr(torch, recipe.dtype),
        device=torch.device(recipe.device),
    )
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in loader:
            yield images.contiguous(memory_format=layout), labels

    return Peer(epoch, {"timm": timm.__version__})


if __name__ == "__main__":
    main(build)
