"""The samples of a chunk or a batch as columns: plain values, and the locations of bytes. This module does not import
torch.

A sample is a tree (nested dicts, lists and tuples), and a *leaf* is a value in it. Leaves are numbered depth-first by
`gpuload.datasets.tree.flatten`, and keep their numbers until the batch is built. A column holds the values of one leaf
for the rows that have it. Samples can differ in structure. Their first images (or masks) still form one column, because
they go through the stage together; the column records the leaf number of each image.

A worker builds the columns of a chunk and `gpuload.ring.packing` sends them. The main process joins the columns of a
batch (`Columns.concat`) and selects rows (`Columns.take`) to drop a sample that failed late, or to insert a substitute.
Pixels and blocks stay in the memory that a worker wrote them to, and columns only refer to it. Offsets count from the
chunk's first byte and, once columns are joined, from the first byte of the memory that holds all chunks.
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
from gpuload.datasets.tree import LEAF, Structure, key_paths_of
from gpuload.errors import ErrorRecord, visible
from gpuload.order.place import IterablePlace
from gpuload.transforms.program.draws import concat_tables

__all__ = [
    "SEPARATOR",
    "Block",
    "Collated",
    "Columns",
    "EncodedImage",
    "ImageColumn",
    "TensorBits",
    "ValueColumn",
    "entry",
    "merge_equal",
]

SEPARATOR = "\0"  # separates the sources in one string; no path contains it
# Types whose values any process can unpickle.
PLAIN_TYPES = frozenset(
    {int, float, bool, str, type(None), np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_}
)
Key = TypeVar("Key")
TVTensorSpec = tuple[type, dict[str, Any]]  # a torchvision tensor type and the tensor's attributes, such as canvas_size
Rows = np.ndarray | None  # int64, ascending: the rows that have an entry in a column. None means all rows


class Column:
    """Base class of columns, which have one entry for each row in `rows`."""

    __slots__ = ()
    rows: Rows

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def row_indices(self) -> np.ndarray:
        """The rows that have an entry, int64 (M,)."""
        return np.arange(len(self)) if self.rows is None else self.rows

    def find_entries(self, rows: np.ndarray) -> tuple[np.ndarray, Rows]:
        """Return the entry indices of `rows`, and the positions in `rows` that have an entry (None means all)."""
        if self.rows is None:
            return rows, None
        entries = self.rows.searchsorted(rows)
        positions = np.flatnonzero(self.rows.take(entries, mode="clip") == rows)
        return entries[positions], None if len(positions) == len(rows) else positions


@dataclass(slots=True)
class ImageColumn(Column):
    """The first (or second, …) image or mask of each sample. Masks, and images whose dtype is not uint8, are sent as
    uint8 images whose channels are their bytes.

    Attributes:
        table: one row of dtype `gpuload.transforms.program.draws.IMAGE` per image.
        leaves: the leaf number of each image, or one number for all images.
        rows: the rows that have an image.
        kinds: the dtype and number of axes of each image, or one entry for all images. The entry of a uint8 image is
            None; an empty list means that all images are uint8.
        draws: the `draws` of each image (see `gpuload.datasets.sample.Encoded`), or one number for all images.
    """

    table: np.ndarray
    leaves: list[int]
    rows: Rows = None
    kinds: list[tuple[str, int] | None] = field(default_factory=list)
    draws: list[int] = field(default_factory=lambda: [0])

    def __len__(self) -> int:
        return len(self.table)

    @property
    def leaf(self) -> int | None:
        """The leaf number shared by all images if every row has an image, else None."""
        return self.leaves[0] if self.rows is None and len(self.leaves) == 1 else None

    @property
    def kinds_per_image(self) -> list[Any]:
        """The kinds with one entry per image; empty if all images are uint8."""
        return _expand(self.kinds, len(self))

    def rows_and_leaves(self) -> Iterable[tuple[int, int]]:
        """Iterate over the row and the leaf number of each image."""
        return zip(self.row_indices.tolist(), _expand(self.leaves, len(self)), strict=True)

    def take(self, rows: np.ndarray) -> ImageColumn:
        """Return a column with only these rows, in this order."""
        entries, new_rows = self.find_entries(rows)
        leaves, kinds = _pick(self.leaves, entries), _pick(self.kinds, entries)
        draws = _pick(self.draws, entries)
        return ImageColumn(self.table.take(entries), leaves, new_rows, kinds if any(kinds) else [], draws)

    @classmethod
    def concat(cls, columns: Sequence[ImageColumn], rows: Rows, offsets: Sequence[int]) -> ImageColumn:
        """Join the columns of chunks into one column of `rows`; `offsets` are as for `Columns.concat`."""
        counts = list(map(len, columns))
        table = concat_tables([column.table for column in columns])
        table["offset"] += np.repeat(offsets, counts)
        kinds = [column.kinds or [None] for column in columns]
        kinds = _join_entries(kinds, counts) if any(column.kinds for column in columns) else []
        leaves, draws = (
            _join_entries(lists, counts)
            for lists in ([column.leaves for column in columns], [column.draws for column in columns])
        )
        return cls(table, leaves, rows, kinds, draws)


class EncodedImage(NamedTuple):
    """An encoded image in the slot, to be decoded by the device. Its row in `ImageColumn.table` holds the requested
    region and shape; the row's offset is set after decoding.

    Attributes:
        column, row: the index of the image's `ImageColumn`, and the image's row in that column's table.
        offset, nbytes: the location of the file's bytes in the slot.
        orientation: the EXIF orientation, as in `gpuload.decode.Header`.
        grey: 1 if the image is decoded to one channel instead of three, else 0.
        source: the image's source, if it differs from the source of the sample's first image.
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
    """The values of a leaf that is not an image (boxes and keypoints included), one per row in `rows`."""

    values: Sequence[Any]
    rows: Rows = None

    def __len__(self) -> int:
        return len(self.values)

    def items(self) -> Iterable[tuple[int, Any]]:
        """Iterate over the rows and their values."""
        return zip(self.row_indices.tolist(), self.values, strict=True)

    def get(self, row: int) -> Any:
        """Return the value of a row, or None if the row has no value."""
        entries, _ = self.find_entries(np.array([row]))
        return self.values[entries[0]] if len(entries) else None

    def take(self, rows: np.ndarray) -> ValueColumn:
        """Return a column with only these rows, in this order."""
        entries, new_rows = self.find_entries(rows)
        return ValueColumn([self.values[entry] for entry in entries.tolist()], new_rows)

    @classmethod
    def concat(cls, columns: Sequence[ValueColumn], rows: Rows, offsets: Sequence[int]) -> ValueColumn:
        """Join the columns of chunks into one column of `rows`."""
        return cls([value for column in columns for value in column.values], rows)

    def with_draws(self, draws: int) -> ValueColumn:
        """Return a column with only the boxes and keypoints that have these `draws`."""
        items = [(row, value) for row, value in self.items() if (value.draws or 0) == draws]
        rows = np.array([row for row, _ in items], np.int64)
        return self if len(rows) == len(self) else ValueColumn([value for _, value in items], rows)


