"""Iterable datasets that need no torch of their own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any


def worker_share() -> tuple[int, int]:
    """Which of how many workers this is, as torch tells it."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Counting:
    """0 … n−1, each worker its share. No state, no length."""

    def __init__(self, samples: int = 10, kill_at: int = -1, mark: str = "") -> None:
        self.samples = samples
        self.kill_at = kill_at
        self.mark = mark

    def __iter__(self) -> Iterator[Any]:
        worker, workers = worker_share()
        for number in range(worker, self.samples, workers):
            if number == self.kill_at and not os.path.exists(self.mark):
                open(self.mark, "w").close()
                os.kill(os.getpid(), 9)
            yield number


class Undivided(Counting):
    """0 … n−1 in each worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.samples))


class Noisy(Counting):
    """What it draws from the global generator for each number."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield number, random.random()


class StatefulStream(Counting):
    """Resumable by its own state; `skipped` counts what an iterator ran through without giving it."""

    def __init__(self, samples: int = 10) -> None:
        super().__init__(samples)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        worker, workers = worker_share()
        while worker + self.at * workers < self.samples:
            self.at += 1
            yield worker + (self.at - 1) * workers, random.random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StreamWithStatefulIterator(Counting):
    """Its iterator is resumable; that draws when it is made, as one that shuffles does."""

    def __iter__(self) -> Iterator[Any]:
        return _Resumable(self.samples)


class _Resumable:
    def __init__(self, samples: int) -> None:
        self.worker, self.workers = worker_share()
        self.samples = samples
        self.offset = random.random()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = self.worker + self.at * self.workers
        if number >= self.samples:
            raise StopIteration
        self.at += 1
        return number, random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.offset = state["at"], state["offset"]


class StatefulStreamAndIterator(StatefulStream):
    """Dataset and iterator in one, as torchdata's tests have it."""

    def __iter__(self) -> Iterator[Any]:
        self.worker, self.workers = worker_share()
        self.at = 0
        return self

    def __next__(self) -> Any:
        number = self.worker + self.at * self.workers
        if number >= self.samples:
            raise StopIteration
        self.at += 1
        return number, random.random()
