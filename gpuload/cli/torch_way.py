"""The same work with torch's DataLoader: decode with Pillow, crop and resize, flip, to tensor, normalise.

Its workers run `CroppedPictures.__getitem__` for each sample, as in a training script without gpuload. It needs torch
and Pillow alone, and wastes no work: the box is cropped while it is resized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

__all__ = ["CroppedPictures", "random_box"]


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


class CroppedPictures(torch.utils.data.Dataset):
    """The files at `paths`, cropped at random to size × size, flipped, normalised: float32 C×H×W, with their labels."""

    def __init__(
        self, paths: Sequence[str], labels: Sequence[int], size: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.paths = list(paths)
        self.labels = list(labels)
        self.size = size
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.std = torch.tensor(std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as file:
            picture = file.convert("RGB")
        box = random_box(*picture.size)
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).to(torch.float32).div_(255)
        return tensor.sub_(self.mean).div_(self.std), self.labels[index]
