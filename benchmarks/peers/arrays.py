"""The dataset of the array benchmark: images that lie in memory already, as uint8 arrays, each with a label.

What is left of a loader's work is to bring them from its workers into a batch. Imports no torch: gpuload's workers do
not either.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Arrays"]

KEPT = 1024  # different images; the dataset goes round them


class Arrays:
    """`length` samples: 3×`size`×`size` uint8 and a label."""

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self.images = np.random.default_rng(0).integers(0, 256, (KEPT, 3, size, size), np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index % KEPT], index
