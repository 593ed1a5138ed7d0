"""The benchmark of packing: what it makes of figures, and that every way runs and says what it took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.generated_images import jpeg_bytes, smooth_image

from benchmarks import packing
from benchmarks.packing import BARE, GROUPS, ONE_WORKER, PACK


def one_round(bare: float, one: float, pack: float) -> dict[str, dict[str, float]]:
    return {way: {"wall_s": wall, "cpu_s": wall} for way, wall in ((BARE, bare), (ONE_WORKER, one), (PACK, pack))}


@pytest.mark.parametrize(
    ("bare", "one", "near", "grows"), [(10, 13, True, True), (9, 13, False, True), (10, 11, True, False)]
)
def test_goals_are_judged_within_rounds(bare: float, one: float, near: bool, grows: bool) -> None:
    """A machine that is half as fast in one round changes nothing."""
    rounds = [one_round(bare, one, 12), one_round(2 * bare, 2 * one, 24), one_round(bare, one, 12)]
    assert [verdict.met for verdict in packing.judge({"as they are": rounds})] == [near, grows]


def test_a_way_that_failed_is_not_judged() -> None:
    assert packing.judge({"--cuttable": [{PACK: {"wall_s": 1, "cpu_s": 1}}]}) == []


@pytest.mark.processes
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos := tmp_path / "photos").mkdir()
    for number in range(2):
        (photos / f"{number}.jpg").write_bytes(jpeg_bytes(smooth_image(300, 400, number)))
    asked = ["--photos", photos, "--cache", tmp_path / "cache", "--files", 11, "--changed", 3, "--rounds", 1]
    status = packing.main([*map(str, asked), "--workers", "2", "--json", str(tmp_path / "found.json")])
    told = capsys.readouterr().out
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert (status, found["failed"]) == (0, {}), told
    for group, (ways, *_) in GROUPS.items():
        (rounds,) = found["rounds"][group]
        assert rounds.keys() == set(ways)
        assert all(took["wall_s"] > 0 and took["cpu_s"] > 0 for took in rounds.values())
    assert "pack, 2 workers" in told
    assert not list((tmp_path / "cache").glob("packing*")), "what was written is removed"


@pytest.mark.processes
def test_a_way_that_cannot_run_says_why(tmp_path: Path) -> None:
    (root := tmp_path / "train" / "class_0").mkdir(parents=True)
    (root / "0.jpg").write_bytes(b"no image")
    told = packing.run("--short-side", BARE, tmp_path / "train", tmp_path / "cache", 1)
    assert "ended with status 1" in told["error"]
