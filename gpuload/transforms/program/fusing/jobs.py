"""The layout of a job of the fused kernels: the index of each of its numbers. A job is one pass over one image.

A job is `JOB` int64 and `FLOATS` float64 numbers in device memory, made on the host for a whole batch at once. The
first `INTS` of the int64, and all float64, are for its geometry; the other int64 say what else the pass does. Plain
numbers, as numpy takes them; `gpuload.stage.fused.pixels` has them for kernels.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from gpuload.transforms.program.ops import FILTERS, Erase
from gpuload.transforms.program.windows import SUPPORT

__all__ = ["COLUMNS", "KINDS", "LINES_AT_ONCE", "RECORD", "TAPS_AT_ONCE", "Tables", "place_tables", "records"]

INTS: Final = 18
FLOATS: Final = 12

# All kinds: the kind itself; pixel (y, x) of channel c of the source is at byte BASE + y · ROW_STEP + x · COLUMN_STEP
# + c · CHANNEL_STEP, where the sum without BASE stays below 2³¹; the size of the source. CHANNEL_STEP is 1, or 0 for an
# image of one channel that is read as three; the other steps may be negative.
KIND: Final = 0
BASE: Final = 1
ROW_STEP: Final = 2
COLUMN_STEP: Final = 3
CHANNEL_STEP: Final = 4
HEIGHT: Final = 5
WIDTH: Final = 6

# TABLE: the int32 table has TABLE_ROWS rows of the source from index TABLE_AT on, then its columns; -1 is filled.
TABLE_AT: Final = 7
TABLE_ROWS: Final = 8

# RESIZE: the sizes of the box and of the result, and where in the box the source begins. RESIZE and WARP: the filter.
FILTER: Final = 7
BOX_H: Final = 8
BOX_W: Final = 9
SIZE_H: Final = 10
SIZE_W: Final = 11
CORNER_Y: Final = 12
CORNER_X: Final = 13

# BLUR: the size of its kernel, odd.
KERNEL_H: Final = 8
KERNEL_W: Final = 9

# RESIZE and BLUR: the index of the first weight of the columns, and of the rows, among all; how many taps each column
# has, and for how many rows of the source a tile has weights (see `gpuload.stage.fused.separable`).
WEIGHTS_X: Final = 14
WEIGHTS_Y: Final = 15
TAPS: Final = 16
LINES: Final = 17

# float64. WARP: its eight coefficients from 0 on. BLUR: the sigmas, in pixels. SHARPNESS: its factor. TABLE and WARP:
# the level of each channel outside the source.
SIGMA_Y: Final = 0
SIGMA_X: Final = 1
FACTOR: Final = 0
FILL: Final = 8

# Kinds.
COPY: Final = 0
TABLE: Final = 1
RESIZE: Final = 2
WARP: Final = 3
BLUR: Final = 4
SHARPNESS: Final = 5

# Filters; FIXED_POINT is the nearest pixel of an affine map where `gpuload.stage.reference.warp` uses fixed point.
NEAREST: Final = FILTERS.index("nearest")
BILINEAR: Final = FILTERS.index("bilinear")
BICUBIC: Final = FILTERS.index("bicubic")
FIXED_POINT: Final = len(FILTERS)

# The result: its size; its row r is row Y + r · STEP_Y of the geometry's result, its column c is X + c · STEP_X.
OUT_HEIGHT: Final = INTS
OUT_WIDTH: Final = INTS + 1
Y: Final = INTS + 2
STEP_Y: Final = INTS + 3
X: Final = INTS + 4
STEP_X: Final = INTS + 5
# Where it is written, in elements: the first one, and the steps between channels, rows, and the pixels of a row. Where
# rows are written as columns, the last two have changed places. Only kernels of chains that do so read OUT_PIXEL.
OUT_AT: Final = INTS + 6
OUT_CHANNEL: Final = INTS + 7
OUT_ROW: Final = INTS + 8
OUT_PIXEL: Final = INTS + 9
# Its operations: the index of the first one among all, and how many; the number of the table of its statistics.
OPERATIONS_AT: Final = INTS + 10
OPERATIONS: Final = INTS + 11
STATISTICS_AT: Final = INTS + 12
# The boxes that are erased in the end: the index of the first one among all, and how many.
BOXES_AT: Final = INTS + 13
BOXES: Final = INTS + 14

JOB: Final = INTS + 16  # int64 numbers of a job; an even number, so that each pass's begin at a multiple of 16 bytes

# -- tables of weights ---

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
    if kind not in (RESIZE, BLUR):
        return None
    heights, widths = ints[:, HEIGHT], ints[:, WIDTH]
    if kind == RESIZE:
        box, size = ints.T[BOX_H : BOX_W + 1], ints.T[SIZE_H : SIZE_W + 1]  # both axes
        taken = np.ceil(WIDTHS[ints[:, FILTER]] * np.maximum(box, size) / size)
        taken[box == size] = 1
        taps_y, taps_x = taken.astype(np.int64)
        lines = taps_y + 1 - (1 - rows) * ints[:, BOX_H] // ints[:, SIZE_H]
    else:
        taps_x = np.minimum(ints[:, KERNEL_W], widths)
        lines = ints[:, KERNEL_H] + (rows - 1)
    lines = np.minimum(lines, heights)
    heights, widths = ints[:, OUT_HEIGHT], ints[:, OUT_WIDTH]  # of the results
    ints[:, TAPS] = taps = _whole(taps_x, TAPS_AT_ONCE)
    ints[:, LINES] = lines = _whole(lines, LINES_AT_ONCE)
    # The tables of rows begin at multiples of `rows`, so that the weights of a row are read at once.
    tall = _whole(heights, rows)
    down = tall * (lines + 1)
    both = down + _whole((taps + 1) * widths, rows)
    ends = both.cumsum()
    ints[:, WEIGHTS_X], ints[:, WEIGHTS_Y] = ends - both, ends - down
    return Tables(int(ends[-1]), int((tall // rows + (widths + (COLUMNS - 1)) // COLUMNS).max()))


def _whole(numbers: np.ndarray, unit: int) -> np.ndarray:
    """The next multiples of a power of two."""
    return (numbers + (unit - 1)) & -unit


# Numbers of a box: top, left, height, width, kind; then for a constant the bits of three float32, for random numbers
# the index of the first one and the two words of the key.
RECORD: Final = 8

KINDS: Final = ("const", "rand", "pixel")
PIXEL: Final = KINDS.index("pixel")
TRANSPOSED_PIXEL: Final = len(KINDS)  # the same in a result that is written with rows and columns swapped


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
