"""``gpuload demo`` and the command line around it, as a user meets them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import lacking
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import gpuload
from gpuload.cli.app import app
from gpuload.cli.demo import Settings, compared, run, sparkline
from gpuload.cli.training import Trainer


def demo(console: Console | None = None, **changes: object) -> int:
    settings = {"data": None, "workers": 0, "batch_size": 8, "epochs": 1, "device": "cpu", "images": 16}
    return run(Settings(**{**settings, **changes}), console)


@pytest.mark.processes
def test_demo_from_nothing(tmp_path: Path) -> None:
    """As `make demo` runs it, on fewer images: workers of both kinds, made photographs, table, training, sheet."""
    lacking.require("skimage")
    command = [sys.executable, "-m", "gpuload", "demo", "--images", "24", "--batch-size", "8", "--epochs", "2"]
    done = subprocess.run(
        [*command, "--workers", "1", "--device", "cpu", "--out", "results"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for text in (
        "on cpu: 1 worker, ",
        "24 images of 8 classes in results/photographs",
        "The DataLoader decodes with simplejpeg (simplejpeg 1.",
        "2 epochs: decode, random crop to 224×224",
        "images per second",
        "CPU seconds per 1,000 images",
        "seconds to the first batch",
        "memory per worker, MB",
        "epoch 2: loss",
        str((tmp_path / "results" / "contact-sheet.png").resolve()),
    ):
        assert text in done.stdout, done.stdout
    with Image.open(tmp_path / "results" / "contact-sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.height > 8 * 128


@pytest.mark.slow
def test_data_of_ones_own(jpeg_folder: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    assert demo(console, data=jpeg_folder, out=tmp_path, batch_size=16) == 0
    told = console.export_text()
    assert f"48 images of 3 classes in {jpeg_folder}" in told
    assert "on cpu: 0 workers, " in told
    assert "1 epoch: decode, random crop to 224×224" in told
    assert (tmp_path / "contact-sheet.png").exists()
    assert not (tmp_path / "photographs").exists()


def test_data_without_classes_is_not_trained_on(
    jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (4000.0, 0.0, 0.0))
    console = Console(record=True, width=100, file=io.StringIO())
    assert demo(console, data=jpeg_folder / "bee", out=tmp_path) == 0
    told = console.export_text()
    assert "No folders of classes in the data, so nothing is trained on it" in told
    assert "loss" not in told
    assert "This machine is busy: a load of 4000.0 on " in told
    assert (tmp_path / "contact-sheet.png").exists()


def test_data_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "there is no such folder" in result.output
    assert "Traceback" not in result.output


def test_a_device_that_is_none(jpeg_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--data", str(jpeg_folder), "--device", "gpu", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "device must be 'cpu', 'cuda', 'cuda:0'" in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("mine", "theirs", "rate", "cost"),
    [
        (3.0, 1.5, "2.0 × more", "2.0 × more"),
        (1.5, 3.0, "0.5 × of that", "2.0 × less"),
        (2.504, 2.496, "the same", "the same"),
        (2.496, 2.504, "the same", "the same"),
        (0.0, 2.0, "", ""),
        (float("nan"), 2.0, "", ""),
    ],
)
def test_figures_are_compared(mine: float, theirs: float, rate: str, cost: str) -> None:
    assert compared(mine, theirs, higher_is_better=True) == rate
    assert compared(mine, theirs, higher_is_better=False) == cost


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"gpuload {gpuload.__version__}\n"
    assert "demo" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.processes
@pytest.mark.parametrize("hidden", [("typer",), ("typer", "rich")])
def test_help_without_the_extra_says_what_to_install(hidden: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from gpuload.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs typer, which is not installed" in done.stderr
    assert "pip install 'gpuload[cli,demo]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_network_learns_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    trainer = Trainer(2, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.zeros(16, 3, 224, 224)
    labels = torch.arange(16) % 2
    images[labels == 1] += 1
    losses = [trainer.step(images, labels)[0] for _ in range(6)]
    assert losses[-1] < losses[0] / 2


def test_sparkline_of_many_values_falls() -> None:
    line = sparkline([1 - step / 99 for step in range(100)])
    assert len(line) == 40
    assert list(line) == sorted(line, reverse=True)
    assert (line[0], line[-1]) == ("█", "▁")
    assert sparkline([2.0, 2.0]) == "▁▁"
