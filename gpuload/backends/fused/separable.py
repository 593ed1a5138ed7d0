"""Filters that go along the rows, then along the columns, inside a kernel: Pillow's resampling, and Gaussian blur.

A tile of the result needs some rows of the source, each of which is filtered along itself once, and added to all rows
of the tile with its weight for each. Weights are made where they are needed, in float32, from distances that are exact.
Those of a resampling are made to whole numbers as Pillow does it, and sums of integers follow: so the levels are
Pillow's, but where float32 took a weight for one of its 2**-22 more or less. Device functions; nothing is kept.
"""

# Type checkers do not know that calls in kernels return.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gpuload.backends.fused.record import (
    BICUBIC,
    BILINEAR,
    BOX_H,
    BOX_W,
    COLUMN_STEP,
    CORNER_X,
    CORNER_Y,
    FILTER,
    HEIGHT,
    KERNEL_H,
    KERNEL_W,
    ROW_STEP,
    SIGMA_X,
    SIGMA_Y,
    SIZE_H,
    SIZE_W,
    WIDTH,
)
from gpuload.backends.fused.sources import read
from gpuload.transforms.resampling import PRECISION_BITS

__all__ = ["blur", "resize"]

GAUSSIAN: Final = tl.constexpr(100)  # beside the filters of resampling
FAR: Final = tl.constexpr(1e11)  # a distance at which every filter is 0
ROOT: Final = tl.constexpr(0.8493218002880191)  # of log2(e) / 2: a Gaussian is 2 ** -(ROOT · distance / sigma)²
BITS: Final = tl.constexpr(PRECISION_BITS)
HALF: Final = tl.constexpr(1 << (PRECISION_BITS - 1))
ONE: Final = tl.constexpr(2.0**PRECISION_BITS)
# The bits of a float32 next to it count whole numbers: the cheapest way to round to one. Weights are in -½ … 1½.
WHOLE: Final = tl.constexpr(1.25 * 2**23)
WHOLE_BITS: Final = tl.constexpr(0x4B200000)


