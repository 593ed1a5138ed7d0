"""The fused kernel: one pass over the images of a batch.

A program computes a tile of one image's result: it samples the tile's pixels as the job specifies (`sample_pixels`),
applies the job's operations in their stored order (`operate`), and, in the last pass, converts pixel values to
finished values and erases boxes (`erase`). So each byte of a source is read about once, each result is written once,
and no intermediate is written to memory. All functions on the device are stateless.
"""

# Type checkers do not understand how kernels are launched, nor that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from gpuload.stage.fused.erasing import RECORD, erase
from gpuload.stage.fused.geometry import sample_pixels
from gpuload.stage.fused.launching import batch_kernel
from gpuload.stage.fused.pixels import (
    BOXES,
    BOXES_AT,
    FLOATS,
    JOB,
    OPERATION_COUNT,
    OPERATIONS_AT,
    OUT_AT,
    OUT_CHANNEL,
    OUT_HEIGHT,
    OUT_PIXEL,
    OUT_ROW,
    OUT_WIDTH,
    STATISTICS_AT,
    STEP_X,
    STEP_Y,
    WARP,
    X,
    Y,
    round_to,
)
from gpuload.stage.fused.pointwise import operate
from gpuload.transforms.program.ops import VALUES

__all__ = ["compiler_options", "one_pass"]

_VALUES: Final = tl.constexpr(VALUES)
_TABLE: Final = tl.constexpr(3 * 256)  # bytes of an image's table of statistics


@batch_kernel(do_not_specialize_on_alignment=["source_ptr", "statistics_ptr"])  # these can point to a user's memory
def one_pass(
    source_ptr,
    table_ptr,
    ints_ptr,
    floats_ptr,
    codes_ptr,
    values_ptr,
    statistics_ptr,
    weights_ptr,
    boxes_ptr,
    quantiles_ptr,
    constants_ptr,
    output_ptr,
    CHANNELS: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    OUT_COLUMN: tl.constexpr,
    GEOMETRY: tl.constexpr,
    FILTERS: tl.constexpr,
    OPERATIONS: tl.constexpr,
    FINISHED: tl.constexpr,
    ERASES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of a job. Grid: (tiles of the largest result, jobs). A result of 48 megapixels has 187,500 tiles,
    and only the first axis of a grid can be that long.

    All jobs of a launch have the same kind of GEOMETRY, only filters in the mask FILTERS, and only operations in the
    mask OPERATIONS. The columns of their results are OUT_COLUMN elements apart; 0 means that each job has its own
    stride, because a chain can swap rows and columns of some images. If FINISHED is set, levels are multiplied by the
    first three float32 values at `constants_ptr`, and the next three values are added; otherwise, results are levels.
    If ERASES is set, boxes are erased afterwards.
    """
    ints_ptr += tl.program_id(1) * JOB
    floats_ptr += tl.program_id(1) * FLOATS
    height = tl.load(ints_ptr + OUT_HEIGHT).to(tl.int32)
    width = tl.load(ints_ptr + OUT_WIDTH).to(tl.int32)
    tiles_across = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // tiles_across
    top = tile * ROWS
    left = tl.program_id(0) % tiles_across * COLUMNS
    if top < height:
        rows = top + tl.arange(0, ROWS)
        columns = left + tl.arange(0, COLUMNS)
        # Rows and columns beyond the result are replaced by the last row and column, and are not written.
        clamped_columns = tl.minimum(columns, width - 1)
        ys, xs = (
            _source_coordinates(ints_ptr, Y, STEP_Y, tl.minimum(rows, height - 1)),
            _source_coordinates(ints_ptr, X, STEP_X, clamped_columns),
        )
        red, green, blue = sample_pixels(
            source_ptr,
            table_ptr,
            weights_ptr,
            ints_ptr,
            floats_ptr,
            tile,
            clamped_columns,
            ys,
            xs,
            CHANNELS,
            GEOMETRY,
            FILTERS,
        )
        if OPERATIONS != 0:
            index = tl.load(ints_ptr + OPERATIONS_AT)
            end = index + tl.load(ints_ptr + OPERATION_COUNT)
            statistics_ptr += tl.load(ints_ptr + STATISTICS_AT) * _TABLE
            while index < end:
                code = tl.load(codes_ptr + index)
                values = values_ptr + index * _VALUES
                red, green, blue = operate(red, green, blue, ys, xs, code, values, statistics_ptr, OPERATIONS, CHANNELS)
                index += 1
        if FINISHED:
            red = red * tl.load(constants_ptr) + tl.load(constants_ptr + 3)
            if OUT_CHANNELS == 3:
                green = green * tl.load(constants_ptr + 1) + tl.load(constants_ptr + 4)
                blue = blue * tl.load(constants_ptr + 2) + tl.load(constants_ptr + 5)
        if ERASES:
            boxes_ptr += tl.load(ints_ptr + BOXES_AT) * RECORD
            count = tl.load(ints_ptr + BOXES)
            red, green, blue = erase(red, green, blue, rows, columns, boxes_ptr, count, quantiles_ptr, OUT_CHANNELS)
        is_inside = (rows < height)[:, None] & (columns < width)[None, :]
        row_step = tl.load(ints_ptr + OUT_ROW)
        output_ptr += tl.load(ints_ptr + OUT_AT) + top * row_step
        # Offsets within a tile fit in int32.
        offsets = tl.arange(0, ROWS)[:, None] * row_step.to(tl.int32)
        if OUT_COLUMN == 0:
            column_step = tl.load(ints_ptr + OUT_PIXEL)
            output_ptr += left * column_step
            offsets += tl.arange(0, COLUMNS)[None, :] * column_step.to(tl.int32)
        else:
            output_ptr += left * OUT_COLUMN
            offsets += tl.arange(0, COLUMNS)[None, :] * OUT_COLUMN
        if OUT_COLUMN != 1:
            offsets = tl.max_contiguous(offsets, [1, 2])  # see `gpuload.stage.fused.geometry`
        _write(output_ptr, offsets, red, is_inside)
        if OUT_CHANNELS == 3:
            step = tl.load(ints_ptr + OUT_CHANNEL)
            _write(output_ptr + step, offsets, green, is_inside)
            _write(output_ptr + 2 * step, offsets, blue, is_inside)


@triton.jit
def _source_coordinates(ints_ptr, FIRST: tl.constexpr, STEP: tl.constexpr, coordinates):
    """Map rows or columns of the result to rows or columns of the geometry's result."""
    return (tl.load(ints_ptr + FIRST) + tl.load(ints_ptr + STEP) * coordinates).to(tl.int32)


@triton.jit
def _write(output_ptr, offsets, numbers, is_inside):
    tl.store(output_ptr + offsets, round_to(numbers, output_ptr.dtype.element_ty), is_inside)


@cache
def compiler_options(geometry: int, warps: int) -> dict[str, Any]:
    """Return the compiler options of the kernel for a kind of geometry.

    Without a register limit, the kernel uses so many registers that few programs run at a time. With these limits, no
    registers are spilled.
    """
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if torch.version.hip is None:
        options["maxnreg"] = 128 if geometry == WARP.value else 80
    return options
