"""The rule of "auto", which must find the best numbers soon in simulated time; and the tuner of a loader."""

from __future__ import annotations

import logging
import math
import os
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader import autotune
from gpuload.loader.autotune import MAX_AHEAD, Autotune, Load, Room, Setting, Step, Tuner

START_S = 0.3  # the time a worker takes to start


@dataclass
class Simulation:
    """A loader, its data and a training loop in simulated time.

    `chunk_s(workers, chunk)` is the time a worker takes for a chunk while this many work, `cpu_share` the fraction of
    this time that is spent computing, `step_s(batch)` the time the loop takes for a batch. Workers take chunks in
    order, and may begin a batch once it is among the next `ahead` batches. A device that takes `device_s` per batch
    runs asynchronously, at most two steps behind the loop.
    """

    chunk_s: Callable[[int, int], float]
    step_s: Callable[[int], float]
    chunks: int = 4
    cpu_share: float = 1.0
    ahead: int = 2
    device_s: float = 0.0
    device_ends: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], 2))  # the ends of the last two steps
    now: float = 0.0
    yielded: int = 0
    free_at: list[float] = field(default_factory=list)  # when each worker is free
    waiting_chunks: deque[tuple[int, int, float]] = field(default_factory=deque)  # batch, chunk number, since when
    chunk_ends: dict[int, list[float]] = field(default_factory=dict)  # the ends of the chunks of each batch
    chunk_spans: list[tuple[float, float]] = field(default_factory=list)  # the start and end of each chunk
    admitted: int = 0
    chunk_count: int = 0

    def resize(self, workers: int) -> None:
        while len(self.free_at) > workers:
            self.free_at.remove(min(self.free_at))
        self.free_at += [self.now + START_S] * (workers - len(self.free_at))

    def next(self) -> tuple[float, float]:
        """Return the seconds of a batch, and how long the loop waited for it."""
        began = self.now
        self.now += self.step_s(self.yielded)
        self.now = max(self.now, self.device_ends[0])
        self.device_ends.append(max(self.now, self.device_ends[-1]) + self.device_s)
        self._admit(began)
        while len(self.chunk_ends.get(self.yielded, ())) < self.chunks:
            self._take(math.inf)
        ready = max(self.chunk_ends.pop(self.yielded))
        waited = max(0.0, ready - self.now)
        self.now += waited
        self.yielded += 1
        self._admit(self.now)
        self._take(self.now)
        return self.now - began, waited

    def _admit(self, when: float) -> None:
        while self.admitted < self.yielded + max(self.ahead, 1 - (-2 * len(self.free_at) // self.chunks)):
            for _ in range(self.chunks):
                self.waiting_chunks.append((self.admitted, self.chunk_count, when))
                self.chunk_count += 1
            self.admitted += 1

    def _take(self, until: float) -> None:
        """Let workers take all chunks that they can begin until then, or one chunk if `until` is infinite."""
        while self.waiting_chunks:
            batch, chunk_number, since = self.waiting_chunks[0]
            worker = min(range(len(self.free_at)), key=self.free_at.__getitem__)
            start = max(self.free_at[worker], since)
            if start > until:
                return
            self.waiting_chunks.popleft()
            self.free_at[worker] = start + self.chunk_s(len(self.free_at), chunk_number)
            self.chunk_ends.setdefault(batch, []).append(self.free_at[worker])
            self.chunk_spans.append((start, self.free_at[worker]))
            if until == math.inf:
                return

    def load(self, since: float) -> Load:
        busy = sum(max(0.0, min(end, self.now) - max(start, since)) for start, end in self.chunk_spans)
        self.chunk_spans = [(start, end) for start, end in self.chunk_spans if end > self.now]
        busy /= self.now - since
        return Load(busy, busy * self.cpu_share)


def decoding(cpus: int, seconds: float = 0.04) -> Callable[[int, int], float]:
    """Return the time of a chunk that computes, on a machine with this number of CPUs."""
    return lambda workers, chunk: seconds * max(1.0, workers / cpus)


def noisy(chunk_s: Callable[[int, int], float], sigma: float, seed: int = 0) -> Callable[[int, int], float]:
    """Vary the time of each chunk."""
    rng = random.Random(seed)
    return lambda workers, chunk: chunk_s(workers, chunk) * rng.lognormvariate(0, sigma)


@dataclass
class Tuning:
    steps: dict[int, Step]  # by the number of the batch after which the rule decided
    settled: list[int]  # the batches after which the rule was settled
    seconds: list[float]  # the seconds of each batch
    auto: Autotune

    @property
    def rate(self) -> float:
        """Return batches per second in the second half."""
        return rate(self.seconds)

    @property
    def workers(self) -> list[int]:
        return [step.after.workers for step in self.steps.values()]

    def workers_at(self, batch: int) -> int:
        return [step.after.workers for number, step in self.steps.items() if number < batch][-1]


def tune(
    simulation: Simulation,
    batches: int = 300,
    *,
    cpus: int = 8,
    max_workers: int = 64,
    start: int = 1,
    workers: bool = True,
    ahead: bool = False,
    change: dict[str, Any] | None = None,
    change_at: int = -1,
) -> Tuning:
    """Do what a `Tuner` does, in simulated time; change attributes of the simulated loader at batch `change_at`."""
    auto = Autotune(Setting(start, simulation.ahead), cpus=cpus, workers=workers, ahead=ahead)
    auto.chunks = simulation.chunks
    simulation.resize(start)
    tuning, ready, skip, since = Tuning({}, [], [], auto), START_S, 1, 0.0
    for batch in range(batches):
        if batch == change_at:
            vars(simulation).update(change or {})
        seconds, waited = simulation.next()
        tuning.seconds.append(seconds)
        if simulation.now < ready:
            continue
        if skip:
            skip -= 1
            since = simulation.now
            simulation.load(since - 1e-9)
            continue
        if auto.add_batch(seconds, waited):
            step = auto.decide(simulation.load(since), lambda: Room(max_workers, MAX_AHEAD, "the memory"))
            since = simulation.now
            if step is not None:
                tuning.steps[batch] = step
                assert step.after == auto.setting
                simulation.ahead = auto.setting.ahead
                if step.after.workers > step.before.workers:
                    ready = simulation.now + START_S
                simulation.resize(auto.setting.workers)
                skip = step.skip + 1
            elif auto.is_settled:
                tuning.settled.append(batch)
    return tuning


def best_rate(make: Callable[[], Simulation], max_workers: int = 64, batches: int = 600) -> float:
    """Return the rate with the best fixed number of workers."""
    rates = []
    for workers in sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, max_workers}):
        if workers <= max_workers:
            simulation = make()
            simulation.resize(workers)
            rates.append(rate([simulation.next()[0] for _ in range(batches)]))
    return max(rates)


