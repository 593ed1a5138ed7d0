"""The rule of "auto" on simulated loaders: it finds what is best, soon, and stays there. No clock, no process.

And the tuner of a running loader: what is measured and done, and that the data never change by it.
"""

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

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader import autotune
from gpuload.loader.autotune import MAX_AHEAD, Autotune, Load, Room, Setting, Step, Tuner

START_S = 0.3  # of a worker


@dataclass
class Plant:
    """A loader, its data and a training loop, in simulated time.

    `chunk_s(workers, number)` is how long a worker is at a chunk while so many are at work, `cpu` which part of that it
    computes, `step_s(batch)` what the loop does with a batch. Workers take chunks in order; those of a batch can begin
    once it is among the `ahead` next ones. A device that is `device_s` at each batch runs beside the loop, which may be
    two steps ahead of it.
    """

    chunk_s: Callable[[int, int], float]
    step_s: Callable[[int], float]
    chunks: int = 4
    cpu: float = 1.0
    ahead: int = 2
    device_s: float = 0.0
    device_ends: deque[float] = field(default_factory=lambda: deque([0.0, 0.0], 2))  # of the last two steps
    now: float = 0.0
    given: int = 0
    free: list[float] = field(default_factory=list)  # when each worker is free
    queue: deque[tuple[int, int, float]] = field(default_factory=deque)  # batch, chunk number, since when
    ends: dict[int, list[float]] = field(default_factory=dict)  # of the chunks of each batch
    spans: list[tuple[float, float]] = field(default_factory=list)  # at chunks
    admitted: int = 0
    number: int = 0

    def resize(self, workers: int) -> None:
        while len(self.free) > workers:
            self.free.remove(min(self.free))
        self.free += [self.now + START_S] * (workers - len(self.free))

    def next(self) -> tuple[float, float]:
        """Seconds of a batch, and how long the loop waited for it."""
        began = self.now
        self.now += self.step_s(self.given)
        self.now = max(self.now, self.device_ends[0])
        self.device_ends.append(max(self.now, self.device_ends[-1]) + self.device_s)
        self._admit(began)
        while len(self.ends.get(self.given, ())) < self.chunks:
            self._take(math.inf)
        ready = max(self.ends.pop(self.given))
        waited = max(0.0, ready - self.now)
        self.now += waited
        self.given += 1
        self._admit(self.now)
        self._take(self.now)
        return self.now - began, waited

    def _admit(self, when: float) -> None:
        while self.admitted < self.given + max(self.ahead, 1 - (-2 * len(self.free) // self.chunks)):
            for _ in range(self.chunks):
                self.queue.append((self.admitted, self.number, when))
                self.number += 1
            self.admitted += 1

    def _take(self, until: float) -> None:
        """Let workers take chunks: all that they do until then, or one if that is for ever."""
        while self.queue:
            batch, number, since = self.queue[0]
            worker = min(range(len(self.free)), key=self.free.__getitem__)
            start = max(self.free[worker], since)
            if start > until:
                return
            self.queue.popleft()
            self.free[worker] = start + self.chunk_s(len(self.free), number)
            self.ends.setdefault(batch, []).append(self.free[worker])
            self.spans.append((start, self.free[worker]))
            if until == math.inf:
                return

    def load(self, since: float) -> Load:
        busy = sum(max(0.0, min(end, self.now) - max(start, since)) for start, end in self.spans)
        self.spans = [(start, end) for start, end in self.spans if end > self.now]
        busy /= self.now - since
        return Load(busy, busy * self.cpu)


def decoding(cpus: int, seconds: float = 0.04) -> Callable[[int, int], float]:
    """A chunk is work for a processor, of which there are so many."""
    return lambda workers, number: seconds * max(1.0, workers / cpus)


def noisy(chunk_s: Callable[[int, int], float], sigma: float, seed: int = 0) -> Callable[[int, int], float]:
    """The same, but no two chunks take the same time."""
    rng = random.Random(seed)
    return lambda workers, number: chunk_s(workers, number) * rng.lognormvariate(0, sigma)


@dataclass
class Run:
    steps: list[tuple[int, Step]]
    settled: list[int]  # the batches after which it was settled
    seconds: list[float]  # of each batch
    auto: Autotune

    @property
    def rate(self) -> float:
        """Batches a second, in the second half."""
        return rate(self.seconds)

    @property
    def workers(self) -> list[int]:
        return [step.after.workers for _, step in self.steps]


def run(
    plant: Plant,
    batches: int = 300,
    *,
    cpus: int = 8,
    most: int = 64,
    start: int = 1,
    workers: bool = True,
    ahead: bool = False,
    change: Callable[[Plant], None] = lambda plant: None,
    at: int = -1,
) -> Run:
    """What a `Tuner` does, in the plant's time."""
    auto = Autotune(Setting(start, plant.ahead), cpus=cpus, workers=workers, ahead=ahead)
    auto.chunks = plant.chunks
    plant.resize(start)
    found, ready, skip, since = Run([], [], [], auto), START_S, 1, 0.0
    for number in range(batches):
        if number == at:
            change(plant)
        seconds, waited = plant.next()
        found.seconds.append(seconds)
        if plant.now < ready:
            continue
        if skip:
            skip -= 1
            since = plant.now
            plant.load(since - 1e-9)
            continue
        if auto.add_batch(seconds, waited):
            step = auto.decide(plant.load(since), lambda: Room(most, MAX_AHEAD, "the memory"))
            since = plant.now
            if step is not None:
                found.steps.append((number, step))
                assert step.after == auto.setting
                plant.ahead = auto.setting.ahead
                if step.after.workers > step.before.workers:
                    ready = plant.now + START_S
                plant.resize(auto.setting.workers)
                skip = step.skip + 1
            elif auto.is_settled:
                found.settled.append(number)
    return found


def best(make: Callable[[], Plant], most: int = 64, batches: int = 600) -> float:
    """The rate with the best fixed number of workers."""
    rates = []
    for workers in sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, most}):
        if workers <= most:
            plant = make()
            plant.resize(workers)
            rates.append(rate([plant.next()[0] for _ in range(batches)]))
    return max(rates)


