"""The workers of an iterable dataset: each is asked for its own stream, so each has a queue, and a pool, of its own.

Runs in the main process. A worker that died is started anew, and begins its stream where the request says; a dataset
that gives the same again loses nothing by it.
"""

from __future__ import annotations

import contextlib
import select

from gpuload.errors import WorkerError
from gpuload.ring import Ring
from gpuload.workers.events import Event
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Request
from gpuload.workers.runner import Job

__all__ = ["StreamPool"]


class StreamPool:
    """`workers` pools of one worker. Arguments and errors as for `WorkerPool`."""

    def __init__(self, job: Job, workers: int, ring: Ring, *, timeout_s: float = 0.0, max_restarts: int = 10) -> None:
        self._pools: list[WorkerPool] = []
        self._epoll = select.epoll()
        self._events: list[Event] = []
        try:
            for number in range(workers):
                pool = WorkerPool(
                    job,
                    1,
                    ring,
                    timeout_s=timeout_s,
                    max_restarts=max_restarts,
                    first_worker=number,
                    all_workers=workers,
                )
                self._pools.append(pool)
                self._epoll.register(pool.fileno(), select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [pid for pool in self._pools for pid in pool.pids]

    @property
    def broken(self) -> WorkerError | None:
        """Why it cannot go on."""
        return next((pool.broken for pool in self._pools if pool.broken is not None), None)

    def submit(self, request: Request) -> bool:
        """Put a chunk on its worker's queue; False where that is full now. Never blocks."""
        assert request.stream is not None
        return self._pools[request.stream.worker].submit(request)

    def disown(self, before: int) -> None:
        """Chunks with a number below `before` are no longer wanted."""
        for pool in self._pools:
            pool.disown(before)

    def forgive(self) -> None:
        """Start counting restarts anew."""
        for pool in self._pools:
            pool.forgive()

    def gather(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout_s` seconds for something to happen.

        Raises:
            WorkerError: a worker could not start, or workers died too often.
        """
        if timeout_s > 0 and not self._events:
            self._epoll.poll(timeout_s)
        for pool in self._pools:  # all of them: each watches over its worker
            self._events += pool.gather(0.0)  # kept, should the next one raise
        events, self._events = self._events, []
        return events

    def halt(self) -> None:
        """Let workers end at their next sample."""
        for pool in self._pools:
            pool.halt()

    def close(self) -> None:
        """End all workers and free every descriptor. Idempotent."""
        self.halt()
        with contextlib.ExitStack() as stack:
            stack.callback(self._epoll.close)
            for pool in self._pools:
                stack.callback(pool.close)
