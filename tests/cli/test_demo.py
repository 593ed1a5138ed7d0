"""``gpuload demo`` and the command line around it, as a user meets them."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lacking
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import gpuload
from gpuload.cli.app import app
from gpuload.cli.demo import ContactSheet, run, to_uint8
from gpuload.cli.source import MEAN, STD


def demo(data: Path, out: Path, **changes: Any) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    options = {"workers": 0, "batch_size": 8, "seconds": 0.1, "rounds": 1, "device": "cpu", "images": 16}
    assert run(str(data), out=out, console=console, **{**options, **changes}) == 0
    return console.export_text()


@pytest.mark.processes
def test_demo_from_nothing(tmp_path: Path) -> None:
    """As `make demo` runs it, on fewer images: workers of both kinds, made photographs, table, sheet."""
    lacking.require("skimage")
    command = [sys.executable, "-m", "gpuload", "demo", "--images", "24", "--batch-size", "8", "--seconds", "0.1"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--workers", "1", "--device", "cpu", "--out", "results"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for text in (
        "on cpu: ",
        "24 images of 8 classes in results/photographs",
        "flip and normalise, with 1 worker each",
        "The DataLoader does it with simplejpeg 1.",
        "2 of 2 rounds, DataLoader: ",
        "images/s",
        "CPU s per 1,000 images",
        str((tmp_path / "results" / "contact-sheet.png").resolve()),
    ):
        assert text in done.stdout, done.stdout
    with Image.open(tmp_path / "results" / "contact-sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.height > 8 * 128


@pytest.mark.slow
def test_data_of_ones_own_with_a_damaged_file(jpeg_folder: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(jpeg_folder, tmp_path / "data"))
    min(data.glob("*/*.jpg")).write_bytes(b"nothing")
    told = demo(data, tmp_path, batch_size=16)
    assert f"48 images of 3 classes in {data}" in told
    assert "with 0 workers each" in told
    assert "1 image cannot be loaded; left out on both sides" in told
    assert (tmp_path / "contact-sheet.png").exists()
    assert not (tmp_path / "photographs").exists()


def test_data_without_classes(jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (4000.0, 0.0, 0.0))
    told = demo(jpeg_folder / "bee", tmp_path)
    assert "This machine is busy: a load of 4000.0 on " in told
    assert "16 images in " in told
    assert (tmp_path / "contact-sheet.png").exists()


def test_normalised_images_come_back_as_they_were() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    normalised = (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert (to_uint8(normalised) == pixels.permute(0, 2, 3, 1).numpy()).all()


def test_sheet_has_a_row_for_each_class(tmp_path: Path) -> None:
    sheet = ContactSheet(["red", "green"], columns=3)
    red, green = np.zeros((2, 1, 8, 8, 3), np.uint8)
    red[..., 0] = green[..., 1] = 200
    sheet.add(np.concatenate([green, red, red, red, red]), [1, 0, 0, 0, 0])
    assert not sheet.full
    sheet.add(np.concatenate([green, green]), [1, 1])
    assert sheet.full
    sheet.write(tmp_path / "new" / "sheet.png")
    with Image.open(tmp_path / "new" / "sheet.png") as picture:
        assert picture.size == (6 + 3 * 134, 6 + 2 * 152)
        colours = [
            picture.getpixel((6 + 64 + 134 * column, 6 + 18 + 64 + 152 * row)) for row in (0, 1) for column in (0, 1, 2)
        ]
    assert colours == [(200, 0, 0)] * 3 + [(0, 200, 0)] * 3


def test_sheet_without_classes_fills_row_by_row(tmp_path: Path) -> None:
    sheet = ContactSheet([], rows=2, columns=2)
    sheet.add(np.zeros((3, 8, 8, 3), np.uint8), None)
    assert [len(row) for row in sheet.rows] == [2, 1]
    sheet.write(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size == (6 + 2 * 134, 6 + 2 * 134)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "nowhere' does not exist; expected a folder of images" in result.output
    assert "Traceback" not in result.output


def test_a_device_that_is_none(jpeg_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--data", str(jpeg_folder), "--device", "gpu", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "device must be 'cpu', 'cuda', 'cuda:0'" in " ".join(result.output.split())
    assert "Traceback" not in result.output


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
