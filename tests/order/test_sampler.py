"""The schedule of a user's sampler: its saved states, and its numbers on several ranks. The tests in
tests/dataloader/test_samplers.py compare samplers with those of a `DataLoader`."""

from __future__ import annotations

import json
import warnings
from itertools import chain, islice, repeat

import pytest
import torch
from helpers.both_loaders import as_lists, cpu_loader
from helpers.map_datasets import MapDataset
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler


def seeded():
    return torch.Generator().manual_seed(5)


class StatefulSampler:
    """A sampler of 11 keys with a `state_dict`, like those of torchdata; or its iterator has the `state_dict`."""

    def __init__(self, state_of):
        self.state_of = state_of
        self.position = 0
        self.keys_read = 0

    def __iter__(self):
        return StatefulIterator(self) if self.state_of == "iterator" else self._walk()

    def _walk(self):
        while self.position < 11:
            self.position += 1
            self.keys_read += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        if self.state_of == "iterator":
            raise AssertionError("the state_dict of the iterator must be used")
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StatefulIterator:
    def __init__(self, sampler):
        self.sampler = sampler
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 11:
            raise StopIteration
        self.position += 1
        self.sampler.keys_read += 1
        return self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


SAMPLERS = {
    "a list": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]},
    "random": lambda: {"sampler": RandomSampler(range(11))},
    "random of a generator": lambda: {"sampler": RandomSampler(range(11), generator=seeded())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([0.1, 0.5, 5.0], 11, generator=seeded())},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(11), generator=seeded()), 2, False)},
    "stateful": lambda: {"sampler": StatefulSampler("sampler")},
    "stateful iterator": lambda: {"sampler": StatefulSampler("iterator")},
    "one by one": lambda: {"sampler": RandomSampler(range(11)), "batch_size": None},
}


@pytest.mark.parametrize("stop", [0, 1, 4, 6, 8])
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_resumes_from_a_saved_state(name, stop):
    def make_loader():
        options = SAMPLERS[name]()
        return cpu_loader(MapDataset(samples=11), **{"batch_size": 1 if "batch_sampler" in options else 2, **options})

    with make_loader() as loader:
        expected = [batch for _ in range(3) for batch in as_lists(loader)]
    with make_loader() as first_loader:
        batches = chain(iter(first_loader), chain.from_iterable(repeat(first_loader)))
        keys_before = as_lists(islice(batches, stop))
        state = json.loads(json.dumps(first_loader.state_dict()))
    with make_loader() as second_loader:
        second_loader.load_state_dict(state)
        resumed = []
        while len(keys_before) + len(resumed) < len(expected):
            resumed += as_lists(second_loader)
    assert keys_before + resumed == expected


@pytest.mark.parametrize("state_of", ["sampler", "iterator"])
def test_sampler_with_a_state_dict_is_restored_without_another_pass(state_of):
    with cpu_loader(MapDataset(samples=11), 2, sampler=StatefulSampler(state_of)) as first_loader:
        batches = iter(first_loader)
        for _ in range(3):
            next(batches)
        state = first_loader.state_dict()
    restored = StatefulSampler(state_of)
    with cpu_loader(MapDataset(samples=11), 2, sampler=restored) as second_loader:
        second_loader.load_state_dict(state)
        assert as_lists(second_loader) == [[6, 7], [8, 9], [10]]
    assert restored.keys_read == 5  # only the keys after the state


def test_state_of_a_sampler_keeps_its_types():
    class TypedStateSampler(StatefulSampler):
        def state_dict(self):
            return {1: (super().state_dict(), torch.tensor(self.position))}

        def load_state_dict(self, state):
            state, position = state[1]
            assert position == torch.tensor(state["position"])
            super().load_state_dict(state)

    with cpu_loader(MapDataset(samples=11), 2, sampler=TypedStateSampler("sampler")) as loader:
        batches = iter(loader)
        keys_before = [next(batches).tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
        expected = as_lists(batches)
    with cpu_loader(MapDataset(samples=11), 2, sampler=TypedStateSampler("sampler")) as loader:
        loader.load_state_dict(state)
        assert as_lists(loader) == expected
    assert sorted(key for batch in keys_before + expected for key in batch) == list(range(11))


def test_state_of_a_sampler_that_cannot_be_saved_is_refused():
    class UnsavableSampler(StatefulSampler):
        def state_dict(self):
            return {"position": object()}

    with cpu_loader(MapDataset(samples=11), 2, sampler=UnsavableSampler("sampler")) as loader:
        next(iter(loader))
        with pytest.raises(TypeError, match=r"state_dict\(\) of the sampler\['position'\] is of type builtins.object"):
            loader.state_dict()


def rank_loader(rank, sampler):
    options = {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler, "batch_size": 4}
    return cpu_loader(range(40), rank=rank, world_size=2, seed=5, **options)


class SubclassedSampler(RandomSampler):
    pass


@pytest.mark.parametrize(
    ("make", "is_different"),
    [
        (lambda: RandomSampler(range(40)), True),
        (lambda: RandomSampler(range(40), replacement=True), True),
        (lambda: WeightedRandomSampler([1.0] * 40, 40), True),
        (lambda: SubsetRandomSampler(range(40)), True),
        (lambda: BatchSampler(RandomSampler(range(40)), 4, False), True),
        (lambda: RandomSampler(range(40), generator=torch.Generator().manual_seed(1)), False),
        (lambda: SubclassedSampler(range(40)), False),
        (lambda: SequentialSampler(range(40)), False),
    ],
)
def test_only_torchs_random_samplers_without_a_generator_draw_different_samples_on_each_rank(make, is_different):
    rank_0, rank_1 = as_lists(rank_loader(0, make())), as_lists(rank_loader(1, make()))
    assert (rank_0 != rank_1) == is_different
    assert (rank_0, rank_1) == (as_lists(rank_loader(0, make())), as_lists(rank_loader(1, make())))  # reproducible


@pytest.mark.parametrize(
    ("make", "should_warn"),
    [
        (lambda rank: SubclassedSampler(range(40)), True),
        (lambda rank: BatchSampler(SubclassedSampler(range(40)), 4, False), True),
        (lambda rank: ShareOfRank(rank), False),
        (lambda rank: RandomSampler(range(40)), False),
        (lambda rank: SequentialSampler(range(40)), False),
    ],
)
def test_random_sampler_that_draws_the_same_batch_on_all_ranks_causes_a_warning(group, make, should_warn):
    warnings_of_ranks = []
    for rank in range(2):
        with warnings.catch_warnings(record=True) as caught, rank_loader(rank, make(rank)) as loader:
            warnings.simplefilter("always")
            object.__setattr__(loader._options.order, "caller", "train.py:7, call 1")  # the same on all ranks
            for _ in range(2):
                list(loader)
            warnings_of_ranks.append([str(warning.message)[:40] for warning in caught])
    assert warnings_of_ranks == [[], ["all 2 ranks began with the same batch of"] * should_warn]


class ShareOfRank(RandomSampler):
    """A sampler of the rank's share of a permutation that all ranks have in common."""

    def __init__(self, rank):
        super().__init__(range(40))
        self.rank = rank

    def __iter__(self):
        return iter([*super().__iter__()][self.rank :: 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_random_sampler_resumes_on_each_rank(rank):
    with rank_loader(rank, RandomSampler(range(40))) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state, expected = loader.state_dict(), as_lists(batches)
    with rank_loader(rank, RandomSampler(range(40))) as loader:
        loader.load_state_dict(state)
        assert as_lists(loader) == expected
