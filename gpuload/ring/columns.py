"""The samples of a chunk, a batch or an entire dataset as columns: plain values, and the locations of bytes. Imports
no torch.

A *leaf* is identified by its depth-first number in the tree of its sample, from `gpuload.datasets.tree.flatten` to the
batch. A column holds one leaf for the rows that have it. Samples can differ in structure. Their first images (or masks)
still form one column, because they go through the stage together; the column records which leaf each image is.

A worker builds the columns of a chunk and `gpuload.ring.packing` sends them. The main process joins the columns of a
batch (`Columns.concat`) and selects rows (`Columns.take`) to drop a sample that failed late, to insert a substitute, or
to read arbitrary samples from a device cache. Pixels and blocks stay in the memory that a worker wrote them to, and
columns only refer to it. Offsets count from the chunk's first byte and, once columns are joined, from the first byte of
a memory that holds all chunks.
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

SEPARATOR = "\0"  # separates names in one string; no path contains it
# Types whose values can be read in any process.
SMALL = frozenset({int, float, bool, str, type(None), np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_})
Key = TypeVar("Key")
TVTensor = tuple[type, dict[str, Any]]  # a torchvision tensor type and the tensor's attributes, such as canvas_size
Rows = np.ndarray | None  # int64, ascending: the rows that have an entry in a column. None means all rows


class Column:
    """Base class of columns, which have one entry for each row in `rows`."""

    __slots__ = ()
    rows: Rows

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def row_numbers(self) -> np.ndarray:
        """The rows that have an entry, int64 (M,)."""
        return np.arange(len(self)) if self.rows is None else self.rows

    def places_in(self, rows: np.ndarray) -> tuple[np.ndarray, Rows]:
        """Return the entries of the given rows, and the positions in `rows` that have an entry (None means all)."""
        if self.rows is None:
            return rows, None
        entries = self.rows.searchsorted(rows)
        positions = np.flatnonzero(self.rows.take(entries, mode="clip") == rows) if len(self.rows) else entries[:0]
        return entries[positions], None if len(positions) == len(rows) else positions


@dataclass(slots=True)
class ImageColumn(Column):
    """The first (second, …) images or masks of samples. Masks and images of types other than uint8 are sent as images
    whose channels are their bytes.

    Attributes:
        table: one row of `gpuload.transforms.program.draws.IMAGE` for each image.
        leaves: the leaf number of each image, or one number for all images.
        rows: the rows that have an image.
        kinds: the dtype and number of axes of each image, or one entry for all images. None means a uint8 image; an
            empty list means that all images are uint8.
    """

    table: np.ndarray
    leaves: list[int]
    rows: Rows = None
    kinds: list[tuple[str, int] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def leaf(self) -> int | None:
        """The leaf number shared by all images if every row has an image, else None."""
        return self.leaves[0] if self.rows is None and len(self.leaves) == 1 else None

    @property
    def each_kind(self) -> list[Any]:
        """The kind of each image."""
        return _each(self.kinds, len(self))

    def places(self) -> Iterable[tuple[int, int]]:
        """Iterate over the row and the leaf number of each image."""
        return zip(self.row_numbers.tolist(), _each(self.leaves, len(self)), strict=True)

    def take(self, rows: np.ndarray) -> ImageColumn:
        """Return the column of some rows, in this order."""
        entries, new_rows = self.places_in(rows)
        leaves, kinds = _pick(self.leaves, entries), _pick(self.kinds, entries)
        return ImageColumn(self.table.take(entries), leaves, new_rows, kinds if any(kinds) else [])

    @classmethod
    def concat(cls, columns: Sequence[ImageColumn], rows: Rows, offsets: Sequence[int]) -> ImageColumn:
        """Join the columns of chunks into one column of `rows`; `offsets` are as for `Columns.concat`."""
        counts = list(map(len, columns))
        table = concat_tables([column.table for column in columns])
        table["offset"] += np.repeat(offsets, counts)
        kinds = [column.kinds or [None] for column in columns]
        kinds = _join_entries(kinds, counts) if any(column.kinds for column in columns) else []
        return cls(table, _join_entries([column.leaves for column in columns], counts), rows, kinds)


class EncodedImage(NamedTuple):
    """An encoded image in the slot, to be decoded by the device. Its row in `ImageColumn.table` holds the requested
    region and shape; the offset there is known only after decoding.

    Attributes:
        column, row: the number of its `ImageColumn`, and its row in that column's table.
        offset, nbytes: the location of its bytes in the slot.
        orientation: the EXIF orientation, as in `gpuload.decode.Header`.
        grey: 1 if it is decoded to one channel instead of three, else 0.
        source: its source, if that differs from the source of the sample's first image.
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
    """A leaf that is not an image, including boxes and keypoints: its value in each row in `rows`."""

    values: Sequence[Any]
    rows: Rows = None

    def __len__(self) -> int:
        return len(self.values)

    def items(self) -> Iterable[tuple[int, Any]]:
        """Iterate over the rows and their values."""
        return zip(self.row_numbers.tolist(), self.values, strict=True)

    def get(self, row: int) -> Any:
        """Return the value of a row, or None if the row has no value."""
        entries, _ = self.places_in(np.array([row]))
        return self.values[entries[0]] if len(entries) else None

    def take(self, rows: np.ndarray) -> ValueColumn:
        """Return the column of some rows, in this order."""
        entries, new_rows = self.places_in(rows)
        return ValueColumn([self.values[entry] for entry in entries.tolist()], new_rows)

    @classmethod
    def concat(cls, columns: Sequence[ValueColumn], rows: Rows, offsets: Sequence[int]) -> ValueColumn:
        """Join the columns of chunks into one column of `rows`."""
        return cls([value for column in columns for value in column.values], rows)


