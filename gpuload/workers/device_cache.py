"""The samples of a `DeviceCached`, and the chunks that are cut out of them: what does the work of workers once all
samples were read.

`CachedSamples` is filled once, from chunks of whole images, and then only read. The pixels lie elsewhere, one image
after the other, in a `Memory`: offsets count from its first byte. All else is here, in the main process's memory.

`CacheEngine` does chunks, each of them a whole batch. Regions are drawn as workers draw them, by the same functions, so
batches have the same bits. A chunk's pixels are described by *windows*, int64 (M, 5), one for each image and mask: the
first byte in the memory, rows, bytes in a row, bytes from one row to the next, and the first byte where the chunk's
pixels are put together. They are laid out there as a worker lays them into a slot, so all that follows sees the same
bytes.

Runs in the main process and starts nothing. It imports no torch.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from gpuload.datasets.resident import numbers_of
from gpuload.datasets.tree import any_of
from gpuload.errors import ErrorRecord
from gpuload.ring.columns import Columns, TensorBits
from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring
from gpuload.rng.philox import epoch_key
from gpuload.workers.counters import Counters
from gpuload.workers.inline import InlineEngine
from gpuload.workers.job import Job
from gpuload.workers.protocol import Reply, Request, Status
from gpuload.workers.runner import failure

__all__ = ["CacheEngine", "CachedSamples", "Memory", "ReadMemory", "copy_windows", "cut", "span_of"]

PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, complex})  # nobody can change these
POINTER_BYTES: Final = 8


class Memory(Protocol):
    """Where the pixels lie."""

    @property
    def nbytes(self) -> int: ...
    def add(self, data: np.ndarray) -> int: ...  # copies bytes there; returns where the first one is


class ReadMemory(Memory, Protocol):
    """The same, once it is filled."""

    @property
    def on_host(self) -> bool: ...
    def write(self, windows: np.ndarray, out: np.ndarray) -> None: ...  # copies windows to `out`, if it is on the host


@dataclass(slots=True)
class CachedSamples:
    """Samples of a dataset.

    Attributes:
        count: how many samples the dataset has.
        memory: where their pixels are: a `Memory`, and to give samples a `ReadMemory`.
        errors: the samples that failed, by their number.
        host_bytes: of values, about: arrays, bytes and texts.
    """

    count: int
    memory: Any
    errors: dict[int, ErrorRecord] = field(default_factory=dict)
    host_bytes: int = 0
    _chunks: list[Columns] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)  # of each chunk in the memory
    _numbers: list[int] = field(default_factory=list)  # of the chunks' samples
    _columns: Columns = field(default_factory=Columns)
    _row: np.ndarray = field(init=False)  # of each sample in the columns

    @property
    def nbytes(self) -> int:
        """What all of it takes, about."""
        return self.memory.nbytes + self.host_bytes

    def add(self, columns: Columns, numbers: Sequence[int], data: np.ndarray) -> None:
        """Cache the samples of a chunk, whose images are whole. `numbers` are those of the chunk's rows; `data` are its
        bytes, which are copied."""
        columns.spread(list(columns.blocks), data)
        images = [*columns.images, *columns.masks]
        ends = [int((own.table["offset"] + own.table["shape"].prod(axis=1)).max()) for own in images]
        self._starts.append(self.memory.add(data[: max(ends)]) if ends else 0)
        self._chunks.append(columns)
        self._numbers += [int(numbers[row]) for row in columns.rows]
        for column in (*columns.values.values(), *columns.points.values()):
            self.host_bytes += sum(POINTER_BYTES + _size(value) for value in column.values)
        for source in columns.names:
            self.host_bytes += POINTER_BYTES + (0 if source is None else sys.getsizeof(source))

    def end(self) -> None:
        """Join the chunks: all samples have come."""
        self._columns = Columns.concat(self._chunks, self._starts)
        self._row = np.full(self.count, -1)
        self._row[self._numbers] = np.arange(len(self._numbers))
        del self._chunks, self._starts, self._numbers

    def take(self, numbers: np.ndarray) -> Columns:
        """Return samples by their numbers, with whole images, whose offsets are in the memory."""
        columns = self._columns.take(self._row[numbers])
        for column in (*columns.values.values(), *columns.points.values()):
            if not PLAIN.issuperset(map(type, column.values)):
                column.values = list(map(_copied, column.values))
        return columns

    def error(self, number: int, epoch: int, position: int, index: Any) -> ErrorRecord | None:
        """Return why a sample failed, if it did, as an error of this place."""
        error = self.errors.get(number)
        return None if error is None else replace(error, epoch=epoch, position=position, index=index)


class CacheEngine(InlineEngine):
    """Cuts a chunk out of cached samples.

    Args:
        job: what to draw, and for which dataset: a `DeviceCached`, or a view of one.
        ring: for pixels that are on the host; those on a device stay there.
        cached: all samples.

    Attributes:
        hits: how many samples it gave.
    """

    def __init__(self, job: Job, ring: Ring, cached: CachedSamples) -> None:
        super().__init__(ring, Counters())
        self._job, self._cached = job, cached
        self._numbers = numbers_of(job.dataset, np.arange(len(job.dataset)))
        self.hits = 0

    def close(self) -> None:
        super().close()
        del self._cached  # whoever still has this, a Loader or its iterator, does not keep the pixels

    def _do(self, request: Request, slot: np.ndarray) -> Reply:
        if request.chunk < self._wanted_from:
            return Reply(request.chunk, Status.UNWANTED, 0, b"")
        start = time.perf_counter_ns()
        columns = self._chunk(request)
        memory: ReadMemory = self._cached.memory
        nbytes = 0
        if memory.on_host and columns.windows is not None:
            nbytes = span_of(columns.windows)
            if nbytes > len(slot):
                return Reply(request.chunk, Status.TOO_LARGE, nbytes, b"")
            memory.write(columns.windows, slot[:nbytes])
            columns.windows = None
        counters = self._counters
        counters.chunks += 1
        counters.samples += len(request.positions)
        counters.pack_ns += time.perf_counter_ns() - start
        self.hits += len(columns)
        return Reply(request.chunk, Status.DONE, nbytes, b"", content=columns)

    def _chunk(self, request: Request) -> Columns:
        numbers, errors = self._look_up(request)
        rows = np.flatnonzero(numbers >= 0)
        columns, regions = self._with_regions(request, rows, numbers[rows], errors)
        if regions is None:  # an image is refused: each by itself, to find which
            good = [row for row in rows if self._with_regions(request, [row], numbers[[row]], errors)[1] is not None]
            rows = np.array(good, np.int64)
            columns, regions = self._with_regions(request, rows, numbers[rows], errors)
        if columns.images:
            assert regions is not None
            cut(columns, regions)
        columns.rows, columns.errors = rows.tolist(), sorted(errors, key=lambda entry: entry[0])
        return columns

    def _look_up(self, request: Request) -> tuple[np.ndarray, list[tuple[int, ErrorRecord]]]:
        """Return the numbers of a chunk's samples, -1 for those that fail, and how these do."""
        errors: list[tuple[int, ErrorRecord]] = []
        keys, count = request.indices, len(self._numbers)
        if isinstance(keys, np.ndarray) and not self._cached.errors and -count <= keys.min() and keys.max() < count:
            return self._numbers[keys], errors
        numbers = np.full(len(keys), -1, np.int64)
        for row, key in enumerate(keys.tolist() if isinstance(keys, np.ndarray) else keys):
            try:
                numbers[row] = self._number(key)
            except (TypeError, IndexError) as error:
                errors.append((row, failure(request, row, None, error)))
                continue
            index = int(key) if isinstance(key, np.integer) else key
            failed = self._cached.error(int(numbers[row]), request.epoch, int(request.positions[row]), index)
            if failed is not None:
                numbers[row] = -1
                errors.append((row, failed))
        return numbers, errors

    def _number(self, key: Any) -> int:
        count = len(self._numbers)
        if isinstance(key, bool) or not isinstance(key, int | np.integer):
            raise TypeError(
                f"a DeviceCached keeps samples by their number, 0 to {count - 1}, and a sampler gave {key!r}"
            )
        if not -count <= key < count:
            raise IndexError(f"there is no sample {key} among the {count} of {type(self._job.dataset).__name__}")
        return int(self._numbers[key])

    def _with_regions(
        self, request: Request, rows: Any, numbers: np.ndarray, errors: list[tuple[int, ErrorRecord]]
    ) -> tuple[Columns, list[np.ndarray] | None]:
        """Return samples, and for each column of images their regions; None if an image is refused, which is recorded
        if it is alone."""
        chain, key = self._job.chain.at(request.epoch), epoch_key(self._job.seed, request.epoch)
        columns, regions = self._cached.take(numbers), []
        try:
            for column in columns.images:
                having = column.row_numbers
                boxes = columns.boxes(having.tolist()) if chain.reads_boxes else None
                positions = request.positions[np.asarray(rows)[having]]
                regions.append(chain.regions(key, positions, column.table["size_hw"], boxes))
        except ValueError as error:
            if len(rows) == 1:
                place = any_of(columns.structure(0), [column.leaves[0] for column in columns.images])
                errors.append((int(rows[0]), failure(request, int(rows[0]), columns.names[0], error, place)))
            return columns, None
        return columns, regions


