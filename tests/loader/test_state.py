"""What is saved of a loader, and what is refused."""

from __future__ import annotations

import json

import pytest

from gpuload.loader.state import State

HERE = State(epoch=3, position=128, samples=1000, seed=5, order="shuffled", transforms="0123456789abcdef")


def changed(**changes) -> dict:
    return {**HERE.to_dict(), **changes}


def test_it_is_small_json_with_a_version():
    text = json.dumps(HERE.to_dict())
    assert State.from_dict(json.loads(text)) == HERE
    assert json.loads(text)["version"] == 1
    assert len(text) < 200
    assert not {"workers", "rank", "world_size", "batch_size"} & HERE.to_dict().keys()


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ([1], TypeError, "a state is a dict, as state_dict() gives it, got list"),
        ({}, ValueError, "the state has version None, this gpuload reads version 1"),
        (changed(version=2), ValueError, "the state has version 2, this gpuload reads version 1"),
        ({"version": 1, "epoch": 0}, ValueError, "the state lacks order, position, samples, seed, transforms"),
        (changed(position=-1), ValueError, "position must be of type int and not negative, got -1"),
        (changed(epoch="3"), ValueError, "epoch must be of type int and not negative, got '3'"),
        (changed(order=1), ValueError, "order must be of type str, got 1"),
    ],
)
def test_what_is_no_state_is_refused(state, kind, text):
    with pytest.raises(kind) as caught:
        State.from_dict(state)
    assert text in str(caught.value)


def test_what_comes_on_top_is_ignored():
    assert State.from_dict(changed(note="by a later version")) == HERE


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"samples": 999}, "samples was 999 and is 1000"),
        ({"seed": 6}, "seed was 6 and is 5"),
        ({"order": "sequential"}, "order was 'sequential' and is 'shuffled'"),
        ({"transforms": "f" * 16}, "transforms was 'ffffffffffffffff' and is '0123456789abcdef'"),
    ],
)
def test_other_data_is_refused_or_with_strict_false_warned_of(changes, text):
    state = State.from_dict(changed(**changes))
    with pytest.raises(ValueError, match=f"{text}.*strict=False"):
        state.check(HERE, strict=True)
    with pytest.warns(RuntimeWarning, match=text):
        state.check(HERE, strict=False)


def test_another_epoch_or_position_is_no_other_data():
    State.from_dict(changed(epoch=9, position=1000)).check(HERE, strict=True)


def test_a_position_beyond_the_dataset_is_refused_in_any_case():
    with pytest.raises(ValueError, match="position 1,001, but the dataset has only 1,000"):
        State.from_dict(changed(position=1001)).check(HERE, strict=False)
