"""The layout of a job of the fused kernels: the index of each of its numbers. A job is one pass over one image.

A job is `JOB` int64 and `FLOATS` float64 numbers in device memory, made on the host for a whole batch at once. The
first `INTS` of the int64, and all float64, are for its geometry; the other int64 say what else the pass does. Plain
numbers, as numpy takes them; `gpuload.stage.fused.record` has them for kernels.
"""

from __future__ import annotations

from typing import Final

from gpuload.transforms.program.ops import FILTERS

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
# has, and for how many rows of the source a tile has weights (see `gpuload.stage.fused.weights`).
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
# Where it is written, in elements: the first one, and the steps between channels and rows.
OUT_AT: Final = INTS + 6
OUT_CHANNEL: Final = INTS + 7
OUT_ROW: Final = INTS + 8
# Its operations: the index of the first one among all, and how many; the number of the table of its statistics.
OPERATIONS_AT: Final = INTS + 9
OPERATIONS: Final = INTS + 10
STATISTICS_AT: Final = INTS + 11
# The boxes that are erased in the end: the index of the first one among all, and how many.
BOXES_AT: Final = INTS + 12
BOXES: Final = INTS + 13

JOB: Final = INTS + 14  # int64 numbers of a job
