"""Definitions shared by all kernels: the columns of a job, reading pixels, and rounding like torch.

Kernels are launched with ``enable_fp_fusion=False``, so that a product and a sum round twice, as in the reference.
Triton's interpreter truncates bfloat16, so rounding is written out for it. All functions are stateless device functions
of Triton.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton import knobs

from gpuload.transforms.program.fusing import jobs as R

__all__ = ["INTERPRETED", "clamped_offsets", "fill_outside", "read", "round_to"]

INTERPRETED: Final = tl.constexpr(knobs.runtime.interpret)

# The columns of a job, explained in `gpuload.transforms.program.fusing.jobs`. Kernels import them one by one, because
# the constants among a kernel's globals are part of its key in Triton's disk cache, but attributes of modules are not.
# If kernels read attributes of the module, a kernel compiled for an older layout could be launched.
JOB, FLOATS = map(tl.constexpr, (R.JOB, R.FLOATS))
KIND, BASE, ROW_STEP, COLUMN_STEP = map(tl.constexpr, (R.KIND, R.BASE, R.ROW_STEP, R.COLUMN_STEP))
CHANNEL_STEP, HEIGHT, WIDTH = map(tl.constexpr, (R.CHANNEL_STEP, R.HEIGHT, R.WIDTH))
TABLE_AT, TABLE_ROWS, FILTER = map(tl.constexpr, (R.TABLE_AT, R.TABLE_ROWS, R.FILTER))
BOX_H, SIZE_H, CORNER_Y, KERNEL_H = map(tl.constexpr, (R.BOX_H, R.SIZE_H, R.CORNER_Y, R.KERNEL_H))  # x follows y
WEIGHTS_X, WEIGHTS_Y, TAPS, LINES = map(tl.constexpr, (R.WEIGHTS_X, R.WEIGHTS_Y, R.TAPS, R.LINES))
OUT_HEIGHT, OUT_WIDTH = map(tl.constexpr, (R.OUT_HEIGHT, R.OUT_WIDTH))
Y, STEP_Y, X, STEP_X = map(tl.constexpr, (R.Y, R.STEP_Y, R.X, R.STEP_X))
OUT_AT, OUT_CHANNEL, OUT_ROW, OUT_PIXEL = map(tl.constexpr, (R.OUT_AT, R.OUT_CHANNEL, R.OUT_ROW, R.OUT_PIXEL))
OPERATIONS_AT, OPERATION_COUNT = map(tl.constexpr, (R.OPERATIONS_AT, R.OPERATIONS))
STATISTICS_AT, BOXES_AT, BOXES = map(tl.constexpr, (R.STATISTICS_AT, R.BOXES_AT, R.BOXES))
SIGMA_Y, FACTOR, FILL = map(tl.constexpr, (R.SIGMA_Y, R.FACTOR, R.FILL))
COPY, TABLE, RESIZE = map(tl.constexpr, (R.COPY, R.TABLE, R.RESIZE))
WARP, BLUR, SHARPNESS = map(tl.constexpr, (R.WARP, R.BLUR, R.SHARPNESS))
NEAREST, BILINEAR, BICUBIC = map(tl.constexpr, (R.NEAREST, R.BILINEAR, R.BICUBIC))
FIXED_POINT: Final = tl.constexpr(R.FIXED_POINT)
# The bit of each filter in FILTERS, the mask of the filters for which a kernel is compiled.
NEAREST_BIT, BILINEAR_BIT, BICUBIC_BIT = (tl.constexpr(1 << code) for code in (R.NEAREST, R.BILINEAR, R.BICUBIC))


@triton.jit
def read(source_ptr, byte_offsets, channel_step, CHANNELS: tl.constexpr):
    """Load the levels of pixels, int32, at byte offsets from a pointer. Return red, green and blue; with one
    channel, the same block three times."""
    red = tl.load(source_ptr + byte_offsets).to(tl.int32)
    if CHANNELS == 3:
        green = tl.load(source_ptr + channel_step + byte_offsets).to(tl.int32)
        blue = tl.load(source_ptr + 2 * channel_step + byte_offsets).to(tl.int32)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def fill_outside(red, green, blue, is_inside, floats_ptr, CHANNELS: tl.constexpr):
    """Convert levels to float32, and replace levels outside the source by the job's fill."""
    red = tl.where(is_inside, red.to(tl.float32), tl.load(floats_ptr + FILL).to(tl.float32))
    if CHANNELS == 3:
        green = tl.where(is_inside, green.to(tl.float32), tl.load(floats_ptr + FILL + 1).to(tl.float32))
        blue = tl.where(is_inside, blue.to(tl.float32), tl.load(floats_ptr + FILL + 2).to(tl.float32))
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def clamped_offsets(ints_ptr, STEP: tl.constexpr, LENGTH: tl.constexpr, coordinates):
    """Return the byte offsets of rows or columns from the first one. Coordinates outside the source are clamped."""
    last = tl.load(ints_ptr + LENGTH).to(tl.int32) - 1
    return tl.minimum(tl.maximum(coordinates, 0), last) * tl.load(ints_ptr + STEP).to(tl.int32)


@triton.jit
def round_to(numbers, dtype: tl.constexpr):
    """Convert float32 to another dtype, rounding to the nearest value (ties to even); truncate for uint8."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(dtype)
    return result
