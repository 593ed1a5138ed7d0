"""The jobs of the fused kernels for a batch while they are made: an array of their numbers, pass by pass.

Most batches treat all images alike: as long as they do, a number of all jobs is read and set as a view of memory where
it lies for image after image, which is three times as fast as by lists of passes and rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from gpuload.transforms.program.fusing import layout as R
from gpuload.transforms.program.fusing.layout import FLOATS, JOB
from gpuload.transforms.program.ops import VALUES

__all__ = ["BOX", "CORNER", "OUT", "SIZE", "START", "WHOLE", "Jobs", "those"]

# Two numbers of a job each: of height and width, or down and across.
WHOLE: Final = slice(R.HEIGHT, R.WIDTH + 1)
BOX: Final = slice(R.BOX_H, R.BOX_W + 1)
SIZE: Final = slice(R.SIZE_H, R.SIZE_W + 1)
CORNER: Final = slice(R.CORNER_Y, R.CORNER_X + 1)
OUT: Final = slice(R.OUT_HEIGHT, R.OUT_WIDTH + 1)
START: Final = slice(R.Y, R.X + 1, R.X - R.Y)
STEPS: Final = slice(R.STEP_Y, R.STEP_X + 1, R.STEP_X - R.STEP_Y)


class Jobs:
    """The jobs of a batch of `count` images, of which each begins with one pass.

    Args:
        count: of the images.
        channels: of all pixels between passes, 1 or 3.

    Attributes:
        jobs, floats: int64 (passes, `JOB`, B) and float64 (passes, B, `FLOATS`), the jobs; the runner fills in where
            a pass reads and writes, except where the first one reads.
        last: int64 (B,), the number of each image's last pass.
        tables: int32, of rows and columns, one after the other.
    """

    def __init__(self, count: int, channels: int) -> None:
        self.channels = channels
        self.jobs = np.zeros((2, JOB, count), np.int64)
        self.floats = np.zeros((2, count, FLOATS))
        self.last = np.zeros(count, np.int64)
        self._everything = np.arange(count)
        self._level: int | None = 0  # the last pass of all images; None: they differ
        self._open = np.ones(count, np.bool_)  # whether the last pass only chooses pixels so far
        self._operations: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.tables: list[np.ndarray] = []
        self._table_length = 0

    @property
    def count(self) -> int:
        """How many passes there are at most."""
        return (int(self.last.max()) if self._level is None else self._level) + 1

    def after(self, number: int) -> Any:
        """The images that have a pass after pass `number`, as an index: of all images, or these. For numbers below that
        of the last pass."""
        return slice(None) if self._level is not None else _index(self.last > number)

    def packed_operations(self) -> tuple[np.ndarray, np.ndarray]:
        """All operations, those of a pass of an image next to each other: codes int64 (n,) and values float64
        (n, `VALUES`); each job is told where its own begin."""
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
        for column, own in numbers:
            self.jobs[at, column, here] = own

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
        self._begin(those(rows, ~self._open[rows]))
        return self.last[rows]

    def _begin(self, rows: np.ndarray) -> None:
        """Begin a new pass for some images, which reads what the last one wrote."""
        if not len(rows):
            return
        at, here = self._at(rows)
        sizes = self._sizes(at, here)
        if len(rows) < len(self.last):
            self._level = None
        elif self._level is not None:
            self._level += 1
        self.last[rows] += 1
        if self.last[rows].max() == len(self.jobs):
            self.jobs, self.floats = _longer(self.jobs), _longer(self.floats)
        at, here = self._at(rows)
        self.jobs[at, R.CHANNEL_STEP, here] = 1
        self.jobs[at, R.COLUMN_STEP, here] = self.channels
        self.jobs[at, R.ROW_STEP, here] = sizes[:, 1] * self.channels
        self._set(at, WHOLE, here, sizes)
        self._whole(at, here)
        self._open[rows] = True

    def _whole(self, at: Any, here: Any) -> None:
        """Write all that is read, as it is."""
        self.jobs[at, OUT, here] = self.jobs[at, WHOLE, here]
        self.jobs[at, STEPS, here] = 1

    def _sizes(self, at: Any, here: Any) -> np.ndarray:
        """The sizes of the results of passes, (n, 2)."""
        found = self.jobs[at, OUT, here]
        return found.T if isinstance(here, slice) else found  # lists of indices come before what is between them

    def _set(self, at: Any, columns: slice, here: Any, numbers: np.ndarray) -> None:
        """Set two numbers of jobs, from (n, 2)."""
        self.jobs[at, columns, here] = numbers.T if isinstance(here, slice) else numbers

    def _table(self, rows: np.ndarray, at: np.ndarray, places: list[np.ndarray]) -> None:
        """Let passes read the pixels of these rows and columns, (n, rows) and (n, columns)."""
        both = np.concatenate(places, axis=1).astype(np.int32, copy=False)
        for column, numbers in (
            (R.KIND, R.TABLE),
            (R.TABLE_AT, self._table_length + np.arange(len(rows)) * both.shape[1]),
            (R.TABLE_ROWS, places[0].shape[1]),
            (R.OUT_HEIGHT, places[0].shape[1]),
            (R.OUT_WIDTH, places[1].shape[1]),
        ):
            self.jobs[at, column, rows] = numbers
        self._open[rows] = False
        self.tables.append(both.ravel())
        self._table_length += both.size

    def _fill(self, at: np.ndarray, rows: np.ndarray, fill: tuple[float, ...]) -> None:
        if any(fill):
            self.floats[at, rows, R.FILL : R.FILL + 3] = fill


def _longer(array: np.ndarray) -> np.ndarray:
    """With zeros at its end."""
    longer = np.empty((len(array) + 1, *array.shape[1:]), array.dtype)
    longer[:-1], longer[-1] = array, 0
    return longer


def _index(which: np.ndarray) -> Any:
    """Where `which` is, as an index."""
    return slice(None) if which.all() else which.nonzero()[0]


def those(rows: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The rows where `which`; the same array, if these are all."""
    return rows if which.all() else rows[which]
