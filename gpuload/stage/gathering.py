"""Puts images of a batch together: Mosaic and CopyPaste, on levels, between two runs of a line.

All images of the batch have gone through what stands before; each result takes in parts of several. Pixels are copied,
not computed, but for a partner of another size, which is resized by the reference. Runs on the stage's device; keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.gather import Source, resize
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Gather

__all__ = ["gather", "groups_of", "tile"]


def groups_of(numbers: np.ndarray, size: int) -> np.ndarray:
    """Return, for each number of a batch, the rows of its group, int64 (N, size): of the number itself, number XOR 1, …
    A missing one is replaced by the number's own row. If a number appears twice, in a batch that is filled up, its
    first row is meant.

    Example:
        >>> groups_of(np.array([4, 5, 6, 0]), 4).tolist()
        [[0, 1, 2, 0], [1, 0, 1, 2], [2, 2, 0, 1], [3, 3, 3, 3]]
    """
    row_of = {number: row for row, number in reversed(list(enumerate(numbers.tolist())))}
    return np.array(
        [[row, *(row_of.get(n ^ k, row) for k in range(1, size))] for row, n in enumerate(numbers.tolist())], np.int64
    ).reshape(-1, size)


def gather(
    images: RaggedImages,
    program: Program,
    windows_tlhw: tuple[np.ndarray, ...],
    outputs: Outputs,
    on_finished: Program | None = None,
) -> Program | None:
    """Apply the record of a program that puts images together, as a runner does (`gpuload.stage.backend.Levels`);
    `images` are whole."""
    assert images.steps is None
    [record] = [record for record in program.records if isinstance(record, Gather)]
    levels = [
        images.pixels[offset : offset + height * width * channels].view(height, width, channels).permute(2, 0, 1)
        for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True)
    ]
    if record.keys is None:
        tile(record, levels, windows_tlhw[-1], outputs, record.fill)
        return on_finished
    covered = record.covered or [None] * len(images)
    for row, (top, left, height, width) in enumerate(windows_tlhw[-1].tolist()):
        inside = slice(top, top + height), slice(left, left + width)
        image, under = levels[row][:, *inside], covered[row]
        if under is not None:
            partner = int(record.groups[row, 1])
            same = levels[partner].shape == levels[row].shape
            there = levels[partner] if same else _resized(images, partner, record.sizes_hw[row])
            image = torch.where(under[inside], there[:, *inside], image)
        outputs[row].copy_(image)
    return on_finished


def tile(
    record: Gather, images: Sequence[torch.Tensor], windows_tlhw: np.ndarray, outputs: Outputs, fill: Sequence[float]
) -> None:
    """Put images, or masks of them, together around the centres of a mosaic.

    Args:
        record: for all images.
        images: …×H×W, of any dtype.
        windows_tlhw: int64 (N, 4), the parts of the results that are wanted.
        outputs: take them, …×H×W.
        fill: where no image is: one number, or one for each channel.
    """
    rows, corners, shown = record.quadrants(windows_tlhw)
    full = (shown[:, :, 2:].prod(axis=2).sum(axis=1) == windows_tlhw[:, 2:].prod(axis=1)).tolist()
    level: torch.Tensor | None = None
    if len(fill) > 1 and not all(full):
        level = upload(np.array(fill, np.float32)[:, None, None], outputs[0].device)
    for row, (output, (top, left, height, width)) in enumerate(zip(outputs, windows_tlhw.tolist(), strict=True)):
        if not record.gathered[row]:
            output.copy_(images[row][..., top : top + height, left : left + width])
            continue
        if not full[row]:
            output.fill_(fill[0]) if level is None else output.copy_(level)
        quadrants = zip(rows[row].tolist(), corners[row].tolist(), shown[row].tolist(), strict=True)
        for other, (y, x), (down, across, h, w) in quadrants:
            if h and w:
                part = images[other][..., down - y : down - y + h, across - x : across - x + w]
                output[..., down - top : down - top + h, across - left : across - left + w] = part


def _resized(images: RaggedImages, row: int, size_hw: np.ndarray) -> torch.Tensor:
    """Return an image resized, C×H×W, in its dtype."""
    box = images.shapes[row : row + 1, :2]
    source = Source.of_ragged(images, np.array([row]), images.regions_tlhw[row : row + 1])
    window = np.array([[0, 0, *size_hw]], np.int64)
    result = resize(source, np.zeros((1, 2), np.int64), box, size_hw[None], window, "bilinear")[0]
    dtype = images.pixels.dtype
    return result if dtype.is_floating_point or result.dtype == dtype else result.round().to(dtype)
