"""Splits the positions of an epoch into global batches, and splits each global batch among the ranks.

A *global batch* is the positions p … p + G - 1 with G = ranks × batch_size. Each rank gets a contiguous part of it or,
with a block shuffle, the positions whose samples are in its part of the blocks. So a position in an epoch is a single
integer, p, which does not depend on ranks, workers or batches: a run with a different number of ranks continues from p
with the same global batches if G is the same. Nothing is computed for the samples before p.

All ranks make the same number of steps, however `uneven` handles the last global batch, which can be shorter than G.
All functions are pure and run in the main process; none imports torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuload.order.blocks import BlockOrder, Blocks
from gpuload.order.mixture import MixedOrder, Mixture, SteppedOrder
from gpuload.order.permutation import Sequential, Shuffle, Weighted
from gpuload.order.ranks import check_rank
from gpuload.rng import philox

__all__ = ["RankBatch", "Shares", "Uneven"]

Uneven = Literal["pad", "drop", "exact"]

# The number of positions to compute at a time. The first block is small, so that the first batch comes early; later
# blocks are large, since the shuffle costs the least per position in large blocks.
FIRST_ORDER_BLOCK = 4096
ORDER_BLOCK = 65536


class RankBatch(NamedTuple):
    """A rank's part of a global batch: positions and indices, int64 (N,), and `valid`, bool (N,), which is False for
    padding samples (``uneven="exact"``). `size_hw` is the shape of the batch's bucket; None without buckets."""

    positions: np.ndarray
    indices: np.ndarray
    valid: np.ndarray
    size_hw: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The distribution of the samples of each epoch among the ranks.

    Args:
        samples: the number of samples; for a mixture, the number of positions in an epoch.
        batch_size: the batch size of each rank.
        shuffle: whether each epoch has a new random order.
        blocks: the blocks of a block shuffle; None for any other order, and for a mixture, which has blocks for each
            dataset.
        mixture: the mixture of several datasets; None for a single dataset.
        seed: the seed of the order.
        drop_last: whether to drop the last global batch if it is not full.
        rank, world_size: this rank and the number of ranks.
        uneven: what to do with an incomplete last global batch. ``"pad"`` fills it with the epoch's first positions,
            up to a multiple of the number of ranks; ``"drop"`` truncates it to such a multiple; ``"exact"`` counts
            every sample once, and fills missing samples with the last sample, for which `RankBatch.valid` is False.
        weights: cumulative weights, from `cumulate`, for drawing samples with replacement; None without weights.
        repeats: the number of neighbouring positions with the same sample, which go to different ranks. The number of
            positions in an epoch does not change, so an epoch has fewer different samples. (Hoffer et al., "Augment
            your batch", CVPR 2020.)
        group_size: the number of neighbouring positions, starting at a multiple of `group_size`, that stay together,
            even in the last global batch: with more than one rank, the number of samples of each rank is a multiple of
            `group_size`. `batch_size` must also be a multiple of `group_size`.
        order: returns the order of the samples of a bucket in the epoch with this key; None for any other order.
    """

    samples: int
    batch_size: int
    shuffle: bool = False
    blocks: Blocks | None = field(default=None, compare=False)
    mixture: Mixture | None = None
    seed: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    uneven: Uneven = "pad"
    weights: np.ndarray | None = field(default=None, repr=False, compare=False)
    repeats: int = 1
    group_size: int = 1
    order: Callable[[philox.Key], Callable[[np.ndarray], np.ndarray]] | None = field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_rank(self.rank, self.world_size)

    @property
    def global_batch_size(self) -> int:
        """The number of samples of all ranks in a full step."""
        return self.batch_size * self.world_size

    @property
    def name(self) -> str:
        """A name that identifies the order: equal names, seeds and numbers of samples mean equal orders."""
        name = "shuffled" if self.shuffle else "sequential"
        if self.blocks is not None:
            name = self.blocks.name
        if self.mixture is not None:
            name = f"{self.mixture.name}-{name}"
        if self.weights is not None:
            name = f"weighted-{zlib.crc32(self.weights.tobytes()):08x}"
        return name if self.repeats == 1 else f"{name}-repeated-{self.repeats}"

    @property
    def division(self) -> str | None:
        """The options that the batches of an epoch depend on, in addition to the order; None if an epoch's order does
        not depend on its division into batches."""
        return None if self.mixture is None or self.mixture.per == "sample" else self.describe_division()

    def describe_division(self) -> str:
        """Return the options that divide an epoch into batches."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        text = f"batch_size={self.batch_size}, {ranks}, drop_last={self.drop_last}, uneven={self.uneven!r}"
        return text if self.group_size == 1 else f"{text}, groups of {self.group_size}"

    def _make_order(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        key = philox.epoch_key(self.seed, epoch)
        if self.order is not None:
            order = self.order(key)
        elif self.blocks is not None:
            order = BlockOrder(self.blocks, key)
        elif self.mixture is not None and self.mixture.steps is not None:
            order = SteppedOrder(self.mixture, self.seed, epoch, shuffle=self.shuffle)
        elif self.mixture is not None:
            order = MixedOrder(self.mixture, self.seed, epoch, shuffle=self.shuffle, repeats=self.repeats)
        elif self.weights is not None:
            order = Weighted(self.weights, key)
        else:
            order = Shuffle(self.samples, key) if self.shuffle else Sequential(self.samples)
        repeats = self.repeats
        return order if repeats == 1 else lambda positions: order(positions // repeats)

    def _rank_positions(self, share: int) -> np.ndarray:
        """Return this rank's positions in a global batch: a contiguous part or, with repeats, every `world_size`-th
        position, so that the repeats of a sample are on different ranks."""
        offsets = np.arange(share, dtype=np.int64)
        return offsets + self.rank * share if self.repeats == 1 else offsets * self.world_size + self.rank

    def _positions_by_blocks(self, order: BlockOrder, starts: np.ndarray) -> np.ndarray:
        """Return this rank's positions, ascending, in global batches that begin at `starts` (steps, 1). The samples at
        these positions are in the rank's part of the blocks, so that not every rank reads every block. Groups stay
        together."""
        positions = starts + np.arange(self.global_batch_size, dtype=np.int64)
        groups = order.sequence_positions(positions)[:, :: self.group_size].argsort(axis=1, kind="stable")
        share = self.batch_size // self.group_size
        group_starts = np.sort(groups[:, self.rank * share : (self.rank + 1) * share], axis=1) * self.group_size
        return starts + (group_starts[:, :, None] + np.arange(self.group_size)).reshape(len(starts), -1)

    def steps(self, start: int = 0) -> int:
        """Return the number of batches from position `start` to the end of an epoch, which is the same on every
        rank."""
        full_steps, remainder = divmod(self.samples - start, self.global_batch_size)
        return full_steps + bool(remainder and self._last_share(remainder))

    @property
    def samples_per_rank(self) -> int:
        """The number of samples of each rank in an epoch."""
        full_steps, remainder = divmod(self.samples, self.global_batch_size)
        return full_steps * self.batch_size + (self._last_share(remainder) if remainder else 0)

    def group_at(self, epoch: int, position: int) -> RankBatch:
        """Return the group of neighbouring samples that contains a position."""
        shares = replace(self, batch_size=self.group_size, rank=0, world_size=1, uneven="pad", drop_last=False)
        return next(shares.batches(epoch, position // self.group_size * self.group_size))

    def _last_share(self, remainder: int) -> int:
        """Return the number of samples of each rank in the last global batch if it has `remainder` samples."""
        if self.drop_last:
            return 0
        group_size = self.group_size if self.world_size > 1 else 1
        multiple = group_size * self.world_size
        return (remainder // multiple if self.uneven == "drop" else -(-remainder // multiple)) * group_size

    def batches(self, epoch: int, start: int = 0) -> Iterator[RankBatch]:
        """Yield this rank's batches of an epoch, starting at position `start`."""
        order: Any = self._make_order(epoch)
        full_steps, remainder = divmod(self.samples - start, self.global_batch_size)
        first_positions = self._rank_positions(self.batch_size) + start
        splits_by_blocks = isinstance(order, BlockOrder) and self.world_size > 1
        positions_per_step = self.global_batch_size if splits_by_blocks else self.batch_size
        valid = np.ones(self.batch_size, np.bool_)
        step, steps_at_once = 0, max(1, FIRST_ORDER_BLOCK // positions_per_step)
        while step < full_steps:
            offsets = (
                np.arange(step, min(step + steps_at_once, full_steps), dtype=np.int64)[:, None] * self.global_batch_size
            )
            positions = (
                self._positions_by_blocks(order, offsets + start) if splits_by_blocks else offsets + first_positions
            )
            for positions_and_indices in zip(positions, order(positions), strict=True):
                yield RankBatch(*positions_and_indices, valid)
            step, steps_at_once = step + len(offsets), max(1, ORDER_BLOCK // positions_per_step)
        last_share = self._last_share(remainder) if remainder else 0
        if last_share:
            positions = self._rank_positions(last_share) + start + full_steps * self.global_batch_size
            is_valid = positions < self.samples
            if self.uneven == "exact":
                positions = np.minimum(positions, self.samples - 1)
                yield RankBatch(positions, order(positions), is_valid)
            else:
                # Groups stay together: repeat positions of the last group until it is full, and then repeat the first
                # groups.
                positions = positions % (self.samples + -self.samples % self.group_size)
                remainder = max(1, self.samples % self.group_size)
                repeated_positions = self.samples - remainder + (positions - self.samples) % remainder
                positions = np.where(positions < self.samples, positions, repeated_positions)
                yield RankBatch(positions, order(positions), np.ones(last_share, np.bool_))
