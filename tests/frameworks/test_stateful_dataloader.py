"""Code for torchdata's `StatefulDataLoader` and a map dataset, run with that class and, unchanged, with `Loader`."""

from __future__ import annotations

import io
import json
import pickle
from functools import partial

import pytest
import torch
from frameworks.numbered import Numbered

import gpuload as gl

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls this
    pytest.mark.timeout(300),
]

SAMPLES, BATCH_SIZE, STEPS = 33, 5, 7


def torchdata_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def gpuload_loader():
    return partial(gl.Loader, device="cpu")


@pytest.fixture(params=[torchdata_loader, gpuload_loader])
def loader_class(request):
    return request.param()


@pytest.fixture(params=[0, 2])
def num_workers(request):
    return request.param


def round_trip_json(state):
    return json.loads(json.dumps(state))


def round_trip_pickle(state):
    return pickle.loads(pickle.dumps(state))


def round_trip_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


# -- the user's code -------------------------------------------------------------------------------------------------


def make_loader(Loader, num_workers=0, shuffle=False, state=None):
    torch.manual_seed(0)
    loader = Loader(Numbered(SAMPLES), batch_size=BATCH_SIZE, shuffle=shuffle, num_workers=num_workers)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def comparable(batch) -> tuple:
    return batch["label"].tolist(), list(batch["name"]), batch["image"].flatten(1).float().mean(1).tolist()


def train(loader, first_epoch, epochs, *, stop=None):
    """Return the batches, and a checkpoint. Training ends at `stop`, an (epoch, step)."""
    seen = []
    for epoch in range(first_epoch, epochs):
        for step, batch in enumerate(loader, 1):
            seen.append((epoch, comparable(batch)))
            if (epoch, step) == stop:
                return seen, {"epoch": epoch, "loader": loader.state_dict()}
    return seen, {"epoch": epochs, "loader": loader.state_dict()}


# -- both classes ----------------------------------------------------------------------------------------------------


def test_loader_gives_the_same_batches_as_stateful_dataloader(num_workers):
    batches, _ = train(make_loader(gpuload_loader(), num_workers), 0, 2)
    assert batches == train(make_loader(torchdata_loader(), num_workers), 0, 2)[0]
    assert len(batches) == 2 * STEPS


@pytest.mark.parametrize("round_trip", [round_trip_json, round_trip_pickle, round_trip_torch])
def test_resume_in_the_middle_of_an_epoch_continues_identically(loader_class, num_workers, round_trip):
    undisturbed, _ = train(make_loader(loader_class, num_workers), 0, 3)
    for stop in ((0, 1), (1, 3), (1, STEPS - 1)):
        seen, checkpoint = train(make_loader(loader_class, num_workers), 0, 3, stop=stop)
        checkpoint = round_trip(checkpoint)
        loader = make_loader(loader_class, num_workers, state=checkpoint["loader"])
        assert seen + train(loader, checkpoint["epoch"], 3)[0] == undisturbed


def test_state_before_the_first_batch_or_after_an_epoch_resumes_with_a_full_epoch(loader_class, num_workers):
    loader = make_loader(loader_class, num_workers)
    initial_state = loader.state_dict()
    undisturbed, final_checkpoint = train(loader, 0, 1)
    for state in (initial_state, final_checkpoint["loader"]):
        assert train(make_loader(loader_class, num_workers, state=state), 0, 1)[0] == undisturbed


def test_resume_of_a_shuffled_epoch_continues_identically(loader_class, num_workers):
    undisturbed, _ = train(make_loader(loader_class, num_workers, shuffle=True), 0, 1)
    labels = [label for _, (batch_labels, _, _) in undisturbed for label in batch_labels]
    assert sorted(labels) == list(range(SAMPLES)) != labels
    seen, checkpoint = train(make_loader(loader_class, num_workers, shuffle=True), 0, 1, stop=(0, 4))
    loader = make_loader(loader_class, num_workers, shuffle=True, state=checkpoint["loader"])
    assert seen + train(loader, 0, 1)[0] == undisturbed


def test_two_loaders_that_take_turns_resume_identically(loader_class, num_workers):
    def make_pair(states=(None, None)):
        return [make_loader(loader_class, num_workers, shuffle, states[shuffle]) for shuffle in (False, True)]

    def load_in_turns(loaders):
        return [[comparable(batch) for batch in batches] for batches in zip(*loaders, strict=True)]

    undisturbed, loaders = load_in_turns(make_pair()), make_pair()
    iterators = [iter(loader) for loader in loaders]
    seen = [[comparable(next(iterator)) for iterator in iterators] for _ in range(3)]
    assert seen + load_in_turns(make_pair([loader.state_dict() for loader in loaders])) == undisturbed


def test_state_dict_after_load_state_dict_resumes_like_the_loaded_state(loader_class):
    _, checkpoint = train(make_loader(loader_class), 0, 1, stop=(0, 3))
    undisturbed, _ = train(make_loader(loader_class), 0, 1)
    loaded_state = make_loader(loader_class, state=checkpoint["loader"]).state_dict()
    assert train(make_loader(loader_class, state=loaded_state), 0, 1)[0] == undisturbed[3:]


def test_loop_after_a_break_is_a_full_epoch(loader_class, num_workers):
    loader = make_loader(loader_class, num_workers)
    undisturbed, _ = train(loader, 0, 1)
    assert train(loader, 0, 1, stop=(0, 2))[0] == undisturbed[:2]
    assert train(loader, 0, 1)[0] == undisturbed


# -- the difference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loader_class_of", "remaining_steps"), [(torchdata_loader, 0), (gpuload_loader, STEPS)])
def test_state_at_the_last_batch_resumes_with_the_next_epoch_only_in_gpuload(loader_class_of, remaining_steps):
    """torchdata resumes with the remainder of the epoch, which is empty."""
    loader_class = loader_class_of()
    _, checkpoint = train(make_loader(loader_class), 0, 1, stop=(0, STEPS))
    loader = make_loader(loader_class, state=checkpoint["loader"])
    assert len(train(loader, 0, 1)[0]) == remaining_steps
    assert len(train(loader, 0, 1)[0]) == STEPS


def test_loop_over_the_epoch_of_the_state_trains_each_epoch_once():
    """The user's loop trains each epoch once, wherever it was stopped."""

    def train_two_epochs(loader, max_steps=10**9):
        seen = []
        while (epoch := loader.state_dict()["epoch"]) < 2 and len(seen) < max_steps:
            for batch in loader:
                seen.append((epoch, comparable(batch)))
                if len(seen) == max_steps:
                    break
        return seen

    undisturbed = train_two_epochs(make_loader(gpuload_loader()))
    assert len(undisturbed) == 2 * STEPS
    for stop in (0, 3, STEPS, STEPS + 1, 2 * STEPS):
        stopped, resumed = make_loader(gpuload_loader()), make_loader(gpuload_loader())
        seen = train_two_epochs(stopped, stop)
        resumed.load_state_dict(stopped.state_dict())
        assert seen + train_two_epochs(resumed) == undisturbed
