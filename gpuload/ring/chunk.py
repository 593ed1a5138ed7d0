"""What a chunk came to, as columns: plain values that a worker makes and the main process reads. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.datasets.tree import Structure
from gpuload.errors import ErrorRecord
from gpuload.order.place import IterablePlace

__all__ = ["Belongings", "Block", "ChunkContent", "Collated", "ImageColumn", "TensorBits"]


@dataclass(slots=True)
class ImageColumn:
    """One image leaf of the samples of a chunk: int64 (samples that loaded, 10).

    A row is: the offset of its first byte in the slot; height, width and channels of what was decoded; height and width
    of the whole image; top, left, height and width of the decoded region in it.
    """

    table: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def shapes(self) -> np.ndarray:
        return self.table[:, 1:4]

    @property
    def sizes_hw(self) -> np.ndarray:
        return self.table[:, 4:6]

    @property
    def regions_tlhw(self) -> np.ndarray:
        return self.table[:, 6:10]


@dataclass(slots=True)
class Block:
    """A leaf of all samples of a chunk, stacked: where it lies in the slot, and what it is.

    `leaf` is its number among the leaves that are no images, `shape` includes the samples' axis; `dtype` is numpy's
    name of the type of the bits, `torch_dtype` torch's name where numpy lacks the type.
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


@dataclass(frozen=True, slots=True)
class Belongings:
    """What the main process must know of a sample's targets, besides the values that boxes and keypoints are.

    Attributes:
        masks: of each mask, its numpy dtype and how many axes it has.
        fields: for each transform of the chain that leaves boxes out (`droppers` in `gpuload.workers.belongings`),
            the leaves that go with the boxes.
    """

    masks: tuple[tuple[str, int], ...] = ()
    fields: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class ChunkContent:
    """What a chunk came to.

    `rows` are the rows (places in the request) that loaded; `values` and `sources` have one entry for each of them;
    `structures`, `places` and `belongings` too, or one for all. `image_places` are those of images and, behind them, of
    masks, which travel as images do: their bytes as channels. `images` has a column for each image leaf where all rows
    are of one structure; else a single one, with the images row by row. A value that lies in a block is None.
    """

    rows: list[int] = field(default_factory=list)
    structures: list[Structure] = field(default_factory=list)  # one, where all rows have the same
    image_places: list[tuple[int, ...]] = field(default_factory=list)  # likewise
    images: list[ImageColumn] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)  # the leaves that are no images
    sources: list[str | None] = field(default_factory=list)
    errors: list[tuple[int, ErrorRecord]] = field(default_factory=list)  # (row, what went wrong)
    blocks: list[Block] = field(default_factory=list)
    collated: Collated | None = None  # the whole batch, where the user's collate_fn ran in the worker
    stream: IterablePlace | None = None  # of an iterable dataset
    belongings: list[Belongings | None] = field(default_factory=list)  # where samples have targets; one, or one a row


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
