"""What torch's profiler sees of a loader: four ranges, and nothing at all while no profiler runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import ranges

NAMES = ("gpuload::wait", "gpuload::decode", "gpuload::stage", "gpuload::copy")


def run(**options: Any) -> int:
    """How many batches came."""
    pictures = [np.full((20, 24, 3), number, np.uint8) for number in range(6)]
    transforms = [T.CenterCrop(16), T.ToDtype("float32", scale=True)]
    options = {"num_workers": 0, "device": "cpu", "chunk_size": 2, **options}
    with gl.Loader(pictures, 2, transforms=transforms, **options) as loader:
        return sum(1 for _ in loader)


def within(inner: Any, outer: Any) -> bool:
    a, b = inner.time_range, outer.time_range
    return b.start <= a.start and a.end <= b.end


def test_each_batch_has_its_ranges():
    with profile(activities=[ProfilerActivity.CPU]) as found:
        assert run() == 3
    events = {name: [event for event in found.events() or () if event.name == name] for name in NAMES}
    # The epoch's end is waited for too.
    assert {name: len(own) for name, own in events.items()} == dict(zip(NAMES, (4, 3, 3, 3), strict=True))
    for decode in events["gpuload::decode"]:
        assert any(within(decode, wait) for wait in events["gpuload::wait"])
    for copy in events["gpuload::copy"]:
        assert any(within(copy, stage) for stage in events["gpuload::stage"])
    for stage in events["gpuload::stage"]:
        assert not any(within(stage, wait) or within(wait, stage) for wait in events["gpuload::wait"])
    operations = [event for event in found.events() or () if event.name.startswith("aten::")]
    assert all(any(within(event, stage) for event in operations) for stage in events["gpuload::stage"])


def test_without_a_profiler_there_are_none(monkeypatch: pytest.MonkeyPatch):
    def record(name: str) -> Any:
        raise AssertionError(f"{name} is recorded, and nobody asked")

    monkeypatch.setattr(profiler, "record_function", record)
    assert run() == 3
    assert ranges.named("gpuload::wait") is ranges.named("gpuload::stage")  # nothing is made


def test_a_torch_that_does_not_say_whether_a_profiler_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert isinstance(ranges.named("gpuload::wait"), torch.profiler.record_function)


def test_ranges_are_recorded_for_nvtx(monkeypatch: pytest.MonkeyPatch):
    """torch needs CUDA to make NVTX ranges of them; here it is left out."""
    recorded: Counter[str] = Counter()

    def record(name: str) -> contextlib.AbstractContextManager[None]:
        recorded[name] += 1
        return contextlib.nullcontext()

    for name in ("_enable_profiler", "_disable_profiler"):
        monkeypatch.setattr(profiler, name, lambda *given: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiler, "record_function", record)
    with profiler.emit_nvtx():
        run()
    assert recorded == dict(zip(NAMES, (4, 3, 3, 3), strict=True))
