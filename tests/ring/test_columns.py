"""Columns of a chunk or batch: which are plain, how chunks are joined, and how rows are selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpuload.datasets.tree import Structure, flatten
from gpuload.errors import ErrorRecord
from gpuload.order.place import IterablePlace
from gpuload.ring.columns import (
    SEPARATOR,
    Block,
    Collated,
    Columns,
    ImageColumn,
    ValueColumn,
    leaves_with_mismatched_blocks,
)
from gpuload.transforms.program.draws import IMAGE

ROWS = 3


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Labelled:
    image: Any
    label: Any


def make_columns(**fields: Any) -> Columns:
    """Return columns of three samples, each a tuple of an image and a number."""
    defaults: dict[str, Any] = {
        "rows": list(range(ROWS)),
        "structures": [structure_of((0, 1))],
        "images": [ImageColumn(image_table(0, 100, 250), [0])],
        "values": {1: ValueColumn([7, 8, 9])},
        "sources": SEPARATOR.join("abc"),
    }
    return Columns(**(defaults | fields))


def structure_of(sample: Any) -> Structure:
    return flatten(sample, [])


def image_table(*offsets: int) -> np.ndarray:
    images = np.arange(10 * len(offsets), dtype=np.int64).view(IMAGE)
    images["offset"] = offsets
    return images


def int16_block(*pieces: tuple[int, int]) -> Block:
    """Return a block with two int16 numbers in each row."""
    return Block((2,), "int16", list(pieces))


def error_record() -> ErrorRecord:
    return ErrorRecord(epoch=0, position=0, index=0, source=None, cause="", traceback="")


@pytest.mark.parametrize("sample", [(0, 1), [0, 1], {"image": 0, 3: 1}, {"in": [{"image": 0}, (1,)]}])
def test_samples_of_one_image_and_small_values_are_plain(sample):
    assert make_columns(structures=[structure_of(sample)]).is_plain(ROWS)


@pytest.mark.parametrize("values", [[1, 2, 3], ["a", None, 2.5], [True, np.int64(1), np.float32(2)]])
def test_values_of_builtin_and_numpy_types_are_plain(values):
    assert make_columns(values={1: ValueColumn(values)}).is_plain(ROWS)


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": [0, 2], "errors": [(1, error_record())]},
        {"rows": [0, 2]},
        {"structures": [structure_of((0, 1)), structure_of([0, 1]), structure_of((0, 1))]},
        {"structures": [structure_of(Pair(0, 1))]},
        {"structures": [structure_of({"in": [Labelled(0, 1)]})]},
        {"structures": [structure_of({(1, 2): 0, "label": 1})]},
        {"images": []},
        {"images": [ImageColumn(image_table(0, 100, 250), [0]), ImageColumn(image_table(300, 400, 450), [1])]},
        {"images": [ImageColumn(image_table(0, 100), [0], np.array([0, 2]))]},
        {"images": [ImageColumn(image_table(0, 100, 250), [0], kinds=["<u2"] * ROWS)]},
        {"images": [ImageColumn(image_table(0, 100, 250), [0, 0, 1])]},
        {"masks": [ImageColumn(image_table(0, 100, 250), [1])]},
        {"values": {1: ValueColumn([np.zeros(2), 8, 9])}},
        {"values": {1: ValueColumn([type("IntSubclass", (int,), {})(7), 8, 9])}},
        {"values": {1: ValueColumn([7, 8], np.array([0, 1]))}},
        {"warning": "a leaf looks like boxes"},
        {"encoded": [(0,)]},
        {"points": {1: ValueColumn([7, 8, 9])}},
        {"blocks": {1: int16_block((0, ROWS))}},
        {"collated": Collated(7)},
        {"iterable": IterablePlace(ROWS, ended=False)},
        {"fields": [{1: "labels"}]},
    ],
)
def test_unusual_columns_are_not_plain(fields):
    assert not make_columns(**fields).is_plain(ROWS)


def test_joined_chunks_have_offsets_in_the_memory_of_the_batch():
    first, second = make_columns(), make_columns(values={1: ValueColumn([4, 5, 6])}, sources=["d", None, "f"])
    table_before = first.images[0].table.copy()
    joined = Columns.concat([first, second], [1000, 5000])
    assert joined.is_plain(2 * ROWS)
    [images] = joined.images
    assert images.table["offset"].tolist() == [1000, 1100, 1250, 5000, 5100, 5250]
    for name in ("shape", "size_hw", "region_tlhw"):
        np.testing.assert_array_equal(images.table[name], np.tile(table_before[name], (2, 1)))
    assert (images.rows, images.leaf) == (None, 0)
    assert joined.values == {1: ValueColumn([7, 8, 9, 4, 5, 6])}
    assert joined.source_list == ["a", "b", "c", "d", None, "f"]
    assert joined.structures == [structure_of((0, 1))]
    np.testing.assert_array_equal(first.images[0].table, table_before)


def test_joined_sources_that_are_strings_stay_a_string():
    joined = Columns.concat([make_columns(), make_columns(sources=SEPARATOR.join("def"))], [0, 1000])
    assert joined.sources == SEPARATOR.join("abcdef")


@pytest.mark.parametrize(
    "different_chunk",
    [
        make_columns(structures=[structure_of([0, 1])]),
        make_columns(images=[ImageColumn(image_table(0, 100, 250), [1])]),
        make_columns(values={0: ValueColumn([4, 5, 6])}),
        make_columns(values={}),
    ],
)
def test_joined_chunks_of_different_structures_are_not_plain(different_chunk):
    assert not Columns.concat([make_columns(), different_chunk], [0, 1000]).is_plain(2 * ROWS)


def test_columns_of_some_rows_are_joined_row_by_row():
    """Only rows 0 and 2 of the second chunk have a second image."""
    partial = ImageColumn(image_table(300, 450), [2, 3], np.array([0, 2]), [None, ("int16", 3)])
    chunk = make_columns(images=[*make_columns().images, partial], values={4: ValueColumn(["x"], np.array([1]))})
    joined = Columns.concat([make_columns(), chunk], [0, 1000])
    images, joined_partial = joined.images
    assert (images.rows, len(images.table)) == (None, 2 * ROWS)
    assert list(joined_partial.rows_and_leaves()) == [(3, 2), (5, 3)]
    assert joined_partial.kinds_per_image == [None, ("int16", 3)]
    assert dict(joined.values[4].items()) == {4: "x"}
    assert [joined.values[4].get(row) for row in range(6)] == [None] * 4 + ["x", None]
    assert dict(joined.values[1].items()) == {0: 7, 1: 8, 2: 9}
    assert joined.structures == [structure_of((0, 1))]


def four_samples() -> Columns:
    """Return columns of rows 0, 2, 3 and 5 of a request. All samples but the second have a second image."""
    partial = ImageColumn(image_table(10, 12, 13), [8, 8, 9], np.array([0, 2, 3]), [None] * 3)
    return Columns(
        [0, 2, 3, 5],
        structures=["a", "b", "c", "d"],  # type: ignore[list-item]
        images=[ImageColumn(image_table(0, 1, 2, 3), [7]), partial],
        values={1: ValueColumn(list("abcd")), 2: ValueColumn(["c", "d"], np.array([2, 3]))},
        sources="a\0b\0c\0d",
        fields=[(1,)],
        positions=np.arange(10, 14),
        indices=np.arange(20, 24),
    )


def test_take_picks_rows_from_every_column():
    picked = four_samples().take(np.array([1, 3]))
    assert picked.rows == [2, 5]
    assert (picked.structures, picked.sources, picked.fields) == (["b", "d"], ["b", "d"], [(1,)])
    complete, partial = picked.images
    assert (complete.table["offset"].tolist(), complete.leaves, complete.rows) == ([1, 3], [7], None)
    assert (partial.table["offset"].tolist(), list(partial.rows_and_leaves()), partial.kinds) == ([13], [(1, 9)], [])
    assert {leaf: dict(column.items()) for leaf, column in picked.values.items()} == {1: {0: "b", 1: "d"}, 2: {1: "d"}}
    assert (picked.positions.tolist(), picked.indices) == ([11, 13], [21, 23])


def test_take_accepts_rows_in_any_order_and_repeated():
    picked = four_samples().take(np.array([3, 0, 3]))
    assert picked.images[0].table["offset"].tolist() == [3, 0, 3]
    assert list(picked.images[1].rows_and_leaves()) == [(0, 9), (1, 8), (2, 9)]
    assert picked.values[1].values == ["d", "a", "d"]
    picked_again = picked.take(np.array([1]))
    assert (picked_again.source_list, picked_again.values[1].values) == (["a"], ["a"])


def test_take_of_no_rows_returns_empty_columns():
    picked = four_samples().take(np.empty(0, np.int64))
    assert (picked.rows, picked.images, picked.values, picked.source_list) == ([], [], {}, [])


def test_joined_blocks_have_the_offsets_of_their_chunks():
    memory = np.arange(128, dtype=np.int16).view(np.uint8)
    first, second = (
        Columns(range(n), [structure_of(0)], blocks={0: int16_block((offset, n))}) for offset, n in ((8, 2), (4, 3))
    )
    first.sources, second.sources = [None] * 2, [None] * 3
    joined = Columns.concat([first, second], [0, 100]).blocks[0]
    assert joined.pieces == [(8, 2), (104, 3)]
    assert joined.array(memory).tolist() == [[4, 5], [6, 7]]
    assert joined.array(memory, 1).tolist() == [[52, 53], [54, 55], [56, 57]]
    assert joined.array(memory[100:], 1, 100).tolist() == [[52, 53], [54, 55], [56, 57]]


def test_unstack_turns_a_block_into_separate_copies():
    memory = np.arange(128, dtype=np.int16).view(np.uint8)
    columns = Columns(range(3), [structure_of(0)], sources=[None] * 3, blocks={0: int16_block((4, 3))})
    columns.unstack([0], memory)
    memory[:] = 0
    assert [value.tolist() for value in columns.take(np.array([2, 0])).values[0].values] == [[6, 7], [2, 3]]
    assert not columns.blocks


def test_leaves_with_mismatched_blocks_returns_the_leaves_that_differ():
    one_block, two_blocks = (
        Columns(blocks={0: int16_block((0, 2))}),
        Columns(blocks={0: int16_block((0, 2)), 1: int16_block((64, 2))}),
    )
    assert leaves_with_mismatched_blocks([one_block, two_blocks]) == {1}
    two_blocks.blocks[0].dtype = "uint16"
    assert leaves_with_mismatched_blocks([one_block, two_blocks]) == {0, 1}
