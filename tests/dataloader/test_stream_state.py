"""Going on from a saved state with an iterable dataset: by its own state, its iterator's, or by counting."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from dataloader.streams import Counting, ItsOwnIterator, Noisy, OwnIterator, OwnState, share
from torch.utils.data import IterableDataset

import gpuload as gl


class Torchs(OwnState, IterableDataset):
    """As users have it."""


def ours(dataset):
    """With `__next__` it takes torch's class to be a dataset."""

    class Ours(type(dataset), IterableDataset):
        pass

    made = copy.copy(dataset)
    made.__class__ = Ours
    return made


STREAMS = {
    "by counting": lambda: Noisy(11),
    "by its own state": lambda: OwnState(11),
    "by its iterator's": lambda: OwnIterator(11),
    "by its own, being its iterator": lambda: ours(ItsOwnIterator(11)),
    "torch's": lambda: Torchs(11),
}


def loader(dataset, batch_size=2, **options) -> gl.Loader:
    return gl.Loader(dataset, batch_size, **{"device": "cpu", "num_workers": 0, **options})


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return tuple(map(plain, batch)) if isinstance(batch, list | tuple) else batch


def epoch(loader_) -> list:
    return [plain(batch) for batch in loader_]


def stopped(loader_, stop):
    """What came up to the stop, and the state there, as JSON carries it."""
    seen, batches = [], iter(loader_)
    while len(seen) < stop:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader_)
        else:
            seen.append(plain(batch))
    return seen, json.loads(json.dumps(loader_.state_dict()))


@pytest.mark.parametrize("batch_size", [1, 2, None])
@pytest.mark.parametrize("name", STREAMS)
def test_the_rest_is_what_it_would_have_been_wherever_it_was_stopped(name, batch_size):
    with loader(STREAMS[name](), batch_size) as loader_:
        first = epoch(loader_)
        undisturbed = first + epoch(loader_)
    for stop in (0, 1, 3, len(first) - 1, len(first) + 2):
        with loader(STREAMS[name](), batch_size) as loader_:
            seen, state = stopped(loader_, stop)
        with loader(STREAMS[name](), batch_size) as loader_:
            loader_.load_state_dict(state)
            rest = epoch(loader_)
            if stop < len(first):
                rest += epoch(loader_)
        assert seen + rest == undisturbed


@pytest.mark.processes
@pytest.mark.parametrize("name", ["by counting", "by its iterator's", "torch's"])
def test_and_with_workers(name):
    with loader(STREAMS[name](), num_workers=2) as loader_:
        undisturbed = epoch(loader_)
        loader_.set_epoch(0)
        seen, state = stopped(loader_, 3)
        assert seen == undisturbed[:3]
    with loader(STREAMS[name](), num_workers=2) as loader_:
        loader_.load_state_dict(state)
        assert seen + epoch(loader_) == undisturbed
        loader_.load_state_dict(state)
        assert seen + epoch(loader_) == undisturbed
    assert sorted(number for numbers, _ in undisturbed for number in numbers) == list(range(11))


def test_the_state_counts_what_was_given_and_not_what_was_taken_ahead():
    class Greedy(OwnState):
        taken = 0

        def __iter__(self):
            for sample in super().__iter__():
                Greedy.taken += 1
                yield sample

    with loader(Greedy(100)) as loader_:
        batches = iter(loader_)
        for count in range(1, 4):
            next(batches)
            [worker] = loader_.state_dict()["stream"]["workers"]
            assert worker["samples"] == 2 * count
            assert worker["state"] in (None, {"dataset": {"at": 2 * count}})
            assert Greedy.taken >= 2 * count


def test_resuming_by_an_own_state_runs_through_nothing():
    class Strict(OwnState):
        def __iter__(self):
            for number, _ in super().__iter__():
                assert number >= 6
                yield number

    with loader(OwnState(11)) as loader_:
        _, state = stopped(loader_, 3)
    with loader(Strict(11)) as loader_:
        loader_.load_state_dict(state)
        assert epoch(loader_) == [[6, 7], [8, 9], [10]]


def test_a_state_that_was_taken_does_not_change_later():
    class Growing(OwnState):
        log: list[int]

        def __iter__(self):
            self.log = []
            for sample in super().__iter__():
                self.log.append(sample[0])
                yield sample

        def state_dict(self):
            return {"at": self.at, "log": self.log}

    with loader(Growing(20)) as loader_:
        batches = iter(loader_)
        next(batches)
        state = loader_.state_dict()
        before = copy.deepcopy(state)
        assert len(state["stream"]["workers"][0]["state"]["dataset"]["log"]) == 2
        for _ in range(3):
            next(batches)
        assert state == before
        assert loader_.state_dict() != before


