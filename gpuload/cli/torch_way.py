"""The same work with torch's DataLoader, as a training script without gpuload has it: decode with Pillow, random crop,
resize, flip, to tensor, normalise.

The transforms are torchvision's v2. Where torchvision is missing, Pillow does their work, and wastes none: the box is
cropped while it is resized. A DataLoader's workers run `Pictures.__getitem__` for each sample.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from gpuload.datasets.sample import Encoded
from gpuload.datasets.sample import Image as ImageOf
from gpuload.datasets.tree import flatten
from gpuload.errors import one_line

__all__ = ["ByPillow", "Pictures", "Way", "by_torchvision", "random_box", "usual_way"]


class Way(NamedTuple):
    """How a picture becomes a tensor: `name` of what does it, `note` with versions and reasons, `change` does it."""

    name: str
    note: str
    change: Callable[[Image.Image], torch.Tensor]


def usual_way(size: int, mean: Sequence[float], std: Sequence[float]) -> Way:
    """torchvision's v2 where it can be imported; else Pillow, with a note that says why."""
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return Way("Pillow", "torchvision is not installed", ByPillow(size, mean, std))
    try:
        return Way("torchvision v2", f"torchvision {version}", by_torchvision(size, mean, std))
    except Exception as error:  # one that was built for another torch raises a RuntimeError, or whatever else
        why = one_line(f"{type(error).__name__}: {error}", 120)
        return Way("Pillow", f"torchvision {version} cannot be imported: {why}", ByPillow(size, mean, std))


def by_torchvision(size: int, mean: Sequence[float], std: Sequence[float]) -> Callable[[Image.Image], torch.Tensor]:
    """torchvision's transforms of this recipe."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(mean), list(std), inplace=True),
        ]
    )


class ByPillow:
    """The same by Pillow: float32 C×H×W."""

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self.size = size
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.std = torch.tensor(std).view(3, 1, 1)

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        box = random_box(*picture.size)
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).to(torch.float32).div_(255)
        return tensor.sub_(self.mean).div_(self.std)


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A box as torchvision's RandomResizedCrop draws it, from torch's generator: (left, top, right, bottom)."""
    for _ in range(10):
        area = width * height * float(torch.empty(1).uniform_(0.08, 1))
        ratio = math.exp(float(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3))))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(torch.randint(width - w + 1, ())), int(torch.randint(height - h + 1, ()))
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


class Pictures(torch.utils.data.Dataset):
    """The first image of each sample of one of gpuload's datasets, changed in this way, with its label (0 without)."""

    def __init__(self, dataset: Any, change: Callable[[Image.Image], torch.Tensor]) -> None:
        self.dataset = dataset
        self.change = change

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        leaves: list[Any] = []
        flatten(self.dataset[index], leaves)
        found = next((leaf for leaf in leaves if isinstance(leaf, Encoded | ImageOf | np.ndarray)), None)
        if found is None:
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
            raise TypeError(f"sample {index} has no image, but {kinds}")
        label = next((int(leaf) for leaf in leaves if isinstance(leaf, int | np.integer)), 0)
        return self.change(_picture(found)), label


def _picture(found: Any) -> Image.Image:
    if isinstance(found, Encoded):
        with Image.open(io.BytesIO(found.data)) as file:
            return file.convert("RGB")
    array = found.array if isinstance(found, ImageOf) else found
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).convert("RGB")
