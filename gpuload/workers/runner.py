"""Processing of a chunk: samples → regions → pixels in a slot. This module runs in a worker or, with num_workers=0, in
the main process.

There are three steps: read the samples from the dataset, and their headers (`_read`); draw all decode regions together
(`_draw`); decode each region into the slot (`_fill_slot`, which calls `_draw` first). A sample that fails is recorded
and dropped; it never fails the chunk. Only the decoder, the dataset, and collated batches that have to be sent again
persist from one chunk to the next.

A chunk that does not fit in its slot gets separate memory (`Chunk.allocate`), so that no sample is read twice. The
chunk is repeated only if it needs more memory than its limit, or if the system has too little.

Images of equal shape that a file stores as one array are copied without flattening samples (`RowCopier`). The results
are identical bit for bit. This avoids the Python code for each sample, which took as long as copying 256×256 pixels. A
chunk with anything unusual, in particular any error, goes through the three steps.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from operator import itemgetter
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from gpuload.datasets.files import size_limits
from gpuload.datasets.kinds import forget, row_bytes
from gpuload.datasets.memory import memory_file
from gpuload.datasets.recognise import is_pillow_image
from gpuload.datasets.sample import takes_meta
from gpuload.datasets.tree import Structure, flatten, transpose_samples
from gpuload.decode.options import select_device_samples
from gpuload.errors import DecodeError, ErrorRecord, LimitError, error_class_names, one_line
from gpuload.order.place import IterablePlace
from gpuload.ring.columns import Collated, Columns, ImageColumn, ValueColumn
from gpuload.ring.packing import ALIGN, write_content
from gpuload.ring.ring import align, map_file, reserve_standard_streams
from gpuload.rng.philox import epoch_key
from gpuload.transforms.convert import converts_on_entry, window_of
from gpuload.transforms.program.draws import image_table
from gpuload.workers.box_fields import box_droppers
from gpuload.workers.counters import FLUSH_BYTES, FLUSH_NS, WorkerCounters
from gpuload.workers.job import Job
from gpuload.workers.planned import make_plan
from gpuload.workers.protocol import (
    MAX_CAUSE,
    MAX_INLINE_BYTES,
    REPLAYING,
    Reply,
    Request,
    Status,
    error_text,
    error_traceback,
    record_of,
)
from gpuload.workers.sample import ImageFailure, Picture, Sample, SampleReader, make_columns
from gpuload.workers.source import EndOfSamples, Source

__all__ = ["Chunk", "ChunkRunner"]

NO_CONTEXT = contextlib.nullcontext()
# The maximum number of cached batches. A collated batch may be requested again with a larger slot, but another worker
# may get this request, so batches can remain in the cache.
CACHED_BATCHES = 8


@dataclass(slots=True)
class Chunk:
    """A chunk in progress: the request and the results so far.

    Attributes:
        request, slot, write_row, is_wanted, populate: as for `ChunkRunner.run`. If the chunk did not fit in its slot,
            `slot` is the separate memory of `file` instead.
        samples: the samples that were read and have not failed.
        columns: the samples as columns, if they are plain data that need not be flattened one by one.
        errors: the failures, each with its row.
        progress: the progress of the pass over an iterable dataset after the chunk's samples.
        file: the file of the chunk's separate memory; None if the chunk has none.
        dataset: the dataset, from whose caches a sample is dropped if it cannot be decoded.
    """

    request: Request
    slot: np.ndarray
    write_row: Callable[[int], None] = lambda row: None
    is_wanted: Callable[[], bool] = lambda: True
    populate: Callable[[int], None] = lambda nbytes: None
    samples: list[Sample] = field(default_factory=list)
    columns: Columns | None = None
    errors: list[tuple[int, ErrorRecord]] = field(default_factory=list)
    progress: IterablePlace | None = None
    file: FileIO | None = None
    dataset: Any = None

    def fail(self, row: int, error: BaseException, source: str | None = None, location: str = "") -> None:
        """Record that the sample of a row failed. `source` is the file of its images, and `location` the location of
        the failed image in the sample."""
        if isinstance(error, ImageFailure) and error.__cause__ is not None:
            source, location, error = error.source, error.location, error.__cause__
        request = self.request
        record = record_of(request.epoch, request.positions[row], request.indices[row], source, error, location)
        caches: list[str] = []
        if isinstance(error, DecodeError) and request.iterable is None:
            with contextlib.suppress(Exception):  # if dropping the sample fails, still report the original error
                caches = forget(self.dataset, request.indices[row])
        if caches:
            note = f"; it was dropped from {' and '.join(caches)}, and will be read again the next time"
            record = replace(record, cause=record.cause + note)
        self.errors.append((row, record))

    def reject(self, status: Status, nbytes: int = 0) -> Reply:
        """Free the separate memory, if any, and return a reply without a result."""
        if self.file is not None:
            self.file.close()
        return Reply(self.request.chunk, status, nbytes, b"")

    def allocate(self, nbytes: int, used_bytes: int = 0) -> np.ndarray | None:
        """Return memory for `nbytes` bytes: the slot or, if it is too small, new memory, to which the first
        `used_bytes` are copied. Return None if `nbytes` exceeds the chunk's limit, or if the allocation fails."""
        if nbytes <= len(self.slot):
            if self.file is None:
                self.populate(nbytes)
            return self.slot
        size = self.request.spare_bytes  # reserve the maximum, since pages that are never written take no memory
        if nbytes > size or self.file is not None:
            return None
        try:
            with reserve_standard_streams():
                self.file = FileIO(memory_file("chunk", size), "r+")
                # If memory is short, this raises an error. Otherwise, writing would end the process with SIGBUS.
                os.posix_fallocate(self.file.fileno(), 0, nbytes)
                memory = map_file(self.file.fileno(), size)
        except (OSError, LimitError):
            return None
        memory[:used_bytes] = self.slot[:used_bytes]
        self.slot = memory
        return memory

    def pack(self, columns: Columns, used_bytes: int = 0, *, keep_types: bool = False) -> Reply:
        """Write the columns and the errors so far to the slot, after `used_bytes` bytes of pixels; return the reply.
        `keep_types` is passed to `write_content`."""
        columns.errors, columns.iterable = sorted(self.errors, key=itemgetter(0)), self.progress
        reserve = partial(self.allocate, used_bytes=used_bytes)
        options: dict[str, Any] = {"inline_bytes": MAX_INLINE_BYTES, "keep_types": keep_types, "reserve": reserve}
        packed = write_content(columns, self.slot, used_bytes, **options)
        if not packed.is_written:
            return self.reject(Status.TOO_LARGE, packed.nbytes)
        plain = bool(packed.meta) and columns.is_plain(len(self.request.positions))
        reply = self.request.chunk, Status.DONE, packed.nbytes, packed.meta, packed.meta_at
        return Reply(*reply, plain=plain, file=self.file)


