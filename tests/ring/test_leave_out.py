from __future__ import annotations

import numpy as np
import pytest

from gpuload.ring.chunk import Block, ChunkContent, Encoded, ImageColumn, ValueColumn
from gpuload.ring.leave_out import leave_out


def table(*rows: int) -> np.ndarray:
    return np.array([[row] * 10 for row in rows], np.int64)


def content() -> ChunkContent:
    """Four samples, of rows 0, 2, 3, 5 of the request; the second images are those of the first, third and fourth."""
    return ChunkContent(
        [0, 2, 3, 5],
        structures=["a", "b", "c", "d"],  # type: ignore[list-item]
        images=[ImageColumn(table(0, 1, 2, 3), [7]), ImageColumn(table(10, 12, 13), [8, 8, 9], [0, 2, 3], [None] * 3)],
        values=[ValueColumn(1, list("abcd")), ValueColumn(2, ["c", "d"], [2, 3])],
        sources="a\0b\0c\0d",
        fields=[(1,)],
        encoded=[Encoded(0, row, 64 * row, 9, 1, 0) for row in range(4)] + [Encoded(1, 2, 512, 9, 1, 0)],
    )


def test_rows_leave_every_column():
    found = content()
    leave_out(found, [0, 2], np.empty(0, np.uint8))
    assert found.rows == [2, 5]
    assert (found.structures, found.sources, found.fields) == (["b", "d"], ["b", "d"], [(1,)])
    first, second = found.images
    assert (first.table[:, 0].tolist(), first.leaves, first.rows) == ([1, 3], [7], None)
    assert (second.table[:, 0].tolist(), second.leaves, second.rows, second.kinds) == ([13], [9], [1], [None])
    assert [(one.values, one.rows) for one in found.values] == [(["b", "d"], None), (["d"], [1])]
    assert [(one[0], one[1], one[2]) for one in found.encoded] == [(0, 0, 64), (0, 1, 192), (1, 0, 512)]


def test_blocks_close_up_in_the_slot():
    data = np.zeros(256, np.uint8)
    found = ChunkContent([0, 1, 2], [None], blocks=[Block(0, 64, (3, 2), "int16", False)])  # type: ignore[list-item]
    found.blocks[0].array(data)[:] = [[1, 2], [3, 4], [5, 6]]
    leave_out(found, [1], data)
    assert found.blocks[0].shape == (2, 2)
    assert found.blocks[0].array(data).tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize("gone", [[0], [0, 1]])
def test_all_rows_may_go(gone):
    rows = list(range(len(gone)))
    found = ChunkContent(rows, [()], [ImageColumn(table(*rows), [0])], [ValueColumn(1, rows)], [None] * len(rows))  # type: ignore[list-item]
    leave_out(found, gone, np.empty(0, np.uint8))
    assert (found.rows, found.images[0].table.shape, found.values[0].values) == ([], (0, 10), [])
