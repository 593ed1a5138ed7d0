"""Counter-based random numbers: Philox4x32-10, vectorised in numpy.

The random numbers of a lane are a pure function of (seed, epoch, position, lane): they are the same with any number of
workers, ranks or samples per batch, and do not depend on any other random numbers. This module runs in the main process
and in workers; its only state is a few small caches.

A 128-bit counter has four words: words 0 and 1 are the low and the high half of the sample's position, word 2 is the
*lane*, which identifies the transform or other consumer (`gpuload.rng.streams` lists all lanes), and word 3 is the
index of a block of four numbers within the lane.

Source of the algorithm: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Final, NamedTuple, SupportsIndex

import numpy as np

from gpuload.checks import integer

__all__ = ["Key", "epoch_key", "philox4x32", "uniforms", "words"]

ROUNDS: Final = 10
LOW32: Final = 0xFFFFFFFF
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)  # for counter words 0 and 2
WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # added to key words 0 and 1 after each round
PIECE: Final = 1024  # the number of counters processed at a time, so that a round fits in the CPU cache

# These are 0-d arrays, because numpy takes half a microsecond longer with scalars.
_MASK: Final = np.array(LOW32, np.uint64)
_SHIFT: Final = np.array(32, np.uint64)
_HALF: Final = np.array(0.5)
_UNIT: Final = np.array(2.0**-32)
# The indices of the low and the high half of a uint64 that is viewed as two uint32.
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


class Key(NamedTuple):
    """The two 32-bit words of a Philox key, as Python ints."""

    k0: int
    k1: int


@lru_cache(maxsize=64)  # called for every chunk and batch; computing a key takes as long as drawing for a few samples
def epoch_key(seed: SupportsIndex, epoch: SupportsIndex) -> Key:
    """Return the key that all random draws of one epoch depend on.

    The key is a Philox output, with the seed as key and the epoch as counter, so consecutive seeds and epochs have
    unrelated keys.

    Args:
        seed: 0 ≤ seed < 2**64.
        epoch: 0 ≤ epoch < 2**64.

    Example:
        >>> epoch_key(0, 0)
        Key(k0=1713891541, k1=3781805453)
    """
    seed64 = integer("seed", seed, minimum=0, maximum=2**64 - 1)
    epoch64 = integer("epoch", epoch, minimum=0, maximum=2**64 - 1)
    counter = np.array([epoch64 & LOW32, epoch64 >> 32, 0, 0], np.uint32)
    first, second = philox4x32(counter, Key(seed64 & LOW32, seed64 >> 32))[:2].tolist()
    return Key(first, second)


def philox4x32(counters: np.ndarray, key: Key) -> np.ndarray:
    """Apply Philox4x32 with 10 rounds, which turns each counter into four random words.

    Args:
        counters: uint32, shape … × 4.
        key: the two key words.

    Returns:
        uint32, same shape as `counters`.

    Raises:
        ValueError: the counters are not uint32 of shape … × 4.

    Example:
        >>> philox4x32(np.zeros((5, 4), np.uint32), Key(0, 0)).shape
        (5, 4)
    """
    counters = np.asarray(counters)
    if counters.dtype != np.uint32 or counters.ndim == 0 or counters.shape[-1] != 4:
        raise ValueError(f"counters must be uint32 of shape … × 4, got {counters.dtype} of shape {counters.shape}")
    flat = counters.reshape(-1, 4)
    out = np.empty_like(flat)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        n = len(piece)
        even, odd = _allocate_state(n)
        even[:n], odd[:n], even[n:], odd[n:] = piece[:, 0], piece[:, 1], piece[::-1, 2], piece[::-1, 3]
        out[start : start + n] = _run_rounds(even, odd, key).take(_gather_indices(1, n, 4))
    return out.reshape(counters.shape)


def words(key: Key, positions: np.ndarray, lane: int, count: int) -> np.ndarray:
    """Return `count` random 32-bit words for each position.

    Args:
        key: the epoch's key, from `epoch_key`.
        positions: int64, shape B; not negative.
        lane: the lane of the transform or other consumer, 0 ≤ lane < 2**32. Lanes are independent of each other.
        count: the number of words per position. A larger count appends words and leaves the earlier ones unchanged.

    Returns:
        uint32, B × count.

    Raises:
        ValueError: `positions` is not a one-dimensional array of integers, `lane` is out of range, or `count` is
            negative.

    Example:
        >>> words(Key(1, 2), np.arange(16), lane=0, count=6).shape
        (16, 6)
    """
    positions = np.asarray(positions)
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise ValueError(
            f"positions must be a one-dimensional array of integers, got {positions.dtype} of shape {positions.shape}"
        )
    if not 0 <= lane <= LOW32:
        raise ValueError(f"lane must lie in 0 … 2**32 - 1, got {lane}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    blocks = -(-count // 4)
    step = max(1, PIECE // max(1, blocks))
    if count and 0 < len(positions) <= step:
        return _draw(key, positions, lane, blocks, count)
    out = np.empty((len(positions), count), np.uint32)
    for start in range(0, out.size and len(positions), step):
        out[start : start + step] = _draw(key, positions[start : start + step], lane, blocks, count)
    return out


def uniforms(key: Key, positions: np.ndarray, lane: int, count: int) -> np.ndarray:
    """Return `count` random numbers for each position, uniform in the open interval (0, 1).

    Each number is (word + ½) / 2**32, which is exact in float64 and never 0 or 1, so its logarithm and reciprocal are
    finite. (If they were rounded to float32, the largest numbers would become 1.)

    The arguments and errors are the same as for `words`.

    Returns:
        float64, B × count.

    Example:
        >>> uniforms(epoch_key(0, 0), np.arange(3), lane=0, count=2).round(3)
        array([[0.831, 0.865],
               [0.883, 0.805],
               [0.73 , 0.192]])
    """
    out = words(key, positions, lane, count) + _HALF
    out *= _UNIT
    return out


def _draw(key: Key, positions: np.ndarray, lane: int, blocks: int, count: int) -> np.ndarray:
    """Compute `words` for at most PIECE counters, or for a single position. With few counters, the overhead of numpy
    calls dominates, so this function makes as few calls as possible."""
    positions64 = positions.astype(np.uint64)
    even, odd = (template.copy() for template in _state_templates(lane, blocks, len(positions64)))
    shape = (blocks, len(positions64))
    half = len(odd) // 2
    even[:half].reshape(shape)[:] = positions64 & _MASK
    odd[:half].reshape(shape)[:] = positions64 >> _SHIFT
    return _run_rounds(even, odd, key).take(_gather_indices(blocks, len(positions64), count))


def _allocate_state(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Allocate the state of n counters: 2 n even words (0 and 2) and 2 n odd words (1 and 3).

    Both arrays are flat. One holds word 0 of all counters, then word 2 of all counters in *reverse* order; the other
    holds words 1 and 3 in the same way. So `[::-1]` exchanges the two halves, as each round does, and keeps the words
    of each counter aligned. The even words are uint64 with a zero high half, ready to be multiplied.
    """
    return np.zeros(2 * n, np.uint64), np.empty(2 * n, np.uint32)


