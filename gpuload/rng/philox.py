"""Counter-based random numbers: Philox4x32-10, vectorised in numpy.

A draw is a pure function of (seed, epoch, position, lane): it is the same with any number of workers, ranks or samples
in a batch, and can be made without any other draw. Runs in the main process and in workers; holds no state but small
caches.

A 128-bit counter is made of four words: 0 and 1 are the low and high half of the sample's position, 2 is the *lane*
(which transform draws; `gpuload.rng.streams` is the register), 3 the block of four numbers within it.

Source of the generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import operator
import sys
from functools import lru_cache
from typing import Final, NamedTuple, SupportsIndex

import numpy as np

__all__ = ["Key", "epoch_key", "philox4x32", "uniforms", "words"]

ROUNDS: Final = 10
LOW32: Final = 0xFFFFFFFF
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # added to key words 0 and 1 from round to round
PIECE: Final = 1024  # counters worked on at once, so that a round stays in the processor's cache

# 0-d arrays: numpy takes half a microsecond longer over a scalar.
_MASK: Final = np.array(LOW32, np.uint64)
_SHIFT: Final = np.array(32, np.uint64)
_HALF: Final = np.array(0.5)
_UNIT: Final = np.array(2.0**-32)
# Where the low and the high half of a uint64 are when it is viewed as two uint32.
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


class Key(NamedTuple):
    """The two 32-bit words of a Philox key, as Python ints."""

    k0: int
    k1: int


@lru_cache(maxsize=64)  # used for every chunk and batch; it costs as much as the draws of a few samples
def epoch_key(seed: SupportsIndex, epoch: SupportsIndex) -> Key:
    """The key that everything random in one epoch depends on.

    It is a Philox output, with the seed as key and the epoch as counter, so neighbours have unrelated keys.

    Args:
        seed: 0 ≤ seed < 2**64.
        epoch: 0 ≤ epoch < 2**64.

    Raises:
        TypeError, ValueError: one of them is not an integer, negative or too large.

    Example:
        >>> epoch_key(0, 0)
        Key(k0=1713891541, k1=3781805453)
    """
    seed64, epoch64 = _uint64("seed", seed), _uint64("epoch", epoch)
    counter = np.array([epoch64 & LOW32, epoch64 >> 32, 0, 0], np.uint32)
    first, second = philox4x32(counter, Key(seed64 & LOW32, seed64 >> 32))[:2].tolist()
    return Key(first, second)


def philox4x32(counters: np.ndarray, key: Key) -> np.ndarray:
    """Philox4x32 with 10 rounds: four random words for each counter.

    Args:
        counters: uint32, of shape … × 4.
        key: the two key words.

    Returns:
        uint32, of the shape of `counters`.

    Raises:
        ValueError: the counters are not uint32 of shape … × 4.

    Example:
        >>> philox4x32(np.zeros((5, 4), np.uint32), Key(0, 0)).shape
        (5, 4)
    """
    counters = np.asarray(counters)
    if counters.dtype != np.uint32 or counters.ndim == 0 or counters.shape[-1] != 4:
        raise ValueError(
            f"philox4x32 takes counters as uint32 of shape … × 4, got {counters.dtype} of shape {counters.shape}"
        )
    flat = counters.reshape(-1, 4)
    out = np.empty_like(flat)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        n = len(piece)
        even, odd = _state(n)
        even[:n], odd[:n], even[n:], odd[n:] = piece[:, 0], piece[:, 1], piece[::-1, 2], piece[::-1, 3]
        out[start : start + n] = _rounds(even, odd, key).take(_gather(1, n, 4))
    return out.reshape(counters.shape)


def words(key: Key, positions: np.ndarray, lane: int, count: int) -> np.ndarray:
    """`count` random 32-bit words for each position.

    Args:
        key: of the epoch, from `epoch_key`.
        positions: int64, shape B; not negative.
        lane: which transform (or other user) draws, 0 ≤ lane < 2**32. Lanes are independent of each other.
        count: how many words per position. A larger count only appends: the first ones stay the same.

    Returns:
        uint32, B × count.

    Raises:
        ValueError: `positions` is not a one-dimensional array of integers, or `lane` or `count` is out of range.

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
    """`count` random numbers for each position, uniform in the open interval (0, 1).

    They are (word + ½) / 2**32, exact in float64: never 0 or 1, so logarithms and quotients of them are finite.
    (Rounded to float32 the largest ones would become 1.)

    Args and errors: as for `words`.

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
    """`words` for at most PIECE counters. For few counters the numpy calls are the cost, so there are few calls."""
    wide = positions.astype(np.uint64)
    even, odd = (template.copy() for template in _templates(lane, blocks, len(wide)))
    shape = (blocks, len(wide))
    half = len(odd) // 2
    even[:half].reshape(shape)[:] = wide & _MASK
    odd[:half].reshape(shape)[:] = wide >> _SHIFT
    return _rounds(even, odd, key).take(_gather(blocks, len(wide), count))


def _state(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory for n counters: their 2 n even and their 2 n odd words.

    A state is flat: word 0 of all counters, then word 2 of all in *reverse* order; words 1 and 3 likewise. So `[::-1]`
    exchanges the two halves, as each round does, and keeps each counter's words together. The even words are uint64
    whose high halves are zero, ready to be multiplied.
    """
    return np.zeros(2 * n, np.uint64), np.empty(2 * n, np.uint32)


def _rounds(even: np.ndarray, odd: np.ndarray, key: Key) -> np.ndarray:
    """The ten rounds, which overwrite the state; returns its even and then its odd words, uint32, 4 n.

    A round is three calls on views made once: with seven, on 2 × n arrays, 32 counters took twice as long.
    """
    multipliers, round_keys = _constants(key, len(odd) // 2)
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
def _gather(blocks: int, batch: int, count: int) -> np.ndarray:
    """Where `_rounds` puts the `count` words of each position, batch × count. At most 32 KB."""
    word0, word2, word1, word3 = np.arange(4 * blocks * batch).reshape(4, -1)
    in_order = np.stack([word0, word1, word2[::-1], word3[::-1]]).reshape(4, blocks, batch)
    return np.ascontiguousarray(in_order.transpose(2, 1, 0).reshape(batch, -1)[:, :count])


@lru_cache(maxsize=32)
def _templates(lane: int, blocks: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A state for `batch` positions with all but the positions filled in. At most 25 KB."""
    even, odd = _state(blocks * batch)
    even[blocks * batch :] = lane
    odd[blocks * batch :] = np.repeat(np.arange(blocks), batch)[::-1]
    return even, odd


@lru_cache(maxsize=16)
def _constants(key: Key, n: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The multipliers, and the key of each round, spread over the 2 n words of a state. At most 100 KB."""
    multipliers = np.repeat(np.array(MULTIPLIERS, np.uint64), n)
    pairs = [[(word + turn * step) & LOW32 for word, step in zip(key, WEYL, strict=True)] for turn in range(ROUNDS)]
    return multipliers, [np.repeat(np.array(pair, np.uint32), n) for pair in pairs]


def _uint64(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} must lie in 0 … 2**64 - 1, got {number}")
    return number
