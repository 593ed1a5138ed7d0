"""The benchmark of the user's own transforms prints a line for each case."""

from __future__ import annotations

import pytest

from benchmarks.augmentation.own import CASES, main


@pytest.mark.slow
def test_own_transforms_benchmark_prints_a_line_per_case(capsys):
    assert main(["--rounds", "1", "--batch-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[-len(CASES) :]
    assert [row.split("  ")[0] for row in rows] == list(CASES)
    assert all(float(row.split()[-1]) > 0 for row in rows)
