"""What is tried in processes of their own: decoders that work, that are broken, that crash, that hang."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.simulated_nvimagecodec import SimulatedGpu, decode_images, decode_nothing

from gpuload.cli.trial import HEIGHT, find_fault, sample_jpeg, try_in_process, try_regions
from gpuload.decode.jpeg import load_nvimgcodec
from gpuload.stage.decode.nvimagecodec import CPU, GPU, NvImageCodec


@pytest.mark.processes
def test_decoders_that_work() -> None:
    assert try_in_process(["simplejpeg", "Pillow"], sample_jpeg()) == {
        "simplejpeg": {"ok": True, "why": ""},
        "Pillow": {"ok": True, "why": ""},
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('libjpeg.so.9 is missing')", "ImportError: libjpeg.so.9 is missing"),
        ("import os; os.kill(os.getpid(), 11)", "the process crashed (SIGSEGV)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "the process ended with status 3"),
        (
            "import numpy\ndef decode_jpeg(*arguments, **options): return numpy.zeros((64, 96, 3), numpy.uint8)",
            "RuntimeError: decoded pixels differ from the expected values by 70 of 255 on average",
        ),
    ],
)
def test_a_decoder_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    (tmp_path / "simplejpeg.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert try_in_process(["simplejpeg"], sample_jpeg()) == {"simplejpeg": {"ok": False, "why": why}}


@pytest.mark.processes
def test_lines_that_a_library_prints_are_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "simplejpeg.py").write_text("print('{\"ok\": true}', flush=True); raise ImportError('no JPEG')")
    monkeypatch.syspath_prepend(tmp_path)
    assert try_in_process(["simplejpeg", "Pillow"], sample_jpeg()) == {
        "simplejpeg": {"ok": False, "why": "ImportError: no JPEG"},
        "Pillow": {"ok": True, "why": ""},
    }


@pytest.mark.processes
def test_steps_after_a_crash_say_why_they_were_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('{not json}'[1:]); import os; os.kill(os.getpid(), 9)")
    monkeypatch.syspath_prepend(tmp_path)
    results = try_in_process(["Pillow", "torch", "workers", "Triton"], sample_jpeg())
    assert results == {
        "Pillow": {"ok": True, "why": ""},
        "torch": {"ok": False, "why": "the process crashed (SIGKILL)"},
        "workers": {"ok": False, "why": "not tried, because of torch: the process crashed (SIGKILL)"},
        "Triton": {"ok": False, "why": "not tried, because of torch: the process crashed (SIGKILL)"},
    }


@pytest.mark.processes
def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import signal; signal.pause()")
    monkeypatch.syspath_prepend(tmp_path)
    results = try_in_process(["torch"], timeout_s=0.1)
    assert results == {"torch": {"ok": False, "why": "it did not finish within 0 seconds"}}


@pytest.mark.processes
def test_a_process_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    why = try_in_process(["Pillow"])["Pillow"]["why"]
    assert why.startswith("the process ended with status 1: ")


# -- regions -----------------------------------------------------------------------------------------------------------


def test_the_cpus_decoder_has_no_fault():
    cpu = torch.device("cpu")
    assert find_fault(NvImageCodec(cpu, 1, load_nvimgcodec()), cpu) == ""


def shifted(codes: list[Any]) -> list[Any]:
    """Regions from a column beside, as of a decoder that rounds them."""
    images = decode_images(codes)
    return [np.roll(one, code.region is not None, 1) for one, code in zip(images, codes, strict=True)]


def no_regions(codes: list[Any]) -> list[Any]:
    return [one if code.region is None else None for one, code in zip(decode_images(codes), codes, strict=True)]


def small_ones_alone(codes: list[Any]) -> list[Any]:
    return [one if len(one) < HEIGHT else None for one in decode_images(codes)]


@pytest.mark.parametrize(
    ("works", "text"),
    [
        (decode_images, ""),
        (shifted, "the region (37, 51, 90, 101) differs from the entire picture by up to "),
        (no_regions, "it refuses a region: it returned no image and no reason"),
        (small_ones_alone, "it refuses all test pictures"),
    ],
)
def test_regions_are_held_against_the_whole_picture(works, text):
    with SimulatedGpu() as gpu:
        decoder = gpu.decoder({GPU: ("0.9.0",)}, only=GPU, engine=decode_nothing, gpu=works)
        found = find_fault(decoder, gpu.device)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_the_trial_tells_version_device_faults_and_what_is_used():
    version = load_nvimgcodec().__version__
    assert try_regions() == {"version": version, "device": "cpu", "faults": {CPU: ""}, "used": [CPU]}


@pytest.mark.processes
def test_regions_are_tried_in_a_process_of_their_own():
    assert try_in_process(["regions"])["regions"]["faults"] == {CPU: ""}
