"""Resumption of loaders with a user's sampler."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.both_loaders import as_lists, cpu_loader
from helpers.map_datasets import MapDataset
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


class StatefulSampler:
    """A sampler with a state, which belongs to its iterator or to itself, as in torchdata."""

    def __init__(self, state_owner):
        self.state_owner = state_owner
        self.at = 0
        self.yielded = 0

    def __iter__(self):
        return StatefulSamplerIterator(self) if self.state_owner == "iterator" else self._walk()

    def _walk(self):
        while self.at < 11:
            self.at += 1
            self.yielded += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        if self.state_owner == "iterator":
            raise AssertionError("the iterator's state should be used")
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class StatefulSamplerIterator:
    def __init__(self, sampler):
        self.sampler = sampler
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 11:
            raise StopIteration
        self.at += 1
        self.sampler.yielded += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


RESUMED = {
    "a list": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]},
    "random": lambda: {"sampler": RandomSampler(range(11))},
    "random of a generator": lambda: {"sampler": RandomSampler(range(11), generator=seeded())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([0.1, 0.5, 5.0], 11, generator=seeded())},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(11), generator=seeded()), 2, False)},
    "its own": lambda: {"sampler": StatefulSampler("sampler")},
    "its iterator's own": lambda: {"sampler": StatefulSampler("iterator")},
    "one by one": lambda: {"sampler": RandomSampler(range(11)), "batch_size": None},
}


@pytest.mark.parametrize("stop", [0, 1, 4, 6, 8])
@pytest.mark.parametrize("name", RESUMED)
def test_resume_continues_where_the_sampler_was(name, stop):
    def make():
        options = {"batch_size": 2, **RESUMED[name]()}
        return cpu_loader(
            MapDataset(samples=11), **({**options, "batch_size": 1} if "batch_sampler" in options else options)
        )

    def epochs(loader, count):
        return [as_lists(loader) for _ in range(count)]

    undisturbed = [batch for epoch in epochs(make(), 3) for batch in epoch]
    with make() as first:
        seen, batches = [], iter(first)
        while len(seen) < stop:
            batch = next(batches, None)
            if batch is None:
                batches = iter(first)
            else:
                seen += as_lists([batch])
        state = json.loads(json.dumps(first.state_dict()))
    with make() as second:
        second.load_state_dict(state)
        resumed = []
        while len(seen) + len(resumed) < len(undisturbed):
            resumed += as_lists(second)
    assert seen + resumed == undisturbed


@pytest.mark.parametrize("state_owner", ["sampler", "iterator"])
def test_resume_of_a_stateful_sampler_does_not_replay_it(state_owner):
    with cpu_loader(MapDataset(samples=11), 2, sampler=StatefulSampler(state_owner)) as first:
        batches = iter(first)
        for _ in range(3):
            next(batches)
        state = first.state_dict()
    sampler = StatefulSampler(state_owner)
    with cpu_loader(MapDataset(samples=11), 2, sampler=sampler) as second:
        second.load_state_dict(state)
        assert as_lists(second) == [[6, 7], [8, 9], [10]]
    assert sampler.yielded == 5


def test_sampler_state_keeps_its_types_through_json():
    class Typed(StatefulSampler):
        def state_dict(self):
            return {1: (super().state_dict(), torch.tensor(self.at))}

        def load_state_dict(self, state):
            state, at = state[1]
            assert at == torch.tensor(state["at"])
            super().load_state_dict(state)

    with cpu_loader(MapDataset(samples=11), 2, sampler=Typed("sampler")) as loader:
        batches = iter(loader)
        seen = [next(batches).tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
        following = as_lists(batches)
    with cpu_loader(MapDataset(samples=11), 2, sampler=Typed("sampler")) as loader:
        loader.load_state_dict(state)
        assert as_lists(loader) == following
    assert sorted(key for batch in seen + following for key in batch) == list(range(11))


def test_sampler_state_that_cannot_be_saved_raises_in_state_dict():
    class Unsavable(StatefulSampler):
        def state_dict(self):
            return {"at": object()}

    with cpu_loader(MapDataset(samples=11), 2, sampler=Unsavable("sampler")) as loader:
        next(iter(loader))
        with pytest.raises(TypeError, match=r"the state_dict\(\) of the sampler\['at'\] is of type builtins.object"):
            loader.state_dict()
