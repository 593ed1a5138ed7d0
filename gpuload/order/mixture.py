"""The order of a `Mix`, which maps each position to a dataset and one of its samples.

The positions of all epochs, concatenated, form one *stream*, which is split into blocks of 1,024 positions. The number
of samples of each dataset before a block is computed in closed form, so each block has the exact shares, and fractions
of samples are carried over to the next blocks. Within a block the order of the datasets is shuffled; it depends on the
seed and the index of the block. The *ordinal* of a position is the number of samples of its dataset before it. It
follows from the position's block alone: nothing is counted from the beginning of the epoch.

A dataset of n samples passes through consecutive permutations: its sample with ordinal k is sample k mod n of
permutation k div n. A block shuffle uses the permutations of `gpuload.order.blocks`. This module runs in the
main process; orders are immutable.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from gpuload.order.blocks import BlockOrder, Blocks
from gpuload.order.permutation import LENGTH_MAX, TABLE_MAX, Shuffle, check_positions
from gpuload.rng import philox
from gpuload.rng.streams import MIXED_BLOCKS, MIXED_DATASETS, MIXED_PERMUTATIONS, ORDER

__all__ = ["BLOCK", "MixedOrder", "Mixture"]

BLOCK: Final = 1024  # positions in a block; another value would change the order for every seed
BLOCKS_AT_ONCE: Final = 64  # limits memory: with many ranks, the positions of one rank are spread over many blocks

_12, _20, _COLUMN = (np.array(value, np.uint64) for value in (12, 20, 2**12 - 1))  # a row has at most 4,096 columns


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes and weights of mixed datasets.

    Args:
        sizes: the number of samples of each dataset, at least 1.
        parts: the weights of the datasets as integers of at least 1, whose sum is below 2**32.
        length: the number of positions in an epoch.
        blocks: the blocks of each dataset, for a block shuffle; otherwise empty.

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
        """A name that identifies the mixture: equal names mean equal orders."""
        content = f"{self.sizes} {self.parts} {self.length} {[blocks.name for blocks in self.blocks]}"
        return f"mixed-{zlib.crc32(content.encode()):08x}"

    def counts_before(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of samples of each dataset in the stream before these positions, int64 (N, datasets).

        The first dataset gets its share of all positions, rounded down; the next gets its share of the remaining
        positions, and so on; the last gets the remaining positions. So counts never decrease from one position to the
        next, and their sum is the position. (Rounding each share independently would guarantee neither.)
        """
        counts = np.empty((len(positions), len(self.parts)), np.int64)
        remaining, remaining_parts = positions.astype(np.int64), sum(self.parts)
        for i, part in enumerate(self.parts):
            quotient, remainder = np.divmod(remaining, remaining_parts)
            counts[:, i] = quotient * part + remainder * part // remaining_parts
            remaining = remaining - counts[:, i]
            remaining_parts -= part
        return counts


