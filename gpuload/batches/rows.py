"""A finished batch, read out of its chunks: rows in the order of their positions, whatever came of each chunk.

Runs in the main process, between the feed and the stage; holds views of what the chunks hold.

Rows lie chunk by chunk. Without faults that is the order of their positions already; samples that stand in for failed
ones come behind the others, and samples that were skipped are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.datasets.box_formats import to_xyxy
from gpuload.datasets.sample import Boxes
from gpuload.datasets.tree import Structure
from gpuload.ring.chunk import Belongings, Block, ChunkContent, TensorBits

if TYPE_CHECKING:  # a room above, and only its type
    from gpuload.workers.batch import Batch, Part

__all__ = ["Harvest"]


class Harvest:
    """The rows of a batch that loaded.

    Attributes:
        positions: int64 (N,), in the order of the batch.
        indices: the dataset index of each.
        valid: bool (N,), False for rows that only fill the batch up.
        structures, places: what `gpuload.datasets.tree` says of each sample.
        belongings: of each sample with targets; None for others.
        has_targets: whether any sample has masks, boxes or keypoints.
        values: for each sample the leaves that are no images; None for those that lie in blocks.
        collated: what the user's `collate_fn` made of the batch in the worker, if it did.
        sources: where the images of each came from.
    """

    def __init__(self, batch: Batch) -> None:
        self._parts = [
            (number, part, part.content)
            for number, part in enumerate(batch.parts)
            if part.content is not None and part.content.rows
        ]
        self._order: list[int] | None = None
        if batch.errors:
            positions = np.concatenate([part.positions[content.rows] for _, part, content in self._parts])
            indices: Any = [part.indices[row] for _, part, content in self._parts for row in content.rows]
            # Their places in the batch as it was planned; a batch that is wrapped round is not ascending.
            planned = np.argsort(batch.spec.positions, kind="stable")
            order = np.argsort(planned[np.searchsorted(batch.spec.positions[planned], positions)], kind="stable")
            self._order = order.tolist()
            self.positions = positions[order]
            self.indices = [indices[row] for row in order]
        else:
            self.positions, self.indices = batch.spec.positions, batch.spec.indices
        self.valid = np.ones(len(self.positions), np.bool_)
        if batch.spec.valid is not None:
            # Rows that fill up repeat a position, and stand behind the one that counts, where this batch has that.
            counts = np.isin(self.positions, batch.spec.positions[batch.spec.valid])
            self.valid[1:] = self.positions[1:] != self.positions[:-1]
            self.valid &= counts
        contents = [content for _, _, content in self._parts]
        self.collated = contents[0].collated if len(contents) == 1 else None
        self.structures: list[Structure] = self._sorted([_per_row(c.structures, c.rows) for c in contents])
        self.places: list[tuple[int, ...]] = self._sorted([_per_row(c.image_places, c.rows) for c in contents])
        self.belongings: list[Belongings | None] = self._sorted(
            [_per_row(c.belongings or [None], c.rows) for c in contents]
        )
        self.has_targets = any(c.belongings for c in contents)
        self.values: list[list[Any]] = self._sorted([c.values for c in contents])
        self.sources: list[str | None] = self._sorted([c.sources for c in contents])

    def __len__(self) -> int:
        """How many rows."""
        return len(self.positions)

    def name(self, row: int) -> str:
        """The sample of a row, for error messages."""
        return f"sample {self.indices[row]}" + (f" ({self.sources[row]})" if self.sources[row] else "")

    def count(self, row: int) -> int:
        """How many images a row has; what stands behind them in its `places` are masks."""
        belongings = self.belongings[row]
        return len(self.places[row]) - (0 if belongings is None else len(belongings.masks))

    def images(self, leaf: int) -> np.ndarray:
        """Which rows have an image number `leaf`: int64."""
        if not self.has_targets:
            return np.array([row for row, places in enumerate(self.places) if len(places) > leaf], np.int64)
        return np.array([row for row in range(len(self.places)) if self.count(row) > leaf], np.int64)

    def boxes(self, row: int) -> np.ndarray:
        """The boxes that the draws of a row hang on: left, top, right, bottom."""
        boxes = next(value for value in self.values[row] if isinstance(value, Boxes))
        return to_xyxy(boxes.array, boxes.format)

    def masks(self, leaf: int) -> np.ndarray:
        """Which rows have a mask at number `leaf`, counted with the images before it: int64."""
        rows = range(len(self.places))
        return np.array([row for row in rows if self.count(row) <= leaf < len(self.places[row])], np.int64)

    def table(self, leaf: int, starts: Sequence[int], *, masks: bool = False) -> np.ndarray:
        """The rows that have an image number `leaf`, as in `gpuload.ring.chunk.ImageColumn`, int64 (such rows, 10).

        Args:
            leaf: which of the sample's images.
            starts: where each part of the batch begins in the memory that the offsets shall count in.
            masks: the rows that have a mask there.
        """
        table = self._table(leaf, starts)
        if not self.has_targets:
            return table
        there = np.array([row for row, places in enumerate(self.places) if len(places) > leaf], np.int64)
        return table[np.isin(there, self.masks(leaf) if masks else self.images(leaf))]

    def _table(self, leaf: int, starts: Sequence[int]) -> np.ndarray:
        tables, having = [], []
        at = 0
        for number, _, content in self._parts:
            table, rows = _table_of(content, leaf)
            table[:, 0] += starts[number]
            tables.append(table)
            having.append(rows + at)
            at += len(content.rows)
        table = np.concatenate(tables)
        if self._order is None:
            return table
        place = {row: number for number, row in enumerate(np.concatenate(having).tolist())}
        return table[[place[row] for row in self._order if row in place]]

    def blocks(self) -> dict[int, list[tuple[int, Part, Block]]]:
        """Leaves, by their number among those that are no images, that lie in blocks of one type in all parts: for each
        the number of the part, the part, and the block. Those of other leaves become values."""
        found: dict[int, list[tuple[int, Part, Block]]] = {}
        for number, part, content in self._parts:
            for block in content.blocks:
                found.setdefault(block.leaf, []).append((number, part, block))
        alike = {}
        for leaf, entries in found.items():
            kinds = {(block.shape[1:], block.dtype, block.tensor, block.torch_dtype) for _, _, block in entries}
            if len(entries) == len(self._parts) and len(kinds) == 1:
                alike[leaf] = entries
            else:
                self._spread(entries)
        return alike

    def spread_blocks(self) -> None:
        """Make values of all leaves that lie in blocks."""
        for number, part, content in self._parts:
            self._spread([(number, part, block) for block in content.blocks])

    def _spread(self, entries: list[tuple[int, Part, Block]]) -> None:
        for number, part, block in entries:
            assert part.data is not None
            at = sum(len(content.rows) for other, _, content in self._parts if other < number)
            place = None if self._order is None else {row: n for n, row in enumerate(self._order)}
            for row, array in enumerate(block.array(part.data)):
                copied = array.copy() if array.ndim else array
                value = TensorBits(copied, block.torch_dtype) if block.tensor else copied
                self.values[at + row if place is None else place[at + row]][block.leaf] = value

    @property
    def order(self) -> list[int] | None:
        """Where each row lies among the rows of the parts; None: in the same order."""
        return self._order

    def _sorted(self, lists: list[list[Any]]) -> list[Any]:
        rows = [entry for part in lists for entry in part]
        return rows if self._order is None else [rows[row] for row in self._order]


def _per_row(items: list[Any], rows: list[int]) -> list[Any]:
    """One entry a row, where a chunk's description has one for all."""
    return items * len(rows) if len(items) == 1 else items


def _table_of(content: ChunkContent, leaf: int) -> tuple[np.ndarray, np.ndarray]:
    """The images number `leaf` of a chunk, a copy, and which of its samples have one."""
    if len(content.image_places) == 1:
        if len(content.image_places[0]) <= leaf:
            return np.empty((0, 10), np.int64), np.empty(0, np.int64)
        return content.images[leaf].table.copy(), np.arange(len(content.rows))
    counts = np.array([len(places) for places in content.image_places], np.int64)
    rows = np.flatnonzero(counts > leaf)
    return content.images[0].table[(np.cumsum(counts) - counts)[rows] + leaf], rows
