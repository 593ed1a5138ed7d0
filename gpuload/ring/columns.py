"""The samples of a chunk, a batch or a whole data set as columns: plain values and where bytes lie. No torch here.

A *leaf* is known by its number, depth first in the tree of its sample, from `gpuload.datasets.tree.flatten` to the
batch. A column is one leaf over those rows that have it. Samples may differ in structure: their first images (or masks)
are one column even so, as they go through the stage together; it says which leaf each image is.

A worker makes the columns of a chunk, `gpuload.ring.packing` sends them, and the main process joins those of a batch
(`Columns.concat`) and picks rows (`Columns.take`): a sample that failed late is dropped, a substitute goes to its
place, a device cache gives any samples. Pixels and blocks stay in the memory that a worker wrote them to. Columns only
say where: their offsets count from the chunk's first byte and, once joined, from the first byte of a memory that holds
all chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gpuload.datasets.sample import Boxes, to_xyxy
from gpuload.datasets.tree import LEAF, Structure, places_of
from gpuload.errors import ErrorRecord, visible
from gpuload.order.place import IterablePlace
from gpuload.transforms.program.draws import concat_tables

__all__ = [
    "SEPARATOR",
    "Block",
    "Collated",
    "Column",
    "Columns",
    "EncodedImage",
    "ImageColumn",
    "TensorBits",
    "ValueColumn",
    "entry",
    "one_for_all",
]

SEPARATOR = "\0"  # of names in one string; no path has it
# Types of values that can be read wherever they came from.
SMALL = frozenset({int, float, bool, str, type(None), np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_})
Key = TypeVar("Key")
TVTensor = tuple[type, dict[str, Any]]  # torchvision's type of a tensor, and its attributes: the canvas of boxes, say
Rows = np.ndarray | None  # int64, ascending: which rows have a column. None means all


class Column:
    """Base of columns: an entry for each of the `rows` that have one."""

    __slots__ = ()
    rows: Rows

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def row_numbers(self) -> np.ndarray:
        """The rows that have an entry, int64 (M,)."""
        return np.arange(len(self)) if self.rows is None else self.rows

    def places_in(self, rows: np.ndarray) -> tuple[np.ndarray, Rows]:
        """Return the entries that some rows have, and which of these rows have one."""
        if self.rows is None:
            return rows, None
        entries = self.rows.searchsorted(rows)
        having = np.flatnonzero(self.rows.take(entries, mode="clip") == rows) if len(self.rows) else entries[:0]
        return entries[having], None if len(having) == len(rows) else having


@dataclass(slots=True)
class ImageColumn(Column):
    """The first (second, …) images of samples; or masks. Masks, and images that are not uint8, are sent as images whose
    channels are their bytes.

    Attributes:
        table: `gpuload.transforms.program.draws.IMAGE`, one row for each image.
        leaves: which leaf each image is, or one number for all.
        rows: which rows have an image.
        kinds: dtype and number of axes of each image, or once for all; None is an image of uint8, and so are all images
            if there are no kinds.
    """

    table: np.ndarray
    leaves: list[int]
    rows: Rows = None
    kinds: list[tuple[str, int] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def leaf(self) -> int | None:
        """The leaf that the images are, if all rows have one there, else None."""
        return self.leaves[0] if self.rows is None and len(self.leaves) == 1 else None

    @property
    def each_kind(self) -> list[Any]:
        """The kind of each image."""
        return _each(self.kinds, len(self))

    def places(self) -> Iterable[tuple[int, int]]:
        """Give the row and the leaf of each image."""
        return zip(self.row_numbers.tolist(), _each(self.leaves, len(self)), strict=True)

    def take(self, rows: np.ndarray) -> ImageColumn:
        """Return the column of some rows, in this order."""
        entries, having = self.places_in(rows)
        leaves, kinds = _pick(self.leaves, entries), _pick(self.kinds, entries)
        return ImageColumn(self.table.take(entries), leaves, having, kinds if any(kinds) else [])

    @classmethod
    def concat(cls, columns: Sequence[ImageColumn], rows: Rows, offsets: Sequence[int]) -> ImageColumn:
        """Join the columns of chunks to that of `rows`; `offsets` are as for `Columns.concat`."""
        counts = list(map(len, columns))
        table = concat_tables([column.table for column in columns])
        table["offset"] += np.repeat(offsets, counts)
        kinds = [column.kinds or [None] for column in columns]
        kinds = _join_entries(kinds, counts) if any(column.kinds for column in columns) else []
        return cls(table, _join_entries([column.leaves for column in columns], counts), rows, kinds)


class EncodedImage(NamedTuple):
    """An image that is in the slot as its file's bytes, for the device to decode. Its row of `ImageColumn.table` says
    what is wanted of it; the offset there is only known once it is decoded.

    Attributes:
        column, row: its `ImageColumn`, and its row in the table there.
        offset, nbytes: where in the slot its bytes are.
        orientation: as `gpuload.decode.Header` has it.
        grey: whether it is decoded to one channel, not three.
        source: where it came from, if the sample's first image came from elsewhere.
    """

    column: int
    row: int
    offset: int
    nbytes: int
    orientation: int
    grey: int
    source: str | None = None


@dataclass(slots=True)
class ValueColumn(Column):
    """A leaf that is not an image (boxes and keypoints too): its value in each of the `rows` that have it."""

    values: Sequence[Any]
    rows: Rows = None

    def __len__(self) -> int:
        return len(self.values)

    def items(self) -> Iterable[tuple[int, Any]]:
        """Give rows and their values."""
        return zip(self.row_numbers.tolist(), self.values, strict=True)

    def get(self, row: int) -> Any:
        """Return the value of a row, or None."""
        entries, _ = self.places_in(np.array([row]))
        return self.values[entries[0]] if len(entries) else None

    def take(self, rows: np.ndarray) -> ValueColumn:
        """Return the column of some rows, in this order."""
        entries, having = self.places_in(rows)
        return ValueColumn([self.values[entry] for entry in entries.tolist()], having)

    @classmethod
    def concat(cls, columns: Sequence[ValueColumn], rows: Rows, offsets: Sequence[int]) -> ValueColumn:
        """Join the columns of chunks to that of `rows`."""
        return cls([value for column in columns for value in column.values], rows)


@dataclass(slots=True)
class Block:
    """A leaf of all rows, stacked: what it is, and where.

    `shape` is of one row; `dtype` is numpy's name for the bits, `torch_dtype` torch's for a type that numpy lacks. `tv`
    is for tensors of torchvision's own types that come back as these. `pieces` are where stacked rows begin, and how
    many there are: one piece for each chunk.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[int, int]]
    tensor: bool = False
    torch_dtype: str = ""
    tv: TVTensor | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes its rows have."""
        return sum(count for _, count in self.pieces) * prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that blocks must share to be joined."""
        return self.shape, self.dtype, self.tensor, self.torch_dtype, self.tv

    def value(self, array: np.ndarray) -> Any:
        """Return one sample's value from its bits, in memory of their own."""
        return TensorBits(array, self.torch_dtype, self.tv) if self.tensor else array

    def array(self, memory: np.ndarray, piece: int = 0, base: int = 0) -> np.ndarray:
        """Return the bits of a piece, N×…, as a view of a memory that begins at byte `base`."""
        at, count = self.pieces[piece]
        return np.ndarray((count, *self.shape), self.dtype, memory, at - base)


