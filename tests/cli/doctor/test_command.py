"""``gpuload doctor`` as it is seen: in a terminal, narrow or wide, and by scripts."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gpuload.cli.app import app
from gpuload.cli.doctor import gather
from gpuload.cli.doctor.command import show
from gpuload.cli.doctor.finding import Finding, as_dict

FINDINGS = [
    Finding("CPUs", "works", "8 CPUs for this process"),
    Finding("nvImageCodec", "improve", "not installed. It decodes a crop alone", "pip install 'gpuload[cu13]' [now]"),
    Finding("GPUs", "not needed", "none: batches are made on the CPU"),
]
BROKEN = Finding("workers", "broken", "no process can be started", "num_workers=0")


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 0), ([*FINDINGS, BROKEN], 1)])
def test_scripts_get_json_and_a_status(monkeypatch: pytest.MonkeyPatch, findings: list[Finding], status: int) -> None:
    monkeypatch.setattr(gather, "examine", lambda progress: findings)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == status
    assert json.loads(done.stdout) == as_dict(findings)


def test_people_get_lines_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "examine", lambda progress: progress(3, 3) or FINDINGS)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "3 of 3 checks" in done.stderr
    assert "3 of 3 checks" not in done.stdout
    assert "  nvImageCodec: pip install 'gpuload[cu13]' [now]\n" in done.stdout
    assert "What holds it back most is nvImageCodec" in done.stdout


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("colour", [False, True])
def test_it_fits_the_terminal(width: int, colour: bool) -> None:
    file = io.StringIO()
    show([*FINDINGS, BROKEN], Console(file=file, width=width, force_terminal=colour, highlight=False))
    text = file.getvalue()
    assert ("\x1b[" in text) == colour
    if not colour:
        assert max(map(len, text.splitlines())) <= width
