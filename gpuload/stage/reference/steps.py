"""What each kind of parameters does to one image on the CPU.

A `Steps` turns what was drawn for a batch into a list of steps, functions of (row, canvas), made once for a batch; each
image is then taken through them. Keeps scratch memory between batches; used by one thread of the stage's process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from gpuload import transforms as T
from gpuload.stage.finished import boxes_within
from gpuload.stage.reference.canvas import Canvas
from gpuload.stage.reference.mixture import mix_image
from gpuload.stage.reference.operations import SingleOperations, canvas_in_channels, warp_canvas
from gpuload.stage.reference.resample import Resampler
from gpuload.stage.reference.warp import warp_image
from gpuload.transforms.program.ops import FILTERS, NOTHING, Box, Branches, Erase, Flip, Mixture, Ops, Warp
from gpuload.transforms.program.ops import code as code_of
from gpuload.transforms.program.windows import padded_places

__all__ = ["Step", "Steps"]

# What is done to the canvas for the image of a row.
Step = Callable[[int, Canvas], None]

WARP: Final = code_of("warp")
MIRROR = {0: (slice(None, None, -1),), 1: (slice(None), slice(None, None, -1))}


class Steps:
    """Makes steps.

    Args:
        masks: for masks, which are only moved, and by the nearest pixel.
    """

    def __init__(self, *, masks: bool = False) -> None:
        self._masks = masks
        self._operations = SingleOperations()
        self._resamplers: list[Resampler] = []
        self._used = 0

    def of(self, draws: T.Draws, windows_tlhw: tuple[np.ndarray, ...]) -> list[Step]:
        """The steps for a batch, from window to window."""
        self._used = 0
        return self._line(draws, windows_tlhw)

    def _line(self, draws: T.Draws, windows: tuple[np.ndarray, ...]) -> list[Step]:
        steps = []
        for index, (transform, params) in enumerate(zip(draws.transforms, draws.params, strict=True)):
            step = self._step(transform, params, draws.sizes_hw[index], windows[index], windows[index + 1])
            if step is not None:
                steps.append(step)
        return steps

    def _step(
        self, transform: Any, params: Any, sizes_hw: np.ndarray, before: np.ndarray, after: np.ndarray
    ) -> Step | None:
        """What a transform does, from window to window; None where it is part of the chain's end."""
        match params:
            case Flip():
                return _flip(params)
            case Box() if transform.pads:
                fill = transform.outside(masks=self._masks)
                return _crop(params, transform.padding_mode, fill, sizes_hw, before, after)
            case Box():
                filters = self._filters(transform, params, len(before))
                return _resize(params, before, after, filters, self._resampler())
            case Warp():
                fill = transform.outside(masks=self._masks)
                return _warp(params, self._filters(transform, params, len(before)), fill, before, after)
            case Ops() | Mixture() | Erase() if self._masks:
                return _narrow(before, after)
            case Ops():
                return self._operate(transform, params, before, after)
            case Mixture():
                return self._mix(transform, params, before, after)
            case Erase():
                return _erase(transform, params, before)
            case Branches():
                return self._branch(params, after)
        return None

    def _resampler(self) -> Resampler:
        """One for each resize of a chain: a result is valid until the next call."""
        if self._used == len(self._resamplers):
            self._resamplers.append(Resampler())
        self._used += 1
        return self._resamplers[self._used - 1]

    def _filters(self, transform: Any, params: Any, count: int) -> list[str]:
        if self._masks:
            return ["nearest"] * count
        if params.filters is None:
            return [transform.interpolation] * count
        return [FILTERS[number] for number in params.filters.tolist()]

    def _operate(self, transform: Any, params: Ops, before: np.ndarray, after: np.ndarray) -> Step:
        codes, values = params.codes.tolist(), params.values.tolist()
        filters = None if params.filters is None else params.filters.tolist()
        apply = self._operations.apply
        windows = None if np.array_equal(before, after) else after.tolist()

        def step(row: int, canvas: Canvas) -> None:
            for number, code in enumerate(codes[row]):
                if filters is not None and code == WARP:
                    warp_canvas(canvas, values[row][number], FILTERS[filters[row][number]], transform)
                elif code != NOTHING:
                    apply(canvas, code, values[row][number], transform)
            if windows is not None:
                _cut(canvas, windows[row])
            canvas_in_channels(canvas, transform)

        return step

    def _mix(self, transform: Any, params: Mixture, before: np.ndarray, after: np.ndarray) -> Step:
        codes, values = params.codes.tolist(), params.values.tolist()
        shares = params.weights.astype(np.float32)
        apply = self._operations.apply
        windows = None if np.array_equal(before, after) else after.tolist()

        def step(row: int, canvas: Canvas) -> None:
            def chain(number: int) -> None:
                for code, numbers in zip(codes[row][number], values[row][number], strict=True):
                    if code != NOTHING:
                        apply(canvas, code, numbers, transform)

            mix_image(canvas, shares[row], [partial(chain, number) for number in range(len(codes[row]))])
            if windows is not None:
                _cut(canvas, windows[row])

        return step

    def _branch(self, params: Branches, after: np.ndarray) -> Step:
        ways: list[tuple[list[Step], int] | None] = [None] * params.count
        start = most = self._used
        for rows, draws in zip(params.rows, params.draws, strict=True):
            self._used = start  # an image goes one way, so all ways have the same scratch memory
            steps = self._line(draws, draws.windows_for(after[rows]))
            most = max(most, self._used)
            for place, row in enumerate(rows.tolist()):
                ways[row] = steps, place
        self._used = most

        def step(row: int, canvas: Canvas) -> None:
            way = ways[row]
            if way is not None:
                for inner in way[0]:
                    inner(way[1], canvas)

        return step


