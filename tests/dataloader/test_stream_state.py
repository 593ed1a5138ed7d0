"""Resumption of iterable datasets: by the state of the dataset, by that of its iterator, or by skipping samples."""

from __future__ import annotations

import copy
import io
import json
import random
import threading

import numpy as np
import pytest
import torch
from dataloader.streams import (
    Counting,
    Noisy,
    StatefulIterator,
    StatefulStream,
    StatefulStreamAndIterator,
    StreamWithStatefulIterator,
    worker_share,
)
from torch.utils.data import IterableDataset

import gpuload as gl

pytestmark = pytest.mark.usefixtures("warm")


class TorchStream(StatefulStream, IterableDataset):
    pass


class TorchStreamAndIterator(StatefulStreamAndIterator, IterableDataset):
    """A dataset with `__next__`, which therefore must be an IterableDataset."""


STREAMS = {
    "by counting": lambda: Noisy(11),
    "by its own state": lambda: StatefulStream(11),
    "by its iterator's": lambda: StreamWithStatefulIterator(11),
    "by its own, being its iterator": lambda: TorchStreamAndIterator(11),
    "torch's": lambda: TorchStream(11),
}


def loader(dataset, batch_size=2, **options) -> gl.Loader:
    return gl.Loader(dataset, batch_size, **{"device": "cpu", "num_workers": 0, **options})


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return tuple(map(plain, batch)) if isinstance(batch, list | tuple) else batch


def epoch(loader_) -> list:
    return [plain(batch) for batch in loader_]


def read_and_save(loader_, count):
    """Return the first batches, also of following epochs, and the state after these, as JSON keeps it."""
    seen, batches = [], iter(loader_)
    while len(seen) < count:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader_)
        else:
            seen.append(plain(batch))
    return seen, json.loads(json.dumps(loader_.state_dict()))


def stopped(dataset, count, **options):
    with loader(dataset, **options) as loader_:
        return read_and_save(loader_, count)


def resumed_epochs(dataset, state, *, epochs=1, **options):
    with loader(dataset, **options) as loader_:
        loader_.load_state_dict(state)
        return [batch for _ in range(epochs) for batch in epoch(loader_)]


def numbers_of(batches) -> list[int]:
    return [number for numbers, _ in batches for number in numbers]


@pytest.mark.parametrize("batch_size", [1, 2, None])
@pytest.mark.parametrize("name", STREAMS)
def test_resume_of_a_stream_continues_identically_from_any_stop(name, batch_size):
    with loader(STREAMS[name](), batch_size) as loader_:
        first = epoch(loader_)
        undisturbed = first + epoch(loader_)
    for stop in (0, 1, 3, len(first) - 1, len(first) + 2):
        seen, state = stopped(STREAMS[name](), stop, batch_size=batch_size)
        epochs = 2 if stop < len(first) else 1
        resumed = resumed_epochs(STREAMS[name](), state, epochs=epochs, batch_size=batch_size)
        assert seen + resumed == undisturbed


@pytest.mark.processes
@pytest.mark.parametrize("name", ["by counting", "by its iterator's", "torch's"])
def test_resume_of_a_stream_with_workers_continues_identically(name):
    with loader(STREAMS[name](), num_workers=2) as loader_:
        undisturbed = epoch(loader_)
        loader_.set_epoch(0)
        seen, state = read_and_save(loader_, 3)
        assert seen == undisturbed[:3]
    with loader(STREAMS[name](), num_workers=2) as loader_:
        loader_.load_state_dict(state)
        assert seen + epoch(loader_) == undisturbed
        loader_.load_state_dict(state)
        assert seen + epoch(loader_) == undisturbed
    assert sorted(numbers_of(undisturbed)) == list(range(11))


def test_stream_state_counts_delivered_samples_not_those_read_ahead():
    class Greedy(StatefulStream):
        yielded = 0

        def __iter__(self):
            for sample in super().__iter__():
                Greedy.yielded += 1
                yield sample

    with loader(Greedy(100)) as loader_:
        batches = iter(loader_)
        for count in range(1, 4):
            next(batches)
            [worker] = loader_.state_dict()["stream"]["workers"]
            assert worker["samples"] == 2 * count
            assert worker["state"] in (None, {"dataset": {"at": 2 * count}})
            assert Greedy.yielded >= 2 * count


