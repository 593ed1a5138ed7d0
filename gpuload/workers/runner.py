"""Doing one chunk: samples → regions → pixels in a slot. Runs in a worker or, with num_workers=0, the main process.

There are three steps: take the samples from the dataset and read the headers; draw all decode regions at once; decode
each region into the slot. A sample that fails is recorded and left out; it never fails the chunk. From one chunk to the
next only the decoder, the dataset, and collated batches that did not fit their slot are kept.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from gpuload.datasets.files import limited
from gpuload.decode.options import device_rows
from gpuload.errors import ErrorRecord, kinds_of, one_line
from gpuload.order.place import IterablePlace
from gpuload.ring.columns import Collated, Columns
from gpuload.ring.packing import ALIGN, write_content
from gpuload.ring.ring import align
from gpuload.rng.generators import kept
from gpuload.rng.philox import epoch_key
from gpuload.workers.counters import FLUSH_BYTES, Counters
from gpuload.workers.job import Job
from gpuload.workers.planned import make_plan
from gpuload.workers.protocol import (
    MAX_CAUSE,
    MAX_INLINE_BYTES,
    Reply,
    Request,
    Status,
    record_of,
    text_of,
    traceback_of,
)
from gpuload.workers.rows import row_copier
from gpuload.workers.sample import Region, Sample, SampleReader, Sourced, as_columns
from gpuload.workers.source import Ended, Source

__all__ = ["ChunkRunner", "failure"]

KEPT_BATCHES = 8  # collated, and waiting for a larger slot, which another worker may get


class ChunkRunner:
    """Does chunks, one after the other.

    Args:
        job: dataset, transforms, options.
        guard_generators: put the global random generators back after each chunk (in the user's own process).

    Attributes:
        source: gives the samples.
        counters: where it counts what it does.
    """

    def __init__(self, job: Job, *, guard_generators: bool) -> None:
        self.job = job
        self._reader = SampleReader(job)
        self.source = Source(job.dataset, job.seed)
        self._rows = row_copier(job)
        self.counters = Counters()
        self._guard = guard_generators and self.source.seeds
        # A batch of plain data is collated in the worker; with images, after the stage.
        self._collates = job.collate_fn is not None and not len(job.chain) and not job.whole
        self._made: dict[Any, Collated] = {}  # collated, but not yet in a slot
        self._sends = False  # whether a collated batch could be sent

    @property
    def counters(self) -> Counters:
        return self._counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._counters = self.source.counters = counters
        self._reader.count_in(counters)
        if self._rows is not None:
            self._rows.counters = counters

    def run(
        self,
        request: Request,
        slot: np.ndarray,
        note: Callable[[int], None],
        wanted: Callable[[], bool],
    ) -> Reply:
        """Do the chunk, or plan the batch; `note` is told each row before it is touched, `wanted` ends the work between
        two rows."""
        rows, counters, start = len(request.positions), self._counters, clock()
        if request.plans:
            note(rows)  # at no sample
            reply = make_plan(self.job, request, slot)
            counters.plans, counters.plan_ns = counters.plans + 1, counters.plan_ns + clock() - start
            return reply
        counters.chunks += 1
        if self._rows is not None and self._reader.has_looked:
            filled = self._rows.fill(request, slot, note, wanted)
            if isinstance(filled, Reply):
                return filled
            if filled is not None:
                start = clock()
                reply = _pack(request, slot, filled[1], filled[0])
                counters.pack_ns += clock() - start
                return reply
        loaded: list[Sample] = []
        errors: list[tuple[int, ErrorRecord]] = []
        collated = None
        with kept() if self._guard else contextlib.nullcontext(), limited(self.job.decode.max_bytes):
            self.source.count()  # of a chunk that was broken off
            read_before = counters.read_ns
            samples = self.source.open(request, lambda: note(min(len(loaded) + len(errors), rows - 1)))
            for row in range(rows):
                if not wanted():
                    return Reply(request.chunk, Status.UNWANTED, 0, b"")
                note(row)
                try:
                    loaded.append(self._reader.read(row, samples(row)))
                except Ended:
                    rows = row
                    break
                except Exception as error:
                    errors.append((row, failure(request, row, None, error)))
                    if self.source.broken:
                        rows = row + 1
                        break
            place = self.source.place(request, rows)
            counters.samples += rows
            self.source.count()
            counters.header_ns += clock() - start - (counters.read_ns - read_before)
            start = clock()
            if self._collates and request.whole and loaded and not errors and not any(s.images for s in loaded):
                note(0)
                collated = self._collated(request, [sample.given for sample in loaded])
        reply = None
        if collated is not None:
            content = Columns([s.row for s in loaded], sources=[None] * rows, collated=collated, iterable=place)
            try:
                reply = _pack(request, slot, 0, content, keep_types=True)
                self._sends = True
                counters.collated, counters.collate_ns = counters.collated + 1, counters.collate_ns + clock() - start
            except Exception:
                # It cannot be sent (a generator, say, or an object with a lock), so the main process collates. The
                # samples may have changed, so the dataset gives them again; an iterator's were copied before.
                self._collates = False
                if request.iterable is None:
                    return self.run(request, slot, note, wanted)
        if reply is None:
            reply = self._finish(request, slot, note, wanted, loaded, errors, place)
        if reply.status is Status.DONE:
            self._made.pop(_made_key(request), None)
            self._reader.said()
        return reply

    def begin(self, request: Request) -> IterablePlace:
        """Where the pass of a request begins, before its first chunk is done."""
        with kept() if self._guard else contextlib.nullcontext():
            return self.source.begin(request)

    def _finish(
        self,
        request: Request,
        slot: np.ndarray,
        note: Callable[[int], None],
        wanted: Callable[[], bool],
        loaded: list[Sample],
        errors: list[tuple[int, ErrorRecord]],
        place: IterablePlace | None,
    ) -> Reply:
        """Put the samples into the slot."""
        counters, start = self._counters, clock()
        regions = self._regions(request, loaded, errors)
        # Check the size before any pixel is decoded.
        nbytes = sent_bytes = self._send(request, loaded) if self.job.device_share else 0
        for sample, own in zip(loaded, regions, strict=True):
            pictures = [*sample.images.values(), *sample.masks.values()]
            for picture, region in zip(pictures, own, strict=True):
                if not picture.sent:
                    height, width, channels = picture.shape(region)
                    nbytes += align(height * width * channels, ALIGN)
        if nbytes > len(slot):
            return Reply(request.chunk, Status.TOO_LARGE, nbytes, b"")
        decoded: list[Sample] = []
        at, due = sent_bytes, sent_bytes + FLUSH_BYTES
        before, start = start, clock()
        counters.header_ns += start - before
        counters.bytes_decoded += nbytes - sent_bytes
        were_cut = 0
        for number, (sample, own) in enumerate(zip(loaded, regions, strict=True)):
            if not wanted():
                return Reply(request.chunk, Status.UNWANTED, 0, b"")
            note(sample.row)
            if number == were_cut:
                were_cut += self._reader.cut(loaded[number:], regions[number:])
            try:
                at = self._reader.decode(sample, own, slot, at)
            except Exception as error:
                errors.append((sample.row, failure(request, sample.row, sample.source, error)))
            else:
                decoded.append(sample)
            if at > due:
                before, start, due = start, clock(), at + FLUSH_BYTES
                counters.decode_ns += start - before
                counters.flush()
        before, start = start, clock()
        counters.decode_ns += start - before
        reply = self._reply(request, slot, at, decoded, errors, place, sent_bytes)
        counters.pack_ns += clock() - start
        return reply

    def _send(self, request: Request, loaded: list[Sample]) -> int:
        """Choose the images that the device decodes; returns how many bytes of the slot their files take."""
        here, nbytes = device_rows(request.positions, self.job.device_share), 0
        for sample in loaded:
            if here[sample.row]:
                nbytes = self._reader.send(sample, nbytes)
        return nbytes

    def _collated(self, request: Request, samples: list[Any]) -> Collated:
        """The batch from `collate_fn`, called only once: it may change the samples, so a chunk that is done again in a
        larger slot gets the first result."""
        key = _made_key(request)
        if key not in self._made:
            if request.iterable is not None and not self._sends:
                with contextlib.suppress(Exception):  # some samples cannot be copied
                    samples = copy.deepcopy(samples)
            self._made[key] = self._collate(samples)
            if len(self._made) > KEPT_BATCHES:
                self._made.pop(next(iter(self._made)))
        return self._made[key]

    def _collate(self, samples: list[Any]) -> Collated:
        """Run the user's `collate_fn`."""
        assert self.job.collate_fn is not None
        try:
            return Collated(self.job.collate_fn(samples[0] if self.job.single else samples))
        except Exception as error:
            return Collated(
                error=one_line(f"{type(error).__name__}: {text_of(error)}", MAX_CAUSE),
                traceback=traceback_of(error),
                kinds=kinds_of(error),
            )

    def _regions(
        self, request: Request, loaded: list[Sample], errors: list[tuple[int, ErrorRecord]]
    ) -> list[list[Region]]:
        """For each sample the regions of its images; samples whose draw fails are removed from `loaded`."""
        try:
            return self._draw_regions(request, loaded)
        except ValueError:
            # A transform refuses an image: find out which one, sample by sample.
            results: list[list[Region]] = []
            for sample in list(loaded):
                try:
                    results += self._draw_regions(request, [sample])
                except ValueError as error:
                    errors.append((sample.row, failure(request, sample.row, sample.source, error, sample.place)))
                    loaded.remove(sample)
            return results

    def _draw_regions(self, request: Request, loaded: list[Sample]) -> list[list[Region]]:
        images = [(sample, image) for sample in loaded for image in sample.images.values()]
        if not images:
            return [[] for _ in loaded]
        if self.job.whole:
            pictures = ([*sample.images.values(), *sample.masks.values()] for sample in loaded)
            return [[[0, 0, one.height, one.width] for one in own] for own in pictures]
        positions = request.positions[[sample.row for sample, _ in images]]
        sizes = np.array([(image.height, image.width) for _, image in images], np.int64)
        boxes = [sample.boxes() for sample, _ in images] if self.job.chain.reads_boxes else None
        key = epoch_key(self.job.seed, request.epoch)
        chain, resize = self.job.chain.at(request.epoch), None
        if self.job.decode.scale == "fast" and chain.resizes_late is None:
            parts, resize = chain.resizes(key, positions, sizes, boxes)
        else:
            parts = chain.regions(key, positions, sizes, boxes)
        found: list[Region] = parts.tolist()
        given = iter(found)
        regions = [[next(given) for _ in sample.images] for sample in loaded]
        for sample, own in zip(loaded, regions, strict=True):
            own += [list(own[0]) for _ in sample.masks]
        if resize is not None:
            self._reader.resize([image for _, image in images], found, resize)
        return regions

    def _reply(
        self,
        request: Request,
        slot: np.ndarray,
        used_bytes: int,
        decoded: list[Sample],
        errors: list[tuple[int, ErrorRecord]],
        place: IterablePlace | None,
        sent_bytes: int,
    ) -> Reply:
        content = as_columns(decoded, sent_bytes)
        content.errors, content.iterable = sorted(errors, key=_row), place
        content.remark = self._reader.remark
        try:
            return _pack(
                request, slot, used_bytes, content, keep_types=self.job.collate_fn is not None or self.job.single
            )
        except Exception as error:
            # A leaf cannot be sent. No search for it: a dataset usually returns the same types for each sample.
            errors += [(s.row, failure(request, s.row, s.source, _unsendable(error))) for s in decoded]
            return _pack(request, slot, 0, Columns(errors=sorted(errors, key=_row), iterable=place))


def _row(entry: tuple[int, ErrorRecord]) -> int:
    return entry[0]


def _pack(request: Request, slot: np.ndarray, used_bytes: int, content: Columns, *, keep_types: bool = False) -> Reply:
    packed = write_content(content, slot, used_bytes, inline_bytes=MAX_INLINE_BYTES, keep_types=keep_types)
    status = Status.DONE if packed.fits else Status.TOO_LARGE
    plain = bool(packed.meta) and content.is_plain(len(request.positions))
    return Reply(request.chunk, status, packed.nbytes, packed.meta, packed.meta_at, plain=plain)


def _made_key(request: Request) -> tuple[Any, ...]:
    return request.epoch, int(request.positions[0]), request.iterable and request.iterable.run


def failure(request: Request, row: int, source: str | None, error: BaseException, place: str = "") -> ErrorRecord:
    """The record of the sample at a row of a chunk; `place`: of the image in it that failed."""
    if isinstance(error, Sourced) and error.__cause__ is not None:
        source, place, error = error.source, error.place, error.__cause__
    return record_of(request.epoch, request.positions[row], request.indices[row], source, error, place)


def _unsendable(error: Exception) -> TypeError:
    return TypeError(
        f"the sample cannot be sent to the main process ({type(error).__name__}: {error}); "
        "return images, arrays, numbers and strings"
    )
