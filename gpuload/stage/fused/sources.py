"""Pixels inside a kernel: read from memory, and filled in outside the source. Device functions; nothing is kept."""

from __future__ import annotations

import triton
import triton.language as tl

from gpuload.stage.fused.record import FILL

__all__ = ["filled", "offsets", "read"]


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
