"""What each peer is asked to do. Imports nothing heavy: the driver, which loads no torch, imports it too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["MEAN", "STD", "Recipe"]

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What each peer has to do: RandomResizedCrop(`size`), flip, ColorJitter, normalise; batches N×C×H×W.

    Batches are whole: the last, smaller one is dropped by all.

    Attributes:
        samples: of the array benchmark, which reads no files.
        jitter: of brightness, contrast and saturation; 0 for no ColorJitter.
        device, dtype, channels_last: where batches end, and what they are there.
        cuttable: the same photographs as in `root`, made cuttable; "" where they are not.
        variant: which of a peer's ways; for gpuload its backend.
    """

    root: str
    cuttable: str = ""
    batch_size: int = 64
    workers: int = 2
    epochs: int = 3
    size: int = 224
    samples: int = 0
    jitter: float = 0.0
    device: str = "cpu"
    dtype: str = "float32"
    channels_last: bool = False
    variant: str = "auto"

    def to_json(self) -> str:
        return json.dumps(asdict(self))
