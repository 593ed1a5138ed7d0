"""The order of a `Mix`, which maps each position to a dataset and one of its samples.

The positions of all epochs, concatenated, form one *stream*, which is split into blocks of 1,024 positions. The number
of samples of each dataset before a block is computed in closed form, so each block has the exact shares, and fractions
of samples are carried over to the next blocks. Within a block the order of the datasets is shuffled; it depends on the
seed and the index of the block. The *ordinal* of a position is the number of samples of its dataset before it. It
follows from the position's block alone: nothing is counted from the beginning of the epoch.

A dataset of n samples passes through consecutive permutations: its sample with ordinal k is sample k mod n of
permutation k div n. A block shuffle uses the permutations of `gpuload.order.blocks`. This module runs in the
main process; orders are immutable.

With ``per="batch"`` or ``per="dataset"``, or with weights by epoch, an epoch is a sequence of *steps* (`Steps`), which
restarts with each epoch: a step has a row of positions for each rank, and all ranks have the same number of samples of
each dataset in the same step. These numbers are a table with 8 bytes for each step and dataset, which is computed when
an epoch starts, since no closed form is known that keeps the sums of all datasets within one sample of their shares.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Final

import numpy as np

from gpuload.datasets.mix import PartsByEpoch, Per
from gpuload.order.blocks import BlockOrder, Blocks
from gpuload.order.permutation import LENGTH_MAX, TABLE_MAX, Shuffle, check_positions
from gpuload.rng import philox
from gpuload.rng.streams import MIXED_BLOCKS, MIXED_DATASETS, MIXED_PERMUTATIONS, ORDER

__all__ = ["BLOCK", "MixedOrder", "Mixture", "SteppedOrder", "Steps"]

BLOCK: Final = 1024  # positions in a block; another value would change the order for every seed
POSITIONS_AT_ONCE: Final = 65536  # limits memory: with many ranks, a rank's positions are spread over many blocks

MAX_COLUMNS: Final = 2**12  # of a row whose columns are sorted in one number with their keys
CountsOf = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

_12, _20, _COLUMN = (np.array(value, np.uint64) for value in (12, 20, MAX_COLUMNS - 1))


@dataclass(frozen=True, slots=True)
class Steps:
    """The division of an epoch of n positions into rows, one for each step and rank. All rows have `size` positions,
    except for those of a last, shorter step."""

    size: int
    ranks: int
    n: int

    @property
    def full(self) -> int:
        """The number of full steps."""
        return self.n // (self.size * self.ranks)

    @property
    def last_size(self) -> int:
        """The number of positions of each rank after the full steps."""
        return self.n % (self.size * self.ranks) // self.ranks


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes and weights of mixed datasets.

    Args:
        sizes: the number of samples of each dataset, at least 1.
        parts: the weights of the datasets as integers of at least 1, whose sum is below 2**32.
        length: the number of positions in an epoch.
        blocks: the blocks of each dataset, for a block shuffle; otherwise empty.
        per: what has the shares, as for `Mix`.
        parts_by_epoch: such weights for each epoch, which can be 0; None if they are the same in all epochs.
        steps: the steps of each epoch, for `SteppedOrder`; None for `MixedOrder`.

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
    per: Per = "sample"
    parts_by_epoch: PartsByEpoch | None = None
    steps: Steps | None = None

    @property
    def name(self) -> str:
        """A name that identifies the mixture: equal names mean equal orders."""
        content = f"{self.sizes} {self.parts} {self.length} {[blocks.name for blocks in self.blocks]}"
        if self.per != "sample" or self.parts_by_epoch is not None:
            content += f" {self.per} {self.parts_by_epoch}"
        return f"mixed-{zlib.crc32(content.encode()):08x}"

    def parts_at(self, epoch: int) -> tuple[int, ...]:
        """Return the weights of the datasets in an epoch."""
        return self.parts if self.parts_by_epoch is None else self.parts_by_epoch.at(epoch)

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
        return self._look_up(blocks, offsets, BLOCK, self._block_counts, 0).reshape(positions.shape)

    def _block_counts(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of samples of each dataset before these blocks, and in them, both (blocks, datasets)."""
        limits = self._mixture.counts_before(np.append(blocks, blocks + 1) * BLOCK)
        return limits[: len(blocks)], np.diff(limits.reshape(2, len(blocks), -1), axis=0)[0]

    def _look_up(
        self, rows: np.ndarray, columns: np.ndarray, width: int, counts_of: CountsOf, stream_start: int
    ) -> np.ndarray:
        """Return the indices at these columns of these rows of `width` positions. Row 0 starts at the stream's position
        `stream_start`; `counts_of` returns the samples of each dataset before rows and in them."""
        unique_rows, row_numbers = np.unique(rows, return_inverse=True)
        indices, at_once = np.empty_like(rows), max(1, POSITIONS_AT_ONCE // width)
        for start in range(0, len(unique_rows), at_once):
            selected = np.flatnonzero((row_numbers >= start) & (row_numbers < start + at_once))
            chunk = unique_rows[start : start + at_once]
            positions = stream_start + chunk[:, None] * width + np.arange(width)
            datasets, ordinals = self._datasets_and_ordinals(positions, *counts_of(chunk))
            cells = row_numbers[selected] - start, columns[selected]
            indices[selected] = self._indices(datasets[cells], ordinals[cells])
        return indices

    def _datasets_and_ordinals(
        self, positions: np.ndarray, previous_counts: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of the dataset and the ordinal at each position of the stream in rows of positions. The row
        has `counts` samples of each dataset, after the first `previous_counts`."""
        shape = positions.shape
        dataset_indices = np.arange(counts.shape[1])
        sorted_datasets = np.repeat(np.tile(dataset_indices, shape[0]), counts.reshape(-1)).reshape(shape)
        datasets = np.take_along_axis(sorted_datasets, _random_permutations(self._key, positions, MIXED_BLOCKS), axis=1)
        # Sorted by dataset and then by position, the ordinals of a dataset are consecutive.
        first_ordinals = previous_counts - (np.cumsum(counts, axis=1) - counts)
        sorted_ordinals = np.repeat(first_ordinals.reshape(-1), counts.reshape(-1)).reshape(shape) + np.arange(shape[1])
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


class SteppedOrder(MixedOrder):
    """The order of an epoch of a mixture that is divided into steps. Arguments and errors are as for `MixedOrder`.

    Example:
        >>> mixture = Mixture((4, 20), (1, 3), length=12, per="batch", steps=Steps(size=6, ranks=1, n=12))
        >>> order = SteppedOrder(mixture, seed=0, epoch=0, shuffle=False)
        >>> order(np.arange(12)).reshape(2, 6)
        array([[ 0,  4,  5,  6,  7,  8],
               [ 9,  1, 10, 11,  2, 12]])
    """

    def __init__(self, mixture: Mixture, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        assert mixture.steps is not None
        self._steps: Steps = mixture.steps
        super().__init__(replace(mixture, length=self._steps.n), seed, epoch, shuffle=shuffle)
        options = self._steps, mixture.per, tuple(self._keys)
        self._counts = _count_steps(mixture.parts_at(epoch), *options)
        if mixture.parts_by_epoch is None:
            earlier_counts = epoch * self._counts[-1]
        else:
            totals = (_count_epoch(mixture.parts_at(earlier), *options) for earlier in range(epoch))
            earlier_counts = sum(totals, np.zeros_like(self._counts[-1]))
        self._earlier_counts = earlier_counts * self._steps.ranks

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        positions = check_positions(positions, self.n)
        flat, steps = positions.reshape(-1), self._steps
        indices = np.empty_like(flat)
        last_start = steps.full * steps.size * steps.ranks
        is_last = flat >= last_start
        for is_selected, start, width, first_step in (
            (~is_last, 0, steps.size, 0),
            (is_last, last_start, steps.last_size, steps.full),
        ):
            selected = np.flatnonzero(is_selected)
            if len(selected):
                rows, columns = np.divmod(flat[selected] - start, width)
                counts_of = partial(self._row_counts, first_step)
                indices[selected] = self._look_up(rows, columns, width, counts_of, self._stream_start + start)
        return indices.reshape(positions.shape)

    def _row_counts(self, first_step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of samples of each dataset before these rows, of which row 0 begins a step, and in them."""
        steps, ranks = np.divmod(rows[:, None], self._steps.ranks)
        counts = self._counts[first_step + steps[:, 0]]
        counts_in_rows = self._counts[first_step + steps[:, 0] + 1] - counts
        return self._earlier_counts + counts * self._steps.ranks + ranks * counts_in_rows, counts_in_rows


@lru_cache(maxsize=4096)
def _count_epoch(parts: tuple[int, ...], steps: Steps, per: Per, ties: tuple[philox.Key, ...]) -> np.ndarray:
    """Return the number of samples of each dataset in a rank's batches of an epoch."""
    return _count_steps(parts, steps, per, ties)[-1].copy()  # a copy, which does not keep the table


def _count_steps(parts: tuple[int, ...], steps: Steps, per: Per, ties: tuple[philox.Key, ...]) -> np.ndarray:
    """Return the number of samples of each dataset in a rank's batches before each step and in all steps, int64
    (steps + 1, datasets). `ties` decide between datasets that are equally urgent."""
    total, step_count = sum(parts), steps.full + bool(steps.last_size)
    units = 1 if per == "dataset" else steps.size  # in each step, batches or samples
    whole, shares = zip(*(divmod(part * units, total) for part in parts), strict=True)
    period = total // math.gcd(total, *shares)  # after which the sums are exact, and the extra units repeat
    extra = _spread(shares, total, min(step_count, period), ties)
    counts = np.array(whole) + np.tile(extra, (-(-step_count // period), 1))[:step_count]
    if per == "dataset":
        counts *= np.where(np.arange(step_count) < steps.full, steps.size, steps.last_size)[:, None]
    elif steps.last_size:
        counts[-1] = 0
        positions = steps.full * steps.size + steps.last_size
        before = counts.sum(axis=0).tolist()
        missing = [positions * part - count * total for part, count in zip(parts, before, strict=True)]
        for _ in range(steps.last_size):
            dataset = missing.index(max(missing))
            missing[dataset] -= total
            counts[-1, dataset] += 1
    return np.concatenate([np.zeros((1, len(parts)), np.int64), np.cumsum(counts, axis=0)])


def _spread(shares: tuple[int, ...], total: int, steps: int, ties: tuple[philox.Key, ...]) -> np.ndarray:
    """Return which datasets get an extra unit in each step, int64 (steps, datasets), 0 or 1. The number of extra units
    in each step is sum(shares) / total, an integer. After n steps, the number of extra units of dataset i differs by
    less than 1 from n × shares[i] / total.

    Choosing the datasets that lack most would not stay within this limit: among 6,000 random mixtures, 11 exceeded it,
    as did 23 if the unit that is due first was chosen. So units are chosen as the scheduler PD² chooses tasks for as
    many processors: of the units with the same deadline, first those whose successor is released before the deadline,
    and of these, first those with the longest sequence of successors that each have only one step left. (Anderson,
    Srinivasan, "Mixed Pfair/ERfair scheduling of asynchronous periodic tasks", 2004.)
    """
    extra = np.zeros((steps, len(shares)), np.int64)
    received = [0] * len(shares)

    def urgency(dataset: int) -> tuple[int, bool, int, philox.Key]:
        number, share = received[dataset] + 1, shares[dataset]
        deadline, group_deadline, remainder = -(-number * total // share), 0, total - share
        if 2 * share >= total:
            remaining_steps = -(-deadline * remainder // total)
            group_deadline = -(-remaining_steps * total // remainder)
        return deadline, deadline * share == number * total, -group_deadline, ties[dataset]

    for step in range(steps):
        released = [i for i, share in enumerate(shares) if received[i] * total < (step + 1) * share]
        for dataset in sorted(released, key=urgency)[: sum(shares) // total]:
            received[dataset] += 1
            extra[step, dataset] = 1
    return extra


def _random_permutations(key: philox.Key, positions: np.ndarray, lane: int) -> np.ndarray:
    """Return a random permutation for each row of positions, drawn from a 52-bit number for each position."""
    words = philox.words(key, positions.reshape(-1), lane, 2).astype(np.uint64)
    return _sorted_columns((words[:, 0] << _20 | words[:, 1] >> _12).reshape(positions.shape))


def _sorted_columns(keys: np.ndarray) -> np.ndarray:
    """Return the columns of each row, stably sorted by its keys, which have at most 52 bits.

    Each key is combined with its column into one number, since numpy's sort is five times as fast as its argsort, and
    the result is the same on all processors.
    """
    if keys.shape[1] > MAX_COLUMNS:  # only with large batches
        return np.argsort(keys, axis=1, kind="stable")
    columns = np.arange(keys.shape[1], dtype=np.uint64)
    return (np.sort(keys << _12 | columns, axis=1) & _COLUMN).astype(np.int64)
