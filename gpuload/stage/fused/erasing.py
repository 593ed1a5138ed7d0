"""Random erasing of finished images: boxes are filled with a constant, a random colour, or normally distributed noise.

The fused kernel erases the boxes of a tile before it writes the tile (`erase`). In images that have already been
written, for example by MixUp, boxes are erased in place (`erase_images`).

The noise is bit-identical to those of `gpuload.stage.noise` if the kernel is launched with
``enable_fp_fusion=False``. For a given Philox key, number i comes from block i // 8, so each pixel computes its own
number, however the image is divided into tiles.

This module runs in the stage's process, on the current stream; `erase` is a device function of Triton. The table of
quantiles, 256 KB, is stored once per device, and fits in a GPU's cache.
"""

# Type checkers do not understand how kernels are launched, nor that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from gpuload.stage.device import upload, use_device_of
from gpuload.stage.finish import Outputs
from gpuload.stage.fused.pixels import round_to
from gpuload.stage.noise import PER_BLOCK, ROTATION, quantile_table
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.jobs import KINDS, TRANSPOSED_PIXEL, erased_boxes
from gpuload.transforms.program.fusing.plan import portions
from gpuload.transforms.program.ops import Erase

__all__ = ["COLUMNS", "OPTIONS", "ROWS", "erase", "erase_images"]

ROWS: Final = 16  # size of a tile in `erase_images`
COLUMNS: Final = 64
OPTIONS: Final = {"enable_fp_fusion": False}

RECORD: Final = tl.constexpr(jobs.RECORD)
_CONST: Final = tl.constexpr(KINDS.index("const"))
_PIXEL: Final = tl.constexpr(KINDS.index("pixel"))
_TRANSPOSED_PIXEL: Final = tl.constexpr(TRANSPOSED_PIXEL)
_PER_BLOCK: Final = tl.constexpr(PER_BLOCK)
_COSINE: Final = tl.constexpr(ROTATION[0])
_SINE: Final = tl.constexpr(ROTATION[1])


