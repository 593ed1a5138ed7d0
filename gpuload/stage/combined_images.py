"""Combines images of a batch for Mosaic and CopyPaste, between two segments of a chain.

The preceding transforms have been applied to all images of the batch, and each result consists of parts of more than
one image. Pixels are only copied, except that the reference resizes a partner of another size. This module runs on the
stage's device, and keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.gather import PixelSource, resize
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Paste, Tile

__all__ = ["combine_images", "groups_of", "tile"]


def groups_of(numbers: np.ndarray, size: int) -> np.ndarray:
    """Return the batch indices of each sample's group, int64 (N, size), from the samples' numbers: the indices of
    number, number XOR 1, …, number XOR (size - 1). A group's samples that are not in
    the batch are replaced by the sample itself. If a sample appears twice, because the batch was filled up, its first
    index is used.

    Example:
        >>> groups_of(np.array([4, 5, 6, 0]), 4).tolist()
        [[0, 1, 2, 0], [1, 0, 1, 2], [2, 2, 0, 1], [3, 3, 3, 3]]
    """
    row_of = {number: row for row, number in reversed(list(enumerate(numbers.tolist())))}
    return np.array(
        [[row, *(row_of.get(n ^ k, row) for k in range(1, size))] for row, n in enumerate(numbers.tolist())], np.int64
    ).reshape(-1, size)


def combine_images(
    images: RaggedImages,
    program: Program,
    windows_tlhw: tuple[np.ndarray, ...],
    outputs: Outputs,
    late_program: Program | None,
) -> None:
    """Apply the only record of a program that combines images. This function has the interface of
    `gpuload.stage.backend.LevelRunner`, but never finishes images; `images` must be complete."""
    assert images.steps is None
    [record] = [record for record in program.records if isinstance(record, Tile | Paste)]
    levels = [
        images.pixels[offset : offset + height * width * channels].view(height, width, channels).permute(2, 0, 1)
        for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True)
    ]
    if isinstance(record, Tile):
        tile(record, levels, windows_tlhw[-1], outputs, record.fill)
        return
    covered = record.covered or [None] * len(images)
    for row, (top, left, height, width) in enumerate(windows_tlhw[-1].tolist()):
        window = slice(top, top + height), slice(left, left + width)
        image, paste_mask = levels[row][:, *window], covered[row]
        if paste_mask is not None:
            partner = int(record.groups[row, 1])
            has_same_size = levels[partner].shape == levels[row].shape
            pasted = levels[partner] if has_same_size else _resize_image(images, partner, record.sizes_hw[row])
            image = torch.where(paste_mask[window], pasted[:, *window], image)
        outputs[row].copy_(image)


def tile(
    record: Tile, images: Sequence[torch.Tensor], windows_tlhw: np.ndarray, outputs: Outputs, fill: Sequence[float]
) -> None:
    """Arrange images, or their masks, around the centres of mosaics.

    Args:
        record: the record for all images.
        images: tensors of shape …×H×W and of any dtype.
        windows_tlhw: int64 (N, 4), the parts of the results to compute.
        outputs: tensors of shape …×H×W, to which the results are written.
        fill: the values of pixels that no image covers: one value, or one per channel.
    """
    image_rows, corners, visible_tlhw = record.quadrants(windows_tlhw)
    is_full = (visible_tlhw[:, :, 2:].prod(axis=2).sum(axis=1) == windows_tlhw[:, 2:].prod(axis=1)).tolist()
    fill_levels: torch.Tensor | None = None
    if len(fill) > 1 and not all(is_full):
        fill_levels = upload(np.array(fill, np.float32)[:, None, None], outputs[0].device)
    for row, (output, (top, left, height, width)) in enumerate(zip(outputs, windows_tlhw.tolist(), strict=True)):
        if not record.gathered[row]:
            output.copy_(images[row][..., top : top + height, left : left + width])
            continue
        if not is_full[row]:
            output.fill_(fill[0]) if fill_levels is None else output.copy_(fill_levels)
        quadrants = zip(image_rows[row].tolist(), corners[row].tolist(), visible_tlhw[row].tolist(), strict=True)
        for image_row, (y, x), (part_top, part_left, h, w) in quadrants:
            if h and w:
                part = images[image_row][..., part_top - y : part_top - y + h, part_left - x : part_left - x + w]
                output[..., part_top - top : part_top - top + h, part_left - left : part_left - left + w] = part


def _resize_image(images: RaggedImages, row: int, size_hw: np.ndarray) -> torch.Tensor:
    """Resize one image of a batch; return it as C×H×W, in the images' dtype."""
    box = images.shapes[row : row + 1, :2]
    source = PixelSource.from_ragged(images, np.array([row]), images.regions_tlhw[row : row + 1])
    window = np.array([[0, 0, *size_hw]], np.int64)
    result = resize(source, np.zeros((1, 2), np.int64), box, size_hw[None], window, "bilinear")[0]
    dtype = images.pixels.dtype
    return result if dtype.is_floating_point or result.dtype == dtype else result.round().to(dtype)
