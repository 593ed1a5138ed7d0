"""The order of an epoch, which maps positions to dataset indices.

An order is a bijection of 0 … n-1 that can be computed for any positions independently, in memory that does not grow
with the dataset (for up to 4,096 samples it is a table). So starting an epoch of a billion samples costs nothing, and
resuming only means setting an integer. This module runs in the main process; orders are immutable.

`Shuffle` is a Feistel network on the smallest grid of 2**k × m values that contains 0 … n-1, with cycle walking:
results outside 0 … n-1 pass through the network again. (Black, Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002.)
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, SupportsIndex

import numpy as np

from gpuload.checks import integer
from gpuload.rng import philox
from gpuload.rng.streams import ORDER, SAMPLE_POSITIONS

__all__ = ["Sequential", "Shuffle", "Weighted", "check_positions", "cumulate"]

# Up to this size, an order is a table, because a Feistel network on few values is measurably not uniform.
TABLE_MAX: Final = 4096
LENGTH_MAX: Final = SAMPLE_POSITIONS.stop

# Measured by the differences between adjacent positions, over 10 million samples, at n = 4,097 and 5,000: 4 rounds are
# 275 standard deviations from uniform, 5 rounds are 8, and 6 or more rounds are as uniform as numpy's permutations. Two
# more rounds are a safety margin.
ROUNDS: Final = 8
PIECE: Final = 16384  # positions to compute at a time; 4,096 and 65,536 took 1.5 times as long

_FIRST_MULTIPLIER: Final = np.array(0x9E3779B97F4A7C15, np.uint64)  # odd, with bits set in both halves
_SECOND_MULTIPLIER: Final = np.array(0xD6E8FEB86659FD93, np.uint64)
_32: Final = np.array(32, np.uint64)


class Sequential:
    """The sequential order, which maps position i to index i.

    Args:
        n: the number of samples, 0 ≤ n ≤ 2**62.

    Example:
        >>> Sequential(10)(np.array([7, 0]))
        array([7, 0])
    """

    def __init__(self, n: SupportsIndex) -> None:
        self.n = integer("the number of samples", n, minimum=0, maximum=LENGTH_MAX)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the int64 indices at `positions`; raise an IndexError if a position is out of range."""
        return check_positions(positions, self.n).copy()


