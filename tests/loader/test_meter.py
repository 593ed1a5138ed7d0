"""The meter of a session, by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import gpuload as gl
from gpuload.loader import meter as meter_module
from gpuload.loader.meter import Meter


@pytest.fixture
def rig(monkeypatch):
    """Return a clock, an engine, a transfer, and the meter of a session with these."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(meter_module, "perf_counter", lambda: now.s)
    monkeypatch.setattr(Meter, "_read_counters", lambda self: None)
    engine, transfer = SimpleNamespace(waited_s=0.0), SimpleNamespace(host_wait_s=0.0)
    session = SimpleNamespace(
        options=gl.Loader([0], num_workers=0, device="cpu")._options,
        feed=SimpleNamespace(engine=engine),
        transfer=transfer,
        stage=SimpleNamespace(device="cpu"),
        **dict.fromkeys(("assembly", "decoder", "errors", "placement", "launched_batches")),
    )
    meter = Meter(session)
    return now, engine, transfer, meter


def test_meter_counts_waits_for_workers_and_device_apart_from_next_s(rig):
    now, engine, transfer, meter = rig
    meter.begin()
    with meter:
        now.s += 5.0
        engine.waited_s += 4.0
    meter.count_batch(8)
    now.s += 10.0  # the training step
    with meter:
        now.s += 3.0
        engine.waited_s += 1.0
        transfer.host_wait_s += 0.5
    meter.count_batch(7)
    times = {"main wait": 5.0, "main hold": 0.5, "next_s": 2.5, "first_s": 4.0}
    assert meter.counts == {**times, "batches": 2, "images": 15}
    assert (meter.last_waited_s, meter.time_s) == (1.0, 18.0)


def test_meter_excludes_the_time_between_epochs(rig):
    now, engine, _, meter = rig
    now.s += 1.0
    assert meter.time_s == 0.0
    meter.begin()
    now.s += 2.0
    meter.end()
    meter.end()  # ending again changes nothing
    now.s += 50.0
    assert meter.time_s == 2.0
    meter.begin()
    now.s += 3.0
    assert meter.time_s == 5.0
    meter.begin()  # the epoch before was left early
    with meter:
        now.s += 1.0
        engine.waited_s += 1.0
    assert (meter.time_s, meter.counts["first_s"]) == (6.0, 1.0)
