"""Applies each kind of record to a DALI batch, with the operators of DALI's dynamic mode, as DALI defines them.

Batches contain H×W×C uint8 images of different sizes, or finished images in any layout. Windows are int64 (n, 4), as in
`gpuload.stage.backend.LevelRunner`: a record's inputs have the windows `before`, and its results the windows `after`.
An operator is called once for all images to which it applies, with one parameter per image; all other images keep their
bits. The operators process each image by itself, so an image's result never depends on its batch.

**Resizing** uses `resize`, with antialiasing unless the filter is a plain filter. `resize` also reads pixels outside
the region that it resizes, so images are cropped first: a result depends only on its crop.

**Warps** use `experimental.warp_perspective`. `warp_affine` has no bicubic filter and only one fill for all channels,
and took 461 ms where `warp_perspective` took 59 ms (64 images of 256×256 on the CPU, bilinear, one thread). Both blend
the image with the fill along its border.

**Colours.** Consecutive brightness, contrast, saturation, hue and grayscale operations of an image are one call of
`color_twist`, which applies them in DALI's order: hue and saturation (in YIQ), contrast (around level 128), brightness.
The channels of a grey image can differ by a level. Without saturation and hue, the call is `brightness_contrast`, which
gives the same levels up to rounding in a tenth of the time. `color_twist` writes beyond its memory unless images have
exactly three channels (DALI 2.4.0: the process crashes), so other images only get brightness and contrast.

Solarize, posterize, invert, autocontrast and sharpness are defined as in `nvidia.dali.auto_aug`. Noise saturates at 0
and 255, also where the record asks for values that wrap around. DALI draws the noise of a whole call from one random
state, so noise takes one call per image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from gpuload.stage.dali.engine import apply_to, ndd, types
from gpuload.transforms.program import ops
from gpuload.transforms.program.ops import OPS, Box, Erase, Flip, Ops, Record, Turn, Warp, code, filter_codes
from gpuload.transforms.program.windows import FILTERS, PLAIN, clip_to_windows

__all__ = ["OPERATIONS", "apply_records", "commutes_with_flips"]

KINDS: Final = ("NN", "LINEAR", "CUBIC", "LANCZOS3", "LINEAR", "CUBIC")
INTERPOLATIONS: Final = [getattr(types, f"INTERP_{kind}") for kind in KINDS]  # by code of `FILTERS`
TRANSPOSE: Final = partial(ndd.transpose, perm=[1, 0, 2], transpose_layout=False)
FIRST_CHANNEL: Final = partial(ndd.slice, start=[0], shape=[1], axis_names="C")
AXES: Final = np.eye(2, dtype=np.int32)

# The arguments of `color_twist`: brightness, contrast, saturation and hue, with the values that change nothing. For
# each operation, the index of its argument, or -1; the last entry is for `NOTHING`.
NEUTRAL: Final = np.array([1.0, 1.0, 1.0, 0.0])
SATURATION, HUE = 2, 3
ARGUMENTS: Final = np.full(len(OPS) + 1, -1)
ARGUMENTS[[code(name) for name in ("brightness", "contrast", "saturation", "hue")]] = range(4)
ARGUMENTS[code("grayscale")] = SATURATION  # 0

POSITIONAL: Final = {"sharpness", "blur", "pillow_blur", "noise", "jpeg", "warp"}  # do not commute with flips


def apply_records(batch: ndd.Batch, records: Sequence[Record], windows_tlhw: Sequence[np.ndarray]) -> ndd.Batch:
    """Apply records to a batch; `windows_tlhw` has the windows before each record, and the windows of the results."""
    for record, before, after in zip(records, windows_tlhw, windows_tlhw[1:], strict=False):
        rows = np.arange(len(before)) if record.rows is None else record.rows
        if len(rows) and isinstance(record, ops.CHANGES_PIXELS):
            batch = _apply(batch, record, rows, before[rows], after[rows])
    return batch


def commutes_with_flips(record: Ops) -> bool:
    return POSITIONAL.isdisjoint(OPS[number] for number in np.unique(record.codes).tolist() if number != ops.NOTHING)


def _apply(batch: ndd.Batch, record: Record, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> ndd.Batch:
    """Apply a record to the images at `rows`, which have these windows."""
    # Images that are not resampled are cropped at the end.
    corners, is_cropped, fill = after[:, :2] - before[:, :2], np.ones(len(rows), np.bool_), (0,)
    match record:
        case Flip():
            return apply_to(batch, rows, record.flipped, _flip, np.outer(record.flipped, AXES[record.axis]))
        case Turn():
            batch = apply_to(batch, rows, record.transposed, TRANSPOSE)
            return apply_to(batch, rows, np.any(record.flipped, axis=1), _flip, record.flipped)
        case Erase():
            boxes = clip_to_windows(record.boxes_tlhw, before)
            has_boxes = np.any(np.all(boxes[:, :, 2:], axis=2), axis=1)
            return apply_to(batch, rows, has_boxes, partial(_erase, fill=record.numbers), boxes)
        case Box():
            corners, fill = corners + record.box_tlhw[:, :2], record.fill
            if record.padding_mode is None:
                is_cropped = (record.box_tlhw[:, 2:] == record.size_hw).all(axis=1)
                scale, offsets = record.box_tlhw[:, 2:] / record.size_hw, record.box_tlhw[:, :2] - before[:, :2]
                starts, ends = (offsets + edges * scale for edges in (after[:, :2], after[:, :2] + after[:, 2:]))
                batch = _apply_filters(batch, rows, ~is_cropped, record.filters, _resize, starts, ends, after[:, 2:])
        case Warp():
            is_cropped, matrices = ~record.warped, _matrices(record.coefficients)
            matrices[:, :, 2] += (matrices[:, :, :2] * after[:, None, 1::-1]).sum(axis=2)  # results start at `after`
            warp = partial(_warp, fill=record.fill)
            batch = _apply_filters(batch, rows, record.warped, record.filters, warp, matrices, after[:, 2:])
        case Ops():
            batch = _apply_ops(batch, record, rows, before[:, 2:])
        case _:
            raise TypeError(f"DALI has no operator for {type(record).__name__}")
    is_cropped &= corners.any(axis=1) | (before[:, 2:] != after[:, 2:]).any(axis=1)
    return apply_to(batch, rows, is_cropped, partial(_crop, fill=fill), np.hstack([corners, after[:, 2:]]))


def _apply_filters(
    batch: ndd.Batch,
    rows: np.ndarray,
    where: np.ndarray,
    filters: np.ndarray | str,
    operator: Callable[..., ndd.Batch],
    *arrays: np.ndarray,
) -> ndd.Batch:
    """Call an operator once for the images of each filter. `filters` are as in a `Box`; for the other arguments, see
    `apply_to`."""
    codes = filter_codes(filters, len(rows))
    for number in np.unique(codes[where]).tolist():
        batch = apply_to(batch, rows, where & (codes == number), partial(operator, filter_code=number), *arrays)
    return batch


def _crop(batch: ndd.Batch, tlhw: np.ndarray, fill: Sequence[float] = (0,)) -> ndd.Batch:
    """Crop images to boxes, int64 (n, 4). `fill` has one value for pixels outside the image, or one per channel."""
    start, shape = _ints(tlhw[:, :2]), _ints(tlhw[:, 2:])
    return ndd.slice(
        batch, start=start, shape=shape, axis_names="HW", out_of_bounds_policy="pad", fill_values=list(fill)
    )


def _flip(batch: ndd.Batch, flipped: np.ndarray) -> ndd.Batch:
    return ndd.flip(batch, vertical=_ints(flipped[:, 0]), horizontal=_ints(flipped[:, 1]))


def _erase(batch: ndd.Batch, boxes_tlhw: np.ndarray, fill: Sequence[float]) -> ndd.Batch:
    anchors, shapes = (_floats(part.reshape(len(part), -1)) for part in (boxes_tlhw[..., :2], boxes_tlhw[..., 2:]))
    return ndd.erase(batch, anchor=anchors, shape=shapes, axis_names="HW", fill_value=list(fill))


def _resize(
    batch: ndd.Batch, starts: np.ndarray, ends: np.ndarray, sizes_hw: np.ndarray, filter_code: int
) -> ndd.Batch:
    # DALI would make batches of these two arguments if they were not marked as constants.
    interpolation = ndd.capture.invariant(INTERPOLATIONS[filter_code])
    antialias = ndd.capture.invariant(FILTERS[filter_code] not in PLAIN.values())
    start, end, size = _floats(starts), _floats(ends), _floats(sizes_hw)
    return ndd.resize(batch, roi_start=start, roi_end=end, size=size, interp_type=interpolation, antialias=antialias)


def _matrices(coefficients: np.ndarray) -> np.ndarray:
    """Return the coefficients of `Warp` as matrices (n, 3, 3)."""
    return np.hstack([coefficients, np.ones((len(coefficients), 1))]).reshape(-1, 3, 3)


def _warp(
    batch: ndd.Batch, matrices: np.ndarray, sizes_hw: np.ndarray, filter_code: int, fill: Sequence[float]
) -> ndd.Batch:
    """Warp images. Matrices map results to inputs; (0, 0) is the corner of the first pixel, as in `Warp`."""
    matrix, size, kind = _floats(matrices), _floats(sizes_hw), INTERPOLATIONS[filter_code]
    return ndd.experimental.warp_perspective(batch, matrix=matrix, size=size, interp_type=kind, fill_value=list(fill))


def _apply_ops(batch: ndd.Batch, record: Ops, rows: np.ndarray, sizes_hw: np.ndarray) -> ndd.Batch:
    channels = batch.shape[0][-1]
    codes, values, filters = record.codes.copy(), record.values, filter_codes(record.filters, record.codes.shape)
    codes[codes == code("identity")] = ops.NOTHING
    for column in range(codes.shape[1]):
        batch = _twist(batch, rows, _take_arguments(codes, values, column), channels)
        for number in np.unique(codes[codes[:, column] != ops.NOTHING, column]).tolist():
            is_chosen = codes[:, column] == number
            if OPS[number] == "warp":
                warp, matrices = partial(_warp, fill=record.fill), _matrices(values[:, column])
                batch = _apply_filters(batch, rows, is_chosen, filters[:, column], warp, matrices, sizes_hw)
            else:
                batch = apply_to(batch, rows, is_chosen, OPERATIONS[OPS[number]], values[:, column])
    if record.channels not in (None, channels):
        batch = apply_to(batch, rows, np.ones(len(rows), np.bool_), _repeat if channels == 1 else FIRST_CHANNEL)
    return batch


def _take_arguments(codes: np.ndarray, values: np.ndarray, column: int) -> np.ndarray:
    """Return the arguments of `color_twist`, float64 (n, 4), for the consecutive colour operations of each image that
    start at a column, and replace these operations by `NOTHING`. An image without such operations gets `NEUTRAL`."""
    arguments, entries = np.tile(NEUTRAL, (len(codes), 1)), np.arange(len(codes))
    is_set, continues = np.zeros(arguments.shape, np.bool_), np.ones(len(codes), np.bool_)
    for later_column in range(column, codes.shape[1]):
        indices = ARGUMENTS[codes[:, later_column]]
        is_taken = continues & (indices >= 0) & ~is_set[entries, indices]
        continues &= is_taken | (codes[:, later_column] == ops.NOTHING)
        taken_entries, taken_indices = entries[is_taken], indices[is_taken]
        factors = np.where(codes[is_taken, later_column] == code("grayscale"), 0.0, values[is_taken, later_column, 0])
        factors = np.where(taken_indices == HUE, factors * 360, factors)  # turns to degrees
        arguments[taken_entries, taken_indices] = factors
        is_set[taken_entries, taken_indices] = True
        codes[is_taken, later_column] = ops.NOTHING
    return arguments


def _twist(batch: ndd.Batch, rows: np.ndarray, arguments: np.ndarray, channels: int) -> ndd.Batch:
    is_changed = arguments != NEUTRAL
    is_coloured = is_changed[:, SATURATION:].any(axis=1) & (channels == 3)
    batch = apply_to(batch, rows, is_coloured, _color_twist, arguments)
    is_brightened = is_changed[:, :SATURATION].any(axis=1) & ~is_coloured
    return apply_to(batch, rows, is_brightened, _brightness_contrast, arguments)


def _color_twist(batch: ndd.Batch, arguments: np.ndarray) -> ndd.Batch:
    brightness, contrast, saturation, hue = (_floats(column) for column in arguments.T)
    return ndd.color_twist(batch, brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)


def _brightness_contrast(batch: ndd.Batch, arguments: np.ndarray) -> ndd.Batch:
    return ndd.brightness_contrast(batch, brightness=_floats(arguments[:, 0]), contrast=_floats(arguments[:, 1]))


def _sharpness(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Blend with a smoothed image; borders are mirrored."""
    smooth, identity = np.full((3, 3), 1 / 13), np.zeros((3, 3))
    smooth[1, 1], identity[1, 1] = 5 / 13, 1
    kernels = (1 - values[:, :1, None]) * smooth + values[:, :1, None] * identity
    return ndd.filter(batch, _floats(kernels))