@dataclass(slots=True)
class Block:
    """The type and location of a leaf whose values are stacked over all rows.

    Attributes:
        shape: the shape of one row.
        dtype: the name of the numpy dtype that holds the bits.
        pieces: for each chunk, the offset and the number of its stacked rows.
        tensor: whether the values are returned as tensors.
        torch_dtype: the name of the torch dtype, if numpy has no such dtype; otherwise empty.
        tv: the torchvision tensor type that the values are returned as; None for plain tensors.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[int, int]]
    tensor: bool = False
    torch_dtype: str = ""
    tv: TVTensorSpec | None = None

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(count for _, count in self.pieces) * prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def merge_key(self) -> tuple[Any, ...]:
        """The properties that must be equal for blocks to be joined."""
        return self.shape, self.dtype, self.tensor, self.torch_dtype, self.tv

    def value(self, array: np.ndarray) -> Any:
        """Return one sample's value from `array`, a separate copy of its bits."""
        return TensorBits(array, self.torch_dtype, self.tv) if self.tensor else array

    def array(self, memory: np.ndarray, piece: int = 0, base: int = 0) -> np.ndarray:
        """Return the bits of a piece, N×…, as a view of `memory`, which starts at the offset `base`."""
        offset, count = self.pieces[piece]
        return np.ndarray((count, *self.shape), self.dtype, memory, offset - base)


