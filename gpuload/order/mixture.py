"""The order of a `Mix`: which data set is at which position, and which of its samples.

The positions of all epochs, one epoch after the other, are one *stream*. It is cut into blocks of 1,024 positions. How
many samples of each data set come before a block is computed in closed form, so each block holds the exact shares, and
what is left of a sample is carried on to the next blocks. Within a block the data sets are shuffled by the seed and the
block's number. So how many samples of its data set come before a position, its *ordinal*, follows from its block alone:
nothing is counted from the beginning of the epoch.

A data set of n samples goes through one permutation after the other: its sample of ordinal k is number k mod n of
permutation k div n; with a block shuffle that is one of `gpuload.order.blocks`. Main process; an order is immutable.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from gpuload.order.blocks import BlockOrder, Blocks
from gpuload.order.permutation import LENGTH_MAX, TABLE_MAX, Shuffle, checked_positions
from gpuload.rng import philox
from gpuload.rng.streams import MIXED_BLOCKS, MIXED_DATASETS, MIXED_PERMUTATIONS, ORDER

__all__ = ["BLOCK", "MixedOrder", "Mixture"]

BLOCK: Final = 1024  # positions; part of what a seed means
BLOCKS_AT_ONCE: Final = 64  # so memory does not grow with the number of ranks, whose positions are in far more blocks

_12, _20, _COLUMN = (np.array(value, np.uint64) for value in (12, 20, 2**12 - 1))  # a row has at most 4,096 columns


@dataclass(frozen=True, slots=True)
class Mixture:
    """How several data sets are mixed.

    Args:
        sizes: how many samples each data set has, at least 1.
        parts: the weights as integers, at least 1, whose sum is below 2**32.
        length: how many positions an epoch has.
        blocks: those of each data set, for a block shuffle; empty for none.

    Example:
        >>> mixture = Mixture((1000, 50), (7, 3), length=1050)
        >>> mixture.counts_before(np.array([0, 10, 1024, 2048]))
        array([[   0,    0],
               [   7,    3],
               [ 716,  308],
               [1433,  615]])
    """

    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    length: int
    blocks: tuple[Blocks, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Name the mixture: the same text means the same order."""
        content = f"{self.sizes} {self.parts} {self.length} {[blocks.name for blocks in self.blocks]}"
        return f"mixed-{zlib.crc32(content.encode()):08x}"

    def counts_before(self, positions: np.ndarray) -> np.ndarray:
        """Return how many samples of each data set the stream has before these positions, int64 (N, data sets).

        The first data set takes its share of all positions, rounded down, the next one its share of what is left, and
        so on; the last one takes what is left then. So counts never fall, and their sum is the position. (Rounding the
        share of each data set by itself gives neither.)
        """
        counts = np.empty((len(positions), len(self.parts)), np.int64)
        left, parts_left = positions.astype(np.int64), sum(self.parts)
        for number, part in enumerate(self.parts):
            wholes, remainder = np.divmod(left, parts_left)
            counts[:, number] = wholes * part + remainder * part // parts_left
            left = left - counts[:, number]
            parts_left -= part
        return counts


