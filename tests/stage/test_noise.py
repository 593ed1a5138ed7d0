"""Normal numbers have the normal distribution, and the same bits from each function that makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from gpuload.stage.noise import batch_normals, normals, quantiles

COUNT = 400_000


@pytest.mark.parametrize("key_words", [(0, 0), (1, 2), (0xFFFFFFFF, 0x80000000)])
def test_normals_follow_the_standard_normal_distribution(key_words):
    numbers = normals(key_words, COUNT)
    assert numbers.dtype == np.float32
    assert stats.kstest(numbers, "norm").pvalue > 0.01
    # The powers of a normal number, their means and their variances; means are tested within four standard errors.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (variance / COUNT) ** 0.5
        assert abs((numbers.astype(np.float64) ** power).mean() - moment) < 4 * error, power


def test_normals_beyond_three_to_four_and_a_half_sigma_are_as_frequent_as_expected():
    numbers = np.concatenate([normals((7, number), COUNT) for number in range(8)])
    for limit in (3, 4, 4.5):
        beyond = int((abs(numbers) > limit).sum())
        assert stats.binomtest(beyond, len(numbers), 2 * stats.norm.sf(limit)).pvalue > 0.01, limit


def test_normals_are_uncorrelated_with_neighbors_and_with_the_normals_of_another_key():
    numbers = normals((3, 4), COUNT)
    for lag in (1, 2, 3, 7, 8):
        for series, delayed in ((numbers, numbers), (numbers**2, numbers**2), (numbers, abs(numbers))):
            assert abs(np.corrcoef(series[lag:], delayed[:-lag])[0, 1]) < 4 / COUNT**0.5, lag
    assert abs(np.corrcoef(numbers, normals((3, 5), COUNT))[0, 1]) < 4 / COUNT**0.5


def test_quantiles_increase_and_have_mean_zero_and_variance_one():
    table = quantiles().astype(np.float64)
    assert table.mean() == 0
    assert abs(table.var() - 1) < 1e-7
    assert (np.diff(table) > 0).all()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_batch_normals_is_bit_identical_to_normals(count):
    keys = [(0, 0), (5, 9), (0xFFFFFFFF, 0xFFFFFFFF), (1 << 31, 3)]
    batch = batch_normals(torch.tensor(keys, dtype=torch.float64), count)
    assert batch.shape == (4, count)
    for row, key_words in enumerate(keys):
        np.testing.assert_array_equal(batch[row].numpy(), normals(key_words, count))
        np.testing.assert_array_equal(normals(key_words, 1000)[:count], normals(key_words, count))
