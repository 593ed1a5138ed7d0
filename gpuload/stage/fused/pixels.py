"""What all kernels use: the columns of a job, how pixels are read, and arithmetic that rounds as the reference does.

Kernels are launched with ``enable_fp_fusion=False``, so that a product and a sum round twice, as in the reference;
where the reference rounds once, kernels call `multiply_add`. The interpreter rounds a fused multiply-add twice and
truncates bfloat16, so both are written out for it. Device functions; nothing is kept.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton import knobs

from gpuload.transforms.program.fusing import jobs

__all__ = ["INTERPRETED", "filled", "multiply_add", "offsets", "read", "round_to"]

INTERPRETED: Final = tl.constexpr(knobs.runtime.interpret)

JOB: Final = tl.constexpr(jobs.JOB)
FLOATS: Final = tl.constexpr(jobs.FLOATS)
KIND: Final = tl.constexpr(jobs.KIND)
BASE: Final = tl.constexpr(jobs.BASE)
ROW_STEP: Final = tl.constexpr(jobs.ROW_STEP)
COLUMN_STEP: Final = tl.constexpr(jobs.COLUMN_STEP)
CHANNEL_STEP: Final = tl.constexpr(jobs.CHANNEL_STEP)
HEIGHT: Final = tl.constexpr(jobs.HEIGHT)
WIDTH: Final = tl.constexpr(jobs.WIDTH)
TABLE_AT: Final = tl.constexpr(jobs.TABLE_AT)
TABLE_ROWS: Final = tl.constexpr(jobs.TABLE_ROWS)
FILTER: Final = tl.constexpr(jobs.FILTER)
BOX_H: Final = tl.constexpr(jobs.BOX_H)
BOX_W: Final = tl.constexpr(jobs.BOX_W)
SIZE_H: Final = tl.constexpr(jobs.SIZE_H)
SIZE_W: Final = tl.constexpr(jobs.SIZE_W)
CORNER_Y: Final = tl.constexpr(jobs.CORNER_Y)
CORNER_X: Final = tl.constexpr(jobs.CORNER_X)
KERNEL_H: Final = tl.constexpr(jobs.KERNEL_H)
KERNEL_W: Final = tl.constexpr(jobs.KERNEL_W)
WEIGHTS_X: Final = tl.constexpr(jobs.WEIGHTS_X)
WEIGHTS_Y: Final = tl.constexpr(jobs.WEIGHTS_Y)
TAPS: Final = tl.constexpr(jobs.TAPS)
LINES: Final = tl.constexpr(jobs.LINES)
SIGMA_Y: Final = tl.constexpr(jobs.SIGMA_Y)
SIGMA_X: Final = tl.constexpr(jobs.SIGMA_X)
FACTOR: Final = tl.constexpr(jobs.FACTOR)
FILL: Final = tl.constexpr(jobs.FILL)
COPY: Final = tl.constexpr(jobs.COPY)
TABLE: Final = tl.constexpr(jobs.TABLE)
RESIZE: Final = tl.constexpr(jobs.RESIZE)
WARP: Final = tl.constexpr(jobs.WARP)
BLUR: Final = tl.constexpr(jobs.BLUR)
SHARPNESS: Final = tl.constexpr(jobs.SHARPNESS)
NEAREST: Final = tl.constexpr(jobs.NEAREST)
BILINEAR: Final = tl.constexpr(jobs.BILINEAR)
BICUBIC: Final = tl.constexpr(jobs.BICUBIC)
FIXED_POINT: Final = tl.constexpr(jobs.FIXED_POINT)
OUT_HEIGHT: Final = tl.constexpr(jobs.OUT_HEIGHT)
OUT_WIDTH: Final = tl.constexpr(jobs.OUT_WIDTH)
Y: Final = tl.constexpr(jobs.Y)
STEP_Y: Final = tl.constexpr(jobs.STEP_Y)
X: Final = tl.constexpr(jobs.X)
STEP_X: Final = tl.constexpr(jobs.STEP_X)
OUT_AT: Final = tl.constexpr(jobs.OUT_AT)
OUT_CHANNEL: Final = tl.constexpr(jobs.OUT_CHANNEL)
OUT_ROW: Final = tl.constexpr(jobs.OUT_ROW)
OUT_PIXEL: Final = tl.constexpr(jobs.OUT_PIXEL)
OPERATIONS_AT: Final = tl.constexpr(jobs.OPERATIONS_AT)
OPERATIONS: Final = tl.constexpr(jobs.OPERATIONS)
STATISTICS_AT: Final = tl.constexpr(jobs.STATISTICS_AT)
BOXES_AT: Final = tl.constexpr(jobs.BOXES_AT)
BOXES: Final = tl.constexpr(jobs.BOXES)


@triton.jit
def read(source_ptr, at, channel_step, CHANNELS: tl.constexpr):
    """The levels of pixels, int32, at byte offsets `at` from a pointer: red, green and blue, or one three times."""
    red = tl.load(source_ptr + at).to(tl.int32)
    if CHANNELS == 3:
        green = tl.load(source_ptr + channel_step + at).to(tl.int32)
        blue = tl.load(source_ptr + 2 * channel_step + at).to(tl.int32)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def filled(red, green, blue, inside, floats_ptr, CHANNELS: tl.constexpr):
    """Levels, float32: pixels where they are inside, elsewhere the job's fill."""
    red = tl.where(inside, red.to(tl.float32), tl.load(floats_ptr + FILL).to(tl.float32))
    if CHANNELS == 3:
        green = tl.where(inside, green.to(tl.float32), tl.load(floats_ptr + FILL + 1).to(tl.float32))
        blue = tl.where(inside, blue.to(tl.float32), tl.load(floats_ptr + FILL + 2).to(tl.float32))
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def offsets(ints_ptr, STEP: tl.constexpr, LENGTH: tl.constexpr, places):
    """The byte offsets of rows or columns from the first one; those beyond the source count as its nearest."""
    last = tl.load(ints_ptr + LENGTH).to(tl.int32) - 1
    return tl.minimum(tl.maximum(places, 0), last) * tl.load(ints_ptr + STEP).to(tl.int32)


@triton.jit
def multiply_add(factor, numbers, added):
    """factor · numbers + added on float32, rounded once. Numbers must be levels or differences of levels."""
    if INTERPRETED:
        # 24 and 9 bits: the product is exact in float64, and so is the sum, except for factors next to 0.
        result = (factor.to(tl.float64) * numbers.to(tl.float64) + added.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(factor + tl.zeros_like(numbers), numbers, added)
    return result


@triton.jit
def round_to(numbers, dtype: tl.constexpr):
    """float32 in another dtype, rounded to the nearest, ties to even; truncated for uint8."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(dtype)
    return result