class Shuffle:
    """A random order of n samples, drawn from a key.

    Call it with large blocks of positions: 65,536 positions cost about 0.07 µs each, 16 positions about 8 µs each.

    Args:
        n: the number of samples, 0 ≤ n ≤ 2**62.
        key: the key of the epoch, from `gpuload.rng.philox.epoch_key`; each key gives a different order.

    Example:
        >>> shuffle = Shuffle(10**12, philox.epoch_key(seed=0, epoch=3))
        >>> shuffle(np.array([0, 1, 999_999_999_999]))
        array([867504586107, 604284898273, 439095644511])
    """

    def __init__(self, n: SupportsIndex, key: philox.Key) -> None:
        self.n = integer("the number of samples", n, minimum=0, maximum=LENGTH_MAX)
        self.key = key
        # The domain is rows × 2**column_bits: at most 1/64 larger than n, and for large n hardly larger.
        self._column_bits = max(1, (max(1, self.n) - 1).bit_length() // 2)
        self._rows = -(-self.n >> self._column_bits)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the int64 indices at integer `positions` of any shape; raise an IndexError if one is out of range."""
        positions = check_positions(positions, self.n)
        return self._table[positions] if self.n <= TABLE_MAX else self._walk_cycles(positions)

    @cached_property
    def _table(self) -> np.ndarray:
        words = philox.words(self.key, np.arange(self.n), ORDER, 2).astype(np.uint64)
        return np.argsort(words[:, 0] << _32 | words[:, 1], kind="stable")

    @cached_property
    def _round_keys(self) -> list[np.ndarray]:
        words = philox.words(self.key, np.arange(ROUNDS), ORDER, 2).astype(np.uint64)
        return [np.array(word) for word in words[:, 0] << _32 | words[:, 1]]

    def _walk_cycles(self, positions: np.ndarray) -> np.ndarray:
        flat = positions.reshape(-1).astype(np.uint64)
        for start in range(0, len(flat), PIECE):
            piece = slice(start, start + PIECE)
            flat[piece] = self._permute(flat[piece])
        outside_rows = np.flatnonzero(flat >= self.n)
        while len(outside_rows):
            flat[outside_rows] = values = self._permute(flat[outside_rows])
            outside_rows = outside_rows[values >= self.n]
        return flat.astype(np.int64).reshape(positions.shape)

    def _permute(self, positions: np.ndarray) -> np.ndarray:
        """Apply the network, a bijection of 0 … rows × 2**column_bits - 1, once. Its rounds work in place, since
        allocating memory is slow."""
        bits, rows = np.array(self._column_bits, np.uint64), np.array(self._rows, np.uint64)
        column_shift = np.array(64 - self._column_bits, np.uint64)
        row, column = positions >> bits, positions & ((np.uint64(1) << bits) - np.uint64(1))
        mixed, scratch = np.empty_like(row), np.empty_like(row)
        for round_index in range(ROUNDS):
            # Hash one coordinate so that the high bits are well mixed: multiply, add the key, fold, multiply.
            np.multiply(column if round_index % 2 else row, _FIRST_MULTIPLIER, mixed)
            np.add(mixed, self._round_keys[round_index], mixed)
            np.right_shift(mixed, _32, scratch)
            np.bitwise_xor(mixed, scratch, mixed)
            np.multiply(mixed, _SECOND_MULTIPLIER, mixed)
            if round_index % 2 == 0:
                np.right_shift(mixed, column_shift, mixed)
                np.bitwise_xor(column, mixed, column)
                continue
            # The hash's high word times rows / 2**32 is a step smaller than `rows`. Add the step modulo `rows`: the
            # result is the smaller of the sum and the sum - `rows` (a negative difference wraps around to near 2**64).
            np.right_shift(mixed, _32, mixed)
            np.multiply(mixed, rows, mixed)
            np.right_shift(mixed, _32, mixed)
            np.add(row, mixed, row)
            np.subtract(row, rows, mixed)
            np.minimum(row, mixed, out=row)
        return row << bits | column


class Weighted:
    """An order that draws the sample for each position independently, with replacement. The probability of sample i is
    weights[i] / sum(weights).

    Args:
        cumulative: float64 (n,), the cumulative weights, from `cumulate`; referenced, not copied.
        key: the key of the epoch, from `gpuload.rng.philox.epoch_key`.

    Example:
        >>> Weighted(cumulate([0.0, 1.0, 0.0], 3), philox.epoch_key(seed=0, epoch=0))(np.arange(4))
        array([1, 1, 1, 1])
    """

    def __init__(self, cumulative: np.ndarray, key: philox.Key) -> None:
        self.n = len(cumulative)
        self.key = key
        self._cumulative = cumulative

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the int64 indices at `positions`, which can exceed the number of samples."""
        positions = check_positions(positions, LENGTH_MAX)
        words = philox.words(self.key, positions.reshape(-1), ORDER, 2).astype(np.uint64)
        # 53 random bits, as a float in [0, 1), so that samples of weight 0 are never drawn.
        random_bits = (words[:, 0] << _32 | words[:, 1]) >> np.array(11, np.uint64)
        random_sums = random_bits.astype(np.float64) * 2.0**-53 * self._cumulative[-1]
        indices = np.searchsorted(self._cumulative, random_sums, side="right")
        return np.minimum(indices, self._last_sample).reshape(positions.shape)

    @cached_property
    def _last_sample(self) -> int:
        """The last sample with a positive weight. Indices are limited to it, because rounding could exceed it."""
        return int(np.searchsorted(self._cumulative, self._cumulative[-1], side="left"))


def cumulate(weights: object, n: int) -> np.ndarray:
    """Check weights and return their cumulative sums, for `Weighted`.

    Raises:
        TypeError, ValueError: the weights are not `n` finite numbers ≥ 0 with a positive sum.
    """
    try:
        weight_array = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be numbers, one per sample, got {type(weights).__name__}") from None
    if weight_array.shape != (n,):
        raise ValueError(f"weights must have one value for each of the {n} samples, got shape {weight_array.shape}")
    invalid = np.flatnonzero(~(weight_array >= 0) | np.isinf(weight_array))
    if len(invalid):
        raise ValueError(
            f"weights must be finite and at least 0, but {len(invalid)} are not; the first is weights[{invalid[0]}] = "
            f"{weight_array[invalid[0]]}"
        )
    sums = np.cumsum(weight_array)
    if n and not 0 < sums[-1] < np.inf:
        raise ValueError(f"the sum of weights must be finite and greater than 0, got {sums[-1]}")
    return sums


def check_positions(positions: np.ndarray, n: int) -> np.ndarray:
    """Return `positions` as int64; raise an IndexError unless all are in 0 … n-1, or a TypeError unless they are
    integers."""
    positions = np.asarray(positions)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got an array of {positions.dtype}")
    if positions.size:
        for extreme in (positions.min(), positions.max()):
            if not 0 <= extreme < n:
                valid = f"positions 0 … {n - 1}" if n else "no positions"
                raise IndexError(f"position {extreme} is out of range: an order of {n} samples has {valid}")
    return positions.astype(np.int64, copy=False)
