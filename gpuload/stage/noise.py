"""Normal random numbers with the same bits on every device.

They are made by table look-ups, multiplications and additions, which every device rounds alike; logarithms and cosines
(Box and Muller's method) differ between devices, and cost more. A word of Philox gives two 16-bit numbers, the table
turns each into a normal one (the quantile in the middle of its cell), and a rotation of this pair by atan(3/4) makes
another pair of independent normal numbers, on a grid of 2**32 and with tails to 6 sigma.

`normals` makes them with numpy, `batch_normals` with torch on any device, with the same bits. The table of 256 KB is
kept once for each device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch

from gpuload.rng import philox
from gpuload.rng.philox import LOW32, MULTIPLIERS, ROUNDS, WEYL, Key

__all__ = [
    "PER_BLOCK",
    "ROTATION",
    "batch_normals",
    "forget_tables",
    "normals",
    "philox_words",
    "quantile_table",
    "quantiles",
]

PER_BLOCK: Final = 8  # numbers that a block of Philox gives
ROTATION: Final = (0.8, 0.6)  # cosine and sine; each is rounded to float32 once


def normals(key_words: tuple[int, int], count: int) -> np.ndarray:
    """Standard normal numbers, float32 (count,), of two 32-bit words drawn for this use. A larger count only appends.

    Example:
        >>> normals((1, 2), 3).tolist() == normals((1, 2), 9)[:3].tolist()
        True
    """
    blocks = -(-count // PER_BLOCK)
    counters = np.zeros((blocks, 4), np.uint32)
    counters[:, 0] = np.arange(blocks)
    words = philox.philox4x32(counters, Key(*key_words)).ravel()
    table = quantiles()
    first, second = table.take(words & np.uint32(0xFFFF)), table.take(words >> np.uint32(16))
    cosine, sine = map(np.float32, ROTATION)
    out = np.empty((len(words), 2), np.float32)
    np.add(first * cosine, second * sine, out=out[:, 0])
    np.subtract(second * cosine, first * sine, out=out[:, 1])
    return out.ravel()[:count]


@lru_cache(maxsize=1)
def quantiles() -> np.ndarray:
    """The normal quantiles in the middle of 2**16 cells of equal probability, scaled to variance 1; float32."""
    from statistics import NormalDist  # it imports much, and few processes need it

    half = 1 << 15
    inverse = NormalDist().inv_cdf
    # Python's inverse is correct to 1e-16 and the same everywhere; 0.05 s, once in a process.
    upper = np.array([inverse((half + cell + 0.5) / (2 * half)) for cell in range(half)])
    upper /= np.sqrt(np.mean(upper**2))
    return np.concatenate([-upper[::-1], upper]).astype(np.float32)


def batch_normals(key_words: torch.Tensor, count: int) -> torch.Tensor:
    """`normals` for each row of `key_words`, integers (N, 2): float32 (N, count)."""
    blocks = -(-count // PER_BLOCK)
    words = philox_words(key_words.to(torch.int64), blocks).flatten(1)  # N × blocks × 4
    table = quantile_table(words.device)
    first, second = table[words & 0xFFFF], table[words >> 16]
    cosine, sine = ROTATION
    # One operation after the other: a kernel that fused a product and a sum might round only once.
    one = first * cosine
    one += second * sine
    other = second * cosine
    other -= first * sine
    return torch.stack([one, other], dim=2).flatten(1)[:, :count]


def philox_words(keys: torch.Tensor, blocks: int) -> torch.Tensor:
    """The words of the counters 0 … blocks - 1, int64 (N, blocks, 4). int64 products of 32-bit words wrap at 2**64 and
    keep all bits; the sign that a shift extends is masked off."""
    n = len(keys)
    word0 = torch.arange(blocks, device=keys.device).expand(n, blocks)
    word1 = word2 = word3 = torch.zeros_like(word0)
    key0, key1 = keys[:, :1], keys[:, 1:]
    for turn in range(ROUNDS):
        product0, product1 = word0 * MULTIPLIERS[0], word2 * MULTIPLIERS[1]
        word0 = ((product1 >> 32) & LOW32) ^ word1 ^ ((key0 + turn * WEYL[0]) & LOW32)
        word2 = ((product0 >> 32) & LOW32) ^ word3 ^ ((key1 + turn * WEYL[1]) & LOW32)
        word1, word3 = product1 & LOW32, product0 & LOW32
    return torch.stack([word0, word1, word2, word3], dim=2)


@lru_cache(maxsize=16)
def quantile_table(device: torch.device) -> torch.Tensor:
    """The `quantiles` on a device, kept until `forget_tables`."""
    return torch.from_numpy(quantiles()).to(device)


def forget_tables() -> None:
    """Let go of memory on devices; whoever needs it again makes it again."""
    quantile_table.cache_clear()
