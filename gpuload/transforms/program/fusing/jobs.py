"""The layout of a job, the unit of work of the fused kernels: one pass over one image.

A job consists of `JOB` int64 and `FLOATS` float64 values in device memory. All jobs of a batch are computed together on
the host. The first `INTS` int64 values and all float64 values describe the job's geometry; the other int64 values
describe the remaining steps of the pass. This module defines the index of each value for numpy;
`gpuload.stage.fused.pixels` defines the same indices for kernels. In addition to jobs, there are tables of weights
(`place_tables`), boxes to erase (`ERASED`) and images whose pixel values are counted (`COUNTED`).
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

# For all kinds: the kind, and the location and the size of the source. Pixel (y, x) of channel c is at byte BASE + y ·
# ROW_STEP + x · COLUMN_STEP + c · CHANNEL_STEP, where the sum without BASE stays below 2³¹. CHANNEL_STEP is 0 for an
# image of one channel that is read as three; otherwise it is 1, or larger in the first pass if the source has one plane
# per channel. The other steps can be negative.
KIND, BASE, ROW_STEP, COLUMN_STEP, CHANNEL_STEP, HEIGHT, WIDTH = range(7)
# TABLE: starting at index TABLE_AT, the int32 table lists TABLE_ROWS row indices of the source, then column indices; -1
# means fill.
TABLE_AT, TABLE_ROWS = 7, 8
# RESIZE: the sizes of the box and of the result, and the position of the source's corner in the box. RESIZE and WARP:
# the filter.
FILTER, BOX_H, BOX_W, SIZE_H, SIZE_W, CORNER_Y, CORNER_X = range(7, 14)
# BLUR: the size of the kernel, which is odd.
KERNEL_H, KERNEL_W = 8, 9
# RESIZE and BLUR: the indices, among all weights, of the job's first column weight and first row weight; the number of
# taps per column; and the number of source rows for which a tile has weights (see `gpuload.stage.fused.separable`).
WEIGHTS_X, WEIGHTS_Y, TAPS, LINES = range(14, INTS)

# The size and position of the result. Row r is row Y + r · STEP_Y of the geometry's result; column c is column
# X + c · STEP_X.
OUT_HEIGHT, OUT_WIDTH, Y, STEP_Y, X, STEP_X = range(INTS, INTS + 6)
# The result's location in the output, in elements: the first element, and the steps between channels, between rows, and
# between the pixels of a row. If rows are written as columns, the last two steps are swapped. OUT_PIXEL is read only by
# kernels of chains that can write rows as columns.
OUT_AT, OUT_CHANNEL, OUT_ROW, OUT_PIXEL = range(INTS + 6, INTS + 10)
# Operations: the index, among all operations, of the job's first operation; the number of its operations; and the index
# of its statistics table.
OPERATIONS_AT, OPERATIONS, STATISTICS_AT = range(INTS + 10, INTS + 13)
# The boxes erased at the end: the index, among all boxes, of the job's first box; and the number of its boxes.
BOXES_AT, BOXES = range(INTS + 13, INTS + 15)

JOB: Final = INTS + 16  # int64 values per job; an even number, so that each job begins at a multiple of 16 bytes

# The float64 values. WARP: the eight coefficients, from index 0. BLUR: the sigmas, in pixels. SHARPNESS: the factor.
# TABLE and WARP: the fill of each channel outside the source.
SIGMA_Y, SIGMA_X = 0, 1
FACTOR, FILL = 0, 8

SOURCE_STEPS: Final = slice(ROW_STEP, CHANNEL_STEP + 1)
# Pairs of a job's values: height and width, or the vertical and the horizontal value.
SOURCE_SIZE: Final = slice(HEIGHT, WIDTH + 1)
BOX: Final = slice(BOX_H, BOX_W + 1)
SIZE: Final = slice(SIZE_H, SIZE_W + 1)
CORNER: Final = slice(CORNER_Y, CORNER_X + 1)
OUT: Final = slice(OUT_HEIGHT, OUT_WIDTH + 1)
START: Final = slice(Y, X + 1, X - Y)
STEPS: Final = slice(STEP_Y, STEP_X + 1, STEP_X - STEP_Y)
LEVELS: Final = slice(FILL, FILL + 3)

# The kinds of geometry.
COPY, TABLE, RESIZE, WARP, BLUR, SHARPNESS = range(6)

# Filters. FIXED_POINT: the nearest pixel of an affine map for which `gpuload.stage.reference.warp` uses fixed point.
NEAREST, BILINEAR, BICUBIC = map(FILTERS.index, ("nearest", "bilinear", "bicubic"))
FIXED_POINT: Final = len(FILTERS)

# An image whose pixel values are counted: the offset of its first byte, its size, the code of the operation that needs
# the counts, and the steps of the job's source. The padding field "no" aligns each entry to 16 bytes.
COUNTED: Final = np.dtype([("base", "i8"), ("size_hw", "i8", 2), ("code", "i8"), ("steps", "i8", 3), ("no", "i8")])
# A box to erase. The field "numbers" holds the bits of three float32 for a constant; otherwise it holds the index of
# the first random number and the two words of the key.
ERASED: Final = np.dtype([("box_tlhw", "i8", 4), ("kind", "i8"), ("numbers", "i8", 3)])
RECORD: Final = ERASED.itemsize // 8  # int64 values per entry
KINDS: Final = ("const", "rand", "pixel")  # the kinds of erasing
TRANSPOSED_PIXEL: Final = len(KINDS)  # "pixel" in a result whose rows are written as columns

# The filter processes this many taps, and this many source rows, at a time; tables are padded with weights of 0.
TAPS_AT_ONCE: Final = 2
LINES_AT_ONCE: Final = 4
COLUMNS: Final = 32  # the number of columns for which one program computes weights
WIDTHS: Final = np.array([2 * SUPPORT[name] for name in FILTERS])  # filter widths, in pixels of the smaller image


def place_tables(ints: np.ndarray, kind: int, rows: int) -> tuple[int, int]:
    """Store the position and size of its weight tables in each job. Only RESIZE and BLUR geometries have such tables.

    A job's column table holds the index of the first source pixel of each column, then pairs of weights: the first two
    weights of all columns, the next two of all columns, and so on. Its row table holds, for each tile, the index of the
    first source row, the number of source rows, and the weight of each source row in each row of the tile.

    Args:
        ints: the jobs, int64 (n, `JOB`); changed in place.
        kind: the kind of geometry of all jobs.
        rows: the number of rows of a tile, a power of two, at least 2.

    Returns:
        The total length of all tables in int32 values, and the number of programs that compute the tables of the
        largest job; (0, 0) for other kinds of geometry.
    """
    if kind not in (RESIZE, BLUR):
        return 0, 0
    heights, widths = ints.T[SOURCE_SIZE]
    if kind == RESIZE:
        box, size = ints.T[BOX], ints.T[SIZE]  # (2, n): along each axis
        taps = np.ceil(WIDTHS[ints[:, FILTER]] * np.maximum(box, size) / size)
        taps[box == size] = 1
        taps_y, taps_x = taps.astype(np.int64)
        lines = taps_y + 1 - (1 - rows) * ints[:, BOX_H] // ints[:, SIZE_H]
    else:
        taps_x = np.minimum(ints[:, KERNEL_W], widths)
        lines = ints[:, KERNEL_H] + (rows - 1)
    lines = np.minimum(lines, heights)
    heights, widths = ints.T[OUT]  # sizes of the results
    ints[:, TAPS] = taps = _round_up(taps_x, TAPS_AT_ONCE)
    ints[:, LINES] = lines = _round_up(lines, LINES_AT_ONCE)
    # Row tables begin at multiples of `rows`, so that the weights of a source row can be read together.
    padded_heights = _round_up(heights, rows)
    row_lengths = padded_heights * (lines + 1)
    lengths = row_lengths + _round_up((taps + 1) * widths, rows)
    ends = lengths.cumsum()
    ints[:, WEIGHTS_X], ints[:, WEIGHTS_Y] = ends - lengths, ends - row_lengths
    return int(ends[-1]), int((padded_heights // rows + (widths + (COLUMNS - 1)) // COLUMNS).max())


def _round_up(numbers: np.ndarray, unit: int) -> np.ndarray:
    """Round up to multiples of a power of two."""
    return (numbers + (unit - 1)) & -unit


def erased_boxes(erase: Erase, channels: int) -> np.ndarray:
    """Return boxes in the layout that `gpuload.stage.fused.erasing.erase` reads: `ERASED` (B, n) viewed as int64 of
    shape (B, n · `RECORD`). An entry of height 0 is not a box.

    The caller joins the boxes of several `Erase` records along the second axis, in order.

    Args:
        erase: the record; it must apply to images of the final type.
        channels: the number of channels of the images, 1 or 3.
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
