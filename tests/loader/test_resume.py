"""Resuming from a saved state on any number of workers and ranks, with equal bits."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gpuload as gl
from gpuload import transforms as T

CHAIN = (T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4))
NOISE = np.random.default_rng(0).integers(0, 256, (64, 12, 14, 3), np.uint8)


def noise_images(samples: int, bad=()) -> MapDataset:
    """Return a dataset whose sample i is a random image and the number i; samples in `bad` raise."""

    def sample(index):
        if index in bad:
            raise ValueError("bad")
        return NOISE[index % len(NOISE)], index

    return MapDataset(sample, samples)


def make_loader(dataset, batch_size=5, **options) -> gl.Loader:
    defaults = {"shuffle": True, "transforms": CHAIN, "num_workers": 0, "device": "cpu", "info": True, "seed": 11}
    return gl.Loader(dataset, batch_size, **{**defaults, **options})


def take_batches(batches, max_batches=10**9) -> list[tuple]:
    """Return epoch, step, positions, numbers and image bytes of each batch."""
    result = []
    while len(result) < max_batches and (batch := next(batches, None)) is not None:
        (images, numbers), info = batch
        result.append((info.epoch, info.step, info.positions.tolist(), numbers.tolist(), images.numpy().tobytes()))
    return result


def saved_place(loader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["position"]


def load_epochs(loader, count=2) -> list[tuple]:
    return [batch for _ in range(count) for batch in take_batches(iter(loader))]


@pytest.mark.processes
@pytest.mark.parametrize("stop", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "chunk_size": 2}])
def test_resumed_loader_yields_the_remaining_batches_with_equal_bits(stop, options):
    dataset = noise_images(33)
    undisturbed = load_epochs(make_loader(dataset), 3)
    assert len(undisturbed) == 3 * 7
    with make_loader(dataset, prefetch_factor=3, **options) as interrupted:
        seen = take_batches(iter(interrupted), stop)
        state = json.loads(json.dumps(interrupted.state_dict()))
    with make_loader(dataset, **options) as resuming:
        resuming.load_state_dict(state)
        resumed = []
        while len(seen) + len(resumed) < len(undisturbed):
            resumed += take_batches(iter(resuming))
    assert seen + resumed == undisturbed


@pytest.mark.processes
def test_state_dict_holds_the_position_of_yielded_batches():
    with make_loader(noise_images(33), num_workers=2, prefetch_factor=4) as loader:
        assert saved_place(loader) == (0, 0)
        places = []
        for _ in loader:
            places.append(saved_place(loader))
        assert places == [(0, 5), (0, 10), (0, 15), (0, 20), (0, 25), (0, 30), (1, 0)]
        assert saved_place(loader) == (1, 0)


def test_state_dict_after_a_break_is_where_the_loop_was_left():
    with make_loader(noise_images(33)) as loader:
        for step, _ in enumerate(loader):
            if step == 2:
                break
        assert saved_place(loader) == (0, 15)
        next(iter(loader))
        assert saved_place(loader) == (1, 5)


def test_set_epoch_after_loading_keeps_the_position_in_that_epoch_only():
    """Training loops call set_epoch(epoch) before each epoch, including the first one after resuming."""
    state = {**make_loader(noise_images(33)).state_dict(), "epoch": 3, "position": 20}
    loader = make_loader(noise_images(33))
    loader.load_state_dict(state)
    assert loader.epoch == 3
    loader.set_epoch(3)
    batches = iter(loader)
    assert (len(loader), len(batches)) == (7, 3)
    assert [batch[:2] for batch in take_batches(batches)] == [(3, 4), (3, 5), (3, 6)]
    assert saved_place(loader) == (4, 0)
    loader.load_state_dict(state)
    loader.set_epoch(5)
    [(epoch, step, *_)] = take_batches(iter(loader), 1)
    assert (epoch, step) == (5, 0)


def test_load_state_dict_during_an_epoch_warns_and_affects_the_next():
    with make_loader(noise_images(33)) as loader:
        state = {**loader.state_dict(), "epoch": 7, "position": 25}
        batches = iter(loader)
        take_batches(batches, 2)
        expected = r"load_state_dict\(\) does not affect the epoch .* the next iter\(\) resumes from"
        with pytest.warns(RuntimeWarning, match=expected):
            loader.load_state_dict(state)
        assert [batch[:2] for batch in take_batches(batches)] == [(0, step) for step in range(2, 7)]
        assert [batch[:2] for batch in take_batches(iter(loader))] == [(7, 5), (7, 6)]


@pytest.mark.parametrize("strict", [True, False])
def test_load_state_dict_of_a_different_backend_warns_once(strict):
    state = make_loader(noise_images(33)).state_dict()
    assert state["backend"] == "torch"  # "auto" means torch on the CPU
    make_loader(noise_images(33), backend="torch").load_state_dict(state)
    kornia_loader = make_loader(noise_images(33), backend="kornia")
    with pytest.warns(RuntimeWarning, match="saved with the backend 'torch', but the batches .* by 'kornia'") as caught:
        kornia_loader.load_state_dict(state, strict=strict)
    assert [warning.filename for warning in caught] == [__file__]
    del state["backend"]
    kornia_loader.load_state_dict(state)  # a state of an earlier version; warnings are errors
    assert "backend" not in make_loader(noise_images(33), transforms=()).state_dict()


@pytest.mark.parametrize(("changes", "text"), [
    ({"dataset": noise_images(34)}, "samples was 33 and is 34"),
    ({"seed": 12}, "seed was 11 and is 12"),
    ({"shuffle": False}, "order was 'shuffled' and is 'sequential'"),
    ({"transforms": CHAIN[:2]}, "transforms was '[0-9a-f]{16}' and is '[0-9a-f]{16}'"),
    ({"decode": gl.Decode(exif=True)}, "transforms was '[0-9a-f]{16}' and is '[0-9a-f]{16}-exif'"),
])  # fmt: skip
def test_load_state_dict_of_different_data_raises_or_warns_with_strict_false(changes, text):
    state = make_loader(noise_images(33)).state_dict()
    other = make_loader(changes.pop("dataset", noise_images(33)), **changes)
    with pytest.raises(ValueError, match=f"{text}.*strict=False"):
        other.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match=text):
        other.load_state_dict(state, strict=False)
    assert len(load_epochs(other, 1)) == 7


def test_resume_far_into_a_large_dataset_begins_at_the_saved_position():
    loader = make_loader(noise_images(3 * 10**9))
    loader.load_state_dict({**loader.state_dict(), "position": 2 * 10**9})
    [(_, _, positions, _, _)] = take_batches(iter(loader), 1)
    assert positions == list(range(2 * 10**9, 2 * 10**9 + 5))


# -- ranks ----------------------------------------------------------------------------------------------------------


def make_ranks(dataset, ranks, global_batch, **options):
    options |= {"batch_size": global_batch // ranks, "world_size": ranks}
    return [make_loader(dataset, rank=rank, **options) for rank in range(ranks)]


def global_steps(loaders, max_steps=10**9) -> list[tuple]:
    """Return position, number and image of each valid sample of each step, in the order of ranks."""
    iterators, result = [iter(loader) for loader in loaders], []
    while len(result) < max_steps:
        step = [next(iterator, None) for iterator in iterators]
        if step[0] is None:
            assert step == [None] * len(step)  # all ranks make the same number of steps
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
def test_resume_on_a_different_number_of_ranks_yields_the_same_batches(samples, batch, stops):
    dataset, global_batch = noise_images(samples), 4 * batch
    undisturbed = global_steps(make_ranks(dataset, 1, global_batch, uneven="exact"))
    assert sorted(n for step in undisturbed for _, n, _ in step) == list(range(samples))
    resumed, state = [], None
    for ranks, max_steps in ((1, stops[0]), (4, stops[1]), (2, 10**9)):
        loaders = make_ranks(dataset, ranks, global_batch, uneven="exact")
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        if state is not None and state["epoch"] == 1:
            break
        resumed += global_steps(loaders, max_steps)
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1  # all ranks save the same state
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
def test_ranks_make_equally_many_steps_if_samples_fail(samples, batch, ranks, uneven, on_error, bad):
    bad = {index for index in bad if index < samples - 1}
    assume(uneven != "drop" or samples >= ranks)
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
    loaders = make_ranks(noise_images(samples, bad), ranks, batch * ranks, uneven=uneven, faults=faults)
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
def test_resume_with_different_workers_and_chunks_yields_the_same_batches(
    samples, batch, ranks, workers, stop, uneven, on_error, bad
):
    """The job loads two epochs and is interrupted anywhere, and samples may fail."""
    dataset = noise_images(samples, {index for index in bad if index < samples - 1})
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)

    def make_loaders(workers=0, chunk=None):
        options = {"uneven": uneven, "faults": faults, "num_workers": workers, "chunk_size": chunk}
        return make_ranks(dataset, ranks, batch * ranks, **options)

    def load_two_epochs(loaders, max_steps=10**9):
        batches = []
        while len(batches) < max_steps and (epoch := loaders[0].state_dict()["epoch"]) < 2:
            batches += global_steps(loaders, max_steps - len(batches))
            assert loaders[0].state_dict()["epoch"] > epoch or len(batches) == max_steps
        return batches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undisturbed = load_two_epochs(make_loaders())
        loaders = make_loaders(*workers[0])
        seen = load_two_epochs(loaders, stop)
        state = json.loads(json.dumps(loaders[0].state_dict()))
        for loader in loaders:
            loader.close()
        loaders = make_loaders(*workers[1])
        for loader in loaders:
            loader.load_state_dict(state)
        seen += load_two_epochs(loaders)
        for loader in loaders:
            loader.close()
    assert seen == undisturbed


def test_uneven_exact_counts_each_sample_once_over_the_ranks():
    loaders = make_ranks(noise_images(21), 4, 8, uneven="exact")
    valid = [sum(int(info.valid.sum()) for _, info in loader) for loader in loaders]
    assert sum(valid) == 21
    assert len(set(map(len, loaders))) == 1


def test_loader_takes_its_rank_from_torchruns_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make_loader(noise_images(20), shuffle=False)
    assert len(loader) == 2
    with pytest.warns(RuntimeWarning, match="split among 2 ranks"):
        batches = iter(loader)
    assert [positions for _, _, positions, *_ in take_batches(batches)] == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]


@pytest.mark.parametrize(("options", "text"), [
    ({"rank": 1}, "rank and world_size must be given together"),
    ({"rank": 0, "world_size": 21, "uneven": "drop"},
     "uneven='drop' leaves no batch: the dataset has 20 samples for 21 ranks"),
    ({"uneven": "exact", "info": False}, "uneven='exact' needs info=True"),
])  # fmt: skip
def test_loader_with_incompatible_rank_options_raises(options, text):
    with pytest.raises(ValueError, match=text):
        make_loader(noise_images(20), **options)


# -- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_replay_returns_the_augmented_sample_and_its_draws():
    dataset = noise_images(33)
    with make_loader(dataset, num_workers=2) as loader:
        loader.set_epoch(4)
        for (images, numbers), info in loader:
            for row in (0, len(numbers) - 1):
                replayed = loader.replay(4, int(info.positions[row]))
                image, number = replayed.sample
                assert torch.equal(image, images[row])
                assert number == numbers[row]
                assert replayed.index == int(info.indices[row])
                assert (replayed.epoch, replayed.position) == (4, int(info.positions[row]))
            break
    assert [name for name, _ in replayed.draws] == ["RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter"]
    (_, crop), (_, flip), _ = replayed.draws
    assert min(crop["box_tlhw"][2:]) > 0, "the crop is empty"
    assert isinstance(flip["flipped"], bool)
    with pytest.raises(ValueError, match=r"position must be at least 0 and at most 32, got 33"):
        loader.replay(0, 33)


def test_replay_of_an_iterable_dataset_or_of_a_sampler_without_an_index_raises():
    with pytest.raises(TypeError, match="replay\\(\\) needs a map-style dataset"):
        make_loader(Streamed(), shuffle=False).replay(0, 0)
    with pytest.raises(ValueError, match=r"needs index=…, since a sampler decides which sample is at a position"):
        make_loader(noise_images(33), sampler=[3, 2, 1], shuffle=False).replay(0, 0)


def test_state_dict_after_an_error_is_before_the_failed_batch_until_the_next_batch():
    loader = make_loader(noise_images(33, bad=[12]), shuffle=False)
    batches = iter(loader)
    take_batches(batches, 2)
    with pytest.raises(gl.SampleError):
        next(batches)
    assert loader.state_dict()["position"] == 10
    next(batches)
    assert loader.state_dict()["position"] == 20


def test_iter_with_too_many_ranks_in_the_environment_raises(monkeypatch):
    loader = make_loader(noise_images(20), drop_last=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="drop_last=True leaves no batch: the dataset has 20 samples for 8 ranks"):
        iter(loader)


# -- states saved after the last batch of an epoch ---------------------------------------------------------------------


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(20))


LOADER_OPTIONS = {
    "map": lambda: {"dataset": range(20), "shuffle": True},
    "two ranks": lambda: {"dataset": range(20), "shuffle": True, "rank": 1, "world_size": 2},
    "mix": lambda: {"dataset": gl.Mix([range(10), range(10, 20)], [1, 1]), "shuffle": True},
    "repeats": lambda: {"dataset": range(20), "repeats": 2, "shuffle": True},
    "sampler": lambda: {"dataset": range(20), "sampler": torch.utils.data.RandomSampler(range(20))},
    "iterable": lambda: {"dataset": Streamed()},
}


def load_values(loader) -> list:
    return [batch.tolist() for batch in loader]


def make_loader_of_kind(name) -> gl.Loader:
    return gl.Loader(**LOADER_OPTIONS[name](), batch_size=4, seed=3, num_workers=0, device="cpu")


@pytest.mark.parametrize("name", LOADER_OPTIONS)
def test_set_epoch_of_a_completed_epoch_yields_no_batch_and_then_the_next_epoch(name):
    with make_loader_of_kind(name) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            last_state, batches = None, []
            for batch in loader:
                last_state = loader.state_dict()
                batches.append(batch.tolist())
            if epoch == 1:
                state = json.loads(json.dumps(last_state))
    # The last batch of a stream is not known to be the last: its state is at the end of epoch 1.
    assert state.get("completed") == (None if name == "iterable" else 1)
    with make_loader_of_kind(name) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        loader.set_epoch(1)
        iterator = iter(loader)
        assert list(iterator) == []
        loader.set_epoch(2)
        assert load_values(loader) == batches


@pytest.mark.parametrize("name", sorted(LOADER_OPTIONS.keys() - {"iterable"}))
def test_state_of_a_completed_epoch_without_set_epoch_is_the_beginning_of_the_next(name):
    with make_loader_of_kind(name) as loader:
        loader.set_epoch(1)
        for _ in loader:
            state = loader.state_dict()
        loader.set_epoch(2)
        batches = load_values(loader)
    with make_loader_of_kind(name) as loader:
        loader.load_state_dict(state)
        assert load_values(loader) == batches
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert load_values(loader) == batches
        loader.load_state_dict(state)
        loader.set_epoch(0)
        loader.set_epoch(1)  # only the first set_epoch() after loading may skip the completed epoch
        assert len(load_values(loader)) == len(batches)


def test_state_names_a_completed_epoch_only_right_after_its_last_batch():
    with make_loader_of_kind("map") as loader:
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


def test_state_of_a_skipped_completed_epoch_can_be_saved_again():
    with make_loader_of_kind("map") as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with make_loader_of_kind("map") as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert load_values(loader) == []
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
        assert loader.epoch == 0
