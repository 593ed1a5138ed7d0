"""What each kind of record does to a batch of DALI's, by DALI's operators.

Batches are levels, uint8 H×W×C, or finished images in any layout. Windows are int64 (n, 4), as for
`gpuload.stage.backend.Levels`; a record has `before`, those of its inputs, and `after`, those of its results. Images
that it is not for get parameters that change nothing, so each of these calls is for the whole batch.

**Resizing** is DALI's with antialiasing, whose bilinear filter is Pillow's. Where the filter reaches beyond the image,
DALI repeats the last pixel and Pillow leaves it out: up to 25 levels at the borders. So such an image is padded with
zeros, and the result divided by the share of the weights that fell on the image; all others have the same bits as in a
batch without any. DALI keeps floats between columns and rows, where Pillow rounds to levels: a difference of a level is
left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from gpuload.stage.dali.engine import evaluated, ndd, types
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, NOTHING, OPS, Box, Erase, Flip, Ops, Record
from gpuload.transforms.program.windows import boxes_within

__all__ = ["OPERATIONS", "apply_program", "cut"]

Rows = slice | np.ndarray  # of a record in its batch


def apply_program(batch: ndd.Batch, program: Program, windows_tlhw: tuple[np.ndarray, ...]) -> ndd.Batch:
    """Take a batch through records."""
    for record, before, after in zip(program.records, windows_tlhw, windows_tlhw[1:], strict=False):
        if record.rows is None or len(record.rows):
            batch = evaluated(_apply(batch, record, before, after))
    return batch


def cut(batch: ndd.Batch, tlhw: np.ndarray, fill: tuple[float, ...] = (0,)) -> ndd.Batch:
    """Boxes of images, int64 (n, 4); the outside is filled with one number or one for each channel."""
    return ndd.slice(
        batch,
        start=ndd.as_batch(tlhw[:, :2].astype(np.int32)),
        shape=ndd.as_batch(tlhw[:, 2:].astype(np.int32)),
        axis_names="HW",
        out_of_bounds_policy="pad",
        fill_values=list(fill),
    )


def _apply(batch: ndd.Batch, record: Record, before: np.ndarray, after: np.ndarray) -> ndd.Batch:
    rows = slice(None) if record.rows is None else record.rows
    match record:
        case Flip():
            return _flip(batch, record, rows)
        case Box(padding_mode=None):
            return _resize(batch, record, rows, before, after)
        case Box():
            corners = np.zeros_like(before[:, :2])
            corners[rows] = record.box_tlhw[:, :2] + after[rows, :2] - before[rows, :2]
            if not corners.any() and np.array_equal(after[:, 2:], before[:, 2:]):
                return batch
            return cut(batch, np.hstack([corners, after[:, 2:]]), record.fill)
        case Ops():
            batch = _operate(batch, record, rows)
            if np.array_equal(before, after):
                return batch
            return cut(batch, np.hstack([after[:, :2] - before[:, :2], after[:, 2:]]))
        case Erase():
            return _erase(batch, record, rows, before)
        case _ if isinstance(record, CHANGES_PIXELS):
            raise TypeError(f"DALI has no operator for {type(record).__name__}")
        case _:
            return batch


def _flip(batch: ndd.Batch, record: Flip, rows: Rows) -> ndd.Batch:
    if not record.flipped.any():
        return batch
    flipped = np.zeros((2, batch.batch_size), np.int32)
    flipped[record.axis, rows] = record.flipped
    return ndd.flip(batch, vertical=ndd.as_batch(flipped[0]), horizontal=ndd.as_batch(flipped[1]))


def _erase(batch: ndd.Batch, record: Erase, rows: Rows, before: np.ndarray) -> ndd.Batch:
    boxes = np.zeros((len(before), *record.boxes_tlhw.shape[1:]), np.float32)
    boxes[rows] = boxes_within(record.boxes_tlhw, before[rows])
    if not boxes[:, :, 2:].all(axis=2).any():
        return batch
    anchor, shape = (part.reshape(len(boxes), -1).copy() for part in (boxes[:, :, :2], boxes[:, :, 2:]))
    anchor, shape = ndd.as_batch(anchor), ndd.as_batch(shape)
    return ndd.erase(batch, anchor=anchor, shape=shape, axis_names="HW", fill_value=list(record.numbers))


def _resize(batch: ndd.Batch, record: Box, rows: Rows, before: np.ndarray, after: np.ndarray) -> ndd.Batch:
    starts, ends = np.zeros((len(before), 2)), before[:, 2:].astype(np.float64)
    scale, corners = record.box_tlhw[:, 2:] / record.size_hw, before[rows, :2] - record.box_tlhw[:, :2]
    starts[rows] = after[rows, :2] * scale - corners
    ends[rows] = (after[rows, :2] + after[rows, 2:]) * scale - corners
    given_hw, size_hw = before[:, 2:], after[:, 2:]
    axes = zip(starts.T.tolist(), ends.T.tolist(), size_hw.T.tolist(), given_hw.T.tolist(), strict=True)
    shares = [[_share(*one) for one in zip(*axis, strict=True)] for axis in axes]
    beyond = np.array([any((share != 1).any() for share in pair) for pair in zip(*shares, strict=True)])
    margin = np.where(beyond[:, None], np.ceil(np.maximum((ends - starts) / size_hw, 1)) + 1, 0).astype(np.int64)
    start, end, size = (ndd.as_batch(part.astype(np.float32)) for part in (starts + margin, ends + margin, size_hw))
    padded = cut(batch, np.hstack([-margin, given_hw + 2 * margin])) if beyond.any() else batch
    resized = ndd.resize(
        padded,
        roi_start=start,
        roi_end=end,
        size=size,
        interp_type=types.INTERP_LINEAR,
        antialias=True,
        dtype=ndd.float32,  # for levels DALI rounds otherwise than `cast` does
    )
    for axis, shape in zip(shares, ((-1, 1, 1), (1, -1, 1)), strict=True) if beyond.any() else ():
        weights = [share.astype(np.float32).reshape(shape) for share in axis]
        resized = resized * ndd.as_batch(weights).to_device(resized.device)
    return ndd.cast(resized, dtype=ndd.uint8)


def _share(start: float, end: float, count: int, length: int) -> np.ndarray:
    """For each pixel of a result, along one axis: the filter's weights over those within the image."""
    scale = (end - start) / count
    reach = max(scale, 1.0)
    centres = start + (np.arange(count) + 0.5) * scale
    shares = np.ones(count)
    edge = np.flatnonzero((centres < reach) | (centres > length - reach))
    taps = np.floor(centres[edge, None] - reach) + np.arange(math.ceil(2 * reach) + 1)
    weights = np.maximum(1 - np.abs(taps + 0.5 - centres[edge, None]) / reach, 0)
    shares[edge] = weights.sum(axis=1) / np.where((taps >= 0) & (taps < length), weights, 0.0).sum(axis=1)
    return shares