class MixedOrder:
    """The order of an epoch of a mixture. Indices refer to the concatenated datasets.

    Args:
        mixture: the mixed datasets.
        seed: the seed of the order.
        epoch: the number of the epoch.
        shuffle: whether each pass through a dataset has a new random order; otherwise, each pass has the dataset's
            order.
        repeats: as in `Shares`; it divides the number of stream positions in an epoch.

    Raises:
        ValueError: the epoch extends beyond the largest possible position.

    Example:
        >>> order = MixedOrder(Mixture((4, 2), (2, 1), length=6), seed=0, epoch=0)
        >>> order(np.arange(6))
        array([0, 3, 5, 2, 4, 5])
    """

    def __init__(self, mixture: Mixture, seed: int, epoch: int, *, shuffle: bool = True, repeats: int = 1) -> None:
        self.n = mixture.length
        self._mixture, self._shuffle = mixture, shuffle
        self._key = philox.epoch_key(seed, 0)  # the same for all epochs, which form one stream
        self._stream_start = epoch * -(-mixture.length // repeats)
        if self._stream_start + mixture.length + BLOCK > LENGTH_MAX:
            raise ValueError(
                f"epoch {epoch} of a Mix of {mixture.length:,} positions extends beyond position 2**62, the last "
                "position of a Mix; use smaller epoch numbers, starting at 0"
            )
        self._first_indices = np.cumsum(mixture.sizes) - mixture.sizes

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the int64 indices at integer `positions` of any shape; raise an IndexError if one is out of range."""
        positions = check_positions(positions, self.n)
        blocks, offsets = np.divmod(positions.reshape(-1) + self._stream_start, BLOCK)
        unique_blocks, block_indices = np.unique(blocks, return_inverse=True)
        indices = np.empty_like(blocks)
        for start in range(0, len(unique_blocks), BLOCKS_AT_ONCE):
            chunk_rows = np.flatnonzero((block_indices >= start) & (block_indices < start + BLOCKS_AT_ONCE))
            datasets, ordinals = self._datasets_and_ordinals(unique_blocks[start : start + BLOCKS_AT_ONCE])
            cells = block_indices[chunk_rows] - start, offsets[chunk_rows]
            indices[chunk_rows] = self._indices(datasets[cells], ordinals[cells])
        return indices.reshape(positions.shape)

    def _datasets_and_ordinals(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of the dataset and the ordinal at each position of the blocks, both (blocks, BLOCK)."""
        shape = len(blocks), BLOCK
        limits = self._mixture.counts_before(np.append(blocks, blocks + 1) * BLOCK)
        previous_counts, counts = limits[: len(blocks)], np.diff(limits.reshape(2, len(blocks), -1), axis=0)[0]
        dataset_indices = np.arange(counts.shape[1])
        sorted_datasets = np.repeat(np.tile(dataset_indices, len(blocks)), counts.reshape(-1)).reshape(shape)
        positions = blocks[:, None] * BLOCK + np.arange(BLOCK)
        datasets = np.take_along_axis(sorted_datasets, _random_permutations(self._key, positions, MIXED_BLOCKS), axis=1)
        # Sorted by dataset and then by position, the ordinals of a dataset are consecutive.
        first_ordinals = previous_counts - (np.cumsum(counts, axis=1) - counts)
        sorted_ordinals = np.repeat(first_ordinals.reshape(-1), counts.reshape(-1)).reshape(shape) + np.arange(BLOCK)
        ordinals = np.empty(shape, np.int64)
        np.put_along_axis(ordinals, _sorted_columns(datasets.astype(np.uint64)), sorted_ordinals, axis=1)
        return datasets, ordinals

    def _indices(self, datasets: np.ndarray, ordinals: np.ndarray) -> np.ndarray:
        """Return the indices of the samples with these ordinals in these datasets."""
        indices = np.empty_like(ordinals)
        for dataset in np.unique(datasets).tolist():
            rows = np.flatnonzero(datasets == dataset)
            permutations, offsets = np.divmod(ordinals[rows], self._mixture.sizes[dataset])
            samples = self._samples_in_permutations(dataset, permutations, offsets) if self._shuffle else offsets
            indices[rows] = self._first_indices[dataset] + samples
        return indices

    def _samples_in_permutations(self, dataset: int, permutations: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the samples of a dataset at these positions of these permutations."""
        size, key = self._mixture.sizes[dataset], self._keys[dataset]
        blocks = self._mixture.blocks[dataset] if self._mixture.blocks else None
        unique_ids, rows = np.unique(permutations, return_inverse=True)
        if size <= TABLE_MAX and blocks is None:
            # Compute all tables together: there can be many, and a separate `Shuffle` for each takes 0.1 ms.
            return _random_permutations(key, unique_ids[:, None] * size + np.arange(size), ORDER)[rows, positions]
        samples = np.empty_like(positions)
        for row, words in enumerate(philox.words(key, unique_ids, MIXED_PERMUTATIONS, 2).tolist()):
            is_in_permutation, permutation_key = rows == row, philox.Key(*words)
            permutation = Shuffle(size, permutation_key) if blocks is None else BlockOrder(blocks, permutation_key)
            samples[is_in_permutation] = permutation(positions[is_in_permutation])
        return samples

    @cached_property
    def _keys(self) -> list[philox.Key]:
        """The keys of the datasets, which give different permutations to datasets of the same size."""
        count = len(self._mixture.sizes)
        return [philox.Key(*words) for words in philox.words(self._key, np.arange(count), MIXED_DATASETS, 2).tolist()]


def _random_permutations(key: philox.Key, positions: np.ndarray, lane: int) -> np.ndarray:
    """Return a random permutation for each row of positions, drawn from a 52-bit number for each position."""
    words = philox.words(key, positions.reshape(-1), lane, 2).astype(np.uint64)
    return _sorted_columns((words[:, 0] << _20 | words[:, 1] >> _12).reshape(positions.shape))


def _sorted_columns(keys: np.ndarray) -> np.ndarray:
    """Return the columns of each row, stably sorted by its keys, which have at most 52 bits.

    Each key is combined with its column into one number, since numpy's sort is five times as fast as its argsort, and
    the result is the same on all processors.
    """
    columns = np.arange(keys.shape[1], dtype=np.uint64)
    return (np.sort(keys << _12 | columns, axis=1) & _COLUMN).astype(np.int64)
