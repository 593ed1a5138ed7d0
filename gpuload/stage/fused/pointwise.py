"""Operations on single pixels inside a kernel. The kernel's input data specifies the operations and their values.

A tile's pixels, and the results, are three float32 blocks of shape (rows, columns), one each for red, green and blue,
with integral values in 0 … 255. The arithmetic is the same, step by step, as in `gpuload.stage.reference.color`.
Operations that need a statistic of the entire image (contrast, equalize, autocontrast) use a table (see `statistics`).
All functions are stateless device functions of Triton.
"""

# Outside kernels, calling a kernel function raises an error, and type checkers assume that it always does.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gpuload.stage.reference.color import GAMMA_GUARD, LUMA, TINY
from gpuload.transforms.program.fusing.passes import ERASE_BOX, STATISTICS
from gpuload.transforms.program.ops import code as code_of

__all__ = ["operate"]

# Each operation's bit, in the order of its code.
_BRIGHTNESS, _SATURATION, _HUE = (tl.constexpr(1 << code_of(name)) for name in ("brightness", "saturation", "hue"))
_GRAYSCALE, _PERMUTE, _INVERT = (tl.constexpr(1 << code_of(name)) for name in ("grayscale", "permute", "invert"))
_SOLARIZE, _SOLARIZE_ADD = tl.constexpr(1 << code_of("solarize")), tl.constexpr(1 << code_of("solarize_add"))
_POSTERIZE: Final = tl.constexpr(1 << code_of("posterize"))
_GAMMA, _WHITE_BALANCE = (tl.constexpr(1 << code_of(name)) for name in ("gamma", "white_balance"))
_TABLES: Final = tl.constexpr(sum(1 << code_of(name) for name in STATISTICS))
_ERASE_BOX: Final = tl.constexpr(1 << ERASE_BOX)

_RED, _GREEN, _BLUE = map(tl.constexpr, LUMA)
_TINY: Final = tl.constexpr(TINY)
_MINUS_SIXTH_TURN: Final = tl.constexpr(-255 / 6)
_HALF: Final = tl.constexpr(255 / 2)
_SIXTHS_PER_UNIT: Final = tl.constexpr(6 / 255)
_UNIT: Final = tl.constexpr(1 / 255)
_GAMMA_GUARD: Final = tl.constexpr(GAMMA_GUARD)


@triton.jit
def operate(red, green, blue, ys, xs, code, values_ptr, table_ptr, OPERATIONS: tl.constexpr, CHANNELS: tl.constexpr):
    """Apply an operation to a tile.

    Args:
        red, green, blue: the tile's levels; with one channel, the same block three times.
        ys, xs: int32 (rows,) and (columns,), the coordinates of the tile.
        code: a scalar, the code of an operation in `gpuload.transforms.program.fusing.passes.POINTWISE`, or
            `ERASE_BOX`; codes that are not in OPERATIONS do nothing.
        values_ptr: points to the operation's `VALUES` float64 numbers.
        table_ptr: points to the operation's uint8 3 × 256 table, if it has one.
        OPERATIONS: a mask of the codes for which code is compiled: all of them can double the compile time of a kernel.
        CHANNELS: 1 or 3.

    Returns:
        red, green, blue.
    """
    operation = 1 << code
    if (_BRIGHTNESS & OPERATIONS) and operation == _BRIGHTNESS:
        factor = tl.load(values_ptr).to(tl.float32)
        red, green, blue = _truncate(red * factor), _truncate(green * factor), _truncate(blue * factor)
    elif (_SATURATION & OPERATIONS) and operation == _SATURATION:
        if CHANNELS == 3:
            red, green, blue = _saturation(red, green, blue, tl.load(values_ptr).to(tl.float32))
    elif (_HUE & OPERATIONS) and operation == _HUE:
        if CHANNELS == 3:
            red, green, blue = _hue(red, green, blue, tl.load(values_ptr))
    elif (_GRAYSCALE & OPERATIONS) and operation == _GRAYSCALE:
        if CHANNELS == 3:
            red = _luma(red, green, blue)
            green, blue = red, red
    elif (_TABLES & OPERATIONS) and operation & _TABLES != 0:
        red = _look_up(table_ptr, red)
        green = _look_up(table_ptr + 256, green)
        blue = _look_up(table_ptr + 512, blue)
    elif (_SOLARIZE & OPERATIONS) and operation == _SOLARIZE:
        threshold = tl.ceil(tl.load(values_ptr)).to(tl.float32)  # float32 would round 34 + 1e-14 to 34 before ceil
        red = tl.where(red < threshold, red, 255.0 - red)
        green = tl.where(green < threshold, green, 255.0 - green)
        blue = tl.where(blue < threshold, blue, 255.0 - blue)
    elif (_SOLARIZE_ADD & OPERATIONS) and operation == _SOLARIZE_ADD:
        threshold = tl.load(values_ptr).to(tl.float32)
        increment = tl.load(values_ptr + 1).to(tl.float32)
        red = tl.where(red < threshold, tl.minimum(red + increment, 255.0), red)
        green = tl.where(green < threshold, tl.minimum(green + increment, 255.0), green)
        blue = tl.where(blue < threshold, tl.minimum(blue + increment, 255.0), blue)
    elif (_POSTERIZE & OPERATIONS) and operation == _POSTERIZE:
        dropped_bits = 8 - tl.load(values_ptr).to(tl.int32)
        red = ((red.to(tl.int32) >> dropped_bits) << dropped_bits).to(tl.float32)
        green = ((green.to(tl.int32) >> dropped_bits) << dropped_bits).to(tl.float32)
        blue = ((blue.to(tl.int32) >> dropped_bits) << dropped_bits).to(tl.float32)
    elif (_INVERT & OPERATIONS) and operation == _INVERT:
        red, green, blue = 255.0 - red, 255.0 - green, 255.0 - blue
    elif (_PERMUTE & OPERATIONS) and operation == _PERMUTE:
        if CHANNELS == 3:
            red, green, blue = _permute(red, green, blue, values_ptr)
    elif (_GAMMA & OPERATIONS) and operation == _GAMMA:
        exponent = tl.load(values_ptr).to(tl.float32)
        red, green, blue = _power(red, exponent), _power(green, exponent), _power(blue, exponent)
    elif (_WHITE_BALANCE & OPERATIONS) and operation == _WHITE_BALANCE:
        if CHANNELS == 3:
            red = _truncate(red * tl.load(values_ptr).to(tl.float32))
            blue = _truncate(blue * tl.load(values_ptr + 1).to(tl.float32))
    elif (_ERASE_BOX & OPERATIONS) and operation == _ERASE_BOX:
        is_inside = _is_inside_box(ys, xs, values_ptr)
        red = tl.where(is_inside, tl.load(values_ptr + 4).to(tl.float32), red)
        green = tl.where(is_inside, tl.load(values_ptr + 5).to(tl.float32), green)
        blue = tl.where(is_inside, tl.load(values_ptr + 6).to(tl.float32), blue)
    if CHANNELS == 1:  # this makes the code above that computes green and blue dead code
        green, blue = red, red
    return red, green, blue