@dataclass(slots=True)
class Block:
    """A leaf stacked over all rows: its type and its location.

    Attributes:
        shape: the shape of one row.
        dtype: numpy's name of the type that holds the bits.
        pieces: for each chunk, the offset of its stacked rows and their number.
        tensor: whether the values are returned as tensors.
        torch_dtype: torch's name of the type, if numpy lacks it.
        tv: torchvision's tensor type, if the values are returned in it.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[int, int]]
    tensor: bool = False
    torch_dtype: str = ""
    tv: TVTensor | None = None

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(count for _, count in self.pieces) * prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that must be equal for blocks to be joined."""
        return self.shape, self.dtype, self.tensor, self.torch_dtype, self.tv

    def value(self, array: np.ndarray) -> Any:
        """Return one sample's value; `array` holds its bits in separate memory."""
        return TensorBits(array, self.torch_dtype, self.tv) if self.tensor else array

    def array(self, memory: np.ndarray, piece: int = 0, base: int = 0) -> np.ndarray:
        """Return the bits of a piece, N×…, as a view of `memory`, whose first byte has the offset `base`."""
        offset, count = self.pieces[piece]
        return np.ndarray((count, *self.shape), self.dtype, memory, offset - base)


@dataclass(slots=True)
class Columns:
    """Samples as columns.

    Attributes:
        rows: the rows of the request that loaded, or arbitrary numbers once chunks are joined. The row numbers in
            columns are indices into this sequence.
        structures: the structure of each sample, or one structure for all samples.
        images, masks: one column for the first image of all samples, one for the second image, and so on.
        values: the columns of leaves that are not images, targets or blocks, keyed by leaf.
        points: the columns of boxes and keypoints, keyed by leaf.
        blocks: the stacked leaves, keyed by leaf.
        fields: for each sample, or once for all, the leaves whose entries are dropped together with boxes, and as ~leaf
            the leaves whose entries are dropped together with keypoints. Empty if there are none.
        sources: the source of each sample, or one string that joins the sources with `SEPARATOR`.
        errors: the rows of the request that failed, with their errors.
        collated: the collated batch, if the user's collate_fn ran in the worker.
        iterable: the position in an iterable dataset.
        remark: a message to the user about leaves that appear to belong to an image, or about boxes made for an image
            of another size.
        encoded: the images that are not decoded yet, as tuples of the fields of `EncodedImage`; empty after decoding.
        encoded_bytes: the number of bytes at the start of the slot that hold encoded files.
        plan: the launches of the entire batch, see `gpuload.workers.planned`.
        windows: the locations of images outside the slot, see `gpuload.workers.device_cache`; never sent.
        positions, indices: for a batch, each sample's position in the epoch, int64 (N,), and its key in the dataset.
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
        """The source of each sample; a joined string is split on first use."""
        if isinstance(self.sources, str):
            self.sources = self.sources.split(SEPARATOR)
        return self.sources

    @property
    def has_targets(self) -> bool:
        return bool(self.masks or self.points)

    def structure(self, row: int) -> Structure:
        return entry(self.structures, row)

    def name(self, row: int, leaf: int | None = None) -> str:
        """Return the name of a sample in a batch, or of one of its leaves, for error messages."""
        place = "sample" if leaf is None else places_of(self.structure(row))[leaf]
        where = "" if place == "sample" else f"{place} of "
        source = self.names[row]
        return f"{where}sample {visible(str(self.indices[row]))}" + (f" ({visible(source)})" if source else "")

    def boxes(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Return the boxes (left, top, right, bottom) that the random draws of these rows depend on."""
        boxes: dict[int, Boxes] = {}  # a sample has at most one leaf of boxes: see `gpuload.workers.box_fields`
        for column in self.points.values():
            boxes |= {row: value for row, value in column.items() if isinstance(value, Boxes)}
        return [to_xyxy(boxes[row].array, boxes[row].format) for row in rows]

    def is_plain(self, rows: int) -> bool:
        """Return whether there are `rows` samples of one structure, each one uint8 image and small values of builtin
        types. Nearly all chunks are like this and need no further inspection until their batch is assembled."""
        is_special = self.blocks or self.masks or self.points or self.fields or self.remark or self.encoded
        if is_special or self.collated is not None or self.iterable is not None or len(self.rows) != rows:
            return False
        if len(self.images) != 1 or len(self.structures) != 1 or self.images[0].kinds:
            return False
        if self.images[0].leaf is None or not _is_builtin(self.structures[0]):
            return False
        return all(
            column.rows is None and SMALL.issuperset(map(type, column.values)) for column in self.values.values()
        )

    def take(self, rows: np.ndarray) -> Columns:
        """Return the samples in these rows, in this order; rows can repeat. Images must have been decoded, and blocks
        turned into values.

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
        """Join the samples of chunks, in order. `offsets` are the positions of each chunk's first byte in the joined
        memory. A leaf's blocks must have the same `kind` in all chunks; see `spread`."""
        counts = [len(chunk) for chunk in chunks]
        bases = [*accumulate(counts, initial=0)]
        sources = [chunk.sources for chunk in chunks]
        all_str = bool(sources) and all(isinstance(names, str) for names in sources)
        fields = [chunk.fields or [()] for chunk in chunks]
        join = partial(_join, bases=bases, offsets=offsets)
        blocks: dict[int, Block] = {}
        for leaf, first in chunks[0].blocks.items() if chunks else ():
            pieces = [
                (start + offset, n)
                for chunk, start in zip(chunks, offsets, strict=True)
                for offset, n in chunk.blocks[leaf].pieces
            ]
            blocks[leaf] = replace(first, pieces=pieces)
        return cls(
            range(bases[-1]),
            _join_entries([chunk.structures for chunk in chunks], counts),
            [*join([dict(enumerate(chunk.images)) for chunk in chunks]).values()],
            join([chunk.values for chunk in chunks]),
            SEPARATOR.join(sources) if all_str else [name for chunk in chunks for name in chunk.names],  # pyright: ignore
            blocks=blocks,
            masks=[*join([dict(enumerate(chunk.masks)) for chunk in chunks]).values()],
            points=join([chunk.points for chunk in chunks]),
            fields=_join_entries(fields, counts) if any(chunk.fields for chunk in chunks) else [],
            collated=chunks[0].collated if len(chunks) == 1 else None,
            remark=next(filter(None, (chunk.remark for chunk in chunks)), ""),
        )

    def spread(self, leaves: Iterable[int], memory: np.ndarray | None) -> None:
        """Turn a chunk's blocks of these leaves into values, each copied to its own memory."""
        for leaf in leaves:
            block = self.blocks.pop(leaf)
            assert memory is not None
            rows = block.array(memory)
            self.values[leaf] = ValueColumn([block.value(row.copy() if row.ndim else row) for row in rows])


