"""The order of an epoch: a permutation that depends on seed and epoch alone, and looks random."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers.patterns import exactly
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.order import permutation as permutation_module
from gpuload.order.permutation import LENGTH_MAX, TABLE_MAX, Sequential, Shuffle
from gpuload.rng.philox import Key, epoch_key

KEYS = st.builds(Key, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


def is_permutation(indices: np.ndarray, n: int) -> bool:
    return indices.shape == (n,) and bool((np.bincount(indices, minlength=n) == 1).all())


def excess(counts: np.ndarray, expected: np.ndarray | float, freedom: int) -> float:
    """Return how many standard deviations the chi-squared statistic of `counts` lies above its mean."""
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return (chi2 - freedom) / (2 * freedom) ** 0.5


@pytest.mark.slow
def test_shuffle_is_a_permutation_for_every_n_up_to_1_000_and_every_ninth_up_to_10_000() -> None:
    wrong = [
        n
        for n in (*range(1, 1_001), *range(1_001, 10_001, 9))
        if not is_permutation(Shuffle(n, epoch_key(n, 0))(np.arange(n)), n)
    ]
    assert wrong == []


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 999_983, 2**20 + 1])
def test_shuffle_is_a_permutation_for_larger_n(n: int) -> None:
    assert is_permutation(Shuffle(n, epoch_key(1, 2))(np.arange(n)), n)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(n=st.one_of(st.integers(1, 10**12), st.integers(TABLE_MAX - 3, TABLE_MAX + 300)), key=KEYS, data=st.data())
def test_shuffle_of_any_length_gives_distinct_indices_within_its_range(n: int, key: Key, data: st.DataObject) -> None:
    shuffle = Shuffle(n, key)
    drawn_positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50))
    positions = np.unique([0, n - 1, *drawn_positions])
    indices = shuffle(positions)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < n
    assert len(np.unique(indices)) == len(positions)


@pytest.mark.parametrize("n", [10**6 + 3, 10**9, 10**12, LENGTH_MAX])
def test_shuffle_of_many_positions_of_large_orders_gives_distinct_indices(n: int) -> None:
    shuffle = Shuffle(n, epoch_key(0, 0))
    positions = np.unique(np.random.default_rng(0).integers(0, n, 40_000))
    indices = shuffle(positions)
    assert len(np.unique(indices)) == len(positions)
    assert 0 <= indices.min() <= indices.max() < n


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 10**7), key=KEYS, shape=st.sampled_from([(), (0,), (1,), (7, 3), (40_000,)]))
def test_index_of_a_shuffle_does_not_depend_on_other_positions(n: int, key: Key, shape: tuple[int, ...]) -> None:
    positions = np.random.default_rng(n).integers(0, n, shape)
    indices = Shuffle(n, key)(positions)
    assert indices.shape == shape
    for number in [0, positions.size // 2, positions.size - 1] if positions.size else []:
        assert Shuffle(n, key)(positions.reshape(-1)[number : number + 1])[0] == indices.reshape(-1)[number]


@pytest.mark.parametrize("n", [100, TABLE_MAX, TABLE_MAX + 1, 10**9])
def test_shuffle_depends_only_on_seed_and_epoch(n: int) -> None:
    positions = np.arange(100)
    orders = {(seed, epoch): Shuffle(n, epoch_key(seed, epoch))(positions) for seed in range(6) for epoch in range(6)}
    assert len({tuple(indices) for indices in orders.values()}) == 36
    for (seed, epoch), indices in orders.items():
        assert (Shuffle(n, epoch_key(seed, epoch))(positions) == indices).all()


def test_changing_a_result_of_an_order_changes_neither_its_argument_nor_the_order() -> None:
    for order in (Shuffle(10, Key(1, 2)), Shuffle(5000, Key(1, 2)), Sequential(10)):
        positions = np.arange(10)
        indices = order(positions)
        expected = indices.copy()
        indices[:] = -1
        assert positions.tolist() == list(range(10))
        assert (order(positions) == expected).all()


def test_shuffle_of_a_seed_stays_the_same_between_releases() -> None:
    # If these change, saved positions lose their meaning, which takes a new major version.
    assert Shuffle(10, epoch_key(0, 0))(np.arange(10)).tolist() == [3, 2, 4, 1, 8, 9, 5, 0, 6, 7]
    assert Shuffle(10**12, epoch_key(0, 0))(np.arange(3)).tolist() == [531585333833, 602732596133, 765365490801]


# -- randomness -------------------------------------------------------------------------------------------------------


def epochs(n: int, count: int) -> Iterator[np.ndarray]:
    positions = np.arange(n)
    for epoch in range(count):
        yield Shuffle(n, epoch_key(2, epoch))(positions)


@pytest.mark.parametrize(("n", "count"), [(2, 1500), (3, 1500), (5, 1500), (16, 1500), (97, 1000), (256, 1000)])
def test_every_index_is_equally_likely_at_every_position_of_a_small_order(n: int, count: int) -> None:
    landed = np.zeros((n, n))
    for indices in epochs(n, count):
        landed[np.arange(n), indices] += 1
    assert excess(landed, count / n, (n - 1) ** 2) < 6
    chi2_by_position = ((landed - count / n) ** 2 / (count / n)).sum(1)
    assert chi2_by_position.max() < (n - 1) + 8 * (2 * (n - 1)) ** 0.5 + 10  # mean, 8 standard deviations, and a margin


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 5])
def test_every_permutation_of_a_tiny_order_is_equally_likely(n: int) -> None:
    count = 120 * 20  # 20 orders for each of the 5! permutations
    codes = [int("".join(map(str, indices))) for indices in epochs(n, count)]
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == (24 if n == 4 else 120)
    assert excess(counts, count / len(counts), len(counts) - 1) < 6


@pytest.mark.parametrize("n", [TABLE_MAX, TABLE_MAX + 1, 5000, 2**13, 2**13 + 1])
def test_indices_land_evenly_just_below_and_above_the_table(n: int) -> None:
    count, cells = 200, 61
    landed = np.zeros((n, cells))
    for indices in epochs(n, count):
        landed[np.arange(n), indices * cells // n] += 1
    share = np.bincount(np.arange(n) * cells // n) / n
    assert excess(landed, count * share, n * (cells - 1)) < 6
    chi2_by_position = ((landed - count * share) ** 2 / (count * share)).sum(1)
    assert chi2_by_position.max() < cells - 1 + 9 * (2 * (cells - 1)) ** 0.5  # mean and 9 standard deviations


def skew_of_pairs(orders: Iterator[np.ndarray], n: int, distance: int) -> float:
    """Return the `excess` of the differences, modulo n, of indices whose positions are `distance` apart."""
    counts = np.zeros(n)
    for indices in orders:
        counts += np.bincount((np.roll(indices, -distance) - indices) % n, minlength=n)
    assert counts[0] == 0
    return excess(counts[1:], counts.sum() / (n - 1), n - 2)


@pytest.mark.parametrize("n", [16, 97, TABLE_MAX, TABLE_MAX + 1, 5000, 2**13 + 1])
@pytest.mark.parametrize("distance", [1, 2])
def test_indices_of_adjacent_positions_are_unrelated(n: int, distance: int) -> None:
    assert abs(skew_of_pairs(epochs(n, max(120, 10_000 // n)), n, distance)) < 6


@pytest.mark.parametrize("distance", [64, 65])
def test_indices_of_positions_that_share_a_network_coordinate_are_unrelated(distance: int) -> None:
    assert abs(skew_of_pairs(epochs(4500, 200), 4500, distance)) < 6


@pytest.mark.parametrize("distance", [1, 64])
def test_skew_of_pairs_detects_a_network_with_too_few_rounds(monkeypatch: pytest.MonkeyPatch, distance: int) -> None:
    monkeypatch.setattr(permutation_module, "ROUNDS", 3)
    assert skew_of_pairs(epochs(4500, 200), 4500, distance) > 20


def test_orders_of_successive_epochs_are_unrelated() -> None:
    n = 4097
    counts = np.zeros(n)
    previous = np.argsort(Shuffle(n, epoch_key(2, 0))(np.arange(n)))
    for epoch in range(1, 150):
        current = np.argsort(Shuffle(n, epoch_key(2, epoch))(np.arange(n)))
        counts += np.bincount((current - previous) % n, minlength=n)
        previous = current
    assert abs(excess(counts, counts.mean(), n - 1)) < 6


def test_a_large_order_fills_its_range_evenly() -> None:
    n, cells = 10**12, 1000
    indices = Shuffle(n, epoch_key(0, 0))(np.arange(200_000))
    assert abs(excess(np.bincount(indices * cells // n, minlength=cells), 200.0, cells - 1)) < 6
    assert abs(excess(np.bincount(indices % cells, minlength=cells), 200.0, cells - 1)) < 6
    pairs = (indices[:-1] * 30 // n) * 30 + indices[1:] * 30 // n  # in 30 × 30 cells
    assert abs(excess(np.bincount(pairs, minlength=900), 199_999 / 900, 899)) < 6


def test_sequential_returns_its_positions_as_int64() -> None:
    sequential = Sequential(10)
    assert sequential(np.array([9, 0, 3])).tolist() == [9, 0, 3]
    assert sequential(np.array([9, 0, 3], np.uint8)).dtype == np.int64


@pytest.mark.parametrize("make", [Sequential, lambda n: Shuffle(n, Key(0, 0))])
class TestErrors:
    @pytest.mark.parametrize("n", [10, 5000])
    @pytest.mark.parametrize("is_beyond_the_end", [True, False])
    def test_position_out_of_range_raises_index_error(self, make: Callable, n: int, is_beyond_the_end: bool) -> None:
        position = n if is_beyond_the_end else -1
        text = f"position {position} is out of range: an order of {n} samples has positions 0 … {n - 1}"
        with pytest.raises(IndexError, match=exactly(text)):
            make(n)(np.array([0, position, 1]))

    def test_order_of_no_samples_has_no_positions(self, make: Callable) -> None:
        assert make(0)(np.arange(0)).shape == (0,)
        text = "position 0 is out of range: an order of 0 samples has no positions"
        with pytest.raises(IndexError, match=exactly(text)):
            make(0)(np.array([0]))

    def test_positions_that_are_not_integers_raise_type_error(self, make: Callable) -> None:
        with pytest.raises(TypeError, match=exactly("positions must be integers, got an array of float64")):
            make(7)(np.array([1.0]))

    def test_invalid_lengths_raise(self, make: Callable) -> None:
        with pytest.raises(ValueError, match=r"^the number of samples must be at least 0 and at most \d+, got -1$"):
            make(-1)
        with pytest.raises(ValueError, match=r"must be at least 0 and at most"):
            make(LENGTH_MAX + 1)
        with pytest.raises(TypeError, match=exactly("the number of samples must be an integer, got 2.0 (float)")):
            make(2.0)