@triton.jit
def _truncate(numbers):
    """Clamp to 0 … 255 and truncate."""
    return tl.floor(tl.minimum(tl.maximum(numbers, 0.0), 255.0))


@triton.jit
def _power(levels, exponent):
    power = tl.exp2(tl.log2(tl.maximum(levels, 1.0) * _UNIT) * exponent)
    return tl.where(levels > 0.0, tl.floor(power * 255.0 + _GAMMA_GUARD), 0.0)


@triton.jit
def _luma(red, green, blue):
    """Compute grey levels; all products and sums are exact."""
    return tl.floor(red * _RED + green * _GREEN + blue * _BLUE + 0.5)


@triton.jit
def _look_up(table_ptr, levels):
    # `gpuload.stage.fused.geometry` explains the hint.
    return tl.load(tl.max_contiguous(table_ptr + levels.to(tl.int32), [1, 2])).to(tl.float32)


@triton.jit
def _saturation(red, green, blue, factor):
    """Blend with the grey levels; `color.saturation` explains why the product and the sum must not be fused."""
    grey = _luma(red, green, blue)
    red = _truncate((red - grey) * factor + grey)
    green = _truncate((green - grey) * factor + grey)
    blue = _truncate((blue - grey) * factor + grey)
    return red, green, blue


@triton.jit
def _hue(red, green, blue, factor):
    """Rotate the hue by a fraction of the circle; `color.hue` has the formulas."""
    value = tl.maximum(tl.maximum(red, green), blue)
    lowest = tl.minimum(tl.minimum(red, green), blue)
    chroma = value - lowest
    distance = 2.0 - tl.div_rn(green + blue - red - lowest, chroma + _TINY)  # never negative
    hue = tl.floor(tl.where(green < blue, -distance, distance) * _MINUS_SIXTH_TURN + _HALF)
    hue += ((factor * 255.0).to(tl.int32) & 255).to(tl.float32)  # truncated, then modulo 256
    hue = tl.where(hue < 256.0, hue, hue - 256.0)
    sixths = hue * _SIXTHS_PER_UNIT
    rounded_chroma = tl.floor(tl.div_rn(chroma * 255.0, value + _TINY)) * value * _UNIT
    base = value - rounded_chroma + 0.5
    red = _floor_sum(base, tl.abs(sixths - 3.0) - 1.0, rounded_chroma)
    green = _floor_sum(base, 2.0 - tl.abs(sixths - 2.0), rounded_chroma)
    blue = _floor_sum(base, 2.0 - tl.abs(sixths - 4.0), rounded_chroma)
    return red, green, blue


@triton.jit
def _floor_sum(base, share, rounded_chroma):
    return tl.floor(tl.minimum(tl.maximum(share, 0.0), 1.0) * rounded_chroma + base)


@triton.jit
def _permute(red, green, blue, values_ptr):
    first = tl.load(values_ptr).to(tl.int32)
    second = tl.load(values_ptr + 1).to(tl.int32)
    third = tl.load(values_ptr + 2).to(tl.int32)
    return (
        _select_channel(red, green, blue, first),
        _select_channel(red, green, blue, second),
        _select_channel(red, green, blue, third),
    )


@triton.jit
def _select_channel(red, green, blue, channel):
    return tl.where(channel == 0, red, tl.where(channel == 1, green, blue))


@triton.jit
def _is_inside_box(ys, xs, box_ptr):
    """Return which pixels of a tile are inside a box, whose top, left, height and width are float64."""
    y = ys - tl.load(box_ptr).to(tl.int32)
    x = xs - tl.load(box_ptr + 1).to(tl.int32)
    rows = (y >= 0) & (y < tl.load(box_ptr + 2).to(tl.int32))
    columns = (x >= 0) & (x < tl.load(box_ptr + 3).to(tl.int32))
    return rows[:, None] & columns[None, :]
