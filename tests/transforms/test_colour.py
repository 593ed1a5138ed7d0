"""Colour transforms, blur and noise: what they refuse, and how their draws are distributed."""

from __future__ import annotations

import numpy as np
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

N = 10_000


def draw(transform, n: int = N, seed: int = 8):
    return T.Chain([transform]).draw(epoch_key(seed, 0), np.arange(n), np.tile([[30, 40]], (n, 1))).records[0]


def test_equivalent_arguments_give_equal_colour_transforms():
    assert T.GaussianBlur(3) == T.GaussianBlur([3]) == T.GaussianBlur((3, 3), [0.1, 2.0])
    assert T.GaussianBlur(3, 2) == T.GaussianBlur(3, (2.0,)) == T.GaussianBlur(3, (2, 2))
    assert T.RandomSolarize(128) == T.RandomSolarize(128.0, 0.5)
    assert repr(T.RandomSolarize(128, 0.2)) == "RandomSolarize(threshold=128.0, p=0.2)"
    assert repr(T.RandomGrayscale(p=0.1)) == "RandomGrayscale()"


def test_gaussian_noise_draws_uniform_keys_of_32_bits():
    record = draw(T.GaussianNoise(0.1, 0.2))
    keys = record.values[:, 0, 2:4]
    assert (keys == np.floor(keys)).all()
    assert keys.min() >= 0
    assert keys.max() < 2**32
    assert len(np.unique(keys, axis=0)) == N
    assert stats.kstest(keys.ravel() / 2**32, "uniform").pvalue > 0.01
    np.testing.assert_allclose(record.values[0, 0, :2], [25.5, 51.0])
