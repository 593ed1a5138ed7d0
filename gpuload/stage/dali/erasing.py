"""Random erasing by DALI's `erase`: with one number for each channel, or with random ones.

Random numbers are the reference's (`gpuload.stage.finish.random_numbers`), given to DALI as inputs: a box is erased
to 0, and an image of 0 with the numbers in that box is added.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.dali.engine import ndd
from gpuload.stage.dali.images import Images, grouped
from gpuload.stage.finish import random_numbers
from gpuload.transforms.program.ops import Erase
from gpuload.transforms.program.windows import boxes_within

__all__ = ["erase"]


def erase(images: Images, record: Erase, before: np.ndarray) -> Images:
    """Erase boxes of windows of images, levels or finished, in any layout."""
    boxes_tlhw = boxes_within(record.boxes_tlhw, before)
    there = boxes_tlhw[:, :, 2:].min(axis=2).max(axis=1) > 0
    if not there.any():
        return images

    def erased(some: Images, rows: np.ndarray, there: bool) -> Images:
        if not there:
            return some
        if record.kind == "const":
            return _filled(some, boxes_tlhw[rows], record.numbers)
        return _random(some, boxes_tlhw[rows], record.keys[rows], per_pixel=record.kind == "pixel")

    return grouped(images, there, erased)


def _filled(images: Images, boxes_tlhw: np.ndarray, fill: tuple[float, ...]) -> Images:
    parts = (boxes_tlhw[:, :, part].reshape(len(images), -1) for part in (slice(2), slice(2, 4)))
    anchor, shape = (ndd.as_batch(part.astype(np.float32)) for part in parts)
    return Images(ndd.erase(images.batch, anchor=anchor, shape=shape, axis_names="HW", fill_value=list(fill)))


def _random(images: Images, boxes_tlhw: np.ndarray, keys: np.ndarray, *, per_pixel: bool) -> Images:
    channels, on = images.channels, images.raw.device
    device = torch.device("cpu") if on.device_type == "cpu" else torch.device("cuda", on.device_id)
    areas = boxes_tlhw[:, :, 2:].prod(axis=2)
    counts = channels * (areas if per_pixel else (areas > 0))
    # One key after the other: together all sequences would be as long as the longest.
    made = [random_numbers(keys[row : row + 1], int(counts[row].sum()), device)[0] for row in range(len(images))]
    sizes, planar = images.sizes_hw, images.layout == "CHW"
    starts = np.cumsum(counts, axis=1) - counts
    for number in range(boxes_tlhw.shape[1]):
        boxes = boxes_tlhw[:, number]
        patches = []
        for row, (_, _, height, width) in enumerate(boxes.tolist()):
            found = made[row][starts[row, number] : starts[row, number] + counts[row, number]]
            found = found.view((channels, height, width) if per_pixel else (channels, int(height > 0), int(height > 0)))
            found = found.expand(channels, height, width)
            patches.append((found if planar else found.permute(1, 2, 0)).contiguous())
        added = Images(ndd.as_batch(patches, layout=images.layout)).cut(np.hstack([-boxes[:, :2], sizes]))
        images = Images(_filled(images, boxes[:, None], (0.0,)).batch + added.batch)
    return images