def unlike_blocks(chunks: Sequence[Columns]) -> set[int]:
    """Return the leaves whose blocks cannot be joined because their `kind` differs between chunks."""
    unlike_leaves = set()
    for leaf in {leaf for chunk in chunks for leaf in chunk.blocks}:
        kinds = [chunk.blocks[leaf].kind if leaf in chunk.blocks else None for chunk in chunks]
        if any(kind != kinds[0] for kind in kinds):
            unlike_leaves.add(leaf)
    return unlike_leaves


def entry(entries: Sequence[Any], row: int) -> Any:
    """Return a row's entry in a list that has one entry for each row, or one entry for all rows."""
    return entries[0 if len(entries) == 1 else row]


def one_for_all(entries: list[Any]) -> list[Any]:
    """Reduce a list of equal entries to one entry; return other lists unchanged."""
    return entries[:1] if all(item == entries[0] for item in entries) else entries


def _each(entries: list[Any], count: int) -> list[Any]:
    return entries * count if len(entries) == 1 else entries


def _pick(entries: list[Any], rows: np.ndarray) -> list[Any]:
    return entries if len(entries) < 2 else one_for_all([entries[row] for row in rows.tolist()])


def _take(columns: Mapping[Key, Any], rows: np.ndarray) -> dict[Key, Any]:
    picked = {key: column.take(rows) for key, column in columns.items()}
    return {key: column for key, column in picked.items() if len(column)}  # only the last image columns can be empty


