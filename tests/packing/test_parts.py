"""Samples come in order, an error in the place of one, and the next are named to a dataset whose reads take long."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpuload.packing import parts
from gpuload.packing.parts import AHEAD, AT_ONCE, each_sample

COUNT = 5 * AT_ONCE + 3


class Numbers:
    """Its reads take as long as `seconds` says, by the clock of `parts`."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.read: list[int] = []
        self.named: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.clock[0] += self.seconds
        self.read.append(index)
        if index == 7:
            raise ValueError("seven")
        return index

    def will_need(self, indices: Iterable[int]) -> None:
        indices = list(indices)
        assert not self.read or indices[0] > self.read[-1], "it is named before it is read"
        self.named += indices


class Blocks(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(parts, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("kind", [Numbers, Blocks])
def test_what_comes_next_is_named_once_while_reading_takes_long(clock: list[float], kind: type[Numbers]) -> None:
    dataset = kind(clock, 1.0)
    found = dict(each_sample(dataset, range(2, COUNT)))
    assert list(found) == list(range(2, COUNT))
    assert isinstance(found.pop(7), ValueError)
    assert all(index == sample for index, sample in found.items())
    first = 3 if kind is Numbers else 2 + AT_ONCE
    assert dataset.named == list(range(first, COUNT)), "each once, none beyond the part"


@pytest.mark.parametrize("kind", [Numbers, Blocks])
def test_what_is_read_quickly_is_not_named(clock: list[float], kind: type[Numbers]) -> None:
    dataset = kind(clock, 30e-6)
    assert len(list(each_sample(dataset, range(COUNT)))) == COUNT
    assert not dataset.named


def test_one_slow_sample_is_forgotten_after_a_while(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SLOW_FOR", 16)
    dataset = Numbers(clock, 1.0)
    for index, _ in each_sample(dataset, range(2 * AHEAD)):
        dataset.seconds = 30e-6 if index else 1.0
    assert AHEAD < len(dataset.named) <= AHEAD + 16
    assert dataset.named == list(range(1, 1 + len(dataset.named)))


def test_samples_are_named_while_a_disk_is_read_however_quick_that_is(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Read:
        def was_read(self) -> bool:
            return len(dataset.read) == 3

    monkeypatch.setattr(parts, "Disk", Read)
    monkeypatch.setattr(parts, "SLOW_FOR", 16)
    dataset = Numbers(clock, 30e-6)
    for _ in each_sample(dataset, range(2 * AHEAD)):
        pass
    assert dataset.named[0] == 3
    assert AHEAD < len(dataset.named) <= AHEAD + 16
