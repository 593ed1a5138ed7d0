"""Statistical tests: whether two samples of several columns have one joint distribution, and whether columns are
independent."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats

__all__ = ["MIN_P_VALUE", "assert_same_distribution", "independence_p_value"]

# The share of correct samples that would fail; because seeds are fixed, the tests do not fail by chance.
MIN_P_VALUE = 1e-4


def assert_same_distribution(drawn: dict[str, np.ndarray], simulated: dict[str, np.ndarray]) -> None:
    """Compare each column by a two-sample Kolmogorov–Smirnov test, and the dependence of any two columns by the sums
    and differences of their ranks."""
    assert list(drawn) == list(simulated)
    pairs = {name: (drawn[name], simulated[name]) for name in drawn}
    ranks = {name: _ranks(*pair) for name, pair in pairs.items()}
    for name, other_name in itertools.combinations(drawn, 2):
        for sign, operator in ((1, "plus"), (-1, "minus")):
            pairs[f"{name} {operator} {other_name}"] = tuple(
                first + sign * second for first, second in zip(ranks[name], ranks[other_name], strict=True)
            )
    for name, (left, right) in pairs.items():
        p_value = stats.ks_2samp(left, right, method="asymp").pvalue
        assert p_value > MIN_P_VALUE / len(pairs), f"{name}: p = {p_value:.2g}"


def _ranks(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks of both samples in their union, from 0 to 1; equal numbers have equal ranks."""
    both = np.concatenate([first, second]).astype(np.float64)
    ranks = stats.rankdata(np.round(both, 9)) / len(both)
    return ranks[: len(first)], ranks[len(first) :]


def independence_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Return the p-value of two columns being independent, from a table of 8 × 8 ranks."""
    octiles = [
        np.minimum(stats.rankdata(np.ravel(column), "ordinal") * 8 // np.size(column), 7) for column in (first, second)
    ]
    table = np.zeros((8, 8))
    np.add.at(table, (octiles[0].astype(int), octiles[1].astype(int)), 1)
    return float(stats.chi2_contingency(table).pvalue)
