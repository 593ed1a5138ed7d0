"""What is tried in processes of their own: decoders that work, that are broken, that crash, that hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuload.cli.doctor.trial import Trial, begin, sample_jpeg

pytestmark = pytest.mark.processes


def test_decoders_that_work() -> None:
    found: dict[str, object] = {}
    for trial in begin(sample_jpeg(), ["simplejpeg", "Pillow"]):
        found |= trial.results()
    assert found == {"simplejpeg": {"ok": True, "said": ""}, "Pillow": {"ok": True, "said": ""}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('libjpeg.so.9 is missing')", "ImportError: libjpeg.so.9 is missing"),
        ("import os; os.kill(os.getpid(), 11)", "the process crashed (SIGSEGV)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "the process ended with status 3"),
        (
            "import numpy\ndef decode_jpeg(*arguments, **options): return numpy.zeros((64, 96, 3), numpy.uint8)",
            "RuntimeError: it decodes wrong pixels: 70 levels off on average",
        ),
    ],
)
def test_a_decoder_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    (tmp_path / "simplejpeg.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert Trial(["simplejpeg"], sample_jpeg()).results() == {"simplejpeg": {"ok": False, "said": said}}


def test_steps_after_a_crash_say_why_they_were_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kornia.py").write_text("print('{not json}'[1:]); import os; os.kill(os.getpid(), 9)")
    monkeypatch.syspath_prepend(tmp_path)
    results = Trial(["Pillow", "kornia", "torchvision"], sample_jpeg()).results()
    assert results == {
        "Pillow": {"ok": True, "said": ""},
        "kornia": {"ok": False, "said": "the process crashed (SIGKILL)"},
        "torchvision": {"ok": False, "said": "not tried, since kornia: the process crashed (SIGKILL)"},
    }


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kornia.py").write_text("import signal; signal.pause()")
    monkeypatch.syspath_prepend(tmp_path)
    results = Trial(["kornia"]).results(limit_s=0.0)
    assert results == {"kornia": {"ok": False, "said": "it was not done after 0 seconds"}}


def test_a_process_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    said = Trial(["Pillow"]).results()["Pillow"]["said"]
    assert said.startswith("the process ended with status 1: ")
