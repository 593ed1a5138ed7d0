"""The rule of "auto" on simulated loaders: it finds what is best, soon, and stays there. No clock, no process."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpuload.loader.autotune import MOST_AHEAD, Autotune, Load, Room, Setting, Step

START_S = 0.3  # of a worker


@dataclass
class Plant:
    """A loader, its data and a training loop, in simulated time.

    `chunk_s(workers, number)` is how long a worker is at a chunk while so many are at work, `cpu` which part of that it
    computes, `step_s(batch)` what the loop does with a batch. Workers take chunks in order; those of a batch can begin
    once it is among the `ahead` next ones.
    """

    chunk_s: Callable[[int, int], float]
    step_s: Callable[[int], float]
    chunks: int = 4
    cpu: float = 1.0
    ahead: int = 2
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
        if auto.watch(seconds, waited):
            step = auto.decide(plant.load(since), lambda: Room(most, MOST_AHEAD, "the memory"))
            since = plant.now
            if step is not None:
                found.steps.append((number, step))
                assert step.after == auto.setting
                plant.ahead = auto.setting.ahead
                if step.after.workers > step.before.workers:
                    ready = plant.now + START_S
                plant.resize(auto.setting.workers)
                skip = step.skip + 1
            elif auto.settled:
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
