"""Separable filters inside a kernel: Pillow's resampling, and Gaussian blur.

A tile of the result needs a range of source rows. Each source row is filtered horizontally once, and then added to all
rows of the tile, multiplied by its vertical weight for each tile row. In a resampling, weights and sums are integers,
and sums are rounded to uint8 values between the axes, so the results are exactly Pillow's.

A separate kernel runs first and makes tables of the weights. For each result column, a job's table has the first
source pixel, and the weights of this pixel and the following pixels. For each tile, the table has the weights of every
needed source row for every row of the tile. The weights of a resampling are computed in float64 as in the reference,
except that divisions are replaced by faster multiplications with the inverse (none of 150 million weights differed).
The weights of a blur are float32. A blur mirrors the image at its borders: a pixel beyond the border adds its weight to
the pixel that it mirrors, so the filter reads only adjacent pixels inside the source. Each launch computes its own
tables, in memory from the device's allocator.
"""

# Type checkers do not understand how kernels are launched, nor that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import core

from gpuload.stage.fused.launching import batch_kernel
from gpuload.stage.fused.pixels import (
    BICUBIC,
    BICUBIC_BIT,
    BILINEAR,
    BILINEAR_BIT,
    BLUR,
    BOX_H,
    COLUMN_STEP,
    CORNER_Y,
    FILTER,
    FLOATS,
    HEIGHT,
    JOB,
    KERNEL_H,
    LINES,
    OUT_HEIGHT,
    OUT_WIDTH,
    ROW_STEP,
    SIGMA_Y,
    SIZE_H,
    STEP_X,
    STEP_Y,
    TAPS,
    WEIGHTS_X,
    WEIGHTS_Y,
    WIDTH,
    X,
    Y,
    read,
)
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.jobs import COLUMNS
from gpuload.transforms.program.windows import PRECISION_BITS

__all__ = ["OPTIONS", "blur", "make_weight_tables", "resize"]

GAUSSIAN: Final = tl.constexpr(100)  # differs from all resampling filters

# How many taps and how many source rows the filter processes at a time; tables are padded with zero weights.
TAPS_AT_ONCE: Final = tl.constexpr(jobs.TAPS_AT_ONCE)
LINES_AT_ONCE: Final = tl.constexpr(jobs.LINES_AT_ONCE)

OPTIONS: Final = {"num_warps": 1, "enable_fp_fusion": False}
_ONE: Final = tl.constexpr(2.0**PRECISION_BITS)
_ROOT: Final = tl.constexpr(0.8493218002880191)  # √(log2(e) / 2): a Gaussian is 2 ** -(_ROOT · distance / sigma)²
_CHUNK: Final = tl.constexpr(16)  # source rows for which weights are computed at a time
BITS: Final = tl.constexpr(PRECISION_BITS)
HALF: Final = tl.constexpr(1 << (PRECISION_BITS - 1))


