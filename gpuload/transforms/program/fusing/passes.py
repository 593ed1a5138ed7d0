"""Converts a program to passes: the sequence of passes that the fused kernels make over each image of a batch.

A pass reads pixels through a geometry (a copy, table, resize, warp, blur or sharpening), applies any number of
operations to single pixels, and writes a part of the result, possibly mirrored. A pass absorbs as many records of the
program as possible. Crops and flips before a resize only change which pixels the pass reads, crops and flips after it
change where the pass writes, and operations on single pixels are applied in between. A new pass begins where the
complete image is needed: before a second resampling, an operation on a neighbourhood, or a statistic of the image. So
the number of passes can differ between images.

The conversion is arithmetic on host arrays, for all images of a batch together. Nothing is stored between batches.
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
    clip_to_windows,
    nearest_indices,
    nearest_methods,
    padded_indices,
    scaled_pixels,
    transpose_boxes,
)

__all__ = ["ERASE_BOX", "OPERATIONS", "POINTWISE", "STATISTICS", "Passes"]

# The operations on single pixels. Contrast, equalize and autocontrast need a table that depends on the entire image.
POINTWISE: Final = (
    "brightness", "contrast", "saturation", "hue", "solarize", "posterize", "equalize", "autocontrast", "invert",
    "grayscale", "permute", "identity", "solarize_add", "gamma", "white_balance",
)  # fmt: skip
STATISTICS: Final = ("contrast", "equalize", "autocontrast")
# The code of an additional operation that is not in `OPS` and overwrites a box. Its values: top, left, height and width
# in the coordinates of the geometry's result, then the pixel value of each channel.
ERASE_BOX: Final = len(OPS)

KERNELS: Final = {code("blur"): R.BLUR, code("sharpness"): R.SHARPNESS}
FAR: Final = 5  # a pixel more than this many sigmas from a blur's centre weighs less than a millionth of the centre
FAR_OUTSIDE: Final = 2.0**30  # pixels; larger than any image
OPERATIONS: Final = frozenset(POINTWISE) | {OPS[number] for number in KERNELS} | {"warp"}  # the supported operations
WARP_CODE: Final = code("warp")
# For each axis, the indices of the job's values along this axis.
AXES: Final = (
    (R.ROW_STEP, R.HEIGHT, R.Y, R.STEP_Y, R.OUT_HEIGHT),
    (R.COLUMN_STEP, R.WIDTH, R.X, R.STEP_X, R.OUT_WIDTH),
)
# The requirements of operations: nothing, single pixels, a statistic of the image, or a geometry. UNKNOWN operations
# are not supported. `NEEDS` is indexed by code; its last entry is for `NOTHING`.
IDLE, SINGLE, STATISTIC, GEOMETRY, UNKNOWN = range(5)
NEEDS: Final = np.full(len(OPS) + 1, UNKNOWN)
for _names, _need in ((OPERATIONS, GEOMETRY), (POINTWISE, SINGLE), (STATISTICS, STATISTIC), (("identity",), IDLE)):
    NEEDS[[*map(code, _names)]] = _need
NEEDS[NOTHING] = IDLE


class Passes:
    """The passes of a batch, built record by record from its program.

    In most batches, all images have the same passes. As long as this is true, each value is read and set for all jobs
    through a contiguous view, which is three times as fast as indexing by arrays of passes and images.

    Args:
        images: the table of decoded images, `IMAGE` (B,).
        windows_tlhw: int64 (B, 4), the required window of each image.
        channels: the number of channels between passes, 1 or 3; with 3, images of one channel are read as three.
        steps: the steps between rows, columns and channels of each image, int64 (B, 3); None means that images are
            H×W×C without gaps.

    Attributes:
        jobs, floats: the jobs, int64 (passes, `JOB`, B) and float64 (passes, B, `FLOATS`). This class sets only the
            location that the first pass reads; `LaunchPlan.build` sets all other locations.
        last: int64 (B,), the index of each image's last pass.
        transposed: bool (B,), whether the rows of each image's result must be written as columns.
        tables: int32 arrays, one per group of jobs: each job's source row indices, then its source column indices.
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
        self._all_rows = np.arange(count)
        self._common_last: int | None = 0  # the index of all images' last pass; None if it differs
        self._open = np.ones(count, np.bool_)  # whether the last pass has only selected pixels so far
        self._operations: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        first_jobs, stored_channels = self.jobs[0], int(images["shape"][0, 2])
        first_jobs[R.SOURCE_SIZE] = images["shape"][:, :2].T
        self._steps, self._widths = steps, images["shape"][:, 1]
        if steps is None:
            first_jobs[R.ROW_STEP], first_jobs[R.COLUMN_STEP], first_jobs[R.CHANNEL_STEP] = (
                first_jobs[R.WIDTH] * stored_channels,
                stored_channels,
                1,
            )
        else:
            first_jobs[R.SOURCE_STEPS] = steps.T
        if stored_channels != channels:
            first_jobs[R.CHANNEL_STEP] = 0
        first_jobs[R.BASE] = images["offset"]
        self._write_all(0, slice(None))
        self._cut(self._all_rows, images["region_tlhw"], windows_tlhw)

    @property
    def count(self) -> int:
        """The maximum number of passes of an image."""
        return (int(self.last.max()) if self._common_last is None else self._common_last) + 1

    def images_after(self, index: int) -> Any:
        """Return an index that selects the images with a pass after pass `index`. There must be such images."""
        return slice(None) if self._common_last is not None else _find_entries(self.last > index)

    def pack_operations(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all operations, grouped by job: codes, int64 (n,), and values, float64 (n, `VALUES`). Store the index
        of the first operation, and the number of operations, in each job."""
        if not self._operations:
            return np.empty(0, np.int64), np.empty((0, VALUES))
        jobs, codes, values = self._operations[0]
        if len(self._operations) > 1:  # the operations of a single record are already grouped by job
            jobs, codes, values = (np.concatenate(parts) for parts in zip(*self._operations, strict=True))
            order = jobs.argsort(kind="stable")  # a stable sort preserves the order of each job's operations
            jobs, codes, values = jobs[order], codes[order], values[order]
        shape = len(self.jobs), len(self.last)
        first_operations = np.zeros(shape, np.int64)
        first_operations.reshape(-1)[jobs[::-1]] = np.arange(len(jobs) - 1, -1, -1)  # the last assignment to a job wins
        self.jobs[:, R.OPERATIONS_AT] = first_operations
        self.jobs[:, R.OPERATIONS] = np.bincount(jobs, minlength=first_operations.size).reshape(shape)
        return codes, values

    def set_in_last_passes(self, values: Iterable[tuple[int, Any]]) -> None:
        """Set values of each image's last job. Each pair is the index in a job and the values, int64 (B,), or one
        value for all images."""
        passes, images = self._index_last_passes(self._all_rows)
        for index, value in values:
            self.jobs[passes, index, images] = value

    def apply(self, program: Program, windows_tlhw: tuple[np.ndarray, ...]) -> None:
        """Add the records of a program; `windows_tlhw` are the program's windows."""
        for index, record in enumerate(program.records):
            before, after = windows_tlhw[index], windows_tlhw[index + 1]
            rows = self._all_rows
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
                    self._apply_operations(rows, record)
                    self._cut(rows, before, after)
                case Erase():
                    self._erase(rows, record, clip_to_windows(record.boxes_tlhw, before))
                case _ if isinstance(record, CHANGES_PIXELS):
                    raise TypeError(f"the fused kernels do not support the record {type(record).__name__}")

    # -- records of the program ----------------------------------------------------------------------------------------

    def _transpose(self, rows: np.ndarray) -> None:
        """Swap rows and columns: of the source while the pass only selects pixels, otherwise of the output."""
        is_open = self._open[rows]
        self.transposed[_rows_where(rows, ~is_open)] ^= True
        passes, images = self._index_last_passes(_rows_where(rows, is_open))
        for row, column in zip(*AXES, strict=True):
            row_values = self.jobs[passes, row, images].copy()
            self.jobs[passes, row, images] = self.jobs[passes, column, images]
            self.jobs[passes, column, images] = row_values

    def _flip(self, rows: np.ndarray, axis: int) -> None:
        transposed = self.transposed[rows]
        if transposed.any():
            self._mirror(_rows_where(rows, transposed), 1 - axis)
            rows = rows[~transposed]
        self._mirror(rows, axis)

    def _mirror(self, rows: np.ndarray, axis: int) -> None:
        step, length, position, direction, size = AXES[axis]
        is_open = self._open[rows]
        for mask, first, stride, count in ((is_open, R.BASE, step, length), (~is_open, position, direction, size)):
            if not len(images := _rows_where(rows, mask)):
                continue
            passes, images = self._index_last_passes(images)
            steps = self.jobs[passes, stride, images]
            self.jobs[passes, first, images] += (self.jobs[passes, count, images] - 1) * steps
            self.jobs[passes, stride, images] = -steps

    def _cut(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Crop results, which cover the windows `before`, to the windows `after` within these."""
        if before is after or (before == after).all():
            return
        if (transposed := self.transposed[rows]).any():
            before, after = transpose_boxes(before, transposed), transpose_boxes(after, transposed)
        open_mask = self._open[rows]
        for mask, is_open in ((open_mask, True), (~open_mask, False)):
            if (entries := _find_entries(mask)) is None:
                continue
            passes, images = self._index_last_passes(rows[entries])
            for axis, (step, length, position, direction, size) in enumerate(AXES):
                corner, new_length = after[entries, axis] - before[entries, axis], after[entries, axis + 2]
                if is_open:
                    self.jobs[passes, R.BASE, images] += corner * self.jobs[passes, step, images]
                    self.jobs[passes, length, images] = new_length
                else:
                    self.jobs[passes, position, images] += corner * self.jobs[passes, direction, images]
                self.jobs[passes, size, images] = new_length

    def _crop(self, rows: np.ndarray, box: Box, mode: str, before: np.ndarray, after: np.ndarray) -> None:
        windows = after.copy()
        windows[:, :2] += box.box_tlhw[:, :2]
        starts = windows[:, :2]
        source_starts, source_ends = before[:, :2], before[:, :2] + before[:, 2:]
        is_inside = ((starts >= source_starts) & (starts + after[:, 2:] <= source_ends)).all(axis=1)
        self._cut(rows[is_inside], before[is_inside], windows[is_inside])
        outside_entries = np.flatnonzero(~is_inside)
        if not len(outside_entries):
            return
        passes = self._ensure_open_passes(rows[outside_entries])
        for group in _group_by_size(after[outside_entries, 2:]):
            entries, axis_indices = outside_entries[group], []
            for axis in (0, 1):
                indices = starts[entries, axis, None] + np.arange(after[entries[0], axis + 2])
                length = box.sizes_hw[entries, axis, None]
                padded = padded_indices(indices, length, mode) - before[entries, axis, None]
                axis_indices.append(np.where((indices >= 0) & (indices < length) | (mode != "constant"), padded, -1))
            self._set_table(rows[entries], self.last[rows[entries]], axis_indices)
        self._set_fill(passes, rows[outside_entries], box.fill)

    def _resize(self, rows: np.ndarray, box: Box, before: np.ndarray, after: np.ndarray) -> None:
        boxes, sizes = box.box_tlhw, box.size_hw
        is_same_size = (boxes[:, 2:] == sizes).all(axis=1)
        filters = filter_codes(box.filters, len(rows))
        is_nearest = filters == R.NEAREST
        if (unscaled_entries := _find_entries(is_same_size)) is not None:
            windows = after[unscaled_entries].copy()
            windows[:, :2] += boxes[unscaled_entries, :2]
            self._cut(rows[unscaled_entries], before[unscaled_entries], windows)
        if (nearest_entries := _find_entries(~is_same_size & is_nearest)) is not None:
            self._ensure_open_passes(rows[nearest_entries])
            corners = before[:, :2] - boxes[:, :2]
            for row in np.arange(len(rows))[nearest_entries].tolist():
                axis_indices = []
                for axis in (0, 1):
                    lengths = int(boxes[row, axis + 2]), int(sizes[row, axis])
                    window = int(after[row, axis]), int(after[row, axis + 2])
                    axis_indices.append((nearest_indices(*lengths, *window) - corners[row, axis])[None])
                self._set_table(rows[row : row + 1], self.last[rows[row : row + 1]], axis_indices)
        if (filtered_entries := _find_entries(~(is_same_size | is_nearest))) is not None:
            images = rows[filtered_entries]
            self._ensure_open_passes(images)
            self._open[images] = False
            passes, images = self._index_last_passes(images)
            before, after, boxes, sizes = (
                before[filtered_entries],
                after[filtered_entries],
                boxes[filtered_entries],
                sizes[filtered_entries],
            )
            self.jobs[passes, R.KIND, images] = R.RESIZE
            self.jobs[passes, R.FILTER, images] = filters[filtered_entries]
            self._set_pair(passes, R.BOX, images, boxes[:, 2:])
            self._set_pair(passes, R.SIZE, images, sizes)
            self._set_pair(passes, R.CORNER, images, before[:, :2] - boxes[:, :2])
            self._set_pair(passes, R.START, images, after[:, :2])
            self._set_pair(passes, R.OUT, images, after[:, 2:])

    def _warp(self, rows: np.ndarray, warp: Warp, before: np.ndarray, after: np.ndarray) -> None:
        is_unwarped = ~warp.warped
        self._cut(rows[is_unwarped], before[is_unwarped], after[is_unwarped])
        entries = warp.warped.nonzero()[0]
        filters = filter_codes(warp.filters, len(rows))[entries]
        passes = self._ensure_open_passes(rows[entries])
        self._map(rows[entries], passes, warp.coefficients[entries], filters, after[entries])
        self._set_fill(passes, rows[entries], warp.fill)

    def _map(
        self, rows: np.ndarray, passes: np.ndarray, coefficients: np.ndarray, filters: np.ndarray, windows: np.ndarray
    ) -> None:
        """Make these passes warp the images and compute these windows of the results."""
        is_nearest = filters == R.NEAREST
        if is_nearest.any():
            is_scaling, is_fixed = nearest_methods(coefficients, windows[:, :2] + windows[:, 2:])
            filters = np.where(is_nearest & is_fixed, R.FIXED_POINT, filters)
            is_nearest &= is_scaling
            scaled_entries = is_nearest.nonzero()[0]
            for group in _group_by_size(windows[scaled_entries, 2:]):
                entries = scaled_entries[group]
                size = tuple(windows[entries[0], 2:].tolist())
                lengths = [self.jobs[passes[entries], length, rows[entries], None] for length in (R.HEIGHT, R.WIDTH)]
                axis_indices = _shift_indices(coefficients[entries], size, windows[entries, :2], lengths)
                if axis_indices is None:
                    pixels = scaled_pixels(coefficients[entries], size, windows[entries, :2])
                    axis_indices = [
                        np.where(indices < end, indices, -1) for indices, end in zip(pixels, lengths, strict=True)
                    ]
                self._set_table(rows[entries], passes[entries], axis_indices)
        if (warped_entries := _find_entries(~is_nearest)) is not None:
            images, passes = rows[warped_entries], passes[warped_entries]
            self._open[images] = False
            self.jobs[passes, R.KIND, images] = R.WARP
            self.jobs[passes, R.FILTER, images] = filters[warped_entries]
            self.floats[passes, images, : coefficients.shape[1]] = coefficients[warped_entries]
            self._set_pair(passes, R.START, images, windows[warped_entries, :2])
            self._set_pair(passes, R.OUT, images, windows[warped_entries, 2:])

    def _apply_operations(self, rows: np.ndarray, ops: Ops) -> None:
        """Add all operations of a record in one step. This is possible because operations do not change sizes, so the
        pass of each operation is known in advance."""
        codes, needs = ops.codes, NEEDS[ops.codes]
        if (highest_need := int(needs.max(initial=IDLE))) == IDLE:
            return
        if highest_need == UNKNOWN:
            unknown = OPS[int(codes[needs == UNKNOWN][0])]
            raise TypeError(f"the fused kernels do not support the operation {unknown}")
        begins_pass = needs >= STATISTIC
        if begins_pass.any():
            self._reuse_ensure_open_passes(rows, needs, begins_pass)
        pass_offsets = begins_pass.cumsum(axis=1)
        passes = self.last[rows][:, None] + pass_offsets
        for offset in range(int(pass_offsets[:, -1].max())):
            self._begin_passes(_rows_where(rows, pass_offsets[:, -1] > offset))
        self._open[rows[needs.max(axis=1) > IDLE]] = False
        if highest_need >= STATISTIC:
            entries, positions = (needs == STATISTIC).nonzero()
            self.jobs[passes[entries, positions], R.STATISTICS_AT, rows[entries]] = 1
        if highest_need == GEOMETRY:
            self._set_geometries(rows, passes, ops)
        is_pointwise = (needs == SINGLE) | (needs == STATISTIC)
        jobs = passes * len(self.last) + rows[:, None]
        if is_pointwise.all():
            self._operations.append((jobs.ravel(), codes.ravel(), ops.values.reshape(-1, VALUES)))
        elif is_pointwise.any():
            self._operations.append((jobs[is_pointwise], codes[is_pointwise], ops.values[is_pointwise]))

    def _reuse_ensure_open_passes(self, rows: np.ndarray, needs: np.ndarray, begins_pass: np.ndarray) -> None:
        """Clear `begins_pass` for an image's first operation if the image's open pass can apply this operation."""
        entries = self._open[rows].nonzero()[0]
        if not len(entries):
            return
        first_positions = (needs[entries] > IDLE).argmax(axis=1)
        first_needs = needs[entries, first_positions]
        fits = (first_needs == GEOMETRY) | ((first_needs == STATISTIC) & self._is_dense(rows[entries]))
        begins_pass[entries[fits], first_positions[fits]] = False

    def _set_geometries(self, rows: np.ndarray, operation_passes: np.ndarray, ops: Ops) -> None:
        """Warp, blur and sharpen images in the passes of these operations."""
        for operation in (WARP_CODE, *KERNELS):
            entries, positions = (ops.codes == operation).nonzero()
            if not len(entries):
                continue
            images, passes, values = rows[entries], operation_passes[entries, positions], ops.values[entries, positions]
            if operation == WARP_CODE:
                filters = filter_codes(ops.filters, ops.codes.shape)[entries, positions]
                windows = np.zeros((len(images), 4), np.int64)
                windows[:, 2:] = self.jobs[passes, R.SOURCE_SIZE, images]
                self._map(images, passes, values, filters, windows)
                self._set_fill(passes, images, ops.fill)
                continue
            self.jobs[passes, R.KIND, images] = KERNELS[operation]
            if KERNELS[operation] == R.SHARPNESS:
                self.floats[passes, images, R.FACTOR] = values[:, 0]
                continue
            for axis, size, sigma in ((0, R.KERNEL_W, R.SIGMA_X), (1, R.KERNEL_H, R.SIGMA_Y)):
                reach = np.minimum(values[:, axis] // 2, np.ceil(FAR * values[:, axis + 2]))
                self.jobs[passes, size, images], self.floats[passes, images, sigma] = 2 * reach + 1, values[:, axis + 2]

    def _erase(self, rows: np.ndarray, erase: Erase, boxes_tlhw: np.ndarray) -> None:
        pixel_values = np.broadcast_to(np.array(erase.numbers, np.float64), self.channels)
        for boxes in transpose_boxes(boxes_tlhw, self.transposed[rows]).transpose(1, 0, 2):
            entries = boxes[:, 2:].all(axis=1).nonzero()[0]
            if not len(entries):
                continue
            images, passes = rows[entries], self.last[rows[entries]]
            values = np.zeros((len(entries), VALUES))
            for axis, (_, _, first, step, _) in enumerate(AXES):
                # Operations use coordinates of the geometry's result, which can be mirrored and cut afterwards.
                start, length = boxes[entries, axis], boxes[entries, axis + 2]
                steps = self.jobs[passes, step, images]
                values[:, axis] = self.jobs[passes, first, images] + np.where(steps > 0, start, -(start + length - 1))
                values[:, axis + 2] = length
            values[:, 4 : 4 + self.channels] = pixel_values
            self._operations.append(
                (passes * len(self.last) + images, np.full(len(images), ERASE_BOX, np.int64), values)
            )
            self._open[images] = False

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _index_last_passes(self, rows: np.ndarray) -> tuple[Any, Any]:
        """Return indices into the first and the last axis of `jobs` for the last passes of some images: the passes, or
        one integer if all images have the same last pass; and the images, or a slice that selects all images."""
        if self._common_last is None:
            return self.last[rows], rows
        return self._common_last, slice(None) if len(rows) == len(self.last) else rows

    def _is_dense(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask of the images, all with open passes, whose source has no gaps in memory, so that its pixels can
        be counted. Images stored as planes are treated like H×W×C images, so that both get the same passes."""
        passes, images = self._index_last_passes(rows)
        is_dense = (self.jobs[passes, R.CHANNEL_STEP, images] == 1) & (
            self.jobs[passes, R.COLUMN_STEP, images] == self.channels
        )
        is_dense &= self.jobs[passes, R.ROW_STEP, images] == self.jobs[passes, R.WIDTH, images] * self.channels
        if self._steps is None:
            return is_dense
        first_jobs = self.jobs[0][:, rows]
        source_dense = (first_jobs[R.SOURCE_STEPS] == self._steps[rows].T).all(axis=0) & (
            first_jobs[R.WIDTH] == self._widths[rows]
        )
        return np.where(self.last[rows] == 0, source_dense, is_dense)

    def _ensure_open_passes(self, rows: np.ndarray) -> np.ndarray:
        """Begin a new pass for each of these images without an open pass. Return the indices of the open passes."""
        self._begin_passes(_rows_where(rows, ~self._open[rows]))
        return self.last[rows]

    def _begin_passes(self, rows: np.ndarray) -> None:
        """Begin a new pass, which reads the output of the previous pass, for each of these images."""
        if not len(rows):
            return
        passes, images = self._index_last_passes(rows)
        sizes = self.jobs[passes, R.OUT, images]
        sizes = sizes.T if isinstance(images, slice) else sizes  # numpy moves the axis of two index arrays to the front
        if len(rows) < len(self.last):
            self._common_last = None
        elif self._common_last is not None:
            self._common_last += 1
        self.last[rows] += 1
        if self.count > len(self.jobs):
            self.jobs, self.floats = (
                np.concatenate([array, np.zeros_like(array[:1])]) for array in (self.jobs, self.floats)
            )
        passes, images = self._index_last_passes(rows)
        self.jobs[passes, R.CHANNEL_STEP, images] = 1
        self.jobs[passes, R.COLUMN_STEP, images] = self.channels
        self.jobs[passes, R.ROW_STEP, images] = sizes[:, 1] * self.channels
        self._set_pair(passes, R.SOURCE_SIZE, images, sizes)
        self._write_all(passes, images)
        self._open[rows] = True
        # The previous pass wrote its result without transposing it, so this pass transposes when it reads.
        if (transposed := self.transposed[rows]).any():
            self.transposed[rows] = False
            self._transpose(_rows_where(rows, transposed))

    def _write_all(self, passes: Any, images: Any) -> None:
        """Make these passes write the complete source, without mirroring."""
        self.jobs[passes, R.OUT, images] = self.jobs[passes, R.SOURCE_SIZE, images]
        self.jobs[passes, R.STEPS, images] = 1

    def _set_pair(self, passes: Any, pair: slice, images: Any, values: np.ndarray) -> None:
        """Set two values of each job from an array (n, 2)."""
        self.jobs[passes, pair, images] = values.T if isinstance(images, slice) else values

    def _set_table(self, rows: np.ndarray, passes: np.ndarray, axis_indices: list[np.ndarray]) -> None:
        """Make these passes read the source at these row indices, (n, rows), and column indices, (n, columns)."""
        table = np.concatenate(axis_indices, axis=1).astype(np.int32, copy=False)
        height, width = (axis.shape[1] for axis in axis_indices)
        self.jobs[passes, R.KIND, rows] = R.TABLE
        self.jobs[passes, R.TABLE_AT, rows] = self._table_length + np.arange(len(rows)) * (height + width)
        self.jobs[passes, R.TABLE_ROWS, rows] = self.jobs[passes, R.OUT_HEIGHT, rows] = height
        self.jobs[passes, R.OUT_WIDTH, rows] = width
        self._open[rows] = False
        self.tables.append(table.ravel())
        self._table_length += table.size

    def _set_fill(self, passes: np.ndarray, rows: np.ndarray, fill: tuple[float, ...]) -> None:
        if any(fill):
            self.floats[passes, rows, R.LEVELS] = fill


def _rows_where(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the rows where `mask` is True; return the same array if all rows are selected."""
    return rows if mask.all() else rows[mask]


def _shift_indices(
    coefficients: np.ndarray, size_hw: tuple[int, int], corners: np.ndarray, lengths: list[np.ndarray]
) -> list[np.ndarray] | None:
    """Return the row indices (n, H') and column indices (n, W') that the maps' results show, -1 outside the image;
    return None unless all maps only shift by whole pixels. Equals the result of `scaled_pixels`, whose sums are exact
    in this case."""
    shifts = coefficients[:, [5, 2]]
    if (coefficients[:, [0, 4]] != 1).any() or (shifts != np.rint(shifts)).any():
        return None
    starts = (corners + shifts.clip(-FAR_OUTSIDE, FAR_OUTSIDE)).astype(np.int32)
    indices = [starts[:, axis, None] + np.arange(size_hw[axis], dtype=np.int32) for axis in (0, 1)]
    # Viewed as unsigned, negative indices are beyond the end of the image too, so one comparison is enough.
    ends = [length.astype(np.uint32) for length in lengths]
    return [np.where(index.view(np.uint32) < end, index, -1) for index, end in zip(indices, ends, strict=True)]


def _find_entries(mask: np.ndarray) -> Any:
    """Return the indices where `mask` is True: a slice if all entries are True, None if no entry is."""
    entries = mask.nonzero()[0]
    return None if not len(entries) else slice(None) if len(entries) == len(mask) else entries


def _group_by_size(sizes_hw: np.ndarray) -> list[np.ndarray]:
    """Return one index array per distinct size, with the entries of this size."""
    if not len(sizes_hw):
        return []
    if (sizes_hw == sizes_hw[0]).all():
        return [np.arange(len(sizes_hw))]
    _, groups = np.unique(sizes_hw, axis=0, return_inverse=True)
    return [(groups == group).nonzero()[0] for group in range(int(groups.max()) + 1)]