@dataclass(slots=True)
class Columns:
    """Samples as columns.

    Attributes:
        rows: the request's rows that loaded, or any numbers once chunks are joined; columns count rows among these.
        structures: of each sample, or one for all.
        images, masks: the first images of all samples, the second ones …
        values: leaves that are not images, targets, or in a block; by leaf.
        points: boxes and keypoints, by leaf.
        blocks: leaves that are stacked, by leaf.
        fields: for each sample, or once for all, the leaves that are left out together with boxes, if a transform does
            that; those that go with keypoints as ~leaf. Empty if there are none.
        sources: where each sample came from, or one string with a `SEPARATOR` between two.
        errors: the request's rows that failed, and how.
        collated: the whole batch, if the user's collate_fn ran in the worker.
        iterable: the place in an iterable dataset.
        remark: what to tell the user of leaves that look as if they belonged to an image, or of boxes that are for an
            image of another size.
        encoded: the images that were not decoded, each as the numbers of `EncodedImage`; empty again once they are.
        encoded_bytes: how many of the slot's first bytes are their files.
        plan: the launches of the whole batch, see `gpuload.workers.planned`.
        windows: where images lie that are not in the slot, see `gpuload.workers.device_cache`; never sent.
        positions, indices: of a batch, each sample's position in the epoch, int64 (N,), and its key in the dataset.
    """

    rows: Sequence[int] = field(default_factory=list)
    structures: list[Structure] = field(default_factory=list)
    images: list[ImageColumn] = field(default_factory=list)
    values: dict[int, ValueColumn] = field(default_factory=dict)
    sources: Sequence[str | None] | str = field(default_factory=list)
    errors: list[tuple[int, ErrorRecord]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    masks: list[ImageColumn] = field(default_factory=list)
    points: dict[int, ValueColumn] = field(default_factory=dict)
    fields: list[tuple[int, ...]] = field(default_factory=list)
    collated: Collated | None = None
    iterable: IterablePlace | None = None
    remark: str = ""
    encoded: list[tuple[Any, ...]] = field(default_factory=list)
    encoded_bytes: int = 0
    plan: Any = None
    windows: np.ndarray | None = None
    positions: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))
    indices: Sequence[Any] | np.ndarray = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> Sequence[str | None]:
        """Where each sample came from; taken apart when somebody asks."""
        if isinstance(self.sources, str):
            self.sources = self.sources.split(SEPARATOR)
        return self.sources

    @property
    def has_targets(self) -> bool:
        return bool(self.masks or self.points)

    def structure(self, row: int) -> Structure:
        return entry(self.structures, row)

    def name(self, row: int, leaf: int | None = None) -> str:
        """Return the name of a batch's sample, or of a leaf of it, for error messages."""
        place = "sample" if leaf is None else places_of(self.structure(row))[leaf]
        where = "" if place == "sample" else f"{place} of "
        source = self.names[row]
        return f"{where}sample {visible(str(self.indices[row]))}" + (f" ({visible(source)})" if source else "")

    def boxes(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Return the boxes that the draws of rows depend on: left, top, right, bottom."""
        boxes: dict[int, Boxes] = {}  # a sample has one leaf of them: see `gpuload.workers.box_fields`
        for column in self.points.values():
            boxes |= {row: value for row, value in column.items() if isinstance(value, Boxes)}
        return [to_xyxy(boxes[row].array, boxes[row].format) for row in rows]

    def is_plain(self, rows: int) -> bool:
        """Return whether each of `rows` samples is one image of uint8 and small values of builtin types, all in the
        same places: as nearly always, and then nobody needs to know more of a chunk before its batch is put
        together."""
        odd = self.blocks or self.masks or self.points or self.fields or self.remark or self.encoded
        if odd or self.collated is not None or self.iterable is not None or len(self.rows) != rows:
            return False
        if len(self.images) != 1 or len(self.structures) != 1 or self.images[0].kinds:
            return False
        if self.images[0].leaf is None or not _is_builtin(self.structures[0]):
            return False
        return all(
            column.rows is None and SMALL.issuperset(map(type, column.values)) for column in self.values.values()
        )

    def take(self, rows: np.ndarray) -> Columns:
        """Return some rows, in this order; a row may come several times. Images must be decoded, and blocks values.

        Example:
            >>> columns = Columns([0, 1, 2], [LEAF], values={0: ValueColumn(["a", "b", "c"])})
            >>> columns.sources = [None, "b.jpg", None]
            >>> picked = columns.take(np.array([0, 2]))
            >>> picked.rows, picked.values[0].values, picked.sources
            ([0, 2], ['a', 'c'], [None, None])
        """
        assert not self.blocks
        names = self.names
        return replace(
            self,
            rows=[self.rows[row] for row in rows.tolist()],
            structures=_pick(self.structures, rows),
            images=[*_take(dict(enumerate(self.images)), rows).values()],
            values=_take(self.values, rows),
            sources=[names[row] for row in rows.tolist()],
            masks=[*_take(dict(enumerate(self.masks)), rows).values()],
            points=_take(self.points, rows),
            fields=_pick(self.fields, rows),
            encoded=[],
            positions=self.positions[rows] if len(self.positions) else self.positions,
            indices=[self.indices[row] for row in rows.tolist()] if len(self.indices) else (),
        )

    @classmethod
    def concat(cls, chunks: Sequence[Columns], offsets: Sequence[int]) -> Columns:
        """Join the samples of chunks, in order. `offsets` are where each chunk's first byte is in the joined memory;
        blocks of a leaf must be alike in all chunks, see `spread`."""
        counts = [len(chunk) for chunk in chunks]
        bases = [*accumulate(counts, initial=0)]
        sources = [chunk.sources for chunk in chunks]
        strings = bool(sources) and all(isinstance(names, str) for names in sources)
        fields = [chunk.fields or [()] for chunk in chunks]
        join = partial(_join, bases=bases, offsets=offsets)
        blocks: dict[int, Block] = {}
        for leaf, first in chunks[0].blocks.items() if chunks else ():
            pieces = [
                (start + at, n)
                for chunk, start in zip(chunks, offsets, strict=True)
                for at, n in chunk.blocks[leaf].pieces
            ]
            blocks[leaf] = replace(first, pieces=pieces)
        return cls(
            range(bases[-1]),
            _join_entries([chunk.structures for chunk in chunks], counts),
            [*join([dict(enumerate(chunk.images)) for chunk in chunks]).values()],
            join([chunk.values for chunk in chunks]),
            SEPARATOR.join(sources) if strings else [name for chunk in chunks for name in chunk.names],  # pyright: ignore
            blocks=blocks,
            masks=[*join([dict(enumerate(chunk.masks)) for chunk in chunks]).values()],
            points=join([chunk.points for chunk in chunks]),
            fields=_join_entries(fields, counts) if any(chunk.fields for chunk in chunks) else [],
            collated=chunks[0].collated if len(chunks) == 1 else None,
            remark=next(filter(None, (chunk.remark for chunk in chunks)), ""),
        )

    def spread(self, leaves: Iterable[int], memory: np.ndarray | None) -> None:
        """Turn a chunk's blocks of these leaves into values, in memory of their own."""
        for leaf in leaves:
            block = self.blocks.pop(leaf)
            assert memory is not None
            rows = block.array(memory)
            self.values[leaf] = ValueColumn([block.value(row.copy() if row.ndim else row) for row in rows])


def unlike_blocks(chunks: Sequence[Columns]) -> set[int]:
    """Return the leaves whose blocks are not alike in all chunks, and so cannot be joined."""
    unlike = set()
    for leaf in {leaf for chunk in chunks for leaf in chunk.blocks}:
        kinds = [chunk.blocks[leaf].kind if leaf in chunk.blocks else None for chunk in chunks]
        if any(kind != kinds[0] for kind in kinds):
            unlike.add(leaf)
    return unlike


def entry(entries: Sequence[Any], row: int) -> Any:
    """Return the entry of a row, of a list with one for each row, or one for all."""
    return entries[0 if len(entries) == 1 else row]


def one_for_all(entries: list[Any]) -> list[Any]:
    """Return one entry, if all are equal."""
    return entries[:1] if all(other == entries[0] for other in entries) else entries


def _each(entries: list[Any], count: int) -> list[Any]:
    return entries * count if len(entries) == 1 else entries


def _pick(entries: list[Any], rows: np.ndarray) -> list[Any]:
    return entries if len(entries) < 2 else one_for_all([entries[row] for row in rows.tolist()])


def _take(columns: Mapping[Key, Any], rows: np.ndarray) -> dict[Key, Any]:
    picked = {key: column.take(rows) for key, column in columns.items()}
    return {key: column for key, column in picked.items() if len(column)}  # of images only the last ones may be empty


def _join(chunks: Sequence[Mapping[Key, Any]], bases: Sequence[int], offsets: Sequence[int]) -> dict[Key, Any]:
    """Join the columns of chunks that have one key; `bases` are the first rows of the chunks."""
    joined = {}
    for key in dict.fromkeys(key for chunk in chunks for key in chunk):
        having = [number for number, chunk in enumerate(chunks) if key in chunk]
        columns = [chunks[number][key] for number in having]
        rows: Rows = None
        if len(columns) < len(chunks) or any(column.rows is not None for column in columns):
            rows = np.concatenate([chunks[number][key].row_numbers + bases[number] for number in having])
        joined[key] = type(columns[0]).concat(columns, rows, [offsets[number] for number in having])
    return joined


def _join_entries(lists: Sequence[list[Any]], counts: Sequence[int]) -> list[Any]:
    """Join lists that have one entry for each row, or one for all, to such a list."""
    if lists and all(len(entries) == 1 and entries == lists[0] for entries in lists):
        return lists[0]
    return [one for entries, count in zip(lists, counts, strict=True) for one in _each(entries, count)]


def _is_builtin(structure: Structure) -> bool:
    """Return whether a structure is of Python's own containers alone."""
    if structure == LEAF:
        return True
    _, cls, keys, children = structure
    return cls is None and {str, int}.issuperset(map(type, keys or ())) and all(map(_is_builtin, children))


@dataclass(slots=True)
class Collated:
    """A user's `collate_fn`'s result for a whole batch, or the `error` that it raised, its `traceback` and `kinds`."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(slots=True)
class TensorBits:
    """A tensor as an array, of the bits if numpy lacks its type; `tv` as of a `Block`."""

    array: np.ndarray
    dtype: str = ""
    tv: TVTensor | None = None

    def tensor(self) -> Any:
        """Return the tensor, over the same memory."""
        import torch

        tensor = torch.from_numpy(self.array)
        tensor = tensor.view(getattr(torch, self.dtype)) if self.dtype else tensor
        if self.tv is None:
            return tensor
        kind, attributes = self.tv
        subclassed = tensor.as_subclass(kind)
        vars(subclassed).update(attributes)
        return subclassed
