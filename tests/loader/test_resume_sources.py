"""Going on in the midst of what a user's sampler or an iterable dataset gives, wherever it was left."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler

import gpuload as gl


class Drawing:
    """Sample i is the number i, and what the global generators give."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        return index, random.random(), np.random.random(), torch.rand(()).item()


class Resumable(Sampler):
    """Every number once, in an order that it draws anew in each pass; it can say where it stands."""

    def __init__(self, length: int) -> None:
        self.length, self.passes, self.given = length, 0, 0

    def __iter__(self):
        order = random.Random(self.passes).sample(range(self.length), self.length)
        for index in order[self.given :]:
            self.given += 1
            yield index
        self.passes, self.given = self.passes + 1, 0

    def __len__(self) -> int:
        return self.length

    def state_dict(self):
        return {"passes": self.passes, "given": self.given}

    def load_state_dict(self, state):
        self.passes, self.given = state["passes"], state["given"]


class Shuffled(Sampler):
    """It draws from the global generators, and says no length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        yield from order


SAMPLERS = {
    "torch's own": lambda n: {"sampler": RandomSampler(range(n))},
    "torch's own, with a generator": lambda n: {
        "sampler": RandomSampler(range(n), generator=torch.Generator().manual_seed(5))
    },
    "a subset": lambda n: {"sampler": SubsetRandomSampler(range(0, n, 2))},
    "resumable": lambda n: {"sampler": Resumable(n)},
    "without a length": lambda n: {"sampler": Shuffled(n)},
    "a batch sampler": lambda n: {"batch_sampler": BatchSampler(RandomSampler(range(n)), 4, drop_last=False)},
    "a batch sampler over one that is resumable": lambda n: {"batch_sampler": BatchSampler(Resumable(n), 4, False)},
}


class Stream(IterableDataset):
    """The numbers below `length`, shuffled a little, with what the generators give."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        buffer = []
        for number in range(self.length):
            buffer.append(number)
            if len(buffer) > 3:
                yield buffer.pop(random.randrange(4)), np.random.random()
        yield from ((number, 0.0) for number in buffer)


class Counting(IterableDataset):
    """It can say where it stands, and counts how often it was asked for a sample."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.asked = length, 0, 0

    def __iter__(self):
        while self.at < self.length:
            self.at, self.asked = self.at + 1, self.asked + 1
            yield self.at - 1, random.random()
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def rows(batch):
    return [column.tolist() for column in batch]


def passes(loader, most: int) -> list:
    """Batches, epoch after epoch, and after two epochs no more."""
    found = []
    for _ in range(2):
        for batch in loader:
            found.append(rows(batch))
            if len(found) == most:
                return found
    return found


def check(make, stop: int, batch_size: int | None) -> None:
    undisturbed = passes(make(), 10**9)
    first, second = make(), make()
    seen = passes(first, stop) if stop else []
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    while len(seen) < len(undisturbed):
        seen += [rows(batch) for batch in second]
    assert seen == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
@settings(max_examples=12, deadline=None)
@given(length=st.integers(1, 40), batch_size=st.integers(1, 7), stop=st.integers(0, 30), drop_last=st.booleans())
def test_samplers(kind, length, batch_size, stop, drop_last):
    def make():
        options = SAMPLERS[kind](length)
        if "sampler" in options:
            options |= {"batch_size": batch_size, "drop_last": drop_last and length >= 2 * batch_size}
        return gl.Loader(Drawing(length), num_workers=0, device="cpu", **options)

    check(make, stop, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stream, Counting])
@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40), batch_size=st.integers(1, 7), stop=st.integers(0, 30), drop_last=st.booleans())
def test_streams(kind, length, batch_size, stop, drop_last):
    drop_last = drop_last and length >= batch_size
    check(
        lambda: gl.Loader(kind(length), batch_size, drop_last=drop_last, num_workers=0, device="cpu"), stop, batch_size
    )


def test_a_dataset_that_can_say_where_it_stands_is_not_run_through_again():
    dataset = Counting(1000)
    first = gl.Loader(Counting(1000), 10, num_workers=0, device="cpu")
    batches = iter(first)
    for _ in range(80):
        next(batches)
    second = gl.Loader(dataset, 10, num_workers=0, device="cpu")
    second.load_state_dict(first.state_dict())
    assert rows(next(iter(second)))[0] == list(range(800, 810))
    assert dataset.asked < 50


def test_the_generators_of_the_program_are_left_alone():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for options in (SAMPLERS["torch's own"](20), SAMPLERS["without a length"](20)):
        list(gl.Loader(Drawing(20), 4, num_workers=0, device="cpu", **options))
    list(gl.Loader(Stream(20), 4, num_workers=0, device="cpu"))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
