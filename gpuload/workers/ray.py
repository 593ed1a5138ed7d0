"""Workers on other machines: which to take from a Ray cluster, the program's side of them, and the actors.

`RayPool` runs in the main process, in whichever thread iterates the loader; it starts no thread (Ray has its own). It
is an engine, as a `WorkerPool` is, and owns the actors. A chunk is one call of an actor, and its result one object: the
packed reply and the bytes of the slot, which are copied from the object store to the slot here and freed there. Each
actor has two chunks for each of its workers at most, so the object store never holds more than that, nor more than the
ring. Only this program writes to slots here, so that of a lost chunk is free at once; those on other machines follow
the rule of `gpuload.workers.pool`.

`Host` is the actor: a few workers on its machine, started and watched as those of any `WorkerPool`. It runs in a
process of Ray, in its event loop, and never unpickles the dataset: workers get the bytes that came. All that a worker's
death or delay asks for on its own machine happens there; a lost chunk is told to the program as such. A request that
comes gets a slot of that machine's ring, as large as the one that waits for it in the program's. The result goes to Ray
as a view of that slot, which is lent until Ray has copied it into its object store, and is released then. What did not
fit the slot, and so is in memory of its own, stays that in the program.

Beside its chunks each actor has a call for a report in work, which comes back after some seconds even if there is
nothing to tell. So an actor that died is noticed by an error, and one that hangs, or whose machine does, by a report
that does not come. Its chunks are lost then, as those of a worker that died, and another actor takes its place, where
the cluster has room. Deaths of several actors of one machine at the same time count once.

Lifetime: `RayPool.close` ends the actors. If the program dies, Ray ends them, and workers end with their actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Final

import numpy as np

from gpuload.errors import WorkerError, import_optional, kinds_of
from gpuload.ring.ring import Ring, Slot
from gpuload.workers.counters import FIELDS, place_of
from gpuload.workers.faults import Deaths
from gpuload.workers.job import Job
from gpuload.workers.pool import RestartingEngine, WorkerPool
from gpuload.workers.protocol import Event, Lost, Reply, Request, Status
from gpuload.workers.shipping import Parcel, pack

__all__ = ["CHUNKS_PER_WORKER", "Host", "RayPool", "RayWorkers", "connected"]

WORKERS_PER_ACTOR: Final = 4  # they share a copy of the dataset, and the process that sends what they make
CHUNKS_PER_WORKER: Final = 2  # one in work, one that waits, so that the next begins without a message
SET_BY_GPULOAD: Final = ("num_cpus", "max_concurrency", "max_restarts", "max_task_retries", "lifetime", "name")
REPORT_S: Final = 5.0
NODE_DIED: Final = "its node has died"  # how Ray says that
SLOW_S: Final = 60.0  # a warning says what has not come for so long
WAIT_S: Final = 1.0
CLOSE_S: Final = 2.0
LOOK_S: Final = 0.25  # between two looks of an actor at its workers
DECODERS: Final = ("numpy", "pillow", "simplejpeg", "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13")
RAYS_OWN: Final = ("ray/_private/workers", "ray/thirdparty_files")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers on the machines of a Ray cluster, in the place of processes on this one: ``Loader(…, workers=…)``.

    The machines need gpuload, the dataset's files under the same paths, and the same versions of Python and of the
    decoders (`RayPool` compares them). What workers make comes here through Ray's object store.

    Args:
        count: how many workers, on all machines together.
        address: of the cluster, as for ``ray.init``: ``"auto"`` is the one that this machine belongs to, ``"local"``
            starts one here. Without effect if this program has called ``ray.init`` already.
        workers_per_actor: how many workers share an actor, on one machine; default 4, or fewer if no machine has so
            many CPUs. Those of one actor share one copy of the dataset.
        cpus_per_worker: what Ray reserves for each.
        actor_options: further options of the actors, as for ``ray.remote``: ``{"resources": {"decoders": 1}}``,
            ``"label_selector"``, ``"runtime_env"``, ``"scheduling_strategy"`` (default ``"SPREAD"``).

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> RayWorkers(count=64)
        RayWorkers(count=64, address='auto', workers_per_actor=None, cpus_per_worker=1, actor_options={})
    """

    count: int
    address: str = "auto"
    workers_per_actor: int | None = None
    cpus_per_worker: float = 1
    actor_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("count", "workers_per_actor"):
            value = getattr(self, name)
            if name == "workers_per_actor" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"RayWorkers({name}=…) must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"RayWorkers({name}=…) must be at least 1, got {value}")
        if not isinstance(self.address, str) or not self.address:
            raise TypeError(f'RayWorkers(address=…) must be a string such as "auto", got {self.address!r}')
        if self.address.startswith("ray://"):
            raise ValueError(
                f"RayWorkers(address={self.address!r}): through Ray Client every chunk would pass a proxy; run the "
                'program on a machine that has joined the cluster by `ray start`, with address="auto"'
            )
        cpus: Any = self.cpus_per_worker
        if isinstance(cpus, bool) or not isinstance(cpus, int | float) or not 0 <= cpus < float("inf"):
            raise ValueError(f"RayWorkers(cpus_per_worker=…) must be a number from 0 on, got {cpus!r}")
        if not isinstance(self.actor_options, Mapping):
            raise TypeError(f"RayWorkers(actor_options=…) must be a dict, got {self.actor_options!r}")
        if reserved := [name for name in self.actor_options if name in SET_BY_GPULOAD]:
            raise ValueError(
                f"RayWorkers(actor_options=…) has {', '.join(map(repr, reserved))}, which gpuload sets itself: the "
                "CPUs by cpus_per_worker and workers_per_actor, restarts by Faults(max_restarts=…)"
            )


