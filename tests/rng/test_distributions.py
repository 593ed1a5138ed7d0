"""Numbers of other distributions are distributed as scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count, gamma_count, log_gamma, normal
from gpuload.rng.philox import epoch_key, uniforms

N = 40_000
SHAPES = (0.1, 0.2, 0.5, 0.8, 0.999, 1.0, 1.5, 3.0, 20.0)


def numbers(count: int, lane: int = 0) -> np.ndarray:
    return uniforms(epoch_key(5, 0), np.arange(N), lane, count)


def test_normal():
    found = normal(numbers(4))
    assert found.shape == (N, 4)
    for column in found.T:
        assert stats.kstest(column, "norm").pvalue > 0.01
    assert abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.02
    assert abs(np.corrcoef(found.T**2) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_gamma(shape):
    found = log_gamma(numbers(gamma_count(shape), lane=1), shape)
    assert stats.kstest(np.exp(found), stats.gamma(shape).cdf).pvalue > 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_beta_of_equal_shapes(shape):
    found = beta(numbers(beta_count(shape, shape), lane=2), shape, shape)
    lower = found[found < 0.5]  # near 1, float64 has no room for what a small shape has there
    assert stats.binomtest(len(lower), N).pvalue > 0.01
    assert stats.kstest(lower, lambda x: 2 * stats.beta(shape, shape).cdf(x)).pvalue > 0.01


@pytest.mark.parametrize(("a", "b"), [(1.0, 3.0), (0.4, 2.0), (5.0, 0.3)])
def test_beta(a, b):
    found = beta(numbers(beta_count(a, b), lane=3), a, b)
    assert stats.kstest(found, stats.beta(a, b).cdf).pvalue > 0.01


def test_beta_of_a_tiny_shape_is_0_or_1():
    found = beta(numbers(beta_count(1e-4, 1e-4)), 1e-4, 1e-4)
    assert np.isfinite(found).all()
    assert abs((found > 0.5).mean() - 0.5) < 0.02
    assert (np.minimum(found, 1 - found) < 1e-9).mean() > 0.99


@pytest.mark.parametrize("shapes", [(1.0, 1.0, 1.0), (0.3, 0.3, 0.3, 0.3), (0.5, 1.0, 4.0)])
def test_dirichlet(shapes):
    found = dirichlet(numbers(dirichlet_count(shapes), lane=4), shapes)
    assert found.shape == (N, len(shapes))
    assert np.allclose(found.sum(axis=1), 1)
    for number, shape in enumerate(shapes):
        marginal = stats.beta(shape, sum(shapes) - shape)
        assert stats.kstest(found[:, number], marginal.cdf).pvalue > 0.01
    expected = stats.dirichlet(shapes).cov()
    assert np.allclose(np.cov(found.T), expected, atol=0.003)


def test_each_number_hangs_on_its_own_uniforms():
    some = numbers(dirichlet_count((0.5, 2.0)))
    assert np.array_equal(dirichlet(some[7:9], (0.5, 2.0)), dirichlet(some, (0.5, 2.0))[7:9])
