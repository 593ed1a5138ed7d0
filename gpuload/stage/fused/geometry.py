"""Samples the pixels of a tile: the first half of the fused kernels.

A kernel is compiled for one kind of geometry, because a kernel for all kinds would need the registers of the most
demanding kind. All other parameters are in the job (see `gpuload.transforms.program.fusing.jobs`). `sample_pixels`
returns three rows × columns float32 blocks, red, green and blue, of integral pixel values 0 … 255 (for one channel, the
same block three times). The tile's rows and columns may be in ascending or descending order, and are inside the result.
No byte outside the source is read, whatever a job contains. All functions are stateless device functions of Triton.

If a tile has at least 32 columns per warp, each GPU thread should hold entire columns of it. The compiler chooses this
layout only if it knows that the elements of a row are adjacent in memory. Otherwise it distributes the rows of a column
among neighbouring threads, which then read and write small pieces and exchange them. So `tl.max_contiguous` claims that
pairs in a row are adjacent. They need not actually be adjacent: the compiler knows nothing about their alignment, so it
never reads a pair with one instruction.

This file contains copies, sharpness (as in `gpuload.stage.reference.blur`) and projective maps (Pillow's
`Image.transform`, as in `gpuload.stage.reference.warp`); `separable` contains the filters of resizing and blur. Maps
compute coordinates and filters in float64, in the same order as the reference, because filtered values are truncated,
not rounded. Launched with ``enable_fp_fusion=False``, kernels produce the reference's pixel values.
"""

# Type checkers do not understand that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gpuload.stage.fused.pixels import (
    BASE,
    BICUBIC_BIT,
    BILINEAR,
    BILINEAR_BIT,
    BLUR,
    CHANNEL_STEP,
    COLUMN_STEP,
    COPY,
    FACTOR,
    FILTER,
    FIXED_POINT,
    HEIGHT,
    INTERPRETED,
    KIND,
    NEAREST,
    NEAREST_BIT,
    RESIZE,
    ROW_STEP,
    SHARPNESS,
    TABLE,
    TABLE_AT,
    TABLE_ROWS,
    WARP,
    WIDTH,
    clamped_offsets,
    fill_outside,
    read,
)
from gpuload.stage.fused.separable import blur, resize

__all__ = ["sample_pixels", "sample_row_by_row"]


