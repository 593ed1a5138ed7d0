"""`choose` selects a decoder; if the device cannot decode, a warning and the plan say why."""

from __future__ import annotations

import ctypes
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.jpeg_kinds import Photos, photo
from simulated.decoder import ENGINE, FALLBACK, decoding_with

import gpuload as gl
from gpuload.decode.options import select_device_samples
from gpuload.stage.decode import choose
from gpuload.stage.decode.choose import driver_version, find_decoder

MODULE = sys.modules[choose.__module__]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_DEVICE = gl.Decode(where="device")


def plan_text(**options: Any) -> str:
    return str(gl.Loader(Photos([photo(0)]), num_workers=0, device="cpu", **options).plan())


def test_choose_by_default_leaves_decoding_to_workers():
    assert choose(gl.Decode(), CPU, 1) == (None, 0.0, None, "")
    assert plan_text() == "backend torch on cpu"


def test_plan_names_the_decoder():
    with decoding_with():
        assert plan_text(decode=ON_DEVICE) == f"backend torch on cpu\ndecoder {ENGINE}, {FALLBACK} on cpu"
        decoder_line = plan_text(decode=gl.Decode(where="both", device_share=0.25)).splitlines()[1]
        assert decoder_line == f"decoder {ENGINE}, {FALLBACK} on cpu, 25% of the samples; workers (CPU) for the others"
    with decoding_with(engine=False):
        assert plan_text(decode=ON_DEVICE).endswith(f"decoder {FALLBACK} on cpu (no JPEG engine: this one has none)")


def test_device_that_cannot_decode_warns_once_and_workers_decode(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    files = Photos([photo(number) for number in range(4)])
    loader = gl.Loader(files, batch_size=2, num_workers=0, device="cpu", transforms=[], ragged="list", decode=ON_DEVICE)
    text = (
        r"Decode\(where='device'\): cpu cannot decode, so workers decode all images: nvImageCodec cannot be "
        r"imported \(.*\); run pip install 'gpuload\[cu1\d\]'"
    )
    with pytest.warns(RuntimeWarning, match=text) as caught:
        iterator = iter(loader)
    assert [warning.filename for warning in caught] == [__file__]
    next(iterator)
    loader.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the loader has already warned
        with loader:
            assert len(list(loader)) == 2
    assert loader.stats().part("device decode").count == 0
    assert "\ndecoder workers (CPU), because cpu cannot decode: nvImageCodec cannot be imported" in str(loader.plan())


def test_find_decoder_for_a_device_other_than_cpu_and_cuda_raises():
    with pytest.raises(RuntimeError, match="nvImageCodec decodes only on NVIDIA GPUs and on the CPU"):
        find_decoder(torch.device("xpu", 0), 1)


def test_choose_for_a_gpu_without_triton_finds_no_decoder(monkeypatch):
    monkeypatch.setattr(MODULE, "find_spec", lambda name: None)
    choice = choose(ON_DEVICE, CUDA, 1)
    assert choice.decoder is None
    assert "crops are copied by a Triton kernel, but Triton is not installed; run pip install triton" in choice.warning


def raise_runtime_error(*args: Any, **options: Any) -> Any:
    raise RuntimeError("nvImageCodec (GPU): it returned no image and no reason")


@pytest.mark.parametrize(
    ("installed", "driver", "cuda_version", "remedy"),
    [
        ({13}, (12, 4), "13.0",
         "nvidia-nvimgcodec-cu13 needs a driver for CUDA 13, but this driver is for CUDA 12.4: update the driver, or "
         "run pip install 'gpuload[cu12]' instead"),
        ({12}, (13, 0), "13.0",
         "nvidia-nvimgcodec-cu12 is for another CUDA version than torch (13.0); run pip install 'gpuload[cu13]'"),
        ({12}, (12, 8), "12.8", None),
    ],
)  # fmt: skip
def test_choose_for_a_gpu_whose_decoder_fails_names_the_remedy(monkeypatch, installed, driver, cuda_version, remedy):
    distributions = [SimpleNamespace(metadata={"Name": f"nvidia_nvimgcodec_cu{major}"}) for major in installed]
    monkeypatch.setattr(MODULE.importlib.metadata, "distributions", lambda: distributions)  # type: ignore[attr-defined]
    monkeypatch.setattr(MODULE, "driver_version", lambda: driver)
    monkeypatch.setattr(MODULE, "load_nvimgcodec", lambda: ModuleType("nvimgcodec"))
    monkeypatch.setattr(MODULE, "NvImageCodec", raise_runtime_error)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    choice = choose(ON_DEVICE, CUDA, 1)
    assert (choice.decoder, choice.share) == (None, 0.0)
    expected = "nvImageCodec (GPU): it returned no image and no reason" + (f"; {remedy}" if remedy else "")
    assert choice.text == f"workers (CPU), because cuda:0 cannot decode: {expected}"
    assert choice.warning.endswith(expected)


@pytest.mark.parametrize(("driver_number", "expected"), [(12040, (12, 4)), (13000, (13, 0)), (None, None)])
def test_driver_version_is_major_and_minor_or_none(monkeypatch, driver_number, expected):
    def get_version(pointer: Any) -> int:
        pointer._obj.value = driver_number or 0
        return 0 if driver_number else 100  # CUDA_ERROR_NO_DEVICE

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))
    driver_version.cache_clear()
    try:
        assert driver_version() == expected
    finally:
        driver_version.cache_clear()


def test_select_device_samples_spreads_the_share_over_positions_and_ranks():
    for share in (0.1, 0.5, 0.9):
        for first, ranks in ((0, 1), (1000, 2), (3, 8)):
            selected_share = select_device_samples(np.arange(first, first + 256 * ranks, ranks), share).mean()
            assert abs(selected_share - share) < 0.05
    assert select_device_samples(np.arange(5), 1.0).all()
