"""Kornia on finished images: erases, flips and mixes them in place.

The order and the random numbers are those of `gpuload.stage.finish`; the arithmetic is in float32, rounded to the
batch's dtype once. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.finish import Outputs, neighbours, random_numbers
from gpuload.stage.kornia.finished import blended, erased, inside
from gpuload.stage.kornia.geometry import FLIPS
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip, Mix, Record

__all__ = ["run_late"]

PIECE: Final = 16  # images at once: each random pixel takes some 100 numbers of 64 bits

# From some images N×C×H×W and their indices in the record, int64 (N,), to the changed images.
Change = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def run_late(outputs: Outputs, late: Program, partners: np.ndarray | None) -> None:
    """Apply what was drawn to finished images; arguments as for `gpuload.stage.finish.apply_late`."""
    for record in late.records:
        match record:
            case Flip():
                mirrored = FLIPS[record.axis]
                _change(outputs, record, record.flipped, lambda images, _, flip=mirrored: flip(images))
            case Erase():
                _change(outputs, record, record.boxes_tlhw[:, :, 2].max(axis=1) > 0, _eraser(record))
            case Mix():
                _mix(outputs, record, neighbours(len(late)) if partners is None else partners)


def _change(outputs: Outputs, record: Record, which: np.ndarray, change: Change) -> None:
    """Change some of a record's images, bool (n,); those of a list one by one, since their sizes may differ."""
    rows, changed = np.arange(len(which)) if record.rows is None else record.rows, np.flatnonzero(which)
    if not isinstance(outputs, torch.Tensor):
        for number in changed.tolist():
            output = outputs[int(rows[number])]
            output.copy_(change(output[None], np.array([number]))[0])
        return
    for start in range(0, len(changed), PIECE):
        some = changed[start : start + PIECE]
        index = upload(rows[some], outputs.device)
        outputs[index] = change(outputs[index], some)


def _eraser(record: Erase) -> Change:
    """A change that erases the first boxes of all images, then the second ones, …"""

    def erase(images: torch.Tensor, which: np.ndarray) -> torch.Tensor:
        boxes = record.boxes_tlhw[which]
        if record.kind == "const":
            constant = upload(np.array(record.numbers, np.float32)[:, None, None], images.device)
            numbers = [constant] * boxes.shape[1]
        else:
            numbers = _random(record.keys[which], boxes, images, pixels=record.kind == "pixel")
        for number, written in enumerate(numbers):
            images = erased(images, boxes[:, number], written)
        return images

    return erase


def _random(keys: np.ndarray, boxes: np.ndarray, images: torch.Tensor, *, pixels: bool) -> list[torch.Tensor]:
    """The normal numbers for each box of images: one for each channel, or, with `pixels`, images with one for each
    pixel of the box. They are counted from box to box, as in all backends."""
    n, channels, height, width = images.shape
    areas = boxes[:, :, 2:].prod(axis=2)
    counts = channels * (areas if pixels else areas > 0)
    drawn = random_numbers(keys, max(1, int(counts.sum(axis=1).max())), images.device)
    starts = np.cumsum(counts, axis=1) - counts
    found = []
    for number in range(boxes.shape[1]):
        shape = (n, channels, height, width) if pixels else (n, channels, 1, 1)
        written = drawn.new_zeros(shape)
        for row in np.flatnonzero(areas[:, number]).tolist():
            top, left, *size = boxes[row, number].tolist() if pixels else (0, 0, 1, 1)
            at, count = int(starts[row, number]), int(counts[row, number])
            written[row, :, top : top + size[0], left : left + size[1]] = drawn[row, at : at + count].view(-1, *size)
        found.append(written)
    return found


def _mix(outputs: Outputs, mix: Mix, partners: np.ndarray) -> None:
    assert isinstance(outputs, torch.Tensor), "images are mixed in a batch of one size"
    device, paired = outputs.device, partners != np.arange(len(partners))
    blend = np.flatnonzero(paired & (mix.box_tlhw[:, 2] == 0) & (mix.share < 1))
    paste = np.flatnonzero(paired & (mix.box_tlhw[:, 2] > 0))
    changes = []
    if len(blend):
        own, other = (outputs[upload(rows, device)] for rows in (blend, partners[blend]))
        changes.append((blend, blended(own, other, mix.share[blend])))
    if len(paste):
        own, other = (outputs[upload(rows, device)] for rows in (paste, partners[paste]))
        size_hw = outputs.shape[2], outputs.shape[3]
        changes.append((paste, torch.where(inside(mix.box_tlhw[paste], size_hw, device), other, own)))
    for rows, change in changes:  # after both: an image is mixed with its partner as it was before
        outputs[upload(rows, device)] = change
