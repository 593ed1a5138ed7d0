"""How work is divided for a GPU: tiles of results, and portions of a batch that one launch takes."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from gpuload.stage.accelerator import capability
from gpuload.stage.fused.rounding import INTERPRETED

__all__ = ["Tile", "portions", "tile_of"]

SECOND_AXIS: Final = 65_535  # programs along a grid's second axis; along the first there are up to 2**31
# GPUs (compute capability) whose multiprocessors hold only 16 programs: with one warp each they would be half empty.
FEW_PROGRAMS: Final = ((7, 5), (8, 6), (8, 7))


class Tile(NamedTuple):
    """The part of a result that a program makes.

    Attributes:
        rows, columns: its size; 32 columns for each warp, so that a thread has whole columns.
        warps: of the program.
    """

    rows: int
    columns: int
    warps: int


def tile_of(device: torch.device) -> Tile:
    """The tile of a device."""
    if INTERPRETED.value:  # it takes as long for a large tile as for a small one
        return Tile(64, 64, 1)
    if capability(device) in FEW_PROGRAMS:
        return Tile(8, 64, 2)
    return Tile(8, 32, 1)


def portions(count: int, first: int = 0) -> list[slice]:
    """The images of each launch, of `count` from the `first` on: one program for each along the grid's second axis."""
    end = first + count
    return [slice(at, min(at + SECOND_AXIS, end)) for at in range(first, end, SECOND_AXIS)]
