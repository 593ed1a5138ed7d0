"""How work is divided for a GPU: tiles of results, and portions of a batch that one launch takes."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["Tile", "portions"]

SECOND_AXIS: Final = 65_535  # programs along a grid's second axis
# Programs of a launch: Triton's launcher multiplies the axes as int32, and launches nothing if that is not positive.
MOST_PROGRAMS: Final = 2**31 - 1


class Tile(NamedTuple):
    """The part of a result that a program makes.

    Attributes:
        rows, columns: its size; 32 columns for each warp, so that a thread has whole columns.
        warps: of the program.
    """

    rows: int
    columns: int
    warps: int


def portions(count: int, first: int = 0, *, programs: int) -> list[slice]:
    """Return the images of each launch, of `count` from the `first` on.

    Args:
        count, first: which images.
        programs: along the grid's first axis, for each image; the images are along the second.
    """
    end, step = first + count, max(1, min(SECOND_AXIS, MOST_PROGRAMS // max(1, programs)))
    return [slice(at, min(at + step, end)) for at in range(first, end, step)]
