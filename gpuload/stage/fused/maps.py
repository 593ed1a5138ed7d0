"""Projective maps of images inside a kernel, as in `gpuload.stage.reference.warp`: Pillow's `Image.transform`.

Coordinates and filters are computed in float64, in the reference's order, since filtered levels are truncated, not
rounded: kernels launched with ``enable_fp_fusion=False`` give the same levels. Device functions; nothing is kept.
"""

# Type checkers do not know that calls in kernels return.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gpuload.stage.fused.record import BILINEAR, COLUMN_STEP, FILTER, FIXED_POINT, HEIGHT, NEAREST, ROW_STEP, WIDTH
from gpuload.stage.fused.sources import filled, read

__all__ = ["warp"]


@triton.jit
def warp(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    """Pixels of the result, each read where its centre is mapped to; what is outside is filled."""
    row_step = tl.load(ints_ptr + ROW_STEP).to(tl.int32)
    column_step = tl.load(ints_ptr + COLUMN_STEP).to(tl.int32)
    height = tl.load(ints_ptr + HEIGHT).to(tl.int32)
    width = tl.load(ints_ptr + WIDTH).to(tl.int32)
    filter_is = tl.load(ints_ptr + FILTER)
    if filter_is == FIXED_POINT:
        y, x, inside = _fixed(floats_ptr, ys, xs, height, width)
        one, two, three = read(source_ptr, y * row_step + x * column_step, channel_step, CHANNELS)
        red, green, blue = one.to(tl.float32), two.to(tl.float32), three.to(tl.float32)
    else:
        down, across, inside = _mapped(floats_ptr, ys, xs, height, width)
        if filter_is == NEAREST:
            at = down.to(tl.int32) * row_step + across.to(tl.int32) * column_step
            one, two, three = read(source_ptr, at, channel_step, CHANNELS)
            red, green, blue = one.to(tl.float32), two.to(tl.float32), three.to(tl.float32)
        else:
            y, down = _split(down)
            x, across = _split(across)
            if filter_is == BILINEAR:
                red = _bilinear(source_ptr, y, x, down, across, row_step, column_step, height, width)
                green, blue = red, red
                if CHANNELS == 3:
                    source_ptr += channel_step
                    green = _bilinear(source_ptr, y, x, down, across, row_step, column_step, height, width)
                    source_ptr += channel_step
                    blue = _bilinear(source_ptr, y, x, down, across, row_step, column_step, height, width)
            else:
                red = _bicubic(source_ptr, y, x, down, across, row_step, column_step, height, width)
                green, blue = red, red
                if CHANNELS == 3:
                    source_ptr += channel_step
                    green = _bicubic(source_ptr, y, x, down, across, row_step, column_step, height, width)
                    source_ptr += channel_step
                    blue = _bicubic(source_ptr, y, x, down, across, row_step, column_step, height, width)
    return filled(red, green, blue, inside, floats_ptr, CHANNELS)


@triton.jit
def _mapped(floats_ptr, ys, xs, height, width):
    """Where pixels are read, y and x, float64, somewhere inside where that is outside; and whether it is inside."""
    y = ys.to(tl.float64)[:, None] + 0.5
    x = xs.to(tl.float64)[None, :] + 0.5
    across = tl.load(floats_ptr) * x + tl.load(floats_ptr + 1) * y + tl.load(floats_ptr + 2)
    down = tl.load(floats_ptr + 3) * x + tl.load(floats_ptr + 4) * y + tl.load(floats_ptr + 5)
    g, h = tl.load(floats_ptr + 6), tl.load(floats_ptr + 7)
    seen = down == down
    if (g != 0) | (h != 0):
        scale = g * x + h * y + 1.0
        seen = scale != 0
        scale = tl.where(seen, scale, 1.0)
        across, down = across / scale, down / scale
    inside = seen & (down >= 0) & (down < height) & (across >= 0) & (across < width)
    return tl.where(inside, down, 0.5), tl.where(inside, across, 0.5), inside


@triton.jit
def _fixed(floats_ptr, ys, xs, height, width):
    """The pixels that are read, found in 16.16 fixed point."""
    y, y_inside = _places(floats_ptr + 3, ys, xs, height)
    x, x_inside = _places(floats_ptr, ys, xs, width)
    inside = y_inside & x_inside
    return tl.where(inside, y, 0), tl.where(inside, x, 0), inside


@triton.jit
def _places(floats_ptr, ys, xs, length):
    across, down, first = tl.load(floats_ptr), tl.load(floats_ptr + 1), tl.load(floats_ptr + 2)
    first = _units(first + across * 0.5 + down * 0.5)
    rows, columns = ys.to(tl.int64) * _units(down), xs.to(tl.int64) * _units(across)
    places = (rows[:, None] + (columns + first)[None, :]) >> 16
    return places.to(tl.int32), (places >= 0) & (places < length)


@triton.jit
def _units(number):
    return tl.floor(number * 65536.0 + 0.5).to(tl.int64)


@triton.jit
def _split(place):
    """The pixel whose centre is before a coordinate, and the distance from it."""
    place -= 0.5
    before = tl.floor(place)
    return before.to(tl.int32), place - before


@triton.jit
def _tap(source_ptr, row_at, x, column_step, width):
    column = tl.minimum(tl.maximum(x, 0), width - 1)
    return tl.load(source_ptr + (row_at + column * column_step)).to(tl.float64)


@triton.jit
def _bilinear(source_ptr, y, x, down, across, row_step, column_step, height, width):
    upper = _blended(source_ptr, y, x, across, row_step, column_step, height, width)
    lower = _blended(source_ptr, y + 1, x, across, row_step, column_step, height, width)
    return (upper + (lower - upper) * down).to(tl.int32).to(tl.float32)


@triton.jit
def _blended(source_ptr, y, x, across, row_step, column_step, height, width):
    row_at = tl.minimum(tl.maximum(y, 0), height - 1) * row_step
    one = _tap(source_ptr, row_at, x, column_step, width)
    return one + (_tap(source_ptr, row_at, x + 1, column_step, width) - one) * across


@triton.jit
def _bicubic(source_ptr, y, x, down, across, row_step, column_step, height, width):
    v1 = _curve(source_ptr, y - 1, x, across, row_step, column_step, height, width)
    v2 = _curve(source_ptr, y, x, across, row_step, column_step, height, width)
    v3 = _curve(source_ptr, y + 1, x, across, row_step, column_step, height, width)
    v4 = _curve(source_ptr, y + 2, x, across, row_step, column_step, height, width)
    level = tl.minimum(tl.maximum(_cubic(v1, v2, v3, v4, down), 0.0), 255.0)
    return level.to(tl.int32).to(tl.float32)


@triton.jit
def _curve(source_ptr, y, x, across, row_step, column_step, height, width):
    row_at = tl.minimum(tl.maximum(y, 0), height - 1) * row_step
    v1 = _tap(source_ptr, row_at, x - 1, column_step, width)
    v2 = _tap(source_ptr, row_at, x, column_step, width)
    v3 = _tap(source_ptr, row_at, x + 1, column_step, width)
    return _cubic(v1, v2, v3, _tap(source_ptr, row_at, x + 2, column_step, width), across)


@triton.jit
def _cubic(v1, v2, v3, v4, share):
    """Keys' cubic with a = -1, in the order in which Pillow adds."""
    square = 2 * (v1 - v2) + v3 - v4
    cube = v2 - v1 - v3 + v4
    return v2 + share * ((v3 - v1) + share * (square + share * cube))
