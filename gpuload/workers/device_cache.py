"""The samples of a `DeviceCached`, and the engine that makes chunks from them. The engine replaces the workers once all
samples have been read.

`CachedSamples` is filled once, from chunks of uncropped images, and then only read. Its pixels are in a `PixelMemory`
(`gpuload.stage.device_cache`), one image after another; offsets count from the first byte of that memory. The values of
the samples are in the main process's ordinary memory.

Each chunk of a `CacheEngine` is a complete batch. The engine draws regions with the same functions as workers, so the
batches are identical. A chunk's pixels are described by *windows*, one `WINDOW` per image and mask. The windows are
laid out as a worker lays out pixels in a slot, so later stages see the same bytes.

This module runs in the main process, starts no process or thread, and does not import torch.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final

import numpy as np

from gpuload.datasets.resident import cached_indices
from gpuload.datasets.tree import join_key_paths
from gpuload.errors import ErrorRecord
from gpuload.ring.columns import Columns
from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring, align
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import DrawError
from gpuload.workers.counters import Counters
from gpuload.workers.inline import SequentialEngine
from gpuload.workers.job import Job
from gpuload.workers.protocol import Reply, Request, Status
from gpuload.workers.runner import Chunk

__all__ = ["WINDOW", "CacheEngine", "CachedSamples", "cut_regions", "total_pixel_bytes"]

IMMUTABLE: Final = frozenset({type(None), bool, int, float, str, bytes, complex})
POINTER_BYTES: Final = 8
# The fields are a window's offset in the cache's memory, its number of rows, the bytes per row, the row stride in
# bytes, and the window's offset in the chunk.
WINDOW: Final = np.dtype([(name, np.int64) for name in ("start", "rows", "row_bytes", "step", "at")])


class CachedSamples:
    """The cached samples of a dataset. Add all samples and call `finish`; then `take` returns any of them.

    Args:
        count: the number of samples in the dataset.
        memory: the memory for their pixels, a `gpuload.stage.device_cache.PixelMemory`.

    Attributes:
        errors: the records of the failed samples, keyed by sample index.
        host_bytes: the approximate size of the values, which are on the host: arrays, bytes and strings.
    """

    def __init__(self, count: int, memory: Any) -> None:
        self.count, self.memory = count, memory
        self.errors: dict[Any, ErrorRecord] = {}
        self.host_bytes = 0
        self._chunks: list[Columns] = []
        self._starts: list[int] = []  # the offset of each chunk in the memory
        self._rows = np.full(count, -1)  # the row of each sample in the columns
        self._added_count = 0

    def add(self, columns: Columns, indices: Any, data: np.ndarray) -> None:
        """Cache the samples of a chunk of uncropped images. `indices` are the sample indices of the chunk's rows, and
        `data` holds the chunk's bytes, which are copied."""
        columns.unstack(list(columns.blocks), data)
        images = [*columns.images, *columns.masks]
        ends = [int((column.table["offset"] + column.table["shape"].prod(axis=1)).max()) for column in images]
        self._starts.append(self.memory.add(data[: max(ends)]) if ends else 0)
        self._chunks.append(columns)
        self._rows[np.asarray(indices)[columns.rows]] = np.arange(len(columns)) + self._added_count
        self._added_count += len(columns)
        values = (value for column in (*columns.values.values(), *columns.points.values()) for value in column.values)
        sizes = [
            *map(_size_bytes, values),
            *(0 if source is None else sys.getsizeof(source) for source in columns.source_list),
        ]
        self.host_bytes += sum(sizes) + POINTER_BYTES * len(sizes)

    def finish(self) -> None:
        """Merge the chunks, once all samples have been added."""
        self._columns = Columns.concat(self._chunks, self._starts)
        del self._chunks, self._starts

    def take(self, indices: np.ndarray) -> Columns:
        """Return the samples at these indices. Their images are uncropped, at offsets in `memory`."""
        columns = self._columns.take(self._rows[indices])
        for column in (*columns.values.values(), *columns.points.values()):
            if not IMMUTABLE.issuperset(map(type, column.values)):
                column.values = list(map(_copy_value, column.values))
        return columns


