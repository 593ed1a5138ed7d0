"""A dataset of which only the bytes are read, for workers that do not decode. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.datasets.sample import Encoded, Image, Mask
from gpuload.datasets.tree import flatten

__all__ = ["OnlyRead", "bytes_of"]


class OnlyRead:
    """Reads a sample of a map dataset, and gives the number of its bytes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return bytes_of(self.dataset[index])


def bytes_of(sample: Any) -> int:
    """The bytes of a sample's files and arrays."""
    leaves: list[Any] = []
    flatten(sample, leaves)
    return sum(map(_nbytes, leaves))


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, Encoded):
        return len(leaf.data)
    if isinstance(leaf, Image | Mask):
        return _nbytes(leaf.array)
    return leaf.nbytes if isinstance(leaf, np.ndarray) else 0
