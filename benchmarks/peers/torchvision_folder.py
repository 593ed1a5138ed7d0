"""torchvision's ImageFolder with v2's transforms inside, as training scripts have it, and a dataset of Hugging Face's.

Workers import these from here: torchvision beside another torch is imported in a way of its own.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.torchvision_import import torchvision, v2

__all__ = ["Cropped", "Folder"]


class Folder(torchvision.datasets.ImageFolder):
    """Photographs in folders by class, cropped to `size`."""

    def __init__(self, root: str, size: int) -> None:
        super().__init__(root, transform=v2.Compose([v2.RandomResizedCrop(size), v2.ToImage()]))


class Cropped:
    """A dataset of Hugging Face's, whose images are cropped to `size`."""

    def __init__(self, rows: Any, size: int) -> None:
        self.rows = rows
        self.crop = v2.Compose([v2.RGB(), v2.RandomResizedCrop(size), v2.ToImage()])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return self.crop(row["image"]), row["label"]
