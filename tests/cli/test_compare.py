"""``gpuload compare``: medians of rounds, and which peer it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpuload.cli.app import app
from gpuload.cli.compare import judged
from gpuload.cli.measure import Round


def test_medians_and_ratios_within_rounds() -> None:
    mine = [Round(1000, 1.0), Round(500, 2.0), Round(900, 1.2)]
    theirs = [Round(400, 3.0), Round(250, 6.0), Round(300, 3.0)]
    found = judged(mine, theirs)
    assert (found.images_per_s, found.peer_images_per_s, found.rate_ratio) == (900, 300, 2.5)
    assert (found.cpu_s_per_1000, found.peer_cpu_s_per_1000, found.cpu_ratio) == (1.2, 3.0, 3.0)
    assert judged([Round(1, 0.0)], [Round(1, 0.0)]).cpu_ratio == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_folder_is_compared(jpeg_folder: Path, tmp_path: Path) -> None:
    path, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    options = ["--workers", "1", "--batch-size", "8", "--seconds", "0.1", "--rounds", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, ["compare", str(jpeg_folder), *options, "--json", str(path), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["peer"] == "simplejpeg"
    assert len(found["rounds"]) == 2
    assert found["rate_ratio"] > 0
    for text in (
        "1 worker each",
        "The DataLoader decodes with simplejpeg (simplejpeg 1.",
        "4 of 4 rounds",
        "CPU s per 1,000 images",
    ):
        assert text in done.stdout
    assert "the images of DataLoader + simplejpeg in a second" in " ".join(done.stdout.split())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_data_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["compare", "nowhere"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("'nowhere' does not exist; expected a folder of images")