def rate(seconds: list[float]) -> float:
    second_half = seconds[len(seconds) // 2 :]
    return len(second_half) / sum(second_half)


# -- the rule ---------------------------------------------------------------------------------------------------------


def quick_step(batch: int) -> float:
    return 0.001


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("cpus", [1, 2, 4, 8, 16])
def test_autotune_with_cpu_bound_decoding_takes_as_many_workers_as_cpus(cpus, sigma):
    make = lambda: Simulation(noisy(decoding(cpus), sigma), quick_step, chunks=max(4, cpus // 2))  # noqa: E731
    tuning = tune(make(), cpus=cpus, start=min(8, max(1, cpus - 1)))
    assert tuning.auto.setting.workers == cpus
    expected = r"the loop waits [\d.]+% of the time, and workers are limited by CPUs"
    assert re.fullmatch(expected, tuning.auto.verdict)
    assert tuning.rate > 0.95 * best_rate(make, 2 * cpus)
    assert len(tuning.steps) <= 1


@pytest.mark.parametrize(("simulation", "options", "workers", "batches_per_s"), [
    (Simulation(decoding(64), quick_step, chunks=64), {"cpus": 64, "start": 8}, [32, 64], 25),
    (Simulation(decoding(8), lambda batch: 0.05), {}, [4], 20),  # 4 chunks of 40 ms in 50 ms
    (Simulation(decoding(8), lambda batch: 60.0 if batch % 40 == 39 else 0.05), {}, [4], 40 / (60 + 39 * 0.05)),
], ids=["64 CPUs", "loop that no longer waits", "loop with pauses"])  # fmt: skip
def test_autotune_reaches_enough_workers_within_20_batches(simulation, options, workers, batches_per_s):
    tuning = tune(simulation, 400, **options)
    assert tuning.workers == workers
    assert max(tuning.steps) <= 20
    assert tuning.settled[0] <= 30
    assert tuning.rate == pytest.approx(batches_per_s, rel=0.05)


def test_autotune_with_a_slow_step_keeps_only_the_workers_needed():
    tuning = tune(Simulation(decoding(8), lambda batch: 0.3), start=7)
    assert tuning.auto.setting.workers in (1, 2)
    assert tuning.rate == pytest.approx(1 / 0.3, rel=0.001)
    assert tuning.settled[0] <= 30
    assert tuning.auto.verdict == "the loop waits 0.0% of the time"


@pytest.mark.parametrize("step_s", [0.005, 0.01])
def test_autotune_with_an_asynchronous_device_keeps_a_worker_that_gains_20_percent(step_s):
    """A worker takes 60 ms per batch and the device 50 ms: the loop nearly always waits, and two workers gain 20%."""
    tuning = tune(Simulation(decoding(8, 0.015), lambda batch: step_s, device_s=0.05), 600)
    assert tuning.auto.setting.workers >= 2
    assert tuning.rate == pytest.approx(20, rel=0.001)
    assert "did not help" not in " ".join(step.reason for step in tuning.steps.values())


def test_autotune_with_sleeping_workers_takes_more_workers_than_cpus():
    tuning = tune(Simulation(lambda workers, chunk: 0.2, lambda batch: 0.1, cpu_share=0.02), cpus=2, max_workers=32)
    assert 8 <= tuning.auto.setting.workers <= 12
    assert tuning.rate == pytest.approx(10, rel=0.01)
    assert max(tuning.steps) <= 20


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_autotune_with_a_saturated_disk_takes_back_its_step(streams, sigma):
    disk = noisy(lambda workers, chunk: 0.05 * max(1, workers / streams), sigma)
    make = lambda: Simulation(disk, lambda batch: 0.01, cpu_share=0.1)  # noqa: E731
    tuning = tune(make(), 400)
    assert tuning.auto.setting.workers in (1, 4)
    assert tuning.auto.setting.workers >= streams
    *_, last_step = tuning.steps.values()
    assert last_step.after.workers < last_step.before.workers
    assert "more workers did not help: a batch took " in last_step.reason
    assert last_step.reason.endswith("; not tried again for 500 batches")
    assert tuning.rate > 0.93 * best_rate(make)


def test_autotune_retries_a_step_that_did_not_help_ever_more_rarely():
    tuning = tune(Simulation(lambda workers, chunk: 0.05 * workers, lambda batch: 0.01, cpu_share=0.1), 8000)
    _, *attempts = [batch for batch, step in tuning.steps.items() if step.after.workers > step.before.workers]
    assert len(attempts) == 4
    for n, (before, after) in enumerate(pairwise(attempts)):
        assert after - before > 400 * 2**n


def test_autotune_retries_more_workers_once_the_data_changes():
    disk = Simulation(lambda workers, chunk: 0.05 * workers, lambda batch: 0.01, cpu_share=0.1)
    tuning = tune(disk, 300, change={"chunk_s": lambda workers, chunk: 0.025}, change_at=100)
    assert tuning.workers_at(100) == 1
    assert tuning.auto.setting.workers >= 10  # 4 chunks of 25 ms in 10 ms


def test_autotune_stops_at_the_room_and_names_its_limit():
    tuning = tune(Simulation(decoding(8), quick_step), cpus=8, max_workers=3)
    assert tuning.auto.setting.workers == 3
    assert tuning.auto.verdict.endswith("and workers are limited by the memory")


@pytest.mark.parametrize("every", [5, 13])
def test_autotune_with_single_slow_samples_prefetches_more_instead_of_adding_workers(every):
    make = lambda: Simulation(lambda workers, chunk: 0.5 if chunk % (4 * every) == 7 else 0.02, lambda batch: 0.1)  # noqa: E731
    tuning = tune(make(), start=4, ahead=True)
    assert tuning.auto.setting.workers <= 4
    assert tuning.auto.setting.ahead == 8
    assert tuning.rate > 0.98 * 10
    fixed = tune(make(), start=4, workers=False)
    assert fixed.rate < 0.92 * 10


@pytest.mark.parametrize(("every", "slow_s", "step_s"), [(5, 0.5, 0.1), (8, 0.8, 0.06), (13, 0.5, 0.06)])
def test_autotune_raises_both_numbers_where_one_alone_does_not_help(every, slow_s, step_s):
    slow = lambda workers, chunk: slow_s if chunk % (4 * every) == 7 else 0.02  # noqa: E731
    tuning = tune(Simulation(slow, lambda batch: step_s), 400, start=1, ahead=True)
    assert tuning.auto.setting.workers >= 3
    assert tuning.auto.setting.ahead >= 8
    assert tuning.rate > 0.97 / step_s  # waits of up to 3% are left alone


def test_autotune_doubles_prefetch_factor_twice_before_it_gives_up():
    slow = lambda workers, chunk: 1.2 if chunk % 48 == 7 else 0.02  # noqa: E731
    tuning = tune(Simulation(slow, lambda batch: 0.1), 400, start=3, workers=False, ahead=True)
    assert tuning.auto.setting.ahead == 16
    assert tuning.rate > 0.98 * 10


def test_autotune_takes_back_a_prefetch_factor_that_did_not_help():
    waits = lambda batch: 0.1 if batch % 2 else 0.001  # noqa: E731
    tuning = tune(
        Simulation(lambda workers, chunk: 0.05 * workers, waits, cpu_share=0.1), 300, workers=False, ahead=True
    )
    assert tuning.auto.setting == Setting(1, 2)


def test_autotune_lowers_prefetch_factor_once_samples_become_even():
    simulation = Simulation(lambda workers, chunk: 0.5 if chunk % 20 == 7 else 0.02, lambda batch: 0.1)
    even = {"chunk_s": lambda workers, chunk: 0.02}
    tuning = tune(simulation, 1600, start=4, workers=False, ahead=True, change=even, change_at=200)
    assert max(step.after.ahead for step in tuning.steps.values()) == 8
    assert tuning.auto.setting.ahead == 2


def test_autotune_adds_no_worker_while_workers_wait_for_cpus():
    """Other programs leave two workers a quarter of two CPUs; the workers do not wait for a disk."""
    # `Load.cpus` includes the time waiting for a CPU.
    simulation = Simulation(decoding(2, 0.16), lambda batch: 0.001, cpu_share=1.0)
    assert max(tune(simulation, 200, cpus=2, start=2).workers, default=2) <= 2
    simulation = Simulation(decoding(2, 0.16), lambda batch: 0.001, cpu_share=0.25)  # only the CPU time they got
    assert max(tune(simulation, 200, cpus=2, start=2).workers) > 2


def test_autotune_follows_a_loop_that_becomes_faster():
    simulation = Simulation(decoding(16), lambda batch: 0.3)
    tuning = tune(simulation, 400, cpus=16, start=8, change={"step_s": lambda batch: 0.02}, change_at=200)
    assert tuning.workers_at(200) <= 2
    assert tuning.workers_at(260) == tuning.auto.setting.workers >= 8
    assert rate(tuning.seconds[200:]) == pytest.approx(50, rel=0.02)  # the last hundred


@pytest.mark.parametrize("every", [10, 40])
def test_autotune_does_not_count_workers_as_idle_during_pauses(every):
    tuning = tune(Simulation(decoding(8), lambda batch: 60.0 if batch % every == every - 1 else 0.05), 800, start=4)
    assert min(tuning.workers, default=4) >= 3


@pytest.mark.parametrize("seed", range(4))
def test_autotune_with_noisy_times_settles(seed):
    steps = random.Random(seed)
    chunks = noisy(decoding(8), 0.4, seed)
    tuning = tune(Simulation(chunks, lambda batch: 0.05 * steps.lognormvariate(0, 0.3)), 1000, start=4)
    assert sum(batch > 60 for batch in tuning.steps) <= 4
    assert tuning.rate > 0.9 / (0.05 * math.exp(0.3**2 / 2))


def window_lengths(auto: Autotune, *batches: tuple[float, float]) -> list[int]:
    """Return how many batches each window has. The batches, as (seconds, seconds waited), are repeated."""
    lengths, since = [], 0
    for number in range(60):
        if auto.add_batch(*batches[number % len(batches)]):
            lengths.append(number + 1 - since)
            since = number + 1
            auto.discard_window()
    return lengths


def test_window_has_more_batches_if_they_are_short_or_uneven_or_there_are_many_workers():
    assert window_lengths(Autotune(Setting(1, 2), cpus=8), (0.1, 0.01))[:2] == [4, 4]
    assert window_lengths(Autotune(Setting(1, 2), cpus=8), (0.008, 0.001))[:2] == [13, 13]  # at least 0.1 s
    growing = [(0.1 * 1.2**n, 0.01) for n in range(60)]  # the halves of a window never agree
    assert window_lengths(Autotune(Setting(1, 2), cpus=8), *growing)[:2] == [12, 12]
    lengths = window_lengths(Autotune(Setting(8, 2), cpus=8), (0.1, 0.01))
    assert lengths[0] == 32  # one chunk per batch: four rounds of 8 workers


def test_trial_of_a_prefetch_factor_skips_ready_batches_and_has_a_longer_window():
    auto = Autotune(Setting(4, 2), cpus=8, workers=False)
    auto.chunks = 4
    assert window_lengths(auto, (0.1, 0.02))[0] == 4
    auto.discard_window()
    auto.add_batch(0.1, 0.02)
    step = auto.decide(Load(2.0, 2.0), lambda: Room(8, 16, "CPUs"))
    assert step is not None
    assert (step.after, step.skip) == (Setting(4, 4), 1 + 4)
    assert window_lengths(auto, (0.1, 0.02))[0] == 12


def test_step_reason_states_the_wait_and_the_busy_workers():
    step, *_ = tune(Simulation(decoding(8), quick_step)).steps.values()
    figures = r"\(\d+\.\d of \d+\.\d ms per batch\), and 1\.0 of 1 workers are busy"
    assert re.fullmatch(rf"the loop waits 99% of the time {figures}", step.reason)


def test_accept_limit_ends_the_trial_at_the_workers_that_started():
    auto = Autotune(Setting(1, 2), cpus=8, ahead=False)
    while not auto.add_batch(0.1, 0.099):
        pass
    step = auto.decide(Load(1.0, 1.0), lambda: Room(8, 16, "CPUs"))
    assert step is not None
    assert step.after.workers == 4
    auto.accept_limit(2)
    assert auto.setting.workers == 2
    while not auto.add_batch(0.1, 0.099):
        pass
    step = auto.decide(Load(2.0, 2.0), lambda: Room(2, 16, "the maximum of 2"))
    assert step is None
    assert auto.verdict.endswith("limited by the maximum of 2")


# -- a loader with "auto" ---------------------------------------------------------------------------------------------


def noise_image(index: int) -> tuple[gl.Image, int]:
    return gl.Image(np.random.randint(0, 256, (20 + index % 7, 24, 3)).astype(np.uint8)), index


TRANSFORMS = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.5,) * 3)]