def test_iter_of_the_dataset_is_called_once_an_epoch_and_not_by_states():
    class Counts(OwnState):
        calls = 0

        def __iter__(self):
            Counts.calls += 1
            return super().__iter__()

    with loader(Counts(6)) as loader_:
        loader_.state_dict()
        epoch(loader_)
        loader_.state_dict()
        assert Counts.calls == 1
        _, state = stopped(loader_, 1)
        assert Counts.calls == 2
    with loader(Counts(6)) as loader_:
        loader_.load_state_dict(state)
        loader_.state_dict()
        epoch(loader_)
    assert Counts.calls == 3


def test_another_number_of_workers_is_refused():
    with loader(Counting(11), num_workers=2) as loader_:
        state = loader_.state_dict()
    loader(Counting(11)).load_state_dict(state)  # nothing was given: any number may begin
    with loader(Counting(11)) as loader_:
        _, state = stopped(loader_, 2)
    with pytest.raises(ValueError, match=r"read with num_workers=1, but this loader has num_workers=3"):
        loader(Counting(11), num_workers=3).load_state_dict(state)


def test_at_an_epochs_end_the_next_one_follows():
    with loader(Counting(11)) as loader_:
        epoch(loader_)
        state = loader_.state_dict()
    assert (state["epoch"], state.get("stream")) == (1, None)
    with loader(Noisy(11)) as loader_:
        undisturbed = [epoch(loader_), epoch(loader_)]
    with loader(Noisy(11)) as loader_:
        loader_.load_state_dict(state)
        assert epoch(loader_) == undisturbed[1]


def test_after_the_last_batch_the_end_is_not_known_yet():
    """A stream says only by asking that it is over: a state from the loop's last turn has an empty rest."""
    with loader(Counting(4)) as loader_:
        seen, state = stopped(loader_, 2)
    assert (seen, state["epoch"]) == ([[0, 1], [2, 3]], 0)
    with loader(Counting(4)) as loader_:
        loader_.load_state_dict(state)
        assert epoch(loader_) == []
        assert epoch(loader_) == [[0, 1], [2, 3]]


def test_a_state_that_json_cannot_hold_is_refused_when_it_is_saved():
    class Odd(OwnState):
        def state_dict(self):
            return {"at": {1, 2}}

    with loader(Odd(11)) as loader_:
        next(iter(loader_))
        with pytest.raises(TypeError, match=r"the state_dict\(\) of the dataset holds what JSON cannot"):
            loader_.state_dict()


def test_a_map_datasets_own_state_is_not_asked_for():
    class Stateful(list):
        def state_dict(self):
            raise AssertionError("asked")

        load_state_dict = None

    with loader(Stateful(range(6))) as loader_:
        next(iter(loader_))
        assert loader_.state_dict()["position"] == 2


class Passes(IterableDataset):
    """Dataset and iterator have a state each."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return OwnIterator.__iter__(OwnIterator(5))

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


def test_of_a_dataset_and_its_iterator_both_states_are_saved():
    with loader(Passes()) as loader_:
        epoch(loader_)
        _, state = stopped(loader_, 1)
    again = Passes()
    with loader(again) as loader_:
        loader_.load_state_dict(state)
        assert [numbers for numbers, _ in epoch(loader_)] == [[2, 3], [4]]
        assert again.passes == 2
        epoch(loader_)
        assert again.passes == 3


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_remembers_from_epoch_to_epoch_is_in_the_state_of_an_epochs_end(workers):
    class Ordered(Passes):
        def __iter__(self):
            worker, workers = share()
            self.passes += 1
            yield from ((100 * self.passes + number, 0) for number in range(worker, 6, workers))

    with loader(Ordered(), num_workers=workers) as loader_:
        epoch(loader_)
        state = json.loads(json.dumps(loader_.state_dict()))
        following = epoch(loader_)
    with loader(Ordered(), num_workers=workers) as loader_:
        loader_.load_state_dict(state)
        assert epoch(loader_) == following
    assert sorted(number for numbers, _ in following for number in numbers) == [200, 201, 202, 203, 204, 205]


def test_a_state_loaded_into_the_loader_that_gave_it_takes_it_back():
    with loader(OwnState(11)) as loader_:
        first, state = stopped(loader_, 2)
        rest = epoch(loader_)
        assert rest != first
        loader_.load_state_dict(state)
        assert epoch(loader_)[0][0] == [4, 5]


@pytest.mark.processes
def test_a_chunk_that_is_done_again_for_want_of_room_costs_no_sample_and_no_state():
    class Pictures(OwnState):
        def __iter__(self):
            import numpy as np

            for number, _ in super().__iter__():
                yield gl.Image(np.full((40 + 20 * number, 60, 3), number, np.uint8)), number

    options = {"batch_size": 3, "ragged": "list", "ring_bytes": 100_000, "num_workers": 1}
    with loader(Pictures(12), **options) as loader_:
        batches = iter(loader_)
        seen = [next(batches) for _ in range(2)]
        state = loader_.state_dict()
        rest = list(batches)
    assert [labels.tolist() for _, labels in seen + rest] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [int(image[0, 0, 0]) for images, _ in seen + rest for image in images] == list(range(12))
    with loader(Pictures(12), **options) as loader_:
        loader_.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader_] == [[6, 7, 8], [9, 10, 11]]
