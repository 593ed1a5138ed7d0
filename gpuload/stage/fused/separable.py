"""Filters that go along the rows, then along the columns, inside a kernel: Pillow's resampling, and Gaussian blur.

A tile of the result needs some rows of the source. Each is filtered along itself once, and added to all rows of the
tile with its weight for each; the weights are in the tables of `gpuload.stage.fused.weights`. Those of a resampling are
whole numbers, and so are the sums, rounded to levels between the axes: the levels are Pillow's. Device functions;
nothing is kept.
"""

# Type checkers do not know that calls in kernels return.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton.language import core

from gpuload.stage.fused.record import (
    BICUBIC,
    BILINEAR,
    COLUMN_STEP,
    FILTER,
    HEIGHT,
    LINES,
    OUT_WIDTH,
    ROW_STEP,
    TAPS,
    WEIGHTS_X,
    WEIGHTS_Y,
    WIDTH,
)
from gpuload.stage.fused.sources import read
from gpuload.stage.fused.weights import GAUSSIAN, LINES_AT_ONCE, TAPS_AT_ONCE
from gpuload.transforms.program.windows import PRECISION_BITS

__all__ = ["blur", "resize"]

BITS: Final = tl.constexpr(PRECISION_BITS)
HALF: Final = tl.constexpr(1 << (PRECISION_BITS - 1))