def erase_images(outputs: Outputs, record: Erase) -> None:
    """Erase boxes in finished images, in place. The kernel accesses only the bounding box of an image's boxes.

    Args:
        outputs: N×C×H×W in any memory format, or a list of C×H×W; 1 or 3 channels.
        record: the record with the random boxes.
    """
    boxes = record.boxes_tlhw
    rows = np.arange(len(boxes)) if record.rows is None else record.rows
    if not isinstance(outputs, torch.Tensor):
        for index, row in enumerate(rows.tolist()):
            erase_images(outputs[row][None], record.take(np.array([index]), None))
        return
    is_drawn = boxes[:, :, 2] > 0
    indices = np.flatnonzero(is_drawn.any(axis=1))
    if not len(indices):
        return
    # Boxes that were not drawn are zeros, which must not affect the minimum.
    starts = np.where(is_drawn[indices][:, :, np.newaxis], boxes[indices, :, :2], np.iinfo(np.int64).max).min(axis=1)
    ends = (boxes[indices, :, :2] + boxes[indices, :, 2:]).max(axis=1)
    bounds = np.concatenate([rows[indices, None], starts, ends], axis=1)
    channels, device = outputs.shape[1], outputs.device
    box_records = erased_boxes(record, channels)[indices]
    tiles_down, tiles_across = (-(-(ends - starts).max(axis=0) // (ROWS, COLUMNS))).tolist()
    with use_device_of(outputs):
        for portion in portions(len(indices), programs=tiles_down * tiles_across):
            _erase_images[tiles_down * tiles_across, len(indices[portion])](
                outputs,
                upload(bounds[portion], device),
                upload(box_records[portion], device),
                boxes.shape[1],
                quantile_table(device),
                tiles_across,
                *outputs.stride(),
                CHANNELS=channels,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                **OPTIONS,
            )


# These arguments depend on random boxes and on sizes. If one of them were 1 or divisible by 16, or the address of the
# images were divisible by 16, Triton would compile another kernel in the middle of an epoch, without any gain.
@triton.jit(
    do_not_specialize=["count", "tiles_across", "image_stride", "channel_stride", "row_stride"],
    do_not_specialize_on_alignment=["images_ptr"],
)
def _erase_images(
    images_ptr,
    bounds_ptr,
    records_ptr,
    count,
    quantiles_ptr,
    tiles_across,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Erase boxes in a tile of an image's bounding box, which is stored at `bounds_ptr` as batch index, top, left,
    bottom and right. Grid: (tiles, images)."""
    bounds_ptr += tl.program_id(1) * 5
    ys = tl.load(bounds_ptr + 1).to(tl.int32) + tl.program_id(0) // tiles_across * ROWS + tl.arange(0, ROWS)
    xs = tl.load(bounds_ptr + 2).to(tl.int32) + tl.program_id(0) % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (ys < tl.load(bounds_ptr + 3))[:, None] & (xs < tl.load(bounds_ptr + 4))[None, :]
    pixel_ptrs = images_ptr + tl.load(bounds_ptr) * image_stride
    pixel_ptrs += ys.to(tl.int64)[:, None] * row_stride + xs.to(tl.int64)[None, :] * column_stride
    red = tl.load(pixel_ptrs, is_inside, 0).to(tl.float32)
    green, blue = red, red
    if CHANNELS == 3:
        green = tl.load(pixel_ptrs + channel_stride, is_inside, 0).to(tl.float32)
        blue = tl.load(pixel_ptrs + 2 * channel_stride, is_inside, 0).to(tl.float32)
    records_ptr += tl.program_id(1) * count * RECORD
    red, green, blue = erase(red, green, blue, ys, xs, records_ptr, count, quantiles_ptr, CHANNELS)
    tl.store(pixel_ptrs, round_to(red, images_ptr.dtype.element_ty), is_inside)
    if CHANNELS == 3:
        tl.store(pixel_ptrs + channel_stride, round_to(green, images_ptr.dtype.element_ty), is_inside)
        tl.store(pixel_ptrs + 2 * channel_stride, round_to(blue, images_ptr.dtype.element_ty), is_inside)


@triton.jit
def erase(red, green, blue, ys, xs, records_ptr, count, quantiles_ptr, CHANNELS: tl.constexpr):
    """Erase boxes of a tile of a finished image, one after the other.

    Args:
        red, green, blue: rows × columns float32 blocks; with one channel, the same block three times.
        ys, xs: int32 (rows,) and (columns,), ascending, the coordinates of the tile in the image.
        records_ptr: points to the image's boxes, of dtype `ERASED` of `gpuload.transforms.program.fusing.jobs`, as
            int64.
        count: the number of boxes.
        quantiles_ptr: points to the table of normal quantiles, float32.
        CHANNELS: 1 or 3.

    Returns:
        red, green, blue.
    """
    top, bottom, left, right = tl.min(ys), tl.max(ys), tl.min(xs), tl.max(xs)
    box_index = 0
    while box_index < count:
        record_ptr = records_ptr + box_index * RECORD
        box_top = tl.load(record_ptr).to(tl.int32)
        box_left = tl.load(record_ptr + 1).to(tl.int32)
        height = tl.load(record_ptr + 2).to(tl.int32)
        width = tl.load(record_ptr + 3).to(tl.int32)
        # Skip the box quickly if it does not touch the tile, as in nearly all tiles.
        if (
            (box_top <= bottom)
            & (box_top + height > top)
            & (box_left <= right)
            & (box_left + width > left)
            & (height > 0)
        ):
            y, x = ys - box_top, xs - box_left
            is_inside = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))[None, :]
            kind = tl.load(record_ptr + 4)
            if kind == _CONST:
                red = tl.where(is_inside, _load_float32(record_ptr + 5), red)
                green = tl.where(is_inside, _load_float32(record_ptr + 6), green)
                blue = tl.where(is_inside, _load_float32(record_ptr + 7), blue)
            else:
                first = tl.load(record_ptr + 5).to(tl.int32)
                key = tl.load(record_ptr + 6) | (tl.load(record_ptr + 7) << 32)
                # Indices of numbers run channel by channel, then row by row; a colour has one number per channel.
                y_step = tl.where(kind == _TRANSPOSED_PIXEL, 1, width)
                x_step = tl.where(kind == _TRANSPOSED_PIXEL, height, 1)
                number_index = tl.where(kind >= _PIXEL, y[:, None] * y_step + x[None, :] * x_step, 0) + first
                numbers_per_channel = tl.where(kind >= _PIXEL, height * width, 1)
                # The loop's bound is hidden from the compiler, so that it does not unroll the loop. All channels at
                # once need 181 registers in the fused kernel (sm_90, 8 pixels per thread); one by one, they need 128.
                channel = 0
                while channel < tl.where(height > 0, CHANNELS, 0):
                    numbers = _compute_normals(number_index, key, quantiles_ptr, is_inside)
                    red = tl.where(is_inside & (channel == 0), numbers, red)
                    green = tl.where(is_inside & (channel == 1), numbers, green)
                    blue = tl.where(is_inside & (channel == 2), numbers, blue)
                    number_index += numbers_per_channel
                    channel += 1
        box_index += 1
    if CHANNELS == 1:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _load_float32(bits_ptr):
    """Load a float32 whose bits are stored as int64."""
    return tl.load(bits_ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _compute_normals(number_index, key, quantiles_ptr, mask):
    """Compute the normally distributed numbers with these indices, as `gpuload.stage.noise.normals` does."""
    zero = number_index * 0
    word0, word1, word2, word3 = tl.philox(key, number_index // _PER_BLOCK, zero, zero, zero)
    index = (number_index % _PER_BLOCK) // 2
    word = tl.where(index == 0, word0, tl.where(index == 1, word1, tl.where(index == 2, word2, word3)))
    # `gpuload.stage.fused.geometry` explains the hints.
    first_ptr = tl.max_contiguous(quantiles_ptr + (word & 0xFFFF).to(tl.int32), [1, 2])
    second_ptr = tl.max_contiguous(quantiles_ptr + (word >> 16).to(tl.int32), [1, 2])
    first, second = tl.load(first_ptr, mask, 0.0), tl.load(second_ptr, mask, 0.0)
    even = first * _COSINE + second * _SINE
    odd = second * _COSINE - first * _SINE
    return tl.where(number_index % 2 == 0, even, odd)
