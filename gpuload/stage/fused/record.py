"""The layout of a job, as kernels read it: see `gpuload.transforms.program.fusing.layout`, where each is explained."""

from __future__ import annotations

from typing import Final

import triton.language as tl

from gpuload.transforms.program.fusing import layout
from gpuload.transforms.program.fusing.layout import FLOATS, INTS, JOB

__all__ = ["FLOATS", "INTS", "JOB"]

KIND: Final = tl.constexpr(layout.KIND)
BASE: Final = tl.constexpr(layout.BASE)
ROW_STEP: Final = tl.constexpr(layout.ROW_STEP)
COLUMN_STEP: Final = tl.constexpr(layout.COLUMN_STEP)
CHANNEL_STEP: Final = tl.constexpr(layout.CHANNEL_STEP)
HEIGHT: Final = tl.constexpr(layout.HEIGHT)
WIDTH: Final = tl.constexpr(layout.WIDTH)
TABLE_AT: Final = tl.constexpr(layout.TABLE_AT)
TABLE_ROWS: Final = tl.constexpr(layout.TABLE_ROWS)
FILTER: Final = tl.constexpr(layout.FILTER)
BOX_H: Final = tl.constexpr(layout.BOX_H)
BOX_W: Final = tl.constexpr(layout.BOX_W)
SIZE_H: Final = tl.constexpr(layout.SIZE_H)
SIZE_W: Final = tl.constexpr(layout.SIZE_W)
CORNER_Y: Final = tl.constexpr(layout.CORNER_Y)
CORNER_X: Final = tl.constexpr(layout.CORNER_X)
KERNEL_H: Final = tl.constexpr(layout.KERNEL_H)
KERNEL_W: Final = tl.constexpr(layout.KERNEL_W)
WEIGHTS_X: Final = tl.constexpr(layout.WEIGHTS_X)
WEIGHTS_Y: Final = tl.constexpr(layout.WEIGHTS_Y)
TAPS: Final = tl.constexpr(layout.TAPS)
LINES: Final = tl.constexpr(layout.LINES)
SIGMA_Y: Final = tl.constexpr(layout.SIGMA_Y)
SIGMA_X: Final = tl.constexpr(layout.SIGMA_X)
FACTOR: Final = tl.constexpr(layout.FACTOR)
FILL: Final = tl.constexpr(layout.FILL)
COPY: Final = tl.constexpr(layout.COPY)
TABLE: Final = tl.constexpr(layout.TABLE)
RESIZE: Final = tl.constexpr(layout.RESIZE)
WARP: Final = tl.constexpr(layout.WARP)
BLUR: Final = tl.constexpr(layout.BLUR)
SHARPNESS: Final = tl.constexpr(layout.SHARPNESS)
NEAREST: Final = tl.constexpr(layout.NEAREST)
BILINEAR: Final = tl.constexpr(layout.BILINEAR)
BICUBIC: Final = tl.constexpr(layout.BICUBIC)
FIXED_POINT: Final = tl.constexpr(layout.FIXED_POINT)
OUT_HEIGHT: Final = tl.constexpr(layout.OUT_HEIGHT)
OUT_WIDTH: Final = tl.constexpr(layout.OUT_WIDTH)
Y: Final = tl.constexpr(layout.Y)
STEP_Y: Final = tl.constexpr(layout.STEP_Y)
X: Final = tl.constexpr(layout.X)
STEP_X: Final = tl.constexpr(layout.STEP_X)
OUT_AT: Final = tl.constexpr(layout.OUT_AT)
OUT_CHANNEL: Final = tl.constexpr(layout.OUT_CHANNEL)
OUT_ROW: Final = tl.constexpr(layout.OUT_ROW)
OPERATIONS_AT: Final = tl.constexpr(layout.OPERATIONS_AT)
OPERATIONS: Final = tl.constexpr(layout.OPERATIONS)
STATISTICS_AT: Final = tl.constexpr(layout.STATISTICS_AT)
BOXES_AT: Final = tl.constexpr(layout.BOXES_AT)
BOXES: Final = tl.constexpr(layout.BOXES)
