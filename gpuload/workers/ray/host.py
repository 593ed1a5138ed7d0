"""The actor on a machine of the cluster: a few workers, started and watched as those of any `WorkerPool`.

Runs in a process of Ray, in its event loop. It never unpickles the dataset: workers get the bytes that came. All that a
worker's death or delay asks for on its own machine happens here; a lost chunk is told to the program as such.

A request that comes gets a slot of this machine's ring, as large as the one that waits for it in the program's. The
result goes to Ray as a view of that slot, which is lent until Ray has copied it into its object store, and is released
then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import numpy as np

from gpuload.errors import WorkerError, kinds_of
from gpuload.ring.ring import Ring, Slot
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Event, Lost, Request, Status
from gpuload.workers.shipping import Parcel

__all__ = ["DecodedBy", "Done", "Host", "Report", "versions"]

LOOK_S = 0.25  # between two looks at workers, while there are chunks in work
DECODERS = ("numpy", "pillow", "simplejpeg", "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13")
RAYS_OWN = ("ray/_private/workers", "ray/thirdparty_files")
DecodedBy = dict[str, str]


def versions() -> DecodedBy:
    """The versions that pixels depend on, of Python, gpuload and the decoders in this process."""
    found = {"python": "{}.{}".format(*sys.version_info)}
    for name in ("gpuload", *DECODERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass
class Done:
    """How a chunk ended: the packed `Reply` and the bytes of its slot, or that it was lost. `counted`: what the actor's
    workers have counted so far."""

    reply: bytes = b""
    data: np.ndarray | None = None
    lost: Lost | None = None
    counted: np.ndarray | None = None


@dataclass
class Report:
    """What an actor has to say: which machine it is on; what happened since the last report."""

    node: str
    address: str
    versions: DecodedBy
    ready: bool = False
    deaths: list[tuple[str, str]] = field(default_factory=list)  # why and where, stack
    warnings: list[str] = field(default_factory=list)
    broken: tuple[str, tuple[str, ...]] | None = None  # text and kinds of an error; nothing more will come


class Host:
    """The actor's class: it has so many workers, `pool_options` for their `WorkerPool`, and a ring of its own."""

    def __init__(self, parcel: Parcel, workers: int, ring_bytes: int, pool_options: dict[str, Any]) -> None:
        self._parcel: Parcel | None = parcel
        self._workers, self._ring_bytes, self._pool_options = workers, ring_bytes, pool_options
        self._pool: WorkerPool | None = None
        self._waiting: deque[tuple[Request, asyncio.Future[Done]]] = deque()  # for a slot, or for room in the queue
        self._flying: dict[int, tuple[Slot, asyncio.Future[Done]]] = {}
        self._told_ready = False
        self._said = 0  # deaths that were reported
        self._warnings: list[str] = []
        self._broken: WorkerError | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # there is something to report
        self._versions = versions()

    async def report(self, within_s: float) -> Report:
        """What happened; waits for something to report, but no longer than this: a late report is a sign of trouble."""
        if self._pool is None and self._broken is None:
            self._start()
        self._news.clear()
        self._look()
        if self._broken is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), within_s)
        report = Report(self._node(), os.uname().nodename, self._versions)
        if self._pool is not None:
            report.ready = self._told_ready = self._pool.ready
            deaths = self._pool.deaths
            report.deaths = [(cause, deaths.stack) for cause in deaths.causes[self._said :]]
            self._said = len(deaths.causes)
        report.warnings, self._warnings = self._warnings, []
        if self._broken is not None:
            report.broken = str(self._broken), kinds_of(self._broken)
        return report

    async def do(self, request: bytes) -> Done:
        """Do a chunk."""
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._waiting.append((Request.unpack(request), done))
        self._look()
        return await done

    async def cancel_before(self, chunk: int) -> None:
        """Chunks with a smaller number are no longer wanted."""
        if self._pool is not None:
            self._pool.cancel_before(chunk)

    async def close(self) -> None:
        """End the workers."""
        if self._ticking is not None:
            self._ticking.cancel()
        pool, self._pool = self._pool, None
        if pool is not None:
            self._broken = WorkerError("closed")
            asyncio.get_running_loop().remove_reader(pool.fileno())
            pool.close()
            self._ring.close()

    def _node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def _start(self) -> None:
        # Ray's own modules lie open on the import path of its processes.
        sys.path[:] = [entry for entry in sys.path if not entry.endswith(RAYS_OWN)]
        assert self._parcel is not None
        try:
            self._ring = Ring(self._ring_bytes)
            # The program counts the deaths of all actors.
            self._pool = WorkerPool(
                self._parcel, self._workers, self._ring, max_restarts=sys.maxsize, **self._pool_options
            )
        except Exception as error:
            self._broken = error if isinstance(error, WorkerError) else WorkerError(str(error), kinds_of(error))
            return
        self._parcel = None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pool.fileno(), self._look)
        self._ticking = loop.create_task(self._tick())

    async def _tick(self) -> None:
        """Some things are noticed only by looking: a worker that hangs, a chunk that died with another one."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        if self._pool is None or self._broken is not None:
            return
        try:
            for event in self._pool.gather(0.0):
                self._take_in(event)
            self._hand_out()
        except WorkerError as error:
            self._broken = error
        self._warnings += self._pool.unsaid
        self._pool.unsaid.clear()
        told = self._warnings or self._broken or len(self._pool.deaths.causes) > self._said
        if told or self._pool.ready != self._told_ready:
            self._news.set()

    def _hand_out(self) -> None:
        assert self._pool is not None
        self._ring.collect()
        while self._waiting:
            request, done = self._waiting[0]
            slot = self._ring.acquire(request.slot_bytes)
            if slot is None:
                if not self._flying:
                    self._pool.recover_slots()
                return
            sent = False
            try:
                sent = self._pool.submit(
                    replace(request, slot_offset=slot.offset, slot_bytes=min(slot.capacity_bytes, request.slot_bytes))
                )
            finally:
                if not sent:
                    self._ring.release(slot)
            if not sent:
                return
            self._waiting.popleft()
            self._flying[request.chunk] = slot, done

    def _take_in(self, event: Event) -> None:
        slot, waits = self._flying.pop(event.chunk)
        assert self._pool is not None
        done = Done(counted=self._pool.counted())
        if isinstance(event, Lost):  # with its slot, which the pool gives back
            done.lost = event
        else:
            done.reply = event.pack()
            if event.status is Status.DONE and event.nbytes:
                done.data = self._ring.view(slot)[: event.nbytes]
                if not self._ring.lend(slot, [done.data]):
                    done.data = done.data.copy()
                    self._ring.release(slot)
            else:
                self._ring.release(slot)
        if not waits.done():
            waits.set_result(done)
