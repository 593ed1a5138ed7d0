"""Which samples make which batch: an epoch's positions, cut into global batches and shared out over the ranks.

A *global batch* is the positions p … p + G - 1 with G = ranks × batch_size; each rank takes a contiguous part of it,
or with a block shuffle the positions whose samples are in its part of the blocks. So a place in an epoch is one
number, p, which does not depend on ranks, workers or batches: another number of ranks continues from it with the same
global batches, as long as G is the same. Nothing is computed for the samples before p.

Every rank makes the same number of steps, whatever `uneven` makes of the last global batch, which may be shorter than
G. Pure functions, in the main process; imports no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from gpuload.order.blocks import BlockOrder, Blocks
from gpuload.order.mixture import MixedOrder, Mixture
from gpuload.order.permutation import Sequential, Shuffle, Weighted
from gpuload.order.ranks import check_rank
from gpuload.rng import philox

__all__ = ["Rows", "Shares", "Uneven"]

Uneven = Literal["pad", "drop", "exact"]

FIRST_ORDER_BLOCK = 4096
ORDER_BLOCK = 65536  # the shuffle is cheapest in large blocks


class Rows(NamedTuple):
    """A rank's part of a global batch, int64 (N,); `valid` is False for rows that only fill up (``uneven="exact"``)."""

    positions: np.ndarray
    indices: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the samples of each epoch are shared out.

    Args:
        samples: how many there are; of a mixture, how many positions an epoch has.
        batch_size: of each rank.
        shuffle: a new order each epoch.
        blocks: the blocks of a block shuffle; None without one, and for a mixture, which has blocks for each data set.
        mixture: how several data sets are mixed; None means that there is one.
        seed: of the order.
        drop_last: leave out a last global batch that is not full.
        rank, world_size: this rank, and how many there are.
        uneven: what to make of it otherwise. ``"pad"``: continue with the epoch's first positions, to a multiple of the
            ranks; ``"drop"``: cut to a multiple; ``"exact"``: every sample counts once, and missing rows repeat the
            last one with `Rows.valid` False.
        weights: draw the samples with replacement by these weights, from `cumulate`.
        repeats: this many neighbouring positions have the same sample, and go to different ranks; an epoch has as many
            positions as before, so fewer samples. (Hoffer et al., "Augment your batch", CVPR 2020.)
        group: that many neighbouring positions, from a multiple of it on, stay together, also in a last global batch:
            each of several ranks has a multiple of it of rows. `batch_size` is one too.
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
    group: int = 1

    def __post_init__(self) -> None:
        if self.uneven not in get_args(Uneven):
            raise ValueError(f"uneven must be one of {', '.join(map(repr, get_args(Uneven)))}, got {self.uneven!r}")
        check_rank(self.rank, self.world_size)

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a whole step."""
        return self.batch_size * self.world_size

    @property
    def order(self) -> str:
        """The order as text: the same text, seed and number of samples mean the same order."""
        name = "shuffled" if self.shuffle else "sequential"
        if self.blocks is not None:
            name = self.blocks.name
        if self.mixture is not None:
            name = f"{self.mixture.name}-{name}"
        if self.weights is not None:
            name = f"weighted-{zlib.crc32(self.weights.tobytes()):08x}"
        return name if self.repeats == 1 else f"{name}-repeated-{self.repeats}"

    def _order(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        key = philox.epoch_key(self.seed, epoch)
        if self.blocks is not None:
            order = BlockOrder(self.blocks, key)
        elif self.mixture is not None:
            order = MixedOrder(self.mixture, self.seed, epoch, shuffle=self.shuffle, repeats=self.repeats)
        elif self.weights is not None:
            order = Weighted(self.weights, key)
        else:
            order = Shuffle(self.samples, key) if self.shuffle else Sequential(self.samples)
        repeats = self.repeats
        return order if repeats == 1 else lambda positions: order(positions // repeats)

    def _positions(self, share: int) -> np.ndarray:
        """This rank's positions in a global batch: a contiguous part or, with repeats, every `world_size`-th, so that
        the repeats of a sample are on different ranks."""
        rows = np.arange(share, dtype=np.int64)
        return rows + self.rank * share if self.repeats == 1 else rows * self.world_size + self.rank

    def _of_blocks(self, order: BlockOrder, firsts: np.ndarray) -> np.ndarray:
        """This rank's positions in global batches that begin at `firsts` (steps, 1), ascending: the positions whose
        samples are in the rank's part of the blocks, so that not every rank reads every block. Groups stay together."""
        positions = firsts + np.arange(self.global_batch, dtype=np.int64)
        groups = order.places(positions)[:, :: self.group].argsort(axis=1, kind="stable")
        share = self.batch_size // self.group
        chosen = np.sort(groups[:, self.rank * share : (self.rank + 1) * share], axis=1) * self.group
        return firsts + (chosen[:, :, None] + np.arange(self.group)).reshape(len(firsts), -1)

    def steps(self, start: int = 0) -> int:
        """Batches from position `start` to the end of an epoch, the same on every rank."""
        whole, remainder = divmod(self.samples - start, self.global_batch)
        return whole + bool(remainder and self._share(remainder))

    @property
    def rows(self) -> int:
        """How many rows each rank has in a whole epoch."""
        whole, remainder = divmod(self.samples, self.global_batch)
        return whole * self.batch_size + (self._share(remainder) if remainder else 0)

    def _share(self, remainder: int) -> int:
        """How many rows each rank has of a last global batch of `remainder` samples."""
        if self.drop_last:
            return 0
        unit = self.group if self.world_size > 1 else 1
        each = unit * self.world_size
        return (remainder // each if self.uneven == "drop" else -(-remainder // each)) * unit

    def batches(self, epoch: int, start: int = 0) -> Iterator[Rows]:
        """This rank's batches of an epoch, from position `start` on."""
        order: Any = self._order(epoch)
        whole, remainder = divmod(self.samples - start, self.global_batch)
        first = self._positions(self.batch_size) + start
        by_blocks = isinstance(order, BlockOrder) and self.world_size > 1
        computed = self.global_batch if by_blocks else self.batch_size
        valid = np.ones(self.batch_size, np.bool_)
        step, at_once = 0, max(1, FIRST_ORDER_BLOCK // computed)
        while step < whole:
            steps = np.arange(step, min(step + at_once, whole), dtype=np.int64)[:, None] * self.global_batch
            positions = self._of_blocks(order, steps + start) if by_blocks else steps + first
            for rows in zip(positions, order(positions), strict=True):
                yield Rows(*rows, valid)
            step, at_once = step + len(steps), max(1, ORDER_BLOCK // computed)
        share = self._share(remainder) if remainder else 0
        if share:
            positions = self._positions(share) + start + whole * self.global_batch
            inside = positions < self.samples
            if self.uneven == "exact":
                positions = np.minimum(positions, self.samples - 1)
                yield Rows(positions, order(positions), inside)
            else:
                # Groups stay groups: the last one is filled up with its own positions, then they begin again.
                positions = positions % (self.samples + -self.samples % self.group)
                remainder = max(1, self.samples % self.group)
                repeated = self.samples - remainder + (positions - self.samples) % remainder
                positions = np.where(positions < self.samples, positions, repeated)
                yield Rows(positions, order(positions), np.ones(share, np.bool_))
