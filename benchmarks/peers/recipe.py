"""What each peer is asked to do. Imports nothing heavy: the driver, which loads no torch, imports it too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["MEAN", "STD", "Recipe"]

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What each peer has to do: RandomResizedCrop(`size`), flip, normalise, float32 N×C×H×W on the CPU.

    Batches are whole: the last, smaller one is dropped by all.
    """

    root: str
    batch_size: int = 64
    workers: int = 2
    epochs: int = 3
    size: int = 224
    samples: int = 0  # of the array benchmark, which reads no files

    def to_json(self) -> str:
        return json.dumps(asdict(self))
