"""Structures of samples: `transpose_samples`, `flatten`, `unflatten` and their names."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload.datasets.sample import as_meta
from gpuload.datasets.tree import describe, flatten, names_of, transpose_samples, unflatten

Pair = namedtuple("Pair", ["left", "right"])

SAME_STRUCTURE = {
    "a number": lambda i: i,
    "an array": lambda i: np.full(3, i),
    "a tensor": lambda i: torch.tensor(i),
    "a numpy scalar": lambda i: np.float32(i),
    "an array and a label": lambda i: (np.full(3, i), i),
    "one of several plain types": lambda i: (i if i % 2 else None, f"n{i}" if i else b"n"),
    "a dict": lambda i: {"b": i, "a": [i, (i,)], 3: {}},
    "keys of several types": lambda i: {"b": i, 1: i},
    "an empty tuple": lambda i: (),
}


@pytest.mark.parametrize("kind", SAME_STRUCTURE)
def test_transpose_samples_of_one_structure_returns_it_and_its_leaves(kind):
    samples = [SAME_STRUCTURE[kind](i) for i in range(4)]
    transposed = transpose_samples(samples)
    assert transposed is not None
    structure, leaves = transposed
    for row, sample in enumerate(samples):
        sample_leaves = []
        assert flatten(sample, sample_leaves) == structure
        assert len(leaves) == len(sample_leaves)
        for number, value in enumerate(sample_leaves):
            assert leaves[number][row] is value, (row, number)


def test_transpose_samples_keeps_the_order_of_keys():
    transposed = transpose_samples([{"b": 0, "a": 1}] * 2)
    assert transposed is not None
    (_, _, keys, *_), _ = transposed
    assert (keys, keys.order) == (("a", "b"), ("b", "a"))


REFUSED_SAMPLES = {
    "of two lengths": [(1, 2), (1,)],
    "with other keys": [{"a": 1}, {"b": 1}],
    "with keys in another order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "of two containers": [(1,), [1]],
    "a container next to a number": [(1, 2), (1, (2,))],
    "a named tuple": [Pair(1, 2)] * 2,
    "an image": [gl.Image(np.zeros((2, 2, 3), np.uint8))] * 2,
    "a tensor next to an array": [torch.zeros(1), np.zeros(1)],
    "two kinds of numbers": [np.float32(1), np.float64(1)],
    "a parameter": [torch.nn.Parameter(torch.zeros(1))] * 2,
    "an array of the user's own type": [np.zeros(3).view(np.recarray)] * 2,
    "none": [None, None],
}


@pytest.mark.parametrize("case", REFUSED_SAMPLES)
def test_transpose_samples_of_different_structures_or_unsupported_types_returns_none(case):
    assert transpose_samples(REFUSED_SAMPLES[case]) is None


def test_flatten_makes_metadata_one_leaf_which_describe_shows_by_type() -> None:
    leaves: list[Any] = []
    structure = flatten({"meta": as_meta({"a": [1, None]}), "x": as_meta([1])}, leaves)
    assert describe(structure, leaves) == "{'meta': dict, 'x': list}"
    assert leaves == [{"a": [1, None]}, [1]]


class Tokens(list):
    pass


def test_unflatten_restores_a_list_subclass_whose_names_are_numbers() -> None:
    leaves: list[Any] = []
    structure = flatten({"caption": Tokens([4, 5])}, leaves)
    assert names_of(structure) == ["caption.0", "caption.1"]
    assert type(unflatten(structure, leaves)["caption"]) is Tokens
