"""`try_in_process` with decoders that work, are broken, crash or hang; and regions checked by `find_fault`."""

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
def test_trial_of_working_decoders_reports_ok() -> None:
    assert try_in_process(["simplejpeg", "Pillow"], sample_jpeg()) == {
        "simplejpeg": {"ok": True, "why": ""},
        "Pillow": {"ok": True, "why": ""},
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "error"),
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
def test_trial_of_a_broken_decoder_reports_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, error: str
) -> None:
    (tmp_path / "simplejpeg.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    assert try_in_process(["simplejpeg"], sample_jpeg()) == {"simplejpeg": {"ok": False, "why": error}}


@pytest.mark.processes
def test_output_printed_by_a_library_is_not_taken_for_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "simplejpeg.py").write_text("print('{\"ok\": true}', flush=True); raise ImportError('no JPEG')")
    monkeypatch.syspath_prepend(tmp_path)
    assert try_in_process(["simplejpeg", "Pillow"], sample_jpeg()) == {
        "simplejpeg": {"ok": False, "why": "ImportError: no JPEG"},
        "Pillow": {"ok": True, "why": ""},
    }


@pytest.mark.processes
def test_steps_after_a_crash_report_that_they_were_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_trial_that_hangs_ends_at_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import signal; signal.pause()")
    monkeypatch.syspath_prepend(tmp_path)
    results = try_in_process(["torch"], timeout_s=0.1)
    assert results == {"torch": {"ok": False, "why": "it did not finish within 0 seconds"}}


@pytest.mark.processes
def test_trial_whose_process_cannot_start_reports_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    reason = try_in_process(["Pillow"])["Pillow"]["why"]
    assert reason.startswith("the process ended with status 1: ")


# -- regions -----------------------------------------------------------------------------------------------------------


def test_find_fault_of_the_cpu_decoder_is_empty():
    cpu = torch.device("cpu")
    assert find_fault(NvImageCodec(cpu, 1, load_nvimgcodec()), cpu) == ""


def decode_shifted(codes: list[Any]) -> list[Any]:
    """Return regions that are shifted by a column, like those of a decoder that rounds positions."""
    images = decode_images(codes)
    return [np.roll(image, code.region is not None, 1) for image, code in zip(images, codes, strict=True)]


def refuse_regions(codes: list[Any]) -> list[Any]:
    return [image if code.region is None else None for image, code in zip(decode_images(codes), codes, strict=True)]


def refuse_large_images(codes: list[Any]) -> list[Any]:
    return [image if len(image) < HEIGHT else None for image in decode_images(codes)]


@pytest.mark.parametrize(
    ("decode", "fault"),
    [
        (decode_images, ""),
        (decode_shifted, "the region (37, 51, 90, 101) differs from the entire picture by up to "),
        (refuse_regions, "it refuses a region: it returned no image and no reason"),
        (refuse_large_images, "it refuses all test pictures"),
    ],
)
def test_find_fault_compares_regions_with_the_entire_picture(decode, fault):
    with SimulatedGpu() as gpu:
        decoder = gpu.decoder({GPU: ("0.9.0",)}, only=GPU, engine=decode_nothing, gpu=decode)
        result = find_fault(decoder, gpu.device)
    assert result.startswith(fault)
    assert bool(result) == bool(fault)


@pytest.mark.processes
def test_try_regions_in_a_process_reports_version_device_faults_and_decoders_in_use():
    regions = {"version": load_nvimgcodec().__version__, "device": "cpu", "faults": {CPU: ""}, "used": [CPU]}
    assert try_regions() == regions
    assert try_in_process(["regions"]) == {"regions": {"ok": True, "why": "", **regions}}
