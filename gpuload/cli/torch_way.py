"""The same work with torch's DataLoader, in the fastest known way: decode with simplejpeg, then use torch's
operators for the random crop, the antialiased resize and the flip of the uint8 tensor, and for the normalisation to
floats.

torchvision's v2 transforms call the same operators and give the same results, but took 3 to 40% more CPU time for
photographs of 45 to 130 KB; Pillow took 45 to 100% more. A DataLoader's workers run `Pictures.__getitem__` for each
sample.
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
from gpuload.inspection.files import find_image

try:
    import simplejpeg
except Exception:  # a broken installation, which `gpuload doctor` reports
    simplejpeg = None

__all__ = ["DECODER", "Pictures", "augment", "collate", "data_loader", "decode", "decode_with_pillow", "random_box"]

DECODER: Final = f"simplejpeg {metadata.version('simplejpeg')}" if simplejpeg is not None else "Pillow"


def decode(data: bytes) -> np.ndarray:
    """Decode a JPEG to uint8 H×W×3. Pillow decodes other formats, and JPEGs that simplejpeg cannot read."""
    if simplejpeg is not None:
        try:
            return simplejpeg.decode_jpeg(data)
        except ValueError:
            pass
    return decode_with_pillow(data)


def decode_with_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as file:
        return np.array(file.convert("RGB"))


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a random box (left, top, right, bottom) from torch's generator, as torchvision's RandomResizedCrop does."""
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


def augment(pixels: np.ndarray, box: tuple[int, int, int, int], flip: bool) -> torch.Tensor:
    """Crop uint8 H×W×3 to a box (left, top, right, bottom), and return it as input for a training step: float32
    3×224×224, normalised."""
    left, top, right, bottom = box
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None, :, top:bottom, left:right]
    image = torch.nn.functional.interpolate(image, size=(SIZE, SIZE), mode="bilinear", antialias=True)[0]
    image = (image.flip(2) if flip else image).to(torch.float32)
    return image.div_(255).sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))


class Pictures(torch.utils.data.Dataset):
    """A dataset of the augmented first image of each sample of a gpuload dataset. If a sample cannot be loaded, it
    yields the sample's index instead."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> torch.Tensor | int:
        try:
            pixels = self.pixels(index)
            height, width, _ = pixels.shape
            return augment(pixels, random_box(width, height), float(torch.rand(())) < 0.5)
        except Exception:  # a Loader also skips such a sample
            return index

    def pixels(self, index: int) -> np.ndarray:
        """Return the image of a sample, decoded to uint8 H×W×3."""
        image, _ = find_image(self.dataset[index])
        if isinstance(image, Encoded):
            return decode(image.data)
        array = image.hwc
        return np.array(Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).convert("RGB"))


def data_loader(dataset: object, *, batch_size: int, num_workers: int, pin_memory: bool) -> Any:
    """Return a shuffled DataLoader of `Pictures` with persistent workers, whose batches come from `collate`."""
    return torch.utils.data.DataLoader(
        Pictures(dataset),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=collate,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
    )


def collate(samples: Sequence[torch.Tensor | int]) -> tuple[torch.Tensor, list[int]]:
    """Return the images as a batch, and the indices of the samples that cannot be loaded."""
    images = [sample for sample in samples if isinstance(sample, torch.Tensor)]
    failed = [sample for sample in samples if not isinstance(sample, torch.Tensor)]
    return torch.stack(images) if images else torch.empty(0, 3, SIZE, SIZE), failed
