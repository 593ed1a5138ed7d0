"""Sharpness inside a kernel: a blend with a smoothed image, as in `gpuload.stage.reference.blur.sharpness`.

Device functions; nothing is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpuload.stage.fused.record import COLUMN_STEP, FACTOR, HEIGHT, ROW_STEP, WIDTH
from gpuload.stage.fused.sources import offsets, read

__all__ = ["sharpness"]


@triton.jit
def sharpness(source_ptr, ints_ptr, floats_ptr, channel_step, ys, xs, CHANNELS: tl.constexpr):
    """Pixels of the result."""
    factor = tl.load(floats_ptr + FACTOR).to(tl.float32)
    height, width = tl.load(ints_ptr + HEIGHT), tl.load(ints_ptr + WIDTH)
    inner = ((ys > 0) & (ys < height - 1))[:, None] & ((xs > 0) & (xs < width - 1))[None, :]
    red = tl.zeros([ys.shape[0], xs.shape[0]], tl.int32)
    green, blue = red, red
    for index in tl.static_range(9):
        at = offsets(ints_ptr, ROW_STEP, HEIGHT, ys + (index // 3 - 1))[:, None]
        at += offsets(ints_ptr, COLUMN_STEP, WIDTH, xs + (index % 3 - 1))[None, :]
        one, two, three = read(source_ptr, at, channel_step, CHANNELS)
        red += one
        if CHANNELS == 3:
            green += two
            blue += three
    at = offsets(ints_ptr, ROW_STEP, HEIGHT, ys)[:, None] + offsets(ints_ptr, COLUMN_STEP, WIDTH, xs)[None, :]
    one, two, three = read(source_ptr, at, channel_step, CHANNELS)
    red = _sharpened(one, red, inner, factor)
    if CHANNELS == 3:
        green, blue = _sharpened(two, green, inner, factor), _sharpened(three, blue, inner, factor)
    else:
        green, blue = red, red
    return red, green, blue


@triton.jit
def _sharpened(levels, total, inner, factor):
    levels = levels.to(tl.float32)
    # The middle pixel counts five times. A thirteenth of a whole number plus a half is never close to a whole number.
    smoothed = tl.where(inner, tl.floor((total.to(tl.float32) + 4 * levels + 6.5) * (1 / 13)), levels)
    return tl.floor(tl.minimum(tl.maximum((levels - smoothed) * factor + smoothed, 0.0), 255.0))
