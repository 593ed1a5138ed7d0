"""The order of a `Mix`: exact shares, each sample once before any comes again, the same from any place and on ranks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.order.mixture import BLOCK, MixedOrder, Mixture
from gpuload.order.permutation import TABLE_MAX
from gpuload.order.shares import Shares


def datasets_of(mixture: Mixture, indices: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(mixture.sizes), indices, side="right")


def stream(mixture: Mixture, epochs: int, *, seed: int = 0, shuffle: bool = True) -> np.ndarray:
    """The indices of several epochs, one after the other."""
    positions = np.arange(mixture.length)
    return np.concatenate([MixedOrder(mixture, seed, epoch, shuffle=shuffle)(positions) for epoch in range(epochs)])


mixtures = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 50)), min_size=1, max_size=6).flatmap(
    lambda pairs: st.builds(Mixture, *(st.just(column) for column in zip(*pairs, strict=True)), st.integers(1, 3000))
)


@given(parts=st.lists(st.integers(1, 2**20), min_size=1, max_size=8), start=st.integers(0, 2**61))
def test_counts_never_fall_add_up_and_follow_the_shares(parts, start):
    mixture = Mixture((1,) * len(parts), tuple(parts), 1)
    counts = mixture.counts_before(np.arange(start, start + 300))
    assert (counts.sum(axis=1) == np.arange(start, start + 300)).all()
    assert ((np.diff(counts, axis=0) == 0) | (np.diff(counts, axis=0) == 1)).all()
    for number, part in enumerate(parts):
        exact = start * part // sum(parts)  # of any size, in Python's integers
        assert abs(int(counts[0, number]) - exact) <= len(parts)


@given(mixtures, st.integers(0, 3))
def test_each_block_has_the_exact_shares(mixture, seed):
    found = datasets_of(mixture, stream(mixture, 3, seed=seed))
    for begin in range(0, len(found), BLOCK):
        end = min(begin + BLOCK, len(found))
        counts = np.bincount(found[:end], minlength=len(mixture.sizes))
        if end % BLOCK == 0:
            assert (counts == mixture.counts_before(np.array([end]))[0]).all()


@given(mixtures, st.integers(0, 3), st.booleans())
def test_each_sample_comes_once_before_any_comes_again_over_the_ends_of_epochs(mixture, seed, shuffle):
    indices = stream(mixture, 3, seed=seed, shuffle=shuffle)
    found = datasets_of(mixture, indices)
    for number, (size, first) in enumerate(zip(mixture.sizes, np.cumsum(mixture.sizes) - mixture.sizes, strict=True)):
        own = indices[found == number] - first
        for begin in range(0, len(own), size):
            turn = own[begin : begin + size]
            assert len(set(turn.tolist())) == len(turn)
            if not shuffle:
                assert (turn == np.arange(len(turn))).all()


def test_large_data_sets_are_permuted_too():
    mixture = Mixture((TABLE_MAX + 1, 3 * TABLE_MAX), (1, 1), 2 * TABLE_MAX + 2)
    indices = stream(mixture, 3)
    own = indices[indices <= TABLE_MAX]
    first, second = own[: TABLE_MAX + 1], own[TABLE_MAX + 1 : 2 * TABLE_MAX + 2]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(TABLE_MAX + 1))
    assert (first != second).mean() > 0.99
    assert (np.abs(np.diff(first)) > 1).mean() > 0.99


def test_data_sets_of_one_size_have_different_permutations():
    indices = stream(Mixture((300, 300), (1, 1), BLOCK), 1)
    first, second = indices[indices < 300][:300], indices[indices >= 300][:300] - 300
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert (first == second).mean() < 0.05


def test_the_data_sets_are_shuffled_within_each_block():
    found = datasets_of(mixture := Mixture((10_000, 10_000), (1, 1), 10 * BLOCK), stream(mixture, 1)).reshape(10, BLOCK)
    assert (found.sum(axis=1) == BLOCK // 2).all()
    changes = (np.diff(found, axis=1) != 0).mean(axis=1)
    assert ((changes > 0.4) & (changes < 0.6)).all()
    assert all((found[row] != found[0]).mean() > 0.4 for row in range(1, 10))


@given(
    mixture=mixtures,
    batch=st.integers(1, 40),
    ranks=st.integers(1, 4),
    stop=st.integers(0, 20),
    repeats=st.integers(1, 3),
)
def test_ranks_and_a_place_to_go_on_from_change_nothing(mixture, batch, ranks, stop, repeats):
    options = {"samples": mixture.length, "mixture": mixture, "shuffle": True, "drop_last": True, "repeats": repeats}

    def found(world_size: int, size: int, start: int = 0) -> dict[int, int]:
        shares = [Shares(rank=rank, world_size=world_size, batch_size=size, **options) for rank in range(world_size)]
        rows = [rows for own in shares for rows in own.batches(2, start)]
        return {p: i for row in rows for p, i in zip(row.positions.tolist(), row.indices.tolist(), strict=True)}

    whole = found(1, ranks * batch)
    start = min(stop, mixture.length // (ranks * batch)) * ranks * batch
    assert found(ranks, batch, start) == {position: index for position, index in whole.items() if position >= start}


def test_with_repeats_no_sample_is_left_out_between_epochs():
    mixture = Mixture((30, 20), (3, 2), 100)
    shares = Shares(samples=100, batch_size=10, shuffle=True, mixture=mixture, repeats=2)
    indices = np.concatenate([rows.indices for epoch in range(6) for rows in shares.batches(epoch)])
    assert (indices[::2] == indices[1::2]).all()
    first = indices[::2][indices[::2] < 30]
    for begin in range(0, len(first) - 30, 30):
        assert sorted(first[begin : begin + 30].tolist()) == list(range(30))


def test_a_place_is_looked_up_without_the_ones_before_it_in_little_memory():
    mixture = Mixture((6_000_000, 4_000_000, 17), (60, 39, 1), 10_000_017)
    position = np.array([9_876_543])
    MixedOrder(mixture, 0, 0)(position)
    tracemalloc.start()
    index = MixedOrder(mixture, 0, 1234)(position)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    around = np.arange(9_870_000, 9_880_000)
    assert MixedOrder(mixture, 0, 1234)(around)[6_543] == index[0]


def test_positions_of_many_ranks_are_worked_on_in_parts():
    mixture = Mixture((600_000, 400_000), (1, 2), 1_000_000)
    positions = np.arange(0, 1_000_000, 997)
    tracemalloc.start()
    indices = MixedOrder(mixture, 0, 0)(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert indices[::100].tolist() == [int(MixedOrder(mixture, 0, 0)(position)) for position in positions[::100]]


@pytest.mark.parametrize(("seed", "indices"), [(0, [0, 3, 5, 2, 4, 5]), (1, [3, 2, 0, 1, 3, 1])])
def test_an_order_stays_what_it_is(seed, indices):
    """What a seed means does not change from version to version."""
    found = MixedOrder(Mixture((4, 2), (2, 1), 6), seed, 0)(np.arange(6)).tolist()
    assert found == indices


def test_positions_that_cannot_be_counted_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^epoch 4611686018427387904 of a Mix of 10 positions extends beyond position 2\*\*62, the last",
    ):
        MixedOrder(Mixture((5, 5), (1, 1), 10), 0, 2**62)
    with pytest.raises(IndexError, match="position 10 is out of range: an order of 10 samples has positions 0 … 9"):
        MixedOrder(Mixture((5, 5), (1, 1), 10), 0, 0)(np.array([10]))


def test_another_mixture_has_another_name():
    names = {
        Mixture(sizes, parts, length).name
        for sizes in ((5, 5), (5, 6))
        for parts in ((1, 1), (1, 2))
        for length in (10, 11)
    }
    assert len(names) == 8
