"""Normal random numbers on a device, for a batch: `gpuload.noise` with torch, to the last bit.

Runs in the process of the stage. The table of quantiles is kept, once for each device.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from gpuload.noise import PER_BLOCK, ROTATION, quantiles
from gpuload.rng import LOW32, MULTIPLIERS, ROUNDS, WEYL

__all__ = ["batch_normals"]


def batch_normals(key_words: torch.Tensor, count: int) -> torch.Tensor:
    """For each row of `key_words`, whole numbers (N, 2), as many standard normal numbers: float32 (N, count)."""
    blocks = -(-count // PER_BLOCK)
    words = _philox(key_words.to(torch.int64), blocks).flatten(1)  # N × blocks × 4
    table = _table(words.device)
    first, second = table[words & 0xFFFF], table[words >> 16]
    cosine, sine = ROTATION
    # Each product is rounded by itself: one kernel for a product and a sum may round but once.
    one = first * cosine
    one += second * sine
    other = second * cosine
    other -= first * sine
    return torch.stack([one, other], dim=2).flatten(1)[:, :count]


def _philox(keys: torch.Tensor, blocks: int) -> torch.Tensor:
    """The words of the counters 0 … blocks - 1, int64 (N, blocks, 4). int64 products of 32-bit words wrap at 2**64 and
    keep all their bits; a shift's sign is cut off."""
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
def _table(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(quantiles()).to(device)
