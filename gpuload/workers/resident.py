"""Chunks that are cut out of kept samples: what does the work of workers once a `DeviceCached` has all of them.

Runs in the main process; starts nothing. A chunk is a whole batch: its regions are drawn as workers draw them, by the
same functions, so batches have the same bits.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gpuload.datasets.resident import numbers_of
from gpuload.errors import ErrorRecord
from gpuload.ring.chunk import ChunkContent
from gpuload.ring.ring import Ring
from gpuload.rng.philox import epoch_key
from gpuload.workers.counters import Counters
from gpuload.workers.inline import InlineEngine
from gpuload.workers.job import Job
from gpuload.workers.kept import KeptSamples, ReadMemory, span_of
from gpuload.workers.protocol import Reply, Request, Status
from gpuload.workers.runner import failure

__all__ = ["ResidentEngine"]


class ResidentEngine(InlineEngine):
    """Cuts a chunk out of what is kept.

    Args:
        job: what to draw, and for which dataset: a `DeviceCached`, or a view of one.
        ring: for pixels that are on the host; those on a device stay there.
        kept: all samples.

    Attributes:
        hits: how many samples it gave.
    """

    def __init__(self, job: Job, ring: Ring, kept: KeptSamples) -> None:
        super().__init__(ring, Counters())
        self._job, self._kept = job, kept
        self._numbers = numbers_of(job.dataset, np.arange(len(job.dataset)))
        self.hits = 0

    def close(self) -> None:
        super().close()
        del self._kept  # whoever still has this, a Loader or its iterator, does not keep the pixels

    def _do(self, request: Request, slot: np.ndarray) -> Reply:
        if request.chunk < self._wanted_from:
            return Reply(request.chunk, request.attempt, Status.UNWANTED, 0, b"")
        start = time.perf_counter_ns()
        content = self._content(request)
        memory: ReadMemory = self._kept.memory
        nbytes = 0
        if memory.on_host and content.windows is not None:
            nbytes = span_of(content.windows)
            if nbytes > len(slot):
                return Reply(request.chunk, request.attempt, Status.TOO_LARGE, nbytes, b"")
            memory.write(content.windows, slot[:nbytes])
            content.windows = None
        counters = self._counters
        counters.chunks += 1
        counters.samples += len(request.positions)
        counters.pack_ns += time.perf_counter_ns() - start
        self.hits += len(content.rows)
        return Reply(request.chunk, request.attempt, Status.DONE, nbytes, b"", content=content)

    def _content(self, request: Request) -> ChunkContent:
        numbers, errors = self._look_up(request)
        good = np.flatnonzero(numbers >= 0)
        regions = self._regions(request, good, numbers[good], errors)
        if regions is None:  # an image is refused: each by itself, to find which
            one_by_one = [
                self._regions(request, good[i : i + 1], numbers[good[i : i + 1]], errors) for i in range(len(good))
            ]
            good = good[[own is not None for own in one_by_one]]
            found = [own for own in one_by_one if own is not None]
            regions = [np.concatenate([own[c] for own in found]) for c in range(self._kept.columns)] if found else []
        if not len(good):
            return ChunkContent(errors=errors)
        content = self._kept.content(good.tolist(), numbers[good], regions)
        content.errors = sorted(errors, key=lambda entry: entry[0])
        return content

    def _look_up(self, request: Request) -> tuple[np.ndarray, list[tuple[int, ErrorRecord]]]:
        """The numbers of a chunk's samples, -1 for those that fail, and how these do."""
        errors: list[tuple[int, ErrorRecord]] = []
        keys, count = request.indices, len(self._numbers)
        if isinstance(keys, np.ndarray) and not self._kept.errors and -count <= keys.min() and keys.max() < count:
            return self._numbers[keys], errors
        numbers = np.full(len(keys), -1, np.int64)
        for row, key in enumerate(keys.tolist() if isinstance(keys, np.ndarray) else keys):
            try:
                numbers[row] = self._number(key)
            except (TypeError, IndexError) as error:
                errors.append((row, failure(request, row, None, error)))
                continue
            index = int(key) if isinstance(key, np.integer) else key
            failed = self._kept.error(int(numbers[row]), request.epoch, int(request.positions[row]), index)
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

    def _regions(
        self, request: Request, rows: np.ndarray, numbers: np.ndarray, errors: list[tuple[int, ErrorRecord]]
    ) -> list[np.ndarray] | None:
        """For each column of images the regions of those that have one; None if an image is refused, which is recorded
        if it is alone."""
        chain, key = self._job.chain.at(request.epoch), epoch_key(self._job.seed, request.epoch)
        found = []
        try:
            for column in range(self._kept.columns):
                having, sizes_hw = self._kept.sizes(numbers, column)
                boxes = self._kept.boxes(numbers[having]) if chain.reads_boxes else None
                positions = request.positions[rows[having]]
                drawn = chain.regions(key, positions, sizes_hw, boxes) if len(having) else np.empty((0, 4), np.int64)
                found.append(drawn)
        except ValueError as error:
            if len(rows) == 1:
                number, row = int(numbers[0]), int(rows[0])
                source, place = self._kept.source(number), self._kept.place(number)
                errors.append((row, failure(request, row, source, error, place)))
            return None
        return found
