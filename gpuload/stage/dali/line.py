"""What each kind of record does to the images of a batch in DALI. On finished images only `Flip` and `Erase` occur."""

from __future__ import annotations

import numpy as np

from gpuload.stage.dali.erasing import erase
from gpuload.stage.dali.geometry import crop, resize, warp
from gpuload.stage.dali.images import Images, merged
from gpuload.stage.dali.operations import operate
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Box, Erase, Flip, Ops, Record, Warp

__all__ = ["apply_program"]


def apply_program(images: Images, program: Program, windows_tlhw: tuple[np.ndarray, ...]) -> Images:
    """Take images through records; windows as for `gpuload.stage.backend.Levels`.

    Images are taken out of the batch for records of some rows, and come back when a record has other rows that overlap
    with them: each branch is taken out once, however many records it has.
    """
    out: dict[bytes, tuple[np.ndarray, Images]] = {}
    for record, before, after in zip(program.records, windows_tlhw, windows_tlhw[1:], strict=False):
        rows = record.rows
        if rows is None:
            images, out = _apply(_joined(images, out), record, before, after), {}
        elif len(rows):
            key = rows.tobytes()
            if key not in out:
                if any(np.isin(rows, others).any() for others, _ in out.values()):
                    images, out = _joined(images, out), {}
                out[key] = rows, images.take(rows)
            out[key] = rows, _apply(out[key][1], record, before[rows], after[rows])
    return _joined(images, out)


def _joined(images: Images, out: dict[bytes, tuple[np.ndarray, Images]]) -> Images:
    """Images, with those that were taken out and changed."""
    if not out:
        return images
    rest = np.setdiff1d(np.arange(len(images)), np.concatenate([rows for rows, _ in out.values()]))
    return merged([*out.values(), (rest, images.take(rest))] if len(rest) else [*out.values()])


def _apply(images: Images, record: Record, before: np.ndarray, after: np.ndarray) -> Images:
    match record:
        case Flip():
            return images.flip(record.flipped, record.axis)
        case Box(padding_mode=None):
            return resize(images, record, before, after)
        case Box():
            return crop(images, record, before, after)
        case Warp():
            return warp(images, record, after)
        case Ops():
            images = operate(images, record)
            return images if np.array_equal(before, after) else images.cut(after)
        case Erase():
            return erase(images, record, before)
        case _:
            return images
