"""Times of the device: one batch in eight, and only once its events have passed."""

from __future__ import annotations

from devices import Device

from gpuload.stage.timing import EVERY, DeviceTimes


def batch(times: DeviceTimes, *, loads: bool = True) -> None:
    times.begin("side")
    if loads:
        times.mark("side")
    times.end("side")


def test_one_batch_in_eight_is_measured():
    device = Device()
    times = DeviceTimes(device)
    for _ in range(2 * EVERY):
        batch(times)
    assert (times.batches, device.timed) == (2, 6)
    assert (times.copy_s, times.stage_s) == (0.02, 0.02)  # the stand-in's events are ten milliseconds apart


def test_what_has_not_passed_is_not_waited_for():
    device, made = Device(), []

    def record_time(stream):
        made.append(Device.record_time(device, stream))
        made[-1].passed = False
        return made[-1]

    device.record_time = record_time
    times = DeviceTimes(device)
    batch(times)
    assert times.batches == 0
    for event in made:
        event.passed = True
    for _ in range(EVERY):
        batch(times)
    assert times.batches == 1


def test_batches_without_copies_and_devices_without_clocks_are_not_measured():
    device = Device()
    times = DeviceTimes(device)
    batch(times, loads=False)
    device.record_time = lambda stream: None
    for _ in range(EVERY):
        batch(times)
    assert times.batches == 0
