"""torchvision's ImageFolder with v2's transforms inside, as training scripts have it. Workers import it from here:
torchvision beside another torch is imported in a way of its own."""

from __future__ import annotations

from benchmarks.peers.torchvision_import import torchvision, v2

__all__ = ["Folder"]


class Folder(torchvision.datasets.ImageFolder):
    """Photographs in folders by class, cropped to `size`."""

    def __init__(self, root: str, size: int) -> None:
        super().__init__(root, transform=v2.Compose([v2.RandomResizedCrop(size), v2.ToImage()]))