def rate(seconds: list[float]) -> float:
    half = seconds[len(seconds) // 2 :]
    return len(half) / sum(half)


# -- what it finds ----------------------------------------------------------------------------------------------------


def quick(batch: int) -> float:
    return 0.001


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("cpus", [1, 2, 4, 8, 16])
def test_where_decoding_bounds_it_takes_all_cpus_and_no_more(cpus, sigma):
    make = lambda: Plant(noisy(decoding(cpus), sigma), quick, chunks=max(4, cpus // 2))  # noqa: E731
    found = run(make(), cpus=cpus, start=min(8, max(1, cpus - 1)))
    assert found.auto.setting.workers == cpus
    assert found.auto.verdict == "the loop waits {:.0%} of the time, and workers are limited by CPUs".format(
        float(found.auto.verdict.split()[3].rstrip("%")) / 100
    )
    assert found.rate > 0.95 * best(make, 2 * cpus)
    assert len(found.steps) <= 1


def test_from_few_to_many_cpus_it_is_there_within_twenty_batches():
    found = run(Plant(decoding(64), quick, chunks=64), 100, cpus=64, start=8)
    assert found.workers == [32, 64]
    assert found.steps[-1][0] <= 20
    assert found.rate > 0.95 / 0.04


def test_where_the_step_bounds_it_leaves_as_many_as_are_needed():
    found = run(Plant(decoding(8), lambda batch: 0.3), start=7)
    assert found.auto.setting.workers in (1, 2)
    assert found.rate == pytest.approx(1 / 0.3, rel=0.001)
    assert found.settled[0] <= 30
    assert found.auto.verdict == "the loop waits 0.0% of the time"


def test_it_stops_where_the_loop_no_longer_waits():
    found = run(Plant(decoding(8), lambda batch: 0.05), start=1)  # 4 chunks of 40 ms in 50 ms
    assert found.workers == [4]
    assert found.rate == pytest.approx(1 / 0.05, rel=0.001)
    assert found.settled[0] <= 20


@pytest.mark.parametrize("step_s", [0.005, 0.01])
def test_a_device_that_works_while_the_loop_waits_hides_how_much_there_is_to_gain(step_s):
    """One worker takes 60 ms for a batch, and the device 50: the loop waits nearly always, and two workers give 20%."""
    make = lambda: Plant(decoding(8, 0.015), lambda batch: step_s, device_s=0.05)  # noqa: E731
    found = run(make(), 600)
    assert found.auto.setting.workers >= 2
    assert found.rate == pytest.approx(20, rel=0.001)
    assert not any("did not help" in step.reason for _, step in found.steps)


def test_workers_that_wait_for_others_may_be_more_than_the_cpus():
    make = lambda: Plant(lambda workers, number: 0.2, lambda batch: 0.1, cpu=0.02)  # noqa: E731
    found = run(make(), cpus=2, most=32)
    assert 8 <= found.auto.setting.workers <= 12
    assert found.rate == pytest.approx(10, rel=0.01)
    assert found.steps[-1][0] <= 20


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_a_disk_that_gives_no_more_is_found_out_and_the_step_taken_back(streams, sigma):
    disk = noisy(lambda workers, number: 0.05 * max(1, workers / streams), sigma)
    make = lambda: Plant(disk, lambda batch: 0.01, cpu=0.1)  # noqa: E731
    found = run(make(), 400)
    assert found.auto.setting.workers in (1, 4)
    assert found.auto.setting.workers >= streams
    last = found.steps[-1][1]
    assert last.after.workers < last.before.workers
    assert "more workers did not help: a batch took " in last.reason
    assert last.reason.endswith("; not tried again for 500 batches")
    assert found.rate > 0.93 * best(make)


def test_a_step_in_vain_is_tried_ever_more_rarely():
    found = run(Plant(lambda workers, number: 0.05 * workers, lambda batch: 0.01, cpu=0.1), 8000)
    tried = [number for number, step in found.steps if step.after.workers > step.before.workers][1:]
    assert len(tried) == 4
    assert [after - before > 400 * 2**n for n, (before, after) in enumerate(pairwise(tried))] == [True] * 3


def test_what_did_not_help_is_tried_again_once_the_data_are_others():
    def becomes_a_better_one(plant: Plant) -> None:
        plant.chunk_s = lambda workers, number: 0.025

    disk = Plant(lambda workers, number: 0.05 * workers, lambda batch: 0.01, cpu=0.1)
    found = run(disk, 300, change=becomes_a_better_one, at=100)
    before = [step for number, step in found.steps if number < 100]
    assert before[-1].after.workers == 1
    assert found.auto.setting.workers >= 10  # 4 chunks of 25 ms in 10 ms


def test_memory_bounds_it_and_it_says_so():
    found = run(Plant(decoding(8), quick), cpus=8, most=3)
    assert found.auto.setting.workers == 3
    assert found.auto.verdict.endswith("and workers are limited by the memory")


@pytest.mark.parametrize("every", [5, 13])
def test_single_slow_samples_take_more_batches_ahead_and_not_more_workers(every):
    make = lambda: Plant(lambda workers, number: 0.5 if number % (4 * every) == 7 else 0.02, lambda batch: 0.1)  # noqa: E731
    found = run(make(), start=4, ahead=True)
    assert found.auto.setting.workers <= 4
    assert found.auto.setting.ahead == 8
    assert found.rate > 0.98 * 10
    fixed = run(make(), start=4, workers=False)
    assert fixed.rate < 0.92 * 10


@pytest.mark.parametrize(("every", "slow_s", "step_s"), [(5, 0.5, 0.1), (8, 0.8, 0.06), (13, 0.5, 0.06)])
def test_both_are_found_where_one_alone_does_not_help(every, slow_s, step_s):
    slow = lambda workers, number: slow_s if number % (4 * every) == 7 else 0.02  # noqa: E731
    found = run(Plant(slow, lambda batch: step_s), 400, start=1, ahead=True)
    assert found.auto.setting.workers >= 3
    assert found.auto.setting.ahead >= 8
    assert found.rate > 0.97 / step_s  # waits of up to 3% are left alone


def test_if_twice_as_many_ahead_are_too_few_it_goes_on_before_it_gives_up():
    slow = lambda workers, number: 1.2 if number % 48 == 7 else 0.02  # noqa: E731
    found = run(Plant(slow, lambda batch: 0.1), 400, start=3, workers=False, ahead=True)
    assert found.auto.setting.ahead == 16
    assert found.rate > 0.98 * 10


def test_more_batches_ahead_that_do_not_help_are_taken_back():
    waits = lambda batch: 0.1 if batch % 2 else 0.001  # noqa: E731
    found = run(Plant(lambda workers, number: 0.05 * workers, waits, cpu=0.1), 300, workers=False, ahead=True)
    assert found.auto.setting == Setting(1, 2)


def test_batches_ahead_that_are_no_longer_of_use_are_given_back():
    plant = Plant(lambda workers, number: 0.5 if number % 20 == 7 else 0.02, lambda batch: 0.1)

    def becomes_even(plant: Plant) -> None:
        plant.chunk_s = lambda workers, number: 0.02

    found = run(plant, 1600, start=4, workers=False, ahead=True, change=becomes_even, at=200)
    assert max(step.after.ahead for _, step in found.steps) == 8
    assert found.auto.setting.ahead == 2


def test_workers_that_wait_for_cpus_get_no_company():
    """Beside other programs, two workers have a quarter of two CPUs; what they wait for is not a disk."""
    plant = Plant(decoding(2, 0.16), lambda batch: 0.001, cpu=1.0)  # `Load.cpus` has what they wait for a CPU, too
    assert max(run(plant, 200, cpus=2, start=2).workers, default=2) <= 2
    plant = Plant(decoding(2, 0.16), lambda batch: 0.001, cpu=0.25)  # what they had of them alone
    assert max(run(plant, 200, cpus=2, start=2).workers) > 2


def test_it_follows_a_loop_and_data_that_change():
    plant = Plant(decoding(16), lambda batch: 0.3)

    def becomes_quick(plant: Plant) -> None:
        plant.step_s = lambda batch: 0.02

    found = run(plant, 400, cpus=16, start=8, change=becomes_quick, at=200)
    before = [step for number, step in found.steps if number < 200]
    after = [(number, step) for number, step in found.steps if number >= 200]
    assert before[-1].after.workers <= 2
    assert after[-1][1].after.workers >= 8
    assert after[-1][0] <= 260
    assert rate(found.seconds[200:]) == pytest.approx(50, rel=0.02)  # the last hundred


def test_a_pause_of_the_loop_is_no_step_of_it():
    found = run(Plant(decoding(8), lambda batch: 60.0 if batch % 40 == 39 else 0.05), 400, start=1)
    assert found.workers == [4]


@pytest.mark.parametrize("every", [10, 40])
def test_a_pause_of_the_loop_does_not_make_its_workers_look_idle(every):
    found = run(Plant(decoding(8), lambda batch: 60.0 if batch % every == every - 1 else 0.05), 800, start=4)
    assert all(workers >= 3 for workers in found.workers)


@pytest.mark.parametrize("seed", range(4))
def test_noise_does_not_make_it_swing(seed):
    steps = random.Random(seed)
    chunks = noisy(decoding(8), 0.4, seed)
    found = run(Plant(chunks, lambda batch: 0.05 * steps.lognormvariate(0, 0.3)), 1000, start=4)
    assert sum(number > 60 for number, _ in found.steps) <= 4
    assert found.rate > 0.9 / (0.05 * math.exp(0.3**2 / 2))


def windows(auto: Autotune, *batches: tuple[float, float]) -> list[int]:
    """How many batches each window has, of these again and again."""
    found, since = [], 0
    for number in range(60):
        if auto.add_batch(*batches[number % len(batches)]):
            found.append(number + 1 - since)
            since = number + 1
            auto.discard_window()
    return found


def test_a_window_is_as_long_as_its_figures_need():
    assert windows(Autotune(Setting(1, 2), cpus=8), (0.1, 0.01))[:2] == [4, 4]
    assert windows(Autotune(Setting(1, 2), cpus=8), (0.008, 0.001))[:2] == [13, 13]  # a tenth of a second
    growing = [(0.1 * 1.2**n, 0.01) for n in range(60)]  # its halves never agree
    assert windows(Autotune(Setting(1, 2), cpus=8), *growing)[:2] == [12, 12]
    assert windows(Autotune(Setting(8, 2), cpus=8), (0.1, 0.01))[0] == 32  # of one chunk a batch: four waves of 8


def test_a_trial_of_batches_ahead_has_a_long_window_and_what_is_ready_already_does_not_count():
    auto = Autotune(Setting(4, 2), cpus=8, workers=False)
    auto.chunks = 4
    assert windows(auto, (0.1, 0.02))[0] == 4
    auto.discard_window()
    auto.add_batch(0.1, 0.02)
    step = auto.decide(Load(2.0, 2.0), lambda: Room(8, 16, "CPUs"))
    assert step is not None
    assert (step.after, step.skip) == (Setting(4, 4), 1 + 4)
    assert windows(auto, (0.1, 0.02))[0] == 12


def test_the_same_makes_the_same():
    runs = [run(Plant(noisy(decoding(8), 0.4), quick), cpus=8) for _ in range(2)]
    assert runs[0].steps == runs[1].steps
    assert runs[0].steps[0][1].reason == (
        "the loop waits 99% of the time ({:.1f} of {:.1f} ms per batch), and 1.0 of 1 workers are busy".format(
            *map(float, re.findall(r"\d+\.\d", runs[0].steps[0][1].reason)[:2])
        )
    )


def test_what_it_may_not_change_stays():
    found = run(Plant(decoding(8), quick), workers=False, ahead=False)
    assert found.steps == []
    assert found.auto.setting == Setting(1, 2)


def test_a_start_that_was_refused_ends_the_trial():
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


# -- a tuner ----------------------------------------------------------------------------------------------------------


class Numbered:
    """Sample i is an image of its own size, with noise drawn from the global generator, and its number."""

    def __init__(self, samples: int = 400) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        noise = np.random.randint(0, 256, (20 + index % 7, 24, 3)).astype(np.uint8)
        return gl.Image(noise), index


TRANSFORMS = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.5,) * 3)]


