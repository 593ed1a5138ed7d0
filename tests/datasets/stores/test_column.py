"""What a column of targets holds, for values that no manifest of the other tests has."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuload.datasets.stores.column import encode_targets, stray_cells


@pytest.mark.parametrize(
    ("values", "targets", "names"),
    [
        ([date(2026, 1, 2), date(2025, 1, 2)], [1, 0], ["2025-01-02", "2026-01-02"]),
        ([[1, 2], [1]], [0, 1], ["[1, 2]", "[1]"]),
        ([1, "2", 3.5], [1.0, 2.0, 3.5], None),
        ([Decimal("1.5"), "2"], [1.5, 2.0], None),
        ([1 << 64, 1], [1, 0], ["1", "18446744073709551616"]),
        ([1, "x"], [0, 1], ["1", "x"]),
    ],
)
def test_values_of_several_types(values: list[Any], targets: list[Any], names: list[str] | None) -> None:
    found, classes = encode_targets(values)
    assert (found.tolist(), classes) == (targets, names)
    assert found.dtype in (np.int64, np.float64)


@given(
    st.lists(
        st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False, allow_infinity=False)), min_size=1
    )
)
def test_numbers_written_as_text_are_read_back(values: list[Any]) -> None:
    found, names = encode_targets([repr(value) for value in values])
    assert names is None
    assert found.tolist() == values or found.tolist() == list(map(float, values))


@given(st.lists(st.text(min_size=1), min_size=1))
def test_text_that_is_no_number_comes_back_by_its_place(values: list[str]) -> None:
    found, names = encode_targets([*values, "name"])
    assert names == sorted({*values, "name"})
    assert [names[place] for place in found] == [*values, "name"]


def test_strays_are_at_most_one_in_ten() -> None:
    numbers = [str(n) for n in range(18)]
    assert stray_cells([*numbers, "a", "b"]) == [18, 19]
    assert stray_cells([*numbers[:17], "a", "b"]) == []
    assert stray_cells(["1", "2", "3", "a"]) == [3]
    assert stray_cells(["1", "2", "a"]) == []
