"""The results of a chunk, as columns: plain values that a worker makes and the main process reads. No torch here.

A *leaf* is known by its number, depth first in the tree of its sample, from `gpuload.datasets.tree.flatten` to the
batch. A column is one leaf over the rows of a chunk that have it. Samples of one chunk may differ in structure: their
first images (or masks) are one column even so, as they go through the stage together; it says which leaf each is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpuload.datasets.tree import LEAF, Structure
from gpuload.errors import ErrorRecord
from gpuload.order.place import IterablePlace

__all__ = ["SEPARATOR", "Block", "ChunkContent", "Collated", "Encoded", "ImageColumn", "TensorBits", "ValueColumn"]

SEPARATOR = "\0"  # of names in one string; no path has it
# Types of values that can be read wherever they came from.
SMALL = frozenset({int, float, bool, str, type(None), np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_})
Rows = list[int] | None  # which rows of a chunk have a column; None: all


@dataclass(slots=True)
class ImageColumn:
    """The first (second, …) images of a chunk's samples; or masks. Masks, and images that are not uint8, are sent as
    images whose channels are their bytes.

    Attributes:
        table: int64 (rows that have one, 10): the offset of its first byte in the slot; height, width and channels as
            they are in the slot; height and width of the whole image; top, left, height and width of the decoded region
            in it. A region of another height or width than what is in the slot was resized, as the first resize of the
            transforms says (`Program.of_decoded`).
        leaves: which leaf it is in each row, or one number for all.
        rows: which rows have one.
        kinds: dtype and number of axes, in each row or once for all; None is an image of uint8, and so are all of them
            if there are no kinds.
    """

    table: np.ndarray
    leaves: list[int]
    rows: Rows = None
    kinds: list[tuple[str, int] | None] = field(default_factory=list)

    @property
    def offsets(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def shapes(self) -> np.ndarray:
        return self.table[:, 1:4]


class Encoded(NamedTuple):
    """An image that is in the slot as its file's bytes, for the device to decode. Its row of `ImageColumn.table` says
    what is wanted of it; the offset there is only known once it is decoded.

    Attributes:
        column, row: of its `ImageColumn`, and in that one's table.
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
class ValueColumn:
    """A leaf that is no image (boxes and keypoints too): its value in each of the `rows` that have it."""

    leaf: int
    values: list[Any]
    rows: Rows = None

    def items(self) -> Iterable[tuple[int, Any]]:
        """Rows and their values."""
        return enumerate(self.values) if self.rows is None else zip(self.rows, self.values, strict=True)

    def get(self, row: int) -> Any:
        """The value of a row, or None."""
        if self.rows is None:
            return self.values[row]
        return self.values[self.rows.index(row)] if row in self.rows else None


@dataclass(slots=True)
class Block:
    """A leaf of all samples of a chunk, stacked: where it is in the slot, and what it is.

    `shape` includes the samples' axis; `dtype` is numpy's name for the bits, `torch_dtype` torch's for a type that
    numpy lacks.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    tensor: bool
    torch_dtype: str = ""

    def array(self, data: np.ndarray) -> np.ndarray:
        """The bits, as a view of the chunk's bytes."""
        kind = np.dtype(self.dtype)
        nbytes = kind.itemsize * int(np.prod(self.shape, dtype=np.int64))
        return data[self.offset : self.offset + nbytes].view(kind).reshape(self.shape)


@dataclass(slots=True)
class ChunkContent:
    """The results of a chunk.

    `rows` are the request's rows that loaded; columns count their rows among these. `sources` has one entry for each of
    them, or is one string with a `SEPARATOR` between two; `structures` and `fields` have one for each, or one for all.
    `values` are leaves that are no images, no targets, and in no block; `points` are boxes and keypoints; `fields` are
    the leaves that are left out together with boxes, if a transform does that; those that go with keypoints as ~leaf.
    `strays` is what to tell the user of leaves that look as if they belonged to an image, or of boxes that are for an
    image of another size. `windows` is where images lie
    that are not in the slot, see `gpuload.workers.kept`. `encoded` are the images that were not decoded, each as the
    numbers of `Encoded`; their files fill the slot's first `encoded_bytes`. `made` tells of the plan of the batch that
    these are all chunks of, see `gpuload.workers.plans`.
    """

    rows: Sequence[int] = field(default_factory=list)
    structures: list[Structure] = field(default_factory=list)
    images: list[ImageColumn] = field(default_factory=list)
    values: list[ValueColumn] = field(default_factory=list)
    sources: Sequence[str | None] | str = field(default_factory=list)
    errors: list[tuple[int, ErrorRecord]] = field(default_factory=list)  # (row, what went wrong)
    blocks: list[Block] = field(default_factory=list)
    masks: list[ImageColumn] = field(default_factory=list)
    points: list[ValueColumn] = field(default_factory=list)
    fields: list[tuple[int, ...]] = field(default_factory=list)
    collated: Collated | None = None  # the whole batch, if the user's collate_fn ran in the worker
    iterable: IterablePlace | None = None  # for an iterable dataset
    strays: str = ""
    encoded: list[tuple[Any, ...]] = field(default_factory=list)
    encoded_bytes: int = 0
    made: Any = None
    windows: np.ndarray | None = None  # never sent

    @property
    def names(self) -> Sequence[str | None]:
        """Where each sample came from."""
        return self.sources.split(SEPARATOR) if isinstance(self.sources, str) else self.sources

    def is_plain(self, rows: int) -> bool:
        """Whether each of so many rows is one image of uint8 and small values of builtin types, all in the same places:
        as nearly always, and then nobody needs to know more of a chunk before its batch is put together."""
        odd = self.blocks or self.masks or self.points or self.fields or self.strays or self.encoded
        if odd or self.collated is not None or self.iterable is not None or len(self.rows) != rows:
            return False
        if len(self.images) != 1 or len(self.structures) != 1 or (images := self.images[0]).kinds:
            return False
        if images.rows is not None or len(images.leaves) != 1 or not _is_builtin(self.structures[0]):
            return False
        return all(column.rows is None and SMALL.issuperset(map(type, column.values)) for column in self.values)


def together(contents: Sequence[ChunkContent], starts: Sequence[int]) -> ChunkContent:
    """Plain chunks of a batch as one, with the images' offsets in a memory where the chunks begin at `starts`.

    Raises:
        ValueError: they are not alike.
    """
    first = contents[0]
    leaves = [column.leaf for column in first.values]
    if any(
        own.structures != first.structures
        or own.images[0].leaves != first.images[0].leaves
        or [column.leaf for column in own.values] != leaves
        for own in contents
    ):
        raise ValueError("chunks of a batch are not alike")
    tables = [own.images[0].table for own in contents]
    table = np.concatenate(tables)
    table[:, 0] += np.repeat(np.array(starts, np.int64), [len(own) for own in tables])
    columns = zip(*(own.values for own in contents), strict=True)
    values = [ValueColumn(own[0].leaf, [value for column in own for value in column.values]) for own in columns]
    names = [name for own in contents for name in own.names]
    images = [ImageColumn(table, first.images[0].leaves)]
    return ChunkContent(range(len(table)), first.structures, images, values, names)


def _is_builtin(structure: Structure) -> bool:
    """Whether a structure is of Python's own containers alone."""
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
    """A tensor as an array, of the bits if numpy lacks its type."""

    array: np.ndarray
    dtype: str = ""

    def tensor(self) -> Any:
        """The tensor, over the same memory."""
        import torch

        tensor = torch.from_numpy(self.array)
        return tensor.view(getattr(torch, self.dtype)) if self.dtype else tensor
