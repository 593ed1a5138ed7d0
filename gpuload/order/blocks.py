"""The order of ``shuffle="block"``: shuffled blocks of neighbours, with samples shuffled within a window of blocks.

Use it for storage where reading neighbours together is much cheaper than reading single samples. Like the full shuffle
it is a bijection of 0 … n-1 that can be computed for any positions independently. Blocks of equal length use no memory;
a dataset's `natural_blocks` use 8 bytes each. This module runs in the main process;
orders are immutable.

An epoch proceeds window by window. A window is `BlockShuffle.window` consecutive blocks in the shuffled order of all
blocks; the samples of each window are shuffled separately.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from gpuload.checks import argument, check_fields, integer
from gpuload.datasets.kinds import natural_blocks
from gpuload.order.permutation import TABLE_MAX, Shuffle, check_positions
from gpuload.rng import philox
from gpuload.rng.streams import SHORT_BLOCK, WINDOWS, WITHIN_WINDOWS

__all__ = ["BlockOrder", "BlockShuffle", "Blocks"]

_32: Final = np.array(32, np.uint64)


@dataclass(frozen=True, slots=True)
class BlockShuffle:
    """A shuffle that reads neighbours at about the same time, for ``Loader(…, shuffle=BlockShuffle(…))``.

    Blocks of `block` neighbouring samples come in shuffled order, and samples are shuffled within each window of
    `window` blocks. So only ``block × window`` samples are in use at any time, and a window is finished before the next
    window begins. ``shuffle="block"`` is the same as ``BlockShuffle()``.

    Args:
        block: the number of neighbours in a block. A dataset that reads several samples in one operation, such as
            `Parquet` with row groups and `HDF5` with chunks, can define its blocks with ``blocks()``. Such blocks are
            never split, and short blocks are joined until they have about this number of samples.
        window: the number of blocks whose samples are shuffled together.

    Example:
        >>> BlockShuffle(window=64)
        BlockShuffle(block=64, window=64)
    """

    block: int = argument(integer, default=64, minimum=1)
    window: int = argument(integer, default=256, minimum=1)

    def __post_init__(self) -> None:
        check_fields(self, "BlockShuffle")


class Blocks:
    """The blocks of a dataset.

    Args:
        n: the number of samples.
        options: the lengths of blocks and windows.
        bounds: int64, the starts of the dataset's natural blocks, followed by n; None if it has no natural blocks.

    Attributes:
        length: the number of samples in a block; natural blocks are joined until they have about this number.
        count, window: the number of blocks, and of blocks in a window.
    """

    def __init__(self, n: int, options: BlockShuffle, bounds: np.ndarray | None = None) -> None:
        self.n, self.length = n, min(options.block, max(1, n))
        self.bounds = None if bounds is None else _join_blocks(bounds, self.length)
        self.count = -(-n // self.length) if self.bounds is None else len(self.bounds) - 1
        self.window = min(options.window, max(1, self.count))

    @classmethod
    def from_dataset(cls, dataset: Any, options: BlockShuffle) -> Blocks:
        """Return a map dataset's blocks; ValueError or TypeError if its ``blocks()`` does not return boundaries."""
        return cls(len(dataset), options, natural_blocks(dataset))

    @property
    def name(self) -> str:
        """A name that identifies the blocks: equal names and numbers of samples mean equal blocks and windows."""
        natural = "" if self.bounds is None else f"-{zlib.crc32(self.bounds.tobytes()):08x}"
        return f"blocks-{self.length}{natural}-{self.window}"


