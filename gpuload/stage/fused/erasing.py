"""Random erasing of finished images: boxes become a constant, a random colour, or normal numbers.

The fused kernel erases a tile before it writes it (`erase`); images that are already written, as after MixUp, are
erased in place (`erase_images`).

The numbers are those of `gpuload.stage.noise`, to the last bit where the kernel is launched with
``enable_fp_fusion=False``: number i of a key comes from block i // 8 of Philox, so each pixel makes its own, in
whichever tile it is.

Runs in the process of the stage, on the current stream; `erase` is a device function of Triton. The table of
quantiles, 256 KB, is kept once for each device, and fits into the cache of a GPU.
"""

# Type checkers know neither how a kernel is launched nor that calls in kernels return.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from gpuload.stage.device import device_of, upload
from gpuload.stage.finish import Outputs
from gpuload.stage.fused.pixels import round_to
from gpuload.stage.noise import PER_BLOCK, ROTATION, quantile_table
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.jobs import KINDS, TRANSPOSED_PIXEL, erased_boxes
from gpuload.transforms.program.fusing.plan import portions
from gpuload.transforms.program.ops import Erase

__all__ = ["COLUMNS", "OPTIONS", "ROWS", "erase", "erase_images"]

ROWS: Final = 16  # of a tile of images that are already written
COLUMNS: Final = 64
OPTIONS: Final = {"enable_fp_fusion": False}

RECORD: Final = tl.constexpr(jobs.RECORD)
_CONST: Final = tl.constexpr(KINDS.index("const"))
_PIXEL: Final = tl.constexpr(KINDS.index("pixel"))
_TRANSPOSED_PIXEL: Final = tl.constexpr(TRANSPOSED_PIXEL)
_PER_BLOCK: Final = tl.constexpr(PER_BLOCK)
_COSINE: Final = tl.constexpr(ROTATION[0])
_SINE: Final = tl.constexpr(ROTATION[1])