def _cut(canvas: Canvas, window: list[int]) -> None:
    top, left, height, width = window
    canvas.set(canvas.image()[top : top + height, left : left + width])


def _narrow(before: np.ndarray, after: np.ndarray) -> Step | None:
    """From window to window, with nothing done."""
    if np.array_equal(before, after):
        return None
    windows = np.concatenate([after[:, :2] - before[:, :2], after[:, 2:]], axis=1).tolist()
    return lambda row, canvas: _cut(canvas, windows[row])


def _flip(params: Flip) -> Step:
    flags, view = params.flipped.tolist(), MIRROR[params.axis]

    def step(row: int, canvas: Canvas) -> None:
        if flags[row]:
            canvas.set(canvas.image()[view])

    return step


def _crop(
    params: Box, padding_mode: str, fill: Any, sizes_hw: np.ndarray, before: np.ndarray, after: np.ndarray
) -> Step | None:
    starts = params.box_tlhw[:, :2] + after[:, :2]
    outside = (starts != before[:, :2]).any(axis=1) | (after[:, 2:] != before[:, 2:]).any(axis=1)
    if not outside.any():
        return None  # the window that was decoded, or resampled, is the crop
    if padding_mode == "constant":
        return _crop_filled(starts, outside.tolist(), fill, sizes_hw, before, after[:, 2:])

    def step(row: int, canvas: Canvas) -> None:
        if not outside[row]:
            return
        at = []
        for axis in (0, 1):
            wanted = starts[row, axis] + np.arange(after[row, axis + 2])
            at.append(padded_places(wanted, int(sizes_hw[row, axis]), padding_mode) - before[row, axis])
        canvas.set(canvas.image()[at[0][:, None], at[1]])

    return step


def _crop_filled(
    starts: np.ndarray,
    outside: list[bool],
    fill: Any,
    sizes_hw: np.ndarray,
    before: np.ndarray,
    results_hw: np.ndarray,
) -> Step:
    """What there is of the image is copied at once, or only looked at where nothing is to be filled: a detection recipe
    took three times as long when pixels were gathered."""
    first = np.clip(-starts, 0, results_hw)
    lengths = np.clip(sizes_hw - starts, first, results_hw) - first
    corners, firsts, sizes = (starts + first - before[:, :2]).tolist(), first.tolist(), results_hw.tolist()
    parts, fill = lengths.tolist(), np.array(fill, np.uint8)

    def step(row: int, canvas: Canvas) -> None:
        if not outside[row]:
            return
        (top, left), (down, across), (height, width) = corners[row], firsts[row], parts[row]
        image = canvas.image()
        there = image[top : top + height, left : left + width]
        if [height, width] != sizes[row]:
            there, part = np.empty((*sizes[row], image.shape[2]), np.uint8), there
            there[:] = fill
            there[down : down + height, across : across + width] = part
        canvas.set(there)

    return step


def _resize(params: Box, before: np.ndarray, after: np.ndarray, filters: list[str], resampler: Resampler) -> Step:
    corners = (before[:, :2] - params.box_tlhw[:, :2]).tolist()
    boxes, sizes, windows = params.box_tlhw[:, 2:].tolist(), params.size_hw.tolist(), after.tolist()

    def step(row: int, canvas: Canvas) -> None:
        box, size, window, interpolation = boxes[row], sizes[row], windows[row], filters[row]
        if window[:2] == [0, 0] and window[2:] == size != box and interpolation != "nearest":
            canvas.set(resampler.whole(canvas.planes(), (size[0], size[1]), interpolation))
            return
        result = resampler.window(
            canvas.image(), tuple(corners[row]), tuple(box), tuple(size), tuple(window), interpolation
        )
        canvas.set(result)

    return step


def _warp(params: Warp, filters: list[str], fill: Any, before: np.ndarray, after: np.ndarray) -> Step:
    coefficients, sizes = params.coefficients.tolist(), params.size_hw.tolist()
    warped, windows = params.warped.tolist(), after.tolist()

    def step(row: int, canvas: Canvas) -> None:
        top, left, height, width = windows[row]
        if warped[row]:
            canvas.set(warp_image(canvas.image(), coefficients[row], tuple(sizes[row]), filters[row], fill))
        image = canvas.image()
        if image.shape[:2] != (height, width):
            canvas.set(image[top : top + height, left : left + width])

    return step


def _erase(transform: Any, params: Erase, before: np.ndarray) -> Step | None:
    boxes = boxes_within(params, before)
    rows = set(np.nonzero(boxes[:, :, 2:].all(axis=2))[0].tolist())
    if not rows:
        return None
    places, levels = boxes.tolist(), np.array(transform.numbers, np.uint8)

    def step(row: int, canvas: Canvas) -> None:
        if row not in rows:
            return
        image = canvas.image().copy()  # it may lie in the ring
        for top, left, height, width in places[row]:
            image[top : top + height, left : left + width] = levels
        canvas.set(image)

    return step