@triton.jit
def resize(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Pillow's resampling of a box, bilinear or bicubic, rounded to levels between the axes."""
    if tl.load(ints_ptr + FILTER) == BILINEAR:
        red, green, blue = _filtered(
            source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ROWS, BILINEAR
        )
    else:
        red, green, blue = _filtered(
            source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ROWS, BICUBIC
        )
    return red, green, blue


@triton.jit
def blur(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """A Gaussian blur with mirrored borders; the source is the whole image."""
    return _filtered(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ROWS, GAUSSIAN)


@triton.jit
def _filtered(
    source_ptr,
    weights_ptr,
    ints_ptr,
    channel_step,
    tile,
    columns,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    CURVE: tl.constexpr,
):
    # Constant steps save instructions where pixels are read, which takes longest.
    column_step = tl.load(ints_ptr + COLUMN_STEP).to(tl.int32)
    fits = tl.load(ints_ptr + TAPS) <= tl.load(ints_ptr + WIDTH)
    if (channel_step == 1) & (column_step == CHANNELS) & fits:
        red, green, blue = _separable(
            source_ptr, weights_ptr, ints_ptr, 1, CHANNELS, tile, columns, CHANNELS, ROWS, CURVE, True
        )
    else:
        red, green, blue = _separable(
            source_ptr,
            weights_ptr,
            ints_ptr,
            channel_step,
            column_step,
            tile,
            columns,
            CHANNELS,
            ROWS,
            CURVE,
            False,
        )
    return red, green, blue


@triton.jit
def _separable(
    source_ptr,
    weights_ptr,
    ints_ptr,
    channel_step,
    column_step,
    tile,
    columns,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    CURVE: tl.constexpr,
    FORWARD: tl.constexpr,
):
    """FORWARD: pixels are next to each other in memory, and no fewer than weights."""
    tl.static_assert(TAPS_AT_ONCE == 2)
    tl.static_assert(LINES_AT_ONCE == 4)
    last_row, last_column = tl.load(ints_ptr + HEIGHT).to(tl.int32) - 1, tl.load(ints_ptr + WIDTH).to(tl.int32) - 1
    row_step = tl.load(ints_ptr + ROW_STEP).to(tl.int32)
    taps = tl.load(ints_ptr + TAPS).to(tl.int32)
    out_width = tl.load(ints_ptr + OUT_WIDTH).to(tl.int32)
    across_ptr = weights_ptr + tl.load(ints_ptr + WEIGHTS_X)
    first = tl.load(across_ptr + columns)
    across_ptr += out_width
    down_ptr = weights_ptr + tl.multiple_of(
        tl.load(ints_ptr + WEIGHTS_Y) + tile * (1 + tl.load(ints_ptr + LINES)) * ROWS, ROWS
    )
    top = tl.load(down_ptr)
    bottom = top + tl.load(down_ptr + 1)
    down_ptr += ROWS

    if CURVE == GAUSSIAN:
        red, half = tl.zeros([ROWS, columns.shape[0]], tl.float32), tl.zeros([columns.shape[0]], tl.float32)
    else:
        red, half = tl.full([ROWS, columns.shape[0]], HALF, tl.int32), tl.full([columns.shape[0]], HALF, tl.int32)
    green, blue = red, red
    row = top
    while row < bottom:
        # Four rows, so that many reads are under way at once, each a vector along the columns: so threads keep whole
        # columns of the tile, and exchange nothing.
        row0 = source_ptr + tl.minimum(row, last_row) * row_step
        row1 = source_ptr + tl.minimum(row + 1, last_row) * row_step
        row2 = source_ptr + tl.minimum(row + 2, last_row) * row_step
        row3 = source_ptr + tl.minimum(row + 3, last_row) * row_step
        red0, green0, blue0, red1, green1, blue1 = half, half, half, half, half, half
        red2, green2, blue2, red3, green3, blue3 = half, half, half, half, half, half
        weights = across_ptr + 2 * columns
        tap = 0
        while tap < taps:
            at = (first + tap) * column_step
            for one in tl.static_range(2):
                weight = _read_weight(weights + one, CURVE)
                if FORWARD:
                    step = one * CHANNELS
                else:
                    step = 0
                    at = tl.minimum(first + tap + one, last_column) * column_step
                red0, green0, blue0 = _add(red0, green0, blue0, row0 + step, at, channel_step, weight, CHANNELS, CURVE)
                red1, green1, blue1 = _add(red1, green1, blue1, row1 + step, at, channel_step, weight, CHANNELS, CURVE)
                red2, green2, blue2 = _add(red2, green2, blue2, row2 + step, at, channel_step, weight, CHANNELS, CURVE)
                red3, green3, blue3 = _add(red3, green3, blue3, row3 + step, at, channel_step, weight, CHANNELS, CURVE)
            weights += 2 * out_width
            tap += 2
        places = tl.arange(0, ROWS)
        share = _read_weight(down_ptr + places, CURVE)
        red, green, blue = _spread(red, green, blue, red0, green0, blue0, share, CHANNELS, CURVE)
        share = _read_weight(down_ptr + ROWS + places, CURVE)
        red, green, blue = _spread(red, green, blue, red1, green1, blue1, share, CHANNELS, CURVE)
        share = _read_weight(down_ptr + 2 * ROWS + places, CURVE)
        red, green, blue = _spread(red, green, blue, red2, green2, blue2, share, CHANNELS, CURVE)
        share = _read_weight(down_ptr + 3 * ROWS + places, CURVE)
        red, green, blue = _spread(red, green, blue, red3, green3, blue3, share, CHANNELS, CURVE)
        down_ptr += 4 * ROWS
        row += 4
    red = _finished(red, CURVE)
    if CHANNELS == 3:
        green, blue = _finished(green, CURVE), _finished(blue, CURVE)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _read_weight(weights_ptr, CURVE: tl.constexpr):
    """A weight in Pillow's units; float32 for a Gaussian."""
    weight = tl.load(weights_ptr)
    if CURVE == GAUSSIAN:
        weight = weight.to(tl.float32, bitcast=True)
    return weight


@triton.jit
def _add(red, green, blue, row_ptr, at, channel_step, weight, CHANNELS: tl.constexpr, CURVE: tl.constexpr):
    """Add one more pixel of a row. Sums fit; the interpreter would take ten times as long to check that."""
    one, two, three = read(row_ptr, at, channel_step, CHANNELS)
    if CURVE == GAUSSIAN:
        red = tl.fma(one.to(tl.float32), weight, red)
        if CHANNELS == 3:
            green, blue = tl.fma(two.to(tl.float32), weight, green), tl.fma(three.to(tl.float32), weight, blue)
    else:
        red = core.add(red, core.mul(one, weight, sanitize_overflow=False), sanitize_overflow=False)
        if CHANNELS == 3:
            green = core.add(green, core.mul(two, weight, sanitize_overflow=False), sanitize_overflow=False)
            blue = core.add(blue, core.mul(three, weight, sanitize_overflow=False), sanitize_overflow=False)
    return red, green, blue


@triton.jit
def _spread(red, green, blue, one, two, three, weight, CHANNELS: tl.constexpr, CURVE: tl.constexpr):
    """Add one more row, filtered along itself, to all rows of the result."""
    weight = weight[:, None]
    if CURVE == GAUSSIAN:
        red = tl.fma(one[None, :], weight, red)
        if CHANNELS == 3:
            green, blue = tl.fma(two[None, :], weight, green), tl.fma(three[None, :], weight, blue)
    else:
        one = _level(one, CURVE)
        red = core.add(red, core.mul(one[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
        if CHANNELS == 3:
            two, three = _level(two, CURVE), _level(three, CURVE)
            green = core.add(green, core.mul(two[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
            blue = core.add(blue, core.mul(three[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
    return red, green, blue


@triton.jit
def _level(total, CURVE: tl.constexpr):
    """A sum of levels in Pillow's units as a level."""
    level = total >> BITS
    if CURVE == BICUBIC:  # the bilinear one stays between the levels that it is made of
        level = tl.minimum(tl.maximum(level, 0), 255)
    return level


@triton.jit
def _finished(total, CURVE: tl.constexpr):
    return tl.minimum(tl.floor(total + 0.5), 255.0) if CURVE == GAUSSIAN else _level(total, CURVE).to(tl.float32)
