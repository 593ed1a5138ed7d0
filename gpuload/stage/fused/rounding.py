"""Arithmetic in kernels that rounds as the reference does, on a GPU and in Triton's interpreter.

Kernels are launched with ``enable_fp_fusion=False``, so that a product and a sum round twice, as in the reference;
where the reference rounds once, kernels call `multiply_add`. The interpreter rounds a fused multiply-add twice and
truncates bfloat16, so both are written out for it. Device functions; nothing is kept.
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
    """factor · numbers + added on float32, rounded once. Numbers must be levels or differences of levels."""
    if INTERPRETED:
        # 24 and 9 bits: the product is exact in float64, and so is the sum, except for factors next to 0.
        result = (factor.to(tl.float64) * numbers.to(tl.float64) + added.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(factor + tl.zeros_like(numbers), numbers, added)
    return result


@triton.jit
def round_to(numbers, dtype: tl.constexpr):
    """float32 in another dtype, rounded to the nearest, ties to even; truncated for uint8."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(dtype)
    return result