def _run_rounds(even: np.ndarray, odd: np.ndarray, key: Key) -> np.ndarray:
    """Run the ten rounds, overwriting the state; return its even words followed by its odd words, uint32 (4 n,).

    A round is three numpy calls on views that are created once. A version with seven calls on 2 × n arrays took twice
    as long for 32 counters.
    """
    multipliers, round_keys = _round_constants(key, len(odd) // 2)
    product = np.empty_like(even)
    parts = product.view(np.uint32)
    high, low = parts[HIGH::2][::-1], parts[LOW::2][::-1]
    low_of_even = even.view(np.uint32)[LOW::2]
    mixed = np.empty_like(odd)
    source = odd
    for round_key in round_keys:
        np.bitwise_xor(source, round_key, mixed)
        np.multiply(even, multipliers, product)
        np.bitwise_xor(high, mixed, low_of_even)
        source = low
    return np.concatenate((low_of_even, low))


@lru_cache(maxsize=32)
def _gather_indices(blocks: int, batch: int, count: int) -> np.ndarray:
    """Return the indices of the `count` words of each position in the result of `_run_rounds`, batch × count. At most
    32 KB."""
    word0, word2, word1, word3 = np.arange(4 * blocks * batch).reshape(4, -1)
    in_order = np.stack([word0, word1, word2[::-1], word3[::-1]]).reshape(4, blocks, batch)
    return np.ascontiguousarray(in_order.transpose(2, 1, 0).reshape(batch, -1)[:, :count])


@lru_cache(maxsize=32)
def _state_templates(lane: int, blocks: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a state for `batch` positions in which all words except the positions are filled in. At most 25 KB."""
    even, odd = _allocate_state(blocks * batch)
    even[blocks * batch :] = lane
    odd[blocks * batch :] = np.repeat(np.arange(blocks), batch)[::-1]
    return even, odd


@lru_cache(maxsize=16)
def _round_constants(key: Key, n: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the multipliers and each round's key, all repeated for the 2 n words of a state. At most 100 KB."""
    multipliers = np.repeat(np.array(MULTIPLIERS, np.uint64), n)
    pairs = [[(word + r * increment) & LOW32 for word, increment in zip(key, WEYL, strict=True)] for r in range(ROUNDS)]
    return multipliers, [np.repeat(np.array(pair, np.uint32), n) for pair in pairs]