def loader(**options: Any) -> gl.Loader:
    given = {"batch_size": 8, "shuffle": True, "transforms": TRANSFORMS, "device": "cpu", "seed": 3, **options}
    return gl.Loader(Numbered(), **given)


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 4)
    monkeypatch.setattr("gpuload.loader.autotune.usable_cpus", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


@pytest.fixture
def scripted(monkeypatch):
    """Let a rule say, batch after batch, what this list says."""

    def make(*settings: Setting) -> list[Setting]:
        left = list(settings)

        def decide(self: Autotune, load: Load, room: Any) -> Step | None:
            if not left:
                self.is_settled, self.verdict = True, "that is all"
                return None
            before, self.setting = self.setting, left.pop(0)
            return Step(before, self.setting, "so it is written", 0)

        monkeypatch.setattr(Autotune, "add_batch", lambda self, seconds, waited_s: True)
        monkeypatch.setattr(Autotune, "decide", decide)
        return left

    return make


# -- the data ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_batches_are_equal_to_the_last_bit_while_workers_come_and_go(four_cpus, scripted, caplog):
    caplog.set_level(logging.INFO, "gpuload")
    left = scripted(Setting(2, 2), Setting(1, 4), Setting(4, 1), Setting(2, 8), Setting(1, 1))
    with loader(num_workers=0) as fixed, loader(num_workers="auto", prefetch_factor="auto") as auto:
        numbers, epochs = set(), 0
        while left or not auto._autotune.is_settled:  # pyright: ignore
            epochs += 1
            assert epochs < 100
            for ours, theirs in zip(auto, fixed, strict=True):
                assert torch.equal(ours[0], theirs[0])
                assert torch.equal(ours[1], theirs[1])
                numbers.add(auto.num_workers)
        assert numbers == {1, 2, 3, 4}
        assert (auto.num_workers, auto.prefetch_factor) == (1, 1)
    told = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert "num_workers 2 → 1, prefetch_factor 2 → 4: so it is written" in told
    assert "settled at num_workers=1, prefetch_factor=1: that is all" in told


@pytest.mark.processes
def test_a_state_goes_on_with_any_number_and_what_was_settled_stays(four_cpus, scripted):
    with loader(num_workers=0) as fixed:
        wanted = list(fixed)
    scripted(Setting(2, 3))
    auto = loader(num_workers="auto", prefetch_factor="auto", persistent_workers=False)
    auto._autotune = Autotune(Setting(1, 2), cpus=4)
    with auto:
        batches = iter(auto)
        found = [next(batches) for _ in range(30)]
        state = auto.state_dict()
        auto.close()
        assert (auto.num_workers, auto.prefetch_factor) == (2, 3)
        auto.load_state_dict(state)
        batches = iter(auto)
        assert auto._session is not None
        assert auto._session.engine.size == 2  # from its beginning
        assert auto._session.feed.workers == 2
        found += list(batches)
    with loader(num_workers=0) as fixed:
        fixed.load_state_dict(state)
        assert torch.equal(next(iter(fixed))[0], wanted[30][0])
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(found, wanted, strict=True))


