"""From a program to passes: what the fused kernels do to each image of a batch, one pass after the other.

A pass reads pixels as a geometry says (copied, listed in a table, resized, warped, blurred or sharpened), does any
number of operations on single pixels, and writes a part of the result, perhaps mirrored. A pass takes in as many
records of the program as it can: crops and flips before a resize only change where it reads, those after it where it
writes, and whatever maps single pixels is done on the way. A new pass begins where an image has to be whole: before a
second resampling, a neighbourhood, and a statistic of the image. So the number of passes differs between images.

All of it is arithmetic on arrays of the host, for all images of a batch at once. Nothing is kept from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.ops import (
    CHANGES_PIXELS,
    NOTHING,
    OPS,
    VALUES,
    Box,
    Erase,
    Flip,
    Ops,
    Turn,
    Warp,
    code,
    filter_codes,
)
from gpuload.transforms.program.windows import (
    boxes_within,
    nearest_indices,
    nearest_ways,
    padded_places,
    scaled_pixels,
    transposed_boxes,
)

__all__ = ["ERASE_BOX", "OPERATIONS", "POINTWISE", "STATISTICS", "Passes"]

# The operations on single pixels; contrast, equalize and autocontrast need a table, made of the whole image.
POINTWISE: Final = (
    "brightness", "contrast", "saturation", "hue", "solarize", "posterize", "equalize", "autocontrast", "invert",
    "grayscale", "permute", "identity", "solarize_add",
)  # fmt: skip
STATISTICS: Final = ("contrast", "equalize", "autocontrast")
# The code of an operation that is not in `OPS`: a box of levels is overwritten. Values: top, left, height and width in
# the coordinates of the geometry's result, then the level of each channel.
ERASE_BOX: Final = 64

KERNELS: Final = {code("blur"): R.BLUR, code("sharpness"): R.SHARPNESS}
FAR: Final = 5  # pixels further than this many sigmas from a blur's middle weigh less than a millionth of it each
FAR_OUTSIDE: Final = 2.0**30  # pixels; more than any image has
OPERATIONS: Final = frozenset(POINTWISE) | {OPS[number] for number in KERNELS} | {"warp"}  # that there are passes for
WARPED: Final = code("warp")
# The numbers of a job along each axis.
AXES: Final = (
    (R.ROW_STEP, R.HEIGHT, R.Y, R.STEP_Y, R.OUT_HEIGHT),
    (R.COLUMN_STEP, R.WIDTH, R.X, R.STEP_X, R.OUT_WIDTH),
)
# What an operation needs, by its code; the last is that of no operation.
IDLE, SINGLE, STATISTIC, GEOMETRY, UNKNOWN = range(5)
NEEDS: Final = np.full(len(OPS) + 1, UNKNOWN)
for _names, _need in ((OPERATIONS, GEOMETRY), (POINTWISE, SINGLE), (STATISTICS, STATISTIC), (("identity",), IDLE)):
    NEEDS[[*map(code, _names)]] = _need
NEEDS[NOTHING] = IDLE


class Passes:
    """The passes of a batch, made by going through its program; of each image's first one, what it reads.

    Most batches treat all images alike: as long as they do, a number of all jobs is read and set as a view of memory
    where it lies for image after image, which is three times as fast as by lists of passes and rows.

    Args:
        images: `IMAGE` (B,), as they were decoded.
        windows_tlhw: int64 (B, 4), the part of each that matters.
        channels: of all pixels between passes, 1 or 3; images of one channel are read as three where it is 3.
        steps: between rows, columns and channels of each image, int64 (B, 3); None means H×W×C without gaps.

    Attributes:
        jobs, floats: int64 (passes, `JOB`, B) and float64 (passes, B, `FLOATS`), the jobs; the runner fills in where
            a pass reads and writes, except where the first one reads.
        last: int64 (B,), the number of each image's last pass.
        transposed: bool (B,), whether the rows of its result are to be written as columns.
        tables: int32, of rows and columns, one after the other.
    """

    def __init__(
        self, images: np.ndarray, windows_tlhw: np.ndarray, channels: int, steps: np.ndarray | None = None
    ) -> None:
        count = len(images)
        self.channels = channels
        self.jobs = np.zeros((2, R.JOB, count), np.int64)
        self.floats = np.zeros((2, count, R.FLOATS))
        self.last = np.zeros(count, np.int64)
        self.transposed = np.zeros(count, np.bool_)
        self.tables: list[np.ndarray] = []
        self._table_length = 0
        self._everything = np.arange(count)
        self._level: int | None = 0  # the last pass of all images; None means they differ
        self._open = np.ones(count, np.bool_)  # whether the last pass only chooses pixels so far
        self._operations: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        first, stored_channels = self.jobs[0], int(images["shape"][0, 2])
        first[R.WHOLE] = images["shape"][:, :2].T
        self._steps, self._widths = steps, images["shape"][:, 1]
        if steps is None:
            first[R.ROW_STEP], first[R.COLUMN_STEP], first[R.CHANNEL_STEP] = (
                first[R.WIDTH] * stored_channels,
                stored_channels,
                1,
            )
        else:
            first[R.SOURCE_STEPS] = steps.T
        if stored_channels != channels:
            first[R.CHANNEL_STEP] = 0
        first[R.BASE] = images["offset"]
        self._show_all(0, slice(None))
        self._cut(self._everything, images["region_tlhw"], windows_tlhw)

    @property
    def count(self) -> int:
        """How many passes there are at most."""
        return (int(self.last.max()) if self._level is None else self._level) + 1

    def after(self, number: int) -> Any:
        """The images that have a pass after pass `number`, as an index: of all images, or these. For numbers below that
        of the last pass."""
        return slice(None) if self._level is not None else _entries(self.last > number)

    def packed_operations(self) -> tuple[np.ndarray, np.ndarray]:
        """All operations, those of a pass of an image next to each other: codes int64 (n,) and values float64
        (n, `VALUES`); each job gets where its own begin."""
        if not self._operations:
            return np.empty(0, np.int64), np.empty((0, VALUES))
        jobs, codes, values = self._operations[0]
        if len(self._operations) > 1:  # those of one record lie next to each other already
            jobs, codes, values = (np.concatenate(parts) for parts in zip(*self._operations, strict=True))
            order = jobs.argsort(kind="stable")  # those of one job stay in the order in which they came
            jobs, codes, values = jobs[order], codes[order], values[order]
        shape = len(self.jobs), len(self.last)
        first = np.zeros(shape, np.int64)
        first.reshape(-1)[jobs[::-1]] = np.arange(len(jobs) - 1, -1, -1)  # the one that is set last stays
        self.jobs[:, R.OPERATIONS_AT] = first
        self.jobs[:, R.OPERATIONS] = np.bincount(jobs, minlength=first.size).reshape(shape)
        return codes, values

    def set_last(self, numbers: Iterable[tuple[int, Any]]) -> None:
        """Set numbers of all images' last passes: which one, and int64 (B,) or one for all."""
        at, here = self._at(self._everything)
        for column, number in numbers:
            self.jobs[at, column, here] = number

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
                case Turn():
                    self._transpose(rows[record.transposed])
                    for axis in (0, 1):
                        self._flip(rows[record.flipped[:, axis]], axis)
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
                    self._erase(rows, record, boxes_within(record.boxes_tlhw, before))
                case _ if isinstance(record, CHANGES_PIXELS):
                    raise TypeError(f"the fused kernels do not know the record {type(record).__name__}")

    # -- records of the program ----------------------------------------------------------------------------------------

    def _transpose(self, rows: np.ndarray) -> None:
        """Swap rows and columns: where pixels are read, while they are only chosen, else where they are written."""
        open_ = self._open[rows]
        self.transposed[_rows_where(rows, ~open_)] ^= True
        at, here = self._at(_rows_where(rows, open_))
        for row, column in zip(*AXES, strict=True):
            numbers = self.jobs[at, row, here].copy()
            self.jobs[at, row, here] = self.jobs[at, column, here]
            self.jobs[at, column, here] = numbers

    def _flip(self, rows: np.ndarray, axis: int) -> None:
        transposed = self.transposed[rows]
        if transposed.any():
            self._mirror(_rows_where(rows, transposed), 1 - axis)
            rows = rows[~transposed]
        self._mirror(rows, axis)

    def _mirror(self, rows: np.ndarray, axis: int) -> None:
        step, length, place, sign, size = AXES[axis]
        open_ = self._open[rows]
        for which, first, by, count in ((open_, R.BASE, step, length), (~open_, place, sign, size)):
            if not len(columns := _rows_where(rows, which)):
                continue
            at, columns = self._at(columns)
            steps = self.jobs[at, by, columns]
            self.jobs[at, first, columns] += (self.jobs[at, count, columns] - 1) * steps
            self.jobs[at, by, columns] = -steps

    def _cut(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Keep a part of the result: windows `after`, each inside the one of `before` that the result is."""
        if before is after or (before == after).all():
            return
        if (transposed := self.transposed[rows]).any():
            before, after = transposed_boxes(before, transposed), transposed_boxes(after, transposed)
        open_ = self._open[rows]
        for which, is_open in ((open_, True), (~open_, False)):
            if (entries := _entries(which)) is None:
                continue
            at, columns = self._at(rows[entries])
            for axis, (step, length, place, sign, size) in enumerate(AXES):
                corner, length_of_part = after[entries, axis] - before[entries, axis], after[entries, axis + 2]
                if is_open:
                    self.jobs[at, R.BASE, columns] += corner * self.jobs[at, step, columns]
                    self.jobs[at, length, columns] = length_of_part
                else:
                    self.jobs[at, place, columns] += corner * self.jobs[at, sign, columns]
                self.jobs[at, size, columns] = length_of_part

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
        for alike in _of_one_size(after[outside, 2:]):
            here, places = outside[alike], []
            for axis in (0, 1):
                indices = starts[here, axis, None] + np.arange(after[here[0], axis + 2])
                length = box.sizes_hw[here, axis, None]
                padded = padded_places(indices, length, mode) - before[here, axis, None]
                places.append(np.where((indices >= 0) & (indices < length) | (mode != "constant"), padded, -1))
            self._table(rows[here], self.last[rows[here]], places)
        self._fill(at, rows[outside], box.fill)

    def _resize(self, rows: np.ndarray, box: Box, before: np.ndarray, after: np.ndarray) -> None:
        boxes, sizes = box.box_tlhw, box.size_hw
        same = (boxes[:, 2:] == sizes).all(axis=1)
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
            before, after, boxes, sizes = before[filtered], after[filtered], boxes[filtered], sizes[filtered]
            self.jobs[at, R.KIND, here] = R.RESIZE
            self.jobs[at, R.FILTER, here] = filters[filtered]
            self._set(at, R.BOX, here, boxes[:, 2:])
            self._set(at, R.SIZE, here, sizes)
            self._set(at, R.CORNER, here, before[:, :2] - boxes[:, :2])
            self._set(at, R.START, here, after[:, :2])
            self._set(at, R.OUT, here, after[:, 2:])

    def _warp(self, rows: np.ndarray, warp: Warp, before: np.ndarray, after: np.ndarray) -> None:
        still = ~warp.warped
        self._cut(rows[still], before[still], after[still])
        moved = warp.warped.nonzero()[0]
        filters = filter_codes(warp.filters, len(rows))[moved]
        at = self._opened(rows[moved])
        self._map(rows[moved], at, warp.coefficients[moved], filters, after[moved])
        self._fill(at, rows[moved], warp.fill)

    def _map(
        self, rows: np.ndarray, at: np.ndarray, coefficients: np.ndarray, filters: np.ndarray, windows: np.ndarray
    ) -> None:
        """Warp images in their passes `at`, and make windows of the results."""
        nearest = filters == R.NEAREST
        if nearest.any():
            scaling, fixed = nearest_ways(coefficients, windows[:, :2] + windows[:, 2:])
            filters = np.where(nearest & fixed, R.FIXED_POINT, filters)
            nearest &= scaling
            named = nearest.nonzero()[0]
            for alike in _of_one_size(windows[named, 2:]):
                here = named[alike]
                size = tuple(windows[here[0], 2:].tolist())
                lengths = [self.jobs[at[here], length, rows[here], None] for length in (R.HEIGHT, R.WIDTH)]
                places = _shifted(coefficients[here], size, windows[here, :2], lengths)
                if places is None:
                    pixels = scaled_pixels(coefficients[here], size, windows[here, :2])
                    places = [
                        np.where(numbers < end, numbers, -1) for numbers, end in zip(pixels, lengths, strict=True)
                    ]
                self._table(rows[here], at[here], places)
        if (others := _entries(~nearest)) is not None:
            here, there = rows[others], at[others]
            self._open[here] = False
            self.jobs[there, R.KIND, here] = R.WARP
            self.jobs[there, R.FILTER, here] = filters[others]
            self.floats[there, here, : coefficients.shape[1]] = coefficients[others]
            self._set(there, R.START, here, windows[others, :2])
            self._set(there, R.OUT, here, windows[others, 2:])

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
        turns = begins.cumsum(axis=1)
        passes = self.last[rows][:, None] + turns
        for turn in range(int(turns[:, -1].max())):
            self._begin(_rows_where(rows, turns[:, -1] > turn))
        self._open[rows[needs.max(axis=1) > IDLE]] = False
        if most >= STATISTIC:
            entries, turn = (needs == STATISTIC).nonzero()
            self.jobs[passes[entries, turn], R.STATISTICS_AT, rows[entries]] = 1
        if most == GEOMETRY:
            self._neighbourhoods(rows, passes, ops)
        pointwise = (needs == SINGLE) | (needs == STATISTIC)
        jobs = passes * len(self.last) + rows[:, None]
        if pointwise.all():
            self._operations.append((jobs.ravel(), codes.ravel(), ops.values.reshape(-1, VALUES)))
        elif pointwise.any():
            self._operations.append((jobs[pointwise], codes[pointwise], ops.values[pointwise]))

    def _first_needs(self, rows: np.ndarray, needs: np.ndarray, begins: np.ndarray) -> None:
        """Take back that a pass begins with an image's first operation, where the last one will do."""
        entries = self._open[rows].nonzero()[0]
        if not len(entries):
            return
        first = (needs[entries] > IDLE).argmax(axis=1)
        kinds = needs[entries, first]
        does = (kinds == GEOMETRY) | ((kinds == STATISTIC) & self._is_dense(rows[entries]))
        begins[entries[does], first[does]] = False

    def _neighbourhoods(self, rows: np.ndarray, passes: np.ndarray, ops: Ops) -> None:
        """Warp, blur and sharpen images, in these passes."""
        for number in (WARPED, *KERNELS):
            entries, turn = (ops.codes == number).nonzero()
            if not len(entries):
                continue
            here, at, values = rows[entries], passes[entries, turn], ops.values[entries, turn]
            if number == WARPED:
                filters = filter_codes(ops.filters, ops.codes.shape)[entries, turn]
                windows = np.zeros((len(here), 4), np.int64)
                windows[:, 2:] = self.jobs[at, R.WHOLE, here]
                self._map(here, at, values, filters, windows)
                self._fill(at, here, ops.fill)
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
        for boxes in transposed_boxes(boxes_tlhw, self.transposed[rows]).transpose(1, 0, 2):
            there = boxes[:, 2:].all(axis=1).nonzero()[0]
            if not len(there):
                continue
            here, at = rows[there], self.last[rows[there]]
            values = np.zeros((len(there), VALUES))
            for axis, (_, _, place, sign, _) in enumerate(AXES):
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
        counted; of planes, whether they would if they were H×W×C, so that these have no other passes."""
        at, here = self._at(rows)
        plain = (self.jobs[at, R.CHANNEL_STEP, here] == 1) & (self.jobs[at, R.COLUMN_STEP, here] == self.channels)
        plain &= self.jobs[at, R.ROW_STEP, here] == self.jobs[at, R.WIDTH, here] * self.channels
        if self._steps is None:
            return plain
        first = self.jobs[0][:, rows]
        whole = (first[R.SOURCE_STEPS] == self._steps[rows].T).all(axis=0) & (first[R.WIDTH] == self._widths[rows])
        return np.where(self.last[rows] == 0, whole, plain)

    def _opened(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of passes of some images in which nothing is done yet; new ones where needed."""
        self._begin(_rows_where(rows, ~self._open[rows]))
        return self.last[rows]

    def _begin(self, rows: np.ndarray) -> None:
        """Begin a new pass for some images, which reads what the last one wrote."""
        if not len(rows):
            return
        at, here = self._at(rows)
        sizes = self.jobs[at, R.OUT, here]
        sizes = sizes.T if isinstance(here, slice) else sizes  # lists of indices come before what is between them
        if len(rows) < len(self.last):
            self._level = None
        elif self._level is not None:
            self._level += 1
        self.last[rows] += 1
        if self.count > len(self.jobs):
            self.jobs, self.floats = (
                np.concatenate([array, np.zeros_like(array[:1])]) for array in (self.jobs, self.floats)
            )
        at, here = self._at(rows)
        self.jobs[at, R.CHANNEL_STEP, here] = 1
        self.jobs[at, R.COLUMN_STEP, here] = self.channels
        self.jobs[at, R.ROW_STEP, here] = sizes[:, 1] * self.channels
        self._set(at, R.WHOLE, here, sizes)
        self._show_all(at, here)
        self._open[rows] = True
        if (transposed := self.transposed[rows]).any():  # the last pass wrote rows as rows: they are read as columns
            self.transposed[rows] = False
            self._transpose(_rows_where(rows, transposed))

    def _show_all(self, at: Any, here: Any) -> None:
        """Write all that is read, as it is."""
        self.jobs[at, R.OUT, here] = self.jobs[at, R.WHOLE, here]
        self.jobs[at, R.STEPS, here] = 1

    def _set(self, at: Any, columns: slice, here: Any, numbers: np.ndarray) -> None:
        """Set two numbers of jobs, from (n, 2)."""
        self.jobs[at, columns, here] = numbers.T if isinstance(here, slice) else numbers

    def _table(self, rows: np.ndarray, at: np.ndarray, places: list[np.ndarray]) -> None:
        """Let passes read the pixels of these rows and columns, (n, rows) and (n, columns)."""
        both = np.concatenate(places, axis=1).astype(np.int32, copy=False)
        height, width = (axis.shape[1] for axis in places)
        self.jobs[at, R.KIND, rows] = R.TABLE
        self.jobs[at, R.TABLE_AT, rows] = self._table_length + np.arange(len(rows)) * (height + width)
        self.jobs[at, R.TABLE_ROWS, rows] = self.jobs[at, R.OUT_HEIGHT, rows] = height
        self.jobs[at, R.OUT_WIDTH, rows] = width
        self._open[rows] = False
        self.tables.append(both.ravel())
        self._table_length += both.size

    def _fill(self, at: np.ndarray, rows: np.ndarray, fill: tuple[float, ...]) -> None:
        if any(fill):
            self.floats[at, rows, R.LEVELS] = fill


def _rows_where(rows: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The rows where `which`; the same array, if these are all."""
    return rows if which.all() else rows[which]


def _shifted(
    coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray, lengths: list[np.ndarray]
) -> list[np.ndarray] | None:
    """The rows (n, H') and columns (n, W') that maps show, -1 outside the image, if all only shift by whole pixels: the
    same as `scaled_pixels`, whose sums are exact then; else None."""
    shifts = coefficients[:, [5, 2]]
    if (coefficients[:, [0, 4]] != 1).any() or (shifts != np.rint(shifts)).any():
        return None
    starts = (corners + shifts.clip(-FAR_OUTSIDE, FAR_OUTSIDE)).astype(np.int32)
    places = [starts[:, axis, None] + np.arange(size_hw[axis], dtype=np.int32) for axis in (0, 1)]
    # Without a sign, what is before the image is beyond it too.
    ends = [length.astype(np.uint32) for length in lengths]
    return [np.where(numbers.view(np.uint32) < end, numbers, -1) for numbers, end in zip(places, ends, strict=True)]


def _entries(which: np.ndarray) -> Any:
    """Where `which` is, as an index: all, some, or None."""
    entries = which.nonzero()[0]
    return None if not len(entries) else slice(None) if len(entries) == len(which) else entries


def _of_one_size(sizes_hw: np.ndarray) -> list[np.ndarray]:
    """The indices of equal sizes, for each size that occurs."""
    if not len(sizes_hw):
        return []
    if (sizes_hw == sizes_hw[0]).all():
        return [np.arange(len(sizes_hw))]
    _, which = np.unique(sizes_hw, axis=0, return_inverse=True)
    return [(which == number).nonzero()[0] for number in range(int(which.max()) + 1)]
