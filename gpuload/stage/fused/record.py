"""The layout of a job of the fused kernels: the index of each of its numbers. A job is one pass over one image.

A job is `JOB` int64 and `FLOATS` float64 numbers in device memory, made on the host for a whole batch at once. The
first `INTS` of the int64, and all float64, are for its geometry; the other int64 say what else the pass does. Both
sides use these constants: kernels read them as `tl.constexpr`, and numpy takes them as indices and as numbers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import triton.language as tl

from gpuload.transforms.program.ops import FILTERS

INTS: Final = 18
FLOATS: Final = 12

# All kinds: the kind itself; pixel (y, x) of channel c of the source is at byte BASE + y · ROW_STEP + x · COLUMN_STEP
# + c · CHANNEL_STEP, where the sum without BASE stays below 2³¹; the size of the source. CHANNEL_STEP is 1, or 0 for an
# image of one channel that is read as three; the other steps may be negative.
KIND: Final = tl.constexpr(0)
BASE: Final = tl.constexpr(1)
ROW_STEP: Final = tl.constexpr(2)
COLUMN_STEP: Final = tl.constexpr(3)
CHANNEL_STEP: Final = tl.constexpr(4)
HEIGHT: Final = tl.constexpr(5)
WIDTH: Final = tl.constexpr(6)

# TABLE: the int32 table has TABLE_ROWS rows of the source from index TABLE_AT on, then its columns; -1 is filled.
TABLE_AT: Final = tl.constexpr(7)
TABLE_ROWS: Final = tl.constexpr(8)

# RESIZE: the sizes of the box and of the result, and where in the box the source begins. RESIZE and WARP: the filter.
FILTER: Final = tl.constexpr(7)
BOX_H: Final = tl.constexpr(8)
BOX_W: Final = tl.constexpr(9)
SIZE_H: Final = tl.constexpr(10)
SIZE_W: Final = tl.constexpr(11)
CORNER_Y: Final = tl.constexpr(12)
CORNER_X: Final = tl.constexpr(13)

# BLUR: the size of its kernel, odd.
KERNEL_H: Final = tl.constexpr(8)
KERNEL_W: Final = tl.constexpr(9)

# RESIZE and BLUR: the index of the first weight of the columns, and of the rows, among all; how many taps each column
# has, and for how many rows of the source a tile has weights (see `gpuload.stage.fused.weights`).
WEIGHTS_X: Final = tl.constexpr(14)
WEIGHTS_Y: Final = tl.constexpr(15)
TAPS: Final = tl.constexpr(16)
LINES: Final = tl.constexpr(17)

# float64. WARP: its eight coefficients from 0 on. BLUR: the sigmas, in pixels. SHARPNESS: its factor. TABLE and WARP:
# the level of each channel outside the source.
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

# Filters; FIXED_POINT is the nearest pixel of an affine map where `gpuload.stage.reference.warp` uses fixed point.
NEAREST: Final = tl.constexpr(FILTERS.index("nearest"))
BILINEAR: Final = tl.constexpr(FILTERS.index("bilinear"))
BICUBIC: Final = tl.constexpr(FILTERS.index("bicubic"))
FIXED_POINT: Final = tl.constexpr(len(FILTERS))

# The result: its size; its row r is row Y + r · STEP_Y of the geometry's result, its column c is X + c · STEP_X.
OUT_HEIGHT: Final = tl.constexpr(INTS)
OUT_WIDTH: Final = tl.constexpr(INTS + 1)
Y: Final = tl.constexpr(INTS + 2)
STEP_Y: Final = tl.constexpr(INTS + 3)
X: Final = tl.constexpr(INTS + 4)
STEP_X: Final = tl.constexpr(INTS + 5)
# Where it is written, in elements: the first one, and the steps between channels and rows.
OUT_AT: Final = tl.constexpr(INTS + 6)
OUT_CHANNEL: Final = tl.constexpr(INTS + 7)
OUT_ROW: Final = tl.constexpr(INTS + 8)
# Its operations: the index of the first one among all, and how many; the number of the table of its statistics.
OPERATIONS_AT: Final = tl.constexpr(INTS + 9)
OPERATIONS: Final = tl.constexpr(INTS + 10)
STATISTICS_AT: Final = tl.constexpr(INTS + 11)
# The boxes that are erased in the end: the index of the first one among all, and how many.
BOXES_AT: Final = tl.constexpr(INTS + 12)
BOXES: Final = tl.constexpr(INTS + 13)

JOB: Final = INTS + 14  # int64 numbers of a job

# The same as plain numbers: as an index of an array, one of Triton's costs half a microsecond more.
_FOUND: Final = [(name, known) for name, known in vars().items() if isinstance(known, tl.constexpr)]
PLAIN: Final = SimpleNamespace(**{name: known.value for name, known in _FOUND})
