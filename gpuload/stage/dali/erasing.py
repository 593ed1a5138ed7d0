"""Boxes that are overwritten, by DALI's `erase`: with one number for each channel, or with random ones.

Random numbers are those of the reference (`gpuload.stage.finished.random_numbers`), given to DALI as inputs: a box is
erased to 0 and its numbers are added, laid out to the size of the image.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.dali.engine import ndd
from gpuload.stage.dali.images import Images, grouped
from gpuload.stage.finished import boxes_within, random_numbers
from gpuload.transforms.program.ops import Erase

__all__ = ["erase"]


def erase(images: Images, record: Erase, before: np.ndarray) -> Images:
    """Overwrite boxes of windows of images that are levels or finished, of any form, which stays."""
    boxes_tlhw = boxes_within(record, before)
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
    count = len(images)
    anchors, sizes = (boxes_tlhw[:, :, part].reshape(count, -1).astype(np.float32) for part in (slice(2), slice(2, 4)))
    return Images(
        ndd.erase(
            images.batch,
            anchor=ndd.as_batch(anchors),
            shape=ndd.as_batch(sizes),
            axis_names="HW",
            fill_value=list(fill),
        )
    )


def _random(images: Images, boxes_tlhw: np.ndarray, keys: np.ndarray, *, per_pixel: bool) -> Images:
    channels, place = images.channels, images.raw.device
    device = torch.device("cpu") if place.device_type == "cpu" else torch.device("cuda", place.device_id)
    areas = boxes_tlhw[:, :, 2:].prod(axis=2)
    counts = channels * (areas if per_pixel else (areas > 0))
    # One key after the other where one sequence is made at a time; together they would all be as long as the longest.
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
            found = found if planar else found.permute(1, 2, 0)
            patches.append(found.contiguous())
        laid = Images(ndd.as_batch(patches, layout=images.layout))
        laid = laid.cut(np.hstack([-boxes[:, :2], sizes]))
        images = Images(_filled(images, boxes[:, None], (0.0,)).batch + laid.batch)
    return images