class BlockOrder:
    """The block-shuffled order of an epoch.

    Args:
        blocks: the blocks of the dataset.
        key: the key of the epoch, from `gpuload.rng.philox.epoch_key`.

    Example:
        >>> BlockOrder(Blocks(10, BlockShuffle(block=2, window=2)), philox.epoch_key(0, 0))(np.arange(10))
        array([7, 5, 6, 4, 2, 3, 8, 9, 1, 0])
    """

    def __init__(self, blocks: Blocks, key: philox.Key) -> None:
        self.n, self._blocks, self._key = blocks.n, blocks, key
        # Without natural blocks all blocks have the same length, except that the last block can be shorter. The turn of
        # this short block (its index in the order of blocks) is drawn separately, so that the start of each turn can be
        # computed. The other blocks are shuffled among the other turns.
        self._short_length = blocks.bounds is None and blocks.n % blocks.length
        self._shuffle = Shuffle(blocks.count - bool(self._short_length), key)
        self._short_turn = 0
        if self._short_length:
            first, second = philox.words(key, np.arange(1), SHORT_BLOCK, 2)[0].tolist()
            self._short_turn = (first << 32 | second) * blocks.count >> 64

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the int64 indices at integer `positions` of any shape; raise an IndexError if one is out of range."""
        sequence_positions = self.sequence_positions(positions)
        flat = sequence_positions.reshape(-1)
        turns = self._turns_at(flat)
        blocks = self._blocks_at(turns)
        block_starts = blocks * self._blocks.length if self._blocks.bounds is None else self._blocks.bounds[blocks]
        return (block_starts + flat - self._turn_starts(turns)).reshape(sequence_positions.shape)

    def sequence_positions(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions of the samples at `positions` in the sequence of blocks before windows are shuffled."""
        positions = check_positions(positions, self.n)
        flat = positions.reshape(-1)
        window, count = self._blocks.window, self._blocks.count
        windows, indices = np.unique(self._turns_at(flat) // window, return_inverse=True)
        window_starts = self._turn_starts(windows * window)
        lengths = self._turn_starts(np.minimum((windows + 1) * window, count)) - window_starts
        is_small = lengths <= TABLE_MAX
        offsets = flat - window_starts[indices]
        results = self._positions_in_small_windows(window_starts, np.where(is_small, lengths, 0), indices, offsets)
        window_keys = philox.words(self._key, windows, WINDOWS, 2).tolist()
        for i in np.flatnonzero(~is_small).tolist():
            selected = np.flatnonzero(indices == i)
            shuffle = Shuffle(int(lengths[i]), philox.Key(*window_keys[i]))
            results[selected] = window_starts[i] + shuffle(offsets[selected])
        return results.reshape(positions.shape)

    def _positions_in_small_windows(
        self, window_starts: np.ndarray, lengths: np.ndarray, window_indices: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Return the sequence positions for `offsets` in the windows with the indices `window_indices`; undefined for
        windows of length 0. All positions of these windows are sorted by random numbers. (A separate `Shuffle` for each
        window takes 0.2 ms.)"""
        counts_before = np.cumsum(lengths) - lengths
        owners = np.repeat(np.arange(len(lengths)), lengths)
        all_positions = np.arange(len(owners), dtype=np.int64) + (window_starts - counts_before)[owners]
        words = philox.words(self._key, all_positions, WITHIN_WINDOWS, 2).astype(np.uint64)
        order = np.lexsort((words[:, 0] << _32 | words[:, 1], owners))
        is_small = (lengths > 0)[window_indices]
        results = np.empty_like(offsets)
        results[is_small] = all_positions[order[(counts_before[window_indices] + offsets)[is_small]]]
        return results

    def _turns_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the turns of the blocks at these sequence positions."""
        if self._blocks.bounds is not None:
            return np.searchsorted(self._starts, positions, side="right") - 1
        length = self._blocks.length
        if not self._short_length:
            return positions // length
        is_after = positions >= self._short_turn * length + self._short_length
        return np.where(is_after, positions + (length - self._short_length), positions) // length

    def _turn_starts(self, turns: np.ndarray) -> np.ndarray:
        """Return the first sequence position of each turn. The turn after the last one begins at n."""
        if self._blocks.bounds is not None:
            return self._starts[turns]
        length = self._blocks.length
        return turns * length - (turns > self._short_turn) * (length - self._short_length if self._short_length else 0)

    def _blocks_at(self, turns: np.ndarray) -> np.ndarray:
        """Return the index of the block at each turn."""
        if not self._short_length:
            return self._shuffle(turns)
        is_short = turns == self._short_turn
        other_turns = np.where(is_short, 0, turns - (turns > self._short_turn))
        shuffled = self._shuffle(other_turns) if self._shuffle.n else other_turns
        return np.where(is_short, self._blocks.count - 1, shuffled)

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first sequence position of each turn, followed by n, for blocks of different lengths."""
        assert self._blocks.bounds is not None
        lengths = np.diff(self._blocks.bounds)[self._shuffle(np.arange(self._blocks.count))]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _join_blocks(bounds: np.ndarray, length: int) -> np.ndarray:
    """Join short blocks: the new boundaries are the first natural boundaries at or after multiples of `length`."""
    multiples = np.arange(0, int(bounds[-1]) + length, length)
    return bounds[np.unique(np.minimum(np.searchsorted(bounds, multiples), len(bounds) - 1))]
