"""What a job of the fused kernels says beside its geometry: one job is one pass over one image.

The numbers stand behind those of `gpuload.backends.fused.record` in the same int64 record. Constants for both sides.
"""

from __future__ import annotations

from typing import Final

import triton.language as tl

from gpuload.backends.fused.record import INTS

__all__ = [
    "BOXES",
    "BOXES_AT",
    "JOB",
    "OPERATIONS",
    "OPERATIONS_AT",
    "OUT_AT",
    "OUT_CHANNEL",
    "OUT_HEIGHT",
    "OUT_ROW",
    "OUT_WIDTH",
    "STATISTICS_AT",
    "STEP_X",
    "STEP_Y",
    "X",
    "Y",
]

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
