"""What a batch may leave in its slots: blocks of arrays, and whole images that no transform changes.

On the CPU the user gets tensors that are views of a slot, which is free again when the last of them is gone; if the
transfer refuses that, and on other devices, the bytes are copied. Runs in the main process, within the transfer's
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpuload.batches.columns import Columns, Images
from gpuload.ring.chunk import Block
from gpuload.stage import OutputPool
from gpuload.stage.upload import upload
from gpuload.workers.batch import Batch, Part

__all__ = ["lent_blocks", "lent_images", "stacked"]

LEND_BYTES = 1 << 20  # less is copied

Entries = Sequence[tuple[int, "Part", Block]]


def lent_blocks(transfer: Any, columns: Columns) -> dict[int, torch.Tensor]:
    """The batch's blocks as views of its slot, if one slot has them all and lending is worth it; else none."""
    entries = {leaf: found[0] for leaf, found in columns.blocks.items() if len(found) == 1}
    if not entries or len(entries) < len(columns.blocks):
        return {}
    part = next(iter(entries.values()))[1]
    if not _worth_it(part):
        return {}
    arrays = {leaf: block.array(part.data) for leaf, (_, _, block) in entries.items()}  # pyright: ignore
    if not transfer.lend(part, list(arrays.values())):
        return {}
    ready = {}
    for leaf, (_, _, block) in entries.items():
        tensor = torch.from_numpy(arrays[leaf])  # it keeps this array object alive
        ready[leaf] = tensor.view(getattr(torch, block.torch_dtype)) if block.torch_dtype else tensor
    return ready


def lent_images(transfer: Any, batch: Batch, columns: Columns, pool: OutputPool) -> list[list[torch.Tensor]]:
    """The images of a batch as decoded, C×H×W: views of slots, H×W×C, if those are lent, else of copies."""
    memory: list[torch.Tensor | None] = []
    for part in batch.parts:
        if part.data is None:
            memory.append(None)
            continue
        bytes_ = part.data[: part.used_bytes]
        tensor = torch.from_numpy(bytes_)  # it keeps this array object alive
        if not (_worth_it(part) and transfer.lend(part, [bytes_])):
            tensor = pool.empty((len(bytes_),), torch.uint8).copy_(tensor)
        memory.append(tensor)
    return [_views(memory, images) for images in columns.images]


def _views(memory: Sequence[torch.Tensor | None], images: Images) -> list[torch.Tensor]:
    views, size = [], 1
    if images.kinds:
        dtype = getattr(torch, images.kinds[0][0])
        size = dtype.itemsize
        memory = [None if whole is None else whole[: len(whole) // size * size].view(dtype) for whole in memory]
    for part, (offset, height, width, pixel) in zip(images.parts.tolist(), images.table[:, :4].tolist(), strict=True):
        whole: Any = memory[part]
        channels = pixel // size
        strides = (1, width * channels, channels)
        views.append(whole.as_strided((channels, height, width), strides, offset // size))
    return views


def _worth_it(part: Part) -> bool:
    if part.data is None or part.slot is None:
        return False
    return part.used_bytes >= max(LEND_BYTES, part.slot.capacity_bytes // 4)


def stacked(
    entries: Entries, columns: Columns, pixels: torch.Tensor | None, starts: Sequence[int], pool: OutputPool | None
) -> torch.Tensor:
    """A leaf in blocks as one tensor, N×…: in memory of the `pool`; without one on the device, from `pixels`, where the
    parts begin at `starts`."""
    order, first = columns.order, entries[0][2]
    dtype = getattr(torch, first.torch_dtype or first.dtype)
    if pool is None:
        assert pixels is not None
        views = []
        for number, _, block in entries:
            at = starts[number] + block.offset
            nbytes = dtype.itemsize * int(np.prod(block.shape, dtype=np.int64))
            views.append(pixels[at : at + nbytes].view(dtype).view(block.shape))
        whole = torch.cat(views) if len(views) > 1 else views[0]
        return whole if order is None else whole[upload(order, whole.device)]
    whole = pool.empty((len(columns), *first.shape[1:]), dtype)
    out = whole.view(getattr(torch, first.dtype)).numpy()
    at = 0
    for _, part, block in entries:
        assert part.data is not None
        array = block.array(part.data)
        out[at : at + len(array)] = array
        at += len(array)
    return whole if order is None else whole[torch.from_numpy(order)]
