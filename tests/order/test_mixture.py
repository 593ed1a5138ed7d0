"""The order of a `Mix`: exact shares of each run of samples, of each batch or of the batches, and all samples of a
dataset before any is repeated; from any position and on any number of ranks."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuload as gl
from gpuload import transforms as T
from gpuload.order.mixture import BLOCK, MAX_COLUMNS, MixedOrder, Mixture
from gpuload.order.options import OrderOptions
from gpuload.order.permutation import TABLE_MAX
from gpuload.order.schedule import shares_of
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
    for end in range(BLOCK, len(datasets) + 1, BLOCK):
        counts = np.bincount(datasets[:end], minlength=len(mixture.sizes))
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
    mixture = Mixture((10_000, 10_000), (1, 1), 10 * BLOCK)
    datasets = dataset_numbers(mixture, indices_of_epochs(mixture, 1)).reshape(10, BLOCK)
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


def test_mixture_with_repeats_drops_no_sample_between_epochs():
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


# -- shares of batches, and weights by epoch ---------------------------------------------------------------------------


def make_mix(sizes: list[int], weights: Any, **options: Any) -> gl.Mix:
    return gl.Mix([range(size) for size in sizes], weights, **options)


def run_ranks(
    mix: gl.Mix, batch_size: int, ranks: int = 1, epoch: int = 0, start: int = 0, **options: Any
) -> list[list[np.ndarray]]:
    """Return the indices of an epoch's batches, as [step][rank]."""
    ranks_batches = []
    for rank in range(ranks):
        shares = shares_of(OrderOptions(dataset=mix, batch_size=batch_size, rank=rank, world_size=ranks, **options))
        ranks_batches.append([batch.indices for batch in shares.batches(epoch, start)])
        assert len(ranks_batches[-1]) == shares.steps(start)
    return [list(step) for step in zip(*ranks_batches, strict=True)]


def join(steps: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(indices for step in steps for indices in step)])


def assert_each_pass_has_every_sample_once(mix: gl.Mix, indices: np.ndarray) -> None:
    for number, size in enumerate(mix.sizes):
        samples = indices[mix.source_of(indices) == number] - (mix.cumulative_sizes[number] - size)
        for begin in range(0, len(samples) - size + 1, size):
            assert sorted(samples[begin : begin + size].tolist()) == list(range(size))


WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)
EPOCHS = {"weights": WEIGHTS, "batch": st.integers(1, 24), "ranks": st.integers(1, 3), "length": st.integers(1, 700)}


@given(**EPOCHS)
def test_each_batch_has_its_shares_and_sums_of_batches_differ_from_theirs_by_less_than_a_sample(
    weights, batch, ranks, length
):
    mix = make_mix([100] * len(weights), weights, length=length + batch * ranks, per="batch")
    sums = np.zeros(len(weights), np.int64)
    for step, indices_of_ranks in enumerate(run_ranks(mix, batch, ranks, drop_last=True)):
        sources = [mix.source_of(indices) for indices in indices_of_ranks]
        # All ranks have the same shares in a step.
        (counts,) = {tuple(np.bincount(rank, minlength=len(weights)).tolist()) for rank in sources}
        sums += counts
        for count, count_sum, weight in zip(counts, sums.tolist(), weights, strict=True):
            assert count in (batch * weight // sum(weights), -(-batch * weight // sum(weights)))
            assert abs(count_sum * sum(weights) - (step + 1) * batch * weight) < sum(weights)


def test_a_tenth_of_a_batch_of_16_is_one_or_two_samples():
    mix = make_mix([1000, 1000], [0.9, 0.1], length=1600, per="batch")
    counts = [int((indices >= 1000).sum()) for (indices,) in run_ranks(mix, 16)]
    assert set(counts) == {1, 2}
    assert [sum(counts[start : start + 5]) for start in range(0, 100, 5)] == [8] * 20


@given(**EPOCHS)
def test_each_batch_has_samples_of_one_dataset_and_an_epoch_has_the_shares_of_batches(weights, batch, ranks, length):
    mix = make_mix([100] * len(weights), weights, length=length, per="dataset")
    counts = [0] * len(weights)
    for step, indices_of_ranks in enumerate(run_ranks(mix, batch, ranks)):
        (dataset,) = set(mix.source_of(np.concatenate(indices_of_ranks)).tolist())
        counts[dataset] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count * sum(weights) - (step + 1) * weight) < sum(weights)


def test_the_dataset_of_the_first_batch_depends_on_the_seed():
    mix = make_mix([100, 100], [1, 1], length=80, per="dataset")
    sequences = {
        tuple(int(mix.source_of(indices)[0]) for (indices,) in run_ranks(mix, 8, seed=seed)) for seed in range(20)
    }
    assert sequences == {(0, 1) * 5, (1, 0) * 5}


