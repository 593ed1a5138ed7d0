"""The benchmark of "auto" runs, and reports each fixed number beside it."""

from __future__ import annotations

import json

import pytest

from benchmarks import autotune
from benchmarks.autotune import Result


@pytest.mark.processes
def test_it_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(autotune, "usable_cpus", lambda: 1)
    monkeypatch.setattr(autotune, "STEP_S", 0.0)
    monkeypatch.setattr(autotune, "PHOTOS", 2)
    path = tmp_path / "autotune.json"
    assert autotune.main(["--rounds", "1", "--batches", "2", "--only", "step", "--json", str(path)]) in (0, 1)
    [(name, found)] = json.loads(path.read_text())["results"].items()
    assert (name, list(found["rates"])) == ("step", ["1", "auto"])
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
    assert "images/s, medians over the rounds" in capsys.readouterr().out


def test_auto_is_held_against_the_best_fixed_number_by_medians():
    result = Result({"1": [1.0, 2.0, 9.0], "2": [3.0, 4.0, 4.0], "auto": [3.0, 3.0, 4.0]})
    assert result.best == "2"
    assert result.ratio == 0.75
    assert result.ratios == [1.0, 0.75, 1.0]
