"""Devices, pictures and JSON of ``bench`` and ``compare``."""

from __future__ import annotations

import json
from pathlib import Path

import lacking
import pytest
import torch
from PIL import Image

from gpuload.cli.output import busy, check_plot, device_of, draw_bars, write_json
from gpuload.stage import device as devices


def test_json_goes_to_a_file_or_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(str(tmp_path / "a.json"), {"rate": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"rate": 1.5}
    assert capsys.readouterr().out == ""
    write_json("-", {"rate": 1.5})
    assert json.loads(capsys.readouterr().out) == {"rate": 1.5}


def test_a_picture_has_a_bar_for_each_number(tmp_path: Path) -> None:
    lacking.require("matplotlib")
    check_plot("x.png")
    sizes = []
    for count in (2, 6):
        path = tmp_path / f"{count}.png"
        draw_bars(str(path), "rates", {"images/s": [(f"part {i}", 100.0 * i) for i in range(1, count + 1)]})
        with Image.open(path) as picture:
            sizes.append(picture.size)
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 2
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_a_busy_machine_is_named() -> None:
    assert busy(0.9, 2) == ""
    assert busy(4.25, 2) == "This machine is busy: a load of 4.2 on 2 CPUs. Figures depend on what else runs"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(devices, "usual_type", lambda: "cpu")
    assert device_of(None) == torch.device("cpu")
    with pytest.raises(ValueError, match="--device xpu, but torch finds no XPU device; leave --device out"):
        device_of("xpu")
