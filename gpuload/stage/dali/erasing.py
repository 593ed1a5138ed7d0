"""Boxes that are overwritten, by DALI's `erase`: with one number for each channel, or with random ones.

Random numbers are those of the reference (`gpuload.stage.finished.random_numbers`), given to DALI as inputs: a box is
erased to 0 and its numbers are added, laid out to the size of the image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpuload.stage.dali.engine import ndd
from gpuload.stage.dali.images import Images, merged
from gpuload.stage.finished import random_numbers

__all__ = ["erase"]


def erase(images: Images, transform: Any, boxes_tlhw: np.ndarray, keys: np.ndarray) -> Images:
    """Overwrite boxes of images that are levels or finished.

    Args:
        images: of any form, which stays.
        transform: the `RandomErasing`.
        boxes_tlhw: int64 (n, boxes, 4), within the images; of no height where there is none.
        keys: as in `gpuload.transforms.program.ops.Erase`.
    """
    rows = np.flatnonzero(boxes_tlhw[:, :, 2:].min(axis=2).max(axis=1))
    if not len(rows):
        return images
    images = Images(images.batch)
    some = images.take(rows)
    if transform.kind == "const":
        erased = _filled(some, boxes_tlhw[rows], transform.numbers)
    else:
        erased = _random(some, boxes_tlhw[rows], keys[rows], per_pixel=transform.kind == "pixel")
    rest = np.setdiff1d(np.arange(len(images)), rows)
    return merged([(rows, erased), (rest, images.take(rest))]) if len(rest) else erased


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