def make_loader(**options: Any) -> gl.Loader:
    defaults = {"batch_size": 8, "shuffle": True, "transforms": TRANSFORMS, "device": "cpu", "seed": 3, **options}
    return gl.Loader(MapDataset(noise_image, 400), **defaults)


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 4)
    monkeypatch.setattr("gpuload.loader.autotune.usable_cpus", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


@pytest.fixture
def script_rule(monkeypatch):
    """Return a function that replaces the rule by a list of decisions, one per batch."""

    def script(*settings: Setting) -> list[Setting]:
        remaining = list(settings)

        def decide(self: Autotune, load: Load, room: Any) -> Step | None:
            if not remaining:
                self.is_settled, self.verdict = True, "script ended"
                return None
            before, self.setting = self.setting, remaining.pop(0)
            return Step(before, self.setting, "scripted", 0)

        monkeypatch.setattr(Autotune, "add_batch", lambda self, seconds, waited_s: True)
        monkeypatch.setattr(Autotune, "decide", decide)
        return remaining

    return script


@pytest.mark.processes
def test_batches_have_equal_bits_while_the_number_of_workers_changes(four_cpus, script_rule, caplog):
    caplog.set_level(logging.INFO, "gpuload")
    remaining = script_rule(Setting(2, 2), Setting(1, 4), Setting(4, 1), Setting(2, 8), Setting(1, 1))
    with make_loader(num_workers=0) as fixed, make_loader(num_workers="auto", prefetch_factor="auto") as auto:
        worker_counts, epochs = set(), 0
        while remaining or not auto._autotune.is_settled:  # pyright: ignore
            epochs += 1
            assert epochs < 100
            for batch, expected in zip(auto, fixed, strict=True):
                assert all(map(torch.equal, batch, expected)), auto.num_workers
                worker_counts.add(auto.num_workers)
        assert worker_counts == {1, 2, 3, 4}
        assert (auto.num_workers, auto.prefetch_factor) == (1, 1)
    messages = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert "num_workers 2 → 1, prefetch_factor 2 → 4: scripted" in messages
    assert "settled at num_workers=1, prefetch_factor=1: script ended" in messages


@pytest.mark.processes
def test_load_state_dict_with_auto_resumes_with_the_settled_numbers(four_cpus, script_rule):
    script_rule(Setting(2, 3))
    auto = make_loader(num_workers="auto", prefetch_factor="auto", persistent_workers=False)
    auto._autotune = Autotune(Setting(1, 2), cpus=4)
    with auto:
        batches = iter(auto)
        for _ in range(30):
            next(batches)
        state = auto.state_dict()
        auto.close()
        assert (auto.num_workers, auto.prefetch_factor) == (2, 3)
        auto.load_state_dict(state)
        batches = iter(auto)
        assert auto._session is not None
        assert auto._session.engine.size == 2  # the settled numbers apply from the start
        assert auto._session.feed.workers == 2
        assert len(list(batches)) == 20


def test_num_workers_and_prefetch_factor_with_auto_are_the_numbers_at_the_start(four_cpus):
    auto = make_loader(num_workers="auto", prefetch_factor="auto")
    assert (auto.num_workers, auto.prefetch_factor) == (3, 2)
    assert "num_workers=3" in repr(auto)


@pytest.mark.parametrize(("options", "tunes"), [
    ({"num_workers": 2}, None),
    ({"num_workers": 0, "prefetch_factor": "auto"}, None),
    ({}, None),
    ({"num_workers": "auto"}, {"workers": True, "ahead": False}),
    ({"num_workers": 2, "prefetch_factor": "auto"}, {"workers": False, "ahead": True}),
])  # fmt: skip
def test_autotune_of_a_loader_changes_only_the_arguments_set_to_auto(options, tunes):
    auto = make_loader(**options)._autotune
    assert (auto and auto._tunes) == tunes


# -- the tuner --------------------------------------------------------------------------------------------------------


class TunerRig:
    """A tuner whose pool, feed and stage do nothing, with a clock that the test moves."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now, self.max_workers, self.size, self.is_steady = 100.0, 8, 2, True
        self.busy, self.cpu, self.pids = 0.0, {1: 5.0, 2: 7.0}, [1, 2]
        self.resizes: list[int] = []
        self.feed: Any = SimpleNamespace(chunk_size=8, batches=[None] * 2, workers=2, ring=SimpleNamespace())
        self.feed.ring.slot_bytes, self.feed.ring.ring_bytes = 30 << 20, 100 << 20
        self.stage: Any = SimpleNamespace(cpu_threads=1)
        self.auto = Autotune(Setting(2, 2), cpus=4)
        monkeypatch.setattr(autotune.time, "perf_counter", lambda: self.now)
        for limit in ("processes_left", "descriptors_left", "memory_left_bytes"):
            monkeypatch.setattr(autotune, limit, lambda: None)
        self.tuner = Tuner(self.auto, make_loader(num_workers="auto")._options, self, self.feed, self.stage)  # pyright: ignore
        self.tuner.begin()

    def resize(self, workers: int) -> None:
        self.resizes.append(workers)

    def busy_s(self) -> float:
        return self.busy

    def wanted_cpu_s(self) -> dict[int, float]:
        return dict(self.cpu)

    def batch(self, seconds: float, waited: float = 0.0, busy: float = 0.0, cpu: float = 0.0) -> None:
        self.now += seconds
        self.busy += busy
        self.cpu[1] += cpu
        self.tuner.record_batch(waited)


@pytest.fixture
def rig(monkeypatch, four_cpus):
    return TunerRig(monkeypatch)


@pytest.fixture
def rule_inputs(monkeypatch):
    """Record the input of a rule that has windows of three batches and changes nothing."""
    inputs: list[Any] = []
    monkeypatch.setattr(Autotune, "add_batch", lambda self, *batch: inputs.append(batch) or len(inputs) % 4 == 3)
    monkeypatch.setattr(Autotune, "decide", lambda self, load, room: inputs.append(load))
    return inputs


def test_window_covers_its_batches_and_the_work_of_workers_meanwhile(rig, rule_inputs):
    rig.batch(9.0, 9.0, busy=50.0, cpu=50.0)  # the first batch of an epoch does not count
    rig.batch(9.0, 9.0, busy=50.0, cpu=50.0)  # nor does the second, with which the window begins
    rig.batch(0.5, 0.125, busy=0.75, cpu=0.25)
    rig.batch(0.25, 0.0, busy=0.25)
    rig.cpu[3] = 1000.0  # a process that is new in this window
    rig.batch(0.25, 0.25, busy=0.5)
    assert rule_inputs == [(0.5, 0.125), (0.25, 0.0), (0.25, 0.25), Load(busy=1.5, cpus=0.25)]


def test_window_continues_in_the_next_epoch(rig, rule_inputs):
    rig.batch(9.0)
    rig.batch(9.0)
    rig.batch(0.5, busy=1.0, cpu=0.5)
    rig.tuner.begin()
    rig.batch(9.0, 9.0, busy=50.0, cpu=50.0)
    rig.batch(9.0, 9.0, busy=50.0, cpu=50.0)
    rig.batch(0.25, busy=0.5)
    rig.batch(0.25)
    assert rule_inputs[-1] == Load(busy=1.5, cpus=0.5)


def test_window_excludes_the_time_in_which_workers_start_or_stop(rig, rule_inputs):
    for _ in range(3):
        rig.batch(1.0, busy=2.0, cpu=1.0)
    rig.is_steady = False
    rig.batch(5.0, busy=9.0)
    rig.is_steady = True
    rig.batch(1.0)
    rule_inputs.clear()
    for _ in range(3):
        rig.batch(0.5, busy=0.5)
    assert rule_inputs[-1] == Load(busy=1.0, cpus=1.0)  # the CPU clocks do not move, so all time counts as computing


def test_tuner_applies_and_logs_a_decision_of_the_rule(rig, script_rule, caplog):
    caplog.set_level(logging.INFO, "gpuload")
    script_rule(Setting(3, 5))
    for _ in range(3):
        rig.batch(1.0)
    assert rig.resizes == [3]
    assert (rig.feed.workers, rig.feed.ahead, rig.stage.cpu_threads) == (3, 9, 1)  # a chunk is a batch
    # Loaders of earlier tests may log elsewhere.
    messages = [record.getMessage() for record in caplog.records if record.name == "gpuload"]
    assert messages == ["num_workers 2 → 3, prefetch_factor 2 → 5: scripted"]


def test_tuner_accepts_a_pool_that_cannot_grow(rig):
    rig.auto.setting = Setting(6, 2)
    rig.batch(1.0)
    rig.max_workers, rig.size, rig.is_steady = 2, 2, False
    rig.batch(1.0)
    assert rig.auto.setting == Setting(2, 2)
    assert rig.resizes == [2]


@pytest.mark.parametrize(("limits", "room"), [
    ({}, Room(8, 8, "the maximum of 8")),
    ({"memory_left_bytes": 200_000_000}, Room(4, 8, "memory")),  # half of it is used, 45 MB per worker
    ({"memory_left_bytes": 0}, Room(2, 2, "memory")),
    ({"descriptors_left": 22}, Room(4, 8, "open files")),  # 12 while a worker starts, 5 per worker
    ({"processes_left": (6, "a limit")}, Room(5, 8, "processes")),  # half of them are used
])  # fmt: skip
def test_room_is_limited_by_memory_open_files_and_processes(limits, room, rig, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(autotune, name, lambda value=value: value)
    assert rig.tuner._room() == room


def test_room_counts_the_measured_memory_of_workers(rig, monkeypatch):
    monkeypatch.setattr(autotune, "memory_left_bytes", lambda: 4_000_000_000)
    rig.pids, rig.max_workers = [os.getpid()], 10_000  # with torch, it uses more than 45 MB
    assert 2 < rig.tuner._room().workers < 2 + 2_000_000_000 // 45_000_000
