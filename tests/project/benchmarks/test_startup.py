"""The benchmark of the start of loaders, and of compiling kernels."""

from __future__ import annotations

import json

import pytest
from helpers import lacking

from benchmarks import startup
from benchmarks.photos import make_synthetic_photos


@pytest.mark.processes
def test_startup_benchmark_measures_each_loader(tmp_path, capsys, monkeypatch):
    lacking.require("torchvision")
    monkeypatch.setattr(startup, "LOADERS", ("gpuload", "fork"))
    photos = make_synthetic_photos(tmp_path / "photos", count=8, height=40, width=50)
    path = tmp_path / "startup.json"
    arguments = ["--photos", str(photos), "--cache", str(tmp_path), "--files", "512", "--json", str(path)]
    assert startup.main([*arguments, "--workers", "1", "--rounds", "1", "--only", "folder"]) == 0
    cells = json.loads(path.read_text())
    assert list(cells) == ["folder gpuload 1", "folder fork 1"]
    for name, [cell] in cells.items():
        assert cell["first_batch_s"] > 0, name
        assert cell["own_mb"] > 10, name
        assert cell["shared_mb"] > 0, name  # prefetched batches
    assert cells["folder gpuload 1"][0]["back_ms"] > 0
    assert "batch, s" in capsys.readouterr().out


def test_startup_benchmark_counts_compiled_kernels(tmp_path, monkeypatch):
    lacking.require("triton")
    monkeypatch.setattr(startup, "recipes", lambda size: {"CIFAR": []})
    path = tmp_path / "startup.json"
    assert startup.main(["--only", "kernels", "--rounds", "1", "--json", str(path)]) == 0
    [[figures]] = json.loads(path.read_text()).values()
    assert figures["kernels"] == 1  # one pass, which copies pixels
    assert figures["cpu_s"] > 0