class ChunkRunner:
    """A runner that processes chunks one after another.

    Args:
        job: the dataset, transforms and options.
        guard_generators: whether to restore the global random generators after each chunk, as in the user's process.

    Attributes:
        source: reads the samples.
        counters: the counters of this process.
    """

    def __init__(self, job: Job, *, guard_generators: bool) -> None:
        self.job = job
        self._reader = SampleReader(job)
        # A collate_fn draws from the generators as the last sample has left them, so seeding must not be skipped.
        self.source = Source(job.dataset, job.seed, is_learning=job.collate_fn is None)
        self._row_copier = RowCopier(job) if RowCopier.can_copy(job) else None
        self.counters = WorkerCounters()
        self._guards_generators = guard_generators
        # A batch of plain data is collated in the worker; a batch with images is collated after the stage.
        self._collates = job.collate_fn is not None and not len(job.chain)
        self._keeps_types = job.collate_fn is not None or job.is_unbatched
        # Samples that turn out to be plain data are stacked, unless other code needs single samples.
        self._should_stack = job.plain and not self._keeps_types
        self._batches: dict[Any, Collated] = {}  # collated batches that are not in a slot yet
        self._can_send_batches = False  # becomes True when a collated batch is sent

    @property
    def counters(self) -> WorkerCounters:
        return self._counters

    @counters.setter
    def counters(self, counters: WorkerCounters) -> None:
        self._counters = self.source.counters = counters
        self._reader.set_counters(counters)

    def run(
        self,
        request: Request,
        slot: np.ndarray,
        write_row: Callable[[int], None],
        is_wanted: Callable[[], bool],
        populate: Callable[[int], None] = lambda nbytes: None,
    ) -> Reply:
        """Process the chunk, or plan the batch, and return the reply. `write_row` is called with each row before the
        row is processed. If `is_wanted` returns False between two rows, the chunk is abandoned. `populate` is called
        with the number of bytes that will be written to the slot, before they are written."""
        chunk = Chunk(request, slot, write_row, is_wanted, populate, dataset=self.job.dataset)
        counters, start = self._counters, clock()
        if request.is_planning:
            write_row(len(request.positions))  # a row past the end means that no sample is being processed
            reply = make_plan(self.job, request, slot)
            counters.plans, counters.plan_ns = counters.plans + 1, counters.plan_ns + clock() - start
            return reply
        counters.chunks += 1
        if self._row_copier is not None and self._reader.is_search_over:
            reply = self._row_copier.fill(chunk, counters)
            if reply is not None:
                return reply
        with self._preserve_generators(), size_limits(self.job.decode.max_bytes, self.job.decode.max_pixels):
            if not self._read(chunk):
                return chunk.reject(Status.UNWANTED)
            start = clock()
            collated = self._collate_in_worker(chunk)
        reply = None if chunk.columns is None else self._pack_columns(chunk, chunk.columns)
        if collated is not None:
            rows = [sample.row for sample in chunk.samples]
            content = Columns(rows, sources=[None] * len(rows), collated=collated)
            try:
                reply = chunk.pack(content, keep_types=True)
                self._can_send_batches = True
                counters.collated, counters.collate_ns = counters.collated + 1, counters.collate_ns + clock() - start
            except Exception:
                # The batch cannot be sent (it holds a generator or a lock, say), so the main process collates. Read the
                # samples again, since the collate_fn may have changed them; for an iterator, it was given copies.
                self._collates = False
                if request.iterable is None:
                    return self.run(request, slot, write_row, is_wanted, populate)
        if reply is None:
            reply = self._fill_slot(chunk)
        if reply.status is Status.DONE:
            self._batches.pop(_batch_key(request), None)
            self._reader.clear_warning()
        return reply

    def _preserve_generators(self) -> contextlib.AbstractContextManager[None]:
        seeding = self.source.seeding
        return seeding.preserve_states() if self._guards_generators and seeding is not None else NO_CONTEXT

    def begin(self, request: Request) -> IterablePlace:
        """Start the pass of a request, and return its progress before the first chunk."""
        with self._preserve_generators():
            return self.source.begin(request)

    def _read(self, chunk: Chunk) -> bool:
        """Read the samples from the dataset, and their headers; return False if the chunk is no longer wanted."""
        request, counters, start = chunk.request, self._counters, clock()
        rows, done_count = len(request.positions), 0
        read_before = counters.read_ns
        read_sample = self.source.open(
            request, lambda is_replay: chunk.write_row(REPLAYING if is_replay else min(done_count, rows - 1))
        )
        if self._should_stack and (plain_columns := self.source.select_plain_samples(request)) is not None:
            chunk.write_row(0)
            chunk.columns = _stacked_columns(range(rows), *plain_columns)
            counters.samples += rows
            return True
        samples: dict[int, Any] = {}  # keyed by row; used only if samples are stacked
        is_wanted, write_row, add_read_time, should_stack = (
            chunk.is_wanted,
            chunk.write_row,
            self.source.add_read_time,
            self._should_stack,
        )
        read_start = clock()
        for row in range(rows):
            if not is_wanted():
                return False
            write_row(row)
            try:
                sample = read_sample(row)
                # If samples are stacked, they are small, and timing each of them would double its time.
                if not should_stack or clock() - read_start > FLUSH_NS:
                    read_start = add_read_time(read_start)
                if should_stack:
                    samples[row] = sample
                else:
                    chunk.samples.append(self._reader.read(row, sample))
                    read_start = clock()
            except EndOfSamples:
                break
            except Exception as error:
                chunk.fail(row, error)
                if self.source.broken:
                    done_count += 1
                    break
            done_count += 1
        if should_stack:
            add_read_time(read_start)
        if self.source.seeding is not None and self.source.seeding.has_drawn_unseeded():
            chunk.samples, chunk.errors = [], []
            return self._read(chunk)
        chunk.progress = self.source.progress(request, done_count)
        counters.samples += done_count
        if samples:
            self._stack(chunk, samples)
        counters.header_ns += clock() - start - (counters.read_ns - read_before)
        return True

    def _stack(self, chunk: Chunk, samples: dict[int, Any]) -> None:
        """Stack samples, keyed by row, into columns. If they cannot be stacked, flatten them and all later samples one
        by one."""
        if (columns := transpose_samples([*samples.values()])) is not None:
            chunk.columns = _stacked_columns(samples, *columns)
            return
        self._should_stack = False
        for row, sample in samples.items():
            chunk.write_row(row)
            try:
                chunk.samples.append(self._reader.read(row, sample))
            except Exception as error:
                chunk.fail(row, error)

    def _pack_columns(self, chunk: Chunk, columns: Columns) -> Reply:
        """Pack the samples of a chunk that are plain data."""
        counters, start = self._counters, clock()
        try:
            reply = chunk.pack(columns)
        except Exception as error:  # a leaf cannot be sent
            for row in columns.rows:
                chunk.fail(row, _unsendable(error))
            reply = chunk.pack(Columns())
        counters.pack_ns += clock() - start
        return reply

    def _collate_in_worker(self, chunk: Chunk) -> Collated | None:
        """Call `collate_fn` and return its batch; return None if the main process has to collate. If a chunk is
        repeated with a larger slot, return the first result again, since `collate_fn` may have changed the samples."""
        request, samples = chunk.request, chunk.samples
        if (
            not self._collates
            or not request.is_complete_batch
            or not samples
            or chunk.errors
            or any(s.images for s in samples)
        ):
            return None
        chunk.write_row(0)
        key = _batch_key(request)
        if key not in self._batches:
            keeps_meta = takes_meta(self.job.collate_fn)
            batch = [sample.original if keeps_meta else sample.to_plain() for sample in samples]
            if request.iterable is not None and not self._can_send_batches:
                leaves = [value for sample in samples for value in sample.values.values()]
                images = {id(leaf): leaf.copy() for leaf in leaves if is_pillow_image(leaf)}  # with their palettes
                with contextlib.suppress(Exception):  # some samples cannot be copied
                    batch = copy.deepcopy(batch, images)
            self._batches[key] = self._collate(batch)
            if len(self._batches) > CACHED_BATCHES:
                self._batches.pop(next(iter(self._batches)))
        return self._batches[key]

    def _collate(self, samples: list[Any]) -> Collated:
        """Run the user's `collate_fn`, and return its result or error."""
        assert self.job.collate_fn is not None
        try:
            return Collated(self.job.collate_fn(samples[0] if self.job.is_unbatched else samples))
        except Exception as error:
            return Collated(
                error=one_line(f"{type(error).__name__}: {error_text(error)}", MAX_CAUSE),
                traceback=error_traceback(error),
                error_classes=error_class_names(error),
            )

    def _fill_slot(self, chunk: Chunk) -> Reply:
        """Draw the regions of the samples, decode them into the slot, and pack the description after them."""
        counters, now_ns = self._counters, clock()
        self._draw(chunk)
        samples, chunk.samples = chunk.samples, []
        # Check the size before any pixel is decoded.
        nbytes = sent_bytes = self._reserve_encoded(chunk.request, samples) if self.job.device_share else 0
        for sample in samples:
            for picture in sample.pictures:
                if not picture.encoded_fields:
                    height, width, channels = picture.shape
                    nbytes += align(height * width * channels, ALIGN)
        if chunk.allocate(nbytes) is None:
            return chunk.reject(Status.TOO_LARGE, nbytes)
        end, flush_at = sent_bytes, sent_bytes + FLUSH_BYTES
        last_ns, now_ns = now_ns, clock()
        counters.header_ns += now_ns - last_ns
        counters.bytes_decoded += nbytes - sent_bytes
        cut_count = 0
        for i, sample in enumerate(samples):
            if not chunk.is_wanted():
                return chunk.reject(Status.UNWANTED)
            chunk.write_row(sample.row)
            if i == cut_count:
                cut_count += self._reader.cut_files(samples[i:])
            try:
                end = self._reader.decode(sample, chunk.slot, end)
            except Exception as error:
                chunk.fail(sample.row, error, sample.source)
            else:
                chunk.samples.append(sample)
            if end > flush_at:
                last_ns, now_ns, flush_at = now_ns, clock(), end + FLUSH_BYTES
                counters.decode_ns += now_ns - last_ns
                counters.flush()
        last_ns, now_ns = now_ns, clock()
        counters.decode_ns += now_ns - last_ns
        columns = make_columns(chunk.samples, sent_bytes)
        columns.warning = self._reader.warning
        try:
            reply = chunk.pack(columns, end, keep_types=self._keeps_types)
        except Exception as error:
            # A leaf cannot be sent. Fail all samples, since a dataset usually returns the same types for each sample.
            for sample in chunk.samples:
                chunk.fail(sample.row, _unsendable(error), sample.source)
            reply = chunk.pack(Columns())
        counters.pack_ns += clock() - now_ns
        return reply

    def _reserve_encoded(self, request: Request, samples: list[Sample]) -> int:
        """Choose the images that the device decodes; return the number of bytes that their files take in the slot."""
        chosen, nbytes = select_device_samples(request.positions, self.job.device_share), 0
        for sample in samples:
            if chosen[sample.row]:
                nbytes = self._reader.reserve_encoded(sample, nbytes)
        return nbytes

    def _draw(self, chunk: Chunk) -> None:
        """Draw the regions of all images and masks; drop samples that a transform refuses."""
        try:
            return self._draw_regions(chunk.request, chunk.samples)
        except ValueError:  # draw again, sample by sample, to find the refused samples
            samples, chunk.samples = chunk.samples, []
        for sample in samples:
            try:
                self._draw_regions(chunk.request, [sample])
                chunk.samples.append(sample)
            except ValueError as error:
                chunk.fail(sample.row, error, sample.source, sample.location)

    def _draw_regions(self, request: Request, samples: list[Sample]) -> None:
        images = [(sample, image) for sample in samples for image in sample.images.values()]
        for draws in dict.fromkeys([image.draws for _, image in images]):
            self._draw_images(request, draws, [entry for entry in images if entry[1].draws == draws])

    def _draw_images(self, request: Request, draws: int, images: list[tuple[Sample, Picture]]) -> None:
        """Draw the regions of images that have the same `draws`."""
        positions = request.positions[[sample.row for sample, _ in images]]
        sizes = np.array([(image.height, image.width) for _, image in images], np.int64)
        boxes = [sample.boxes(draws) for sample, _ in images] if self.job.chain.reads_boxes else None
        key = epoch_key(self.job.seed, request.epoch)
        chain, resize = self.job.chain_of(request), None
        if self.job.decode.scale == "fast" and chain.resizes_late is None:
            regions, resize = chain.resizes(key, positions, sizes, boxes, draws=draws)
        else:
            regions = chain.regions(key, positions, sizes, boxes, draws=draws)
        for (sample, image), region in zip(images, regions.tolist(), strict=True):
            image.region = region
            for mask in sample.masks.values():  # masks get the region of the first image
                if mask.draws == draws:
                    mask.region = mask.region or region
        if resize is not None:
            self._reader.resize([image for _, image in images], resize)