def _autocontrast(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    """Stretch each channel to 0 … 255; a channel with a single level does not change."""
    lowest = ndd.reductions.min(batch, axis_names="HW", keep_dims=True)
    span = ndd.reductions.max(batch, axis_names="HW", keep_dims=True) - lowest
    is_stretched = span > 0
    divisor = span * is_stretched + (is_stretched ^ True) * _operand(batch, 255, np.uint8)
    return ndd.cast_like((batch - lowest * is_stretched) * (255 / divisor), batch)


def _noise(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    def add(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
        [[mean, sigma, high, low, *_]] = values.tolist()
        gaussian: Any = ndd.noise.gaussian  # its type lacks `rng`
        generator = ndd.random.RNG(seed=int(high) << 32 | int(low))
        return gaussian(batch, mean=_floats([mean]), stddev=_floats([sigma]), rng=generator)

    rows = np.arange(len(values))
    for row in rows:
        batch = apply_to(batch, rows, rows == row, add, values)
    return batch


def _jpeg(batch: ndd.Batch, values: np.ndarray) -> ndd.Batch:
    if batch.shape[0][-1] == 1:  # the operator accepts only three channels
        return FIRST_CHANNEL(_jpeg(_repeat(batch), values))
    return ndd.jpeg_compression_distortion(batch, quality=_ints(values[:, 0]))


def _repeat(batch: ndd.Batch) -> ndd.Batch:
    return ndd.cat(batch, batch, batch, axis_name="C")


def _floats(array: Any) -> ndd.Batch:
    return ndd.as_batch(np.ascontiguousarray(array, np.float32))


def _ints(array: np.ndarray) -> ndd.Batch:
    return ndd.as_batch(np.ascontiguousarray(array, np.int32))


def _operand(batch: ndd.Batch, numbers: np.ndarray | float, dtype: type) -> ndd.Batch:
    """Return an operand of DALI's arithmetic: one number per image."""
    array = np.empty((batch.batch_size, 1, 1, 1), dtype)
    array[:, 0, 0, 0] = numbers
    return ndd.as_batch(array).to_device(batch.device)


# All operations but warps and those of `color_twist`. `values` is float64 (n, `VALUES`).
OPERATIONS: Final[dict[str, Callable[[ndd.Batch, np.ndarray], ndd.Batch]]] = {
    "sharpness": _sharpness,
    "solarize": lambda batch, values: (
        batch ^ ((batch >= _operand(batch, values[:, 0], np.float32)) * _operand(batch, 255, np.uint8))
    ),
    "solarize_add": lambda batch, values: ndd.cast_like(
        batch + (batch < _operand(batch, values[:, 0], np.float32)) * _operand(batch, values[:, 1], np.int32), batch
    ),
    "posterize": lambda batch, values: batch & _operand(batch, 256 - 2 ** (8 - values[:, 0]), np.uint8),
    "invert": lambda batch, values: batch ^ _operand(batch, 255, np.uint8),
    "autocontrast": _autocontrast,
    "equalize": lambda batch, values: ndd.equalize(batch),
    "blur": lambda batch, values: ndd.gaussian_blur(
        batch, window_size=_ints(values[:, 1::-1]), sigma=_floats(values[:, 3:1:-1])
    ),
    # DALI's Gaussian blur with Pillow's radius as sigma; DALI chooses the size of the window.
    "pillow_blur": lambda batch, values: ndd.gaussian_blur(batch, sigma=_floats(np.maximum(values[:, 0], 1e-3))),
    "noise": _noise,
    "jpeg": _jpeg,
}