# -- a loader with "auto" ----------------------------------------------------------------------------------------------


def test_its_numbers_are_those_of_this_moment_and_cannot_be_set(four_cpus):
    auto = loader(num_workers="auto", prefetch_factor="auto")
    assert (auto.num_workers, auto.prefetch_factor) == (3, 2)
    assert "num_workers=3" in repr(auto)
    with pytest.raises(ValueError, match="num_workers cannot be changed after the Loader"):
        auto.num_workers = 2  # pyright: ignore


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 0, "prefetch_factor": "auto"}, {}])
def test_without_auto_or_without_workers_nothing_is_tuned(options):
    assert loader(**options)._autotune is None


@pytest.mark.parametrize(
    ("options", "tunes"),
    [
        ({"num_workers": "auto"}, {"workers": True, "ahead": False}),
        ({"num_workers": 2, "prefetch_factor": "auto"}, {"workers": False, "ahead": True}),
    ],
)
def test_only_what_is_auto_is_tuned(options, tunes):
    auto = loader(**options)._autotune
    assert auto is not None
    assert auto._tunes == tunes


# -- measuring --------------------------------------------------------------------------------------------------------


class Clockwork:
    """A pool, a feed and a stage that do nothing, and a clock that goes when told to."""

    def __init__(self, monkeypatch: Any, workers: int = 2) -> None:
        self.now, self.max_workers, self.size, self.is_steady = 100.0, 8, workers, True
        self.busy, self.cpu, self.pids = 0.0, {1: 5.0, 2: 7.0}, [1, 2]
        self.asked: list[int] = []
        self.feed: Any = SimpleNamespace(chunk_size=8, batches=[None] * 2, workers=workers, ring=SimpleNamespace())
        self.feed.ring.slot_bytes, self.feed.ring.ring_bytes = 30 << 20, 100 << 20
        self.stage: Any = SimpleNamespace(cpu_threads=1)
        self.auto = Autotune(Setting(workers, 2), cpus=4)
        monkeypatch.setattr(autotune.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(autotune, "processes_left", lambda: None)
        monkeypatch.setattr(autotune, "descriptors_left", lambda: None)
        monkeypatch.setattr(autotune, "memory_left_bytes", lambda: None)
        self.tuner = Tuner(self.auto, loader(num_workers="auto")._options, self, self.feed, self.stage)  # pyright: ignore

    def resize(self, workers: int) -> None:
        self.asked.append(workers)

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
def clockwork(monkeypatch, four_cpus):
    return lambda **options: Clockwork(monkeypatch, **options)


@pytest.fixture
def seen(monkeypatch):
    """What the rule is given: windows of three batches; it changes nothing."""
    found: list[Any] = []
    monkeypatch.setattr(Autotune, "add_batch", lambda self, *batch: found.append(batch) or len(found) % 4 == 3)
    monkeypatch.setattr(Autotune, "decide", lambda self, load, room: found.append(load))
    return found


def test_a_window_has_its_batches_and_what_workers_did_meanwhile(clockwork, seen):
    made = clockwork()
    made.tuner.begin()
    made.batch(9.0, 9.0, busy=50.0, cpu=50.0)  # the first of an epoch takes as long as it takes
    made.batch(9.0, 9.0, busy=50.0, cpu=50.0)  # the first after that one
    made.batch(0.5, 0.125, busy=0.75, cpu=0.25)
    made.batch(0.25, 0.0, busy=0.25)
    made.cpu[3] = 1000.0  # of a process that was not there before
    made.batch(0.25, 0.25, busy=0.5)
    assert seen == [(0.5, 0.125), (0.25, 0.0), (0.25, 0.25), Load(busy=1.5, cpus=0.25)]


def test_a_window_goes_on_after_the_end_of_an_epoch(clockwork, seen):
    made = clockwork()
    made.tuner.begin()
    made.batch(9.0)
    made.batch(9.0)
    made.batch(0.5, busy=1.0, cpu=0.5)
    made.tuner.begin()
    made.batch(9.0, 9.0, busy=50.0, cpu=50.0)
    made.batch(9.0, 9.0, busy=50.0, cpu=50.0)
    made.batch(0.25, busy=0.5)
    made.batch(0.25)
    assert seen[-1] == Load(busy=1.5, cpus=0.5)


def test_what_happens_while_workers_come_or_go_does_not_count(clockwork, seen):
    made = clockwork()
    made.tuner.begin()
    for _ in range(3):
        made.batch(1.0, busy=2.0, cpu=1.0)
    made.is_steady = False
    made.batch(5.0, busy=9.0)
    made.is_steady = True
    made.batch(1.0)
    seen.clear()
    for _ in range(3):
        made.batch(0.5, busy=0.5)
    assert seen[-1] == Load(busy=1.0, cpus=1.0)  # their clocks stand still, so all is taken for computing


def test_what_is_decided_is_done(clockwork, scripted, caplog):
    caplog.set_level(logging.INFO, "gpuload")
    scripted(Setting(3, 5))
    made = clockwork()
    made.tuner.begin()
    for _ in range(3):
        made.batch(1.0)
    assert made.asked == [3]
    assert (made.feed.workers, made.feed.ahead, made.stage.cpu_threads) == (3, 9, 1)  # a chunk is a batch
    told = [record.getMessage() for record in caplog.records if record.name == "gpuload"]  # garbage may log elsewhere
    assert told == ["num_workers 2 → 3, prefetch_factor 2 → 5: so it is written"]


def test_a_pool_that_cannot_grow_is_taken_as_it_is(clockwork):
    made = clockwork()
    made.auto.setting = Setting(6, 2)
    made.tuner.begin()
    made.batch(1.0)
    made.max_workers, made.size, made.is_steady = 2, 2, False
    made.batch(1.0)
    assert made.auto.setting == Setting(2, 2)
    assert made.asked == [2]


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({}, Room(8, 8, "the maximum of 8")),
        ({"memory_left_bytes": 200_000_000}, Room(4, 8, "memory")),  # half of it, 45 MB each
        ({"memory_left_bytes": 0}, Room(2, 2, "memory")),
        ({"descriptors_left": 22}, Room(4, 8, "open files")),  # 12 while one is started, 5 each
        ({"processes_left": (6, "a limit")}, Room(5, 8, "processes")),  # half of them
    ],
)
def test_there_is_room_for_what_the_machine_allows(limits, room, clockwork, monkeypatch):
    made = clockwork()
    for name, value in limits.items():
        monkeypatch.setattr(autotune, name, lambda value=value: value)
    assert made.tuner._room() == room


def test_workers_that_take_more_count_as_what_they_take(clockwork, monkeypatch):
    made = clockwork()
    monkeypatch.setattr(autotune, "memory_left_bytes", lambda: 4_000_000_000)
    made.pids, made.max_workers = [os.getpid()], 10_000  # this process has torch
    assert 2 < made.tuner._room().workers < 2 + 2_000_000_000 // 45_000_000
