"""Triton's interpreter computes the same when it is hastened, and leaves the language as it was."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.interpreter import hasten

pytestmark = pytest.mark.interpreter


@triton.jit
def _doubled(value):
    return value + value


@triton.jit
def _double(pointer, size: tl.constexpr):
    places = pointer + tl.arange(0, size)
    tl.store(places, _doubled(_doubled(tl.load(places))) + tl.sum(tl.load(places)))


def launch(values: list[int]) -> list[int]:
    found = torch.tensor(values, dtype=torch.int32)
    _double[(1,)](found, len(values))
    return found.tolist()


@pytest.fixture(autouse=True)
def interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here")
    hasten()


def test_it_computes_and_leaves_the_language_as_it_was():
    before = {name: id(getattr(tl, name)) for name in ("arange", "load", "range", "sum")}
    assert launch([1, 2, 3, 4]) == launch([1, 2, 3, 4]) == [14, 18, 22, 26]
    assert {name: id(getattr(tl, name)) for name in before} == before
