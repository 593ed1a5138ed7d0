"""The order of an epoch: which dataset index is at which position.

An order is a bijection of 0 … n-1 that is computed for any positions without the others, in memory that does not grow
with the dataset (up to 4,096 samples it is a table). So an epoch of a billion samples costs nothing to begin, and
resuming means setting an integer. Main process; an order is immutable.

`Shuffle` is a Feistel network on the smallest grid of 2**k × m that holds n, with cycle walking: results outside
0 … n-1 go through again. (Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.)
"""

from __future__ import annotations

import operator
from functools import cached_property
from typing import Final, SupportsIndex

import numpy as np

from gpuload.rng import philox
from gpuload.rng.streams import ORDER, SAMPLE_POSITIONS

__all__ = ["Sequential", "Shuffle", "Weighted", "checked_positions", "cumulate"]

TABLE_MAX: Final = 4096  # up to here a table: a Feistel network on so few values is measurably not uniform
LENGTH_MAX: Final = SAMPLE_POSITIONS.stop

# Differences between adjacent positions, over 10 million samples, at n = 4,097 and 5,000: 4 rounds are 275 standard
# deviations from uniform, 5 are 8, 6 and more are no different from numpy's permutations. Two more are a margin.
ROUNDS: Final = 8
PIECE: Final = 16384  # positions worked on at once; 4,096 and 65,536 were slower by half

_FIRST: Final = np.array(0x9E3779B97F4A7C15, np.uint64)  # odd, with bits set in both halves
_SECOND: Final = np.array(0xD6E8FEB86659FD93, np.uint64)
_32: Final = np.array(32, np.uint64)


class Sequential:
    """The identity: position i is index i.

    Args:
        n: how many samples, 0 ≤ n ≤ 2**62.

    Example:
        >>> Sequential(10)(np.array([7, 0]))
        array([7, 0])
    """

    def __init__(self, n: SupportsIndex) -> None:
        self.n = _length(n)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The indices, int64, at `positions`; IndexError if one is out of range."""
        return checked_positions(positions, self.n).copy()


class Shuffle:
    """A random order of n samples, drawn from a key.

    Evaluate it in large blocks: 65,536 positions cost about 0.07 µs each, 16 positions about 8 µs each.

    Args:
        n: how many samples, 0 ≤ n ≤ 2**62.
        key: of the epoch, from `gpuload.rng.philox.epoch_key`; another key gives another order.

    Example:
        >>> shuffle = Shuffle(10**12, philox.epoch_key(seed=0, epoch=3))
        >>> shuffle(np.array([0, 1, 999_999_999_999]))
        array([867504586107, 604284898273, 439095644511])
    """

    def __init__(self, n: SupportsIndex, key: philox.Key) -> None:
        self.n = _length(n)
        self.key = key
        # The domain is rows × 2**column_bits: up to 1/64 more than n, and for large n hardly more.
        self._column_bits = max(1, (max(1, self.n) - 1).bit_length() // 2)
        self._rows = -(-self.n >> self._column_bits)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The indices, int64, at `positions`, integers of any shape; IndexError if one is out of range."""
        positions = checked_positions(positions, self.n)
        return self._table[positions] if self.n <= TABLE_MAX else self._walk(positions)

    @cached_property
    def _table(self) -> np.ndarray:
        drawn = philox.words(self.key, np.arange(self.n), ORDER, 2).astype(np.uint64)
        return np.argsort(drawn[:, 0] << _32 | drawn[:, 1], kind="stable")

    @cached_property
    def _round_keys(self) -> list[np.ndarray]:
        drawn = philox.words(self.key, np.arange(ROUNDS), ORDER, 2).astype(np.uint64)
        return [np.array(word) for word in drawn[:, 0] << _32 | drawn[:, 1]]

    def _walk(self, positions: np.ndarray) -> np.ndarray:
        flat = positions.reshape(-1).astype(np.uint64)
        for start in range(0, len(flat), PIECE):
            piece = slice(start, start + PIECE)
            flat[piece] = self._permute(flat[piece])
        outside = np.flatnonzero(flat >= self.n)
        while len(outside):
            flat[outside] = again = self._permute(flat[outside])
            outside = outside[again >= self.n]
        return flat.astype(np.int64).reshape(positions.shape)

    def _permute(self, positions: np.ndarray) -> np.ndarray:
        """Once through the network, a bijection of 0 … rows × 2**column_bits - 1. In place: fresh memory is slow."""
        bits, rows = np.array(self._column_bits, np.uint64), np.array(self._rows, np.uint64)
        to_column = np.array(64 - self._column_bits, np.uint64)
        row, column = positions >> bits, positions & ((np.uint64(1) << bits) - np.uint64(1))
        mixed, scratch = np.empty_like(row), np.empty_like(row)
        for turn in range(ROUNDS):
            # A hash of one coordinate, good in its high bits: multiply, add the key, fold, multiply.
            np.multiply(column if turn % 2 else row, _FIRST, mixed)
            np.add(mixed, self._round_keys[turn], mixed)
            np.right_shift(mixed, _32, scratch)
            np.bitwise_xor(mixed, scratch, mixed)
            np.multiply(mixed, _SECOND, mixed)
            if turn % 2 == 0:
                np.right_shift(mixed, to_column, mixed)
                np.bitwise_xor(column, mixed, column)
                continue
            # Its high word times rows / 2**32 is a step of less than `rows`, added modulo `rows`: with or without
            # `rows` subtracted, whichever is smaller (a negative one has wrapped around to near 2**64).
            np.right_shift(mixed, _32, mixed)
            np.multiply(mixed, rows, mixed)
            np.right_shift(mixed, _32, mixed)
            np.add(row, mixed, row)
            np.subtract(row, rows, mixed)
            np.minimum(row, mixed, out=row)
        return row << bits | column


