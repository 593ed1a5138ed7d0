"""Applies each kind of record to a DALI batch, with DALI's operators.

Batches contain H×W×C uint8 images, or finished images in any layout. Windows are int64 (n, 4), as in
`gpuload.stage.backend.LevelRunner`: a record's inputs have the windows `before`, and its results the windows `after`.
Every operator call processes the entire batch; images to which a record does not apply get neutral parameters.

**Resizing** uses DALI's antialiased bilinear filter, which is the same as Pillow's inside the image. Where the filter
extends past the border, DALI repeats the last pixel and Pillow drops the outside weights, a difference of up to 25
levels. So images whose borders matter are padded with zeros, and the result is divided by the fraction of the weights
inside the image. The results of all other images are bit-identical to the results of a batch without padding. Between
the two resizing passes, DALI keeps floats and Pillow rounds to integers, so differences of one level remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from gpuload.stage.dali.engine import evaluate, ndd, types
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import CHANGES_PIXELS, NOTHING, OPS, Box, Erase, Flip, Ops, Record
from gpuload.transforms.program.windows import clip_to_windows

__all__ = ["OPERATIONS", "apply_program", "crop"]

Rows = slice | np.ndarray  # the batch indices of the images to which a record applies


def apply_program(batch: ndd.Batch, program: Program, windows_tlhw: tuple[np.ndarray, ...]) -> ndd.Batch:
    """Apply a program's records to a batch, one after the other."""
    for record, before, after in zip(program.records, windows_tlhw, windows_tlhw[1:], strict=False):
        if record.rows is None or len(record.rows):
            batch = evaluate(_apply(batch, record, before, after))
    return batch


def crop(batch: ndd.Batch, tlhw: np.ndarray, fill: tuple[float, ...] = (0,)) -> ndd.Batch:
    """Crop images to boxes, int64 (n, 4). `fill` has one value for pixels outside the image, or one per channel."""
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
            return crop(batch, np.hstack([corners, after[:, 2:]]), record.fill)
        case Ops():
            batch = _apply_ops(batch, record, rows)
            if np.array_equal(before, after):
                return batch
            return crop(batch, np.hstack([after[:, :2] - before[:, :2], after[:, 2:]]))
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
    boxes[rows] = clip_to_windows(record.boxes_tlhw, before[rows])
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
    input_hw, size_hw = before[:, 2:], after[:, 2:]
    axis_intervals = zip(starts.T.tolist(), ends.T.tolist(), size_hw.T.tolist(), input_hw.T.tolist(), strict=True)
    factors = [[_border_factors(*interval) for interval in zip(*axis, strict=True)] for axis in axis_intervals]
    needs_padding = np.array(
        [any((image_factors != 1).any() for image_factors in pair) for pair in zip(*factors, strict=True)]
    )
    margin = np.where(needs_padding[:, None], np.ceil(np.maximum((ends - starts) / size_hw, 1)) + 1, 0).astype(np.int64)
    start, end, size = (ndd.as_batch(part.astype(np.float32)) for part in (starts + margin, ends + margin, size_hw))
    resized = ndd.resize(
        crop(batch, np.hstack([-margin, input_hw + 2 * margin])) if needs_padding.any() else batch,
        roi_start=start,
        roi_end=end,
        size=size,
        interp_type=types.INTERP_LINEAR,
        antialias=True,
        dtype=ndd.float32,  # with uint8, DALI would round differently from `cast`
    )
    for axis_factors, shape in zip(factors, ((-1, 1, 1), (1, -1, 1)), strict=True) if needs_padding.any() else ():
        arrays = [image_factors.astype(np.float32).reshape(shape) for image_factors in axis_factors]
        resized = resized * ndd.as_batch(arrays).to_device(resized.device)
    return ndd.cast(resized, dtype=ndd.uint8)


def _border_factors(start: float, end: float, count: int, length: int) -> np.ndarray:
    """Return, for each output pixel along one axis, the sum of all filter weights divided by the sum of the weights
    inside the image."""
    scale = (end - start) / count
    reach = max(scale, 1.0)
    centres = start + (np.arange(count) + 0.5) * scale
    factors = np.ones(count)
    edge = np.flatnonzero((centres < reach) | (centres > length - reach))
    taps = np.floor(centres[edge, None] - reach) + np.arange(math.ceil(2 * reach) + 1)
    weights = np.maximum(1 - np.abs(taps + 0.5 - centres[edge, None]) / reach, 0)
    factors[edge] = weights.sum(axis=1) / np.where((taps >= 0) & (taps < length), weights, 0.0).sum(axis=1)
    return factors


def _apply_ops(batch: ndd.Batch, record: Ops, rows: Rows) -> ndd.Batch:
    for column in range(record.codes.shape[1]):
        codes = record.codes[:, column]
        for code in np.unique(codes[codes != NOTHING]).tolist():
            operation, neutral = OPERATIONS[OPS[code]]
            values = np.tile(np.array(neutral), (batch.batch_size, 1))
            values[rows] = np.where((codes == code)[:, None], record.values[:, column, : len(neutral)], neutral)
            batch = operation(batch, values)
    return batch


def _brightness(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Multiply levels by a factor. Half a level is subtracted, because DALI rounds where Pillow truncates."""
    factor = ndd.as_batch(values[:, 0].astype(np.float32))
    shift = ndd.as_batch(np.full(len(values), (1e-5 - 0.5) / 255, np.float32))
    return ndd.brightness_contrast(batch, brightness=factor, brightness_shift=shift, dtype=ndd.uint8)


def _blur(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Apply DALI's Gaussian blur, which mirrors at borders and does not round its weights."""
    sizes, sigmas = values[:, 1::-1].astype(np.int32), values[:, 3:1:-1].astype(np.float32)
    window_size, sigma = (ndd.as_batch(np.ascontiguousarray(part)) for part in (sizes, sigmas))
    return ndd.gaussian_blur(batch, window_size=window_size, sigma=sigma)


Operation = Callable[[ndd.Batch, np.ndarray], ndd.Batch]
# Operations of `gpuload.transforms.program.ops`, each with the values that leave an image unchanged.
# `gpuload.stage.dali.backend.UNSUPPORTED` lists the unsupported operations.
OPERATIONS: Final[dict[str, tuple[Operation, tuple[float, ...]]]] = {
    "identity": (lambda batch, values: batch, ()),
    "brightness": (_brightness, (1.0,)),
    "blur": (_blur, (1.0, 1.0, 1.0, 1.0)),
}
