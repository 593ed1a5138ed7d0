"""The input: photographs, decoded once, in every form that a contender accepts.

All images are on the device before a clock starts: concatenated H×W×C for gpuload, as decoders produce them, and as
C×H×W tensors for torchvision and Kornia. They are made once per device and live until the end: at batch 256 about
150 MB of levels in each form, and four times as much for Kornia's floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.augmentation.cases import Start
from benchmarks.photos import find_photos, list_jpegs
from benchmarks.running import REPOSITORY
from gpuload.stage import RaggedImages

LANDSCAPE_HW = (375, 500)
SIDES = {"crops": 224, "squares": 256}


def default_folder() -> Path:
    """Return a folder of JPEGs, generated if it does not exist yet."""
    return find_photos(REPOSITORY / ".data")[0]


class Photographs:
    """A batch of photographs.

    Args:
        folder: the folder of JPEGs, used in the order of their names, and cyclically if there are too few.
        count: the number of images in the batch.
        device: the device of the tensors.
    """

    def __init__(self, folder: Path, count: int, device: torch.device) -> None:
        paths = list_jpegs(folder)
        decoded = {}
        for path in paths[:count]:
            with Image.open(path) as opened:
                decoded[path] = opened.convert("RGB")
        self.file_count = len(paths)
        self.device = device
        self._photographs = [decoded[paths[number % len(paths)]] for number in range(count)]
        self._cached: dict[str, Any] = {}

    def pillow(self, start: Start) -> list[Image.Image]:
        """Return Pillow images, in host memory."""
        if start == "photographs":
            return self._photographs
        make = _landscape if start == "landscape" else partial(_crop, side=SIDES[start])
        return self._once(f"pillow {start}", lambda: list(map(make, self._photographs)))

    def ragged(self, start: Start) -> RaggedImages:
        """Return the images as gpuload's stage accepts them."""
        make = lambda: RaggedImages.from_arrays(list(map(np.asarray, self.pillow(start))), self.device)  # noqa: E731
        return self._once(f"ragged {start}", make)

    def tensors(self, start: Start) -> list[torch.Tensor]:
        """Return a uint8 tensor C×H×W for each image."""
        return self._once(f"tensors {start}", lambda: list(map(self._tensor, self.pillow(start))))

    def dense(self, start: Start) -> torch.Tensor:
        """Return a uint8 tensor N×C×H×W; photographs are resized to one size by torch's interpolation."""
        same_size: Start = "landscape" if start == "photographs" else start
        return self._once(f"dense {same_size}", lambda: torch.stack(list(map(self._tensor, self.pillow(same_size)))))

    def floats(self, start: Start) -> torch.Tensor:
        """Return the batch of `dense` as float32 in 0 … 1."""
        return self.dense(start).to(torch.float32).div_(255)

    @cached_property
    def boxes(self) -> list[np.ndarray]:
        """Draw one to five random boxes for each photograph: float64 (n, 4) left, top, right, bottom, in pixels."""
        boxes = []
        for number, image in enumerate(self._photographs):
            rng = np.random.default_rng(number)
            count = int(rng.integers(1, 6))
            start = rng.uniform(0, 0.7, (count, 2))
            end = np.minimum(start + rng.uniform(0.02, 0.5, (count, 2)), 1)
            boxes.append(np.hstack([start, end]) * np.tile([image.width, image.height], 2))
        return boxes

    def _tensor(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(self.device)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._cached:
            self._cached[name] = make()
        return self._cached[name]


def _crop(image: Image.Image, side: int) -> Image.Image:
    """Cut out the largest centred square and resize it."""
    scale = side / min(image.size)
    left, top = ((length - side / scale) / 2 for length in image.size)
    box = (left, top, left + side / scale, top + side / scale)
    return image.resize((side, side), Image.Resampling.BILINEAR, box=box)


def _landscape(image: Image.Image) -> Image.Image:
    if image.size == LANDSCAPE_HW[::-1]:
        return image
    levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    levels = torch.nn.functional.interpolate(levels, LANDSCAPE_HW, mode="bilinear", antialias=True)
    return Image.fromarray(np.ascontiguousarray(levels[0].permute(1, 2, 0).numpy()))
