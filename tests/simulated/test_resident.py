"""A `DeviceCached` on the simulated device: its pixels never leave it, and batches are as on the CPU without it."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
from bits.cases import CASES
from bits.samples import Samples
from simulated.running import assert_equal, epochs, on_cpu, on_device

import gpuload as gl
from gpuload.stage import device_cache

NAMES = ("classification", "detection_masks", "several_images", "blocks", "single_samples", "skipped", "resumption")


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_as_on_the_cpu(name, small, monkeypatch):
    monkeypatch.setattr(device_cache, "SMALL_BYTES", 1 << 30 if small else 0)
    case = CASES[name]
    options, drive = case.make(Samples(small="fused" in case.runs)), case.drive or partial(epochs, count=case.epochs)
    options["num_workers"] = 0
    with warnings.catch_warnings():
        if case.warns:
            warnings.simplefilter("ignore", RuntimeWarning)
        expected = on_cpu(options, drive)
        cached = gl.DeviceCached(options["dataset"])
        found = on_device(options | {"dataset": cached}, ("lazy", "side first")[NAMES.index(name) % 2], drive)
    assert_equal(found.values, expected)
    assert found.hidden == []
    (samples,) = cached.cached_data.values()
    assert samples.memory.device.type == "cuda"
