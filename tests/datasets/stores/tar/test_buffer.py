"""The shuffle of a stream: a permutation by keyed draws, and what was in the buffer, computed again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from gpuload.datasets.stores.tar import buffer as buffer_module
from gpuload.datasets.stores.tar.buffer import ShuffleBuffer, shard_order
from gpuload.rng.philox import epoch_key


def ordered(buffer: ShuffleBuffer, source: Iterator[int]) -> list[int]:
    """All that comes out."""
    out = []
    while True:
        while buffer.has_room:
            item = next(source, None)
            if item is None:
                buffer.end()
            else:
                buffer.put(item)
        if (item := buffer.take()) is None:
            return out
        out.append(item)


@pytest.mark.parametrize(("capacity", "count"), [(1, 5), (3, 0), (3, 2), (3, 3), (3, 40), (50, 40), (7, 700)])
def test_what_comes_out_is_what_went_in_and_can_be_restored_anywhere(capacity: int, count: int, monkeypatch) -> None:
    monkeypatch.setattr(buffer_module, "LOOKED_BACK", 16)
    made = lambda: ShuffleBuffer(capacity, epoch_key(1, 2), 1, 3)  # noqa: E731
    out = ordered(made(), iter(range(count)))
    assert sorted(out) == list(range(count))
    assert (out == list(range(count))) == (capacity == 1) or count < 5
    for given in {*range(min(count, 12)), count // 2, *range(max(0, count - 9), count + 1)}:
        read = min(count, capacity + given - 1) if given else 0
        buffer = made()
        slots = buffer.restore(given, read, given > 0 and given + capacity > count + 1)
        buffer.refill([None if number < 0 else number for number in slots])
        assert ordered(buffer, iter(range(read, count))) == out[given:], given


def test_draws_differ_by_share_and_epoch() -> None:
    orders = [
        ordered(ShuffleBuffer(20, epoch_key(0, epoch), share, 2), iter(range(60)))
        for epoch, share in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_each_slot_is_as_likely_as_the_others() -> None:
    firsts = [ordered(ShuffleBuffer(8, epoch_key(seed, 0), 0, 1), iter(range(8)))[0] for seed in range(400)]
    assert stats.chisquare(np.bincount(firsts, minlength=8)).pvalue > 0.001


def test_shards_come_in_another_order_in_each_epoch() -> None:
    orders = [shard_order(epoch_key(0, epoch), 20).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert shard_order(epoch_key(0, 1), 20).tolist() == orders[1]
