"""The benchmark of packing: its verdicts, and a short run of every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.generated_images import jpeg_bytes, smooth_image

from benchmarks import packing
from benchmarks.packing import BARE, GROUPS, ONE_WORKER, PACK


def one_round(bare: float, one_worker: float, pack: float) -> dict[str, dict[str, float]]:
    times = {BARE: bare, ONE_WORKER: one_worker, PACK: pack}
    return {method: {"wall_s": seconds, "cpu_s": seconds} for method, seconds in times.items()}


# pack takes 12 s: at most GOAL times as long as the bare loop, and less than one worker
@pytest.mark.parametrize(
    ("bare", "one_worker", "is_near", "is_growing"), [(10, 13, True, True), (9, 13, False, True), (10, 11, True, False)]
)
def test_judge_compares_within_rounds(bare: float, one_worker: float, is_near: bool, is_growing: bool) -> None:
    """The machine is half as fast in one round."""
    rounds = [one_round(bare, one_worker, 12), one_round(2 * bare, 2 * one_worker, 24), one_round(bare, one_worker, 12)]
    assert [verdict.met for verdict in packing.judge({"as they are": rounds})] == [is_near, is_growing]


def test_judge_skips_goals_of_failed_methods() -> None:
    assert packing.judge({"--cuttable": [{PACK: {"wall_s": 1, "cpu_s": 1}}]}) == []


@pytest.mark.processes
def test_packing_benchmark_runs_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos := tmp_path / "photos").mkdir()
    for number in range(2):
        (photos / f"{number}.jpg").write_bytes(jpeg_bytes(smooth_image(300, 400, number)))
    arguments = ["--photos", photos, "--cache", tmp_path / "cache", "--files", 11, "--changed", 3, "--rounds", 1]
    status = packing.main([*map(str, arguments), "--workers", "2", "--json", str(tmp_path / "report.json")])
    output = capsys.readouterr().out
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (status, report["failed"]) == (0, {}), output
    for group, (methods, *_) in GROUPS.items():
        (rounds,) = report["rounds"][group]
        assert rounds.keys() == set(methods)
        for method, times in rounds.items():
            assert min(times["wall_s"], times["cpu_s"]) > 0, method
    assert "pack, 2 workers" in output
    assert list((tmp_path / "cache").glob("packing*")) == []


@pytest.mark.processes
def test_run_of_a_failing_method_returns_the_error(tmp_path: Path) -> None:
    (root := tmp_path / "train" / "class_0").mkdir(parents=True)
    (root / "0.jpg").write_bytes(b"no image")
    result = packing.run("--short-side", BARE, tmp_path / "train", tmp_path / "cache", 1)
    assert "ended with status 1" in result["error"]
