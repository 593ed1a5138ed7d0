"""The kernel that copies the crops of decoded images into a batch's memory, with one launch for all images.

Decoders choose where to store images. A crop is therefore described by the address of its first upright pixel and
by two steps in bytes, to the next row and to the next column; for a rotated or flipped image, steps can be negative.

The kernel is launched in the main process, on the current stream; the caller keeps the images alive until the kernel
has finished.
"""

# Type checkers do not understand how kernels are launched, nor that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from gpuload.decode.header import FLIPPED_X, FLIPPED_Y
from gpuload.stage.device import upload, use_device_of

__all__ = ["BLOCK", "launch"]

BLOCK: Final = 4096  # bytes copied by each program
# The integers of a crop: first pixel's address, row step, column step, channels, bytes per row, bytes, offset in the
# target.
_CROP_INTS: Final = tl.constexpr(7)


@triton.jit
def _copy(crops_ptr, target_ptr, BLOCK: tl.constexpr):
    crop_ptr = crops_ptr + tl.program_id(1) * _CROP_INTS
    address, row_step, column_step = tl.load(crop_ptr), tl.load(crop_ptr + 1), tl.load(crop_ptr + 2)
    channels, row_bytes = tl.load(crop_ptr + 3).to(tl.int32), tl.load(crop_ptr + 4).to(tl.int32)
    nbytes, start = tl.load(crop_ptr + 5), tl.load(crop_ptr + 6)
    # An int64 division takes a GPU dozens of instructions, so only the block's first offset is divided as int64.
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    first_row = begin // row_bytes
    lane = tl.arange(0, BLOCK)
    offset = (begin - first_row * row_bytes).to(tl.int32) + lane
    row = offset // row_bytes
    column = (offset - row * row_bytes) // channels
    channel = offset - row * row_bytes - column * channels
    source = address + (first_row + row) * row_step + column * column_step + channel
    is_inside = begin + lane < nbytes
    level = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=is_inside)
    tl.store(target_ptr + start + begin + lane, level, mask=is_inside)


def launch(address: np.ndarray, row_bytes: np.ndarray, destinations: np.ndarray, target: torch.Tensor) -> None:
    """Copy regions on a device.

    Args:
        address, row_bytes: int64 (N,), the address of each region's first pixel, and the distance between its rows.
        destinations, target: see `gpuload.stage.decode.backend.copy_crops`.
    """
    (height, width, channels), orientations = destinations["shape"].T, destinations["orientation"]
    # The upright image is the stored image, first transposed, then flipped.
    is_transposed = orientations >= 5
    row_step, column_step = np.where(is_transposed, channels, row_bytes), np.where(is_transposed, row_bytes, channels)
    is_flipped_y, is_flipped_x = np.isin(orientations, [*FLIPPED_Y]), np.isin(orientations, [*FLIPPED_X])
    address = address + is_flipped_y * (height - 1) * row_step + is_flipped_x * (width - 1) * column_step
    row_step, column_step = (
        np.where(is_flipped_y, -row_step, row_step),
        np.where(is_flipped_x, -column_step, column_step),
    )
    region_row_bytes = width * channels
    nbytes = height * region_row_bytes
    crops = np.stack(
        [address, row_step, column_step, channels, region_row_bytes, nbytes, destinations["start"]], axis=1
    )
    grid = triton.cdiv(int(nbytes.max()), BLOCK), len(crops)
    with use_device_of(target):
        _copy[grid](upload(crops, target.device), target, BLOCK=BLOCK)
