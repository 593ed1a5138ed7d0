"""The benchmark of the main thread's time runs, and divides all of it."""

from __future__ import annotations

import json

import lacking
import pytest
from originals import torchvision

lacking.require("triton")
torchvision()

from benchmarks import host  # noqa: E402


@pytest.mark.slow
@pytest.mark.interpreter
def test_it_runs(tmp_path, capsys):
    path = tmp_path / "host.json"
    assert host.main(["--batches", "1", "--files", str(host.MIN_BATCHES * host.BATCH), "--json", str(path)]) in (0, 1)
    found = json.loads(path.read_text())["results"]
    assert list(found) == list(host.RECIPES)
    assert "host ms per batch" in capsys.readouterr().out
    for result in found.values():
        assert result["host_ms"] > 0
        # Workers draw, and what they tell may have been read in the `next()` before the one that is measured.
        usual = set(host.NAMES) - {"draws", "descriptions"}
        assert [part for part in usual if result["parts_ms"][part] <= 0] == []
        assert result["worker_us_per_image"] > 0


def test_what_is_timed_within_counts_once():
    clocks = host._Clocks()

    def burn() -> None:
        sum(range(200_000))

    inner = clocks.wrap(burn, "draws")
    outer = clocks.wrap(lambda: (inner(), burn()), "jobs")
    clocks.take()
    outer()
    seconds = clocks.take()
    assert 0.2 < seconds["draws"] / seconds["jobs"] < 5
    assert seconds[host.OTHER] < seconds["draws"]
