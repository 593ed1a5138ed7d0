"""A dataset of small images with labels that workers can import without torch, so that they start quickly."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

CLASSES = 7


class Pictures:
    """A dataset whose sample i is a distinct image and the label i % 7; the samples in `bad` raise OSError."""

    SIZE_HW = (16, 20)

    def __init__(self, samples: int, bad: Iterable[int] = ()) -> None:
        self.samples, self.bad = samples, frozenset(bad)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.bad:
            raise OSError(5, "Input/output error")
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (*self.SIZE_HW, 3), np.uint8), index % CLASSES
