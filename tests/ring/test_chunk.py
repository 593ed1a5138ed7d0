"""Chunks of which nobody needs to know more before their batch is put together, and how they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpuload.datasets.tree import Structure, flatten
from gpuload.errors import ErrorRecord
from gpuload.order.place import IterablePlace
from gpuload.ring.chunk import SEPARATOR, Block, ChunkContent, Collated, ImageColumn, ValueColumn, together

ROWS = 3


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Labelled:
    image: Any
    label: Any


def content(**changes: Any) -> ChunkContent:
    """Three samples, each a tuple of an image and a number."""
    usual: dict[str, Any] = {
        "rows": list(range(ROWS)),
        "structures": [structure_of((0, 1))],
        "images": [ImageColumn(table(0, 100, 250), [0])],
        "values": [ValueColumn(1, [7, 8, 9])],
        "sources": SEPARATOR.join("abc"),
    }
    return ChunkContent(**(usual | changes))


def structure_of(sample: Any) -> Structure:
    return flatten(sample, [])


def table(*offsets: int) -> np.ndarray:
    made = np.arange(10 * len(offsets), dtype=np.int64).reshape(-1, 10)
    made[:, 0] = offsets
    return made


def error() -> ErrorRecord:
    return ErrorRecord(epoch=0, position=0, index=0, source=None, cause="", traceback="")


@pytest.mark.parametrize("sample", [(0, 1), [0, 1], {"image": 0, 3: 1}, {"in": [{"image": 0}, (1,)]}])
def test_samples_of_one_image_and_small_values_are_plain(sample):
    assert content(structures=[structure_of(sample)]).is_plain(ROWS)


@pytest.mark.parametrize("values", [[1, 2, 3], ["a", None, 2.5], [True, np.int64(1), np.float32(2)]])
def test_values_that_can_be_read_anywhere_are_plain(values):
    assert content(values=[ValueColumn(1, values)]).is_plain(ROWS)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [0, 2], "errors": [(1, error())]},
        {"rows": [0, 2]},
        {"structures": [structure_of((0, 1)), structure_of([0, 1]), structure_of((0, 1))]},
        {"structures": [structure_of(Pair(0, 1))]},
        {"structures": [structure_of({"in": [Labelled(0, 1)]})]},
        {"structures": [structure_of({(1, 2): 0, "label": 1})]},
        {"images": []},
        {"images": [ImageColumn(table(0, 100, 250), [0]), ImageColumn(table(300, 400, 450), [1])]},
        {"images": [ImageColumn(table(0, 100), [0], [0, 2])]},
        {"images": [ImageColumn(table(0, 100, 250), [0], kinds=["<u2"] * ROWS)]},
        {"images": [ImageColumn(table(0, 100, 250), [0, 0, 1])]},
        {"masks": [ImageColumn(table(0, 100, 250), [1])]},
        {"values": [ValueColumn(1, [np.zeros(2), 8, 9])]},
        {"values": [ValueColumn(1, [type("Own", (int,), {})(7), 8, 9])]},
        {"values": [ValueColumn(1, [7, 8], [0, 1])]},
        {"strays": "a leaf looks like boxes"},
        {"encoded": [(0,)]},
        {"points": [ValueColumn(1, [7, 8, 9])]},
        {"blocks": [Block(1, 0, (ROWS, 2), "<f4", tensor=False)]},
        {"collated": Collated(7)},
        {"iterable": IterablePlace(ROWS, ended=False)},
        {"fields": [{1: "labels"}]},
    ],
)
def test_what_is_unusual_is_not_plain(changes):
    assert not content(**changes).is_plain(ROWS)


def test_chunks_together_have_offsets_in_the_memory_of_the_batch():
    second = content(values=[ValueColumn(1, [4, 5, 6])], sources=["d", None, "f"])
    whole = together([content(), second], [1000, 5000])
    assert list(whole.rows) == list(range(2 * ROWS))
    [images], [values] = whole.images, whole.values
    assert images.table[:, 0].tolist() == [1000, 1100, 1250, 5000, 5100, 5250]
    np.testing.assert_array_equal(images.table[:, 1:], np.tile(table(0, 0, 0)[:, 1:], (2, 1)))
    assert (images.rows, images.leaves) == (None, [0])
    assert (values.leaf, values.values) == (1, [7, 8, 9, 4, 5, 6])
    assert whole.names == ["a", "b", "c", "d", None, "f"]
    assert whole.structures == [structure_of((0, 1))]


@pytest.mark.parametrize(
    "other",
    [
        content(structures=[structure_of([0, 1])]),
        content(images=[ImageColumn(table(0, 100, 250), [1])]),
        content(values=[ValueColumn(0, [4, 5, 6])]),
        content(values=[]),
    ],
)
def test_chunks_that_are_not_alike_do_not_go_together(other):
    with pytest.raises(ValueError, match="not alike"):
        together([content(), other], [0, 1000])


def test_going_together_changes_no_chunk():
    chunk = content()
    before = chunk.images[0].table.copy()
    together([chunk, content()], [1000, 2000])
    np.testing.assert_array_equal(chunk.images[0].table, before)
