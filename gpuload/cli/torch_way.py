"""The same work with torch's DataLoader, by the fastest way that is known for it: decode with simplejpeg, then call
torch's own operators on the uint8 tensor, for the random crop, the antialiased resize, the flip, normalised floats.

torchvision's v2 transforms end in the same operators and give the same, but took 3 to 40% more CPU time for photographs
of 45 to 130 KB; Pillow took 45 to 100% more. A DataLoader's workers run `Pictures.__getitem__` for each sample.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from gpuload.cli.source import MEAN, SIZE, STD
from gpuload.datasets.sample import Encoded
from gpuload.datasets.sample import Image as ImageOf
from gpuload.datasets.tree import flatten

try:
    import simplejpeg
except Exception:  # a broken installation: `gpuload doctor` says how
    simplejpeg = None

__all__ = ["DECODER", "Pictures", "by_pillow", "collate", "data_loader", "decode", "random_box"]

DECODER: Final = f"simplejpeg {metadata.version('simplejpeg')}" if simplejpeg is not None else "Pillow"


def decode(data: bytes) -> np.ndarray:
    """Decode a JPEG to uint8 H×W×3; other formats, and JPEGs that simplejpeg does not read, by Pillow."""
    if simplejpeg is not None:
        try:
            return simplejpeg.decode_jpeg(data)
        except ValueError:
            pass
    return by_pillow(data)


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as file:
        return np.array(file.convert("RGB"))


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a box as torchvision's RandomResizedCrop does, from torch's generator: (left, top, right, bottom)."""
    for _ in range(10):
        area = width * height * float(torch.empty(1).uniform_(0.08, 1))
        ratio = math.exp(float(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3))))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(torch.randint(width - w + 1, ())), int(torch.randint(height - h + 1, ()))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class Pictures(torch.utils.data.Dataset):
    """The first image of each sample of one of gpuload's datasets, as a training step takes it, and its label, or 0.
    Instead of a sample that cannot be loaded comes its index.

    Args:
        dataset: any that gpuload takes.
        size: height and width of what comes out: float32 3×size×size.
    """

    def __init__(self, dataset: Any, size: int = SIZE) -> None:
        self.dataset = dataset
        self.size = size
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int] | int:
        try:
            return self.load(index)
        except Exception:  # as a Loader leaves it out
            return index

    def load(self, index: int) -> tuple[torch.Tensor, int]:
        """Load one sample. TypeError if it has no image."""
        leaves: list[Any] = []
        flatten(self.dataset[index], leaves)
        image = next((leaf for leaf in leaves if isinstance(leaf, Encoded | ImageOf | np.ndarray)), None)
        if image is None:
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
            raise TypeError(f"sample {index} has no image, but {kinds}")
        label = next((int(leaf) for leaf in leaves if isinstance(leaf, int | np.integer)), 0)
        pixels = self.pixels(image)
        height, width, _ = pixels.shape
        return self.view(pixels, random_box(width, height), float(torch.rand(())) < 0.5), label

    def pixels(self, image: Any) -> np.ndarray:
        """Return the uint8 H×W×3 of an image in whatever form the dataset gave it."""
        if isinstance(image, Encoded):
            return decode(image.data)
        array = image.array if isinstance(image, ImageOf) else image
        return np.array(Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).convert("RGB"))

    def view(self, pixels: np.ndarray, box: tuple[int, int, int, int], flip: bool) -> torch.Tensor:
        """Return the box (left, top, right, bottom) of the pixels, resized, flipped or not, and normalised."""
        left, top, right, bottom = box
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None, :, top:bottom, left:right]
        image = torch.nn.functional.interpolate(image, size=(self.size, self.size), mode="bilinear", antialias=True)[0]
        if flip:
            image = image.flip(2)
        return image.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)


def data_loader(dataset: Any, *, batch_size: int, num_workers: int, pin_memory: bool) -> Any:
    """Return a shuffled DataLoader over `Pictures`, whose workers stay. A batch is images, labels, and a list of the
    indices that cannot be loaded."""
    return torch.utils.data.DataLoader(
        Pictures(dataset),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=collate,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
    )


def collate(samples: Sequence[tuple[torch.Tensor, int] | int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Put samples of `Pictures` into a batch, without those that cannot be loaded."""
    loaded = [sample for sample in samples if not isinstance(sample, int)]
    images = torch.stack([image for image, _ in loaded]) if loaded else torch.empty(0, 3, 1, 1)
    labels = torch.tensor([label for _, label in loaded])
    return images, labels, [sample for sample in samples if isinstance(sample, int)]