def test_resume_of_a_stateful_stream_does_not_replay_samples():
    class Strict(StatefulStream):
        def __iter__(self):
            for number, _ in super().__iter__():
                assert number >= 6
                yield number

    _, state = stopped(StatefulStream(11), 3)
    assert resumed_epochs(Strict(11), state) == [[6, 7], [8, 9], [10]]


def test_saved_stream_state_does_not_change_later():
    class Growing(StatefulStream):
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


def test_dataset_iter_is_called_once_per_epoch_and_not_by_state_dict():
    class Counts(StatefulStream):
        calls = 0

        def __iter__(self):
            Counts.calls += 1
            return super().__iter__()

    with loader(Counts(6)) as loader_:
        loader_.state_dict()
        epoch(loader_)
        loader_.state_dict()
        assert Counts.calls == 1
        _, state = read_and_save(loader_, 1)
        assert Counts.calls == 2
    with loader(Counts(6)) as loader_:
        loader_.load_state_dict(state)
        loader_.state_dict()
        epoch(loader_)
    assert Counts.calls == 3


def test_dataset_iter_is_called_by_iter_of_the_loader():
    """`iter(loader)` calls it at once, like DataLoader, even if the iterator is not used."""

    class Opens(StatefulStream):
        opened = 0

        def __iter__(self):
            self.opened += 1
            return super().__iter__()

        def state_dict(self):
            return {**super().state_dict(), "opened": self.opened}

    def opened_by_iter(loader_):
        iter(loader_)
        return loader_.state_dict()["stream"]["workers"][0]["state"]["dataset"]["opened"]

    dataset = Opens(6)
    with loader(dataset) as first, loader(dataset) as second:
        assert opened_by_iter(first) == dataset.opened == 1
        second.load_state_dict(first.state_dict())
        assert opened_by_iter(second) == dataset.opened == 2
        assert epoch(second) == epoch(loader(StatefulStream(6)))


def test_state_dict_before_a_replay_equals_the_loaded_state():
    """Until samples are skipped, the dataset's own state is that of its beginning, and must not be saved."""
    _, state = stopped(StatefulStream(11), 2)
    state["stream"]["workers"][0]["state"] = None
    with loader(StatefulStream(11)) as loader_:
        loader_.load_state_dict(state)
        iterator = iter(loader_)
        assert loader_.state_dict()["stream"] == state["stream"]
        assert [key for batch in iterator for key in batch[0].tolist()] == list(range(4, 11))


def test_resume_of_a_stream_with_another_num_workers_raises():
    with loader(Counting(11), num_workers=2) as loader_:
        state = loader_.state_dict()
    loader(Counting(11)).load_state_dict(state)  # allowed before the first batch
    _, state = stopped(Counting(11), 2)
    with pytest.raises(ValueError, match=r"read with num_workers=1, but this loader has num_workers=3"):
        loader(Counting(11), num_workers=3).load_state_dict(state)


def test_stream_state_after_an_epoch_resumes_with_the_next_epoch():
    with loader(Counting(11)) as loader_:
        epoch(loader_)
        state = loader_.state_dict()
    assert (state["epoch"], state.get("stream")) == (1, None)
    with loader(Noisy(11)) as loader_:
        undisturbed = [epoch(loader_), epoch(loader_)]
    assert resumed_epochs(Noisy(11), state) == undisturbed[1]


def test_stream_state_at_the_last_batch_resumes_with_an_empty_remainder():
    """Only another request to a stream shows that it has ended."""
    seen, state = stopped(Counting(4), 2)
    assert (seen, state["epoch"]) == ([[0, 1], [2, 3]], 0)
    assert resumed_epochs(Counting(4), state) == []
    assert resumed_epochs(Counting(4), state, epochs=2) == [[0, 1], [2, 3]]


def test_dataset_state_that_cannot_be_saved_raises_only_in_state_dict():
    class Unsavable(StatefulStream):
        def state_dict(self):
            return {"at": self.at, "seen": [threading.Lock] if self.at < 6 else [threading.Lock()]}

    for count, message in (
        (1, r"\['seen'\]\[0\] is of type .*cannot be saved"),
        (3, r" cannot be saved: TypeError: cannot pickle"),
    ):
        with loader(Unsavable(11)) as loader_:
            batches = iter(loader_)
            for _ in range(count):
                next(batches)
            with pytest.raises(TypeError, match=r"the state_dict\(\) of the dataset" + message):
                loader_.state_dict()
            assert len(list(batches)) == 6 - count


