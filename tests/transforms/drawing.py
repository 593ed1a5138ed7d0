"""Draws of a chain, and the conversions to floats that chains of several tests contain."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

__all__ = ["KEY", "NORMALIZE", "SAMPLES", "TO_FLOAT", "draw"]

SAMPLES = 8000  # draws per test
KEY = epoch_key(3, 1)
NORMALIZE = T.Normalize((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
TO_FLOAT = T.ToDtype("float32", scale=True)


def draw(*transforms: Any, size_hw: tuple[int, int] = (40, 60), count: int = SAMPLES) -> Any:
    """Return the program of a chain of these transforms, for images of one size."""
    return T.Chain(transforms).draw(KEY, np.arange(count), np.tile([size_hw], (count, 1)))