@dataclass(slots=True)
class Columns:
    """The samples of a chunk or a batch as columns.

    Attributes:
        rows: the rows of the request that were loaded successfully, or arbitrary integers once chunks are joined. Row
            numbers in columns are indices into this sequence.
        structures: the structure of each sample, or one structure for all samples.
        images, masks: one column for the first image (or mask) of all samples, one for the second, and so on.
        values: the columns of leaves that are not images, targets or blocks, keyed by leaf.
        points: the columns of boxes and keypoints, keyed by leaf.
        blocks: the stacked leaves, keyed by leaf.
        fields: one dict per sample, or one dict for all samples, of tuples of leaf numbers keyed by `draws`. When boxes
            with these draws are dropped, the same entries of these leaves are dropped. A number stored as ~leaf is a
            leaf that follows keypoints instead. The list is empty if no sample has such leaves.
        sources: the source of each sample, or one string that joins the sources with `SEPARATOR`.
        errors: the rows of the request that failed, each with its error.
        collated: the collated batch, if the user's collate_fn ran in the worker.
        iterable: the progress in an iterable dataset.
        warning: a message to the user about leaves that appear to belong to an image, or about boxes made for an image
            of another size.
        encoded: the images that are not decoded yet, as tuples of the fields of `EncodedImage`; empty after decoding.
        encoded_bytes: the number of bytes at the start of the slot that hold encoded files.
        plan: the launches of the entire batch, see `gpuload.workers.planned`.
        positions, indices: for a batch, the samples' positions in the epoch, int64 (N,), and their keys in the dataset.
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
    fields: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    collated: Collated | None = None
    iterable: IterablePlace | None = None
    warning: str = ""
    encoded: list[tuple[Any, ...]] = field(default_factory=list)
    encoded_bytes: int = 0
    plan: Any = None
    positions: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))
    indices: Sequence[Any] | np.ndarray = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def source_list(self) -> Sequence[str | None]:
        """The `sources` as a sequence with one source per sample; a joined string is split on first use."""
        if isinstance(self.sources, str):
            self.sources = self.sources.split(SEPARATOR)
        return self.sources

    @property
    def has_targets(self) -> bool:
        return bool(self.masks or self.points)

    @property
    def draws(self) -> list[int]:
        """The different `draws` of the batch's images, in the order of the images."""
        return list(dict.fromkeys(number for images in self.images for number in images.draws))

    def with_draws(self, draws: int) -> Columns:
        """Return the columns with only the images and targets with these `draws`; other leaves are not selected."""
        if self.draws == [draws]:
            return self
        images = [column for column in self.images if column.draws == [draws]]
        masks = [column for column in self.masks if column.draws == [draws]]
        points = {leaf: column.with_draws(draws) for leaf, column in self.points.items()}
        points = {leaf: column for leaf, column in points.items() if len(column)}
        return replace(self, images=images, masks=masks, points=points)

    def fields_of(self, row: int) -> tuple[int, ...]:
        """Return the `fields` of a sample for the `draws` of its first image."""
        return entry(self.fields, row).get(self.images[0].draws[0], ()) if self.fields else ()

    def structure(self, row: int) -> Structure:
        return entry(self.structures, row)

    def name(self, row: int, leaf: int | None = None) -> str:
        """Return the name of a sample in a batch, or of one of its leaves, for error messages."""
        key_path = "sample" if leaf is None else key_paths_of(self.structure(row))[leaf]
        prefix = "" if key_path == "sample" else f"{key_path} of "
        source = self.source_list[row]
        return f"{prefix}sample {visible(str(self.indices[row]))}" + (f" ({visible(source)})" if source else "")

    def boxes(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Return the boxes (left, top, right, bottom) that the random parameters of these samples depend on. The images
        of the columns must have the same `draws`."""
        boxes: dict[int, Boxes] = {}  # images with the same draws have one leaf of boxes, see `workers.box_fields`
        for column in self.points.values():
            boxes |= {row: value for row, value in column.items() if isinstance(value, Boxes)}
        return [to_xyxy(boxes[row].array, boxes[row].format) for row in rows]

    def is_plain(self, count: int) -> bool:
        """Return whether there are `count` samples of one structure, each consisting of one uint8 image and values of
        `PLAIN_TYPES`. Nearly all chunks are like this and need no further inspection until their batch is assembled."""
        is_special = self.blocks or self.masks or self.points or self.fields or self.warning or self.encoded
        if is_special or self.collated is not None or self.iterable is not None or len(self.rows) != count:
            return False
        if len(self.images) != 1 or len(self.structures) != 1 or self.images[0].kinds or self.draws != [0]:
            return False
        if self.images[0].leaf is None or not _is_builtin(self.structures[0]):
            return False
        return all(
            column.rows is None and PLAIN_TYPES.issuperset(map(type, column.values)) for column in self.values.values()
        )

    def take(self, rows: np.ndarray) -> Columns:
        """Return the samples at `rows`, in this order; rows can repeat. Images must have been decoded, and blocks
        turned into values.

        Example:
            >>> columns = Columns([0, 1, 2], [LEAF], values={0: ValueColumn(["a", "b", "c"])})
            >>> columns.sources = [None, "b.jpg", None]
            >>> picked = columns.take(np.array([0, 2]))
            >>> picked.rows, picked.values[0].values, picked.sources
            ([0, 2], ['a', 'c'], [None, None])
        """
        assert not self.blocks
        sources = self.source_list
        return replace(
            self,
            rows=[self.rows[row] for row in rows.tolist()],
            structures=_pick(self.structures, rows),
            images=[*_take(dict(enumerate(self.images)), rows).values()],
            values=_take(self.values, rows),
            sources=[sources[row] for row in rows.tolist()],
            masks=[*_take(dict(enumerate(self.masks)), rows).values()],
            points=_take(self.points, rows),
            fields=_pick(self.fields, rows),
            encoded=[],
            positions=self.positions[rows] if len(self.positions) else self.positions,
            indices=[self.indices[row] for row in rows.tolist()] if len(self.indices) else (),
        )

    @classmethod
    def concat(cls, chunks: Sequence[Columns], offsets: Sequence[int]) -> Columns:
        """Join the samples of chunks, in order. `offsets` holds the position of each chunk's first byte in the joined
        memory. A leaf's blocks must have the same `merge_key` in all chunks; blocks that differ must be unstacked first
        (`unstack`)."""
        counts = [len(chunk) for chunk in chunks]
        bases = [*accumulate(counts, initial=0)]
        sources = [chunk.sources for chunk in chunks]
        all_joined = bool(sources) and all(isinstance(names, str) for names in sources)
        fields = [chunk.fields or [{}] for chunk in chunks]
        join = partial(_join, bases=bases, offsets=offsets)
        blocks: dict[int, Block] = {}
        for leaf, first_block in chunks[0].blocks.items() if chunks else ():
            pieces = [
                (chunk_offset + offset, n)
                for chunk, chunk_offset in zip(chunks, offsets, strict=True)
                for offset, n in chunk.blocks[leaf].pieces
            ]
            blocks[leaf] = replace(first_block, pieces=pieces)
        return cls(
            range(bases[-1]),
            _join_entries([chunk.structures for chunk in chunks], counts),
            [*join([dict(enumerate(chunk.images)) for chunk in chunks]).values()],
            join([chunk.values for chunk in chunks]),
            SEPARATOR.join(sources) if all_joined else [name for chunk in chunks for name in chunk.source_list],  # pyright: ignore
            blocks=blocks,
            masks=[*join([dict(enumerate(chunk.masks)) for chunk in chunks]).values()],
            points=join([chunk.points for chunk in chunks]),
            fields=_join_entries(fields, counts) if any(chunk.fields for chunk in chunks) else [],
            collated=chunks[0].collated if len(chunks) == 1 else None,
            warning=next(filter(None, (chunk.warning for chunk in chunks)), ""),
        )

    def unstack(self, leaves: Iterable[int], memory: np.ndarray | None) -> None:
        """Turn a chunk's blocks of these leaves into values, each a separate copy."""
        for leaf in leaves:
            block = self.blocks.pop(leaf)
            assert memory is not None
            rows = block.array(memory)
            self.values[leaf] = ValueColumn([block.value(row.copy() if row.ndim else row) for row in rows])


def leaves_with_mismatched_blocks(chunks: Sequence[Columns]) -> set[int]:
    """Return the leaves whose blocks cannot be joined because their `merge_key` differs between chunks."""
    mismatched_leaves = set()
    for leaf in {leaf for chunk in chunks for leaf in chunk.blocks}:
        merge_keys = [chunk.blocks[leaf].merge_key if leaf in chunk.blocks else None for chunk in chunks]
        if any(merge_key != merge_keys[0] for merge_key in merge_keys):
            mismatched_leaves.add(leaf)
    return mismatched_leaves


def entry(entries: Sequence[Any], row: int) -> Any:
    """Return a row's entry in a list with either one entry per row or one entry for all rows."""
    return entries[0 if len(entries) == 1 else row]


def merge_equal(entries: list[Any]) -> list[Any]:
    """Reduce a list of equal entries to one entry; return other lists unchanged."""
    return entries[:1] if all(item == entries[0] for item in entries) else entries


def _expand(entries: list[Any], count: int) -> list[Any]:
    return entries * count if len(entries) == 1 else entries


def _pick(entries: list[Any], rows: np.ndarray) -> list[Any]:
    return entries if len(entries) < 2 else merge_equal([entries[row] for row in rows.tolist()])


def _take(columns: Mapping[Key, Any], rows: np.ndarray) -> dict[Key, Any]:
    picked = {key: column.take(rows) for key, column in columns.items()}
    return {key: column for key, column in picked.items() if len(column)}  # only the last image columns can be empty


def _join(chunks: Sequence[Mapping[Key, Any]], bases: Sequence[int], offsets: Sequence[int]) -> dict[Key, Any]:
    """Join the columns that have the same key in different chunks; `bases` are the first rows of the chunks."""
    joined = {}
    for key in dict.fromkeys(key for chunk in chunks for key in chunk):
        chunk_indices = [i for i, chunk in enumerate(chunks) if key in chunk]
        columns = [chunks[i][key] for i in chunk_indices]
        rows: Rows = None
        if len(columns) < len(chunks) or any(column.rows is not None for column in columns):
            rows = np.concatenate([chunks[i][key].row_indices + bases[i] for i in chunk_indices])
        joined[key] = type(columns[0]).concat(columns, rows, [offsets[i] for i in chunk_indices])
    return joined


def _join_entries(lists: Sequence[list[Any]], counts: Sequence[int]) -> list[Any]:
    """Join lists with either one entry per row or one entry for all rows into one such list."""
    if lists and all(len(entries) == 1 and entries == lists[0] for entries in lists):
        return lists[0]
    return [item for entries, count in zip(lists, counts, strict=True) for item in _expand(entries, count)]


def _is_builtin(structure: Structure) -> bool:
    """Return whether a structure consists only of Python's builtin containers."""
    if structure == LEAF:
        return True
    _, cls, keys, children = structure
    return cls is None and {str, int}.issuperset(map(type, keys or ())) and all(map(_is_builtin, children))


@dataclass(slots=True)
class Collated:
    """The result of the user's `collate_fn` for a batch; or, if it raised an error, the error's message, its
    `traceback`, and the names of its class and base classes (`error_classes`)."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    error_classes: tuple[str, ...] = ()


@dataclass(slots=True)
class TensorBits:
    """A tensor as an array, which holds the bits if numpy lacks the dtype; `dtype` is then the name of the torch dtype.
    `tv` is as in `Block`."""

    array: np.ndarray
    dtype: str = ""
    tv: TVTensorSpec | None = None

    def tensor(self) -> Any:
        """Return the tensor, which shares the array's memory."""
        import torch

        tensor = torch.from_numpy(self.array)
        tensor = tensor.view(getattr(torch, self.dtype)) if self.dtype else tensor
        if self.tv is None:
            return tensor
        tensor_type, attributes = self.tv
        tv_tensor = tensor.as_subclass(tensor_type)
        vars(tv_tensor).update(attributes)
        return tv_tensor
