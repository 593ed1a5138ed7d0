"""The engine for ``num_workers=0``, which runs the workers' code in the main process, one chunk at a time."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpuload.datasets.worker import WorkerInfo, replace_worker_info
from gpuload.order.place import IterablePlace
from gpuload.ring.ring import Ring
from gpuload.workers.job import Job
from gpuload.workers.protocol import Engine, Event, Request
from gpuload.workers.runner import ChunkRunner
from gpuload.workers.source import make_worker_info

__all__ = ["InProcessEngine"]


class InProcessEngine(Engine):
    """An engine that does the workers' work in this process: it accepts chunks like a `WorkerPool`, and processes one
    chunk in each call of `collect_events`.

    Args:
        job: the dataset, transforms and options.
        ring: the ring that holds the slots.
        chunk_context: returns the context in which a chunk is processed.
    """

    def __init__(
        self,
        job: Job,
        ring: Ring,
        chunk_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(ring)
        self._runner = ChunkRunner(job, guard_generators=True)
        self._runner.source.set_worker_info = lambda epoch, position=None: replace_worker_info(
            make_worker_info(job, 0, 1, epoch, position)
        )
        self._counters = self._runner.counters
        self._waiting: deque[Request] = deque()
        self._info: WorkerInfo | None = None
        self._chunk_context = chunk_context

    def _submit(self, request: Request) -> bool:
        self._waiting.append(request)
        return True

    def collect_events(self, timeout_s: float) -> list[Event]:
        if self._halted:
            raise RuntimeError("this Loader is closed; create a new one")
        if not self._waiting:
            return []
        request = self._waiting[0]
        slot = self._ring.bytes[request.slot_offset : request.slot_offset + request.slot_bytes]
        start = time.perf_counter()
        self._counters.begin()
        try:
            with self._chunk_context(), self._set_worker_info():
                reply = self._runner.run(request, slot, lambda row: None, lambda: self._wanted_from <= request.chunk)
                if reply.file is not None:
                    reply.map(reply.file)
        finally:
            self._counters.end()
            self.waited_s += time.perf_counter() - start  # the loop waits while this engine works
        self._waiting.popleft()  # only now, so that a chunk that ctrl-C interrupted is processed again
        return [reply]

    def begin(self, request: Request) -> IterablePlace:
        """Start the pass over an iterable dataset; return its progress before the first chunk."""
        with self._set_worker_info():
            return self._runner.begin(request)

    def read_counters(self) -> np.ndarray:
        return self._counters.table.read()

    def close(self) -> None:
        self._waiting.clear()

    @contextlib.contextmanager
    def _set_worker_info(self) -> Iterator[None]:
        """Make `get_worker_info()` return this engine's info within this context: for the dataset, but not for the
        user's loop."""
        outer_info = replace_worker_info(self._info)
        try:
            yield
        finally:
            self._info = replace_worker_info(outer_info)
