"""What a job of the fused kernels is made of: the index of each of its numbers. A job is one pass over one image.

A job is `JOB` int64 and `FLOATS` float64 numbers in device memory, made on the host for a whole batch at once. The
first `INTS` of the int64, and all float64, are for its geometry; the other int64 say what else the pass does. Plain
numbers, as numpy takes them; `gpuload.stage.fused.pixels` has them for kernels. Beside jobs there are tables of weights
(`place_tables`), boxes that are erased (`ERASED`) and images whose levels are counted (`COUNTED`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gpuload.transforms.program.ops import FILTERS, Erase
from gpuload.transforms.program.windows import SUPPORT

__all__ = [
    "COLUMNS", "COUNTED", "ERASED", "KINDS", "LINES_AT_ONCE", "TAPS_AT_ONCE", "TRANSPOSED_PIXEL", "erased_boxes",
    "place_tables",
]  # fmt: skip

INTS: Final = 18
FLOATS: Final = 12

# All kinds: the kind itself; pixel (y, x) of channel c of the source is at byte BASE + y · ROW_STEP + x · COLUMN_STEP
# + c · CHANNEL_STEP, where the sum without BASE stays below 2³¹; the size of the source. CHANNEL_STEP is 0 for an image
# of one channel that is read as three, else 1, or more in the first pass over planes; the other steps may be negative.
KIND, BASE, ROW_STEP, COLUMN_STEP, CHANNEL_STEP, HEIGHT, WIDTH = range(7)
# TABLE: the int32 table has TABLE_ROWS rows of the source from index TABLE_AT on, then its columns; -1 is filled.
TABLE_AT, TABLE_ROWS = 7, 8
# RESIZE: the sizes of the box and of the result, and where in the box the source begins. RESIZE and WARP: the filter.
FILTER, BOX_H, BOX_W, SIZE_H, SIZE_W, CORNER_Y, CORNER_X = range(7, 14)
# BLUR: the size of its kernel, odd.
KERNEL_H, KERNEL_W = 8, 9
# RESIZE and BLUR: the index of the first weight of the columns, and of the rows, among all; how many taps each column
# has, and for how many rows of the source a tile has weights (see `gpuload.stage.fused.separable`).
WEIGHTS_X, WEIGHTS_Y, TAPS, LINES = range(14, INTS)

# The result: its size; its row r is row Y + r · STEP_Y of the geometry's result, its column c is X + c · STEP_X.
OUT_HEIGHT, OUT_WIDTH, Y, STEP_Y, X, STEP_X = range(INTS, INTS + 6)
# Where it is written, in elements: the first one, and the steps between channels, rows, and the pixels of a row. Where
# rows are written as columns, the last two have changed places. Only kernels of chains that do so read OUT_PIXEL.
OUT_AT, OUT_CHANNEL, OUT_ROW, OUT_PIXEL = range(INTS + 6, INTS + 10)
# Its operations: the index of the first one among all, and how many; the number of the table of its statistics.
OPERATIONS_AT, OPERATIONS, STATISTICS_AT = range(INTS + 10, INTS + 13)
# The boxes that are erased in the end: the index of the first one among all, and how many.
BOXES_AT, BOXES = range(INTS + 13, INTS + 15)

JOB: Final = INTS + 16  # int64 numbers of a job; an even number, so that each pass's begin at a multiple of 16 bytes

# float64. WARP: its eight coefficients from 0 on. BLUR: the sigmas, in pixels. SHARPNESS: its factor. TABLE and WARP:
# the level of each channel outside the source.
SIGMA_Y, SIGMA_X = 0, 1
FACTOR, FILL = 0, 8

SOURCE_STEPS: Final = slice(ROW_STEP, CHANNEL_STEP + 1)
# Two numbers of a job each: of height and width, or down and across.
WHOLE: Final = slice(HEIGHT, WIDTH + 1)
BOX: Final = slice(BOX_H, BOX_W + 1)
SIZE: Final = slice(SIZE_H, SIZE_W + 1)
CORNER: Final = slice(CORNER_Y, CORNER_X + 1)
OUT: Final = slice(OUT_HEIGHT, OUT_WIDTH + 1)
START: Final = slice(Y, X + 1, X - Y)
STEPS: Final = slice(STEP_Y, STEP_X + 1, STEP_X - STEP_Y)
LEVELS: Final = slice(FILL, FILL + 3)

# Kinds.
COPY, TABLE, RESIZE, WARP, BLUR, SHARPNESS = range(6)

# Filters; FIXED_POINT is the nearest pixel of an affine map where `gpuload.stage.reference.warp` uses fixed point.
NEAREST, BILINEAR, BICUBIC = map(FILTERS.index, ("nearest", "bilinear", "bicubic"))
FIXED_POINT: Final = len(FILTERS)

# An image whose levels are counted: its first byte, its size, the code of the operation that needs it, and the steps of
# a job's source. With one number more, which is 0, each begins at a multiple of 16 bytes.
COUNTED: Final = np.dtype([("base", "i8"), ("size_hw", "i8", 2), ("code", "i8"), ("steps", "i8", 3), ("no", "i8")])
# A box that is erased. Its numbers are for a constant the bits of three float32, for random numbers the index of the
# first one and the two words of the key.
ERASED: Final = np.dtype([("box_tlhw", "i8", 4), ("kind", "i8"), ("numbers", "i8", 3)])
RECORD: Final = ERASED.itemsize // 8  # int64 numbers of it
KINDS: Final = ("const", "rand", "pixel")  # of erasing
TRANSPOSED_PIXEL: Final = len(KINDS)  # "pixel" in a result whose rows are written as columns

# How many taps, and how many rows of the source, the filter takes at once: tables are padded with weights of 0.
TAPS_AT_ONCE: Final = 2
LINES_AT_ONCE: Final = 4
COLUMNS: Final = 32  # of a program that makes tables
WIDTHS: Final = np.array([2 * SUPPORT[name] for name in FILTERS])  # of filters, in pixels of the smaller image


def place_tables(ints: np.ndarray, kind: int, rows: int) -> tuple[int, int]:
    """Set where the tables of weights of jobs are; kinds of geometry other than RESIZE and BLUR have none.

    A job has one for columns: the first pixel of each, then pairs of weights, the first two of all columns, the next
    two of all columns, … And one for rows: for each tile the first row of the source and how many there are, and for
    each of these its weight in each row of the tile.

    Args:
        ints: the jobs, int64 (n, `JOB`), which are changed.
        kind: of all their geometries.
        rows: of a tile, a power of two, at least 2.

    Returns:
        How many int32 numbers all have, and how many programs make those of the largest job.
    """
    if kind not in (RESIZE, BLUR):
        return 0, 0
    heights, widths = ints.T[WHOLE]
    if kind == RESIZE:
        box, size = ints.T[BOX], ints.T[SIZE]  # both axes
        taps = np.ceil(WIDTHS[ints[:, FILTER]] * np.maximum(box, size) / size)
        taps[box == size] = 1
        taps_y, taps_x = taps.astype(np.int64)
        lines = taps_y + 1 - (1 - rows) * ints[:, BOX_H] // ints[:, SIZE_H]
    else:
        taps_x = np.minimum(ints[:, KERNEL_W], widths)
        lines = ints[:, KERNEL_H] + (rows - 1)
    lines = np.minimum(lines, heights)
    heights, widths = ints.T[OUT]  # of the results
    ints[:, TAPS] = taps = _whole(taps_x, TAPS_AT_ONCE)
    ints[:, LINES] = lines = _whole(lines, LINES_AT_ONCE)
    # The tables of rows begin at multiples of `rows`, so that the weights of a row are read at once.
    tall = _whole(heights, rows)
    down = tall * (lines + 1)
    both = down + _whole((taps + 1) * widths, rows)
    ends = both.cumsum()
    ints[:, WEIGHTS_X], ints[:, WEIGHTS_Y] = ends - both, ends - down
    return int(ends[-1]), int((tall // rows + (widths + (COLUMNS - 1)) // COLUMNS).max())


def _whole(numbers: np.ndarray, unit: int) -> np.ndarray:
    """The next multiples of a power of two."""
    return (numbers + (unit - 1)) & -unit


def erased_boxes(erase: Erase, channels: int) -> np.ndarray:
    """Return the boxes as `gpuload.stage.fused.erasing.erase` reads them: `ERASED` (B, n) as int64 (B, n · `RECORD`),
    of no height where there is none.

    Those of several `Erase` are joined along the second axis, in their order.

    Args:
        erase: what was drawn; it writes numbers of finished images.
        channels: of the images, 1 or 3.
    """
    boxes = erase.boxes_tlhw
    entries = np.zeros(boxes.shape[:2], ERASED)
    entries["box_tlhw"], entries["kind"] = boxes, KINDS.index(erase.kind)
    if erase.kind == "const":
        entries["numbers"] = np.array(erase.numbers, np.float32).view(np.int32)
        return entries.view(np.int64)
    areas = boxes[:, :, 2:].prod(axis=2)
    counts = channels * (areas if erase.kind == "pixel" else areas > 0)
    entries["numbers"][:, :, 0] = np.cumsum(counts, axis=1) - counts
    entries["numbers"][:, :, 1:] = erase.keys[:, None]
    return entries.view(np.int64)