def span_of(windows: np.ndarray) -> int:
    """Return the bytes of a chunk's pixels, put together."""
    return 0 if not len(windows) else -(-int(windows[-1, 4] + windows[-1, 1] * windows[-1, 2]) // ALIGN) * ALIGN


def copy_windows(memory: np.ndarray, windows: np.ndarray, out: np.ndarray) -> None:
    """Copy windows out of a memory, on the host."""
    for start, rows, row_bytes, step, at in windows.tolist():
        # Each view takes part of a microsecond; slices, reshaped, would take twice as long.
        window = np.ndarray((rows, row_bytes), np.uint8, memory, start, (step, 1))
        np.ndarray((rows, row_bytes), np.uint8, out, at)[...] = window


def cut(columns: Columns, regions_tlhw: Sequence[np.ndarray]) -> None:
    """Cut regions out of whole images: `regions_tlhw` are, for each column of images, those of its rows. Masks get the
    regions of the first images."""
    of_row = np.zeros((len(columns), 4), np.int64)
    of_row[columns.images[0].row_numbers] = regions_tlhw[0]
    of_masks = [(column, of_row[column.row_numbers]) for column in columns.masks]
    windows, at = [], 0
    for column, regions in (*zip(columns.images, regions_tlhw, strict=True), *of_masks):
        table = column.table
        width, pixel = table["shape"][:, 1], table["shape"][:, 2]
        top, left, height, cut_width = regions.T
        row_bytes, step = cut_width * pixel, width * pixel
        ends = at + np.cumsum(-(-height * row_bytes // ALIGN) * ALIGN)
        starts = np.array([at, *ends[:-1]])
        windows.append(np.stack([table["offset"] + top * step + left * pixel, height, row_bytes, step, starts], axis=1))
        table["offset"], table["shape"][:, :2], table["region_tlhw"] = starts, regions[:, 2:], regions
        at = int(ends[-1])
    columns.windows = np.concatenate(windows)


def _copied(value: Any) -> Any:
    """Copy a value: the user may change what a batch holds."""
    if type(value) in PLAIN:
        return value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    return copy.deepcopy(value)


def _size(value: Any) -> int:
    """Return the bytes of a value, about."""
    if isinstance(value, TensorBits):
        value = value.array
    if isinstance(value, np.ndarray):
        return value.nbytes
    inner = getattr(value, "array", None)
    if isinstance(inner, np.ndarray):
        return inner.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return 0 if isinstance(value, int | float | type(None)) else sys.getsizeof(value)