def _join(chunks: Sequence[Mapping[Key, Any]], bases: Sequence[int], offsets: Sequence[int]) -> dict[Key, Any]:
    """Join the columns that have the same key in different chunks; `bases` are the first rows of the chunks."""
    joined = {}
    for key in dict.fromkeys(key for chunk in chunks for key in chunk):
        chunk_numbers = [number for number, chunk in enumerate(chunks) if key in chunk]
        columns = [chunks[number][key] for number in chunk_numbers]
        rows: Rows = None
        if len(columns) < len(chunks) or any(column.rows is not None for column in columns):
            rows = np.concatenate([chunks[number][key].row_numbers + bases[number] for number in chunk_numbers])
        joined[key] = type(columns[0]).concat(columns, rows, [offsets[number] for number in chunk_numbers])
    return joined


def _join_entries(lists: Sequence[list[Any]], counts: Sequence[int]) -> list[Any]:
    """Join lists that have one entry for each row, or one entry for all rows, into a list of the same form."""
    if lists and all(len(entries) == 1 and entries == lists[0] for entries in lists):
        return lists[0]
    return [item for entries, count in zip(lists, counts, strict=True) for item in _each(entries, count)]


def _is_builtin(structure: Structure) -> bool:
    """Return whether a structure consists only of Python's builtin containers."""
    if structure == LEAF:
        return True
    _, cls, keys, children = structure
    return cls is None and {str, int}.issuperset(map(type, keys or ())) and all(map(_is_builtin, children))


@dataclass(slots=True)
class Collated:
    """The result of the user's `collate_fn` for a batch; or the `error` it raised, its `traceback` and its classes."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(slots=True)
class TensorBits:
    """A tensor as an array, which holds the bits if numpy lacks the type; `tv` is as in `Block`."""

    array: np.ndarray
    dtype: str = ""
    tv: TVTensor | None = None

    def tensor(self) -> Any:
        """Return the tensor, which shares the array's memory."""
        import torch

        tensor = torch.from_numpy(self.array)
        tensor = tensor.view(getattr(torch, self.dtype)) if self.dtype else tensor
        if self.tv is None:
            return tensor
        kind, attributes = self.tv
        tv_tensor = tensor.as_subclass(kind)
        vars(tv_tensor).update(attributes)
        return tv_tensor
