"""Boxes that are erased, as the fused kernels read them."""

from __future__ import annotations

from typing import Final

import numpy as np

from gpuload.transforms.program.ops import Erase

__all__ = ["KINDS", "RECORD", "records"]

# Numbers of a box: top, left, height, width, kind; then for a constant the bits of three float32, for random numbers
# the index of the first one and the two words of the key.
RECORD: Final = 8

KINDS: Final = ("const", "rand", "pixel")


def records(erase: Erase, channels: int) -> np.ndarray:
    """The boxes as `gpuload.stage.fused.erasing.erase` reads them: int64 (B, n, `RECORD`), of no
    height where there is none.

    Those of several `Erase` are joined along the second axis, in their order.

    Args:
        erase: what was drawn; it writes numbers of finished images.
        channels: of the images, 1 or 3.
    """
    boxes = erase.boxes_tlhw
    found = np.zeros((*boxes.shape[:2], RECORD), np.int64)
    found[:, :, :4] = boxes
    found[:, :, 4] = KINDS.index(erase.kind)
    if erase.kind == "const":
        found[:, :, 5:8] = np.array(erase.numbers, np.float32).view(np.int32)
        return found
    areas = boxes[:, :, 2:].prod(axis=2)
    counts = channels * (areas if erase.kind == "pixel" else areas > 0)
    found[:, :, 5] = np.cumsum(counts, axis=1) - counts
    found[:, :, 6:8] = erase.keys[:, None]
    return found