class RowCopier:
    """A fast path that copies rows of an `ArrayFile` to slots."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._dataset: Any = job.dataset
        self._structure = flatten(0 if self._dataset.labels is None else (0, 0), [])

    @staticmethod
    def can_copy(job: Job) -> bool:
        """Return whether a job reads images of an `ArrayFile`, and neither user code nor boxes need single samples."""
        chain = job.chain
        if not row_bytes(job.dataset):
            return False
        if (job.dataset.dtype != np.uint8 or window_of(chain) is not None) and converts_on_entry(chain):
            return False
        return not (job.collate_fn is not None or chain.frames or chain.reads_boxes or box_droppers(chain))

    def fill(self, chunk: Chunk, counters: WorkerCounters) -> Reply | None:
        """Copy the samples of a chunk to its slot; return None if the chunk has to go through the three steps."""
        request, now_ns = chunk.request, clock()
        try:
            indices = self._find_indices(request.indices)
            images = None if indices is None else self._dataset._image_rows(indices.tolist())
            if indices is None or images is None:
                return None
            table = self._draw_table(request, images)
        except Exception:  # the three steps will identify the sample that fails
            return None
        nbytes = int(table["offset"][-1]) + align(int(table["shape"][-1].prod()), ALIGN)
        if chunk.allocate(nbytes) is None:
            return chunk.reject(Status.TOO_LARGE, nbytes)
        counters.bytes_read += len(indices) * images[0].nbytes
        counters.bytes_decoded += nbytes
        last_ns, now_ns = now_ns, clock()
        counters.header_ns += now_ns - last_ns
        flat = images.reshape(len(images), -1).view(np.uint8)  # a view of the file's mapping
        uncropped, flush_at = bool((table["region_tlhw"][:, 2:] == table["size_hw"]).all()), 0
        columns = (table[name].tolist() for name in ("offset", "shape", "region_tlhw"))
        for row, (index, offset, shape, region_tlhw) in enumerate(zip(indices.tolist(), *columns, strict=True)):
            (height, width, channels), (top, left, _, _) = shape, region_tlhw
            if offset >= flush_at:
                last_ns, now_ns, flush_at = now_ns, clock(), offset + FLUSH_BYTES
                counters.decode_ns += now_ns - last_ns
                counters.flush()
                if not chunk.is_wanted():
                    return chunk.reject(Status.UNWANTED)
            chunk.write_row(row)
            out = chunk.slot[offset : offset + height * width * channels]
            if uncropped:
                out[...] = flat[index]
            else:
                region = images[index, top : top + height, left : left + width]
                out.view(images.dtype).reshape(region.shape)[...] = region
        counters.samples += len(indices)
        last_ns, now_ns = now_ns, clock()
        counters.decode_ns += now_ns - last_ns
        reply = chunk.pack(self._make_columns(indices, table, images.dtype), nbytes)
        counters.pack_ns += clock() - now_ns
        return reply

    def _find_indices(self, indices: Any) -> np.ndarray | None:
        """Return the sample indices of a chunk; None if its keys are not valid indices."""
        if not isinstance(indices, np.ndarray) or indices.dtype.kind not in "iu" or not len(indices):
            return None
        return indices if indices.min() >= 0 and indices.max() < len(self._dataset) else None

    def _draw_table(self, request: Request, images: np.ndarray) -> np.ndarray:
        """Draw the regions of a chunk's images, and return the table of their `ImageColumn`."""
        _, height, width, channels = images.shape
        sizes = np.empty((len(request.positions), 2), np.int64)
        sizes[:] = height, width
        chain = self._job.chain_of(request)
        regions = chain.regions(epoch_key(self._job.seed, request.epoch), request.positions, sizes)
        shapes = np.column_stack([regions[:, 2:], np.full(len(sizes), channels * images.itemsize)])
        nbytes: Any = align(shapes.prod(axis=1), ALIGN)  # pyright: ignore[reportArgumentType]
        return image_table(nbytes.cumsum() - nbytes, shapes, sizes, regions)

    def _make_columns(self, indices: np.ndarray, table: np.ndarray, dtype: np.dtype[Any]) -> Columns:
        labels, count = self._dataset.labels, len(indices)
        values = {}
        if labels is not None:
            chunk_labels = labels[indices]
            values[1] = ValueColumn(chunk_labels.tolist() if chunk_labels.ndim == 1 else list(chunk_labels))
        kinds: list[Any] = [(dtype.name, 3)] if dtype.itemsize > 1 else []
        images = [ImageColumn(table, [0], None, kinds)]
        return Columns(list(range(count)), [self._structure], images, values, [None] * count)


def _stacked_columns(rows: Iterable[int], structure: Structure, leaves: Sequence[Sequence[Any]]) -> Columns:
    """Return the columns of samples that are plain data, from the values of each leaf."""
    rows = list(rows)
    values = {leaf: ValueColumn(column) for leaf, column in enumerate(leaves)}
    return Columns(rows, [structure], values=values, sources=[None] * len(rows))


def _batch_key(request: Request) -> tuple[Any, ...]:
    return request.epoch, int(request.positions[0]), request.iterable and request.iterable.pass_number


def _unsendable(error: Exception) -> TypeError:
    return TypeError(
        f"the sample cannot be sent to the main process ({type(error).__name__}: {error}); "
        "return images, arrays, numbers and strings"
    )