@triton.jit
def resize(
    source_ptr,
    weights_ptr,
    ints_ptr,
    channel_step,
    tile,
    columns,
    CHANNELS: tl.constexpr,
    FILTERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Resample a box as Pillow does, bilinear or bicubic, rounded to levels between the axes. FILTERS says which of the
    two filters jobs can have: code for both takes three times as long to compile."""
    if FILTERS == BILINEAR_BIT or (FILTERS != BICUBIC_BIT and tl.load(ints_ptr + FILTER) == BILINEAR):
        red, green, blue = _filter(
            source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ROWS, BILINEAR
        )
    else:
        red, green, blue = _filter(
            source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ROWS, BICUBIC
        )
    return red, green, blue


@triton.jit
def blur(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Apply a Gaussian blur with mirrored borders; the source must be the entire image."""
    return _filter(source_ptr, weights_ptr, ints_ptr, channel_step, tile, columns, CHANNELS, ROWS, GAUSSIAN)


@triton.jit
def _filter(
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
    # Constant steps save instructions when pixels are read, which takes most of the time.
    column_step = tl.load(ints_ptr + COLUMN_STEP).to(tl.int32)
    taps_fit = tl.load(ints_ptr + TAPS) <= tl.load(ints_ptr + WIDTH)
    if (channel_step == 1) & (column_step == CHANNELS) & taps_fit:
        red, green, blue = _filter_tile(
            source_ptr, weights_ptr, ints_ptr, 1, CHANNELS, tile, columns, CHANNELS, ROWS, CURVE, True
        )
    else:
        red, green, blue = _filter_tile(
            source_ptr, weights_ptr, ints_ptr, channel_step, column_step, tile, columns, CHANNELS, ROWS, CURVE, False
        )
    return red, green, blue


@triton.jit
def _filter_tile(
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
    """Filter a tile. FORWARD means that pixels are adjacent in memory, and that rows have at least as many pixels as
    there are taps."""
    tl.static_assert(TAPS_AT_ONCE == 2)
    tl.static_assert(LINES_AT_ONCE == 4)
    last_row, last_column = tl.load(ints_ptr + HEIGHT).to(tl.int32) - 1, tl.load(ints_ptr + WIDTH).to(tl.int32) - 1
    row_step = tl.load(ints_ptr + ROW_STEP).to(tl.int32)
    taps = tl.load(ints_ptr + TAPS).to(tl.int32)
    out_width = tl.load(ints_ptr + OUT_WIDTH).to(tl.int32)
    column_weights_ptr = weights_ptr + tl.load(ints_ptr + WEIGHTS_X)
    first_pixels = tl.load(column_weights_ptr + columns)
    column_weights_ptr += out_width
    row_weights_ptr = weights_ptr + tl.multiple_of(
        tl.load(ints_ptr + WEIGHTS_Y) + tile * (1 + tl.load(ints_ptr + LINES)) * ROWS, ROWS
    )
    top = tl.load(row_weights_ptr)
    bottom = top + tl.load(row_weights_ptr + 1)
    row_weights_ptr += ROWS

    if CURVE == GAUSSIAN:
        red, half = tl.zeros([ROWS, columns.shape[0]], tl.float32), tl.zeros([columns.shape[0]], tl.float32)
    else:
        red, half = tl.full([ROWS, columns.shape[0]], HALF, tl.int32), tl.full([columns.shape[0]], HALF, tl.int32)
    green, blue = red, red
    row = top
    while row < bottom:
        # Process four rows at a time, so that many reads are in flight. Each row is a vector along the columns, so each
        # thread holds entire columns of the tile and threads exchange no data.
        row0 = source_ptr + tl.minimum(row, last_row) * row_step
        row1 = source_ptr + tl.minimum(row + 1, last_row) * row_step
        row2 = source_ptr + tl.minimum(row + 2, last_row) * row_step
        row3 = source_ptr + tl.minimum(row + 3, last_row) * row_step
        red0, green0, blue0, red1, green1, blue1 = half, half, half, half, half, half
        red2, green2, blue2, red3, green3, blue3 = half, half, half, half, half, half
        weights = column_weights_ptr + 2 * columns
        tap = 0
        while tap < taps:
            offsets = (first_pixels + tap) * column_step
            for i in tl.static_range(2):
                weight = _read_weight(weights + i, CURVE)
                if FORWARD:
                    step = i * CHANNELS
                else:
                    step = 0
                    offsets = tl.minimum(first_pixels + tap + i, last_column) * column_step
                red0, green0, blue0 = _add(
                    red0, green0, blue0, row0 + step, offsets, channel_step, weight, CHANNELS, CURVE
                )
                red1, green1, blue1 = _add(
                    red1, green1, blue1, row1 + step, offsets, channel_step, weight, CHANNELS, CURVE
                )
                red2, green2, blue2 = _add(
                    red2, green2, blue2, row2 + step, offsets, channel_step, weight, CHANNELS, CURVE
                )
                red3, green3, blue3 = _add(
                    red3, green3, blue3, row3 + step, offsets, channel_step, weight, CHANNELS, CURVE
                )
            weights += 2 * out_width
            tap += 2
        row_weights = row_weights_ptr + tl.arange(0, ROWS)
        red, green, blue = _spread(red, green, blue, red0, green0, blue0, row_weights, CHANNELS, CURVE)
        red, green, blue = _spread(red, green, blue, red1, green1, blue1, row_weights + ROWS, CHANNELS, CURVE)
        red, green, blue = _spread(red, green, blue, red2, green2, blue2, row_weights + 2 * ROWS, CHANNELS, CURVE)
        red, green, blue = _spread(red, green, blue, red3, green3, blue3, row_weights + 3 * ROWS, CHANNELS, CURVE)
        row_weights_ptr += 4 * ROWS
        row += 4
    red = _finish(red, CURVE)
    if CHANNELS == 3:
        green, blue = _finish(green, CURVE), _finish(blue, CURVE)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _read_weight(weights_ptr, CURVE: tl.constexpr):
    """Load weights: integers in Pillow's units, or float32 for a Gaussian."""
    weight = tl.load(weights_ptr)
    if CURVE == GAUSSIAN:
        weight = weight.to(tl.float32, bitcast=True)
    return weight


@triton.jit
def _add(red, green, blue, row_ptr, column_offsets, channel_step, weight, CHANNELS: tl.constexpr, CURVE: tl.constexpr):
    """Add one tap of a row to the sums. Sums cannot overflow; checking that would make the interpreter ten times
    slower."""
    r, g, b = read(row_ptr, column_offsets, channel_step, CHANNELS)
    if CURVE == GAUSSIAN:
        red = tl.fma(r.to(tl.float32), weight, red)
        if CHANNELS == 3:
            green, blue = tl.fma(g.to(tl.float32), weight, green), tl.fma(b.to(tl.float32), weight, blue)
    else:
        red = core.add(red, core.mul(r, weight, sanitize_overflow=False), sanitize_overflow=False)
        if CHANNELS == 3:
            green = core.add(green, core.mul(g, weight, sanitize_overflow=False), sanitize_overflow=False)
            blue = core.add(blue, core.mul(b, weight, sanitize_overflow=False), sanitize_overflow=False)
    return red, green, blue


@triton.jit
def _spread(red, green, blue, r, g, b, weights_ptr, CHANNELS: tl.constexpr, CURVE: tl.constexpr):
    """Add one horizontally filtered row to all rows of the result."""
    weight = _read_weight(weights_ptr, CURVE)[:, None]
    if CURVE == GAUSSIAN:
        red = tl.fma(r[None, :], weight, red)
        if CHANNELS == 3:
            green, blue = tl.fma(g[None, :], weight, green), tl.fma(b[None, :], weight, blue)
    else:
        r = _to_level(r, CURVE)
        red = core.add(red, core.mul(r[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
        if CHANNELS == 3:
            g, b = _to_level(g, CURVE), _to_level(b, CURVE)
            green = core.add(green, core.mul(g[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
            blue = core.add(blue, core.mul(b[None, :], weight, sanitize_overflow=False), sanitize_overflow=False)
    return red, green, blue


@triton.jit
def _to_level(total, CURVE: tl.constexpr):
    """Convert a sum in Pillow's units to a level."""
    level = total >> BITS
    if CURVE == BICUBIC:  # bilinear results cannot leave the range of the source levels
        level = tl.minimum(tl.maximum(level, 0), 255)
    return level


@triton.jit
def _finish(total, CURVE: tl.constexpr):
    return tl.minimum(tl.floor(total + 0.5), 255.0) if CURVE == GAUSSIAN else _to_level(total, CURVE).to(tl.float32)


# -- weights -----------------------------------------------------------------------------------------------------------


def make_weight_tables(
    ints: torch.Tensor, floats: torch.Tensor, count: int, size: int, programs: int, kind: int, filters: int, rows: int
) -> torch.Tensor:
    """Compute the int32 tables of the first `count` jobs, which have only filters in the mask `filters`; `place_tables`
    explains the other arguments."""
    weights = torch.empty(size, dtype=torch.int32, device=ints.device)
    constants = {"GEOMETRY": kind, "FILTERS": filters, "ROWS": rows, "COLUMNS": COLUMNS}
    _weigh[programs, count](ints, floats, weights, **constants, **OPTIONS)
    return weights


@batch_kernel()
def _weigh(
    ints_ptr,
    floats_ptr,
    weights_ptr,
    GEOMETRY: tl.constexpr,
    FILTERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the weights of a tile of rows, or of a block of columns. Grid: (the largest result's tiles of rows, then
    its blocks of columns; jobs)."""
    ints_ptr += tl.program_id(1) * JOB
    floats_ptr += tl.program_id(1) * FLOATS
    if GEOMETRY == BLUR:
        _weigh_part(ints_ptr, floats_ptr, weights_ptr, GAUSSIAN, ROWS, COLUMNS)
    elif FILTERS == BILINEAR_BIT or (FILTERS != BICUBIC_BIT and tl.load(ints_ptr + FILTER) == BILINEAR):
        _weigh_part(ints_ptr, floats_ptr, weights_ptr, BILINEAR, ROWS, COLUMNS)
    else:
        _weigh_part(ints_ptr, floats_ptr, weights_ptr, BICUBIC, ROWS, COLUMNS)


@triton.jit
def _weigh_part(ints_ptr, floats_ptr, weights_ptr, CURVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    height = tl.load(ints_ptr + OUT_HEIGHT).to(tl.int32)
    tiles = tl.cdiv(height, ROWS)
    block = tl.program_id(0)
    if block < tiles:
        rows = tl.minimum(block * ROWS + tl.arange(0, ROWS), height - 1)
        ys = (tl.load(ints_ptr + Y) + tl.load(ints_ptr + STEP_Y) * rows).to(tl.int32)
        _weigh_rows(ints_ptr, floats_ptr, weights_ptr, block, ys, CURVE, ROWS)
    else:
        width = tl.load(ints_ptr + OUT_WIDTH).to(tl.int32)
        columns = (block - tiles) * COLUMNS + tl.arange(0, COLUMNS)
        is_inside = columns < width
        columns = tl.minimum(columns, width - 1)
        xs = (tl.load(ints_ptr + X) + tl.load(ints_ptr + STEP_X) * columns).to(tl.int32)
        _weigh_columns(ints_ptr, floats_ptr, weights_ptr, columns, is_inside, xs, width, CURVE)


@triton.jit
def _weigh_rows(ints_ptr, floats_ptr, weights_ptr, tile, ys, CURVE: tl.constexpr, ROWS: tl.constexpr):
    height = tl.load(ints_ptr + HEIGHT).to(tl.int32)
    lines = tl.load(ints_ptr + LINES).to(tl.int32)
    weights_ptr += tl.load(ints_ptr + WEIGHTS_Y) + tile * (1 + lines) * ROWS
    first, end, corner, shape, scale, norm = _filter_extent(ints_ptr, floats_ptr, ys, height, 0, CURVE)
    top = tl.maximum(tl.min(first) - corner, 0)
    count = tl.minimum(tl.max(end) - corner, height) - top
    count = tl.minimum(tl.cdiv(count, LINES_AT_ONCE) * LINES_AT_ONCE, lines)
    tl.store(weights_ptr, top)
    tl.store(weights_ptr + 1, count)
    weights_ptr += ROWS
    line = 0
    while line < count:
        line_indices = (line + tl.arange(0, _CHUNK))[:, None]
        pixels = top + line_indices + corner
        weights = _weight(pixels, ys, height, first, end, shape, scale, norm, CURVE)
        tl.store(weights_ptr + line_indices * ROWS + tl.arange(0, ROWS)[None, :], weights, line_indices < count)
        line += _CHUNK


@triton.jit
def _weigh_columns(ints_ptr, floats_ptr, weights_ptr, columns, is_inside, xs, out_width, CURVE: tl.constexpr):
    width = tl.load(ints_ptr + WIDTH).to(tl.int32)
    taps = tl.load(ints_ptr + TAPS).to(tl.int32)
    weights_ptr += tl.load(ints_ptr + WEIGHTS_X)
    first, end, corner, shape, scale, norm = _filter_extent(ints_ptr, floats_ptr, xs, width, 1, CURVE)
    # If the source has at least as many pixels as taps, all pixels read are inside it.
    first_pixel = tl.maximum(tl.minimum(first - corner, width - taps), 0)
    tl.store(weights_ptr + columns, first_pixel, is_inside)
    weights_ptr += out_width + TAPS_AT_ONCE * columns
    tap = 0
    while tap < taps:
        pixels = first_pixel + tap + corner
        weights = _weight(pixels, xs, width, first, end, shape, scale, norm, CURVE)
        group = tap // TAPS_AT_ONCE * TAPS_AT_ONCE
        tl.store(weights_ptr + group * out_width + tap - group, weights, is_inside)
        tap += 1


@triton.jit
def _filter_extent(ints_ptr, floats_ptr, out_pixels, length, AXIS: tl.constexpr, CURVE: tl.constexpr):
    """Return the filter's extent and parameters for some pixels of a result, along one axis.

    Returns:
        first, end: int32, the range of source pixels that the filter reads, mirrored or not; `end` is exclusive.
        corner: the source's first pixel, in the coordinates of `first` and `end`.
        shape: the size of a blur's kernel; for a resize, the distance of each first pixel from the centre, float64.
        scale: the factor from pixels to the filter's units.
        norm: the factor that normalises the sum of the filter's values to one.
    """
    if CURVE == GAUSSIAN:
        shape, corner = tl.load(ints_ptr + KERNEL_H + AXIS).to(tl.int32), 0
        radius = shape // 2
        first = tl.where(radius < length, tl.maximum(out_pixels - radius, 0), 0)
        end = tl.where(radius < length, tl.minimum(out_pixels + radius + 1, length), length)
        scale, norm = _gaussian(shape, tl.load(floats_ptr + SIGMA_Y + AXIS))
    else:
        corner = tl.load(ints_ptr + CORNER_Y + AXIS).to(tl.int32)
        box, size = tl.load(ints_ptr + BOX_H + AXIS), tl.load(ints_ptr + SIZE_H + AXIS)
        step = box.to(tl.float64) / size.to(tl.float64)
        stretch = tl.maximum(step, 1.0)
        # Along an axis that is not resized, the filter covers one pixel.
        reach = tl.where(box == size, 0.5, stretch if CURVE == BILINEAR else 2.0 * stretch)
        centre = (out_pixels.to(tl.float64) + 0.5) * step
        first = tl.maximum((centre - reach + 0.5).to(tl.int32), 0)
        end = tl.minimum((centre + reach + 0.5).to(tl.int32), box.to(tl.int32))
        shape, scale = first.to(tl.float64) - centre + 0.5, 1.0 / stretch
        norm = _norm(first, end, shape, scale, CURVE)
    return first, end, corner, shape, scale, norm


@triton.jit
def _norm(first, end, start, scale, CURVE: tl.constexpr):
    total = tl.zeros_like(start)
    taps = tl.max(end - first)
    tap = 0
    while tap < taps:
        total += tl.where(tap < end - first, _curve((tap + start) * scale, CURVE), 0.0)
        tap += 1
    return _ONE / total


@triton.jit
def _curve(distance, CURVE: tl.constexpr):
    """Evaluate Pillow's filters: the triangle, and Keys' cubic with a = -½."""
    distance = tl.abs(distance)
    if CURVE == BILINEAR:
        value = tl.maximum(1.0 - distance, 0.0)
    else:
        near = (1.5 * distance - 2.5) * (distance * distance) + 1.0
        far = (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
        value = tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))
    return value


@triton.jit
def _weight(pixels, out_pixels, length, first, end, shape, scale, norm, CURVE: tl.constexpr):
    """Return the weights of source pixels for the result's pixels `out_pixels`: integers in Pillow's units, or the bits
    of a float32 for a Gaussian."""
    if CURVE == GAUSSIAN:
        result = _blur_weight(pixels, out_pixels, shape, length, scale, norm).to(tl.int32, bitcast=True)
    else:
        is_inside = (pixels >= first) & (pixels < end)
        weight = tl.where(is_inside, _curve(((pixels - first).to(tl.float64) + shape) * scale, CURVE), 0.0) * norm
        half = 0.5 if CURVE == BILINEAR else tl.where(weight < 0.0, -0.5, 0.5)
        result = (weight + half).to(tl.int32)  # truncated
    return result


@triton.jit
def _gaussian(kernel, sigma):
    """Return a Gaussian's scale, and the factor that normalises the sum of the kernel's values to one."""
    scale = _ROOT / sigma.to(tl.float32)
    total = tl.zeros_like(scale)
    tap = -(kernel // 2)
    while tap <= kernel // 2:
        total += _bell(tap, scale)
        tap += 1
    return scale, tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)


@triton.jit
def _bell(distance, scale):
    scaled = distance.to(tl.float32) * scale
    return tl.exp2(-scaled * scaled)


@triton.jit
def _blur_weight(pixels, out_pixels, kernel, length, scale, norm):
    """Return the weights of source pixels, plus the weights of all their mirror images under the kernel. A kernel can
    reach across both borders, and across a small image more than once."""
    radius, last_pixel = kernel // 2, length - 1
    period = tl.maximum(2 * last_pixel, 1)
    has_mirror_image = (pixels > 0) & (pixels < last_pixel)  # the first and last pixel are not repeated
    weight = tl.zeros_like((pixels - out_pixels).to(tl.float32))
    repeat = -(radius // period + 1)
    while repeat <= radius // period + 1:
        distance = tl.abs(repeat * period + pixels - out_pixels)
        weight += tl.where(distance <= radius, _bell(distance, scale), 0.0)
        distance = tl.abs(repeat * period - pixels - out_pixels)
        weight += tl.where(has_mirror_image & (distance <= radius), _bell(distance, scale), 0.0)
        repeat += 1
    return tl.where(pixels <= last_pixel, weight * norm, 0.0)
