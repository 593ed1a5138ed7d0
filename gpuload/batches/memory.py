"""The memory of a batch: from the slots to the device, or to the user.

This module runs in the main process, on the transfer stream. On the CPU, the user can get tensors that are views of a
slot. The slot is released when the last view is deleted. On other devices, or if the transfer refuses to lend the slot,
the bytes are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from gpuload.ring.columns import Block, Columns, ImageColumn, entry
from gpuload.stage import OutputPool, RaggedImages
from gpuload.stage.device import COPY, profiler_range, view_arrays
from gpuload.workers.batch import Batch, BatchPart, PlannedBatch

__all__ = ["BatchMemory"]

LEND_BYTES = 1 << 20  # smaller arrays are copied instead of lent


class BatchMemory:
    """The bytes of a batch, which are in its slots until they have been loaded or lent.

    Args:
        transfer: copies slots to the device, and lends them.
        pool: memory for tensors on the CPU; None on an asynchronous device.
        batch, columns: the batch, complete and as columns.
        release: releases the slots.
    """

    def __init__(
        self, transfer: Any, pool: OutputPool | None, batch: Batch, columns: Columns, release: Callable[[], None]
    ) -> None:
        self._transfer, self._pool = transfer, pool
        self._batch, self._columns = batch, columns
        self._release: Callable[[], None] | None = release
        self._pixels: Any = None  # uint8, flat, on the device; None if the slots have not been loaded
        self._starts: list[int] = []  # the offset of each part in the pixels

    def load(self) -> None:
        """Copy the slots to the device, or on the CPU, read them in place. The transfer then releases the slots."""
        release, self._release = self._release, None
        with profiler_range(COPY):
            self._pixels, self._starts = self._transfer.load(self._batch, release)

    def release(self) -> None:
        """Release the slots, unless they have been loaded: all of their bytes have been copied or lent."""
        if self._release is not None:
            self._release()

    def read(self, images: ImageColumn) -> RaggedImages:
        """Return the pixels of images or masks, as bytes."""
        return RaggedImages(self._pixels, images.table, _Names(self._columns, images))

    def read_plan(self, planned: PlannedBatch) -> dict[int, torch.Tensor]:
        """Give a plan its arrays. Return the leaves that came with it, as int64 (N,)."""
        arrays: dict[Any, torch.Tensor] = view_arrays(self._pixels, planned.spans, self._starts[-1])
        planned.arrays = {name: array for name, array in arrays.items() if isinstance(name, str)}
        # Views would keep the pixels alive as long as the user keeps the labels.
        return {leaf: array.clone() for leaf, array in arrays.items() if isinstance(leaf, int)}

    def lend_images(self) -> list[list[torch.Tensor]]:
        """Return the decoded C×H×W images of each column: views of H×W×C memory, in lent slots or in copies."""
        assert self._pool is not None
        starts = np.array(self._transfer.part_offsets(self._batch))
        memory: list[torch.Tensor | None] = []
        for part in self._batch.parts:
            if part.data is None:
                memory.append(None)
                continue
            data = part.data[: part.used_bytes]
            tensor = torch.from_numpy(data)  # the tensor keeps this array object alive
            if not (_is_worth_lending(part) and self._transfer.lend(part, [data])):
                tensor = self._pool.empty((len(data),), torch.uint8).copy_(tensor)
            memory.append(tensor)
        return [_view_images(memory, starts, images) for images in self._columns.images]

    def finish_blocks(self) -> dict[int, torch.Tensor]:
        """Return the batch's blocks as N×… tensors. On the CPU, they are views of the batch's slot if one slot has all
        blocks and is worth lending, otherwise copies."""
        blocks = self._columns.blocks
        if self._pool is None or not blocks:
            return {leaf: _read_block(block, self._pixels) for leaf, block in blocks.items()}
        starts = self._transfer.part_offsets(self._batch)
        parts = [(part, start) for part, start in zip(self._batch.parts, starts, strict=False) if part.sample_count]
        arrays = {
            leaf: [block.array(part.data, piece, start) for piece, (part, start) in enumerate(parts)]  # pyright: ignore
            for leaf, block in blocks.items()
        }
        is_lent = (
            len(parts) == 1
            and not self._columns.images
            and _is_worth_lending(parts[0][0])
            and self._transfer.lend(parts[0][0], [array for [array] in arrays.values()])
        )
        # A tensor from numpy keeps its array object alive.
        tensors = {
            leaf: torch.from_numpy(pieces[0]) if is_lent else _concatenate(pieces, self._pool)
            for leaf, pieces in arrays.items()
        }
        return {leaf: tensor.view(_dtype_of(blocks[leaf])) for leaf, tensor in tensors.items()}


class _Names(Sequence[str]):
    """The names of a batch's images in errors, created on access."""

    def __init__(self, columns: Columns, images: ImageColumn) -> None:
        self._columns = columns
        self._images = images

    def __len__(self) -> int:
        return len(self._images.table)

    def __getitem__(self, row: Any) -> Any:
        return self._columns.name(int(self._images.row_indices[row]), entry(self._images.leaves, row))


def _is_worth_lending(part: BatchPart) -> bool:
    if part.data is None or part.slot is None:
        return False
    return part.used_bytes >= max(LEND_BYTES, part.slot.capacity_bytes // 4)


def _concatenate(pieces: Sequence[np.ndarray], pool: OutputPool) -> torch.Tensor:
    """Copy the pieces of a block to memory from the pool."""
    copy = pool.empty((sum(map(len, pieces)), *pieces[0].shape[1:]), torch.from_numpy(pieces[0]).dtype)
    if copy.nbytes < LEND_BYTES:
        np.concatenate(pieces, out=copy.numpy())
    else:  # torch uses several threads, and waking threads takes milliseconds on busy CPUs
        torch.cat([*map(torch.from_numpy, pieces)], out=copy)
    return copy


def _dtype_of(block: Block) -> torch.dtype:
    return getattr(torch, block.torch_dtype or block.dtype)


def _read_block(block: Block, pixels: torch.Tensor) -> torch.Tensor:
    """Return a block from the batch's memory on the device."""
    dtype = _dtype_of(block)
    row_bytes = prod(block.shape) * dtype.itemsize
    pieces = [pixels[start : start + n * row_bytes].view(dtype).view(n, *block.shape) for start, n in block.pieces]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _view_images(memory: Sequence[torch.Tensor | None], starts: np.ndarray, images: ImageColumn) -> list[torch.Tensor]:
    """Return the images of a column as views; `starts` has the offset of each part's memory."""
    views, itemsize, offsets = [], 1, images.table["offset"]
    if images.kinds:
        dtype = getattr(torch, images.kinds[0][0])  # pyright: ignore[reportOptionalSubscript]
        itemsize = dtype.itemsize
        memory = [None if part is None else part[: len(part) // itemsize * itemsize].view(dtype) for part in memory]
    order = starts.argsort(kind="stable")
    parts = order[starts[order].searchsorted(offsets, "right") - 1]
    columns = (offsets - starts[parts]).tolist(), images.table["shape"].tolist()
    for part, offset, (height, width, pixel_bytes) in zip(parts.tolist(), *columns, strict=True):
        part_memory: Any = memory[part]
        channels = pixel_bytes // itemsize
        strides = (1, width * channels, channels)
        views.append(part_memory.as_strided((channels, height, width), strides, offset // itemsize))
    return views
