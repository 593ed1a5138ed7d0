"""The own state of a sampler or dataset, on its way through JSON and through torch."""

from __future__ import annotations

import io
import json
import random
from collections import Counter, OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from dataloader.common import alike

from gpuload.loader.own_state import from_json, to_json


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
    "random's": random.Random(5).getstate(),
    "numpy's": np.random.RandomState(5).get_state(),
    "a numpy generator's": np.random.default_rng(5).bit_generator.state,
    "torch's": {"generator": torch.Generator().manual_seed(5).get_state()},
    "tensors": [
        torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
    ],
    "arrays": [
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        np.array("2026", "M8[Y]"),
        np.zeros((0, 2)),
        np.array(["ab"]),
    ],
    "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True)],
}


def same(one, other) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return type(one) is type(other) and keys and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return alike(one, other)


@pytest.mark.parametrize("carry", [through_json, through_torch])
@pytest.mark.parametrize("name", STATES)
def test_what_was_saved_is_what_is_loaded(name, carry):
    assert same(from_json(carry(to_json(STATES[name], "it")), "it"), STATES[name])


def test_what_json_holds_is_written_as_it_is():
    assert to_json(STATES["plain"], "it") == STATES["plain"]


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, Own()]}, r"it\['a'\]\[1\] is of type \S+Own, which a state does not keep; let it hold numbers"),
        ({Own: 1}, r"it, key .* is of type builtins.type"),
        ((torch.zeros(2, device="meta"),), r"it\[0\] is of type torch.Tensor on meta"),
        (Counter("ab"), "it is of type collections.Counter"),
        ({"f": {"g": partial(int)}}, r"it\['f'\]\['g'\] is of type functools.partial"),
        (np.array([None]), "it is of type numpy.ndarray"),
    ],
)
def test_what_is_not_kept_is_refused_by_its_place(value, where):
    with pytest.raises(TypeError, match=where):
        to_json(value, "it")


@pytest.mark.parametrize(
    "value",
    [
        {"$nothing": 1},
        {"$tuple": 1},
        {"$dict": [[1]]},
        {"$bytes": "?"},
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<i4", [3], "AAAA"]},
        {"$tensor": ["float32", [3], "AAAA"]},
        {"$tensor": ["nn", [3], "AAAA"]},
    ],
)
def test_what_was_not_saved_is_refused_by_its_place(value):
    with pytest.raises(ValueError, match=r"it\['a'\] is not what state_dict\(\) gave: \$"):
        from_json({"a": value}, "it")


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_saved_alike_in_every_process(kind):
    """Its own order depends on the process's hashes of text, but a state is the same on every rank."""
    words = [f"w{number:02}" for number in range(50)]
    assert to_json(kind(words), "x") == {f"${kind.__name__}": words}
