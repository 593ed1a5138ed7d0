"""Matrices of test cases: a covering array in `make test`, the full product in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from operator import getitem
from typing import Any

import pytest

__all__ = ["covering", "matrix"]


def matrix(*, strength: int = 2, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over the product of its arguments' values.

    A covering array of the rows always runs: every combination of values of `strength` different arguments occurs in it
    at least once. All other rows are marked `exhaustive`. With strength 2, each pair of values occurs; with 1, each
    value occurs.
    """
    values = {name: list(axis) for name, axis in axes.items()}
    covering_rows = covering([len(axis) for axis in values.values()], strength)
    rows = [
        pytest.param(
            *(axis[index] for axis, index in zip(values.values(), indices, strict=True)),
            marks=() if indices in covering_rows else pytest.mark.exhaustive,
        )
        for indices in product(*(range(len(axis)) for axis in values.values()))
    ]
    return pytest.mark.parametrize(list(values), rows)


def covering(sizes: list[int], strength: int) -> set[tuple[int, ...]]:
    """Choose a few rows of a product that contain every combination of values of `strength` axes. The choice is
    deterministic.

    Rows are chosen greedily: the next row has the most combinations not covered yet, and among such rows the values
    used least so far.
    """
    rows = list(product(*map(range, sizes)))
    axis_groups = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    groups_by_row = {row: {(axes, tuple(row[axis] for axis in axes)) for axes in axis_groups} for row in rows}
    uncovered = set().union(*groups_by_row.values())
    use_counts = [[0] * size for size in sizes]
    chosen: set[tuple[int, ...]] = set()
    while uncovered:
        row = max(rows, key=lambda row: (len(groups_by_row[row] & uncovered), -sum(map(getitem, use_counts, row))))
        chosen.add(row)
        uncovered -= groups_by_row[row]
        for axis, value in enumerate(row):
            use_counts[axis][value] += 1
    return chosen
