"""The benchmark of the main thread's time takes the path of a device, and reports which processes plan batches."""

from __future__ import annotations

import json

import pytest
from helpers import lacking
from helpers.peers import torchvision

lacking.require("triton")
torchvision()

from benchmarks import host  # noqa: E402
from gpuload.loader.stats import Part, Stats  # noqa: E402

# The kernels of a batch: the weights of the resize, and the fused pass; jitter also needs the mean levels for the
# contrast, and a second pass.
LAUNCHES = {"classic": 2, "classic + ColorJitter": 5}


@pytest.mark.processes
@pytest.mark.interpreter
@pytest.mark.parametrize("without_plans", [False, True])
def test_host_benchmark_launches_ahead_and_plans_in_workers(tmp_path, monkeypatch, without_plans):
    monkeypatch.setattr(host, "BATCH", 16)
    path = tmp_path / "host.json"
    arguments = ["--batches", "1", "--files", str(host.MIN_BATCHES * 16), "--only", "classic", "--json", str(path)]
    assert host.main([*arguments, *["--without-plans"] * without_plans]) in (0, 1)  # the status depends on the machine
    results = json.loads(path.read_text())["results"]
    assert results.keys() == LAUNCHES.keys()
    for name, result in results.items():
        assert result["calls"] == {"launches": LAUNCHES[name]}
        assert result["launched_ahead"] >= 1 / 3
        planned = result["planned_by_workers"]["ahead"]
        assert planned == 0 if without_plans else planned > 0.5
        assert sum(result["parts_ms"].values()) == pytest.approx(result["host_ms"])
        assert result["parts_ms"]["workers"] > 0
        assert result["worker_us_per_image"] > 0


def make_run(launches: list[int], planned: int) -> host._Run:
    stats = Stats(batches=10, parts=(Part("plan", "workers", 1.0, planned),))
    return host._Run(launches=launches, stats=stats)


@pytest.mark.parametrize(
    ("launches", "planned", "without_plans", "message"),
    [
        ([2, 2, 2, 2], 9, False, "of 4 calls of next\\(\\), 0 found their batch launched"),
        ([0, 4, 0, 4], 4, False, "workers planned 40% of the batches, and should plan most"),
        ([0, 4, 0, 4], 1, True, "workers planned 10% of the batches, and should plan none"),
    ],
)
def test_check_path_of_another_path_raises_runtime_error(launches, planned, without_plans, message):
    with pytest.raises(RuntimeError, match=message):
        host._check_path(make_run(launches, planned), without_plans=without_plans)
