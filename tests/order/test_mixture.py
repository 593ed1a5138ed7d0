"""The order of a `Mix`: exact shares, and all samples of a dataset before any is repeated; from any position and on any
number of ranks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.order.mixture import BLOCK, MixedOrder, Mixture
from gpuload.order.permutation import TABLE_MAX
from gpuload.order.shares import Shares


def dataset_numbers(mixture: Mixture, indices: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(mixture.sizes), indices, side="right")


def indices_of_epochs(mixture: Mixture, epochs: int, *, seed: int = 0, shuffle: bool = True) -> np.ndarray:
    positions = np.arange(mixture.length)
    return np.concatenate([MixedOrder(mixture, seed, epoch, shuffle=shuffle)(positions) for epoch in range(epochs)])


mixtures = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 50)), min_size=1, max_size=6).flatmap(
    lambda pairs: st.builds(Mixture, *(st.just(column) for column in zip(*pairs, strict=True)), st.integers(1, 3000))
)


@given(parts=st.lists(st.integers(1, 2**20), min_size=1, max_size=8), start=st.integers(0, 2**61))
def test_counts_before_a_position_add_up_to_it_and_follow_the_shares(parts, start):
    mixture = Mixture((1,) * len(parts), tuple(parts), 1)
    counts = mixture.counts_before(np.arange(start, start + 300))
    assert (counts.sum(axis=1) == np.arange(start, start + 300)).all()
    assert ((np.diff(counts, axis=0) == 0) | (np.diff(counts, axis=0) == 1)).all()
    for number, part in enumerate(parts):
        exact = start * part // sum(parts)  # in Python's integers, which do not overflow
        assert abs(int(counts[0, number]) - exact) <= len(parts)


@given(mixtures, st.integers(0, 3))
def test_each_block_of_a_mixed_order_has_the_exact_shares(mixture, seed):
    datasets = dataset_numbers(mixture, indices_of_epochs(mixture, 3, seed=seed))
    for begin in range(0, len(datasets), BLOCK):
        end = min(begin + BLOCK, len(datasets))
        counts = np.bincount(datasets[:end], minlength=len(mixture.sizes))
        if end % BLOCK == 0:
            assert (counts == mixture.counts_before(np.array([end]))[0]).all()


@given(mixtures, st.integers(0, 3), st.booleans())
def test_mixed_order_repeats_a_sample_only_after_all_of_its_dataset(mixture, seed, shuffle):
    indices = indices_of_epochs(mixture, 3, seed=seed, shuffle=shuffle)
    datasets = dataset_numbers(mixture, indices)
    for number, (size, start) in enumerate(zip(mixture.sizes, np.cumsum(mixture.sizes) - mixture.sizes, strict=True)):
        indices_of_dataset = indices[datasets == number] - start
        for begin in range(0, len(indices_of_dataset), size):
            indices_of_pass = indices_of_dataset[begin : begin + size]
            assert len(set(indices_of_pass.tolist())) == len(indices_of_pass)
            if not shuffle:
                assert (indices_of_pass == np.arange(len(indices_of_pass))).all()


def test_mixed_order_permutes_datasets_with_more_samples_than_a_table_holds():
    mixture = Mixture((TABLE_MAX + 1, 3 * TABLE_MAX), (1, 1), 2 * TABLE_MAX + 2)
    indices = indices_of_epochs(mixture, 3)
    indices_of_first = indices[indices <= TABLE_MAX]
    first_pass, second_pass = indices_of_first[: TABLE_MAX + 1], indices_of_first[TABLE_MAX + 1 : 2 * TABLE_MAX + 2]
    assert sorted(first_pass.tolist()) == sorted(second_pass.tolist()) == list(range(TABLE_MAX + 1))
    assert (first_pass != second_pass).mean() > 0.99
    assert (np.abs(np.diff(first_pass)) > 1).mean() > 0.99


def test_datasets_of_one_size_have_different_permutations_in_a_mixed_order():
    indices = indices_of_epochs(Mixture((300, 300), (1, 1), BLOCK), 1)
    first_dataset, second_dataset = indices[indices < 300][:300], indices[indices >= 300][:300] - 300
    assert sorted(first_dataset.tolist()) == sorted(second_dataset.tolist())
    assert (first_dataset == second_dataset).mean() < 0.05


def test_mixed_order_shuffles_the_datasets_within_each_block():
    datasets = dataset_numbers(
        mixture := Mixture((10_000, 10_000), (1, 1), 10 * BLOCK), indices_of_epochs(mixture, 1)
    ).reshape(10, BLOCK)
    assert (datasets.sum(axis=1) == BLOCK // 2).all()
    changes = (np.diff(datasets, axis=1) != 0).mean(axis=1)
    assert ((changes > 0.4) & (changes < 0.6)).all()
    for block in range(1, 10):
        assert (datasets[block] != datasets[0]).mean() > 0.4, block


@given(
    mixture=mixtures,
    batch_size=st.integers(1, 40),
    ranks=st.integers(1, 4),
    batches_done=st.integers(0, 20),
    repeats=st.integers(1, 3),
)
def test_indices_of_a_mixture_do_not_depend_on_ranks_or_start(mixture, batch_size, ranks, batches_done, repeats):
    options = {"samples": mixture.length, "mixture": mixture, "shuffle": True, "drop_last": True, "repeats": repeats}

    def indices_by_position(world_size: int, batch_size: int, start: int = 0) -> dict[int, int]:
        rank_options = options | {"world_size": world_size, "batch_size": batch_size}
        shares = [Shares(rank=rank, **rank_options) for rank in range(world_size)]
        batches = [batch for share in shares for batch in share.batches(epoch=2, start=start)]
        return {p: i for each in batches for p, i in zip(each.positions.tolist(), each.indices.tolist(), strict=True)}

    expected = indices_by_position(1, ranks * batch_size)
    start = min(batches_done, mixture.length // (ranks * batch_size)) * ranks * batch_size
    expected_later = {position: index for position, index in expected.items() if position >= start}
    assert indices_by_position(ranks, batch_size, start) == expected_later


def test_mixture_with_repeats_leaves_no_sample_out_between_epochs():
    mixture = Mixture((30, 20), (3, 2), 100)
    shares = Shares(samples=100, batch_size=10, shuffle=True, mixture=mixture, repeats=2)
    indices = np.concatenate([batch.indices for epoch in range(6) for batch in shares.batches(epoch)])
    assert (indices[::2] == indices[1::2]).all()
    first_dataset = indices[::2][indices[::2] < 30]
    for begin in range(0, len(first_dataset) - 30, 30):
        assert sorted(first_dataset[begin : begin + 30].tolist()) == list(range(30))


def test_mixed_order_of_one_position_takes_little_memory():
    mixture = Mixture((6_000_000, 4_000_000, 17), (60, 39, 1), 10_000_017)
    position = np.array([9_876_543])
    MixedOrder(mixture, 0, 0)(position)  # warm up, so that caches and imports are not counted
    tracemalloc.start()
    index = MixedOrder(mixture, 0, 1234)(position)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    nearby_positions = np.arange(9_870_000, 9_880_000)
    assert MixedOrder(mixture, 0, 1234)(nearby_positions)[9_876_543 - nearby_positions[0]] == index[0]


def test_mixed_order_of_many_positions_takes_limited_memory():
    mixture = Mixture((600_000, 400_000), (1, 2), 1_000_000)
    positions = np.arange(0, 1_000_000, 997)
    tracemalloc.start()
    indices = MixedOrder(mixture, 0, 0)(positions)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 << 20
    assert indices[::100].tolist() == [int(MixedOrder(mixture, 0, 0)(position)) for position in positions[::100]]


@pytest.mark.parametrize(("seed", "indices"), [(0, [0, 3, 5, 2, 4, 5]), (1, [3, 2, 0, 1, 3, 1])])
def test_mixed_order_of_a_seed_stays_the_same_between_releases(seed, indices):
    order = MixedOrder(Mixture((4, 2), (2, 1), 6), seed, 0)(np.arange(6)).tolist()
    assert order == indices


def test_positions_out_of_range_of_a_mixture_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^epoch 4611686018427387904 of a Mix of 10 positions extends beyond position 2\*\*62, the last",
    ):
        MixedOrder(Mixture((5, 5), (1, 1), 10), 0, 2**62)
    with pytest.raises(IndexError, match="position 10 is out of range: an order of 10 samples has positions 0 … 9"):
        MixedOrder(Mixture((5, 5), (1, 1), 10), 0, 0)(np.array([10]))


def test_different_mixtures_have_different_names():
    names = {
        Mixture(sizes, parts, length).name
        for sizes in ((5, 5), (5, 6))
        for parts in ((1, 1), (1, 2))
        for length in (10, 11)
    }
    assert len(names) == 8
