"""The trial of regions: what is right, what is wrong, and what the report says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stage.decode.test_nvimagecodec import Gpu, nothing, pictures

from gpuload.cli.doctor import packages
from gpuload.cli.doctor.regions import HEIGHT, find_fault, try_regions
from gpuload.cli.doctor.trial import Trial
from gpuload.stage.decode.nvimagecodec import CPU, GPU, NvImageCodec, load_library

ENGINE_AND_GPU = {"version": "0.9.0", "device": "cuda:0", "ok": True, "said": ""}


def test_the_cpus_decoder_has_no_fault():
    cpu = torch.device("cpu")
    assert find_fault(NvImageCodec(cpu, 1, load_library()), cpu) == ""


def shifted(codes: list[Any]) -> list[Any]:
    """Regions from a column beside, as of a decoder that rounds them."""
    found = pictures(codes)
    return [np.roll(one, code.region is not None, 1) for one, code in zip(found, codes, strict=True)]


def no_regions(codes: list[Any]) -> list[Any]:
    return [one if code.region is None else None for one, code in zip(pictures(codes), codes, strict=True)]


def small_ones_alone(codes: list[Any]) -> list[Any]:
    return [one if len(one) < HEIGHT else None for one in pictures(codes)]


@pytest.mark.parametrize(
    ("works", "text"),
    [
        (pictures, ""),
        (shifted, "the region (37, 51, 90, 101) is up to "),
        (no_regions, "it refuses a region: it gave no image and no reason"),
        (small_ones_alone, "it refuses each picture of the trial"),
    ],
)
def test_regions_are_held_against_the_whole_picture(works, text):
    with Gpu() as gpu:
        decoder = gpu.decoder({GPU: ("0.9.0",)}, only=GPU, engine=nothing, gpu=works)
        found = find_fault(decoder, gpu.device)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_the_trial_tells_version_device_faults_and_what_is_used():
    version = load_library().__version__
    assert try_regions() == {"version": version, "device": "cpu", "faults": {CPU: ""}, "used": [CPU]}


@pytest.mark.processes
def test_it_runs_in_a_process_of_its_own():
    assert Trial(["regions"]).results()["regions"]["faults"] == {CPU: ""}


@pytest.mark.parametrize(
    ("tried", "state", "text"),
    [
        ({"ok": False, "said": "the process crashed (SIGSEGV)"}, "not needed", "(SIGSEGV). On a GPU Decode(where="),
        ({**ENGINE_AND_GPU, "faults": {GPU: ""}, "used": [GPU]}, "works", f"{GPU}: its bits are those of whole images"),
        ({**ENGINE_AND_GPU, "faults": {GPU: ""}, "used": []}, "works", "whole images. Decode(where='device') decodes"),
        (
            {**ENGINE_AND_GPU, "faults": {GPU: "it refuses"}, "used": []},
            "works",
            f"0.9.0 on cuda:0: {GPU}: it refuses.",
        ),
        ({**ENGINE_AND_GPU, "faults": {GPU: "it refuses"}, "used": [GPU]}, "broken", f"{GPU}: it refuses"),
    ],
)
def test_what_the_report_says(tried, state, text):
    found = packages.regions(tried=tried)
    assert found.state == state
    assert text in found.found
    assert bool(found.mend) == (state == "broken")
