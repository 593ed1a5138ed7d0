"""Matrices of test cases: a covering array in `make test`, the full product in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
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
    always = covering([len(axis) for axis in values.values()], strength)
    rows = [
        pytest.param(
            *(axis[at] for axis, at in zip(values.values(), places, strict=True)),
            marks=() if places in always else pytest.mark.exhaustive,
        )
        for places in product(*(range(len(axis)) for axis in values.values()))
    ]
    return pytest.mark.parametrize(list(values), rows)


def covering(sizes: list[int], strength: int) -> set[tuple[int, ...]]:
    """Choose a few rows of a product that contain every combination of values of `strength` axes. The choice is
    deterministic.

    Rows are chosen greedily: the next row has the most combinations not covered yet, and among such rows the values
    used least so far.
    """
    rows = list(product(*map(range, sizes)))
    together = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    meetings = {row: {(axes, tuple(row[axis] for axis in axes)) for axes in together} for row in rows}
    left = set().union(*meetings.values())
    used = [[0] * size for size in sizes]
    chosen: set[tuple[int, ...]] = set()
    while left:
        row = max(
            rows, key=lambda row: (len(meetings[row] & left), -sum(used[axis][at] for axis, at in enumerate(row)))
        )
        chosen.add(row)
        left -= meetings[row]
        for axis, at in enumerate(row):
            used[axis][at] += 1
    return chosen