def _operate(batch: ndd.Batch, record: Ops, rows: Rows) -> ndd.Batch:
    for turn in range(record.codes.shape[1]):
        codes = record.codes[:, turn]
        for code in np.unique(codes[codes != NOTHING]).tolist():
            operation, unchanged = OPERATIONS[OPS[code]]
            values = np.tile(np.array(unchanged), (batch.batch_size, 1))
            values[rows] = np.where((codes == code)[:, None], record.values[:, turn, : len(unchanged)], unchanged)
            batch = operation(batch, values)
    return batch


def _brightness(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Multiply with a factor. DALI rounds floats to levels, and Pillow truncates them: half a level is subtracted."""
    factor = ndd.as_batch(values[:, 0].astype(np.float32))
    shift = ndd.as_batch(np.full(len(values), (1e-5 - 0.5) / 255, np.float32))
    return ndd.brightness_contrast(batch, brightness=factor, brightness_shift=shift, dtype=ndd.uint8)


def _blur(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """A Gaussian blur with mirrored borders: DALI's own, whose weights are not rounded."""
    sizes, sigmas = values[:, 1::-1].astype(np.int32), values[:, 3:1:-1].astype(np.float32)
    window_size, sigma = (ndd.as_batch(np.ascontiguousarray(part)) for part in (sizes, sigmas))
    return ndd.gaussian_blur(batch, window_size=window_size, sigma=sigma)


Operation = Callable[[ndd.Batch, np.ndarray], ndd.Batch]
# Of `gpuload.transforms.program.ops`, each with the values that change nothing; all others are in
# `gpuload.stage.dali.backend.LACKING`.
OPERATIONS: Final[dict[str, tuple[Operation, tuple[float, ...]]]] = {
    "identity": (lambda batch, values: batch, ()),
    "brightness": (_brightness, (1.0,)),
    "blur": (_blur, (1.0, 1.0, 1.0, 1.0)),
}
