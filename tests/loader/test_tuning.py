"""Tuning a running loader: what is measured and done, and that the data never change by it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader import tuning
from gpuload.loader.autotune import Autotune, Load, Room, Setting, Step
from gpuload.loader.tuning import Tuner


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
    monkeypatch.setattr("gpuload.loader.tuning.usable_cpus", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


@pytest.fixture
def scripted(monkeypatch):
    """Let a rule say, batch after batch, what this list says."""

    def make(*settings: Setting) -> list[Setting]:
        left = list(settings)

        def decide(self: Autotune, load: Load, room: Any) -> Step | None:
            if not left:
                self.settled, self.verdict = True, "that is all"
                return None
            before, self.setting = self.setting, left.pop(0)
            return Step(before, self.setting, "so it is written", 0)

        monkeypatch.setattr(Autotune, "watch", lambda self, seconds, waited_s: True)
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
        while left or not auto._autotune.settled:  # pyright: ignore
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
    with pytest.raises(ValueError, match="num_workers cannot be changed once the Loader is made"):
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
        self.now, self.most, self.size, self.is_steady = 100.0, 8, workers, True
        self.busy, self.cpu, self.pids = 0.0, {1: 5.0, 2: 7.0}, [1, 2]
        self.asked: list[int] = []
        self.feed: Any = SimpleNamespace(chunk_size=8, ahead=2, workers=workers, ring=SimpleNamespace())
        self.feed.ring.slot_bytes, self.feed.ring.ring_bytes = 30 << 20, 100 << 20
        self.stage: Any = SimpleNamespace(cpu_threads=1)
        self.auto = Autotune(Setting(workers, 2), cpus=4)
        monkeypatch.setattr(tuning.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(tuning, "processes_left", lambda: None)
        monkeypatch.setattr(tuning, "descriptors_left", lambda: None)
        monkeypatch.setattr(tuning, "memory_left_bytes", lambda: None)
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
        self.tuner.batch(waited)


@pytest.fixture
def clockwork(monkeypatch, four_cpus):
    return lambda **options: Clockwork(monkeypatch, **options)


@pytest.fixture
def seen(monkeypatch):
    """What the rule is given: windows of three batches; it changes nothing."""
    found: list[Any] = []
    monkeypatch.setattr(Autotune, "watch", lambda self, *batch: found.append(batch) or len(found) % 4 == 3)
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
    assert (made.feed.workers, made.feed.ahead, made.stage.cpu_threads) == (3, 7, 1)  # a chunk is a batch: 1 + 2·3
    told = [record.getMessage() for record in caplog.records if record.name == "gpuload"]  # garbage may log elsewhere
    assert told == ["num_workers 2 → 3, prefetch_factor 2 → 5: so it is written"]


def test_a_pool_that_cannot_grow_is_taken_as_it_is(clockwork):
    made = clockwork()
    made.auto.setting = Setting(6, 2)
    made.tuner.begin()
    made.batch(1.0)
    made.most, made.size, made.is_steady = 2, 2, False
    made.batch(1.0)
    assert made.auto.setting == Setting(2, 2)
    assert made.asked == [2]


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({}, Room(8, 8, "8 in all")),
        ({"memory_left_bytes": 200_000_000}, Room(4, 8, "memory")),  # half of it, 45 MB each
        ({"memory_left_bytes": 0}, Room(2, 2, "memory")),
        ({"descriptors_left": 20}, Room(4, 8, "open files")),  # 12 while one is started, 4 each
        ({"processes_left": (6, "a limit")}, Room(5, 8, "processes")),  # half of them
    ],
)
def test_there_is_room_for_what_the_machine_allows(limits, room, clockwork, monkeypatch):
    made = clockwork()
    for name, value in limits.items():
        monkeypatch.setattr(tuning, name, lambda value=value: value)
    assert made.tuner._room() == room


def test_workers_that_take_more_count_as_what_they_take(clockwork, monkeypatch):
    import os

    made = clockwork()
    monkeypatch.setattr(tuning, "memory_left_bytes", lambda: 4_000_000_000)
    made.pids, made.most = [os.getpid()], 10_000  # this process has torch
    assert 2 < made.tuner._room().workers < 2 + 2_000_000_000 // 45_000_000