# -- what actors say --------------------------------------------------------------------------------------------------


@dataclass
class Done:
    """How a chunk ended, with the bytes of its slot. `counted`: what the actor's workers have counted so far."""

    event: Event
    data: np.ndarray | None
    counted: np.ndarray


@dataclass
class Report:
    """A report of an actor: which machine it is on; what happened since the last report."""

    node: str
    address: str
    versions: dict[str, str]
    ready: bool = False
    deaths: list[tuple[str, str]] = field(default_factory=list)  # why and where, stack
    warnings: list[str] = field(default_factory=list)
    broken: tuple[str, tuple[str, ...]] | None = None  # text and kinds of an error; nothing more will come


# -- in the main process ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Actor:
    """An actor with the workers from number `first` on."""

    handle: Any
    first: int
    workers: int
    started_at: float
    asked_at: float  # for the report that is in work
    chunks: int = 0  # in work
    last_report: Report | None = None  # the last report; None means it has not started, and may never do
    warned: bool = False

    @property
    def started(self) -> bool:
        return self.last_report is not None

    @property
    def name(self) -> str:
        last = self.first + self.workers - 1
        numbers = f"worker {self.first}" if self.workers == 1 else f"workers {self.first} to {last}"
        return f"the Ray actor of {numbers}" + (f" on {self.last_report.address}" if self.last_report else "")


