"""Color transforms compare their arguments, and GaussianNoise draws keys."""

from __future__ import annotations

import numpy as np
from scipy import stats
from transforms.drawing import SAMPLES, draw

from gpuload import transforms as T


def test_equivalent_arguments_give_equal_color_transforms():
    assert T.GaussianBlur(3) == T.GaussianBlur([3]) == T.GaussianBlur((3, 3), [0.1, 2.0])
    assert T.GaussianBlur(3, 2) == T.GaussianBlur(3, (2.0,)) == T.GaussianBlur(3, (2, 2))
    assert T.RandomSolarize(128) == T.RandomSolarize(128.0, 0.5)
    assert repr(T.RandomSolarize(128, 0.2)) == "RandomSolarize(threshold=128.0, p=0.2)"
    assert repr(T.RandomGrayscale(p=0.1)) == "RandomGrayscale()"


def test_gaussian_noise_draws_uniform_keys_of_32_bits():
    [record] = draw(T.GaussianNoise(0.1, 0.2)).records
    keys = record.values[:, 0, 2:4]
    assert (keys == np.floor(keys)).all()
    assert keys.min() >= 0
    assert keys.max() < 2**32
    assert len(np.unique(keys, axis=0)) == SAMPLES
    assert stats.kstest(keys.ravel() / 2**32, "uniform").pvalue > 0.01
    np.testing.assert_allclose(record.values[0, 0, :2], [0.1 * 255, 0.2 * 255])
