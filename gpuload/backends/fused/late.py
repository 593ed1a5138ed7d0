"""The fused backend on finished images: mixed in place by one kernel for all pairs, erased in place where that comes
behind mixing. (Erasing that comes first is part of the pass that makes the images.)

Runs in the process of the stage, on the current stream; nothing is kept.
"""

# Type checkers know neither how a kernel is launched nor that calls in kernels return.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from gpuload.backends.fused.erasing import RECORD, erase, quantile_table, records
from gpuload.backends.fused.mixing import mix
from gpuload.backends.fused.rounding import round_to
from gpuload.backends.results import Outputs, neighbours
from gpuload.backends.upload import upload
from gpuload.transforms import Draws
from gpuload.transforms.mixing import drawn_mix
from gpuload.transforms.params import Erase

__all__ = ["apply", "trial"]

ROWS: Final = 16
COLUMNS: Final = 64

_RECORD: Final = tl.constexpr(RECORD)


def apply(outputs: Outputs, late: Draws, partners: np.ndarray | None) -> None:
    """Apply what was drawn to finished images; arguments as for `gpuload.backends.results.apply_late`."""
    for number, (transform, params) in enumerate(zip(late.transforms, late.params, strict=True)):
        if transform.mixes:
            drawn = drawn_mix(Draws((transform,), (params,), late.sizes_hw[number : number + 2]))
            if drawn is not None:
                mix(outputs, drawn, neighbours(len(drawn.share)) if partners is None else partners)
        elif isinstance(params, Erase):
            _erase_images(outputs, records(params, transform, outputs[0].shape[0]))  # pyright: ignore


def _erase_images(outputs: Outputs, boxes: np.ndarray) -> None:
    """Erase boxes (B, n, `RECORD`) of finished images."""
    for row in np.flatnonzero(boxes[:, :, 2].any(axis=1)).tolist():
        image = outputs[row]
        channels, height, width = image.shape
        with torch.cuda.device_of(image):
            _erase_image[triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS)](
                image,
                upload(boxes[row], image.device),
                boxes.shape[1],
                quantile_table(image.device),
                height,
                width,
                *image.stride(),
                CHANNELS=channels,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                enable_fp_fusion=False,
            )


@triton.jit
def _erase_image(
    image_ptr,
    boxes_ptr,
    count,
    quantiles_ptr,
    height,
    width,
    channel_step,
    row_step,
    column_step,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of one image. Grid: rows and columns of tiles."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (rows < height)[:, None] & (columns < width)[None, :]
    at = rows.to(tl.int64)[:, None] * row_step + columns.to(tl.int64)[None, :] * column_step
    red = tl.load(image_ptr + at, there, 0).to(tl.float32)
    green, blue = red, red
    if CHANNELS == 3:
        green = tl.load(image_ptr + channel_step + at, there, 0).to(tl.float32)
        blue = tl.load(image_ptr + 2 * channel_step + at, there, 0).to(tl.float32)
    red, green, blue = erase(red, green, blue, rows, columns, boxes_ptr, count, quantiles_ptr, CHANNELS)
    tl.store(image_ptr + at, round_to(red, image_ptr.dtype.element_ty), there)
    if CHANNELS == 3:
        tl.store(image_ptr + channel_step + at, round_to(green, image_ptr.dtype.element_ty), there)
        tl.store(image_ptr + 2 * channel_step + at, round_to(blue, image_ptr.dtype.element_ty), there)


def trial(device: torch.device) -> None:
    """Compile a small kernel and run it."""
    image = torch.zeros(1, 4, 4, device=device)
    boxes = np.zeros((1, 1, RECORD), np.int64)
    boxes[0, 0, 2:4] = 1
    _erase_images([image], boxes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
