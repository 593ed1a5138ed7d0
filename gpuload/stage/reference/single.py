"""The reference backend on the CPU, which applies a chain to one image at a time.

An image goes through all its transforms while it is in the CPU's cache, and its result is written only once, into the
memory of the batch. A 224×224 RGB image takes 150 KB as uint8 and 600 KB as float32, whereas a batch takes 38 MB.
The program of a batch is converted once into steps. A step is a function of the image's index in the record's rows and
of the canvas. Each image then goes through its own steps.

This module runs in the stage's process. A runner keeps scratch memory between images, so it must not be shared between
threads. The result for an image does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np
import torch

from gpuload.stage.finish import MAX_LEVELS, Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.canvas import Canvas, make_contiguous
from gpuload.stage.reference.operations import image_operations, mix_image
from gpuload.stage.reference.resample import resize_window
from gpuload.stage.reference.warp import deform, warp_image
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import (
    NOTHING,
    Box,
    ChainMixture,
    Elastic,
    Erase,
    Flip,
    Ops,
    Record,
    Turn,
    Warp,
    filter_codes,
)
from gpuload.transforms.program.ops import code as code_of
from gpuload.transforms.program.windows import FILTERS, clip_to_windows, padded_indices

__all__ = ["SingleRunner"]

Step = Callable[[int, Canvas], None]

WARP: Final = code_of("warp")
AXES: Final = np.eye(2, dtype=np.bool_)
VIEWS: Final = {True: slice(None, None, -1), False: slice(None)}  # the view of an axis, keyed by whether it is flipped


class SingleRunner:
    """A runner that applies programs to batches image by image."""

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._scale, self._bias = (constant.numpy() for constant in finish.constants(torch.device("cpu")))
        self._operations = image_operations()
        self._canvas = Canvas()

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None,
    ) -> Program | None:
        """Apply records as specified in `gpuload.stage.backend.LevelRunner`. Return `late_program`, which is not
        applied."""
        assert images.steps is None
        canvas, pixels = self._canvas, images.pixels.numpy()
        image_steps = self._make_image_steps(program, windows_tlhw, pixels.dtype)
        write = self._make_writer(outputs)
        windows = windows_tlhw[0].copy()
        windows[:, :2] -= images.regions_tlhw[:, :2]
        try:
            for row, (offset, shape, (top, left, height, width)) in enumerate(
                zip(images.offsets.tolist(), images.shapes.tolist(), windows.tolist(), strict=True)
            ):
                image = pixels[offset : offset + prod(shape)].reshape(shape)
                canvas.set(image[top : top + height, left : left + width])
                for index, step in image_steps[row]:
                    step(index, canvas)
                write(row, canvas)
        finally:
            canvas.set(None)  # drop the reference to the ring
        return late_program

    def _make_image_steps(
        self, program: Program, windows_tlhw: tuple[np.ndarray, ...], dtype: np.dtype
    ) -> list[list[tuple[int, Step]]]:
        """Return the steps of each image in a batch of this dtype, each with the image's index in the record's rows."""
        image_steps: list[list[tuple[int, Step]]] = [[] for _ in range(len(program))]
        all_rows = np.arange(len(program))
        for record, (before, after) in zip(program.records, pairwise(windows_tlhw), strict=True):
            rows, steps = all_rows, []
            if record.rows is not None:
                rows, before, after = record.rows, before[record.rows], after[record.rows]
            if not len(rows):
                continue
            if step := self._make_step(record, before, after, dtype):
                steps.append(step)
                is_cut = isinstance(record, Elastic | Ops | ChainMixture) and not np.array_equal(before, after)
                if is_cut or (isinstance(record, Warp) and (record.size_hw != after[:, 2:]).any()):
                    steps.append(_make_cut_step(after))
            for step in steps:
                for index, row in enumerate(rows.tolist()):
                    image_steps[row].append((index, step))
        return image_steps

    def _make_step(self, record: Record, before: np.ndarray, after: np.ndarray, dtype: np.dtype) -> Step | None:
        """Return the step for a record; None if the record changes nothing or is applied only at the end."""
        match record:
            case Flip():
                return _make_turn_step(np.zeros_like(record.flipped), record.flipped[:, None] & AXES[record.axis])
            case Turn():
                return _make_turn_step(record.transposed, record.flipped)
            case Box(padding_mode=None):
                return _make_resize_step(record, before, after)
            case Box():
                return _make_crop_step(record, before, after, dtype)
            case Warp():
                return _make_warp_step(record)
            case Elastic():
                return _make_deform_step(record)
            case Ops():
                return self._make_ops_step(record)
            case ChainMixture():
                return self._make_mixture_step(record)
            case Erase():
                return _make_erase_step(record, before, dtype)
        return None

    def _make_ops_step(self, record: Ops) -> Step:
        codes, values, channels = record.codes.tolist(), record.values.tolist(), record.channels
        filters = filter_codes(record.filters, record.codes.shape).tolist()
        operations = self._operations

        def step(row: int, canvas: Canvas) -> None:
            for position, code in enumerate(codes[row]):
                if code == WARP:
                    image, interpolation = canvas.image(), FILTERS[filters[row][position]]
                    canvas.set(warp_image(image, values[row][position], image.shape[:2], interpolation, record.fill))
                elif code != NOTHING:
                    operations[code](canvas, values[row][position])
            if channels is not None and channels != canvas.channels:
                canvas.set(np.repeat(canvas.image()[:, :, :1], channels, axis=2))

        return step

    def _make_mixture_step(self, record: ChainMixture) -> Step:
        chains = [self._make_ops_step(record.chain(index)) for index in range(record.codes.shape[1])]
        shares = record.weights.astype(np.float32)

        def step(row: int, canvas: Canvas) -> None:
            mix_image(canvas, shares[row], [partial(chain, row, canvas) for chain in chains])

        return step

    def _make_writer(self, outputs: Outputs) -> Step:
        """Return a function that finishes the image on a canvas and writes it to the batch."""
        scale, bias, is_affine = self._scale, self._bias, not self._finish.is_identity
        if outputs[0].dtype in (torch.float16, torch.bfloat16):

            def write(row: int, canvas: Canvas) -> None:
                floats = canvas.floats()
                if is_affine:
                    np.add(np.multiply(floats.array, scale, out=floats.array), bias, out=floats.array)
                outputs[row].copy_(floats.tensor)

            return write
        if isinstance(outputs, torch.Tensor) and not outputs.is_contiguous():
            return self._make_channels_last_writer(outputs.numpy().transpose(0, 2, 3, 1))
        arrays = outputs.numpy() if isinstance(outputs, torch.Tensor) else [output.numpy() for output in outputs]

        def write_array(row: int, canvas: Canvas) -> None:
            array = arrays[row]
            if canvas.is_float:
                floats = canvas.floats().array
                if is_affine:
                    np.add(np.multiply(floats, scale, out=floats), bias, out=array)
                else:
                    np.copyto(array, floats, casting="unsafe")
                return
            np.copyto(array, canvas.image().transpose(2, 0, 1))
            if is_affine:
                np.add(np.multiply(array, scale, out=array), bias, out=array)

        return write_array

    def _make_channels_last_writer(self, arrays: np.ndarray) -> Step:
        """Return a function that writes to an N×H×W×C batch. The constants are repeated along a row, because a loop
        over three channels takes ten times as long as a loop over a row."""
        n, height, width, channels = arrays.shape
        rows = arrays.reshape(n, height, width * channels)
        scale, bias = (
            np.tile(np.broadcast_to(constants.ravel(), channels), width) for constants in (self._scale, self._bias)
        )

        def write(row: int, canvas: Canvas) -> None:
            image = canvas.floats().array.transpose(1, 2, 0) if canvas.is_float else make_contiguous(canvas.image())
            np.copyto(arrays[row], image, casting="unsafe")
            if not self._finish.is_identity:
                np.add(np.multiply(rows[row], scale, out=rows[row]), bias, out=rows[row])

        return write


def _make_cut_step(windows_tlhw: np.ndarray) -> Step:
    windows = windows_tlhw.tolist()

    def step(row: int, canvas: Canvas) -> None:
        (top, left, height, width), image = windows[row], canvas.image()
        if image.shape[:2] != (height, width):
            canvas.set(image[top : top + height, left : left + width])

    return step


def _make_turn_step(transposed: np.ndarray, flipped: np.ndarray) -> Step:
    changes, transposes, flips = (transposed | flipped.any(axis=1)).tolist(), transposed.tolist(), flipped.tolist()

    def step(row: int, canvas: Canvas) -> None:
        if changes[row]:
            image, (upside_down, mirrored) = canvas.image(), flips[row]
            image = image.transpose(1, 0, 2) if transposes[row] else image
            canvas.set(image[VIEWS[upside_down], VIEWS[mirrored]])

    return step


def _make_crop_step(record: Box, before: np.ndarray, after: np.ndarray, dtype: np.dtype) -> Step | None:
    starts, sizes_hw, mode = record.box_tlhw[:, :2] + after[:, :2], record.sizes_hw, str(record.padding_mode)
    is_changed = (starts != before[:, :2]).any(axis=1) | (after[:, 2:] != before[:, 2:]).any(axis=1)
    if not is_changed.any():
        return None  # the decoded or resampled window is already the crop

    def crop(row: int, canvas: Canvas) -> None:
        if not is_changed[row]:
            return
        axis_indices = []
        for axis in (0, 1):
            indices = starts[row, axis] + np.arange(after[row, axis + 2])
            axis_indices.append(padded_indices(indices, int(sizes_hw[row, axis]), mode) - before[row, axis])
        canvas.set(canvas.image()[axis_indices[0][:, None], axis_indices[1]])

    if mode != "constant":
        return crop
    # With a constant fill, the part inside the image is copied as a block, or is a view if there is nothing to fill.
    # Gathering pixels instead made a detection recipe take three times as long.
    inset = np.clip(-starts, 0, after[:, 2:])
    parts_hw = (np.clip(sizes_hw - starts, inset, after[:, 2:]) - inset).tolist()
    corners, insets, results_hw = (starts + inset - before[:, :2]).tolist(), inset.tolist(), after[:, 2:].tolist()
    fill, is_row_changed = np.array(record.fill, dtype), is_changed.tolist()

    def copy(row: int, canvas: Canvas) -> None:
        if not is_row_changed[row]:
            return
        (top, left), (inset_y, inset_x), (height, width) = corners[row], insets[row], parts_hw[row]
        image = canvas.image()
        result = part = image[top : top + height, left : left + width]
        if [height, width] != results_hw[row]:
            result = np.empty((*results_hw[row], image.shape[2]), dtype)
            result[:] = fill
            result[inset_y : inset_y + height, inset_x : inset_x + width] = part
        canvas.set(result)

    return copy


def _make_resize_step(record: Box, before: np.ndarray, after: np.ndarray) -> Step:
    corners = (before[:, :2] - record.box_tlhw[:, :2]).tolist()
    boxes, sizes, windows = record.box_tlhw[:, 2:].tolist(), record.size_hw.tolist(), after.tolist()
    filters = _filter_names(record.filters, len(before))

    def step(row: int, canvas: Canvas) -> None:
        canvas.set(resize_window(canvas.image(), corners[row], boxes[row], sizes[row], windows[row], filters[row]))

    return step


def _make_warp_step(record: Warp) -> Step:
    coefficients, sizes, fill = record.coefficients.tolist(), record.size_hw.tolist(), record.fill
    is_warped, filters = record.warped.tolist(), _filter_names(record.filters, len(sizes))

    def step(row: int, canvas: Canvas) -> None:
        if is_warped[row]:
            canvas.set(warp_image(canvas.image(), coefficients[row], tuple(sizes[row]), filters[row], fill))

    return step


def _make_deform_step(record: Elastic) -> Step:
    def step(row: int, canvas: Canvas) -> None:
        levels = torch.from_numpy(np.array(canvas.image().transpose(2, 0, 1), order="C"))[None]
        canvas.set(deform(levels, record, np.array([row]))[0].permute(1, 2, 0).contiguous().numpy())

    return step


def _filter_names(filters: np.ndarray | str, count: int) -> list[str]:
    return [FILTERS[filter_code] for filter_code in filter_codes(filters, count).tolist()]


def _make_erase_step(record: Erase, before: np.ndarray, dtype: np.dtype) -> Step | None:
    boxes = clip_to_windows(record.boxes_tlhw, before)
    rows = set(np.nonzero(boxes[:, :, 2:].all(axis=2))[0].tolist())
    if not rows:
        return None
    boxes_tlhw, levels = boxes.tolist(), np.array(record.values_for(MAX_LEVELS[dtype.name]), dtype)

    def step(row: int, canvas: Canvas) -> None:
        if row not in rows:
            return
        image = canvas.image().copy()  # the original can be a view of the ring
        for top, left, height, width in boxes_tlhw[row]:
            image[top : top + height, left : left + width] = levels
        canvas.set(image)

    return step
