"""Taking rows out of the content of a chunk that is done: samples that failed only once the device was to decode them.

Runs in the main process. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.ring.chunk import ChunkContent, Encoded, ImageColumn, Rows, ValueColumn

__all__ = ["leave_out"]


def leave_out(content: ChunkContent, gone: Sequence[int], data: np.ndarray) -> None:
    """Take rows out of `content`, by their numbers among its `rows`, and close up its blocks in the chunk's bytes.

    Example:
        >>> content = ChunkContent([0, 1, 2], values=[ValueColumn(0, ["a", "b", "c"])], sources=[None, "b.jpg", None])
        >>> leave_out(content, [1], np.empty(0, np.uint8))
        >>> content.rows, content.values[0].values, content.sources
        ([0, 2], ['a', 'c'], [None, None])
    """
    count, out = len(content.rows), set(gone)
    kept = [row for row in range(count) if row not in out]
    number = {row: at for at, row in enumerate(kept)}
    content.sources = _some(content.names, kept, count)
    content.structures = _some(content.structures, kept, count)
    content.fields = _some(content.fields, kept, count)
    content.encoded = _encoded(content, number)
    for columns in (content.images, content.masks):
        for at, column in enumerate(columns):
            having, rows = _rows(column.rows, count, number)
            leaves, kinds = (_some(own, having, len(column.table)) for own in (column.leaves, column.kinds))
            columns[at] = ImageColumn(column.table[having], leaves, rows, kinds)
    for columns in (content.values, content.points):
        for at, column in enumerate(columns):
            having, rows = _rows(column.rows, count, number)
            columns[at] = ValueColumn(column.leaf, [column.values[place] for place in having], rows)
    for block in content.blocks:
        array = block.array(data)
        array[: len(kept)] = array[kept]
        block.shape = (len(kept), *block.shape[1:])
    content.rows = [content.rows[row] for row in kept]


def _rows(rows: Rows, count: int, number: dict[int, int]) -> tuple[list[int], Rows]:
    """Of a column, the places that stay, and its rows then."""
    having = [place for place, row in enumerate(range(count) if rows is None else rows) if row in number]
    return having, None if rows is None else [number[rows[place]] for place in having]


def _some(entries: Any, kept: Sequence[int], count: int) -> Any:
    """Those that stay; one for all, and none, are as they were."""
    return entries if len(entries) != count or count == 1 else [entries[row] for row in kept]


def _encoded(content: ChunkContent, number: dict[int, int]) -> list[tuple[Any, ...]]:
    found = []
    for entry in map(Encoded._make, content.encoded):
        rows = content.images[entry.column].rows
        if (row := entry.row if rows is None else rows[entry.row]) in number:
            place = number[row] if rows is None else sum(one in number for one in rows[: entry.row])
            found.append(tuple(entry._replace(row=place)))
    return found
