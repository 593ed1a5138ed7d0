"""Where the pixels of a tile come from: the first half of the fused kernels.

`geometry` does one kind of it, for which a kernel is compiled: one for all kinds would need the registers of the most
demanding kind. All else is in the job's numbers (see `gpuload.stage.fused.record`). It gives three float32 blocks rows
× columns, red, green and blue, of whole levels 0 … 255 (for one channel the same block three times). The tile's rows
and columns may go up or down, and are inside the result. No byte outside the source is read, whatever a job asks for.
Nothing is kept.

A thread of a GPU holds whole columns of a tile that has at least 32 columns for each warp. The compiler arranges that
only where it knows that the numbers of a row are next to each other in memory; otherwise it gives the rows of a column
to neighbouring threads, which read and write small pieces, and exchange them. So `tl.max_contiguous` tells it that
pairs of a row are. They need not be: it knows nothing of their alignment, so it never reads a pair at once.
"""

# Type checkers do not know that calls in kernels return.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gpuload.stage.fused.maps import warp
from gpuload.stage.fused.record import (
    BASE,
    BLUR,
    CHANNEL_STEP,
    COLUMN_STEP,
    COPY,
    HEIGHT,
    KIND,
    RESIZE,
    ROW_STEP,
    SHARPNESS,
    TABLE,
    TABLE_AT,
    TABLE_ROWS,
    WARP,
    WIDTH,
)
from gpuload.stage.fused.rounding import INTERPRETED
from gpuload.stage.fused.separable import blur, resize
from gpuload.stage.fused.sharpening import sharpness
from gpuload.stage.fused.sources import filled, offsets, read

__all__ = ["at_once", "geometry", "row_by_row"]


@triton.jit
def geometry(
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
):
    """The pixels of a tile.

    Args:
        source_ptr: uint8, from which a job's BASE counts.
        table_ptr: int32, from which a job's TABLE_AT counts.
        weights_ptr: int32, from which a job's WEIGHTS_X and WEIGHTS_Y count.
        ints_ptr, floats_ptr: the job's numbers, int64 and float64.
        tile, columns: which rows of the pass's result, in units of a tile's, and which columns, int32 (columns,).
        ys, xs: int32 (rows,) and (columns,), the same in the frame of the geometry's result.
        CHANNELS: 1 or 3.
        GEOMETRY: the job's KIND; COPY for TABLE, too.

    Returns:
        red, green, blue.
    """
    source_ptr += tl.load(ints_ptr + BASE)
    channel_step = tl.load(ints_ptr + CHANNEL_STEP).to(tl.int32)
    if GEOMETRY == COPY:
        red, green, blue = _moved(source_ptr, table_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS)
    elif GEOMETRY == RESIZE:
        red, green, blue = resize(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ys.shape[0])
    elif GEOMETRY == BLUR:
        red, green, blue = blur(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ys.shape[0])
    elif INTERPRETED:  # where each step takes as long for a row as for a tile
        red, green, blue = at_once(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS, GEOMETRY)
    else:
        red, green, blue = row_by_row(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS, GEOMETRY)
    return red, green, blue


@triton.jit
def at_once(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr, GEOMETRY: tl.constexpr):
    """The kinds that read several pixels for each."""
    if GEOMETRY == WARP:
        red, green, blue = warp(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS)
    else:
        tl.static_assert(GEOMETRY == SHARPNESS, "no kind of geometry")
        red, green, blue = sharpness(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS)
    return red, green, blue


@triton.jit
def row_by_row(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr, GEOMETRY: tl.constexpr):
    """The same, one row of the tile after the other: a map's bicubic filter on 8 rows at once needs more registers than
    a thread has (255, and 56 bytes of memory)."""
    places = tl.arange(0, ys.shape[0])[:, None]
    red = tl.zeros([ys.shape[0], xs.shape[0]], tl.float32)
    green, blue = red, red
    row = 0
    while row < ys.shape[0]:
        here = places == row
        y = tl.sum(tl.where(here, ys[:, None], 0), axis=0)
        one, two, three = at_once(source_ptr, ints_ptr, floats_ptr, channel_step, y, xs, CHANNELS, GEOMETRY)
        red = tl.where(here, one, red)
        if CHANNELS == 3:
            green, blue = tl.where(here, two, green), tl.where(here, three, blue)
        row += 1
    if CHANNELS == 1:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _moved(source_ptr, table_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    """Copies of pixels: those at the same coordinates, or those that a table lists."""
    if tl.load(ints_ptr + KIND) == TABLE:
        table_ptr += tl.load(ints_ptr + TABLE_AT)
        ys = tl.load(table_ptr + ys)
        xs = tl.load(table_ptr + tl.load(ints_ptr + TABLE_ROWS) + xs)
    inside = (ys >= 0)[:, None] & (xs >= 0)[None, :]
    at = offsets(ints_ptr, ROW_STEP, HEIGHT, ys)[:, None] + offsets(ints_ptr, COLUMN_STEP, WIDTH, xs)[None, :]
    red, green, blue = read(source_ptr, tl.max_contiguous(at, [1, 2]), channel_step, CHANNELS)
    return filled(red, green, blue, inside, floats_ptr, CHANNELS)
