"""Batches are divided into launches with so few programs that their number fits into an int32."""

from __future__ import annotations

import pytest

from gpuload.transforms.program.fusing.plan import portions


@pytest.mark.parametrize(
    ("count", "programs", "expected"),
    [(0, 1, []), (5, 1, [5]), (70_000, 1, [65_535, 4465]), (3, 2**30, [1, 1, 1]), (40_000, 65_537, [32_767, 7233])],
)
def test_portions_keep_the_programs_of_a_launch_within_int32(count, programs, expected):
    slices = portions(count, 7, programs=programs)
    assert [rows.stop - rows.start for rows in slices] == expected
    assert max(expected, default=0) * programs < 2**31
    assert [number for rows in slices for number in range(rows.start, rows.stop)] == list(range(7, 7 + count))