@triton.jit
def sample_pixels(
    source_ptr,
    table_ptr,
    weights_ptr,
    ints_ptr,
    floats_ptr,
    tile,
    columns,
    ys,
    xs,
    CHANNELS: tl.constexpr,
    GEOMETRY: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """Sample the pixels of a tile.

    Args:
        source_ptr: uint8; a job's BASE is an offset from it.
        table_ptr: int32; a job's TABLE_AT is an offset from it.
        weights_ptr: int32; a job's WEIGHTS_X and WEIGHTS_Y are offsets from it.
        ints_ptr, floats_ptr: the job's int64 and float64 values.
        tile, columns: the tile's index, from the top of the pass's result, and the tile's columns, int32 (columns,).
        ys, xs: int32 (rows,) and (columns,), the tile's coordinates in the geometry's result.
        CHANNELS: 1 or 3.
        GEOMETRY: the job's KIND, or COPY if that is TABLE.
        FILTERS: a mask of the filters that the jobs of RESIZE and WARP can have; 0 for other kinds.

    Returns:
        red, green, blue.
    """
    source_ptr += tl.load(ints_ptr + BASE)
    channel_step = tl.load(ints_ptr + CHANNEL_STEP).to(tl.int32)
    if GEOMETRY == COPY:
        red, green, blue = _copy_pixels(source_ptr, table_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS)
    elif GEOMETRY == RESIZE:
        red, green, blue = resize(
            source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, FILTERS, ys.shape[0]
        )
    elif GEOMETRY == BLUR:
        red, green, blue = blur(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ys.shape[0])
    elif INTERPRETED:  # in the interpreter, each step takes as long for a row as for a tile
        red, green, blue = sample_tile(
            source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS, GEOMETRY, FILTERS
        )
    else:
        red, green, blue = sample_row_by_row(
            source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS, GEOMETRY, FILTERS
        )
    return red, green, blue


@triton.jit
def sample_tile(
    source_ptr,
    ints_ptr,
    floats_ptr,
    channel_step,
    ys,
    xs,
    CHANNELS: tl.constexpr,
    GEOMETRY: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """Sample all pixels of a tile in one step, for kinds of geometry that read more than one source pixel per pixel."""
    if GEOMETRY == WARP:
        red, green, blue = warp(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS, FILTERS)
    else:
        tl.static_assert(GEOMETRY == SHARPNESS, "unknown kind of geometry")
        red, green, blue = sharpness(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS)
    return red, green, blue


@triton.jit
def sample_row_by_row(
    source_ptr,
    ints_ptr,
    floats_ptr,
    channel_step,
    ys,
    xs,
    CHANNELS: tl.constexpr,
    GEOMETRY: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """Do the same as `sample_tile`, but row by row, because a map's bicubic filter on 8 rows at once needs more
    registers than a thread has (255 registers, and 56 bytes spilled to memory)."""
    row_indices = tl.arange(0, ys.shape[0])[:, None]
    red = tl.zeros([ys.shape[0], xs.shape[0]], tl.float32)
    green, blue = red, red
    row = 0
    while row < ys.shape[0]:
        is_row = row_indices == row
        y = tl.sum(tl.where(is_row, ys[:, None], 0), axis=0)
        r, g, b = sample_tile(source_ptr, ints_ptr, floats_ptr, channel_step, y, xs, CHANNELS, GEOMETRY, FILTERS)
        red = tl.where(is_row, r, red)
        if CHANNELS == 3:
            green, blue = tl.where(is_row, g, green), tl.where(is_row, b, blue)
        row += 1
    if CHANNELS == 1:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _copy_pixels(source_ptr, table_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    """Copy pixels, from the same coordinates or from the coordinates in a table."""
    if tl.load(ints_ptr + KIND) == TABLE:
        table_ptr += tl.load(ints_ptr + TABLE_AT)
        ys = tl.load(table_ptr + ys)
        xs = tl.load(table_ptr + tl.load(ints_ptr + TABLE_ROWS) + xs)
    is_inside = (ys >= 0)[:, None] & (xs >= 0)[None, :]
    byte_offsets = (
        clamped_offsets(ints_ptr, ROW_STEP, HEIGHT, ys)[:, None]
        + clamped_offsets(ints_ptr, COLUMN_STEP, WIDTH, xs)[None, :]
    )
    red, green, blue = read(source_ptr, tl.max_contiguous(byte_offsets, [1, 2]), channel_step, CHANNELS)
    return fill_outside(red, green, blue, is_inside, floats_ptr, CHANNELS)


# -- sharpness ---------------------------------------------------------------------------------------------------------


@triton.jit
def sharpness(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    factor = tl.load(floats_ptr + FACTOR).to(tl.float32)
    height, width = tl.load(ints_ptr + HEIGHT), tl.load(ints_ptr + WIDTH)
    is_interior = ((ys > 0) & (ys < height - 1))[:, None] & ((xs > 0) & (xs < width - 1))[None, :]
    red = tl.zeros([ys.shape[0], xs.shape[0]], tl.int32)
    green, blue = red, red
    for index in tl.static_range(9):
        byte_offsets = clamped_offsets(ints_ptr, ROW_STEP, HEIGHT, ys + (index // 3 - 1))[:, None]
        byte_offsets += clamped_offsets(ints_ptr, COLUMN_STEP, WIDTH, xs + (index % 3 - 1))[None, :]
        r, g, b = read(source_ptr, byte_offsets, channel_step, CHANNELS)
        red += r
        if CHANNELS == 3:
            green += g
            blue += b
    byte_offsets = (
        clamped_offsets(ints_ptr, ROW_STEP, HEIGHT, ys)[:, None]
        + clamped_offsets(ints_ptr, COLUMN_STEP, WIDTH, xs)[None, :]
    )
    r, g, b = read(source_ptr, byte_offsets, channel_step, CHANNELS)
    red = _sharpen(r, red, is_interior, factor)
    if CHANNELS == 3:
        green, blue = _sharpen(g, green, is_interior, factor), _sharpen(b, blue, is_interior, factor)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _sharpen(levels, total, is_interior, factor):
    levels = levels.to(tl.float32)
    # The centre pixel counts five times. An integer plus a half, divided by 13, is never close to an integer, so the
    # multiplication by 1/13 cannot change the result of floor.
    smoothed = tl.where(is_interior, tl.floor((total.to(tl.float32) + 4 * levels + 6.5) * (1 / 13)), levels)
    return tl.floor(tl.minimum(tl.maximum((levels - smoothed) * factor + smoothed, 0.0), 255.0))


# -- projective maps ---------------------------------------------------------------------------------------------------


@triton.jit
def warp(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr, FILTERS: tl.constexpr):
    """Sample each pixel at the point to which its centre is mapped; fill pixels that are mapped outside the source."""
    row_step = tl.load(ints_ptr + ROW_STEP).to(tl.int32)
    column_step = tl.load(ints_ptr + COLUMN_STEP).to(tl.int32)
    height = tl.load(ints_ptr + HEIGHT).to(tl.int32)
    width = tl.load(ints_ptr + WIDTH).to(tl.int32)
    filter_kind = tl.load(ints_ptr + FILTER)
    if (NEAREST_BIT & FILTERS) and filter_kind == FIXED_POINT:
        y, x, is_inside = _map_fixed_point(floats_ptr, ys, xs, height, width)
        r, g, b = read(source_ptr, y * row_step + x * column_step, channel_step, CHANNELS)
        red, green, blue = r.to(tl.float32), g.to(tl.float32), b.to(tl.float32)
    else:
        point_y, point_x, is_inside = _map_points(floats_ptr, ys, xs, height, width)
        if FILTERS == NEAREST_BIT or ((NEAREST_BIT & FILTERS) and filter_kind == NEAREST):
            byte_offsets = point_y.to(tl.int32) * row_step + point_x.to(tl.int32) * column_step
            r, g, b = read(source_ptr, byte_offsets, channel_step, CHANNELS)
            red, green, blue = r.to(tl.float32), g.to(tl.float32), b.to(tl.float32)
        else:
            y, y_fraction = _split_coordinate(point_y)
            x, x_fraction = _split_coordinate(point_x)
            if not (BICUBIC_BIT & FILTERS) or ((BILINEAR_BIT & FILTERS) and filter_kind == BILINEAR):
                red = _bilinear(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width)
                green, blue = red, red
                if CHANNELS == 3:
                    source_ptr += channel_step
                    green = _bilinear(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width)
                    source_ptr += channel_step
                    blue = _bilinear(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width)
            else:
                red = _bicubic(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width)
                green, blue = red, red
                if CHANNELS == 3:
                    source_ptr += channel_step
                    green = _bicubic(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width)
                    source_ptr += channel_step
                    blue = _bicubic(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width)
    return fill_outside(red, green, blue, is_inside, floats_ptr, CHANNELS)


@triton.jit
def _map_points(floats_ptr, ys, xs, height, width):
    """Map pixels to source coordinates; return y and x, float64, and whether they are inside the source. Coordinates
    outside are replaced by coordinates inside."""
    y = ys.to(tl.float64)[:, None] + 0.5
    x = xs.to(tl.float64)[None, :] + 0.5
    point_x = tl.load(floats_ptr) * x + tl.load(floats_ptr + 1) * y + tl.load(floats_ptr + 2)
    point_y = tl.load(floats_ptr + 3) * x + tl.load(floats_ptr + 4) * y + tl.load(floats_ptr + 5)
    g, h = tl.load(floats_ptr + 6), tl.load(floats_ptr + 7)
    is_finite = point_y == point_y
    if (g != 0) | (h != 0):
        scale = g * x + h * y + 1.0
        is_finite = scale != 0
        scale = tl.where(is_finite, scale, 1.0)
        point_x, point_y = point_x / scale, point_y / scale
    is_inside = is_finite & (point_y >= 0) & (point_y < height) & (point_x >= 0) & (point_x < width)
    return tl.where(is_inside, point_y, 0.5), tl.where(is_inside, point_x, 0.5), is_inside


@triton.jit
def _map_fixed_point(floats_ptr, ys, xs, height, width):
    """Map pixels to source pixels in 16.16 fixed point; return y, x and whether they are inside the source."""
    y, y_inside = _map_fixed_point_axis(floats_ptr + 3, ys, xs, height)
    x, x_inside = _map_fixed_point_axis(floats_ptr, ys, xs, width)
    is_inside = y_inside & x_inside
    return tl.where(is_inside, y, 0), tl.where(is_inside, x, 0), is_inside


@triton.jit
def _map_fixed_point_axis(floats_ptr, ys, xs, length):
    column_step, row_step, start = tl.load(floats_ptr), tl.load(floats_ptr + 1), tl.load(floats_ptr + 2)
    start = _to_fixed_point(start + column_step * 0.5 + row_step * 0.5)
    rows, columns = ys.to(tl.int64) * _to_fixed_point(row_step), xs.to(tl.int64) * _to_fixed_point(column_step)
    coordinates = (rows[:, None] + (columns + start)[None, :]) >> 16
    return coordinates.to(tl.int32), (coordinates >= 0) & (coordinates < length)


@triton.jit
def _to_fixed_point(number):
    return tl.floor(number * 65536.0 + 0.5).to(tl.int64)


@triton.jit
def _split_coordinate(coordinate):
    """Split a coordinate into the pixel with the last centre before it, and the distance from that centre."""
    coordinate -= 0.5
    pixel = tl.floor(coordinate)
    return pixel.to(tl.int32), coordinate - pixel


@triton.jit
def _read_tap(source_ptr, row_offset, x, column_step, width):
    column = tl.minimum(tl.maximum(x, 0), width - 1)
    return tl.load(source_ptr + (row_offset + column * column_step)).to(tl.float64)


@triton.jit
def _bilinear(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width):
    upper = _blend_columns(source_ptr, y, x, x_fraction, row_step, column_step, height, width)
    lower = _blend_columns(source_ptr, y + 1, x, x_fraction, row_step, column_step, height, width)
    return (upper + (lower - upper) * y_fraction).to(tl.int32).to(tl.float32)


@triton.jit
def _blend_columns(source_ptr, y, x, x_fraction, row_step, column_step, height, width):
    row_offset = tl.minimum(tl.maximum(y, 0), height - 1) * row_step
    left = _read_tap(source_ptr, row_offset, x, column_step, width)
    return left + (_read_tap(source_ptr, row_offset, x + 1, column_step, width) - left) * x_fraction


@triton.jit
def _bicubic(source_ptr, y, x, y_fraction, x_fraction, row_step, column_step, height, width):
    v1 = _bicubic_row(source_ptr, y - 1, x, x_fraction, row_step, column_step, height, width)
    v2 = _bicubic_row(source_ptr, y, x, x_fraction, row_step, column_step, height, width)
    v3 = _bicubic_row(source_ptr, y + 1, x, x_fraction, row_step, column_step, height, width)
    v4 = _bicubic_row(source_ptr, y + 2, x, x_fraction, row_step, column_step, height, width)
    level = tl.minimum(tl.maximum(_cubic(v1, v2, v3, v4, y_fraction), 0.0), 255.0)
    return level.to(tl.int32).to(tl.float32)


@triton.jit
def _bicubic_row(source_ptr, y, x, x_fraction, row_step, column_step, height, width):
    row_offset = tl.minimum(tl.maximum(y, 0), height - 1) * row_step
    v1 = _read_tap(source_ptr, row_offset, x - 1, column_step, width)
    v2 = _read_tap(source_ptr, row_offset, x, column_step, width)
    v3 = _read_tap(source_ptr, row_offset, x + 1, column_step, width)
    return _cubic(v1, v2, v3, _read_tap(source_ptr, row_offset, x + 2, column_step, width), x_fraction)


@triton.jit
def _cubic(v1, v2, v3, v4, fraction):
    """Evaluate Keys' cubic with a = -1, with Pillow's order of additions."""
    square = 2 * (v1 - v2) + v3 - v4
    cube = v2 - v1 - v3 + v4
    return v2 + fraction * ((v3 - v1) + fraction * (square + fraction * cube))
