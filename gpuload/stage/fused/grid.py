"""The tiles that results are divided into, by device."""

from __future__ import annotations

from typing import Final

import torch

from gpuload.stage.device import capability
from gpuload.stage.fused.rounding import INTERPRETED
from gpuload.transforms.program.fusing.grid import Tile

__all__ = ["tile_of"]

# GPUs (compute capability) whose multiprocessors hold only 16 programs: with one warp each they would be half empty.
FEW_PROGRAMS: Final = ((7, 5), (8, 6), (8, 7))


def tile_of(device: torch.device) -> Tile:
    """The tile of a device."""
    if INTERPRETED.value:  # it takes as long for a large tile as for a small one
        return Tile(64, 64, 1)
    if capability(device) in FEW_PROGRAMS:
        return Tile(8, 64, 2)
    return Tile(8, 32, 1)