class Typed(StatefulStream):
    """A stream whose state JSON would change: it has integer keys, tuples, arrays and tensors."""

    def state_dict(self):
        state = {1: (self.at, "x"), b"x": 1j, "array": np.arange(2), "tensor": torch.ones(3), "set": {1, (2,)}}
        return state if self.at % 4 else {**state, "generator": torch.get_rng_state(), "random": random.getstate()}

    def load_state_dict(self, state):
        self.at, name = state[1]
        assert name == "x"
        if len(state) == 1:
            return
        assert state[b"x"] == 1j
        assert state["array"].tolist() == [0, 1]
        assert torch.equal(state["tensor"], torch.ones(3))
        assert state["set"] == {1, (2,)}
        if "random" in state:
            random.setstate(state["random"])
            torch.set_rng_state(state["generator"])


class IntegerKeys(Typed):
    """A stream whose state JSON accepts but changes."""

    def state_dict(self):
        return {1: (self.at, "x")}


@pytest.mark.processes
@pytest.mark.parametrize("stream", [IntegerKeys, Typed])
def test_restarted_worker_gets_the_dataset_state_with_its_types(tmp_path, stream):
    """A killed worker is restarted from the state of its last chunk, which did not pass through JSON."""
    with loader(stream(20), num_workers=2) as loader_:
        undisturbed = epoch(loader_)
    with loader(stream(20, kill_at=13, mark=str(tmp_path / "killed")), num_workers=2) as loader_:
        assert epoch(loader_) == undisturbed
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_dataset_state_keeps_its_types_through_json_and_torch_save(stop):
    with loader(Typed(20)) as loader_:
        undisturbed = epoch(loader_)
    with loader(Typed(20)) as loader_:
        seen, state = read_and_save(loader_, stop)
        file = io.BytesIO()
        torch.save(loader_.state_dict(), file)
    file.seek(0)
    for carried in (state, torch.load(file, weights_only=True)):
        assert seen + resumed_epochs(Typed(20), carried) == undisturbed


# -- before the first batch -------------------------------------------------------------------------------------------


class Unrewindable(StatefulStreamAndIterator, IterableDataset):
    """A stream that is its own iterator, and is not rewound by `iter()`."""

    def __iter__(self):
        self.worker, self.workers = worker_share()
        return self


@pytest.mark.parametrize("iterator_made", [False, True])
@pytest.mark.parametrize("iterator_used", [False, True])
def test_state_before_the_first_batch_rewinds_the_dataset(iterator_used, iterator_made):
    dataset = Unrewindable(5)
    with loader(dataset) as loader_:
        if iterator_made:
            iter(loader_)
        batches = iter(loader_) if iterator_used else loader_
        state = json.loads(json.dumps(loader_.state_dict()))
        undisturbed = epoch(batches)
        assert numbers_of(undisturbed) == list(range(5))
        loader_.load_state_dict(state)
        assert epoch(loader_) == undisturbed
        assert epoch(loader_) == []
    assert resumed_epochs(dataset, state) == undisturbed


@pytest.mark.processes
@pytest.mark.parametrize("iterator_used", [False, True])
def test_state_before_the_first_batch_rewinds_the_dataset_in_workers(iterator_used):
    with loader(Unrewindable(9), num_workers=2) as loader_:
        batches = iter(loader_) if iterator_used else loader_
        state = loader_.state_dict()
        undisturbed = epoch(batches)
        assert sorted(numbers_of(undisturbed)) == list(range(9))
        loader_.load_state_dict(state)
        assert epoch(loader_) == undisturbed