@triton.jit
def resize(source_ptr, ints_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    """Pillow's resampling of a box, bilinear or bicubic, rounded to levels between the axes as there."""
    if tl.load(ints_ptr + FILTER) == BILINEAR:
        red, green, blue = _resize(source_ptr, ints_ptr, channel_step, ys, xs, CHANNELS, BILINEAR)
    else:
        red, green, blue = _resize(source_ptr, ints_ptr, channel_step, ys, xs, CHANNELS, BICUBIC)
    return red, green, blue


@triton.jit
def _resize(source_ptr, ints_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr, FILTER_IS: tl.constexpr):
    # A step that is known saves a fifth of the instructions where pixels are read.
    if channel_step == 1:
        red, green, blue = _separable(source_ptr, ints_ptr, None, 1, ys, xs, CHANNELS, FILTER_IS)
    else:
        red, green, blue = _separable(source_ptr, ints_ptr, None, 0, ys, xs, 1, FILTER_IS)
    return red, green, blue


@triton.jit
def blur(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    """A Gaussian blur with mirrored borders; the source is the whole image."""
    return _separable(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS, GAUSSIAN)


@triton.jit
def _separable(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr, FILTER_IS: tl.constexpr):
    column_step = tl.load(ints_ptr + COLUMN_STEP).to(tl.int32)
    width = tl.load(ints_ptr + WIDTH).to(tl.int32)
    low, high = tl.min(ys), tl.max(ys)
    # Rows `top` … `bottom` - 1 are what the tile needs. Distances are whole numbers in float32, in such units that a
    # pixel has `pixel` of them. Of each row and column of the result: the first pixel that the filter takes, and how
    # far that is from the centre; of rows, how far `top` is.
    if FILTER_IS == GAUSSIAN:
        pixel_y, pixel_x = 1, 1
        taps_y, scale_y = _kernel(tl.load(ints_ptr + KERNEL_H), tl.load(floats_ptr + SIGMA_Y))
        taps_x, scale_x = _kernel(tl.load(ints_ptr + KERNEL_W), tl.load(floats_ptr + SIGMA_X))
        before_y, before_x = taps_y // 2, taps_x // 2
        top, bottom = low - before_y, high + before_y + 1
        first_y, start_y = ys - before_y, tl.zeros_like(ys) - before_y
        first_x, start_x = xs - before_x, tl.zeros_like(xs) - before_x
        top_y = top - ys
        end_y, end_x = bottom, width + before_x
    else:
        end_y, end_x = tl.load(ints_ptr + BOX_H).to(tl.int32), tl.load(ints_ptr + BOX_W).to(tl.int32)
        size_y, size_x = tl.load(ints_ptr + SIZE_H).to(tl.int32), tl.load(ints_ptr + SIZE_W).to(tl.int32)
        before_y, before_x = tl.load(ints_ptr + CORNER_Y).to(tl.int32), tl.load(ints_ptr + CORNER_X).to(tl.int32)
        pixel_y, pixel_x = 2 * size_y, 2 * size_x
        reach_y, taps_y, scale_y = _stretched(end_y, size_y, FILTER_IS)
        reach_x, taps_x, scale_x = _stretched(end_x, size_x, FILTER_IS)
        # The centre of row y is at (y + ½) · box / size: whole pixels, and so many units.
        whole_x, rest_x = _centre(xs, end_x, pixel_x)
        first_x = _first(whole_x, rest_x, pixel_x, reach_x)
        start_x = (first_x - whole_x) * pixel_x + size_x - rest_x
        # For rows it is counted on from the first one's: every thread has to know all of them, and divisions take long.
        whole_y, rest_low = _centre(low, end_y, pixel_y)
        rest_y = rest_low + (ys - low) * (2 * end_y)
        first_y = _first(whole_y, rest_y, pixel_y, reach_y)
        start_y = (first_y - whole_y) * pixel_y + size_y - rest_y
        top = _first(whole_y, rest_low, pixel_y, reach_y)
        bottom = _first(whole_y, rest_low + (high - low) * (2 * end_y), pixel_y, reach_y) + taps_y
        bottom = tl.minimum(bottom, end_y)
        top_y = (top - whole_y) * pixel_y + size_y - rest_y
    start_x = start_x.to(tl.float32)
    norm_x = _norm(first_x, start_x, pixel_x, scale_x, taps_x, end_x, FILTER_IS)
    norm_y = _norm(first_y, start_y.to(tl.float32), pixel_y, scale_y, taps_y, end_y, FILTER_IS)
    norm_y, top_y = norm_y[:, None], top_y.to(tl.float32)[:, None]

    if FILTER_IS == GAUSSIAN:
        red, half = tl.zeros([ys.shape[0], xs.shape[0]], tl.float32), tl.zeros([xs.shape[0]], tl.float32)
    else:
        red, half = tl.full([ys.shape[0], xs.shape[0]], HALF, tl.int32), tl.full([xs.shape[0]], HALF, tl.int32)
    green, blue = red, red
    row = top
    while row < bottom:
        # Four rows, so that many reads are under way together, each a vector along the columns: so threads keep whole
        # columns of the tile, and nothing goes from one to another.
        row0 = source_ptr + _row(row, ints_ptr, before_y, FILTER_IS)
        row1 = source_ptr + _row(row + 1, ints_ptr, before_y, FILTER_IS)
        row2 = source_ptr + _row(row + 2, ints_ptr, before_y, FILTER_IS)
        row3 = source_ptr + _row(row + 3, ints_ptr, before_y, FILTER_IS)
        red0, green0, blue0, red1, green1, blue1 = half, half, half, half, half, half
        red2, green2, blue2, red3, green3, blue3 = half, half, half, half, half, half
        tap = 0
        while tap < taps_x:
            column = first_x + tap
            weight = _weight(start_x + (tap * pixel_x).to(tl.float32), scale_x, norm_x, FILTER_IS)
            weight = tl.where(column < end_x, weight, 0)
            at = _place(column, before_x, width, FILTER_IS) * column_step
            red0, green0, blue0 = _add(red0, green0, blue0, row0, at, channel_step, weight, CHANNELS, FILTER_IS)
            red1, green1, blue1 = _add(red1, green1, blue1, row1, at, channel_step, weight, CHANNELS, FILTER_IS)
            red2, green2, blue2 = _add(red2, green2, blue2, row2, at, channel_step, weight, CHANNELS, FILTER_IS)
            red3, green3, blue3 = _add(red3, green3, blue3, row3, at, channel_step, weight, CHANNELS, FILTER_IS)
            tap += 1
        weight = _row_weight(row, top, bottom, top_y, pixel_y, scale_y, norm_y, taps_y, FILTER_IS)
        red, green, blue = _spread(red, green, blue, red0, green0, blue0, weight, CHANNELS, FILTER_IS)
        weight = _row_weight(row + 1, top, bottom, top_y, pixel_y, scale_y, norm_y, taps_y, FILTER_IS)
        red, green, blue = _spread(red, green, blue, red1, green1, blue1, weight, CHANNELS, FILTER_IS)
        weight = _row_weight(row + 2, top, bottom, top_y, pixel_y, scale_y, norm_y, taps_y, FILTER_IS)
        red, green, blue = _spread(red, green, blue, red2, green2, blue2, weight, CHANNELS, FILTER_IS)
        weight = _row_weight(row + 3, top, bottom, top_y, pixel_y, scale_y, norm_y, taps_y, FILTER_IS)
        red, green, blue = _spread(red, green, blue, red3, green3, blue3, weight, CHANNELS, FILTER_IS)
        row += 4
    red = _finished(red, FILTER_IS)
    if CHANNELS == 3:
        green, blue = _finished(green, FILTER_IS), _finished(blue, FILTER_IS)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _stretched(box, size, FILTER_IS: tl.constexpr):
    """Of an axis: how far the filter reaches in pixels of the box, how many of them it takes, and its scale: of the
    bilinear one its reach, in units of `_separable`, of others what turns these into the filter's own."""
    support: tl.constexpr = 1.0 if FILTER_IS == BILINEAR else 2.0
    larger = tl.maximum(box, size)
    reach = tl.where(box == size, 0.5, support * (larger.to(tl.float32) / size.to(tl.float32)))  # a copy takes but one
    scale = 2.0 * larger.to(tl.float32)
    return reach, tl.ceil(2 * reach).to(tl.int32), scale if FILTER_IS == BILINEAR else 1.0 / scale


@triton.jit
def _centre(places, box, pixel):
    units = (2 * places.to(tl.int64) + 1) * box
    whole = units // pixel
    return whole.to(tl.int32), (units - whole * pixel).to(tl.int32)


@triton.jit
def _first(whole, rest, pixel, reach):
    """The first pixel that a filter takes around a centre."""
    return tl.maximum(whole + tl.floor(rest.to(tl.float32) / pixel.to(tl.float32) - reach + 0.5).to(tl.int32), 0)


@triton.jit
def _kernel(size, sigma):
    """Of a Gaussian: how many pixels it takes, which is odd, and its scale.

    Pixels further than 5 sigma from the middle weigh less than a millionth of its weight each."""
    sigma = sigma.to(tl.float32)
    near = tl.minimum(tl.ceil(5 * sigma), 1e6).to(tl.int32)
    return 2 * tl.minimum(size.to(tl.int32) // 2, near) + 1, ROOT / sigma


@triton.jit
def _norm(first, start, pixel, scale, taps, end, FILTER_IS: tl.constexpr):
    """What each weight is to be multiplied with, so that those of all taps sum up to one."""
    total = tl.zeros_like(start)
    tap = 0
    while tap < taps:
        weight = _curve(start + (tap * pixel).to(tl.float32), scale, FILTER_IS)
        total += tl.where(first + tap < end, weight, 0.0)
        tap += 1
    return tl.div_rn(tl.full(total.shape, 1.0 if FILTER_IS == GAUSSIAN else ONE, tl.float32), total)


@triton.jit
def _curve(distance, scale, FILTER_IS: tl.constexpr):
    """A filter."""
    if FILTER_IS == GAUSSIAN:
        distance *= scale
        weight = tl.exp2(-distance * distance)
    elif FILTER_IS == BILINEAR:
        weight = tl.maximum(scale - tl.abs(distance), 0.0)  # a whole number: so is the sum, and exact
    else:  # Keys' cubic with a = -½, as Pillow resizes
        far = tl.abs(distance) * scale
        inner = tl.fma(tl.fma(1.5, far, -2.5), far * far, 1.0)
        outer = tl.fma(tl.fma(tl.fma(-0.5, far, 2.5), far, -4.0), far, 2.0)
        weight = tl.where(far < 1.0, inner, tl.where(far < 2.0, outer, 0.0))
    return weight


@triton.jit
def _weight(distance, scale, norm, FILTER_IS: tl.constexpr):
    """What pixels so far from the centre weigh: int32 in Pillow's units, of a Gaussian float32."""
    weight = _curve(distance, scale, FILTER_IS)
    if FILTER_IS == GAUSSIAN:
        weight *= norm
    else:
        weight = tl.fma(weight, norm, WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS
    return weight


@triton.jit
def _row_weight(row, top, bottom, top_y, pixel, scale, norm, taps, FILTER_IS: tl.constexpr):
    """What a row of the source weighs in each row of the result."""
    distance = top_y + tl.where(row < bottom, ((row - top) * pixel).to(tl.float32), FAR)
    weight = _weight(distance, scale, norm, FILTER_IS)
    if FILTER_IS == GAUSSIAN:
        weight = tl.where(tl.abs(distance) <= (taps // 2).to(tl.float32), weight, 0.0)
    return weight


@triton.jit
def _row(place, ints_ptr, before, FILTER_IS: tl.constexpr):
    """Where a row of the source is."""
    height = tl.load(ints_ptr + HEIGHT).to(tl.int32)
    return _place(place, before, height, FILTER_IS) * tl.load(ints_ptr + ROW_STEP).to(tl.int32)


@triton.jit
def _place(places, before, length, FILTER_IS: tl.constexpr):
    """Which pixels of the source are meant: those of a box, which begins so far before it; or, blurred, those of the
    whole image and so far beyond it, mirrored at its first and last pixel as often as needed."""
    last = length - 1
    if FILTER_IS == GAUSSIAN:
        if before > last:
            period = tl.maximum(2 * last, 1)
            places = (places + (before // period + 1) * period) % period  # of no negative number
        else:
            places = tl.abs(places)
        places = last - tl.abs(last - places)
        places = tl.maximum(places, 0)  # rows behind the last one that is needed may lie anywhere
    else:
        places = tl.minimum(tl.maximum(places - before, 0), last)
    return places


@triton.jit
def _add(red, green, blue, row_ptr, at, channel_step, weight, CHANNELS: tl.constexpr, FILTER_IS: tl.constexpr):
    """One more pixel of a row. Sums fit, which the interpreter would take ten times as long to make sure of."""
    one, two, three = read(row_ptr, at, channel_step, CHANNELS)
    if FILTER_IS == GAUSSIAN:
        red = tl.fma(one.to(tl.float32), weight, red)
        if CHANNELS == 3:
            green, blue = tl.fma(two.to(tl.float32), weight, green), tl.fma(three.to(tl.float32), weight, blue)
    else:
        red = tl.add(red, tl.mul(one, weight, sanitize_overflow=False), sanitize_overflow=False)
        if CHANNELS == 3:
            green = tl.add(green, tl.mul(two, weight, sanitize_overflow=False), sanitize_overflow=False)
            blue = tl.add(blue, tl.mul(three, weight, sanitize_overflow=False), sanitize_overflow=False)
    return red, green, blue


@triton.jit
def _spread(red, green, blue, one, two, three, weight, CHANNELS: tl.constexpr, FILTER_IS: tl.constexpr):
    """One more row, filtered along itself, for all rows of the result."""
    if FILTER_IS == GAUSSIAN:
        red = tl.fma(one[None, :], weight, red)
        if CHANNELS == 3:
            green, blue = tl.fma(two[None, :], weight, green), tl.fma(three[None, :], weight, blue)
    else:
        one = _level(one, FILTER_IS)
        red = tl.add(red, tl.mul(one[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
        if CHANNELS == 3:
            two, three = _level(two, FILTER_IS), _level(three, FILTER_IS)
            green = tl.add(green, tl.mul(two[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
            blue = tl.add(blue, tl.mul(three[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
    return red, green, blue


@triton.jit
def _level(total, FILTER_IS: tl.constexpr):
    """A sum of levels in Pillow's units as a level."""
    level = total >> BITS
    if FILTER_IS == BICUBIC:  # the other stays between the levels that it is made of
        level = tl.minimum(tl.maximum(level, 0), 255)
    return level


@triton.jit
def _finished(total, FILTER_IS: tl.constexpr):
    if FILTER_IS == GAUSSIAN:
        levels = tl.minimum(tl.floor(total + 0.5), 255.0)
    else:
        levels = _level(total, FILTER_IS).to(tl.float32)
    return levels
