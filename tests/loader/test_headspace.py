"""`headspace()`: how much faster a loop could be, by a clock that only the loader and the step move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload.loader import headspace as headspace_module
from gpuload.loader.headspace import COPIES, WARM_UP, HeadspaceRates

STEPS = 4


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(headspace_module, "perf_counter", clock)
    return clock


@dataclass
class Batches:
    """Epochs of `count` batches that take `each_s` seconds each; each epoch begins with another `start_s` seconds."""

    clock: Clock
    count: int = 100
    each_s: float = 3.0
    start_s: float = 0.0
    ended: int = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        self.clock.seconds += self.start_s
        try:
            for number in range(self.count):
                self.clock.seconds += self.each_s
                yield [torch.full((2, 3), number), torch.tensor([number, number])]
        finally:
            self.ended += 1


def test_headspace_prints_and_keeps_both_rates(clock, capsys):
    loop = gl.headspace(Batches(clock, each_s=0.3, start_s=50), STEPS)
    assert len(loop) == WARM_UP + 2 * STEPS
    for _ in loop:
        assert loop.rates is None
        clock.seconds += 0.1
    assert loop.rates is not None
    assert (loop.rates.loader, loop.rates.copies) == pytest.approx((2.5, 10))
    assert capsys.readouterr().out == (
        "headspace: 2.50 batches/s (400.0 ms a step) with the loader,\n"
        "           10.00 batches/s (100.0 ms a step) with copies of one batch\n"
        "A faster loader could make this loop at most 4.00 times as fast.\n"
    )
    with pytest.raises(StopIteration) as over:  # it returns the rates, and does not print them again
        next(loop)
    assert (over.value.value, capsys.readouterr().out) == (loop.rates, "")


def test_headspace_of_a_loop_that_does_not_wait_says_so(clock, capsys):
    for _ in gl.headspace(Batches(clock, each_s=0.01), STEPS):
        clock.seconds += 1
    assert capsys.readouterr().out.endswith("The loop does not wait for its loader: a faster loader would not help.\n")


def test_headspace_counts_the_last_step_of_each_measurement_and_no_warm_up_step(clock):
    loop, step_seconds = gl.headspace(Batches(clock, each_s=0), 2), [90] * WARM_UP + [1, 2, 5, 8]
    for _, step_s in zip(loop, step_seconds, strict=True):
        clock.seconds += step_s
    assert loop.rates == HeadspaceRates(2 / 3, 2 / 13)  # 2 steps in 1 + 2 s with the loader, in 5 + 8 s with copies


def test_headspace_yields_real_batches_and_then_copies_of_the_first(clock):
    numbers, tensors = [], []
    for images, labels in gl.headspace(Batches(clock), STEPS):
        assert images.unique().tolist() == labels.unique().tolist()
        numbers.append(labels[0].item())
        tensors.append(images)
        clock.seconds += 1
        images.fill_(-1)  # as a step does that normalizes in place or mixes labels
        labels.fill_(-1)
    assert numbers == [*range(WARM_UP + STEPS), *[0] * STEPS]
    assert len({images.data_ptr() for images in tensors}) == WARM_UP + STEPS + COPIES


def test_headspace_restores_dicts_arrays_lists_and_bytearrays():
    changed_batch = {"images": np.zeros(3), "names": ["a", "b"], "state": bytearray(b"x"), "none": None}
    batches = [changed_batch, *({} for _ in range(WARM_UP))]
    loop = gl.headspace(batches, 1)
    assert next(loop) is changed_batch
    for name in ("images", "state"):
        changed_batch[name][0] = 1
    changed_batch["names"].pop()
    del changed_batch["none"]
    *_, last_batch = loop
    assert (last_batch["images"].tolist(), last_batch["names"], bytes(last_batch["state"]), last_batch["none"]) == (
        [0, 0, 0], ["a", "b"], b"x", None,
    )  # fmt: skip


def slow_down_copies(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each copy of a tensor by the host take this time."""
    for name in ("clone", "copy_"):
        original = getattr(torch.Tensor, name)

        def slow(self, *args, original=original):
            clock.seconds += seconds
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, slow)


@pytest.mark.parametrize("is_changed", [False, True], ids=["unchanged", "changed"])
def test_headspace_without_an_accelerator_excludes_the_time_to_copy_batches(clock, monkeypatch, is_changed):
    slow_down_copies(clock, monkeypatch, 1000)
    loop = gl.headspace(Batches(clock, each_s=1), STEPS)
    for images, _ in loop:
        clock.seconds += 1
        if is_changed:
            images.add_(1)
    assert loop.rates == HeadspaceRates(0.5, 1.0)


