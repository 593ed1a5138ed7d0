"""How work is divided for a GPU: tiles of results, and portions of a batch that one launch takes."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["Tile", "portions"]

SECOND_AXIS: Final = 65_535  # programs along a grid's second axis; along the first there are up to 2**31


class Tile(NamedTuple):
    """The part of a result that a program makes.

    Attributes:
        rows, columns: its size; 32 columns for each warp, so that a thread has whole columns.
        warps: of the program.
    """

    rows: int
    columns: int
    warps: int


def portions(count: int, first: int = 0) -> list[slice]:
    """The images of each launch, of `count` from the `first` on: one program for each along the grid's second axis."""
    end = first + count
    return [slice(at, min(at + SECOND_AXIS, end)) for at in range(first, end, SECOND_AXIS)]
