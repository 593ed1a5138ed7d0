"""Numbers of non-uniform distributions, compared with scipy's distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count, gamma_count, log_gamma, normal
from gpuload.rng.philox import epoch_key, uniforms

SAMPLES = 40_000
SHAPES = (0.1, 0.2, 0.5, 0.8, 0.999, 1.0, 1.5, 3.0, 20.0)


def uniforms_of_lane(count: int, lane: int = 0) -> np.ndarray:
    return uniforms(epoch_key(5, 0), np.arange(SAMPLES), lane, count)


def test_normal_is_distributed_as_scipys_and_uncorrelated():
    drawn = normal(uniforms_of_lane(4))
    assert drawn.shape == (SAMPLES, 4)
    for column in drawn.T:
        assert stats.kstest(column, "norm").pvalue > 0.01
    assert abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.02
    assert abs(np.corrcoef(drawn.T**2) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_log_gamma_is_distributed_as_scipys(shape):
    logarithms = log_gamma(uniforms_of_lane(gamma_count(shape), lane=1), shape)
    assert stats.kstest(np.exp(logarithms), stats.gamma(shape).cdf).pvalue > 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_beta_of_equal_shapes_is_distributed_as_scipys(shape):
    drawn = beta(uniforms_of_lane(beta_count(shape, shape), lane=2), shape, shape)
    lower = drawn[drawn < 0.5]  # near 1, float64 is too coarse for the values of a small shape
    assert stats.binomtest(len(lower), SAMPLES).pvalue > 0.01
    assert stats.kstest(lower, lambda x: 2 * stats.beta(shape, shape).cdf(x)).pvalue > 0.01


@pytest.mark.parametrize(("a", "b"), [(1.0, 3.0), (0.4, 2.0), (5.0, 0.3)])
def test_beta_of_different_shapes_is_distributed_as_scipys(a, b):
    drawn = beta(uniforms_of_lane(beta_count(a, b), lane=3), a, b)
    assert stats.kstest(drawn, stats.beta(a, b).cdf).pvalue > 0.01


def test_beta_of_a_tiny_shape_is_0_or_1():
    drawn = beta(uniforms_of_lane(beta_count(1e-4, 1e-4)), 1e-4, 1e-4)
    assert np.isfinite(drawn).all()
    assert abs((drawn > 0.5).mean() - 0.5) < 0.02
    assert (np.minimum(drawn, 1 - drawn) < 1e-9).mean() > 0.99


@pytest.mark.parametrize("shapes", [(1.0, 1.0, 1.0), (0.3, 0.3, 0.3, 0.3), (0.5, 1.0, 4.0)])
def test_dirichlet_has_scipys_marginals_and_covariance(shapes):
    drawn = dirichlet(uniforms_of_lane(dirichlet_count(shapes), lane=4), shapes)
    assert drawn.shape == (SAMPLES, len(shapes))
    assert np.allclose(drawn.sum(axis=1), 1)
    for number, shape in enumerate(shapes):
        marginal = stats.beta(shape, sum(shapes) - shape)
        assert stats.kstest(drawn[:, number], marginal.cdf).pvalue > 0.01
    expected = stats.dirichlet(shapes).cov()
    assert np.allclose(np.cov(drawn.T), expected, atol=0.003)


def test_dirichlet_of_a_row_depends_only_on_its_uniforms():
    rows = uniforms_of_lane(dirichlet_count((0.5, 2.0)))
    assert np.array_equal(dirichlet(rows[7:9], (0.5, 2.0)), dirichlet(rows, (0.5, 2.0))[7:9])