class RayPool(RestartingEngine):
    """Workers of a Ray cluster that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once to each machine.
        workers: how many, and where.
        ring: where the slots lie.
        timeout_s, own_queues: as for a `WorkerPool`.

    Raises:
        WorkerError: there is no such cluster.
        ImportError: Ray is not installed.
        TypeError: the job cannot be sent.
    """

    def __init__(
        self,
        job: Job,
        workers: RayWorkers,
        ring: Ring,
        *,
        timeout_s: float = 0.0,
        own_queues: bool = False,
    ) -> None:
        super().__init__(ring)
        self._timeout_s = timeout_s
        self._own_queues = own_queues
        self._workers = workers
        self._report_s = min(REPORT_S, max(timeout_s / 4, 0.5)) if timeout_s else REPORT_S
        self._counted = np.zeros((2, workers.count, len(FIELDS)), np.int64)  # by actors that died; by those there are
        self._actors: list[_Actor] = []
        # In work, by the reference to the result; None means a report.
        self._calls: dict[Any, tuple[_Actor, Request | None]] = {}
        self._died_at: dict[str, float] = {}  # by machine: when the last death of an actor there was counted
        parcel = pack(job)
        self._ray = connected(workers.address, "workers=RayWorkers(…)")
        self._session = self._ray.get_runtime_context().get_job_id()
        self._parcel = self._ray.put(parcel)
        self._per_actor = workers.workers_per_actor or self._fitting()
        try:
            for first in range(0, workers.count, self._per_actor):
                self._start(first)
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        return all(actor.last_report is not None and actor.last_report.ready for actor in self._actors)

    def _submit(self, request: Request) -> bool:
        self._check_usable()
        actor = self._actor_for(request)
        if actor is not None:
            self._calls[actor.handle.do.remote(request.pack())] = actor, request
            actor.chunks += 1
        return actor is not None

    def _actor_for(self, request: Request) -> _Actor | None:
        """The actor that has the least to do, None if all have enough or none has started; or, for an iterable dataset,
        the one whose worker it is, if that has started."""
        if request.iterable is not None:
            actor = self._actors[request.iterable.worker // self._per_actor]
            return actor if actor.started else None
        actors = [actor for actor in self._actors if actor.started]
        actor = min(actors, key=lambda actor: actor.chunks / actor.workers, default=None)
        return None if actor is None or actor.chunks >= CHUNKS_PER_WORKER * actor.workers else actor

    def cancel_before(self, chunk: int) -> None:
        super().cancel_before(chunk)
        if self._is_connected:
            for actor in self._actors:
                if actor.started:
                    actor.handle.cancel_before.remote(chunk)

    def counted(self) -> np.ndarray:
        return self._counted.sum(axis=0)  # as of the last chunk of each actor

    def _step(self, wait_s: float, events: list[Event]) -> None:
        references = list(self._calls)
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        if not ready and wait_s > 0:
            start = time.monotonic()
            ready, _ = self._ray.wait(references, num_returns=1, timeout=min(wait_s, WAIT_S))
            self.waited_s += time.monotonic() - start
        for reference in ready:
            self._take_in(reference, events)
        self._watch(events)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        actors, self._actors = self._actors, []
        self._calls.clear()
        if not self._is_connected:
            return  # they have ended with Ray
        with contextlib.suppress(Exception):
            alive = [actor.handle.close.remote() for actor in actors if actor.started]
            if alive:
                self._ray.wait(alive, num_returns=len(alive), timeout=CLOSE_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)
        self._parcel = None

    # -- starting ---------------------------------------------------------------------------------------------------

    def _fitting(self) -> int:
        """Return how many workers an actor has: a number that some machine can take."""
        cpus = max((node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        most = math.floor(cpus / self._workers.cpus_per_worker) if self._workers.cpus_per_worker else WORKERS_PER_ACTOR
        return max(1, min(WORKERS_PER_ACTOR, most, self._workers.count))

    def _start(self, first: int, at: int | None = None) -> None:
        workers = min(self._per_actor, self._workers.count - first)
        pool_options = {
            "first": first,
            "total": self._workers.count,
            "timeout_s": self._timeout_s,
            "own_queues": self._own_queues,
        }
        options = {"scheduling_strategy": "SPREAD", **self._workers.actor_options}
        maker = self._ray.remote(Host).options(num_cpus=self._workers.cpus_per_worker * workers, **options)
        handle = maker.remote(self._parcel, workers, self._ring.ring_bytes, pool_options)
        now = time.monotonic()
        actor = _Actor(handle, first, workers, now, now)
        if at is None:
            self._actors.append(actor)
        else:
            self._actors[at] = actor
        self._ask(actor)

    def _ask(self, actor: _Actor) -> None:
        actor.asked_at = time.monotonic()
        self._calls[actor.handle.report.remote(self._report_s)] = actor, None

    # -- listening --------------------------------------------------------------------------------------------------

    def _take_in(self, reference: Any, events: list[Event]) -> None:
        if reference not in self._calls:
            return  # of an actor that was replaced a moment ago
        actor, request = self._calls[reference]
        try:
            result: Done | Report = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{actor.name} failed, which is an error of gpuload:\n\n{error}") from error
        except self._ray.exceptions.RayError as error:
            if request is None or isinstance(error, self._ray.exceptions.RayActorError):
                self._replace(actor, _first_line(error), events)
            else:  # the object is lost, not the actor
                del self._calls[reference]
                actor.chunks -= 1
                events.append(self._lose(request, _first_line(error)))
            return
        del self._calls[reference]
        if isinstance(result, Report):
            self._hear(actor, result)
        else:
            assert request is not None
            actor.chunks -= 1
            rows = self._counted[1, actor.first : actor.first + actor.workers]
            np.maximum(rows, result.counted, out=rows)  # results may come in another order
            events.append(self._received(request, result))

    def _received(self, request: Request, done: Done) -> Event:
        event = done.event
        if isinstance(event, Lost):
            self._ring.release_at(request.slot_offset)
        elif done.data is not None and request.chunk >= self._wanted_from:
            if len(done.data) > request.slot_bytes:
                event.data = done.data.copy()  # the object store's is read-only
                return event
            self._ring.bytes[request.slot_offset : request.slot_offset + len(done.data)] = done.data
        elif event.status is Status.DONE and event.nbytes:
            event.status = Status.UNWANTED
        return event

    def _lose(self, request: Request, cause: str) -> Lost:
        self._ring.release_at(request.slot_offset)
        return Lost(request.chunk, None, cause, outside=True)

    def _hear(self, actor: _Actor, report: Report) -> None:
        if not actor.started:
            self._compare(report)
        actor.last_report, actor.warned = report, False
        self.pending_warnings += [f"{text} (on {report.address})" for text in report.warnings]
        if report.broken is not None:
            text, kinds = report.broken
            raise WorkerError(f"{text}\n\n(on {report.address}, a machine of the Ray cluster)", kinds)
        for cause, stack in report.deaths:
            self.deaths.add(f"{cause} on {report.address}", stack)
        self._ask(actor)

    def _compare(self, report: Report) -> None:
        """Compare versions, since only the same ones give the same pixels."""
        ours = versions()
        different = {name: there for name, there in report.versions.items() if ours.get(name) != there}
        different |= dict.fromkeys(ours.keys() - report.versions.keys(), "none")
        text = ", ".join(f"{name} {there} (here {ours.get(name, 'none')})" for name, there in sorted(different.items()))
        if {"gpuload", "python"} & different.keys():
            raise WorkerError(f"{report.address} has {text}: install the same versions on all machines of the cluster")
        if different:
            self._warn_once(text, f"{report.address} has {text}: its pixels may differ from those of other machines")

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _replace(self, actor: _Actor, cause: str, events: list[Event]) -> None:
        """An actor has died, and with it its workers and what they made: its chunks are lost."""
        if not actor.started and "creation task" in cause:  # it would fail again
            raise WorkerError(f"{actor.name} could not start: {cause}")
        calls = {reference: request for reference, (other, request) in self._calls.items() if other is actor}
        rows = slice(actor.first, actor.first + actor.workers)
        self._counted[0, rows] += self._counted[1, rows]
        self._counted[0, rows, place_of["restarts"]] += 1
        self._counted[1, rows] = 0
        with contextlib.suppress(Exception):
            self._ray.kill(actor.handle)
        for reference, request in calls.items():
            del self._calls[reference]
            if request is not None:
                events.append(self._lose(request, f"{actor.name} died: {cause}"))
        self._start(actor.first, self._actors.index(actor))
        if not actor.started and NODE_DIED in cause:  # sent to a machine of which Ray did not know yet that it is dead
            return
        node = actor.last_report.node if actor.last_report else ""
        if actor.started_at >= self._died_at.get(node, -math.inf):
            self._died_at[node] = time.monotonic()
            self.deaths.add(f"{actor.name} died: {cause}")

    def _watch(self, events: list[Event]) -> None:
        """End actors that do not answer, if there is a timeout; else warn of them."""
        now = time.monotonic()
        for actor in list(self._actors):
            silent_s = now - actor.asked_at
            if silent_s <= SLOW_S and (not self._timeout_s or silent_s <= self._timeout_s + 2 * self._report_s):
                continue
            report = next(call for call, (other, request) in self._calls.items() if other is actor and not request)
            if self._ray.wait([report], timeout=0)[0]:
                continue  # it came while this program did something else
            if self._timeout_s and actor.started:
                self._replace(actor, f"no answer for {silent_s:.0f} seconds", events)
            elif not actor.warned and silent_s > SLOW_S:
                actor.warned = True
                self.pending_warnings.append(self._why_silent(actor, silent_s))

    def _why_silent(self, actor: _Actor, silent_s: float) -> str:
        if actor.started:
            return f"{actor.name} has not answered for {silent_s:.0f} seconds; timeout=… would replace it"
        needed = f"{self._workers.cpus_per_worker * actor.workers:g} free CPUs"
        if self._workers.actor_options:
            needed += " and what actor_options ask for"
        free, all_ = self._ray.available_resources().get("CPU", 0), self._ray.cluster_resources().get("CPU", 0)
        return (
            f"{actor.name} waits for a machine with {needed}: the cluster has {free:g} free of {all_:g} CPUs. Add "
            "machines, or ask for fewer workers, or fewer per actor (workers_per_actor)"
        )

    # -- the connection -----------------------------------------------------------------------------------------------

    @property
    def _is_connected(self) -> bool:
        ray = self._ray
        return ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._session

    def _check_usable(self) -> None:
        super()._check_usable()
        if not self._is_connected:
            self.broken = error = WorkerError("Ray was shut down while this Loader had workers in its cluster")
            raise error


def connected(address: str, called: str) -> Any:
    """The module `ray`, connected to a cluster, for what is `called`.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        WorkerError: there is no such cluster.
    """
    ray = import_optional("ray", called, "ray")
    import_optional("ray.exceptions", called, "ray")
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise WorkerError(
                f"there is no Ray cluster at {address!r} ({_first_line(error)}). Start one with `ray start "
                "--head` here and `ray start --address=…` on the other machines, or give its address"
            ) from error
    return ray


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000]


def versions() -> dict[str, str]:
    """The versions that pixels depend on, of Python, gpuload and the decoders in this process."""
    packages = {"python": "{}.{}".format(*sys.version_info)}
    for name in ("gpuload", *DECODERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return packages


# -- on another machine -----------------------------------------------------------------------------------------------


class Host:
    """The actor's class: it has `workers` workers, `pool_options` for their `WorkerPool`, and a ring of its own."""

    def __init__(self, parcel: Parcel, workers: int, ring_bytes: int, pool_options: dict[str, Any]) -> None:
        self._arguments = parcel, workers, ring_bytes, pool_options  # until the start
        self._pool: WorkerPool | None = None
        self._waiting: deque[tuple[Request, asyncio.Future[Done]]] = deque()  # for a slot, or for room in the queue
        self._flying: dict[int, tuple[Slot, asyncio.Future[Done]]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._report = Report("", os.uname().nodename, versions())  # the next one
        self._news = asyncio.Event()  # there is something to report

    async def report(self, within_s: float) -> Report:
        """Return what happened; wait for something to report, but no longer than this: a late report is a sign of
        trouble."""
        if self._pool is None and self._report.broken is None:
            self._start()
        self._look()
        if self._report.broken is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), within_s)
        self._news.clear()
        report, self._report = self._report, replace(self._report, deaths=[], warnings=[])
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
            self._report.broken = "closed", ()
            asyncio.get_running_loop().remove_reader(pool.fileno())
            pool.close()
            self._ring.close()

    def _node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def _start(self) -> None:
        # Ray's own modules lie open on the import path of its processes.
        sys.path[:] = [entry for entry in sys.path if not entry.endswith(RAYS_OWN)]
        parcel, workers, ring_bytes, pool_options = self._arguments
        del self._arguments
        self._report.node = self._node()
        try:
            self._ring = Ring(ring_bytes)
            self._pool = WorkerPool(parcel, workers, self._ring, **pool_options)
        except Exception as error:
            self._report.broken = str(error), kinds_of(error)
            return
        self._pool.deaths = Deaths(sys.maxsize)  # the program counts the deaths of all actors
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pool.fileno(), self._look)
        self._ticking = loop.create_task(self._tick())

    async def _tick(self) -> None:
        """Notice what is seen only by looking: a worker that hangs, a chunk that died with another one."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        pool, report = self._pool, self._report
        if pool is None or report.broken is not None:
            return
        try:
            for event in pool.gather(0.0):
                self._take_in(event)
            self._hand_out()
        except WorkerError as error:
            report.broken = str(error), kinds_of(error)
        report.warnings += pool.pending_warnings
        pool.pending_warnings.clear()
        report.deaths += [(cause, pool.deaths.stack) for cause in pool.deaths.causes]
        pool.deaths = Deaths(sys.maxsize)
        was_ready, report.ready = report.ready, pool.ready
        if report.deaths or report.warnings or report.broken or report.ready != was_ready:
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
            capacity_bytes = min(slot.capacity_bytes, request.slot_bytes)
            if not self._pool.submit(replace(request, slot_offset=slot.offset, slot_bytes=capacity_bytes)):
                return
            self._waiting.popleft()
            self._flying[request.chunk] = slot, done

    def _take_in(self, event: Event) -> None:
        assert self._pool is not None
        slot, waits = self._flying.pop(event.chunk)
        done = Done(event, None, self._pool.counted())
        if isinstance(event, Reply):  # the slot of what is lost goes back from the pool
            if event.data is not None:
                done.data, event.data = event.data, None
                self._ring.release(slot)
            elif event.status is Status.DONE and event.nbytes:
                done.data = self._ring.view(slot)[: event.nbytes]
                if not self._ring.lend(slot, [done.data]):
                    done.data = done.data.copy()
                    self._ring.release(slot)
            else:
                self._ring.release(slot)
        if not waits.done():
            waits.set_result(done)
