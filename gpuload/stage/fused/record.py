"""What a job of the fused kernels says: where each number stands in its records. A job is one pass over one image.

A job has `INTS` int64 and `FLOATS` float64 numbers for its geometry, next to each other in device memory, made on the
host for a whole batch at once; in the same int64 record stand behind them those of what else the pass does. These are
constants for both sides: kernels read them as `tl.constexpr`, and numpy takes them as indices and as numbers.
"""

from __future__ import annotations

from typing import Final

import triton.language as tl

from gpuload.transforms.program.ops import FILTERS

__all__ = [
    "BASE",
    "BICUBIC",
    "BILINEAR",
    "BLUR",
    "BOXES",
    "BOXES_AT",
    "BOX_H",
    "BOX_W",
    "CHANNEL_STEP",
    "COLUMN_STEP",
    "COPY",
    "CORNER_X",
    "CORNER_Y",
    "FACTOR",
    "FILL",
    "FILTER",
    "FIXED_POINT",
    "FLOATS",
    "HEIGHT",
    "INTS",
    "JOB",
    "KERNEL_H",
    "KERNEL_W",
    "KIND",
    "LINES",
    "NEAREST",
    "OPERATIONS",
    "OPERATIONS_AT",
    "OUT_AT",
    "OUT_CHANNEL",
    "OUT_HEIGHT",
    "OUT_ROW",
    "OUT_WIDTH",
    "RESIZE",
    "ROW_STEP",
    "SHARPNESS",
    "SIGMA_X",
    "SIGMA_Y",
    "SIZE_H",
    "SIZE_W",
    "STATISTICS_AT",
    "STEP_X",
    "STEP_Y",
    "TABLE",
    "TABLE_AT",
    "TABLE_ROWS",
    "TAPS",
    "WARP",
    "WEIGHTS_X",
    "WEIGHTS_Y",
    "WIDTH",
    "X",
    "Y",
]

INTS: Final = 24
FLOATS: Final = 16

# Every kind: which it is; pixel (y, x) of channel c of the source is at BASE + y · ROW_STEP + x · COLUMN_STEP
# + c · CHANNEL_STEP, bytes, of which all but BASE together stay below 2³¹; the size of the source. CHANNEL_STEP is
# 1, or 0 for an image of one channel that is read as three; the other steps may be negative.
KIND: Final = tl.constexpr(0)
BASE: Final = tl.constexpr(1)
ROW_STEP: Final = tl.constexpr(2)
COLUMN_STEP: Final = tl.constexpr(3)
CHANNEL_STEP: Final = tl.constexpr(4)
HEIGHT: Final = tl.constexpr(5)
WIDTH: Final = tl.constexpr(6)

# TABLE: in the int32 table, TABLE_ROWS rows of the source from TABLE_AT on, then its columns; -1 is filled.
TABLE_AT: Final = tl.constexpr(7)
TABLE_ROWS: Final = tl.constexpr(8)

# RESIZE: from which box to which size, and where in the box the source begins. RESIZE and WARP: the filter.
FILTER: Final = tl.constexpr(7)
BOX_H: Final = tl.constexpr(8)
BOX_W: Final = tl.constexpr(9)
SIZE_H: Final = tl.constexpr(10)
SIZE_W: Final = tl.constexpr(11)
CORNER_Y: Final = tl.constexpr(12)
CORNER_X: Final = tl.constexpr(13)

# BLUR: the sizes of its kernel, odd.
KERNEL_H: Final = tl.constexpr(8)
KERNEL_W: Final = tl.constexpr(9)

# RESIZE and BLUR: where their weights begin among all, those of columns and those of rows; how many taps each column
# has, and how many rows of the source there are weights for in a tile (see `gpuload.stage.fused.weights`).
WEIGHTS_X: Final = tl.constexpr(14)
WEIGHTS_Y: Final = tl.constexpr(15)
TAPS: Final = tl.constexpr(16)
LINES: Final = tl.constexpr(17)

# float64. WARP: its eight coefficients from 0 on. BLUR: the sigmas, in pixels. SHARPNESS: its factor. TABLE and WARP:
# the levels, one for each channel, of what lies outside.
SIGMA_Y: Final = tl.constexpr(0)
SIGMA_X: Final = tl.constexpr(1)
FACTOR: Final = tl.constexpr(0)
FILL: Final = tl.constexpr(8)

# Kinds.
COPY: Final = tl.constexpr(0)
TABLE: Final = tl.constexpr(1)
RESIZE: Final = tl.constexpr(2)
WARP: Final = tl.constexpr(3)
BLUR: Final = tl.constexpr(4)
SHARPNESS: Final = tl.constexpr(5)

# Filters; the nearest pixel of an affine map is found in fixed point where `gpuload.stage.reference.warp` does that.
NEAREST: Final = tl.constexpr(FILTERS.index("nearest"))
BILINEAR: Final = tl.constexpr(FILTERS.index("bilinear"))
BICUBIC: Final = tl.constexpr(FILTERS.index("bicubic"))
FIXED_POINT: Final = tl.constexpr(len(FILTERS))


# The result: its size; row r of it is row Y + r · STEP_Y of the geometry's, column c is X + c · STEP_X.
OUT_HEIGHT: Final = tl.constexpr(INTS)
OUT_WIDTH: Final = tl.constexpr(INTS + 1)
Y: Final = tl.constexpr(INTS + 2)
STEP_Y: Final = tl.constexpr(INTS + 3)
X: Final = tl.constexpr(INTS + 4)
STEP_X: Final = tl.constexpr(INTS + 5)
# Where it goes, in elements: its first one, and the steps between channels and rows.
OUT_AT: Final = tl.constexpr(INTS + 6)
OUT_CHANNEL: Final = tl.constexpr(INTS + 7)
OUT_ROW: Final = tl.constexpr(INTS + 8)
# Its operations: the first one's place among all, and how many; the table of its source's statistics.
OPERATIONS_AT: Final = tl.constexpr(INTS + 9)
OPERATIONS: Final = tl.constexpr(INTS + 10)
STATISTICS_AT: Final = tl.constexpr(INTS + 11)
# Its boxes that are erased in the end: the first one's place among all, and how many.
BOXES_AT: Final = tl.constexpr(INTS + 12)
BOXES: Final = tl.constexpr(INTS + 13)

JOB: Final = INTS + 16  # int64 numbers of a job
