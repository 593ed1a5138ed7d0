"""Where the tables of weights of jobs lie, and how large they are; `gpuload.stage.fused.weights` makes them."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from gpuload.transforms.program.fusing import layout as R
from gpuload.transforms.program.windows import FILTERS, SUPPORT

__all__ = ["COLUMNS", "LINES_AT_ONCE", "TAPS_AT_ONCE", "Tables", "place_tables"]

# How many taps, and how many rows of the source, the filter takes at once: tables are padded with weights of 0.
TAPS_AT_ONCE: Final = 2
LINES_AT_ONCE: Final = 4
COLUMNS: Final = 32  # of a program that makes tables
WIDTHS: Final = np.array([2 * SUPPORT[name] for name in FILTERS])  # of filters, in pixels of the smaller image


class Tables(NamedTuple):
    """The tables of the jobs of a launch.

    A job has one for columns: the first pixel of each, then pairs of weights, the first two of all columns, the next
    two of all columns, … And one for rows: for each tile the first row of the source and how many there are, and for
    each of these its weight in each row of the tile.

    Attributes:
        size: how many int32 numbers all have.
        programs: how many programs make those of the largest job.
    """

    size: int
    programs: int


def place_tables(ints: np.ndarray, kind: int, rows: int) -> Tables | None:
    """Set where the tables of jobs are and how large they are; None for kinds of geometry that have none.

    Args:
        ints: the jobs, int64 (n, `JOB`), which are changed.
        kind: of all their geometries.
        rows: of a tile, a power of two, at least 2.
    """
    if kind not in (R.RESIZE, R.BLUR):
        return None
    heights, widths = ints[:, R.HEIGHT], ints[:, R.WIDTH]
    if kind == R.RESIZE:
        box, size = ints.T[R.BOX_H : R.BOX_W + 1], ints.T[R.SIZE_H : R.SIZE_W + 1]  # both axes
        taken = np.ceil(WIDTHS[ints[:, R.FILTER]] * np.maximum(box, size) / size)
        taken[box == size] = 1
        taps_y, taps_x = taken.astype(np.int64)
        lines = taps_y + 1 - (1 - rows) * ints[:, R.BOX_H] // ints[:, R.SIZE_H]
    else:
        taps_x = np.minimum(ints[:, R.KERNEL_W], widths)
        lines = ints[:, R.KERNEL_H] + (rows - 1)
    lines = np.minimum(lines, heights)
    heights, widths = ints[:, R.OUT_HEIGHT], ints[:, R.OUT_WIDTH]  # of the results
    ints[:, R.TAPS] = taps = _whole(taps_x, TAPS_AT_ONCE)
    ints[:, R.LINES] = lines = _whole(lines, LINES_AT_ONCE)
    # The tables of rows begin at multiples of `rows`, so that the weights of a row are read at once.
    tall = _whole(heights, rows)
    down = tall * (lines + 1)
    both = down + _whole((taps + 1) * widths, rows)
    ends = both.cumsum()
    ints[:, R.WEIGHTS_X], ints[:, R.WEIGHTS_Y] = ends - both, ends - down
    return Tables(int(ends[-1]), int((tall // rows + (widths + (COLUMNS - 1)) // COLUMNS).max()))


def _whole(numbers: np.ndarray, unit: int) -> np.ndarray:
    """The next multiples of a power of two."""
    return (numbers + (unit - 1)) & -unit
