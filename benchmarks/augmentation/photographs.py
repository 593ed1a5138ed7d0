"""What is augmented: photographs, decoded once, in every form that a contender takes.

All lie on the device before a clock starts: gpuload's one behind the other, H×W×C, as decoders give them, and tensors
C×H×W, as torchvision and Kornia take them. Made once for a device, and kept until the end: at batch 256 about 150 MB of
levels in each form, and four times as much where Kornia takes floats.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.augmentation.cases import Start
from benchmarks.photos import find_photos
from gpuload.stage import RaggedImages

__all__ = ["LANDSCAPE_HW", "Photographs", "default_folder"]

LANDSCAPE_HW = (375, 500)
SIDES = {"crops": 224, "squares": 256}
REPOSITORY = Path(__file__).parents[2]


def default_folder() -> Path:
    """A folder of JPEGs, made where it is not there yet."""
    return find_photos(REPOSITORY / ".data")[0]


class Photographs:
    """A batch of photographs.

    Args:
        folder: of JPEGs; they are taken in the order of their names, from the first again where there are too few.
        count: how many the batch has.
        device: where tensors are.
    """

    def __init__(self, folder: Path, count: int, device: torch.device) -> None:
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        if not paths:
            raise SystemExit(f"no JPEGs (*.jpg, *.jpeg) in {folder}")
        decoded = {}
        for path in paths[:count]:
            with Image.open(path) as opened:
                decoded[path] = opened.convert("RGB")
        self.found = len(paths)
        self.device = device
        self._whole = [decoded[paths[number % len(paths)]] for number in range(count)]

    def pillow(self, start: Start) -> list[Image.Image]:
        """Pillow's images, in this machine's memory."""
        if start == "photographs":
            return self._whole
        return self._landscape if start == "landscape" else self._kept(f"pillow {start}", lambda: self._crops(start))

    def ragged(self, start: Start) -> RaggedImages:
        """What gpuload's stage takes."""
        return self._kept(f"ragged {start}", lambda: self._ragged(start))

    def tensors(self, start: Start) -> list[torch.Tensor]:
        """uint8 C×H×W, one for each."""
        return self._kept(f"tensors {start}", lambda: [self._tensor(image) for image in self.pillow(start)])

    def dense(self, start: Start) -> torch.Tensor:
        """uint8 N×C×H×W; photographs of other sizes are brought to one by torch's interpolation."""
        same: Start = "landscape" if start == "photographs" else start
        return self._kept(f"dense {same}", lambda: torch.stack([self._tensor(image) for image in self.pillow(same)]))

    def floats(self, start: Start) -> torch.Tensor:
        """The same as float32 in 0 … 1."""
        return self.dense(start).to(torch.float32).div_(255)

    @cached_property
    def boxes(self) -> list[np.ndarray]:
        """For each whole photograph one to five boxes, made up: float64 (n, 4) left, top, right, bottom, in pixels."""
        found = []
        for number, image in enumerate(self._whole):
            rng = np.random.default_rng(number)
            count = int(rng.integers(1, 6))
            start = rng.uniform(0, 0.7, (count, 2))
            end = np.minimum(start + rng.uniform(0.02, 0.5, (count, 2)), 1)
            found.append(np.hstack([start, end]) * np.tile([image.width, image.height], 2))
        return found

    @cached_property
    def _landscape(self) -> list[Image.Image]:
        return [self._interpolated(image) for image in self._whole]

    def _crops(self, start: Start) -> list[Image.Image]:
        crops, wanted = [], SIDES[start]
        for image in self._whole:
            scale = wanted / min(image.size)
            left, top = ((side - wanted / scale) / 2 for side in image.size)
            box = (left, top, left + wanted / scale, top + wanted / scale)
            crops.append(image.resize((wanted, wanted), Image.Resampling.BILINEAR, box=box))
        return crops

    @staticmethod
    def _interpolated(image: Image.Image) -> Image.Image:
        if image.size == LANDSCAPE_HW[::-1]:
            return image
        levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        levels = torch.nn.functional.interpolate(levels, LANDSCAPE_HW, mode="bilinear", antialias=True)
        return Image.fromarray(np.ascontiguousarray(levels[0].permute(1, 2, 0).numpy()))

    def _tensor(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(self.device)

    def _ragged(self, start: Start) -> RaggedImages:
        return RaggedImages.from_arrays([np.asarray(image) for image in self.pillow(start)], self.device)

    @cached_property
    def _store(self) -> dict[str, Any]:
        return {}

    def _kept(self, name: str, make: Any) -> Any:
        if name not in self._store:
            self._store[name] = make()
        return self._store[name]
