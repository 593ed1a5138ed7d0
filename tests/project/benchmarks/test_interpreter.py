"""`speed_up_interpreter`: Triton's interpreter gives the same results, and the language is left as it was."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from helpers import lacking

from benchmarks.interpreter import speed_up_interpreter

pytestmark = pytest.mark.interpreter


@triton.jit
def _doubled(value):
    return value + value


@triton.jit
def _double(pointer, size: tl.constexpr):
    addresses = pointer + tl.arange(0, size)
    tl.store(addresses, _doubled(_doubled(tl.load(addresses))) + tl.sum(tl.load(addresses)))


def launch(values: list[int]) -> list[int]:
    tensor = torch.tensor(values, dtype=torch.int32)
    _double[(1,)](tensor, len(values))
    return tensor.tolist()


@pytest.fixture(autouse=True)
def interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        lacking.skip("Triton's interpreter")
    speed_up_interpreter()


def test_speed_up_interpreter_keeps_results_and_the_language():
    ids_before = {name: id(getattr(tl, name)) for name in ("arange", "load", "range", "sum")}
    assert launch([1, 2, 3, 4]) == launch([1, 2, 3, 4]) == [14, 18, 22, 26]
    assert {name: id(getattr(tl, name)) for name in ids_before} == ids_before


@triton.jit
def _mixed(bytes_in, words_in, floats_out, height: tl.constexpr, width: tl.constexpr):
    rows, columns = tl.arange(0, height)[:, None], tl.arange(0, width)[None, :]
    small = tl.load(bytes_in + rows)  # a column of uint8, combined with a row of int32
    sums = small + tl.load(words_in + columns)
    tl.store(floats_out + rows * width + columns, sums / 2 + small * 0.5)


@pytest.mark.parametrize(("height", "width"), [(2, 4), (4, 2), (4, 4)])
def test_speed_up_interpreter_keeps_types_and_shapes_of_results(height, width):
    """Types and shapes are cached between launches; a shape may come again with other types."""
    small = torch.arange(250, 250 + height, dtype=torch.uint8)
    for words in (torch.arange(width, dtype=torch.int32) - 2, torch.arange(width, dtype=torch.int16) * 300):
        output = torch.zeros(height, width)
        _mixed[(1,)](small, words, output, height, width)
        assert torch.equal(output, (small.int()[:, None] + words.int()) / 2 + small[:, None] / 2)
