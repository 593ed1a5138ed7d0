"""The benchmark of transforms of the user's own runs, and has a line for each case."""

from __future__ import annotations

import pytest

from benchmarks.augmentation.own import CASES, main


@pytest.mark.slow
def test_it_runs(capsys):
    assert main(["--rounds", "1", "--batch-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CASES)
    assert all(float(line.split()[-1]) > 0 for line in lines[1:])