def test_state_dict_before_the_first_batch_changes_no_random_numbers():
    """The method calls `iter()` of the dataset, once, whose random numbers are those that it would draw later."""

    class Draws(StreamWithStatefulIterator):
        calls = 0

        def __iter__(self):
            self.calls += 1
            random.random()
            return super().__iter__()

    with loader(Draws(7)) as loader_:
        undisturbed = epoch(loader_)
    dataset = Draws(7)
    with loader(dataset) as loader_:
        batches = iter(loader_)
        before = random.getstate()
        assert loader_.state_dict() == loader_.state_dict()
        assert random.getstate() == before
        assert list(map(plain, batches)) == undisturbed
    assert dataset.calls == 1


@pytest.mark.processes
def test_state_before_the_first_batch_resumes_with_any_num_workers():
    with loader(StatefulStream(8)) as loader_:
        state = loader_.state_dict()
    assert state["stream"]["workers"][0]["state"] == {"dataset": {"at": 0}}
    assert sorted(numbers_of(resumed_epochs(StatefulStream(8), state, num_workers=2))) == list(range(8))


@pytest.mark.filterwarnings("ignore:load_state_dict\\(\\) does not affect:RuntimeWarning")
@pytest.mark.parametrize("name", [*STREAMS, "map"])
def test_state_dict_after_load_state_dict_ignores_the_previous_iterator(name):
    with loader(range(11) if name == "map" else STREAMS[name]()) as loader_:
        _, state = read_and_save(loader_, 2)
        batches = iter(loader_)
        next(batches)
        loader_.load_state_dict(state)
        assert loader_.state_dict() == state
        next(batches)
        assert loader_.state_dict() == state
        resumed = iter(loader_)
        assert loader_.state_dict() == state
        next(resumed)
        assert loader_.state_dict() != state


def test_state_dict_of_a_map_dataset_is_not_called():
    class Stateful(list):
        def state_dict(self):
            raise AssertionError("state_dict was called")

        load_state_dict = None

    with loader(Stateful(range(6))) as loader_:
        next(iter(loader_))
        assert loader_.state_dict()["position"] == 2


class Passes(IterableDataset):
    """A stream with a state, whose iterator has a state too."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return StatefulIterator(5)

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


def test_states_of_a_dataset_and_its_iterator_are_both_saved():
    with loader(Passes()) as loader_:
        epoch(loader_)
        _, state = read_and_save(loader_, 1)
    dataset = Passes()
    with loader(dataset) as loader_:
        loader_.load_state_dict(state)
        assert [numbers for numbers, _ in epoch(loader_)] == [[2, 3], [4]]
        assert dataset.passes == 2
        epoch(loader_)
        assert dataset.passes == 3


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_state_after_an_epoch_includes_what_the_dataset_counts_across_epochs(workers):
    class Ordered(Passes):
        def __iter__(self):
            worker, workers = worker_share()
            self.passes += 1
            yield from ((100 * self.passes + number, 0) for number in range(worker, 6, workers))

    with loader(Ordered(), num_workers=workers) as loader_:
        epoch(loader_)
        state = json.loads(json.dumps(loader_.state_dict()))
        following = epoch(loader_)
    assert resumed_epochs(Ordered(), state, num_workers=workers) == following
    assert sorted(numbers_of(following)) == [200, 201, 202, 203, 204, 205]


def test_load_state_dict_into_the_same_loader_rewinds_it():
    with loader(StatefulStream(11)) as loader_:
        first, state = read_and_save(loader_, 2)
        following = epoch(loader_)
        assert following != first
        loader_.load_state_dict(state)
        assert epoch(loader_)[0][0] == [4, 5]


@pytest.mark.processes
def test_chunk_repeated_for_lack_of_space_loses_no_sample_and_no_state():
    class Pictures(StatefulStream):
        def __iter__(self):
            for number, _ in super().__iter__():
                yield gl.Image(np.full((40 + 20 * number, 60, 3), number, np.uint8)), number

    options = {"batch_size": 3, "ragged": "list", "ring_bytes": 100_000, "num_workers": 1}
    with loader(Pictures(12), **options) as loader_:
        batches = iter(loader_)
        seen = [next(batches) for _ in range(2)]
        state = loader_.state_dict()
        following = list(batches)
    assert [labels.tolist() for _, labels in seen + following] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [int(image[0, 0, 0]) for images, _ in seen + following for image in images] == list(range(12))
    with loader(Pictures(12), **options) as loader_:
        loader_.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader_] == [[6, 7, 8], [9, 10, 11]]
