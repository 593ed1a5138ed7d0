"""Resuming within the order of a user's sampler or the stream of an iterable dataset."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler

import gpuload as gl


def random_numbers(length: int) -> MapDataset:
    return MapDataset(lambda index: (index, random.random(), np.random.random(), torch.rand(()).item()), length)


class ResumableSampler(Sampler):
    """A sampler with a state and another order in each pass."""

    def __init__(self, length: int) -> None:
        self.length, self.passes, self.yielded = length, 0, 0

    def __iter__(self):
        order = random.Random(self.passes).sample(range(self.length), self.length)
        for index in order[self.yielded :]:
            self.yielded += 1
            yield index
        self.passes, self.yielded = self.passes + 1, 0

    def __len__(self) -> int:
        return self.length

    def state_dict(self):
        return {"passes": self.passes, "yielded": self.yielded}

    def load_state_dict(self, state):
        self.passes, self.yielded = state["passes"], state["yielded"]


class GlobalRandomSampler(Sampler):
    """A sampler without a length that draws from the global generator."""

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
    "resumable": lambda n: {"sampler": ResumableSampler(n)},
    "without a length": lambda n: {"sampler": GlobalRandomSampler(n)},
    "a batch sampler": lambda n: {"batch_sampler": BatchSampler(RandomSampler(range(n)), 4, drop_last=False)},
    "a batch sampler over one that is resumable": lambda n: {
        "batch_sampler": BatchSampler(ResumableSampler(n), 4, False)
    },
}


class RandomStream(IterableDataset):
    """A stream of the numbers below `length`, slightly shuffled, with a number from a global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        buffer = []
        for number in range(self.length):
            buffer.append(number)
            if len(buffer) > 3:
                yield buffer.pop(random.randrange(4)), np.random.random()
        yield from ((number, 0.0) for number in buffer)


class ResumableStream(IterableDataset):
    """A stream with a state that counts how often a sample was read."""

    def __init__(self, length: int) -> None:
        self.length, self.next_number, self.reads = length, 0, 0

    def __iter__(self):
        while self.next_number < self.length:
            self.next_number, self.reads = self.next_number + 1, self.reads + 1
            yield self.next_number - 1, random.random()
        self.next_number = 0

    def state_dict(self):
        return {"next_number": self.next_number}

    def load_state_dict(self, state):
        self.next_number = state["next_number"]


def columns(batch):
    return [column.tolist() for column in batch]


def two_epochs(loader, max_batches: int) -> list:
    """Return batches of at most two epochs."""
    batches = []
    for _ in range(2):
        for batch in loader:
            batches.append(columns(batch))
            if len(batches) == max_batches:
                return batches
    return batches


def assert_resume_continues(make, stop: int) -> None:
    undisturbed = two_epochs(make(), 10**9)
    interrupted, resuming = make(), make()
    seen = two_epochs(interrupted, stop) if stop else []
    state = json.loads(json.dumps(interrupted.state_dict()))
    resuming.load_state_dict(state)
    while len(seen) < len(undisturbed):
        seen += [columns(batch) for batch in resuming]
    assert seen == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
@settings(max_examples=12, deadline=None)
@given(length=st.integers(1, 40), batch_size=st.integers(1, 7), stop=st.integers(0, 30), drop_last=st.booleans())
def test_resume_with_a_sampler_yields_the_remaining_batches(kind, length, batch_size, stop, drop_last):
    def make():
        options = SAMPLERS[kind](length)
        if "sampler" in options:
            # A subset has half of the samples.
            options |= {"batch_size": batch_size, "drop_last": drop_last and length >= 2 * batch_size}
        return gl.Loader(random_numbers(length), num_workers=0, device="cpu", **options)

    assert_resume_continues(make, stop)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RandomStream, ResumableStream])
@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40), batch_size=st.integers(1, 7), stop=st.integers(0, 30), drop_last=st.booleans())
def test_resume_of_an_iterable_dataset_yields_the_remaining_batches(kind, length, batch_size, stop, drop_last):
    drop_last = drop_last and length >= batch_size
    make = lambda: gl.Loader(kind(length), batch_size, drop_last=drop_last, num_workers=0, device="cpu")  # noqa: E731
    assert_resume_continues(make, stop)


def test_resume_of_a_dataset_with_state_dict_does_not_read_earlier_samples_again():
    dataset = ResumableStream(1000)
    interrupted = gl.Loader(ResumableStream(1000), 10, num_workers=0, device="cpu")
    batches = iter(interrupted)
    for _ in range(80):
        next(batches)
    resuming = gl.Loader(dataset, 10, num_workers=0, device="cpu")
    resuming.load_state_dict(interrupted.state_dict())
    assert columns(next(iter(resuming)))[0] == list(range(800, 810))
    assert dataset.reads < 50  # two batches, not the 800 samples before them


def test_loader_leaves_the_global_generators_unchanged():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for options in (SAMPLERS["torch's own"](20), SAMPLERS["without a length"](20)):
        list(gl.Loader(random_numbers(20), 4, num_workers=0, device="cpu", **options))
    list(gl.Loader(RandomStream(20), 4, num_workers=0, device="cpu"))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
