"""torch's DataLoader over torchvision's ImageFolder and v2 transforms, and timm's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any

import PIL
import torch

from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe
from benchmarks.peers.torchvision_import import torchvision, v2


def decode(path: str) -> torch.Tensor:
    """Decode with simplejpeg (libjpeg-turbo) directly to a uint8 tensor. The tensor is a C×H×W view of the decoder's
    H×W×C memory (channels last), which torch resizes fastest."""
    import simplejpeg

    with open(path, "rb") as file:
        return torch.from_numpy(simplejpeg.decode_jpeg(file.read())).permute(2, 0, 1)


def floats_of(recipe: Recipe, dtype: torch.dtype) -> list[Any]:
    """Return the transforms that turn uint8 tensors into normalised floats."""
    jitter = [v2.ColorJitter(recipe.jitter, recipe.jitter, recipe.jitter)] if recipe.jitter else []
    normalize = v2.Normalize(MEAN, STD, inplace=True)  # saves an allocation: 3% of the total time
    return [*jitter, v2.ToDtype(dtype, scale=True), normalize]


def folder_peer(recipe: Recipe, load: Callable[[str], Any], to_image: list[Any], finish: Any, **versions: str) -> Peer:
    """Build a DataLoader whose workers `load` a path, then transform each sample separately.

    `to_image` turns the loaded image into a tensor, after crop and flip. `finish` turns a uint8 batch on the device
    into normalised floats; None means that the workers do that.
    """
    to_floats = floats_of(recipe, torch.float32) if finish is None else []
    crop = v2.RandomResizedCrop(recipe.size, antialias=True)
    chain = v2.Compose([crop, v2.RandomHorizontalFlip(), *to_image, *to_floats])
    loader = torch.utils.data.DataLoader(
        torchvision.datasets.ImageFolder(recipe.root, transform=chain, loader=load),
        batch_size=recipe.batch_size,
        shuffle=True,
        num_workers=recipe.workers,
        drop_last=True,
        persistent_workers=True,
        pin_memory=recipe.device != "cpu",
    )

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in loader:
            images = images.to(recipe.device, non_blocking=True)
            yield images if finish is None else finish(images), labels.to(recipe.device, non_blocking=True)

    return in_layout(recipe, batches, {"torchvision": torchvision.__version__, **versions})


def in_layout(recipe: Recipe, batches: Callable[[], Iterable[Any]], versions: dict[str, str]) -> Peer:
    """Build a peer that converts a loader's batches to the recipe's dtype and layout."""
    dtype = getattr(torch, recipe.dtype)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return Peer(lambda: ((images.to(dtype, memory_format=layout), labels) for images, labels in batches()), versions)


def torch_pillow(recipe: Recipe) -> Peer:
    """Build the loader of most training scripts, with images decoded by Pillow."""
    load = torchvision.datasets.folder.pil_loader
    return folder_peer(recipe, load, [v2.ToImage()], None, pillow=PIL.__version__)


def torch_simplejpeg(recipe: Recipe) -> Peer:
    return folder_peer(recipe, decode, [], None, simplejpeg=version("simplejpeg"))


def torch_device(recipe: Recipe) -> Peer:
    """Build a loader whose workers decode, crop and flip; batches are converted to floats on the device.

    `variant` is ``"torchvision"`` for v2 transforms, whose ColorJitter draws once per batch, ``"cvcuda"`` for the same
    transforms run by CV-CUDA, or ``"kornia"`` for `AugmentationSequential`, which draws for each image. All run on the
    consumer's stream, as in training scripts.
    """
    versions = {"pillow": PIL.__version__}
    if recipe.variant == "kornia":
        import kornia
        import kornia.augmentation as K

        jitter = [K.ColorJitter(recipe.jitter, recipe.jitter, recipe.jitter)] if recipe.jitter else []
        steps = [*jitter, K.Normalize(MEAN, STD)]
        sequential = K.AugmentationSequential(*steps, data_keys=["input"]).to(recipe.device)
        versions["kornia"] = kornia.__version__

        @torch.no_grad()
        def finish(images: torch.Tensor) -> torch.Tensor:
            return sequential(images.to(torch.float32).div_(255))  # pyright: ignore[reportReturnType]
    elif recipe.variant == "cvcuda":
        import cvcuda  # pyright: ignore[reportMissingImports]
        import cvcuda.tv  # pyright: ignore[reportMissingImports]

        finish = cvcuda.tv.Compose(floats_of(recipe, torch.float32))
        versions["cvcuda"] = cvcuda.__version__
    else:
        finish = v2.Compose(floats_of(recipe, getattr(torch, recipe.dtype)))
    load = torchvision.datasets.folder.pil_loader
    return folder_peer(recipe, load, [v2.PILToTensor()], finish, **versions)


def timm_prefetch(recipe: Recipe) -> Peer:
    """Build timm's loader: a DataLoader whose workers augment Pillow images, and a `PrefetchLoader` that copies each
    batch to the device on a side stream and normalises it there."""
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
    return in_layout(recipe, lambda: loader, {"timm": timm.__version__})
