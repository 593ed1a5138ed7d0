"""Going on from a saved state, on any number of workers and ranks, to the last bit."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gpuload as gl
from gpuload import transforms as T

CHAIN = (T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4))
NOISE = np.random.default_rng(0).integers(0, 256, (64, 12, 14, 3), np.uint8)


class Noise:
    """Sample i is a random image and the number i; what is in `bad` raises."""

    def __init__(self, samples: int, bad=()) -> None:
        self.samples, self.bad = samples, frozenset(bad)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError("bad")
        return NOISE[index % len(NOISE)], index


def loader(dataset, batch_size=5, **options) -> gl.Loader:
    given_ = {"shuffle": True, "transforms": CHAIN, "num_workers": 0, "device": "cpu", "info": True, "seed": 11}
    return gl.Loader(dataset, batch_size, **{**given_, **options})


def taken(batches, most=10**9) -> list[tuple]:
    """Of each batch: epoch, step, positions, numbers, and the bytes of its images."""
    result = []
    while len(result) < most and (batch := next(batches, None)) is not None:
        (images, numbers), info = batch
        result.append((info.epoch, info.step, info.positions.tolist(), numbers.tolist(), images.numpy().tobytes()))
    return result


def epochs(loader_, count=2) -> list[tuple]:
    return [batch for _ in range(count) for batch in taken(iter(loader_))]


@pytest.mark.processes
@pytest.mark.parametrize("stop", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "chunk_size": 2}])
def test_the_rest_of_the_epoch_and_all_later_ones_are_equal_to_the_last_bit(stop, options):
    dataset = Noise(33)
    undisturbed = epochs(loader(dataset), 3)
    assert len(undisturbed) == 21
    with loader(dataset, prefetch_factor=3, **options) as first:
        seen = taken(iter(first), stop)
        state = json.loads(json.dumps(first.state_dict()))
    with loader(dataset, **options) as second:
        second.load_state_dict(state)
        rest = []
        while len(seen) + len(rest) < len(undisturbed):
            rest += taken(iter(second))
    assert seen + rest == undisturbed


@pytest.mark.processes
def test_the_state_says_what_was_yielded_and_not_what_was_prefetched():
    with loader(Noise(33), num_workers=2, prefetch_factor=4) as loader_:
        assert (loader_.state_dict()["epoch"], loader_.state_dict()["position"]) == (0, 0)
        places = []
        for _ in loader_:
            state = loader_.state_dict()
            places.append((state["epoch"], state["position"]))
        # With its last batch an epoch is done.
        assert places == [(0, 5), (0, 10), (0, 15), (0, 20), (0, 25), (0, 30), (1, 0)]
        assert (loader_.state_dict()["epoch"], loader_.state_dict()["position"]) == (1, 0)


def test_after_a_break_the_state_is_where_the_loop_was_left():
    with loader(Noise(33)) as loader_:
        for step, _ in enumerate(loader_):
            if step == 2:
                break
        state = loader_.state_dict()
        assert (state["epoch"], state["position"]) == (0, 15)
        next(iter(loader_))
        assert (loader_.state_dict()["epoch"], loader_.state_dict()["position"]) == (1, 5)


def test_set_epoch_keeps_the_place_in_the_epoch_that_was_loaded_and_begins_any_other():
    """As in a training loop that calls set_epoch(epoch) before each epoch, the first one after resuming too."""
    state = {**loader(Noise(33)).state_dict(), "epoch": 3, "position": 20}
    loader_ = loader(Noise(33))
    loader_.load_state_dict(state)
    loader_.set_epoch(3)
    assert [batch[:2] for batch in taken(iter(loader_))] == [(3, 4), (3, 5), (3, 6)]
    loader_.load_state_dict(state)
    loader_.set_epoch(5)
    assert taken(iter(loader_))[0][:2] == (5, 0)


def test_a_state_loaded_while_an_epoch_is_open_is_taken_up_by_the_next_and_said_so():
    with loader(Noise(33)) as loader_:
        state = {**loader_.state_dict(), "epoch": 7, "position": 25}
        batches = iter(loader_)
        taken(batches, 2)
        expected = r"load_state_dict\(\) does not affect the epoch .* the next iter\(\) resumes from"
        with pytest.warns(RuntimeWarning, match=expected):
            loader_.load_state_dict(state)
        assert [batch[:2] for batch in taken(batches)] == [(0, step) for step in range(2, 7)]
        assert [batch[:2] for batch in taken(iter(loader_))] == [(7, 5), (7, 6)]


def test_the_length_of_what_is_left():
    loader_ = loader(Noise(33))
    loader_.load_state_dict({**loader_.state_dict(), "position": 20})
    assert len(loader_) == 7
    assert len(iter(loader_)) == 3


@pytest.mark.parametrize("strict", [True, False])
def test_another_backend_is_warned_of_once_and_resumed(strict):
    state = loader(Noise(33)).state_dict()
    assert state["backend"] == "torch"  # which "auto" means on the CPU
    loader(Noise(33), backend="torch").load_state_dict(state)
    other = loader(Noise(33), backend="kornia")
    with pytest.warns(RuntimeWarning, match="saved with the backend 'torch', but the batches .* by 'kornia'") as caught:
        other.load_state_dict(state, strict=strict)
    assert [warning.filename for warning in caught] == [__file__]
    del state["backend"]
    other.load_state_dict(state)  # of an earlier version: warnings are errors
    assert "backend" not in loader(Noise(33), transforms=()).state_dict()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dataset": Noise(34)}, "samples was 33 and is 34"),
        ({"seed": 12}, "seed was 11 and is 12"),
        ({"shuffle": False}, "order was 'shuffled' and is 'sequential'"),
        ({"transforms": CHAIN[:2]}, "transforms was '[0-9a-f]{16}' and is '[0-9a-f]{16}'"),
    ],
)
def test_a_state_of_other_data_is_refused(changes, text):
    state = loader(Noise(33)).state_dict()
    other = loader(changes.pop("dataset", Noise(33)), **changes)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match=text):
        other.load_state_dict(state, strict=False)
    assert len(epochs(other, 1)) == 7


def test_to_resume_far_in_a_large_dataset_costs_nothing():
    class Large(Noise):
        def __getitem__(self, index):
            return NOISE[index % 64], index

    loader_ = loader(Large(3 * 10**9))
    loader_.load_state_dict({**loader_.state_dict(), "position": 2 * 10**9})
    [batch] = taken(iter(loader_), 1)
    assert batch[2] == list(range(2 * 10**9, 2 * 10**9 + 5))


# -- ranks ----------------------------------------------------------------------------------------------------------


def stage(dataset, ranks, global_batch, **options):
    return [loader(dataset, global_batch // ranks, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def global_steps(loaders, most=10**9) -> list[tuple]:
    """Of each step: positions that count, numbers, images of all ranks, in the order of ranks."""
    iterators, result = [iter(loader_) for loader_ in loaders], []
    while len(result) < most:
        step = [next(iterator, None) for iterator in iterators]
        if step[0] is None:
            assert step == [None] * len(step)  # every rank makes the same number of steps
            break
        rows: list[tuple] = []
        for (images, numbers), info in step:  # type: ignore[misc]
            rows += zip(info.positions.tolist(), numbers.tolist(), images, info.valid.tolist(), strict=True)
            assert len(numbers) > 0
        result.append([(p, n, image.numpy().tobytes()) for p, n, image, valid in rows if valid])
    return result


@pytest.mark.slow
@settings(max_examples=25)
@given(samples=st.integers(1, 70), batch=st.integers(1, 3), stops=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_one_then_four_then_two_ranks_see_what_one_would_have_seen(samples, batch, stops):
    dataset, size = Noise(samples), 4 * batch
    undisturbed = global_steps(stage(dataset, 1, size, uneven="exact"))
    assert sorted(n for step in undisturbed for _, n, _ in step) == list(range(samples))
    resumed, state = [], None
    for ranks, most in ((1, stops[0]), (4, stops[1]), (2, 10**9)):
        loaders = stage(dataset, ranks, size, uneven="exact")
        for loader_ in loaders:
            if state is not None:
                loader_.load_state_dict(state)
        if state is not None and state["epoch"] == 1:
            break
        resumed += global_steps(loaders, most)
        states = [json.dumps(loader_.state_dict()) for loader_ in loaders]
        assert len(set(states)) == 1  # any rank's state will do
        state = json.loads(states[0])
    assert resumed == undisturbed


@pytest.mark.slow
@settings(max_examples=25)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 4),
    ranks=st.integers(1, 4),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
    on_error=st.sampled_from(["skip", "replace"]),
    bad=st.sets(st.integers(0, 59), max_size=20),
)
def test_ranks_keep_step_whatever_fails(samples, batch, ranks, uneven, on_error, bad):
    bad = {index for index in bad if index < samples - 1}
    assume(uneven != "drop" or samples >= ranks)
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
    loaders = stage(Noise(samples, bad), ranks, batch * ranks, uneven=uneven, faults=faults)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = global_steps(loaders)
    assert len(steps) == len(loaders[0])
    assert not {number for step in steps for _, number, _ in step} & bad


@pytest.mark.processes
@settings(max_examples=8, deadline=None)
@given(
    samples=st.integers(4, 60),
    batch=st.integers(1, 4),
    ranks=st.sampled_from([1, 2]),
    workers=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=2, max_size=2),
    stop=st.integers(0, 9),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
    on_error=st.sampled_from(["skip", "replace"]),
    bad=st.sets(st.integers(0, 59), max_size=6),
)
def test_two_epochs_broken_off_anywhere_are_gone_on_with(samples, batch, ranks, workers, stop, uneven, on_error, bad):
    """With other numbers of workers and other chunks, whatever fails."""
    dataset = Noise(samples, {index for index in bad if index < samples - 1})
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)

    def job(workers=0, chunk=None):
        options = {"uneven": uneven, "faults": faults, "num_workers": workers, "chunk_size": chunk}
        return stage(dataset, ranks, batch * ranks, **options)

    def steps(loaders, most=10**9):
        found = []
        while len(found) < most and (epoch := loaders[0].state_dict()["epoch"]) < 2:
            found += global_steps(loaders, most - len(found))
            assert loaders[0].state_dict()["epoch"] > epoch or len(found) == most
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undisturbed = steps(job())
        loaders = job(*workers[0])
        seen = steps(loaders, stop)
        state = json.loads(json.dumps(loaders[0].state_dict()))
        for loader_ in loaders:
            loader_.close()
        loaders = job(*workers[1])
        for loader_ in loaders:
            loader_.load_state_dict(state)
        seen += steps(loaders)
        for loader_ in loaders:
            loader_.close()
    assert seen == undisturbed


def test_exact_counts_every_sample_once_over_the_ranks():
    loaders = stage(Noise(21), 4, 8, uneven="exact")
    valid = [sum(int(info.valid.sum()) for _, info in loader_) for loader_ in loaders]
    assert sum(valid) == 21
    assert len(set(map(len, loaders))) == 1


def test_the_ranks_of_torchrun_are_found(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = loader(Noise(20), shuffle=False)
    assert len(found) == 2
    with pytest.warns(RuntimeWarning, match="split among 2 ranks"):
        batches = iter(found)
    assert [batch[2] for batch in taken(batches)] == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 1}, "rank and world_size must be given together"),
        ({"uneven": "exact", "info": False}, "uneven='exact' needs info=True"),
    ],
)
def test_options_that_do_not_go_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        loader(Noise(20), **options)


def test_too_few_samples_for_the_ranks_are_said():
    with pytest.raises(ValueError, match=r"uneven='drop' leaves no batch: the dataset has 3 samples for 4 ranks"):
        loader(Noise(3), rank=0, world_size=4, uneven="drop")


# -- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_one_augmented_sample_is_had_again():
    dataset = Noise(33)
    with loader(dataset, num_workers=2) as loader_:
        loader_.set_epoch(4)
        for (images, numbers), info in loader_:
            for row in (0, len(numbers) - 1):
                again = loader_.replay(4, int(info.positions[row]))
                image, number = again.sample
                assert torch.equal(image, images[row])
                assert number == numbers[row]
                assert again.index == int(info.indices[row])
                assert (again.epoch, again.position) == (4, int(info.positions[row]))
            break
    assert [name for name, _ in again.draws] == ["RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter"]
    assert again.draws[0][1]["box_tlhw"][2:] != [0, 0]
    assert again.draws[1][1]["flipped"] in (True, False)
    with pytest.raises(ValueError, match=r"position must be at least 0 and at most 32, got 33"):
        loader_.replay(0, 33)


# -- places that are easy to get wrong --------------------------------------------------------------------------------


def test_the_epoch_that_was_loaded_is_the_one_that_is_told():
    loader_ = loader(Noise(33))
    loader_.load_state_dict({**loader_.state_dict(), "epoch": 3, "position": 20})
    assert loader_.epoch == 3
    for epoch in range(loader_.epoch, 5):
        loader_.set_epoch(epoch)
        assert {batch[0] for batch in taken(iter(loader_))} == {epoch}
        assert loader_.state_dict()["epoch"] == epoch + 1


def test_a_future_set_by_hand_is_what_the_state_names_once_the_open_epoch_is_over():
    loader_ = loader(Noise(33))
    batches = iter(loader_)
    taken(batches, 1)
    loader_.set_epoch(7)
    assert (loader_.state_dict()["epoch"], loader_.state_dict()["position"]) == (0, 5)
    taken(batches)
    assert (loader_.state_dict()["epoch"], loader_.state_dict()["position"]) == (7, 0)
    assert taken(iter(loader_), 1)[0][:2] == (7, 0)


def test_a_batch_that_was_raised_is_done_again_unless_another_followed():
    loader_ = loader(Noise(33, bad=[12]), shuffle=False)
    batches = iter(loader_)
    taken(batches, 2)
    with pytest.raises(gl.SampleError):
        next(batches)
    assert loader_.state_dict()["position"] == 10
    next(batches)
    assert loader_.state_dict()["position"] == 20


def test_ranks_that_come_up_later_may_leave_no_batch(monkeypatch):
    loader_ = loader(Noise(20), drop_last=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="drop_last=True leaves no batch: the dataset has 20 samples for 8 ranks"):
        iter(loader_)


def test_turning_images_upright_is_other_data():
    state = loader(Noise(33)).state_dict()
    with pytest.raises(ValueError, match=r"transforms was '[0-9a-f]{16}' and is '[0-9a-f]{16}-exif'"):
        loader(Noise(33), decode=gl.Decode(exif=True)).load_state_dict(state)


# -- states that are saved after an epoch's last batch ----------------------------------------------------------------


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(20))


COMPLETED = {
    "map": lambda: {"dataset": range(20), "shuffle": True},
    "two ranks": lambda: {"dataset": range(20), "shuffle": True, "rank": 1, "world_size": 2},
    "mix": lambda: {"dataset": gl.Mix([range(10), range(10, 20)], [1, 1]), "shuffle": True},
    "repeats": lambda: {"dataset": range(20), "repeats": 2, "shuffle": True},
    "sampler": lambda: {"dataset": range(20), "sampler": torch.utils.data.RandomSampler(range(20))},
    "iterable": lambda: {"dataset": Streamed()},
}


def values(loader) -> list:
    return [batch.tolist() for batch in loader]


def make_completed(name) -> gl.Loader:
    return gl.Loader(**COMPLETED[name](), batch_size=4, seed=3, num_workers=0, device="cpu")


@pytest.mark.parametrize("name", COMPLETED)
def test_loop_that_sets_a_completed_epoch_after_loading_has_no_batch_and_then_the_next_epoch(name):
    with make_completed(name) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            last, batches = None, []
            for batch in loader:
                last = loader.state_dict()
                batches.append(batch.tolist())
            if epoch == 1:
                state = json.loads(json.dumps(last))
    # Nobody knows of a stream's last batch that it is the last one: its state is at the end of epoch 1.
    assert state.get("completed") == (None if name == "iterable" else 1)
    with make_completed(name) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        loader.set_epoch(1)
        iterator = iter(loader)
        assert list(iterator) == []
        loader.set_epoch(2)
        assert values(loader) == batches


@pytest.mark.parametrize("name", sorted(COMPLETED.keys() - {"iterable"}))
def test_state_of_a_completed_epoch_without_its_number_is_the_beginning_of_the_next(name):
    with make_completed(name) as loader:
        loader.set_epoch(1)
        for _ in loader:
            state = loader.state_dict()
        loader.set_epoch(2)
        batches = values(loader)
    with make_completed(name) as loader:  # without set_epoch, and with the next epoch's
        loader.load_state_dict(state)
        assert values(loader) == batches
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert values(loader) == batches
        loader.load_state_dict(state)
        loader.set_epoch(0)
        loader.set_epoch(1)  # not the first call after loading
        assert len(values(loader)) == len(batches)


def test_state_after_the_end_of_an_epoch_or_within_one_names_no_completed_epoch():
    with make_completed("map") as loader:
        batches = iter(loader)
        next(batches)
        assert "completed" not in loader.state_dict()
        list(batches)
        assert "completed" not in loader.state_dict()
        loader.set_epoch(5)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        assert loader.state_dict()["completed"] == 5
        with pytest.raises(StopIteration):
            next(batches)
        assert "completed" not in loader.state_dict()


def test_completed_epoch_that_is_skipped_can_be_resumed_from_again():
    with make_completed("map") as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with make_completed("map") as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert values(loader) == []
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
        assert loader.epoch == 0
