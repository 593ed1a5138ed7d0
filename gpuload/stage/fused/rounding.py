"""Arithmetic in kernels that is to round as it does elsewhere, on a GPU and in Triton's interpreter.

Kernels are launched with ``enable_fp_fusion=False``, so that a product and a sum round twice, as in the reference;
where the reference rounds once, `multiply_add` says so. The interpreter rounds a fused one twice and cuts bfloat16 off,
so there both are spelt out. Device functions; nothing is kept.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton import knobs

__all__ = ["INTERPRETED", "multiply_add", "round_to"]

INTERPRETED: Final = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def multiply_add(factor, numbers, added):
    """factor · numbers + added on float32, rounded once. Numbers are to be levels or their differences."""
    if INTERPRETED:
        # 24 and 9 bits: the product is exact in float64, and so is the sum but for factors next to 0.
        result = (factor.to(tl.float64) * numbers.to(tl.float64) + added.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(factor + tl.zeros_like(numbers), numbers, added)
    return result


@triton.jit
def round_to(numbers, dtype: tl.constexpr):
    """float32 in another dtype, rounded to the nearest, ties to even; for uint8 cut off behind the decimal point."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(dtype)
    return result
