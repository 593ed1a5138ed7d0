"""Progress in a terminal and elsewhere, errors on stderr, colors, JSON, and the choice of the device."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gpuload.cli.console import (
    FAILED,
    echo,
    format_count,
    make_console,
    progress,
    report_error,
    select_device,
    warn_if_busy,
    write_json,
)
from gpuload.stage import device as devices


def test_progress_without_a_terminal_prints_a_line_per_tenth() -> None:
    file = io.StringIO()
    with progress(Console(file=file), "samples", 100) as update_progress:
        for done in range(101):
            update_progress(done, note="9 MB" if done > 90 else "")
    lines = file.getvalue().splitlines()
    assert lines == [*(f"{tenth}0 of 100 samples" for tenth in range(1, 10)), "100 of 100 samples, 9 MB"]


def test_progress_total_may_be_given_later() -> None:
    file = io.StringIO()
    with progress(Console(file=file), "images") as update_progress:
        update_progress(1)
        update_progress(5, 10)
        update_progress(10)
        update_progress(11)
    assert file.getvalue().splitlines() == ["5 of 10 images", "10 of 10 images"]


@pytest.mark.parametrize("width", [80, 140])
def test_progress_in_a_terminal_is_a_bar_within_the_width(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    with progress(console, "images, gpuload", 10) as update_progress:
        update_progress(10, note="1,000 images/s")
    last_line = next(line for line in reversed(file.getvalue().splitlines()) if "gpuload" in line).split("\x1b[2K")[-1]
    assert len(last_line) <= width
    assert "10/10 1,000 images/s" in last_line
    assert "━" in last_line


def test_echo_to_a_file_neither_wraps_nor_interprets_markup() -> None:
    file = io.StringIO()
    text = "[bold]/a/:x:/b[/bold] " + "long " * 30 + "1,000"
    echo(Console(file=file, width=40), text, "red")
    assert file.getvalue() == text + "\n"


def test_echo_in_a_terminal_wraps_between_words_except_text_to_copy() -> None:
    file = io.StringIO()
    console = Console(file=file, width=20, force_terminal=True, color_system=None)
    echo(console, "damaged: /a/very/long-path/to/an/image.jpg: it ends early\n  [b]two-word indent of it")
    echo(console, "pip uninstall -y one two && pip install three", to_copy=True)
    assert file.getvalue() == (
        "damaged:\n/a/very/long-path/to/an/image.jpg:\nit ends early\n  [b]two-word indent\n  of it\n"
        "pip uninstall -y one two && pip install three\n"
    )


def test_report_error_prints_to_stderr_or_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(make_console(), ValueError("no [such] thing")) == FAILED == 1
    assert capsys.readouterr() == ("", "no [such] thing\n")
    file = io.StringIO()
    assert report_error(Console(file=file), "message") == FAILED
    assert file.getvalue() == "message\n"


def test_echo_colors_follow_force_color_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def echoed() -> str:
        console = make_console()
        console.file = io.StringIO()
        echo(console, "text", "red")
        return console.file.getvalue()

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert echoed() == "\x1b[31mtext\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert echoed() == "text\n"


def test_format_count_uses_plurals_and_separators() -> None:
    assert [format_count(1, "class", "classes"), format_count(0, "image")] == ["1 class", "0 images"]
    assert format_count(2000, "class", "classes") == "2,000 classes"


def test_write_json_writes_a_file_or_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(str(tmp_path / "a.json"), {"rate": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"rate": 1.5}
    assert os.listdir(tmp_path) == ["a.json"]
    assert capsys.readouterr().out == ""
    write_json("-", {"rate": 1.5})
    assert json.loads(capsys.readouterr().out) == {"rate": 1.5}


def test_warn_if_busy_compares_the_load_with_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    file = io.StringIO()
    for load in (0.9, 4.25):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9, 9))
        warn_if_busy(Console(file=file))
    text = "This machine is busy: its load is 4.2 on 2 CPUs. Other programs will affect the measurements\n"
    assert file.getvalue() == text


def test_select_device_defaults_to_an_available_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(devices, "default_device_type", lambda: "cpu")
    assert select_device(None) == torch.device("cpu")
    with pytest.raises(ValueError, match="--device xpu, but torch finds no XPU device; omit --device to run"):
        select_device("xpu")