class MixedOrder:
    """The order of an epoch of a mixture. Indices are those of the data sets one after the other.

    Args:
        mixture: of which data sets.
        seed: of the order.
        epoch: its number.
        shuffle: go through each data set in a new random order each time; False: in its own order.
        repeats: as in `Shares`: an epoch has as many times fewer positions in the stream.

    Raises:
        ValueError: the epoch begins beyond the last position that can be counted.

    Example:
        >>> order = MixedOrder(Mixture((4, 2), (2, 1), length=6), seed=0, epoch=0)
        >>> order(np.arange(6))
        array([0, 3, 5, 2, 4, 5])
    """

    def __init__(self, mixture: Mixture, seed: int, epoch: int, *, shuffle: bool = True, repeats: int = 1) -> None:
        self.n = mixture.length
        self._mixture, self._shuffle = mixture, shuffle
        self._key = philox.epoch_key(seed, 0)  # of all epochs, which are one stream
        self._begin = epoch * -(-mixture.length // repeats)
        if self._begin + mixture.length + BLOCK > LENGTH_MAX:
            raise ValueError(
                f"epoch {epoch} of a Mix of {mixture.length:,} positions begins beyond position 2**62, the last one "
                "that a Mix has; count epochs from 0"
            )
        self._firsts = np.cumsum(mixture.sizes) - mixture.sizes

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices, int64, at `positions`, integers of any shape; IndexError if one is out of range."""
        positions = checked_positions(positions, self.n)
        blocks, offsets = np.divmod(positions.reshape(-1) + self._begin, BLOCK)
        numbers, rows = np.unique(blocks, return_inverse=True)
        indices = np.empty_like(blocks)
        for start in range(0, len(numbers), BLOCKS_AT_ONCE):
            inside = np.flatnonzero((rows >= start) & (rows < start + BLOCKS_AT_ONCE))
            datasets, ordinals = self._ordinals(numbers[start : start + BLOCKS_AT_ONCE])
            places = rows[inside] - start, offsets[inside]
            indices[inside] = self._indices(datasets[places], ordinals[places])
        return indices.reshape(positions.shape)

    def _ordinals(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the data set, and the ordinal, at each position of blocks: (blocks, BLOCK) each."""
        shape = len(blocks), BLOCK
        befores = self._mixture.counts_before(np.append(blocks, blocks + 1) * BLOCK)
        before, counts = befores[: len(blocks)], np.diff(befores.reshape(2, len(blocks), -1), axis=0)[0]
        numbers = np.arange(counts.shape[1])
        in_turn = np.repeat(np.tile(numbers, len(blocks)), counts.reshape(-1)).reshape(shape)
        positions = blocks[:, None] * BLOCK + np.arange(BLOCK)
        datasets = np.take_along_axis(in_turn, _drawn_order(self._key, positions, MIXED_BLOCKS), axis=1)
        # Sorted by data set, and by position within each, the ordinals of a data set are consecutive.
        first_in_turn = before - (np.cumsum(counts, axis=1) - counts)
        in_turn_ordinals = np.repeat(first_in_turn.reshape(-1), counts.reshape(-1)).reshape(shape) + np.arange(BLOCK)
        ordinals = np.empty(shape, np.int64)
        np.put_along_axis(ordinals, _sorted_columns(datasets.astype(np.uint64)), in_turn_ordinals, axis=1)
        return datasets, ordinals

    def _indices(self, datasets: np.ndarray, ordinals: np.ndarray) -> np.ndarray:
        """Return the indices of the samples that have these ordinals in these data sets."""
        indices = np.empty_like(ordinals)
        for number in np.unique(datasets).tolist():
            rows = np.flatnonzero(datasets == number)
            permutations, places = np.divmod(ordinals[rows], self._mixture.sizes[number])
            samples = self._permuted(number, permutations, places) if self._shuffle else places
            indices[rows] = self._firsts[number] + samples
        return indices

    def _permuted(self, number: int, permutations: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return which samples of a data set are at places of its permutations."""
        size, key = self._mixture.sizes[number], self._keys[number]
        blocks = self._mixture.blocks[number] if self._mixture.blocks else None
        numbers, which = np.unique(permutations, return_inverse=True)
        if size <= TABLE_MAX and blocks is None:
            # All tables at once: a `Shuffle` for each costs 0.1 ms, and there may be many.
            return _drawn_order(key, numbers[:, None] * size + np.arange(size), ORDER)[which, places]
        samples = np.empty_like(places)
        for row, words in enumerate(philox.words(key, numbers, MIXED_PERMUTATIONS, 2).tolist()):
            inside, permutation_key = which == row, philox.Key(*words)
            permutation = Shuffle(size, permutation_key) if blocks is None else BlockOrder(blocks, permutation_key)
            samples[inside] = permutation(places[inside])
        return samples

    @cached_property
    def _keys(self) -> list[philox.Key]:
        """Draw a key for each data set, so that two of the same size have different permutations."""
        count = len(self._mixture.sizes)
        return [philox.Key(*words) for words in philox.words(self._key, np.arange(count), MIXED_DATASETS, 2).tolist()]


def _drawn_order(key: philox.Key, positions: np.ndarray, lane: int) -> np.ndarray:
    """Draw a random permutation for each row of positions, by a number of 52 bits for each position."""
    drawn = philox.words(key, positions.reshape(-1), lane, 2).astype(np.uint64)
    return _sorted_columns((drawn[:, 0] << _20 | drawn[:, 1] >> _12).reshape(positions.shape))


def _sorted_columns(keys: np.ndarray) -> np.ndarray:
    """Return the columns of each row in the order of its keys, of at most 52 bits; equal keys stay in their order.

    They are sorted together with their columns as one number: numpy sorts numbers five times as fast as it finds in
    which order they are, and the result is the same on all processors.
    """
    columns = np.arange(keys.shape[1], dtype=np.uint64)
    return (np.sort(keys << _12 | columns, axis=1) & _COLUMN).astype(np.int64)
