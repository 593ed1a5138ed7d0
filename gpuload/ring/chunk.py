"""What a chunk came to, as columns: plain values that a worker makes and the main process reads. No torch here.

A *leaf* is known by its number, depth first in the tree of its sample, from `gpuload.datasets.tree.flatten` to the
batch. A column is one leaf over the rows of a chunk that have it. Samples of one chunk may differ in structure: then
images (and masks) that are each the first of their samples are one column, as they go through the stage together, and
the column says which leaf each of them is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.datasets.tree import Structure
from gpuload.errors import ErrorRecord
from gpuload.order.place import IterablePlace

__all__ = ["Block", "ChunkContent", "Collated", "ImageColumn", "TensorBits", "ValueColumn"]

Rows = list[int] | None  # which rows of a chunk have a column; None: all


@dataclass(slots=True)
class ImageColumn:
    """The first images of the samples of a chunk, or the second ones …; or their masks, which travel as images do, the
    bytes of their numbers as channels.

    Attributes:
        table: int64 (rows that have one, 10): the offset of its first byte in the slot; height, width and channels of
            what was decoded; height and width of the whole image; top, left, height and width of the decoded region in
            it.
        leaves: which leaf it is, of each row, or one for all.
        rows: which rows have one.
        kinds: of masks, dtype and how many axes they have, of each row, or one for all.
    """

    table: np.ndarray
    leaves: list[int]
    rows: Rows = None
    kinds: list[tuple[str, int]] = field(default_factory=list)

    @property
    def offsets(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def shapes(self) -> np.ndarray:
        return self.table[:, 1:4]


@dataclass(slots=True)
class ValueColumn:
    """A leaf that is no image: its value in each of the `rows` that have it. Boxes and keypoints are such too."""

    leaf: int
    values: list[Any]
    rows: Rows = None

    def items(self) -> Iterable[tuple[int, Any]]:
        """Rows and their values."""
        return enumerate(self.values) if self.rows is None else zip(self.rows, self.values, strict=True)

    def get(self, row: int) -> Any:
        """The value of a row; None where it has no such leaf."""
        if self.rows is None:
            return self.values[row]
        return self.values[self.rows.index(row)] if row in self.rows else None


@dataclass(slots=True)
class Block:
    """A leaf of all samples of a chunk, stacked: where it lies in the slot, and what it is.

    `shape` includes the samples' axis; `dtype` is numpy's name of the type of the bits, `torch_dtype` torch's name
    where numpy lacks the type.
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
    """What a chunk came to.

    `rows` are the rows (of the request) that loaded; the rows of columns are counted among these. `sources` has one
    entry for each of them; `structures` and `fields` too, or one for all. `values` are the leaves that are no images,
    no targets, and in no block; `points` are boxes and keypoints; `fields` says which leaves go with
    boxes that are left out, where a transform does that.
    """

    rows: list[int] = field(default_factory=list)
    structures: list[Structure] = field(default_factory=list)
    images: list[ImageColumn] = field(default_factory=list)
    values: list[ValueColumn] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    errors: list[tuple[int, ErrorRecord]] = field(default_factory=list)  # (row, what went wrong)
    blocks: list[Block] = field(default_factory=list)
    masks: list[ImageColumn] = field(default_factory=list)
    points: list[ValueColumn] = field(default_factory=list)
    fields: list[tuple[int, ...]] = field(default_factory=list)
    collated: Collated | None = None  # the whole batch, where the user's collate_fn ran in the worker
    iterable: IterablePlace | None = None  # of an iterable dataset


@dataclass(slots=True)
class Collated:
    """What a user's `collate_fn` made of a whole batch; `error` where it raised, with the `traceback`."""

    value: Any = None
    error: str = ""
    traceback: str = ""


@dataclass(slots=True)
class TensorBits:
    """A tensor as an array; one of a type that numpy lacks, as the bits of another."""

    array: np.ndarray
    dtype: str = ""

    def tensor(self) -> Any:
        """The tensor again, over the same memory."""
        import torch

        tensor = torch.from_numpy(self.array)
        return tensor.view(getattr(torch, self.dtype)) if self.dtype else tensor