class CacheEngine(SequentialEngine):
    """An engine that makes chunks from cached samples.

    Args:
        job: the transforms, and the dataset, which is a `DeviceCached` or a view of one.
        ring: receives the pixels if they are cached on the host; pixels on a device stay there.
        cached: all samples of the dataset.

    Attributes:
        hits: the number of samples that came from the cache.
    """

    def __init__(self, job: Job, ring: Ring, cached: CachedSamples) -> None:
        super().__init__(ring, Counters())
        self._job, self._cached = job, cached
        self._cache_indices = cached_indices(job.dataset)
        self.hits = 0

    def close(self) -> None:
        super().close()
        del self._cached  # a Loader or iterator that still refers to this engine must not keep the pixels in memory

    def _process(self, request: Request, slot: np.ndarray) -> Reply:
        chunk = Chunk(request, slot)
        if request.chunk < self._wanted_from:
            return chunk.reject(Status.UNWANTED)
        start = time.perf_counter_ns()
        columns = self._make_columns(chunk)
        nbytes = 0
        if self._cached.memory.is_on_host and columns.windows is not None:
            nbytes = total_pixel_bytes(columns.windows)
            if nbytes > len(slot):
                return chunk.reject(Status.TOO_LARGE, nbytes)
            self._cached.memory.copy(columns.windows, slot[:nbytes])
            columns.windows = None
        counters = self._counters
        counters.chunks += 1
        counters.samples += len(request.positions)
        counters.pack_ns += time.perf_counter_ns() - start
        self.hits += len(columns)
        return Reply(request.chunk, Status.DONE, nbytes, b"", content=columns)

    def _make_columns(self, chunk: Chunk) -> Columns:
        indices = self._find_indices(chunk)
        rows = np.flatnonzero(indices >= 0)
        while True:
            columns = self._cached.take(indices[rows])
            try:
                regions = self._draw_regions(chunk.request, rows, columns)
                break
            except DrawError as error:
                refused_columns = columns.take(np.array([error.row]))
                place = join_key_paths(
                    refused_columns.structure(0), [column.leaves[0] for column in refused_columns.images]
                )
                chunk.fail(int(rows[error.row]), error, refused_columns.source_list[0], place)
                rows = np.delete(rows, error.row)
        if columns.images:
            cut_regions(columns, regions)
        columns.rows, columns.errors = rows.tolist(), sorted(chunk.errors, key=itemgetter(0))
        return columns

    def _find_indices(self, chunk: Chunk) -> np.ndarray:
        """Return the indices of a chunk's samples in the cache; -1 means that the sample failed."""
        request, count = chunk.request, len(self._cache_indices)
        keys = request.indices
        if isinstance(keys, np.ndarray) and not self._cached.errors and -count <= keys.min() and keys.max() < count:
            return self._cache_indices[keys]
        indices = np.full(len(keys), -1, np.int64)
        key: Any
        for row, key in enumerate(keys.tolist() if isinstance(keys, np.ndarray) else keys):
            try:
                index = self._find_index(key)
            except (TypeError, IndexError) as error:
                chunk.fail(row, error)
            else:
                if (record := self._cached.errors.get(index)) is None:
                    indices[row] = index
                else:
                    position = int(request.positions[row])
                    chunk.errors.append((row, replace(record, epoch=request.epoch, position=position, index=int(key))))
        return indices

    def _find_index(self, key: Any) -> int:
        count = len(self._cache_indices)
        if isinstance(key, bool) or not isinstance(key, int | np.integer):
            raise TypeError(
                f"the keys of a DeviceCached are the integers 0 to {count - 1}, but the sampler yielded {key!r}"
            )
        if not -count <= key < count:
            raise IndexError(f"there is no sample {key} among the {count} of {type(self._job.dataset).__name__}")
        return int(self._cache_indices[key])

    def _draw_regions(self, request: Request, rows: np.ndarray, columns: Columns) -> list[np.ndarray]:
        """Draw the regions of the images; return one array per column. `rows` are the request's rows of the samples.

        Raises:
            DrawError: a transform refuses an image; the error's `row` is the row in `columns`.
        """
        chain, key, regions = self._job.chain.at(request.epoch), epoch_key(self._job.seed, request.epoch), []
        for column in columns.images:
            image_rows = column.row_indices
            boxes = columns.boxes(image_rows.tolist()) if chain.reads_boxes else None
            try:
                regions.append(chain.regions(key, request.positions[rows[image_rows]], column.table["size_hw"], boxes))
            except DrawError as error:
                raise DrawError(error.message, int(image_rows[error.row])) from None
        return regions


def total_pixel_bytes(windows: np.ndarray) -> int:
    """Return the number of bytes that a chunk's pixels take, including the padding between images."""
    if not len(windows):
        return 0
    last = windows[-1]
    return align(int(last["at"] + last["rows"] * last["row_bytes"]), ALIGN)


def cut_regions(columns: Columns, regions_tlhw: Sequence[np.ndarray]) -> None:
    """Replace the uncropped images and masks in `columns` by windows on their regions. `regions_tlhw` has one array per
    column of images, with one region per image. A mask gets the region of the first image in its sample."""
    first_regions = np.zeros((len(columns), 4), np.int64)
    first_regions[columns.images[0].row_indices] = regions_tlhw[0]
    mask_regions = [(column, first_regions[column.row_indices]) for column in columns.masks]
    window_parts, offset = [], 0
    for column, regions in (*zip(columns.images, regions_tlhw, strict=True), *mask_regions):
        table, windows = column.table, np.empty(len(regions), WINDOW)
        width, pixel_bytes = table["shape"][:, 1], table["shape"][:, 2]
        top, left, windows["rows"], cut_width = regions.T
        windows["row_bytes"], windows["step"] = cut_width * pixel_bytes, width * pixel_bytes
        windows["start"] = table["offset"] + top * windows["step"] + left * pixel_bytes
        ends = offset + np.cumsum(-(-windows["rows"] * windows["row_bytes"] // ALIGN) * ALIGN)
        windows["at"] = [offset, *ends[:-1]]
        table["offset"], table["shape"][:, :2], table["region_tlhw"] = windows["at"], regions[:, 2:], regions
        window_parts.append(windows)
        offset = int(ends[-1])
    columns.windows = np.concatenate(window_parts)


def _copy_value(value: Any) -> Any:
    """Return a value for the user's batch: a copy, unless it is immutable, since the user may modify it."""
    if type(value) in IMMUTABLE:
        return value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    return copy.deepcopy(value)


def _size_bytes(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    array = getattr(value, "array", value)  # targets and packed tensors have an `array`
    if isinstance(array, np.ndarray):
        return array.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size_bytes, value.values()))
    return 0 if isinstance(value, int | float | type(None)) else sys.getsizeof(value)
