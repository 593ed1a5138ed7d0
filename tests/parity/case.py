"""Parity cases: a chain of transforms, an independent oracle, and how much their results may differ.

`Spec.parity` in transforms/specs.py has the cases of each transform.

An oracle gets the complete image and its random parameters, and computes the expected result; it does not see
gpuload's pixels. Differences are in levels, of which there are 256. All cases together are the table of tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["BATCHES", "BOUNDED", "RUNS", "Case", "Oracle", "Tolerance"]

# (image uint8 H×W×C, [(transform, its parameters for the batch), …], row of the image in the batch) → H×W×C values.
Oracle = Callable[[Any, list[tuple[Any, Any]], int], np.ndarray]

# The runs of a case: the reference, which processes images one by one on the CPU; its runner for batches, which is used
# on CUDA; and the other backends.
BATCHES = "batches"
RUNS = ("torch", BATCHES, "kornia", "dali", "fused")
BOUNDED = ("torch", BATCHES, "fused")  # Kornia and DALI have their own definitions, not Pillow's levels


@dataclass(frozen=True)
class Tolerance:
    """How much a backend's results may differ, in levels.

    Attributes:
        mean, max: the largest mean difference of an image from the oracle, and the largest difference of any value.
        apart: the largest difference of any value from the reference, which processes images one by one.
        reason: why the tolerance has this size.
    """

    mean: float
    max: float
    apart: float
    reason: str


@dataclass(frozen=True)
class Case:
    """A row of the table of tolerances.

    Attributes:
        topic: the section of the report.
        name: unique; contains the transforms that the row is about. All other transforms only prepare the images.
        transforms: gpuload's chain.
        oracle: the function that computes the expected result.
        mean, max: the largest mean difference of an image, and the largest difference of any value, in levels.
        against: the oracle's name, such as ``"Pillow ImageOps.solarize"``.
        reason: why the tolerance has this size.
        between: how much any run may differ from the reference of single images, in levels.
        backends: tolerances of runs in `BOUNDED` that differ from the case's.
        channels: the channels of the images, 3 or 1.
        mixes_images: whether the transforms mix images. The oracle then gets each image with its neighbor in the
            batch, (H×W×C, H×W×C), and the last of an odd number of images with itself.
        to_levels: converts results that are not levels, H×W×C float64, to levels.
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
    mixes_images: bool = False
    to_levels: Callable[[np.ndarray], np.ndarray] | None = None

    def tolerance(self, run: str) -> Tolerance:
        return self.backends.get(run) or Tolerance(self.mean, self.max, self.between, self.reason)
