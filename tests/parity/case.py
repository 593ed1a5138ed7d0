"""What a parity case is: a chain of ours, an oracle that none of us wrote, and how far the two may lie apart.

`Spec.parity` in transforms/specs.py has the cases of each transform.

An oracle gets the whole image and what was drawn for it, and says what the result must be; it does not look at our
pixels. Differences are counted in levels, of which there are 256. All cases together are the table of tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["BATCHES", "BOUNDED", "RUNS", "Case", "Oracle", "Tolerance"]

# (image uint8 H×W×C, [(transform, its parameters for the batch), …], row of the image in the batch) → H×W×C numbers.
Oracle = Callable[[Any, list[tuple[Any, Any]], int], np.ndarray]

# The implementations that a case is run on: the reference, which processes images one by one on the CPU; its runner for
# batches, which is used on CUDA; and the other backends.
BATCHES = "batches"
RUNS = ("torch", BATCHES, "kornia", "dali", "fused")
BOUNDED = ("torch", BATCHES, "fused")  # those that promise Pillow's levels; the others have their library's definitions


@dataclass(frozen=True)
class Tolerance:
    """How far a backend's results may lie off, in levels.

    Attributes:
        mean, max: from the oracle: the greatest mean difference of any image, and the greatest of any number of it.
        apart: from the reference, which takes images one by one: the greatest difference of any number.
        reason: why.
    """

    mean: float
    max: float
    apart: float
    reason: str


@dataclass(frozen=True)
class Case:
    """One row of the table of tolerances.

    Attributes:
        topic: the section of the report.
        name: unique; the transform, as it stands in the table. What it does not name only prepares the images.
        transforms: our chain.
        oracle: what the result must be.
        mean, max: the greatest mean difference of any image, and the greatest of any number of it, in levels.
        against: the oracle's name, such as ``"Pillow ImageOps.solarize"``.
        reason: why the tolerance is what it is.
        between: how far any run may lie from the reference's of single images, in levels.
        backends: for those of `BOUNDED` that have a tolerance of their own.
        channels: of the images that it is tried on: 3, or 1.
        pairs: the transforms mix images: the oracle gets each with its neighbour in the batch, (H×W×C, H×W×C), the last
            of an odd number with itself.
        to_levels: brings results that are no longer levels, H×W×C float64, back to them.
    """

    topic: str
    name: str
    transforms: list[Any]
    oracle: Oracle
    mean: float
    max: float
    against: str
    reason: str
    between: float = 0.0
    backends: Mapping[str, Tolerance] = field(default_factory=dict)
    channels: int = 3
    pairs: bool = False
    to_levels: Callable[[np.ndarray], np.ndarray] | None = None

    def tolerance(self, run: str) -> Tolerance:
        """That of one of `BOUNDED`."""
        return self.backends.get(run) or Tolerance(self.mean, self.max, self.between, self.reason)