def erase_images(outputs: Outputs, erase: Erase) -> None:
    """Erase boxes of finished images, in place; reads only the smallest box around those of an image.

    Args:
        outputs: N×C×H×W in any memory format, or a list of C×H×W; of 1 or 3 channels.
        erase: what was drawn for its rows.
    """
    boxes = erase.boxes_tlhw
    rows = np.arange(len(boxes)) if erase.rows is None else erase.rows
    if not isinstance(outputs, torch.Tensor):
        for number, row in enumerate(rows.tolist()):
            erase_images(outputs[row][None], erase.take(np.array([number]), None))
        return
    there = boxes[:, :, 2] > 0
    chosen = np.flatnonzero(there.any(axis=1))
    if not len(chosen):
        return
    # Boxes that are not there are all 0.
    starts = np.where(there[chosen][:, :, np.newaxis], boxes[chosen, :, :2], np.iinfo(np.int64).max).min(axis=1)
    ends = (boxes[chosen, :, :2] + boxes[chosen, :, 2:]).max(axis=1)
    around = np.concatenate([rows[chosen, None], starts, ends], axis=1)
    channels, device = outputs.shape[1], outputs.device
    drawn = erased_boxes(erase, channels)[chosen]
    down, across = (-(-(ends - starts).max(axis=0) // (ROWS, COLUMNS))).tolist()
    with device_of(outputs):
        for portion in portions(len(chosen), programs=down * across):
            _erase_images[down * across, len(chosen[portion])](
                outputs,
                upload(around[portion], device),
                upload(drawn[portion], device),
                boxes.shape[1],
                quantile_table(device),
                across,
                *outputs.stride(),
                CHANNELS=channels,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                **OPTIONS,
            )


# These depend on draws and sizes: where one is 1 or divisible by 16, or an image begins at such an address, Triton
# would compile another kernel, in the middle of an epoch, and gain nothing.
@triton.jit(
    do_not_specialize=["count", "across", "image_stride", "channel_stride", "row_stride"],
    do_not_specialize_on_alignment=["images_ptr"],
)
def _erase_images(
    images_ptr,
    around_ptr,
    records_ptr,
    count,
    quantiles_ptr,
    across,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Erase in a tile of the area around an image's boxes: its row, then top, left, bottom and right. Grid: tiles,
    images."""
    around_ptr += tl.program_id(1) * 5
    ys = tl.load(around_ptr + 1).to(tl.int32) + tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    xs = tl.load(around_ptr + 2).to(tl.int32) + tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    there = (ys < tl.load(around_ptr + 3))[:, None] & (xs < tl.load(around_ptr + 4))[None, :]
    places = images_ptr + tl.load(around_ptr) * image_stride
    places += ys.to(tl.int64)[:, None] * row_stride + xs.to(tl.int64)[None, :] * column_stride
    red = tl.load(places, there, 0).to(tl.float32)
    green, blue = red, red
    if CHANNELS == 3:
        green = tl.load(places + channel_stride, there, 0).to(tl.float32)
        blue = tl.load(places + 2 * channel_stride, there, 0).to(tl.float32)
    records_ptr += tl.program_id(1) * count * RECORD
    red, green, blue = erase(red, green, blue, ys, xs, records_ptr, count, quantiles_ptr, CHANNELS)
    tl.store(places, round_to(red, images_ptr.dtype.element_ty), there)
    if CHANNELS == 3:
        tl.store(places + channel_stride, round_to(green, images_ptr.dtype.element_ty), there)
        tl.store(places + 2 * channel_stride, round_to(blue, images_ptr.dtype.element_ty), there)


@triton.jit
def erase(red, green, blue, ys, xs, records_ptr, count, quantiles_ptr, CHANNELS: tl.constexpr):
    """Erase boxes of a tile of a finished image, one after the other.

    Args:
        red, green, blue: float32 blocks rows × columns; of one channel, the same block three times.
        ys, xs: int32 (rows,) and (columns,), ascending, the coordinates of the tile in the image.
        records_ptr: to the image's boxes, `ERASED` as int64.
        count: how many boxes.
        quantiles_ptr: to the table of normal quantiles, float32.
        CHANNELS: 1 or 3.

    Returns:
        red, green, blue.
    """
    top, bottom, left, right = tl.min(ys), tl.max(ys), tl.min(xs), tl.max(xs)
    at = 0
    while at < count:
        record_ptr = records_ptr + at * RECORD
        down = tl.load(record_ptr).to(tl.int32)
        across = tl.load(record_ptr + 1).to(tl.int32)
        height = tl.load(record_ptr + 2).to(tl.int32)
        width = tl.load(record_ptr + 3).to(tl.int32)
        # Nearly all tiles are outside.
        if (down <= bottom) & (down + height > top) & (across <= right) & (across + width > left) & (height > 0):
            y, x = ys - down, xs - across
            inside = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))[None, :]
            kind = tl.load(record_ptr + 4)
            if kind == _CONST:
                red = tl.where(inside, _number(record_ptr + 5), red)
                green = tl.where(inside, _number(record_ptr + 6), green)
                blue = tl.where(inside, _number(record_ptr + 7), blue)
            else:
                first = tl.load(record_ptr + 5).to(tl.int32)
                key = tl.load(record_ptr + 6) | (tl.load(record_ptr + 7) << 32)
                # Numbers are counted channel by channel, within one row by row; a colour has one for each channel.
                down_step = tl.where(kind == _TRANSPOSED_PIXEL, 1, width)
                across_step = tl.where(kind == _TRANSPOSED_PIXEL, height, 1)
                place = tl.where(kind >= _PIXEL, y[:, None] * down_step + x[None, :] * across_step, 0) + first
                plane = tl.where(kind >= _PIXEL, height * width, 1)
                # The compiler does not know the number of rounds, so that it does one channel after the other: all at
                # once need 181 registers in the fused kernel (sm_90, 8 pixels a thread), this way it stays at 128.
                channel = 0
                while channel < tl.where(height > 0, CHANNELS, 0):
                    numbers = _normal(place, key, quantiles_ptr, inside)
                    red = tl.where(inside & (channel == 0), numbers, red)
                    green = tl.where(inside & (channel == 1), numbers, green)
                    blue = tl.where(inside & (channel == 2), numbers, blue)
                    place += plane
                    channel += 1
        at += 1
    if CHANNELS == 1:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _number(bits_ptr):
    """The float32 with these bits."""
    return tl.load(bits_ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _normal(place, key, quantiles_ptr, wanted):
    """The normal numbers of these indices, as `gpuload.stage.noise.normals` makes them."""
    zero = place * 0
    word0, word1, word2, word3 = tl.philox(key, place // _PER_BLOCK, zero, zero, zero)
    which = (place % _PER_BLOCK) // 2
    word = tl.where(which == 0, word0, tl.where(which == 1, word1, tl.where(which == 2, word2, word3)))
    # The hints: see `gpuload.stage.fused.geometry`.
    first_ptr = tl.max_contiguous(quantiles_ptr + (word & 0xFFFF).to(tl.int32), [1, 2])
    second_ptr = tl.max_contiguous(quantiles_ptr + (word >> 16).to(tl.int32), [1, 2])
    first, second = tl.load(first_ptr, wanted, 0.0), tl.load(second_ptr, wanted, 0.0)
    even = first * _COSINE + second * _SINE
    odd = second * _COSINE - first * _SINE
    return tl.where(place % 2 == 0, even, odd)
