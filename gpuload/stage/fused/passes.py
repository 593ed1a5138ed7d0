"""From a program to passes: what the fused kernels do to each image of a batch, one pass after the other.

A pass reads pixels as a geometry says (copied, listed in a table, resized, warped, blurred or sharpened), does any
number of operations on single pixels, and writes a part of the result, perhaps mirrored. A pass takes in as many
records of the program as it can: crops and flips before a resize only change where it reads, those after it where it
writes, and whatever maps single pixels is done on the way. A new pass begins where an image has to be whole: before a
second resampling, a neighbourhood, and a statistic of the image. So the number of passes differs between images.

All of it is arithmetic on arrays of the host, for all images of a batch at once. Nothing is kept from batch to batch.
Most batches treat all images alike: as long as they do, a number of all jobs is read and set as a view of memory where
it lies for image after image, which is three times as fast as by lists of passes and rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from gpuload.stage.finished import boxes_within
from gpuload.stage.fused.pointwise import ERASE_BOX, POINTWISE
from gpuload.stage.fused.record import FLOATS, JOB
from gpuload.stage.fused.record import PLAIN as R
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
FAR: Final = 5  # pixels further than this many sigmas from a blur's middle weigh less than a millionth of it each
FAR_OUTSIDE: Final = 2.0**31  # pixels; more than any image has
OPERATIONS: Final = frozenset(POINTWISE) | {OPS[number] for number in KERNELS} | {"warp"}  # that there are passes for
WARPED: Final = code("warp")
# What an operation needs, by its code; the last is that of no operation.
IDLE, SINGLE, STATISTIC, GEOMETRY, UNKNOWN = range(5)


def _need(name: str) -> int:
    if name == "identity":
        return IDLE
    if name in STATISTICS:
        return STATISTIC
    return SINGLE if name in POINTWISE else GEOMETRY if name in OPERATIONS else UNKNOWN


NEEDS: Final = np.array([*map(_need, OPS), IDLE])
assert NEEDS[NOTHING] == IDLE


class Passes:
    """The passes of a batch, made by going through its program.

    Args:
        images: as they were decoded.
        windows_tlhw: int64 (B, 4), the part of each that matters.
        channels: of all pixels between passes, 1 or 3; images of one channel are read as three where it is 3.

    Attributes:
        jobs, floats: int64 (passes, `JOB`, B) and float64 (passes, B, `FLOATS`), the jobs; the runner fills in where
            a pass reads and writes, except where the first one reads.
        last: int64 (B,), the number of each image's last pass.
    """

    def __init__(self, images: RaggedImages, windows_tlhw: np.ndarray, channels: int) -> None:
        n = len(images)
        self.channels = channels
        self.jobs = np.zeros((2, JOB, n), np.int64)
        self.floats = np.zeros((2, n, FLOATS))
        self.last = np.zeros(n, np.int64)
        self._everything = np.arange(n)
        self._level: int | None = 0  # the last pass of all images; None: they differ
        self._open = np.ones(n, np.bool_)  # whether the last pass only chooses pixels so far
        self._operations: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._tables: list[np.ndarray] = []
        self._table_length = 0
        first = self.jobs[0]
        heights, widths, own = images.shapes.T
        first[R.CHANNEL_STEP] = 1 if int(own[0]) == channels else 0
        first[R.ROW_STEP] = widths * own
        first[R.COLUMN_STEP] = own
        first[R.BASE] = images.offsets
        first[R.HEIGHT], first[R.WIDTH] = heights, widths
        self._whole(0, slice(None))
        self._cut(self._everything, images.regions_tlhw, windows_tlhw)

    def apply(self, program: Program, windows_tlhw: tuple[np.ndarray, ...]) -> None:
        """Add the records of a program, from window to window."""
        for number, record in enumerate(program.records):
            before, after = windows_tlhw[number], windows_tlhw[number + 1]
            rows = self._everything
            if record.rows is not None:
                rows, before, after = record.rows, before[record.rows], after[record.rows]
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
                    self._cut(rows, before, after)
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
        jobs, codes, values = self._operations[0]
        if len(self._operations) > 1:  # those of one record lie next to each other already
            jobs, codes, values = (np.concatenate(parts) for parts in zip(*self._operations, strict=True))
            order = np.argsort(jobs, kind="stable")  # those of one job stay in the order in which they came
            jobs, codes, values = jobs[order], codes[order], values[order]
        shape = len(self.jobs), len(self.last)
        first = np.zeros(shape, np.int64)
        first.reshape(-1)[jobs[::-1]] = np.arange(len(jobs) - 1, -1, -1)  # the one that is set last stays
        self.jobs[:, R.OPERATIONS_AT] = first
        self.jobs[:, R.OPERATIONS] = np.bincount(jobs, minlength=first.size).reshape(shape)
        return codes, values

    def packed_tables(self) -> np.ndarray:
        """All tables of rows and columns, int32."""
        return np.concatenate(self._tables) if self._tables else np.zeros(1, np.int32)

    def set_last(self, numbers: Iterable[tuple[int, Any]]) -> None:
        """Set numbers of all images' last passes: which one, and int64 (B,) or one for all."""
        at, here = self._at(self._everything)
        for column, own in numbers:
            self.jobs[at, column, here] = own

    # -- records of the program ----------------------------------------------------------------------------------------

    def _flip(self, rows: np.ndarray, axis: int) -> None:
        step, length = (R.ROW_STEP, R.HEIGHT) if axis == 0 else (R.COLUMN_STEP, R.WIDTH)
        place, sign, size = (R.Y, R.STEP_Y, R.OUT_HEIGHT) if axis == 0 else (R.X, R.STEP_X, R.OUT_WIDTH)
        open_ = self._open[rows]
        for which, first, by, count in ((open_, R.BASE, step, length), (~open_, place, sign, size)):
            if not len(some := _those(rows, which)):
                continue
            at, some = self._at(some)
            steps = self.jobs[at, by, some]
            self.jobs[at, first, some] += (self.jobs[at, count, some] - 1) * steps
            self.jobs[at, by, some] = -steps

    def _cut(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Keep a part of the result: windows `after`, each inside the one of `before` that the result is."""
        if before is after or np.array_equal(before, after):
            return
        open_ = self._open[rows]
        for which, is_open in ((open_, True), (~open_, False)):
            entries = np.flatnonzero(which)
            if not len(entries):
                continue
            at, some = self._at(rows[entries])
            for axis, step, length, place, sign, size in (
                (0, R.ROW_STEP, R.HEIGHT, R.Y, R.STEP_Y, R.OUT_HEIGHT),
                (1, R.COLUMN_STEP, R.WIDTH, R.X, R.STEP_X, R.OUT_WIDTH),
            ):
                corner, own = after[entries, axis] - before[entries, axis], after[entries, axis + 2]
                if is_open:
                    self.jobs[at, R.BASE, some] += corner * self.jobs[at, step, some]
                    self.jobs[at, length, some] = own
                else:
                    self.jobs[at, place, some] += corner * self.jobs[at, sign, some]
                self.jobs[at, size, some] = own

    def _crop(self, rows: np.ndarray, box: Box, mode: str, before: np.ndarray, after: np.ndarray) -> None:
        wanted = after.copy()
        wanted[:, :2] += box.box_tlhw[:, :2]
        starts = wanted[:, :2]
        there_start, there_end = before[:, :2], before[:, :2] + before[:, 2:]
        inside = ((starts >= there_start) & (starts + after[:, 2:] <= there_end)).all(axis=1)
        self._cut(rows[inside], before[inside], wanted[inside])
        outside = np.flatnonzero(~inside)
        if not len(outside):
            return
        at = self._opened(rows[outside])
        for some in _of_one_size(after[outside, 2:]):
            here, places = outside[some], []
            for axis in (0, 1):
                indices = starts[here, axis, None] + np.arange(after[here[0], axis + 2])
                length = box.sizes_hw[here, axis, None]
                found = padded_places(indices, length, mode) - before[here, axis, None]
                places.append(np.where((indices >= 0) & (indices < length) | (mode != "constant"), found, -1))
            self._table(rows[here], self.last[rows[here]], places)
        self._fill(at, rows[outside], box.fill)

    def _resize(self, rows: np.ndarray, box: Box, before: np.ndarray, after: np.ndarray) -> None:
        boxes, sizes = box.box_tlhw, box.size_hw
        same = (boxes[:, 2] == sizes[:, 0]) & (boxes[:, 3] == sizes[:, 1])
        filters = filter_codes(box.filters, len(rows))
        is_nearest = filters == R.NEAREST
        if (still := _entries(same)) is not None:
            wanted = after[still].copy()
            wanted[:, :2] += boxes[still, :2]
            self._cut(rows[still], before[still], wanted)
        if (nearest := _entries(~same & is_nearest)) is not None:
            self._opened(rows[nearest])
            corners = before[:, :2] - boxes[:, :2]
            for row in np.arange(len(rows))[nearest].tolist():
                places = []
                for axis in (0, 1):
                    lengths = int(boxes[row, axis + 2]), int(sizes[row, axis])
                    window = int(after[row, axis]), int(after[row, axis + 2])
                    places.append((nearest_indices(*lengths, *window) - corners[row, axis])[None])
                self._table(rows[row : row + 1], self.last[rows[row : row + 1]], places)
        if (filtered := _entries(~(same | is_nearest))) is not None:
            here = rows[filtered]
            self._opened(here)
            self._open[here] = False
            at, here = self._at(here)
            before, after, boxes, sizes = (windows[filtered] for windows in (before, after, boxes, sizes))
            self.jobs[at, R.KIND, here] = R.RESIZE
            self.jobs[at, R.FILTER, here] = filters[filtered]
            for axis, columns in enumerate(
                (
                    (R.BOX_H, R.SIZE_H, R.CORNER_Y, R.Y, R.OUT_HEIGHT),
                    (R.BOX_W, R.SIZE_W, R.CORNER_X, R.X, R.OUT_WIDTH),
                )
            ):
                corners = before[:, axis] - boxes[:, axis]
                numbers = boxes[:, axis + 2], sizes[:, axis], corners, after[:, axis], after[:, axis + 2]
                for column, own in zip(columns, numbers, strict=True):
                    self.jobs[at, column, here] = own

    def _warp(self, rows: np.ndarray, warp: Warp, before: np.ndarray, after: np.ndarray) -> None:
        still = ~warp.warped
        self._cut(rows[still], before[still], after[still])
        moved = np.flatnonzero(warp.warped)
        filters = filter_codes(warp.filters, len(rows))[moved]
        if len(moved):
            at = self._opened(rows[moved])
            self._map(rows[moved], at, warp.fill, warp.coefficients[moved], filters, after[moved])

    def _map(
        self,
        rows: np.ndarray,
        at: np.ndarray,
        fill: tuple[float, ...],
        coefficients: np.ndarray,
        filters: np.ndarray,
        windows: np.ndarray,
    ) -> None:
        """Warp images in their passes `at`, and make windows of the results."""
        nearest = filters == R.NEAREST
        if nearest.any():
            scaling, fixed = nearest_ways(coefficients, windows[:, :2] + windows[:, 2:])
            filters = np.where(nearest & fixed, R.FIXED_POINT, filters)
            nearest &= scaling
            named = np.flatnonzero(nearest)
            for some in _of_one_size(windows[named, 2:]):
                here = named[some]
                size = tuple(windows[here[0], 2:].tolist())
                lengths = [self.jobs[at[here], length, rows[here], None] for length in (R.HEIGHT, R.WIDTH)]
                places = _shifted(coefficients[here], size, windows[here, :2], lengths)
                if places is None:
                    found = scaled_pixels(coefficients[here], size, windows[here, :2])
                    places = [np.where(own < end, own, -1) for own, end in zip(found, lengths, strict=True)]
                self._table(rows[here], at[here], places)
        if (found := _entries(~nearest)) is not None:
            here, there = rows[found], at[found]
            self._open[here] = False
            self.jobs[there, R.KIND, here] = R.WARP
            self.jobs[there, R.FILTER, here] = filters[found]
            self.floats[there, here, : coefficients.shape[1]] = coefficients[found]
            for axis, (place, size) in enumerate(((R.Y, R.OUT_HEIGHT), (R.X, R.OUT_WIDTH))):
                self.jobs[there, place, here] = windows[found, axis]
                self.jobs[there, size, here] = windows[found, axis + 2]
        self._fill(at, rows, fill)

    def _operate(self, rows: np.ndarray, ops: Ops) -> None:
        """All operations of a record at once: they leave sizes as they are, so it is known beforehand in which pass
        each is done."""
        codes, needs = ops.codes, NEEDS[ops.codes]
        if (most := int(needs.max(initial=IDLE))) == IDLE:
            return
        if most == UNKNOWN:
            unknown = OPS[int(codes[needs == UNKNOWN][0])]
            raise TypeError(f"{unknown} is no operation that the fused kernels know")
        begins = needs >= STATISTIC
        if begins.any():
            self._first_needs(rows, needs, begins)
        turns = np.cumsum(begins, axis=1)
        passes = self.last[rows][:, None] + turns
        for turn in range(int(turns[:, -1].max())):
            self._begin(_those(rows, turns[:, -1] > turn))
        self._open[rows[needs.max(axis=1) > IDLE]] = False
        if most >= STATISTIC:
            entries, turn = np.nonzero(needs == STATISTIC)
            self.jobs[passes[entries, turn], R.STATISTICS_AT, rows[entries]] = 1
        if most == GEOMETRY:
            self._neighbourhoods(rows, passes, ops)
        pointwise = (needs == SINGLE) | (needs == STATISTIC)
        jobs = passes * len(self.last) + rows[:, None]
        if not pointwise.any():
            return
        if pointwise.all():
            self._operations.append((jobs.ravel(), codes.ravel(), ops.values.reshape(-1, VALUES)))
        else:
            self._operations.append((jobs[pointwise], codes[pointwise], ops.values[pointwise]))

    def _first_needs(self, rows: np.ndarray, needs: np.ndarray, begins: np.ndarray) -> None:
        """Take back that a pass begins with an image's first operation, where the last one will do."""
        entries = np.flatnonzero(self._open[rows])
        if not len(entries):
            return
        first = (needs[entries] > IDLE).argmax(axis=1)
        kinds = needs[entries, first]
        does = (kinds == GEOMETRY) | ((kinds == STATISTIC) & self._is_dense(rows[entries]))
        begins[entries[does], first[does]] = False

    def _neighbourhoods(self, rows: np.ndarray, passes: np.ndarray, ops: Ops) -> None:
        """Warp, blur and sharpen images, in these passes."""
        for number in (WARPED, *KERNELS):
            entries, turn = np.nonzero(ops.codes == number)
            if not len(entries):
                continue
            here, at, values = rows[entries], passes[entries, turn], ops.values[entries, turn]
            if number == WARPED:
                filters = filter_codes(ops.filters, ops.codes.shape)[entries, turn]
                windows = np.zeros((len(here), 4), np.int64)
                windows[:, 2] = self.jobs[at, R.HEIGHT, here]
                windows[:, 3] = self.jobs[at, R.WIDTH, here]
                self._map(here, at, ops.fill, values, filters, windows)
                continue
            self.jobs[at, R.KIND, here] = KERNELS[number]
            if KERNELS[number] == R.SHARPNESS:
                self.floats[at, here, R.FACTOR] = values[:, 0]
                continue
            for axis, size, sigma in ((0, R.KERNEL_W, R.SIGMA_X), (1, R.KERNEL_H, R.SIGMA_Y)):
                reach = np.minimum(values[:, axis] // 2, np.ceil(FAR * values[:, axis + 2]))
                self.jobs[at, size, here], self.floats[at, here, sigma] = 2 * reach + 1, values[:, axis + 2]

    def _erase(self, rows: np.ndarray, erase: Erase, boxes_tlhw: np.ndarray) -> None:
        levels = np.broadcast_to(np.array(erase.numbers, np.float64), self.channels)
        for boxes in boxes_tlhw.transpose(1, 0, 2):
            there = np.flatnonzero(boxes[:, 2:].all(axis=1))
            if not len(there):
                continue
            here, at = rows[there], self.last[rows[there]]
            values = np.zeros((len(there), VALUES))
            for axis, (place, sign) in enumerate(((R.Y, R.STEP_Y), (R.X, R.STEP_X))):
                # Operations see coordinates of the geometry's result, which may be mirrored and cut afterwards.
                start, length = boxes[there, axis], boxes[there, axis + 2]
                steps = self.jobs[at, sign, here]
                values[:, axis] = self.jobs[at, place, here] + np.where(steps > 0, start, -(start + length - 1))
                values[:, axis + 2] = length
            values[:, 4 : 4 + self.channels] = levels
            self._operations.append((at * len(self.last) + here, np.full(len(here), ERASE_BOX, np.int64), values))
            self._open[here] = False

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _at(self, rows: np.ndarray) -> tuple[Any, Any]:
        """The last passes of some images, and these images: indices of the first and the last axis of `jobs`, each for
        one of them, or the number of the pass of all. As a view of all images, where these are all."""
        if self._level is None:
            return self.last[rows], rows
        return self._level, slice(None) if len(rows) == len(self.last) else rows

    def _is_dense(self, rows: np.ndarray) -> np.ndarray:
        """Whether the sources of images whose passes are open lie in memory without gaps, so that their pixels can be
        counted."""
        at, rows = self._at(rows)
        plain = (self.jobs[at, R.CHANNEL_STEP, rows] == 1) & (self.jobs[at, R.COLUMN_STEP, rows] == self.channels)
        return plain & (self.jobs[at, R.ROW_STEP, rows] == self.jobs[at, R.WIDTH, rows] * self.channels)

    def _opened(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of passes of some images in which nothing is done yet; new ones where needed."""
        self._begin(_those(rows, ~self._open[rows]))
        return self.last[rows]

    def _begin(self, rows: np.ndarray) -> None:
        """Begin a new pass for some images, which reads what the last one wrote."""
        if not len(rows):
            return
        at, here = self._at(rows)
        height, width = self.jobs[at, R.OUT_HEIGHT, here], self.jobs[at, R.OUT_WIDTH, here]
        if len(rows) < len(self.last):
            self._level = None
        elif self._level is not None:
            self._level += 1
        self.last[rows] += 1
        if self.last[rows].max() == len(self.jobs):
            self.jobs = np.concatenate([self.jobs, np.zeros_like(self.jobs)])
            self.floats = np.concatenate([self.floats, np.zeros_like(self.floats)])
        at, here = self._at(rows)
        self.jobs[at, R.CHANNEL_STEP, here] = 1
        self.jobs[at, R.COLUMN_STEP, here] = self.channels
        self.jobs[at, R.ROW_STEP, here] = width * self.channels
        self.jobs[at, R.HEIGHT, here], self.jobs[at, R.WIDTH, here] = height, width
        self._whole(at, here)
        self._open[rows] = True

    def _whole(self, at: Any, here: Any) -> None:
        """Write all that is read, as it is."""
        self.jobs[at, R.OUT_HEIGHT, here] = self.jobs[at, R.HEIGHT, here]
        self.jobs[at, R.OUT_WIDTH, here] = self.jobs[at, R.WIDTH, here]
        self.jobs[at, R.STEP_Y, here] = self.jobs[at, R.STEP_X, here] = 1

    def _table(self, rows: np.ndarray, at: np.ndarray, places: list[np.ndarray]) -> None:
        """Let passes read the pixels of these rows and columns, (n, rows) and (n, columns)."""
        both = np.concatenate(places, axis=1).astype(np.int32)
        for column, numbers in (
            (R.KIND, R.TABLE),
            (R.TABLE_AT, self._table_length + np.arange(len(rows)) * both.shape[1]),
            (R.TABLE_ROWS, places[0].shape[1]),
            (R.OUT_HEIGHT, places[0].shape[1]),
            (R.OUT_WIDTH, places[1].shape[1]),
        ):
            self.jobs[at, column, rows] = numbers
        self._open[rows] = False
        self._tables.append(both.ravel())
        self._table_length += both.size

    def _fill(self, at: np.ndarray, rows: np.ndarray, fill: tuple[float, ...]) -> None:
        if any(fill):
            self.floats[at, rows, R.FILL : R.FILL + 3] = np.broadcast_to(np.array(fill, np.float64), 3)


def _shifted(
    coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray, lengths: list[np.ndarray]
) -> list[np.ndarray] | None:
    """The rows (n, H') and columns (n, W') that maps show, -1 outside the image, if all only shift by whole pixels: the
    same as `scaled_pixels`, whose sums are exact then; else None."""
    shifts = coefficients[:, [5, 2]]
    if (coefficients[:, [0, 4]] != 1).any() or (shifts != np.rint(shifts)).any():
        return None
    starts = corners + np.clip(shifts, -FAR_OUTSIDE, FAR_OUTSIDE).astype(np.int64)
    places = [starts[:, axis, None] + np.arange(size_hw[axis]) for axis in (0, 1)]
    return [np.where((own >= 0) & (own < end), own, -1) for own, end in zip(places, lengths, strict=True)]


def _those(rows: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The rows where `which`; the same array, if these are all."""
    return rows if np.count_nonzero(which) == len(which) else rows[which]


def _entries(which: np.ndarray) -> Any:
    """Where `which` is, as an index: all, some, or None."""
    count = np.count_nonzero(which)
    return None if not count else slice(None) if count == len(which) else np.flatnonzero(which)


def _of_one_size(sizes_hw: np.ndarray) -> list[np.ndarray]:
    """The indices of equal sizes, for each size that occurs."""
    if not len(sizes_hw):
        return []
    if (sizes_hw == sizes_hw[0]).all():
        return [np.arange(len(sizes_hw))]
    _, which = np.unique(sizes_hw, axis=0, return_inverse=True)
    return [np.flatnonzero(which == number) for number in range(int(which.max()) + 1)]
