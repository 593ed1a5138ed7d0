"""How a batch is divided into launches."""

from __future__ import annotations

import pytest

from gpuload.transforms.program.fusing.plan import portions


@pytest.mark.parametrize(
    ("count", "programs", "expected"),
    [(0, 1, []), (5, 1, [5]), (70_000, 1, [65_535, 4465]), (3, 2**30, [1, 1, 1]), (40_000, 65_537, [32_767, 7233])],
)
def test_no_launch_has_more_programs_than_an_int32_counts(count, programs, expected):
    found = portions(count, 7, programs=programs)
    assert [own.stop - own.start for own in found] == expected
    assert all((own.stop - own.start) * programs < 2**31 for own in found)
    assert [number for own in found for number in range(own.start, own.stop)] == list(range(7, 7 + count))
