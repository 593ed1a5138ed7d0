"""A worker pool with its ring."""

from __future__ import annotations

import time

import numpy as np
from helpers.processes import LIMIT_S, wait_until

from gpuload.decode import Decode
from gpuload.ring.packing import read_content
from gpuload.ring.ring import Ring
from gpuload.transforms import Chain
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Reply, Request


class Team:
    """A pool of workers with a ring, and the slots of the chunks that were submitted."""

    def __init__(self, dataset, workers=1, worker_init_fn=None, forked=True, **options):
        self.ring = Ring(64 << 20)
        job = Job(dataset, Chain([]), Decode(), 0, worker_init_fn=worker_init_fn)
        self.pool = WorkerPool(job, workers, self.ring, **options)
        self.slots = {}
        if forked:
            wait_until(lambda: self.pool.collect_events(0.01) or len(self.pool.pids) == workers, "workers are forked")

    def await_ready(self) -> None:
        wait_until(lambda: self.pool.collect_events(0.01) or self.pool.ready, "all workers are ready")

    def submit(self, chunk: int, indices, **options) -> None:
        slot = self.ring.acquire(1 << 20)
        self.slots[chunk] = slot
        indices = np.asarray(indices, np.int64)
        request = Request(chunk, 0, slot.offset, slot.capacity_bytes, indices, indices, **options)
        assert self.pool.submit(request)

    def wait(self, count: int, kinds=Reply) -> list:
        """Collect events until `count` of these kinds have arrived."""
        events, deadline = [], time.monotonic() + LIMIT_S
        while len(events) < count:
            assert time.monotonic() < deadline, f"only {events} after {LIMIT_S} s"
            events += [event for event in self.pool.collect_events(1.0) if isinstance(event, kinds)]
        return events

    def run(self, chunk: int, indices, kinds=Reply, **options):
        """Submit a chunk and return the next event of these kinds."""
        self.submit(chunk, indices, **options)
        [event] = self.wait(1, kinds)
        return event

    def content(self, reply: Reply):
        memory = self.ring.view(self.slots[reply.chunk]) if reply.data is None else reply.data
        return read_content(memory, reply.meta, reply.meta_at)

    def load(self, indices, chunk: int = 1) -> list:
        """Load samples in one chunk and return their values."""
        content = self.content(self.run(chunk, indices))
        assert not content.errors, content.errors[0][1]
        [column] = content.values.values()
        return list(column.values)

    def close(self):
        self.pool.close()
        self.ring.close()
