"""Iterable datasets that workers can import without torch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any


def worker_share() -> tuple[int, int]:
    """Return this worker's number and the number of workers from torch's `get_worker_info`, without workers (0, 1)."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Counting:
    """A stream of 0 … n−1 divided among workers, without state or length. The worker that reaches `kill_at` first
    creates the file `marker` and kills itself."""

    def __init__(self, samples: int = 10, kill_at: int = -1, marker: str = "") -> None:
        self.samples = samples
        self.kill_at = kill_at
        self.marker = marker

    def __iter__(self) -> Iterator[Any]:
        worker, workers = worker_share()
        for number in range(worker, self.samples, workers):
            self.kill_at_first_pass(number)
            yield number

    def kill_at_first_pass(self, number: int) -> None:
        if number == self.kill_at and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), 9)


class Undivided(Counting):
    """A stream of 0 … n−1 in each worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.samples))


class Noisy(Counting):
    """A stream of numbers with a draw from the global generator for each."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield number, random.random()


class StatefulStream(Counting):
    """A stream whose state is the count of the samples that it has yielded."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        worker, workers = worker_share()
        while (number := worker + self.count * workers) < self.samples:
            self.count += 1
            self.kill_at_first_pass(number)
            yield number, random.random()
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class StatefulIterator:
    """An iterator with a state, which draws when it is created, as an iterator that shuffles does."""

    def __init__(self, samples: int) -> None:
        self.worker, self.workers = worker_share()
        self.samples = samples
        self.offset = random.random()
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = self.worker + self.count * self.workers
        if number >= self.samples:
            raise StopIteration
        self.count += 1
        return number, random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.offset = state["count"], state["offset"]


class StreamWithStatefulIterator(Counting):
    def __iter__(self) -> Iterator[Any]:
        return StatefulIterator(self.samples)


class StatefulStreamAndIterator(StatefulStream):
    """A stream that is its own iterator, like the datasets of torchdata's tests."""

    def __iter__(self) -> Iterator[Any]:
        self.worker, self.workers = worker_share()
        self.count = 0
        return self

    __next__ = StatefulIterator.__next__
