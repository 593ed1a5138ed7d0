"""The shuffle of a stream: the order of its shards, and the buffer that samples are drawn from. Keyed draws alone.

What lies in the buffer is a function of how many samples were given and read: `ShuffleBuffer.restore` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

import numpy as np

from gpuload.rng.philox import Key, words
from gpuload.rng.streams import SHARDS, SHUFFLE_BUFFER

__all__ = ["ShuffleBuffer", "shard_order"]

AT_ONCE: Final = 512  # draws made together
LOOKED_BACK: Final = 1 << 16

Item = TypeVar("Item")


def shard_order(key: Key, count: int) -> np.ndarray:
    """The numbers of the shards in the order of an epoch: int64 (count,), the same for all ranks and workers."""
    drawn = words(key, np.arange(count), SHARDS, 2).astype(np.uint64)
    return np.argsort(drawn[:, 0] << np.uint64(32) | drawn[:, 1], kind="stable")


class ShuffleBuffer(Generic[Item]):
    """So many items, of which one after the other is drawn, and the next one read is put into its slot.

    When there are no more to read, the last slot's takes that place, and there is one slot less.

    Args:
        capacity: how many; 1 changes no order.
        key: of the epoch.
        share, shares: whose draws these are: another share has others.

    Attributes:
        given: how many items were taken.
        ended: there are no more to read.
    """

    def __init__(self, capacity: int, key: Key, share: int, shares: int) -> None:
        self.given = 0
        self.ended = False
        self._capacity, self._key, self._share, self._shares = capacity, key, share, shares
        self._slots: list[Item | None] = []
        self._hole: int | None = None  # the slot that the last one was taken from
        self._block, self._words = -1, np.zeros(0, np.uint64)

    @property
    def has_room(self) -> bool:
        """Whether an item, or the end, is expected before the next one can be taken."""
        return not self.ended and (self._hole is not None or len(self._slots) < self._capacity)

    def put(self, item: Item) -> None:
        """Put in the next item that was read."""
        if self._hole is None:
            self._slots.append(item)
        else:
            self._slots[self._hole], self._hole = item, None

    def end(self) -> None:
        """Say that there are no more."""
        self.ended = True

    def take(self) -> Item | None:
        """The next item in the shuffled order; None if there is none."""
        _close(self._slots, self._hole)
        self._hole = None
        if not self._slots:
            return None
        self._hole = self._draw(self.given, len(self._slots))
        self.given += 1
        item, self._slots[self._hole] = self._slots[self._hole], None
        return item

    def content(self) -> Iterator[Item]:
        """The items in it."""
        return (item for item in self._slots if item is not None)

    def restore(self, given: int, read: int, ended: bool) -> list[int]:
        """Set it to where it is after so many items were given and read. Returns the number of the item in each of its
        slots, counted as they were read, -1 for none: `refill` takes these."""
        self.given, self.ended, self._hole = given, ended, None
        refills = min(max(0, given - 1), max(0, read - self._capacity))
        numbers = self._after(refills, min(self._capacity, read))
        for turn in range(refills, given):
            _close(numbers, self._hole)
            self._hole = self._draw(turn, len(numbers))
        if self._hole is not None:
            numbers[self._hole] = -1
        return numbers

    def refill(self, items: Sequence[Item | None]) -> None:
        """Put items into the slots, as `restore` has named them."""
        self._slots = list(items)

    def _after(self, refills: int, slots: int) -> list[int]:
        """Which items are in the slots after so many were replaced: in each the one that replaced the last."""
        found = np.full(slots, -1, np.int64)
        end = refills
        while end > 0 and (found < 0).any():
            start = max(0, end - LOOKED_BACK)
            last = np.full(slots, -1, np.int64)
            drawn = self._drawn(np.arange(start, end, dtype=np.int64)) * np.uint64(slots) >> np.uint64(32)
            np.maximum.at(last, drawn.astype(np.int64), np.arange(start, end, dtype=np.int64) + slots)
            found = np.where(found < 0, last, found)
            end = start
        return np.where(found < 0, np.arange(slots), found).tolist()

    def _draw(self, turn: int, slots: int) -> int:
        if slots == 1:
            return 0
        if self._block != turn // AT_ONCE:
            self._block = turn // AT_ONCE
            self._words = self._drawn(np.arange(AT_ONCE, dtype=np.int64) + self._block * AT_ONCE)
        return int(self._words[turn % AT_ONCE]) * slots >> 32

    def _drawn(self, turns: np.ndarray) -> np.ndarray:
        return words(self._key, turns * self._shares + self._share, SHUFFLE_BUFFER, 1)[:, 0].astype(np.uint64)


def _close(slots: list, hole: int | None) -> None:
    """Let the last slot's item fill a hole."""
    if hole is not None:
        last = slots.pop()
        if hole < len(slots):
            slots[hole] = last
