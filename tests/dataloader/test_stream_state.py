"""Resumption of iterable datasets: by the state of the dataset or of its iterator, or by skipping samples."""

from __future__ import annotations

import copy
import io
import json
import random
import threading
from itertools import chain, islice, repeat

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


# By how the position in the stream is restored.
STREAMS = {
    "by counting": lambda: Noisy(11),
    "by its own state": lambda: StatefulStream(11),
    "by its iterator's": lambda: StreamWithStatefulIterator(11),
    "by its own, being its iterator": lambda: TorchStreamAndIterator(11),
    "torch's": lambda: TorchStream(11),
}


def stream_loader(dataset, batch_size=2, **options) -> gl.Loader:
    return gl.Loader(dataset, batch_size, **{"device": "cpu", "num_workers": 0, **options})


def to_python(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return tuple(map(to_python, batch)) if isinstance(batch, list | tuple) else batch


def load_epoch(loader) -> list:
    return [to_python(batch) for batch in loader]


def read_and_save(loader, count):
    """Return the next `count` batches, of as many epochs as needed, and the state after them, converted by JSON."""
    batches = chain(iter(loader), chain.from_iterable(repeat(loader)))
    return list(map(to_python, islice(batches, count))), json.loads(json.dumps(loader.state_dict()))


def read_batches_and_state(dataset, count, **options):
    with stream_loader(dataset, **options) as loader:
        return read_and_save(loader, count)


def resumed_epochs(dataset, state, *, epochs=1, **options):
    with stream_loader(dataset, **options) as loader:
        loader.load_state_dict(state)
        return [batch for _ in range(epochs) for batch in load_epoch(loader)]


def numbers_of(batches) -> list[int]:
    return [number for numbers, _ in batches for number in numbers]


@pytest.mark.parametrize("batch_size", [1, 2, None])
@pytest.mark.parametrize("name", STREAMS)
def test_resume_of_a_stream_continues_identically_from_any_stop(name, batch_size):
    with stream_loader(STREAMS[name](), batch_size) as loader:
        first_epoch = load_epoch(loader)
        undisturbed = first_epoch + load_epoch(loader)
    for stop in (0, 1, 3, len(first_epoch) - 1, len(first_epoch) + 2):
        seen, state = read_batches_and_state(STREAMS[name](), stop, batch_size=batch_size)
        epochs = 2 if stop < len(first_epoch) else 1
        resumed = resumed_epochs(STREAMS[name](), state, epochs=epochs, batch_size=batch_size)
        assert seen + resumed == undisturbed


@pytest.mark.processes
@pytest.mark.parametrize("name", ["by counting", "by its iterator's", "torch's"])
def test_resume_of_a_stream_with_workers_continues_identically(name):
    with stream_loader(STREAMS[name](), num_workers=2) as loader:
        undisturbed = load_epoch(loader)
        loader.set_epoch(0)
        seen, state = read_and_save(loader, 3)
        assert seen == undisturbed[:3]
    with stream_loader(STREAMS[name](), num_workers=2) as loader:
        loader.load_state_dict(state)
        assert seen + load_epoch(loader) == undisturbed
        loader.load_state_dict(state)
        assert seen + load_epoch(loader) == undisturbed
    assert sorted(numbers_of(undisturbed)) == list(range(11))


@pytest.mark.processes
def test_stream_state_counts_delivered_samples_not_samples_read_ahead():
    with stream_loader(StatefulStream(100), num_workers=1) as loader:
        batches = iter(loader)
        for count in range(1, 4):
            next(batches)
            [worker] = loader.state_dict()["stream"]["workers"]
            assert worker["samples"] == 2 * count
            assert worker["state"] in (None, {"dataset": {"count": 2 * count}})


def test_resume_of_a_stateful_stream_does_not_replay_samples():
    class Strict(StatefulStream):
        def __iter__(self):
            for number, _ in super().__iter__():
                assert number >= 6
                yield number

    _, state = read_batches_and_state(StatefulStream(11), 3)
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
            return {"count": self.count, "log": self.log}

    with stream_loader(Growing(20)) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        before = copy.deepcopy(state)
        assert len(state["stream"]["workers"][0]["state"]["dataset"]["log"]) == 2
        for _ in range(3):
            next(batches)
        assert state == before
        assert loader.state_dict() != before


def test_dataset_iter_is_called_once_per_epoch_and_not_by_state_dict():
    class Counts(StatefulStream):
        calls = 0

        def __iter__(self):
            Counts.calls += 1
            return super().__iter__()

    with stream_loader(Counts(6)) as loader:
        loader.state_dict()
        load_epoch(loader)
        loader.state_dict()
        assert Counts.calls == 1
        _, state = read_and_save(loader, 1)
        assert Counts.calls == 2
    with stream_loader(Counts(6)) as loader:
        loader.load_state_dict(state)
        loader.state_dict()
        load_epoch(loader)
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

    def opened_by_iter(loader):
        iter(loader)
        return loader.state_dict()["stream"]["workers"][0]["state"]["dataset"]["opened"]

    dataset = Opens(6)
    with stream_loader(dataset) as loader, stream_loader(dataset) as resuming:
        assert opened_by_iter(loader) == dataset.opened == 1
        resuming.load_state_dict(loader.state_dict())
        assert opened_by_iter(resuming) == dataset.opened == 2
        assert load_epoch(resuming) == load_epoch(stream_loader(StatefulStream(6)))


def test_state_dict_before_a_replay_equals_the_loaded_state():
    """Until samples are skipped, the dataset's own state is the initial one, and must not be saved."""
    _, state = read_batches_and_state(StatefulStream(11), 2)
    state["stream"]["workers"][0]["state"] = None
    with stream_loader(StatefulStream(11)) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        assert loader.state_dict()["stream"] == state["stream"]
        assert numbers_of(load_epoch(batches)) == list(range(4, 11))


def test_resume_of_a_stream_with_a_different_num_workers_raises():
    with stream_loader(Counting(11), num_workers=2) as loader:
        state = loader.state_dict()
    stream_loader(Counting(11)).load_state_dict(state)  # allowed before the first batch
    _, state = read_batches_and_state(Counting(11), 2)
    with pytest.raises(ValueError, match=r"read with num_workers=1, but this loader has num_workers=3"):
        stream_loader(Counting(11), num_workers=3).load_state_dict(state)


def test_stream_state_after_an_epoch_resumes_with_the_next_epoch():
    with stream_loader(Counting(11)) as loader:
        load_epoch(loader)
        state = loader.state_dict()
    assert (state["epoch"], state.get("stream")) == (1, None)
    with stream_loader(Noisy(11)) as loader:
        _, second_epoch = load_epoch(loader), load_epoch(loader)
    assert resumed_epochs(Noisy(11), state) == second_epoch


def test_stream_state_at_the_last_batch_resumes_with_an_empty_remainder():
    """Only another request to a stream shows that it has ended."""
    seen, state = read_batches_and_state(Counting(4), 2)
    assert (seen, state["epoch"]) == ([[0, 1], [2, 3]], 0)
    assert resumed_epochs(Counting(4), state) == []
    assert resumed_epochs(Counting(4), state, epochs=2) == [[0, 1], [2, 3]]


def test_dataset_state_that_cannot_be_saved_raises_only_in_state_dict():
    class Unsavable(StatefulStream):
        """A stream whose state has no JSON form, and from the third batch on cannot be pickled either."""

        def state_dict(self):
            return {"count": self.count, "seen": [threading.Lock] if self.count < 6 else [threading.Lock()]}

    messages = {1: r"\['seen'\]\[0\] is of type .*cannot be saved", 3: " cannot be saved: TypeError: cannot pickle"}
    for count, message in messages.items():
        with stream_loader(Unsavable(11)) as loader:
            batches = iter(loader)
            for _ in range(count):
                next(batches)
            with pytest.raises(TypeError, match=r"the state_dict\(\) of the dataset" + message):
                loader.state_dict()
            assert len(list(batches)) == 6 - count  # of six batches


class Typed(StatefulStream):
    """A stream whose state JSON would change: it has integer keys, tuples, arrays and tensors."""

    def state_dict(self):
        state = {1: (self.count, "x"), b"x": 1j, "array": np.arange(2), "tensor": torch.ones(3), "set": {1, (2,)}}
        return state if self.count % 4 else {**state, "generator": torch.get_rng_state(), "random": random.getstate()}

    def load_state_dict(self, state):
        self.count, name = state[1]
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
        return {1: (self.count, "x")}


@pytest.mark.processes
@pytest.mark.parametrize("stream", [IntegerKeys, Typed])
def test_restarted_worker_gets_the_dataset_state_with_its_types(tmp_path, stream):
    """A killed worker is restarted from the state of its last chunk, which did not pass through JSON."""
    with stream_loader(stream(20), num_workers=2) as loader:
        undisturbed = load_epoch(loader)
    with stream_loader(stream(20, kill_at=13, marker=str(tmp_path / "killed")), num_workers=2) as loader:
        assert load_epoch(loader) == undisturbed
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_dataset_state_keeps_its_types_through_json_and_torch_save(stop):
    undisturbed, file = load_epoch(stream_loader(Typed(20))), io.BytesIO()
    with stream_loader(Typed(20)) as loader:
        seen, state = read_and_save(loader, stop)
        torch.save(loader.state_dict(), file)
    file.seek(0)
    for carried in (state, torch.load(file, weights_only=True)):
        assert seen + resumed_epochs(Typed(20), carried) == undisturbed


# -- before the first batch -------------------------------------------------------------------------------------------


class Unrewindable(StatefulStreamAndIterator, IterableDataset):
    """A stream that is its own iterator, and is not rewound by `iter()`."""

    def __iter__(self):
        self.worker, self.workers = worker_share()
        return self


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("iterator_made", [False, True])
@pytest.mark.parametrize("iterator_used", [False, True])
def test_state_before_the_first_batch_rewinds_the_dataset(iterator_used, iterator_made, workers):
    dataset = Unrewindable(9)
    with stream_loader(dataset, num_workers=workers) as loader:
        if iterator_made:
            iter(loader)
        batches = iter(loader) if iterator_used else loader
        state = json.loads(json.dumps(loader.state_dict()))
        undisturbed = load_epoch(batches)
        assert sorted(numbers_of(undisturbed)) == list(range(9))
        loader.load_state_dict(state)
        assert load_epoch(loader) == undisturbed
        assert load_epoch(loader) == []
    assert resumed_epochs(dataset, state, num_workers=workers) == undisturbed


def test_state_dict_before_the_first_batch_changes_no_random_numbers():
    """The method calls `iter()` of the dataset once, which draws the same random numbers as it would later."""

    class Draws(StreamWithStatefulIterator):
        calls = 0

        def __iter__(self):
            self.calls += 1
            random.random()
            return super().__iter__()

    undisturbed, dataset = load_epoch(stream_loader(Draws(7))), Draws(7)
    with stream_loader(dataset) as loader:
        batches = iter(loader)
        before = random.getstate()
        assert loader.state_dict() == loader.state_dict()
        assert random.getstate() == before
        assert load_epoch(batches) == undisturbed
    assert dataset.calls == 1


@pytest.mark.processes
def test_state_before_the_first_batch_resumes_with_any_num_workers():
    state = stream_loader(StatefulStream(8)).state_dict()
    assert state["stream"]["workers"][0]["state"] == {"dataset": {"count": 0}}
    assert sorted(numbers_of(resumed_epochs(StatefulStream(8), state, num_workers=2))) == list(range(8))


@pytest.mark.filterwarnings("ignore:load_state_dict\\(\\) does not affect:RuntimeWarning")
@pytest.mark.parametrize("name", [*STREAMS, "map"])
def test_state_dict_after_load_state_dict_ignores_the_previous_iterator(name):
    with stream_loader(range(11) if name == "map" else STREAMS[name]()) as loader:
        _, state = read_and_save(loader, 2)
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        next(batches)
        assert loader.state_dict() == state
        resumed = iter(loader)
        assert loader.state_dict() == state
        next(resumed)
        assert loader.state_dict() != state


def test_state_dict_of_a_map_dataset_is_not_called():
    class Stateful(list):
        def state_dict(self):
            raise AssertionError("state_dict was called")

        load_state_dict = None

    with stream_loader(Stateful(range(6))) as loader:
        next(iter(loader))
        assert loader.state_dict()["position"] == 2


class Passes(IterableDataset):
    """A stream with a state, whose iterator has a state too."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return StatefulIterator(5)

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


def test_states_of_a_dataset_and_its_iterator_are_both_saved():
    with stream_loader(Passes()) as loader:
        load_epoch(loader)
        _, state = read_and_save(loader, 1)
    dataset = Passes()
    with stream_loader(dataset) as loader:
        loader.load_state_dict(state)
        assert [numbers for numbers, _ in load_epoch(loader)] == [[2, 3], [4]]
        assert dataset.passes == 2
        load_epoch(loader)
        assert dataset.passes == 3


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_state_after_an_epoch_includes_what_the_dataset_counts_across_epochs(workers):
    class Ordered(Passes):
        def __iter__(self):
            worker, workers = worker_share()
            self.passes += 1
            yield from ((100 * self.passes + number, 0) for number in range(worker, 6, workers))

    with stream_loader(Ordered(), num_workers=workers) as loader:
        load_epoch(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        following = load_epoch(loader)
    assert resumed_epochs(Ordered(), state, num_workers=workers) == following
    assert sorted(numbers_of(following)) == [200, 201, 202, 203, 204, 205]


@pytest.mark.processes
def test_chunk_repeated_for_lack_of_space_loses_no_sample_and_no_state():
    class Pictures(StatefulStream):
        def __iter__(self):
            for number, _ in super().__iter__():
                yield gl.Image(np.full((40 + 20 * number, 60, 3), number, np.uint8)), number

    options = {"batch_size": 3, "ragged": "list", "ring_bytes": 100_000, "num_workers": 1}
    with stream_loader(Pictures(12), **options) as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(2)]
        state = loader.state_dict()
        following = list(batches)
    assert [labels.tolist() for _, labels in seen + following] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [int(image[0, 0, 0]) for images, _ in seen + following for image in images] == list(range(12))
    with stream_loader(Pictures(12), **options) as loader:
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == [[6, 7, 8], [9, 10, 11]]
