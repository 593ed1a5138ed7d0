"""What a parity case is: a chain of ours, an oracle that none of us wrote, and how far the two may lie apart.

An oracle gets the whole image and what was drawn for it, and says what the result must be; it does not look at our
pixels. Differences are counted in levels, of which there are 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Case", "Oracle"]

# (image uint8 H×W×C, [(transform, its parameters for the batch), …], row of the image in the batch) → H×W×C numbers.
Oracle = Callable[[Any, list[tuple[Any, Any]], int], np.ndarray]


@dataclass(frozen=True)
class Case:
    """One row of the table of tolerances.

    Attributes:
        name: unique; the transform, as it stands in the table.
        transforms: our chain.
        oracle: what the result must be.
        mean, max: the greatest mean difference of any image, and the greatest of any number of it, in levels.
        against: the oracle's name, such as ``"Pillow ImageOps.solarize"``.
        reason: why the tolerance is what it is.
        between: how far the runner of single images and that of batches may lie apart, in levels.
        channels: of the images that it is tried on: 3, or 1.
        pairs: the transforms mix images: the oracle gets each with its neighbour in the batch, (H×W×C, H×W×C), the last
            of an odd number with itself.
        to_levels: brings results that are no longer levels, H×W×C float64, back to them.
    """

    name: str
    transforms: list[Any]
    oracle: Oracle
    mean: float
    max: float
    against: str
    reason: str
    between: float = 0.0
    channels: int = 3
    pairs: bool = False
    to_levels: Callable[[np.ndarray], np.ndarray] | None = None
