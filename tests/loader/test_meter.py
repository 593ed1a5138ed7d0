"""What `next()` takes, by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpuload.loader import meter as module
from gpuload.loader.meter import Meter


@pytest.fixture
def rig(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module, "perf_counter", lambda: now.s)
    engine, transfer = SimpleNamespace(waited_s=0.0), SimpleNamespace(held_s=0.0)
    return now, engine, transfer, Meter(engine, transfer)


def test_waiting_is_apart_from_what_next_does(rig):
    now, engine, transfer, meter = rig
    meter.begin()
    with meter:
        now.s += 5.0
        engine.waited_s += 4.0
    meter.given(8)
    now.s += 10.0  # the step
    with meter:
        now.s += 3.0
        engine.waited_s += 1.0
        transfer.held_s += 0.5
    meter.given(7)
    assert (meter.waited_s, meter.held_s, meter.next_s, meter.first_s) == (5.0, 0.5, 2.5, 4.0)
    assert (meter.batches, meter.images, meter.time_s) == (2, 15, 18.0)


def test_time_between_epochs_does_not_count(rig):
    now, engine, _, meter = rig
    now.s += 1.0
    assert meter.time_s == 0.0
    meter.begin()
    now.s += 2.0
    meter.end()
    meter.end()
    now.s += 50.0
    assert meter.time_s == 2.0
    meter.begin()
    now.s += 3.0
    assert meter.time_s == 5.0
    meter.begin()  # the one before was left
    with meter:
        now.s += 1.0
        engine.waited_s += 1.0
    assert (meter.time_s, meter.first_s) == (6.0, 1.0)
