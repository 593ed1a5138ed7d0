"""Puts images of a batch together: Mosaic and CopyPaste, on levels, between two runs of a line.

All images of the batch have gone through what stands before; each result takes in parts of several. Pixels are copied,
not computed, but for a partner of another size, which is resized by the reference. Runs on the stage's device; keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.gather import Source, resize
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.gathers import Gather, Paste, Tile

__all__ = ["Gathered", "gather", "gather_records", "groups_of", "tile"]


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What a record takes from where.

    Attributes:
        rows: int64 (N, group), of each sample the rows of its group: its own, that at position p XOR 1, …; its own row
            again for those that are missing.
        covered: of a `Paste`, where each image shows its partner, bool H×W; None: nowhere.
    """

    rows: np.ndarray
    covered: Sequence[torch.Tensor | None] = ()


def groups_of(numbers: np.ndarray, size: int) -> np.ndarray:
    """For each number of a batch the rows of its group, int64 (N, size): of the number itself, number XOR 1, … If a
    number appears twice, in a batch that is filled up, its first row is meant.

    Example:
        >>> groups_of(np.array([4, 5, 6, 0]), 4).tolist()
        [[0, 1, 2, 0], [1, 0, 1, 2], [2, 2, 0, 1], [3, 3, 3, 3]]
    """
    row_of = {number: row for row, number in reversed(list(enumerate(numbers.tolist())))}
    return np.array(
        [[row, *(row_of.get(n ^ k, row) for k in range(1, size))] for row, n in enumerate(numbers.tolist())], np.int64
    ).reshape(-1, size)


def gather_records(program: Program) -> list[tuple[int, Gather]]:
    """The records of a program that put images together, and their numbers."""
    return [(number, record) for number, record in enumerate(program.records) if isinstance(record, Gather)]


def gather(
    images: RaggedImages, record: Gather, gathered: Gathered, windows_tlhw: np.ndarray, outputs: Outputs
) -> None:
    """Apply a record.

    Args:
        images: whole images.
        record: for all of them.
        gathered: what it takes from where.
        windows_tlhw: int64 (N, 4), the parts of the results that are wanted.
        outputs: take them, C×H×W.
    """
    levels = [
        images.pixels[offset : offset + height * width * channels].view(height, width, channels).permute(2, 0, 1)
        for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True)
    ]
    if isinstance(record, Tile):
        tile(record, gathered.rows, levels, windows_tlhw, outputs, record.fill)
    elif isinstance(record, Paste):
        for row, (top, left, height, width) in enumerate(windows_tlhw.tolist()):
            inside = slice(top, top + height), slice(left, left + width)
            covered = gathered.covered[row] if gathered.covered else None
            own = levels[row][:, *inside]
            if covered is None:
                outputs[row].copy_(own)
                continue
            partner = int(gathered.rows[row, 1])
            there = levels[partner]
            if not np.array_equal(there.shape[1:], record.sizes_hw[row]):
                there = _resized(images, partner, record.sizes_hw[row])
            outputs[row].copy_(torch.where(covered[inside], there[:, *inside], own))


def tile(
    record: Tile,
    rows: np.ndarray,
    images: Sequence[torch.Tensor],
    windows_tlhw: np.ndarray,
    outputs: Outputs,
    fill: Sequence[float],
) -> None:
    """Put images, or masks of them, together.

    Args:
        record: for all images.
        rows: their groups, see `Gathered`.
        images: …×H×W, of any dtype.
        windows_tlhw: int64 (N, 4), the parts of the results that are wanted.
        outputs: take them, …×H×W.
        fill: where no image is: one number, or one for each channel.
    """
    shown_rows = np.take_along_axis(rows, record.order, axis=1)
    corners, shown = record.places(shown_rows)
    start = np.maximum(shown[:, :, :2], windows_tlhw[:, None, :2])
    end = np.minimum(shown[:, :, :2] + shown[:, :, 2:], (windows_tlhw[:, :2] + windows_tlhw[:, 2:])[:, None])
    seen = np.all(end > start, axis=2)
    whole = (np.where(seen, (end - start).prod(axis=2), 0).sum(axis=1) == windows_tlhw[:, 2:].prod(axis=1)).tolist()
    # Where they are in the results, and in the images.
    targets, sources = (start - windows_tlhw[:, None, :2]).tolist(), (start - corners).tolist()
    sizes, tiled, windows = (end - start).tolist(), record.tiled.tolist(), windows_tlhw.tolist()
    level: torch.Tensor | None = None
    for row, output in enumerate(outputs):
        if not tiled[row]:
            top, left, height, width = windows[row]
            output.copy_(images[row][..., top : top + height, left : left + width])
            continue
        if not whole[row] and len(fill) == 1:
            output.fill_(fill[0])
        elif not whole[row]:
            if level is None:
                level = upload(np.array(fill, np.float32)[:, None, None], output.device)
            output.copy_(level)
        for quadrant in np.flatnonzero(seen[row]).tolist():
            (down, across), (top, left) = targets[row][quadrant], sources[row][quadrant]
            height, width = sizes[row][quadrant]
            part = images[int(shown_rows[row, quadrant])][..., top : top + height, left : left + width]
            output[..., down : down + height, across : across + width] = part


def _resized(images: RaggedImages, row: int, size_hw: np.ndarray) -> torch.Tensor:
    """An image resized, C×H×W, in its dtype."""
    whole = np.array([[0, 0, *images.shapes[row, :2]]], np.int64)
    source = Source.of_ragged(images, np.array([row]), images.regions_tlhw[row : row + 1])
    window = np.array([[0, 0, *size_hw]], np.int64)
    found = resize(source, whole[:, :2], whole[:, 2:], size_hw[None], window, "bilinear")[0]
    dtype = images.pixels.dtype
    return found if dtype.is_floating_point or found.dtype == dtype else found.round().to(dtype)
