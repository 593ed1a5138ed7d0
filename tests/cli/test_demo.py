"""``gpuload demo``, and the command line without its packages."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import lacking
from rich.console import Console
from typer.testing import CliRunner

from gpuload.cli.app import app
from gpuload.cli.demo import run


def run_demo(data: Path, out: Path, **options: Any) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    defaults = {"workers": 0, "batch_size": 8, "seconds": 0.1, "rounds": 1, "device": "cpu", "images": 16}
    assert run(str(data), out=out, console=console, **{**defaults, **options}) == 0
    return console.export_text()


@pytest.mark.processes
def test_demo_without_data_generates_photographs_and_inspects_them(tmp_path: Path) -> None:
    """The command is that of `make demo`, with fewer images."""
    lacking.require("skimage")
    command = [sys.executable, "-m", "gpuload", "demo", "--images", "24", "--batch-size", "8", "--seconds", "0.1"]
    result = subprocess.run(
        [*command, "--rounds", "1", "--workers", "1", "--device", "cpu", "--out", "results"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    for line in (
        "on cpu: ",
        "24 images of 8 classes in results/photographs",
        "flip and normalise, with 1 worker each",
        "The DataLoader uses simplejpeg 1.",
        "2 of 2 rounds, DataLoader: ",
        "images/s",
        "CPU s per 1,000 images",
        "Inspecting the images (gpuload inspect):",
        "classes: 8; the largest is astronaut with 3",
        "results/inspect.html: ",
    ):
        assert line in result.stdout, result.stdout
    page = (tmp_path / "results" / "inspect.html").read_text()
    assert "RandomResizedCrop" in page
    assert page.count(", draw 1") == 8


@pytest.mark.slow
def test_demo_of_data_with_a_damaged_file_skips_it_in_both_loaders(jpeg_folder: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(jpeg_folder, tmp_path / "data"))
    min(data.glob("*/*.jpg")).write_bytes(b"nothing")
    output = run_demo(data, tmp_path, batch_size=16)
    assert f"48 images of 3 classes in {data}" in output
    assert "with 0 workers each" in output
    assert "1 image cannot be loaded; skipped in both loaders" in output
    assert "fix: 1 image is damaged" in output
    assert (tmp_path / "inspect.html").exists()
    assert not (tmp_path / "photographs").exists()


def test_demo_of_a_folder_without_classes_warns_on_a_busy_machine(
    jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (4000.0, 0.0, 0.0))
    output = run_demo(jpeg_folder / "bee", tmp_path)
    assert "This machine is busy: its load is 4000.0 on " in output
    assert "16 images in " in output
    assert (tmp_path / "inspect.html").exists()


@pytest.mark.parametrize(
    ("data", "device", "message"),
    [
        ("nowhere", "cpu", "nowhere' does not exist; expected a folder of images"),
        ("", "gpu", "device must be 'cpu', 'cuda', 'cuda:0'"),
    ],
)
def test_demo_of_missing_data_or_on_an_unknown_device_fails(
    jpeg_folder: Path, tmp_path: Path, data: str, device: str, message: str
) -> None:
    arguments = ["demo", "--data", str(jpeg_folder / data), "--device", device, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.processes
@pytest.mark.parametrize("hidden", [("typer",), ("typer", "rich")])
def test_help_without_typer_or_rich_names_the_extra(hidden: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from gpuload.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "needs typer, which is not installed" in result.stderr
    assert "pip install 'gpuload[cli,demo]'" in result.stderr
    assert "Traceback" not in result.stderr
