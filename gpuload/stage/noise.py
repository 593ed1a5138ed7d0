"""Normal random numbers that are bit-identical on every device.

The method uses only table look-ups, multiplications and additions, which all devices round identically; logarithms and
cosines (as in Box-Muller) differ between devices, and are slower. Each Philox word is split into two 16-bit integers, a
table maps each integer to a normal number (the quantile at the middle of a cell), and a rotation of the pair by
atan(3/4) yields two independent normal numbers with 2**32 possible values and tails to 6 sigma.

`normals` uses numpy, and `batch_normals` uses torch on any device; both return the same bits. The 256 KB table is
cached on each device.
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

PER_BLOCK: Final = 8  # normal numbers per Philox block
ROTATION: Final = (0.8, 0.6)  # cosine and sine, each rounded to float32 once


def normals(key_words: tuple[int, int], count: int) -> np.ndarray:
    """Return standard normal numbers, float32 (count,), from two random 32-bit words. A larger count appends numbers
    and leaves the earlier ones unchanged.

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
    """Return the normal quantiles at the middle of 2**16 equally probable cells, scaled to variance 1; float32."""
    from statistics import NormalDist  # slow to import, and rarely used

    half = 1 << 15
    inverse = NormalDist().inv_cdf
    # Python's inverse is correct to 1e-16 and the same on all platforms; takes 0.05 s, once per process.
    upper = np.array([inverse((half + cell + 0.5) / (2 * half)) for cell in range(half)])
    upper /= np.sqrt(np.mean(upper**2))
    return np.concatenate([-upper[::-1], upper]).astype(np.float32)


def batch_normals(key_words: torch.Tensor, count: int) -> torch.Tensor:
    """Return `normals` for each row of `key_words`, which are (N, 2) integers, as float32 (N, count)."""
    blocks = -(-count // PER_BLOCK)
    words = philox_words(key_words.to(torch.int64), blocks).flatten(1)  # N × blocks × 4
    table = quantile_table(words.device)
    first, second = table[words & 0xFFFF], table[words >> 16]
    cosine, sine = ROTATION
    # Products and sums are separate operations, because a kernel that fused them could round only once.
    rotated_first = first * cosine
    rotated_first += second * sine
    rotated_second = second * cosine
    rotated_second -= first * sine
    return torch.stack([rotated_first, rotated_second], dim=2).flatten(1)[:, :count]


def philox_words(keys: torch.Tensor, counters: int | torch.Tensor) -> torch.Tensor:
    """Return the Philox words for counters, int64 (N, blocks), or for the counters 0 … n - 1: int64 (N, blocks, 4). An
    int64 product of two 32-bit words wraps at 2**64, which loses no bits; the sign bits that right shifts extend are
    masked off."""
    if isinstance(counters, int):
        counters = torch.arange(counters, device=keys.device).expand(len(keys), counters)
    word0 = counters
    word1 = word2 = word3 = torch.zeros_like(word0)
    key0, key1 = keys[:, :1], keys[:, 1:]
    for round_index in range(ROUNDS):
        product0, product1 = word0 * MULTIPLIERS[0], word2 * MULTIPLIERS[1]
        word0 = ((product1 >> 32) & LOW32) ^ word1 ^ ((key0 + round_index * WEYL[0]) & LOW32)
        word2 = ((product0 >> 32) & LOW32) ^ word3 ^ ((key1 + round_index * WEYL[1]) & LOW32)
        word1, word3 = product1 & LOW32, product0 & LOW32
    return torch.stack([word0, word1, word2, word3], dim=2)


@lru_cache(maxsize=16)
def quantile_table(device: torch.device) -> torch.Tensor:
    """Return the `quantiles` on a device, cached until `forget_tables`."""
    return torch.from_numpy(quantiles()).to(device)


def forget_tables() -> None:
    """Free the tables on all devices; the next `quantile_table` creates them again."""
    quantile_table.cache_clear()
