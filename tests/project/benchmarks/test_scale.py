"""The benchmark of many sleeping workers: its cells and its dataset."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale, sleeping


@pytest.mark.processes
def test_scale_benchmark_reports_each_cell(tmp_path, capsys):
    path = tmp_path / "scale.json"
    options = ["--workers", "3", "--batch-sizes", "16", "--loops", "0", "9 GIL", "--seconds", "0.01"]
    assert scale.main([*options, "--json", str(path)]) in (0, 1)  # whether the goal is met depends on the machine
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["workers"], cell["batch_size"], cell["loop"]) for cell in cells] == [(3, 16, "0"), (3, 16, "9 GIL")]
    for cell in cells:
        assert cell["ahead"] == 5
        assert cell["delivered"] > 0
        assert 0 <= cell["idle"] <= 1
        assert min(cell["next_ms"], cell["next_p95_ms"]) > 0
        assert cell["planned"] == 0
    assert "at least 95% of the ideal where the goal applies" in capsys.readouterr().out


def test_sleeping_images_return_images_with_their_indices():
    samples = sleeping.SleepingImages(4)
    assert len(samples) == 4
    assert [index for _, index in samples.__getitems__([2, 0])] == [2, 0]