@given(**EPOCHS, per=st.sampled_from(["batch", "dataset"]), drop_last=st.booleans(), shuffle=st.booleans())
def test_each_dataset_continues_over_all_ranks_and_epochs(weights, batch, ranks, length, per, drop_last, shuffle):
    mix = make_mix([7 * (number + 1) for number in range(len(weights))], weights, length=length, per=per)
    options: dict[str, Any] = {"drop_last": drop_last, "shuffle": shuffle}
    epochs = [join(run_ranks(mix, batch, ranks, epoch, **options)) for epoch in range(3)]
    full = length - length % (batch * ranks)
    assert {len(epoch) for epoch in epochs} == {full if drop_last else full + -(-(length - full) // ranks) * ranks}
    # The ranks' parts of a step follow each other in each dataset's order.
    assert_each_pass_has_every_sample_once(mix, np.concatenate(epochs))


@pytest.mark.parametrize("per", ["batch", "dataset"])
@pytest.mark.parametrize(("uneven", "last"), [("pad", 5), ("drop", 4)])  # of 14 samples for 3 ranks
def test_last_batch_with_shares_has_new_samples_on_each_rank(per, uneven, last):
    mix = make_mix([500, 500], [2, 1], length=3 * 8 * 4 + 14, per=per)
    steps = run_ranks(mix, 8, 3, uneven=uneven, shuffle=True)
    assert [[len(indices) for indices in step] for step in steps] == [[8] * 3] * 4 + [[last] * 3]
    assert len(set(join(steps).tolist())) == len(join(steps))


@given(**EPOCHS, per=st.sampled_from(["batch", "dataset"]), shuffle=st.booleans())
def test_batches_with_shares_from_the_middle_are_those_of_the_entire_epoch(weights, batch, ranks, length, per, shuffle):
    mix = make_mix([20] * len(weights), weights, length=length, per=per)
    steps = run_ranks(mix, batch, ranks, 2, shuffle=shuffle)
    for start in {len(steps) // 2, len(steps) - 1}:
        later_steps = run_ranks(mix, batch, ranks, 2, start * batch * ranks, shuffle=shuffle)
        assert len(later_steps) == len(steps[start:])
        assert np.array_equal(join(later_steps), join(steps[start:]))


@pytest.mark.parametrize("batch", [MAX_COLUMNS, MAX_COLUMNS + 1])
def test_samples_of_a_batch_with_shares_are_shuffled_whatever_its_size(batch):
    mix = make_mix([10_000, 10_000], [1, 1], length=batch, per="batch")
    indices = join(run_ranks(mix, batch, shuffle=True))
    assert len(set(indices.tolist())) == batch
    assert 0.4 < (np.diff(mix.source_of(indices)) != 0).mean() < 0.6


@pytest.mark.parametrize("per", ["sample", "batch", "dataset"])
@pytest.mark.parametrize("is_function", [False, True])
def test_weights_by_epoch_change_the_shares_and_each_dataset_continues(per, is_function):
    values = {0: [1, 0], 1: [3, 1], 3: [1, 1]}
    by_epoch = (lambda epoch: values[max(first for first in values if first <= epoch)]) if is_function else values
    mix = make_mix([700, 300], T.by_epoch(by_epoch), length=1280, per=per)
    epochs = [join(run_ranks(mix, 20, 2, epoch, shuffle=True)) for epoch in range(5)]
    assert [int((indices >= 700).sum()) for indices in epochs] == [0, 320, 320, 640, 640]
    assert_each_pass_has_every_sample_once(mix, np.concatenate(epochs))


def test_weights_by_epoch_with_repeats_drop_no_sample_between_epochs():
    mix = make_mix([30, 20], T.by_epoch({0: [3, 2]}), length=100)
    indices = np.concatenate([join(run_ranks(mix, 10, 1, epoch, shuffle=True, repeats=2)) for epoch in range(6)])
    assert (indices[::2] == indices[1::2]).all()
    assert_each_pass_has_every_sample_once(mix, indices[::2])


def test_orders_with_different_shares_have_different_names():
    weights = [[1, 2], T.by_epoch({0: [1, 2]}), T.by_epoch({0: [1, 2], 3: [1, 1]})]
    names = {
        shares_of(OrderOptions(dataset=make_mix([5, 5], each, per=per))).name
        for each in weights
        for per in ("sample", "batch", "dataset")
    }
    assert len(names) == 9


def test_ranks_whose_batches_have_different_shares_are_refused(group):
    def begin(rank: int, weights: list[int]) -> None:
        mix = make_mix([50, 50], weights, length=64, per="batch")
        with gl.Loader(mix, 8, True, num_workers=0, device="cpu", rank=rank, world_size=2) as loader:
            object.__setattr__(loader._options.order, "caller", "train.py:7, call 1")  # the same on all ranks
            iter(loader)

    begin(1, [1, 2])
    with pytest.raises(ValueError, match=r"seed=0 and mixed-\w+-shuffled on rank 1, and seed=0 and mixed-"):
        begin(0, [1, 3])
