"""The state of a loader: its content, its conversion by JSON and torch, and errors for invalid states."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter, OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike

from gpuload.loader.state import State, from_json, to_json
from gpuload.order.place import Place

STATE = State(place=Place(3, 128), samples=1000, seed=5, order="shuffled", transforms="0123456789abcdef")


def make_state(**changes) -> dict:
    return {**STATE.to_dict(), **changes}


def test_state_is_small_json_with_a_version():
    text = json.dumps(STATE.to_dict())
    assert State.from_dict(json.loads(text)) == STATE
    assert json.loads(text)["version"] == 1
    assert len(text) < 200
    assert not {"workers", "rank", "world_size", "batch_size"} & STATE.to_dict().keys()


@pytest.mark.parametrize(("state", "kind", "text"), [
    ([1], TypeError, "a state must be a dict from state_dict(), got list"),
    ({}, ValueError, "the state, with the keys [], is no state of a gpuload Loader; pass a dict from its"),
    (
        {"_snapshot": {}, "_steps_since_snapshot": 0},  # from torchdata's StatefulDataLoader
        ValueError,
        "with the keys ['_snapshot', '_steps_since_snapshot'], is no state of a gpuload Loader",
    ),
    (make_state(version=2), ValueError, "the state has version 2, but this gpuload reads version 1"),
    ({"version": 1, "epoch": 0}, ValueError, "the state lacks order, position, samples, seed, transforms"),
    (make_state(position=-1), ValueError, "position must be an integer in 0 … 2**62 - 1, got -1"),
    (make_state(epoch="3"), ValueError, "epoch must be an integer in 0 … 2**63 - 1, got '3'"),
    (make_state(epoch=2**63), ValueError, f"epoch must be an integer in 0 … 2**63 - 1, got {2**63}"),
    (make_state(position=2**62), ValueError, f"position must be an integer in 0 … 2**62 - 1, got {2**62}"),
    (make_state(seed=2**64), ValueError, f"seed must be an integer in 0 … 2**64 - 1, got {2**64}"),
    (make_state(order=1), ValueError, "order must be of type str, got 1"),
])  # fmt: skip
def test_from_dict_of_an_invalid_state_raises(state, kind, text):
    with pytest.raises(kind) as caught:
        State.from_dict(state)
    assert text in str(caught.value)


def test_state_without_a_backend_has_no_key_for_it_and_is_accepted():
    assert "backend" not in STATE.to_dict()
    state = State.from_dict(make_state(backend="kornia"))
    for saved, current in ((STATE, state), (state, STATE), (state, state)):
        saved.check(current, strict=True)  # warnings are errors
    with pytest.raises(ValueError, match="the state's backend must be of type str, got 3"):
        State.from_dict(make_state(backend=3))


WORKER = {"samples": 3, "ended": False, "state": None}
STREAM = {"turn": 0, "step": 3, "workers": [WORKER, WORKER]}
SAMPLER = {"batches": 2, "own": None, "generator": None}


@pytest.mark.parametrize(("stream", "text"), [
    ({}, "the state's stream: workers must be a list of one dict per worker, got None"),
    ({**STREAM, "workers": []}, "the state's stream: workers must be a list"),
    ({**STREAM, "turn": 2}, "the state's stream: turn must be an integer below 2, got 2"),
    ({**STREAM, "turn": None}, "the state's stream: turn must be an integer below 2, got None"),
    ({**STREAM, "step": "3"}, "the state's stream: step must be an integer in 0 … 2**63 - 1, got '3'"),
    ({**STREAM, "step": 2**63}, f"the state's stream: step must be an integer in 0 … 2**63 - 1, got {2**63}"),
    ({**STREAM, "workers": [WORKER, 5]}, "the state's stream: worker 1 must be a dict, got 5"),
    ({**STREAM, "workers": [{}]}, "the state's stream, worker 0: samples must be an integer in 0 … 2**63 - 1, got"),
    ({**STREAM, "workers": [WORKER, {**WORKER, "samples": -1}]},
     "the state's stream, worker 1: samples must be an integer in 0 … 2**63 - 1, got -1"),
    ({**STREAM, "workers": [{**WORKER, "ended": None}]},
     "the state's stream, worker 0: ended must be true or false, got None"),
    ({**STREAM, "workers": [{**WORKER, "state": {"at": 1}}]},
     "the state's stream, worker 0: state must be None, or a dict of iterator and dataset, got {'at': 1}"),
    ({**STREAM, "workers": [{**WORKER, "state": {"dataset": {"at": [{"$bytes": "?"}]}}}]},
     "the state's stream, worker 0: dataset['at'][0] is not from state_dict(): $bytes cannot be read"),
])  # fmt: skip
def test_from_dict_of_a_malformed_stream_state_raises(stream, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        State.from_dict(make_state(order="stream", samples=None, stream=stream))


@pytest.mark.parametrize(("sampler", "text"), [
    ({}, "the state's sampler: batches must be an integer in 0 … 2**63 - 1, got None"),
    ({**SAMPLER, "own": {"state": 1}},
     'the state\'s sampler: own must be None, or a dict with the keys "of" and "state"'),
    ({**SAMPLER, "own": {"of": "x", "state": 1}}, "the state's sampler: own must be None, or a dict"),
    ({**SAMPLER, "generator": "AAAA"}, "the state's sampler: generator must be the state of a torch.Generator"),
    ({**SAMPLER, "own": {"of": "sampler", "state": {"$": 1}}},
     "the state's sampler: own is not from state_dict(): $ cannot be read"),
])  # fmt: skip
def test_from_dict_of_a_malformed_sampler_state_raises(sampler, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        State.from_dict(make_state(order="sampler", sampler=sampler))


def test_from_dict_ignores_unknown_keys():
    assert State.from_dict(make_state(note="by a later version")) == STATE


def test_check_of_a_position_beyond_the_dataset_raises():
    with pytest.raises(ValueError, match="position 1,001, but the dataset has only 1,000"):
        State.from_dict(make_state(position=1001)).check(STATE, strict=False)


def through_json(value):
    return json.loads(json.dumps(value))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


STATES = {
    "plain": {"at": 3, "names": ["a", None, True, 1.5], "nested": {"": {}}},
    "keys": {1: "one", (2, "b"): {None: False}, "three": {3.5: ()}},
    "a key that looks like a kind": {"$tuple": [1]},
    "containers": [(1, (2,)), {1, 2}, frozenset({(1, 2)}), OrderedDict([("b", 1), ("a", (2,))]), 1 + 2j],
    "bytes": (b"\x00\xff", bytearray(b"abc"), b""),
    "random": random.Random(5).getstate(),
    "numpy": np.random.RandomState(5).get_state(),
    "numpy generator": np.random.default_rng(5).bit_generator.state,
    "torch": {"generator": torch.Generator().manual_seed(5).get_state()},
    "tensors": [
        torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(1 + 2j).conj().imag,  # has the negative bit
    ],
    "arrays": [
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        np.array("2026", "M8[Y]"),
        np.zeros((0, 2)),
        np.array(["ab"]),
    ],
    "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True)],
}


def is_same(one, other) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return type(one) is type(other) and keys and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    return alike(one, other)


@pytest.mark.parametrize("carry", [through_json, through_torch])
@pytest.mark.parametrize("name", STATES)
def test_from_json_returns_what_to_json_saved(name, carry):
    assert is_same(from_json(carry(to_json(STATES[name], "state")), "state"), STATES[name])


def test_to_json_leaves_json_values_unchanged():
    assert to_json(STATES["plain"], "it") == STATES["plain"]


class Unknown:
    pass


@pytest.mark.parametrize(("value", "where"), [
    ({"a": [1, Unknown()]}, r"it\['a'\]\[1\] is of type \S+Unknown, which cannot be saved; use only numbers"),
    ({Unknown: 1}, r"it, key .* is of type builtins.type"),
    ((torch.zeros(2, device="meta"),), r"it\[0\] is of type torch.Tensor on meta"),
    (Counter("ab"), "it is of type collections.Counter"),
    ({"f": {"g": partial(int)}}, r"it\['f'\]\['g'\] is of type functools.partial"),
    (np.array([None]), "it is of type numpy.ndarray"),
])  # fmt: skip
def test_to_json_of_an_unknown_type_raises_with_its_place(value, where):
    with pytest.raises(TypeError, match=where):
        to_json(value, "it")


@pytest.mark.parametrize("value", [
    {"$nothing": 1},
    {"$tuple": 1},
    {"$dict": [[1]]},
    {"$bytes": "?"},
    {"$array": ["|O", [1], "AAAAAAAAAAA="]},
    {"$array": ["<i4", [3], "AAAA"]},
    {"$tensor": ["float32", [3], "AAAA"]},
    {"$tensor": ["nn", [3], "AAAA"]},
])  # fmt: skip
def test_from_json_of_a_malformed_value_raises_with_its_place(value):
    with pytest.raises(ValueError, match=r"it\['a'\] is not from state_dict\(\): \$"):
        from_json({"a": value}, "it")


@pytest.mark.parametrize("kind", [set, frozenset])
def test_to_json_sorts_sets(kind):
    """The order of a set depends on the process's hashes of text, but all ranks must save the same state."""
    words = [f"w{number:02}" for number in range(50)]
    assert to_json(kind(words), "x") == {f"${kind.__name__}": words}