class Weighted:
    """Samples drawn with replacement, independently for each position: sample i with probability weights[i] / sum.

    Args:
        cumulative: float64 (n,), the cumulative weights, from `cumulate`; kept, not copied.
        key: of the epoch, from `gpuload.rng.philox.epoch_key`.

    Example:
        >>> Weighted(cumulate([0.0, 1.0, 0.0], 3), philox.epoch_key(seed=0, epoch=0))(np.arange(4))
        array([1, 1, 1, 1])
    """

    def __init__(self, cumulative: np.ndarray, key: philox.Key) -> None:
        self.n = len(cumulative)
        self.key = key
        self._cumulative = cumulative

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The indices, int64, at `positions`, which have no end."""
        positions = checked_positions(positions, LENGTH_MAX)
        drawn = philox.words(self.key, positions.reshape(-1), ORDER, 2).astype(np.uint64)
        # 53 random bits, as a float in [0, 1); a draw never lands on a sample of weight 0.
        numbers = (drawn[:, 0] << _32 | drawn[:, 1]) >> np.array(11, np.uint64)
        sums = numbers.astype(np.float64) * 2.0**-53 * self._cumulative[-1]
        indices = np.searchsorted(self._cumulative, sums, side="right")
        return np.minimum(indices, self._last).reshape(positions.shape)

    @cached_property
    def _last(self) -> int:
        """The last sample with a weight above 0: rounding may lead beyond it."""
        return int(np.searchsorted(self._cumulative, self._cumulative[-1], side="left"))


def cumulate(weights: object, n: int) -> np.ndarray:
    """Weights, checked and cumulated, for `Weighted`.

    Raises:
        TypeError, ValueError: they are not `n` finite numbers of at least 0 with a positive sum.
    """
    try:
        numbers = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be numbers, one for each sample, got {type(weights).__name__}") from None
    if numbers.shape != (n,):
        raise ValueError(f"weights must be one number for each of the {n} samples, got shape {numbers.shape}")
    wrong = np.flatnonzero(~(numbers >= 0) | np.isinf(numbers))
    if len(wrong):
        raise ValueError(
            f"weights must be finite and at least 0, but {len(wrong)} are not, the first of them weights[{wrong[0]}] = "
            f"{numbers[wrong[0]]}"
        )
    total = np.cumsum(numbers)
    if n and not 0 < total[-1] < np.inf:
        raise ValueError(f"weights must have a sum that is finite and greater than 0, got {total[-1]}")
    return total


def _length(n: SupportsIndex) -> int:
    try:
        length = operator.index(n)
    except TypeError:
        raise TypeError(f"the number of samples must be an integer, got {n!r} ({type(n).__name__})") from None
    if not 0 <= length <= LENGTH_MAX:
        raise ValueError(f"the number of samples must lie in 0 … 2**62, got {length}")
    return length


def checked_positions(positions: np.ndarray, n: int) -> np.ndarray:
    """`positions` as int64, all of them in 0 … n-1."""
    positions = np.asarray(positions)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"position must be given as integers, got an array of {positions.dtype}")
    if positions.size:
        for extreme in (positions.min(), positions.max()):
            if not 0 <= extreme < n:
                have = f"0 … {n - 1}" if n else "none, since there are no samples"
                raise IndexError(f"position {extreme} is out of range: an order of {n} samples has {have}")
    return positions.astype(np.int64, copy=False)