def pretend_device(monkeypatch: pytest.MonkeyPatch, synchronize: Callable[[object], None]) -> None:
    monkeypatch.setattr(headspace_module.devices, "is_available", lambda: True)
    monkeypatch.setattr(headspace_module.devices, "current_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)


class Device:
    """A device that runs steps in order, asynchronously, at most two steps behind the host.

    The device copies a page-locked batch itself. The host copies other batches, once the device is idle.
    """

    LOCKED_COPY_S, PAGEABLE_COPY_S, STEP_S = 0.004, 0.02, 0.05

    def __init__(self, clock: Clock, is_synchronous: bool) -> None:
        self._clock, self._is_synchronous = clock, is_synchronous
        self._ends_s = [0.0, 0.0]  # the ends of the last two steps

    def step(self, images: torch.Tensor) -> None:
        previous_s, last_s = self._ends_s
        self._clock.seconds = max(self._clock.seconds, previous_s)
        work_s = self.STEP_S
        if images.is_pinned():
            work_s += self.LOCKED_COPY_S
        else:
            self._clock.seconds = max(self._clock.seconds, last_s) + self.PAGEABLE_COPY_S
        self._ends_s = [last_s, max(self._clock.seconds, last_s) + work_s]
        if self._is_synchronous:
            self.synchronize()

    def synchronize(self, device: object = None) -> None:
        self._clock.seconds = max(self._clock.seconds, *self._ends_s)


class LockedMemory:
    """Page-locked tensors, known by their addresses, since torch needs a driver for real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.copy(tensor))
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in self._tensors)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        locked = tensor.clone()
        self._tensors[locked.data_ptr()] = locked
        return locked


@pytest.mark.parametrize("load_s", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("is_locked", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("is_synchronous", [True, False], ids=["synchronous", "asynchronous"])
def test_headspace_gain_with_an_asynchronous_device_is_that_of_a_loader_without_cost(
    clock, monkeypatch, is_synchronous, is_locked, load_s
):
    memory = LockedMemory(monkeypatch)
    images = memory.copy(torch.zeros(4, 3)) if is_locked else torch.zeros(4, 3)

    def batches(seconds: float) -> Iterator[torch.Tensor]:
        while True:
            clock.seconds += seconds
            yield images

    def seconds_per_step(seconds: float) -> float:
        device, steps, loader = Device(clock, is_synchronous), 50, batches(seconds)
        began_s = clock.seconds
        for _ in range(steps):
            device.step(next(loader))
        device.synchronize()
        return (clock.seconds - began_s) / steps

    gain = seconds_per_step(load_s) / seconds_per_step(0)
    slow_down_copies(clock, monkeypatch, 0.022)
    device = Device(clock, is_synchronous)
    pretend_device(monkeypatch, device.synchronize)
    loop = gl.headspace(batches(load_s), 50)
    for batch in loop:
        device.step(batch)
    assert loop.rates is not None
    assert loop.rates.gain == pytest.approx(gain, rel=0.05)


def test_headspace_makes_copies_before_the_clock_starts_and_rewrites_only_changed_ones(clock, monkeypatch):
    pretend_device(monkeypatch, lambda device: None)
    slow_down_copies(clock, monkeypatch, 1000)
    loop = gl.headspace(Batches(clock, each_s=1), 8)
    for number, (images, _) in enumerate(loop):
        clock.seconds += 1
        if number == WARM_UP + 8 + 2:  # the third copy, which is used again as the sixth
            images.add_(1)
    assert loop.rates == HeadspaceRates(0.5, 8 / 1008)


def test_headspace_batches_allow_requires_grad():
    for images in gl.headspace([torch.ones(2) for _ in range(WARM_UP + 5)], 5):
        assert not images.requires_grad
        images.requires_grad_()


def test_headspace_restores_a_batch_changed_in_inference_mode():
    with torch.inference_mode():
        for images in gl.headspace([torch.ones(2) for _ in range(WARM_UP + 5)], 5):
            assert images.tolist() == [1, 1]
            images.mul_(2)


def test_headspace_iterates_short_epochs_and_ends_the_last_before_copies(clock):
    batches = Batches(clock, count=3)
    numbers = []
    for number, (_, labels) in enumerate(gl.headspace(batches, STEPS)):
        clock.seconds += 1
        numbers.append(labels[0].item())
        assert batches.ended == (number // 3 if number < WARM_UP + STEPS else 3)
    assert numbers[: WARM_UP + STEPS] == [0, 1, 2, 0, 1, 2, 0]


def test_headspace_synchronizes_the_device_only_at_the_ends_of_a_measurement(clock, monkeypatch):
    waits = []
    pretend_device(monkeypatch, lambda device: waits.append((len(batches), str(device))))
    batches = []
    for batch in gl.headspace(Batches(clock), STEPS):
        batches.append(batch)
        clock.seconds += 1
    ends = [WARM_UP, WARM_UP + STEPS, WARM_UP + STEPS, WARM_UP + 2 * STEPS]
    assert waits == [(end, "cuda:1") for end in ends]


def test_headspace_of_a_gpuload_loader_continues_with_the_next_epoch(capsys):
    pictures = [(np.full((8, 8, 3), i, np.uint8), i) for i in range(8)]
    with gl.Loader(pictures, 4, num_workers=0, device="cpu") as loader:
        loop = gl.headspace(loader, 2)
        numbers = [labels[0].item() for _, labels in loop]
        assert numbers == [0, 4, 0, 4, 0, 0, 0]
        assert [labels[0].item() for _, labels in loader] == [0, 4]
        assert loader.epoch == 3
    assert capsys.readouterr().out.startswith("headspace: ")


def test_headspace_with_wrong_arguments_raises(clock):
    with pytest.raises(TypeError, match=r"^headspace\(\) needs an iterable loader, got int$"):
        gl.headspace(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="steps"):
        gl.headspace([], steps=0)
    with pytest.raises(
        ValueError,
        match=r"^headspace\(steps=4\) needs 7 batches, including 3 to warm up, but the loader ended after 5; "
        r"use steps=2, or a loader that can be iterated over repeatedly$",
    ):
        list(gl.headspace(iter(Batches(clock, count=5)), STEPS))
    with pytest.raises(ValueError, match=r"loader ended after 0; use a loader that can be iterated over repeatedly$"):
        list(gl.headspace([], STEPS))
