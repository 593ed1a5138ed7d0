"""From a program to passes: what the fused kernels do to each image of a batch, one pass after the other.

A pass reads pixels as a geometry says (copied, listed in a table, resized, warped, blurred or sharpened), does any
number of operations on single pixels, and writes a part of the result, perhaps mirrored. A pass takes in as many
records of the program as it can: crops and flips before a resize only change where it reads, those after it where it
writes, and whatever maps single pixels is done on the way. A new pass begins where an image has to be whole: before a
second resampling, a neighbourhood, and a statistic of the image. So the number of passes differs between images.

All of it is arithmetic on arrays of the host, for all images of a batch at once. Nothing is kept from batch to batch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpuload.stage.finished import boxes_within
from gpuload.stage.fused import record as R
from gpuload.stage.fused.pointwise import ERASE_BOX, POINTWISE
from gpuload.stage.fused.statistics import STATISTICS
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.warp import nearest_ways, scaled_pixels
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import (
    CHANGES_PIXELS,
    NOTHING,
    OPS,
    VALUES,
    Box,
    Erase,
    Flip,
    Ops,
    Warp,
    code,
    filter_codes,
)
from gpuload.transforms.program.windows import nearest_indices, padded_places

__all__ = ["OPERATIONS", "Passes"]

KERNELS: Final = {code("blur"): R.BLUR, code("sharpness"): R.SHARPNESS}
SINGLE: Final = np.array([name in POINTWISE and name not in STATISTICS for name in OPS])
OF_STATISTICS: Final = np.array([name in STATISTICS for name in OPS])
FAR: Final = 5  # pixels further than this many sigmas from a blur's middle weigh less than a millionth of it each
IDENTITY: Final = code("identity")
WARPED: Final = code("warp")
OPERATIONS: Final = frozenset(POINTWISE) | {OPS[number] for number in KERNELS} | {"warp"}  # that there are passes for
KNOWN: Final = np.array([name in OPERATIONS for name in OPS])


class Passes:
    """The passes of a batch, made by going through its program.

    Args:
        images: as they were decoded.
        windows_tlhw: int64 (B, 4), the part of each that matters.
        channels: of all pixels between passes, 1 or 3; images of one channel are read as three where it is 3.

    Attributes:
        ints, floats: int64 (passes, B, `JOB`) and float64 (passes, B, `FLOATS`), the jobs; the runner fills in where
            a pass reads and writes, except where the first one reads.
        last: int64 (B,), the number of each image's last pass.
    """

    def __init__(self, images: RaggedImages, windows_tlhw: np.ndarray, channels: int) -> None:
        n = len(images)
        self.channels = channels
        self.ints = np.zeros((2, n, R.JOB), np.int64)
        self.floats = np.zeros((2, n, R.FLOATS))
        self.last = np.zeros(n, np.int64)
        self._operations: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._tables: list[np.ndarray] = []
        self._table_length = 0
        first = self.ints[0]
        heights, widths, own = images.shapes.T
        first[:, R.CHANNEL_STEP] = 1 if int(own[0]) == channels else 0
        first[:, R.ROW_STEP] = widths * own
        first[:, R.COLUMN_STEP] = own
        first[:, R.BASE] = images.offsets
        first[:, R.HEIGHT], first[:, R.WIDTH] = heights, widths
        rows = np.arange(n)
        self._whole(rows)
        self._cut(rows, windows_tlhw[:, :2] - images.regions_tlhw[:, :2], windows_tlhw[:, 2:])

    def apply(self, program: Program, windows_tlhw: tuple[np.ndarray, ...]) -> None:
        """Add the records of a program, from window to window."""
        everything = np.arange(len(self.last))
        for number, record in enumerate(program.records):
            rows = everything if record.rows is None else record.rows
            before, after = (windows_tlhw[at][rows] for at in (number, number + 1))
            match record:
                case Flip():
                    self._flip(rows[record.flipped], record.axis)
                case Box(padding_mode=None):
                    self._resize(rows, record, before, after)
                case Box(padding_mode=str(mode)):
                    self._crop(rows, record, mode, before, after)
                case Warp():
                    self._warp(rows, record, before, after)
                case Ops():
                    self._operate(rows, record)
                    self._cut(rows, after[:, :2] - before[:, :2], after[:, 2:])
                case Erase():
                    self._erase(rows, record, boxes_within(record, before))
                case _ if isinstance(record, CHANGES_PIXELS):
                    raise TypeError(f"the fused kernels do not know the record {type(record).__name__}")

    @property
    def count(self) -> int:
        """How many passes there are at most."""
        return int(self.last.max()) + 1

    def packed_operations(self) -> tuple[np.ndarray, np.ndarray]:
        """All operations, those of a pass of an image next to each other: codes int64 (n,) and values float64
        (n, `VALUES`), at least one of each; each job is told where its own begin."""
        if not self._operations:
            return np.zeros(1, np.int64), np.zeros((1, VALUES))
        passes, rows, codes, values = (np.concatenate(parts) for parts in zip(*self._operations, strict=True))
        order = np.lexsort((rows, passes))  # stable: those of one image stay in the order in which they came
        counts = self.ints[..., R.OPERATIONS]
        ends = np.cumsum(counts.ravel()).reshape(counts.shape)
        self.ints[..., R.OPERATIONS_AT] = ends - counts
        return codes[order], values[order]

    def packed_tables(self) -> np.ndarray:
        """All tables of rows and columns, int32."""
        return np.concatenate(self._tables) if self._tables else np.zeros(1, np.int32)

    # -- records of the program ----------------------------------------------------------------------------------------

    def _flip(self, rows: np.ndarray, axis: int) -> None:
        step, length = (R.ROW_STEP, R.HEIGHT) if axis == 0 else (R.COLUMN_STEP, R.WIDTH)
        place, sign, size = (R.Y, R.STEP_Y, R.OUT_HEIGHT) if axis == 0 else (R.X, R.STEP_X, R.OUT_WIDTH)
        open_ = self._is_open(rows)
        for some, first, by, count in ((rows[open_], R.BASE, step, length), (rows[~open_], place, sign, size)):
            at = self.last[some], some
            self.ints[(*at, first)] += (self.ints[(*at, count)] - 1) * self.ints[(*at, by)]
            self.ints[(*at, by)] *= -1

    def _cut(self, rows: np.ndarray, corners: np.ndarray, sizes_hw: np.ndarray) -> None:
        """Keep a box of the result, which is inside it."""
        open_ = self._is_open(rows)
        for axis, step, length, place, sign, size in (
            (0, R.ROW_STEP, R.HEIGHT, R.Y, R.STEP_Y, R.OUT_HEIGHT),
            (1, R.COLUMN_STEP, R.WIDTH, R.X, R.STEP_X, R.OUT_WIDTH),
        ):
            at = self.last[rows], rows
            self.ints[(*at, R.BASE)] += np.where(open_, corners[:, axis] * self.ints[(*at, step)], 0)
            self.ints[(*at, length)] = np.where(open_, sizes_hw[:, axis], self.ints[(*at, length)])
            self.ints[(*at, place)] += np.where(open_, 0, corners[:, axis] * self.ints[(*at, sign)])
            self.ints[(*at, size)] = sizes_hw[:, axis]

    def _crop(self, rows: np.ndarray, box: Box, mode: str, before: np.ndarray, after: np.ndarray) -> None:
        starts = box.box_tlhw[:, :2] + after[:, :2]
        there_start, there_end = before[:, :2], before[:, :2] + before[:, 2:]
        inside = ((starts >= there_start) & (starts + after[:, 2:] <= there_end)).all(axis=1)
        self._cut(rows[inside], (starts - there_start)[inside], after[inside, 2:])
        outside = np.flatnonzero(~inside)
        if not len(outside):
            return
        at = self._opened(rows[outside])
        for some in _of_one_size(after[outside, 2:]):
            here, places = outside[some], []
            for axis in (0, 1):
                wanted = starts[here, axis, None] + np.arange(after[here[0], axis + 2])
                length = box.sizes_hw[here, axis, None]
                found = padded_places(wanted, length, mode) - before[here, axis, None]
                places.append(np.where((wanted >= 0) & (wanted < length) | (mode != "constant"), found, -1))
            self._table(rows[here], places)
        self._fill(at, rows[outside], box.fill)

    def _resize(self, rows: np.ndarray, box: Box, before: np.ndarray, after: np.ndarray) -> None:
        filters = filter_codes(box.filters, len(rows))
        corners, boxes, sizes = before[:, :2] - box.box_tlhw[:, :2], box.box_tlhw[:, 2:], box.size_hw
        same = (boxes == sizes).all(axis=1)
        self._cut(rows[same], (after[:, :2] - corners)[same], after[same, 2:])
        nearest = np.flatnonzero(~same & (filters == R.NEAREST.value))
        if len(nearest):
            self._opened(rows[nearest])
            for row in nearest.tolist():
                places = []
                for axis in (0, 1):
                    lengths = int(boxes[row, axis]), int(sizes[row, axis])
                    window = int(after[row, axis]), int(after[row, axis + 2])
                    places.append((nearest_indices(*lengths, *window) - corners[row, axis])[None])
                self._table(rows[row : row + 1], places)
        filtered = np.flatnonzero(~same & (filters != R.NEAREST.value))
        if len(filtered):
            here = rows[filtered]
            at = self._opened(here)
            self.ints[at, here, R.KIND] = R.RESIZE
            self.ints[at, here, R.FILTER] = filters[filtered]
            for columns, numbers in (
                ((R.BOX_H, R.BOX_W), boxes),
                ((R.SIZE_H, R.SIZE_W), sizes),
                ((R.CORNER_Y, R.CORNER_X), corners),
                ((R.Y, R.X), after),
                ((R.OUT_HEIGHT, R.OUT_WIDTH), after[:, 2:]),
            ):
                for axis, column in enumerate(columns):
                    self.ints[at, here, column] = numbers[filtered, axis]

    def _warp(self, rows: np.ndarray, warp: Warp, before: np.ndarray, after: np.ndarray) -> None:
        still = np.flatnonzero(~warp.warped)
        self._cut(rows[still], (after[:, :2] - before[:, :2])[still], after[still, 2:])
        moved = np.flatnonzero(warp.warped)
        filters = filter_codes(warp.filters, len(rows))[moved]
        self._map(rows[moved], warp, warp.coefficients[moved], filters, after[moved])

    def _map(
        self, rows: np.ndarray, record: Warp | Ops, coefficients: np.ndarray, filters: np.ndarray, windows: np.ndarray
    ) -> None:
        """Warp some images of a record, and make windows of the results."""
        if not len(rows):
            return
        at = self._opened(rows)
        scaling, fixed = nearest_ways(coefficients, windows[:, :2] + windows[:, 2:])
        nearest = filters == R.NEAREST.value
        named = np.flatnonzero(nearest & scaling)
        for some in _of_one_size(windows[named, 2:]):
            here = named[some]
            places = list(scaled_pixels(coefficients[here], tuple(windows[here[0], 2:].tolist()), windows[here, :2]))
            for axis, length in enumerate((R.HEIGHT, R.WIDTH)):
                ends = self.ints[at[here], rows[here], length][:, None]
                places[axis] = np.where(places[axis] < ends, places[axis], -1)
            self._table(rows[here], places)
        found = np.flatnonzero(~(nearest & scaling))
        here, at_found = rows[found], at[found]
        self.ints[at_found, here, R.KIND] = R.WARP
        self.ints[at_found, here, R.FILTER] = np.where(nearest & fixed, R.FIXED_POINT.value, filters)[found]
        self.floats[at_found, here, : coefficients.shape[1]] = coefficients[found]
        for axis, (place, size) in enumerate(((R.Y, R.OUT_HEIGHT), (R.X, R.OUT_WIDTH))):
            self.ints[at_found, here, place] = windows[found, axis]
            self.ints[at_found, here, size] = windows[found, axis + 2]
        self._fill(at, rows, record.fill)

    def _operate(self, rows: np.ndarray, ops: Ops) -> None:
        filters = filter_codes(ops.filters, ops.codes.shape)
        for turn, codes in enumerate(ops.codes.T):
            values = ops.values[:, turn]
            done = (codes != NOTHING) & (codes != IDENTITY)
            if unknown := codes[done & ~KNOWN[codes]].tolist():
                raise TypeError(f"{OPS[unknown[0]]} is no operation that the fused kernels know")
            single = np.flatnonzero(done & SINGLE[codes])
            self._single(rows[single], codes[single], values[single])
            counted = np.flatnonzero(done & OF_STATISTICS[codes])
            if len(counted):
                self._begin(rows[counted][~self._is_dense(rows[counted])])
                self.ints[self.last[rows[counted]], rows[counted], R.STATISTICS_AT] = 1
                self._single(rows[counted], codes[counted], values[counted])
            warped = np.flatnonzero(codes == WARPED)
            if len(warped):
                sizes = self._sizes(rows[warped])
                windows = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
                self._map(rows[warped], ops, values[warped], filters[warped, turn], windows)
            for number, kind in KERNELS.items():
                here = np.flatnonzero(codes == number)
                if len(here):
                    self._neighbourhood(rows[here], kind, values[here])

    def _neighbourhood(self, rows: np.ndarray, kind: Any, values: np.ndarray) -> None:
        at = self._opened(rows)
        self.ints[at, rows, R.KIND] = kind
        if kind is R.BLUR:
            for axis, size, sigma in ((0, R.KERNEL_W, R.SIGMA_X), (1, R.KERNEL_H, R.SIGMA_Y)):
                reach = np.minimum(values[:, axis] // 2, np.ceil(FAR * values[:, axis + 2]))
                self.ints[at, rows, size], self.floats[at, rows, sigma] = 2 * reach + 1, values[:, axis + 2]
        else:
            self.floats[at, rows, R.FACTOR] = values[:, 0]

    def _erase(self, rows: np.ndarray, erase: Erase, boxes_tlhw: np.ndarray) -> None:
        levels = np.broadcast_to(np.array(erase.numbers, np.float64), self.channels)
        for boxes in boxes_tlhw.transpose(1, 0, 2):
            there = np.flatnonzero(boxes[:, 2:].all(axis=1))
            here, at = rows[there], self.last[rows[there]]
            values = np.zeros((len(there), VALUES))
            for axis, (place, sign) in enumerate(((R.Y, R.STEP_Y), (R.X, R.STEP_X))):
                # Operations see coordinates of the geometry's result, which may be mirrored and cut afterwards.
                start, length = boxes[there, axis], boxes[there, axis + 2]
                steps = self.ints[at, here, sign]
                values[:, axis] = self.ints[at, here, place] + np.where(steps > 0, start, -(start + length - 1))
                values[:, axis + 2] = length
            values[:, 4 : 4 + self.channels] = levels
            self._single(here, np.full(len(here), ERASE_BOX, np.int64), values)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _single(self, rows: np.ndarray, codes: np.ndarray, values: np.ndarray) -> None:
        """One more operation on single pixels for each of some images."""
        if len(rows):
            self._operations.append((self.last[rows], rows, codes, values))
            self.ints[self.last[rows], rows, R.OPERATIONS] += 1

    def _is_open(self, rows: np.ndarray) -> np.ndarray:
        """Whether the passes of some images only choose pixels so far."""
        at = self.last[rows], rows
        return (self.ints[(*at, R.KIND)] == R.COPY.value) & (self.ints[(*at, R.OPERATIONS)] == 0)

    def _is_dense(self, rows: np.ndarray) -> np.ndarray:
        """Whether their sources also lie in memory without gaps, so that their pixels can be counted."""
        own = self.ints[self.last[rows], rows]
        plain = (own[:, R.CHANNEL_STEP] == 1) & (own[:, R.COLUMN_STEP] == self.channels)
        return self._is_open(rows) & plain & (own[:, R.ROW_STEP] == own[:, R.WIDTH] * self.channels)

    def _opened(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of passes of some images in which nothing is done yet; new ones where needed."""
        self._begin(rows[~self._is_open(rows)])
        return self.last[rows]

    def _begin(self, rows: np.ndarray) -> None:
        """Begin a new pass for some images, which reads what the last one wrote."""
        if not len(rows):
            return
        sizes = self._sizes(rows)
        self.last[rows] += 1
        if self.last.max() == len(self.ints):
            self.ints = np.concatenate([self.ints, np.zeros_like(self.ints)])
            self.floats = np.concatenate([self.floats, np.zeros_like(self.floats)])
        at = self.last[rows], rows
        for column, numbers in (
            (R.CHANNEL_STEP, 1),
            (R.COLUMN_STEP, self.channels),
            (R.ROW_STEP, sizes[:, 1] * self.channels),
            (R.HEIGHT, sizes[:, 0]),
            (R.WIDTH, sizes[:, 1]),
        ):
            self.ints[(*at, column)] = numbers
        self._whole(rows)

    def _whole(self, rows: np.ndarray) -> None:
        """Write all that is read, as it is."""
        at = self.last[rows], rows
        self.ints[(*at, R.OUT_HEIGHT)] = self.ints[(*at, R.HEIGHT)]
        self.ints[(*at, R.OUT_WIDTH)] = self.ints[(*at, R.WIDTH)]
        self.ints[(*at, R.STEP_Y)] = self.ints[(*at, R.STEP_X)] = 1

    def _sizes(self, rows: np.ndarray) -> np.ndarray:
        own = self.ints[self.last[rows], rows]
        return own[:, [R.OUT_HEIGHT.value, R.OUT_WIDTH.value]]

    def _table(self, rows: np.ndarray, places: list[np.ndarray]) -> None:
        """Let passes read the pixels of these rows and columns, (n, rows) and (n, columns)."""
        at = self.last[rows], rows
        both = np.concatenate(places, axis=1).astype(np.int32)
        self.ints[(*at, R.KIND)] = R.TABLE
        self.ints[(*at, R.TABLE_AT)] = self._table_length + np.arange(len(rows)) * both.shape[1]
        self.ints[(*at, R.TABLE_ROWS)] = places[0].shape[1]
        self.ints[(*at, R.OUT_HEIGHT)], self.ints[(*at, R.OUT_WIDTH)] = places[0].shape[1], places[1].shape[1]
        self._tables.append(both.ravel())
        self._table_length += both.size

    def _fill(self, at: np.ndarray, rows: np.ndarray, fill: tuple[float, ...]) -> None:
        self.floats[at, rows, R.FILL : R.FILL + 3] = np.broadcast_to(np.array(fill, np.float64), 3)


def _of_one_size(sizes_hw: np.ndarray) -> list[np.ndarray]:
    """The indices of equal sizes, for each size that occurs."""
    _, which = np.unique(sizes_hw, axis=0, return_inverse=True)
    return [np.flatnonzero(which == number) for number in range(int(which.max()) + 1)] if len(which) else []
