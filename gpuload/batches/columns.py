"""A batch as columns, read from its chunks, with rows in the order of their positions.

Runs in the main process, between the feed and the stage; holds views of the chunks. A leaf keeps the number that it got
when its sample was taken apart, see `gpuload.ring.chunk`.

Rows come chunk by chunk. Without faults that is the order of their positions; substitutes for failed samples come after
the others, and skipped samples are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.datasets.box_formats import to_xyxy
from gpuload.datasets.sample import Boxes
from gpuload.datasets.tree import Structure, places_of, unflatten
from gpuload.errors import visible
from gpuload.ring.chunk import Block, ChunkContent, ImageColumn, ValueColumn

if TYPE_CHECKING:
    from gpuload.batches.mixing import Pairing
    from gpuload.transforms import Draws
    from gpuload.workers.batch import Batch, Part

__all__ = ["Columns", "Finished", "Images"]


@dataclass(slots=True)
class Images:
    """The first images (or masks) of all samples of a batch, or the second ones …

    Attributes:
        rows: int64 (M,), which rows of the batch have one, ascending.
        leaves: for each row, which leaf it is.
        table: int64 (M, 10), as in `gpuload.ring.chunk.ImageColumn`, with offsets in the slot.
        parts: int64 (M,), the part of the batch that each is in.
        kinds: of masks, for each the dtype and number of axes; of images too, if some are not uint8 (None: that one
            is).
    """

    rows: np.ndarray
    leaves: list[int]
    table: np.ndarray
    parts: np.ndarray
    kinds: list[Any]

    @property
    def sizes_hw(self) -> np.ndarray:
        """Of the whole images, int64 (M, 2)."""
        return self.table[:, 4:6]

    def leaf(self, count: int) -> int | None:
        """The leaf that they are, if all `count` rows have one there, else None."""
        alike = len(self.rows) == count and self.leaves.count(self.leaves[0]) == count
        return self.leaves[0] if alike else None


class Columns:
    """The rows of a batch that loaded.

    Attributes:
        positions: int64 (N,), in the order of the batch.
        indices: the dataset index of each.
        structures: of each sample, see `gpuload.datasets.tree`; only one if all are equal.
        images, masks: see `Images`.
        points: boxes and keypoints, by their leaf.
        values: all other leaves that are not in blocks.
        blocks: the leaves in blocks of one type in all parts: the number of each part, the part, and the block.
        fields: of each row with boxes, the leaves that go with them; see `ChunkContent`.
        collated: the batch as the user's `collate_fn` made it in the worker, if it did.
        order: for each row its number among the rows of the parts; None: the same order.
    """

    def __init__(self, batch: Batch) -> None:
        self.order: np.ndarray | None = None
        if (plain := batch.together) is not None:
            self._take(plain, batch)
            return
        self._placed = False
        having = [(number, part, part.content) for number, part in enumerate(batch.parts) if part.samples]
        self._parts = [(number, part, content) for number, part, content in having if content is not None]
        if batch.errors:
            positions = np.concatenate([part.positions[content.rows] for _, part, content in self._parts])
            indices: Any = [part.indices[row] for _, part, content in self._parts for row in content.rows]
            # Their rows in the planned batch; positions of a batch that wraps around are not ascending.
            planned = np.argsort(batch.spec.positions, kind="stable")
            self.order = np.argsort(planned[np.searchsorted(batch.spec.positions[planned], positions)], kind="stable")
            self.positions = positions[self.order]
            self.indices = [indices[row] for row in self.order.tolist()]
        else:
            self.positions, self.indices = batch.spec.positions, batch.spec.indices
        self._spec = batch.spec
        contents = [content for _, _, content in self._parts]
        self.collated = contents[0].collated if len(contents) == 1 else None
        structures = [structure for content in contents for structure in content.structures]
        alike = structures == structures[:1] * len(structures)
        self.structures: list[Structure] = structures[:1] if alike else self._in_order(self._per_row("structures"))
        having = any(content.fields for content in contents)
        self.fields = self._in_order(self._per_row("fields", ())) if having else []
        self._bases = list(accumulate([len(content.rows) for content in contents], initial=0))
        # For each row of the parts its row in the batch.
        self._row: np.ndarray | None = None if self.order is None else np.argsort(self.order)
        self.images = self._images([content.images for content in contents])
        self.masks = self._images([content.masks for content in contents])
        self.points = self._values([content.points for content in contents])
        self.values = self._values([content.values for content in contents])
        self.blocks: dict[int, list[tuple[int, Part, Block]]] = {}
        self._find_blocks()

    def _take(self, plain: ChunkContent, batch: Batch) -> None:
        """The rows of a batch whose plain chunks a worker has put together."""
        self._placed, self._parts, self._spec = True, [(0, batch.parts[0], plain)], batch.spec
        self.positions, self.indices = batch.spec.positions, batch.spec.indices
        self.collated, self.structures, self.fields = None, plain.structures, []
        [images], count = plain.images, len(plain.rows)
        rows = np.arange(count)
        self.images, self.masks = [Images(rows, images.leaves * count, images.table, rows, [])], []
        self.points, self.values, self.blocks = {}, {column.leaf: column for column in plain.values}, {}

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def valid(self) -> np.ndarray:
        """Bool (N,), False for rows that only fill up the batch."""
        valid = np.ones(len(self.positions), np.bool_)
        if self._spec.valid is not None:
            # Rows that fill up repeat a position, after the row that counts, if this batch has that one.
            valid[1:] = self.positions[1:] != self.positions[:-1]
            valid &= np.isin(self.positions, self._spec.positions[self._spec.valid])
        return valid

    @cached_property
    def sources(self) -> list[str | None]:
        """Where the images of each came from."""
        return self._in_order([content.names for _, _, content in self._parts])

    @property
    def has_targets(self) -> bool:
        return bool(self.masks or self.points)

    def name(self, row: int, leaf: int | None = None) -> str:
        """The sample of a row, or a leaf of it, for error messages."""
        place = "sample" if leaf is None else places_of(self.structure(row))[leaf]
        where = "" if place == "sample" else f"{place} of "
        source = self.sources[row]
        return f"{where}sample {visible(str(self.indices[row]))}" + (f" ({visible(source)})" if source else "")

    def structure(self, row: int) -> Structure:
        return self.structures[0 if len(self.structures) == 1 else row]

    def boxes(self, rows: Sequence[int]) -> list[np.ndarray]:
        """The boxes that the draws of rows depend on: left, top, right, bottom."""
        found: dict[int, Boxes] = {}
        for column in self.points.values():
            found |= {row: value for row, value in column.items() if isinstance(value, Boxes)}
        return [to_xyxy(found[row].array, found[row].format) for row in rows]

    def table(self, images: Images, starts: Sequence[int]) -> np.ndarray:
        """The table of images, with offsets in a memory where the parts begin at `starts`."""
        if self._placed:
            return images.table
        table = images.table.copy()
        table[:, 0] += np.asarray(starts, np.int64)[images.parts]
        return table

    def spread_blocks(self) -> None:
        """Turn all blocks into values."""
        for leaf, entries in list(self.blocks.items()):
            self._spread(leaf, entries)
        self.blocks = {}

    def samples(self, finished: Sequence[dict[int, Any]], plain: Callable[[Any], Any]) -> list[Any]:
        """The samples of the batch put together again, row by row.

        Args:
            finished: of each row the finished leaves, by number.
            plain: applied to the values of all other leaves.
        """
        rows: list[dict[int, Any]] = [{} for _ in range(len(self))]
        for leaf, column in (*self.values.items(), *self.points.items()):
            for row, value in column.items():
                rows[row][leaf] = plain(value)
        samples = []
        for row, (leaves, own) in enumerate(zip(rows, finished, strict=True)):
            leaves |= own
            samples.append(unflatten(self.structure(row), [leaves[leaf] for leaf in range(len(leaves))]))
        return samples

    def _per_row(self, name: str, default: Any = None) -> list[list[Any]]:
        """For each chunk one entry for each row, even if its description has one for all."""
        found = []
        for _, _, content in self._parts:
            entries = getattr(content, name) or [default]
            found.append(entries * len(content.rows) if len(entries) == 1 else entries)
        return found

    def _in_order(self, lists: Sequence[Sequence[Any]]) -> list[Any]:
        rows = [entry for part in lists for entry in part]
        return rows if self.order is None else [rows[row] for row in self.order.tolist()]

    def _rows(self, part: int, rows: list[int] | None) -> np.ndarray:
        """Rows of a part (None: all) as rows of the batch."""
        count = self._bases[part + 1] - self._bases[part]
        found = (np.arange(count) if rows is None else np.array(rows, np.int64)) + self._bases[part]
        return found if self._row is None else self._row[found]

    def _images(self, found: list[list[ImageColumn]]) -> list[Images]:
        """The images (or masks) of the batch, from those of each part."""
        merged = []
        for number in range(max(map(len, found), default=0)):
            having = [(at, columns[number]) for at, columns in enumerate(found) if len(columns) > number]
            lengths = [len(column.table) for _, column in having]
            parts = np.array([self._parts[at][0] for at, _ in having]).repeat(lengths)
            leaf = having[0][1].leaves
            whole = self._row is None and len(having) == len(found) and len(leaf) == 1
            if whole and all(own.rows is None and own.leaves == leaf and not own.kinds for _, own in having):
                table = np.concatenate([column.table for _, column in having])
                merged.append(Images(np.arange(len(table)), leaf * len(table), table, parts, []))
                continue
            rows = np.concatenate([self._rows(at, column.rows) for at, column in having])
            order = np.argsort(rows, kind="stable")
            leaves = [leaf for (_, column), n in zip(having, lengths, strict=True) for leaf in _each(column.leaves, n)]
            kinds: list[Any] = []
            if any(column.kinds for _, column in having):
                each = (_each(column.kinds or [None], n) for (_, column), n in zip(having, lengths, strict=True))
                kinds = [kind for own in each for kind in own]
            merged.append(
                Images(
                    rows[order],
                    [leaves[row] for row in order.tolist()],
                    np.concatenate([column.table for _, column in having])[order],
                    parts[order],
                    [kinds[row] for row in order.tolist()] if kinds else [],
                )
            )
        return merged

    def _values(self, given: list[list[ValueColumn]]) -> dict[int, ValueColumn]:
        """The values of the batch by their leaf, from those of each part."""
        found: dict[int, list[tuple[int, ValueColumn]]] = {}
        for at, own in enumerate(given):
            for column in own:
                found.setdefault(column.leaf, []).append((at, column))
        merged = {}
        for leaf, columns in found.items():
            values = [value for _, column in columns for value in column.values]
            whole = len(columns) == len(self._parts) and all(column.rows is None for _, column in columns)
            if whole and self.order is None:
                merged[leaf] = ValueColumn(leaf, values)
                continue
            rows = np.concatenate([self._rows(at, column.rows) for at, column in columns])
            order = np.argsort(rows, kind="stable")
            values = [values[at] for at in order.tolist()]
            merged[leaf] = ValueColumn(leaf, values, None if whole else rows[order].tolist())
        return merged

    def _find_blocks(self) -> None:
        """Keep leaves that are in blocks of one type in all parts; blocks of other leaves become values."""
        found: dict[int, list[tuple[int, Part, Block]]] = {}
        for number, part, content in self._parts:
            for block in content.blocks:
                found.setdefault(block.leaf, []).append((number, part, block))
        for leaf, entries in found.items():
            kinds = [(own.shape[1:], own.dtype, own.tensor, own.torch_dtype, own.tv) for _, _, own in entries]
            if len(entries) == len(self._parts) and all(kind == kinds[0] for kind in kinds):
                self.blocks[leaf] = entries
            else:
                self._spread(leaf, entries)

    def _spread(self, leaf: int, entries: list[tuple[int, Part, Block]]) -> None:
        """Turn blocks of a leaf into values, added to the values that other parts have of it."""
        values = dict(self.values[leaf].items()) if leaf in self.values else {}
        at_of = {number: at for at, (number, _, _) in enumerate(self._parts)}
        for number, part, block in entries:
            assert part.data is not None
            for row, array in zip(self._rows(at_of[number], None).tolist(), block.array(part.data), strict=True):
                values[row] = block.value(array.copy() if array.ndim else array)
        rows = sorted(values)
        self.values[leaf] = ValueColumn(leaf, [values[row] for row in rows], None if len(rows) == len(self) else rows)


def _each(entries: list[Any], count: int) -> list[Any]:
    return entries * count if len(entries) == 1 else entries


@dataclass(slots=True)
class Finished:
    """The finished columns of a batch.

    Attributes:
        cells: of each row the leaves finished one by one, by number.
        whole: leaves finished for all rows at once: blocks; and masks of equal shapes as one tensor.
        placed: leaves that are on the device already, for all rows at once.
        images: for each of `Columns.images` the stage's result; with a `MultiView` a list of results.
        sizes_hw: for each of these, for each view, the sizes of the results, int64 (M, 2).
        drawn: the programs of the first of these, for each view.
        pairing: how they were mixed, if they were.
    """

    cells: list[dict[int, Any]]
    whole: dict[int, Any] = field(default_factory=dict)
    placed: dict[int, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    sizes_hw: list[list[np.ndarray]] = field(default_factory=list)
    drawn: Sequence[Draws] = ()
    pairing: Pairing | None = None

    @property
    def results(self) -> list[Any]:
        """All that may be on the device."""
        return [self.images, self.cells, self.whole, self.placed]
