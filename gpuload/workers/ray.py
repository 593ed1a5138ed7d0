"""Workers on the machines of a Ray cluster: the options, the main process's side, and the actors.

`RayPool` runs in the main process, in whichever thread iterates the loader, and starts no thread itself. Like a
`WorkerPool`, it is an engine. It owns the actors. A chunk is one call to an actor, and the result is one object: the
packed reply and the bytes of the slot, which are copied from Ray's object store to the slot in the main process and
then freed in the store. Each actor has at most three chunks per worker, which also limits the results in the object
store; their total size never exceeds the ring's size. Only the main process writes to its slots, so the slot of a lost
chunk is free immediately; slots on other machines follow the rules of `gpuload.workers.pool`.

`Host` is the actor: it runs a few workers on its machine, in an ordinary `WorkerPool`. It runs in a Ray process, in
this process's event loop, and never unpickles the dataset: it passes the pickled bytes on to its workers. The host
handles the deaths and delays of its workers, and reports a lost chunk to the main process as lost. Each request gets a
slot in a ring on the host's machine, as large as the slot in the main process that is reserved for the result. The host
gives Ray a view of its slot, lends the slot until Ray has copied the view into its object store, and then releases the
slot. If a chunk did not fit in its slot, its bytes are in separate memory both on the host and in the main process.

In addition to its chunks, each actor always has one pending call for a report. The call returns after a few seconds
even if there is nothing to report. So if an actor has died, the call raises an error; if an actor or its machine hangs,
the report is overdue. In both cases, the actor's chunks are lost, like those of a dead worker, and a new actor is
started on any machine with enough free CPUs. If multiple actors on one machine die at the same time, this counts as one
death.

Lifetime: `RayPool.close` ends the actors. If the main process dies, Ray ends the actors. Workers end with their actor.
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

from gpuload.checks import argument, check_fields, finite_number, integer, mapping, string
from gpuload.errors import WorkerError, error_class_names, import_optional
from gpuload.ring.ring import Ring, Slot
from gpuload.workers.counters import FIELDS, field_indices
from gpuload.workers.faults import Deaths
from gpuload.workers.feed import CHUNKS_PER_WORKER
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Event, Lost, Reply, Request, Status
from gpuload.workers.restarting import RestartingEngine
from gpuload.workers.shipping import Parcel, pack

__all__ = ["Host", "RayPool", "RayWorkers", "connect_ray"]

WORKERS_PER_ACTOR: Final = 4  # the default; they share one copy of the dataset, and one process sends their results
SET_BY_GPULOAD: Final = ("num_cpus", "max_concurrency", "max_restarts", "max_task_retries", "lifetime", "name")
REPORT_S: Final = 5.0  # an actor reports after this time even if there is nothing to report
NODE_DIED: Final = "its node has died"  # a part of Ray's error message
SLOW_S: Final = 60.0  # there is a warning about an actor that does not answer for a longer time
WAIT_S: Final = 1.0
CLOSE_S: Final = 2.0
POLL_S: Final = 0.25  # the interval at which an actor checks its workers
DECODERS: Final = ("numpy", "pillow", "simplejpeg", "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13")
RAY_PATHS: Final = ("ray/_private/workers", "ray/thirdparty_files")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers on the machines of a Ray cluster, instead of processes on this machine: ``Loader(…, workers=…)``.

    The machines need gpuload, the dataset's files at the same paths, and the same versions of Python and the decoders
    (`RayPool` compares the versions). Results are returned through Ray's object store.

    Args:
        count: the total number of workers on all machines.
        address: the address of the cluster, as for ``ray.init``: ``"auto"`` is the cluster to which this machine
            belongs, ``"local"`` starts a cluster on this machine. Ignored if this program has already called
            ``ray.init``.
        workers_per_actor: the number of workers in an actor, which runs on one machine. The default is 4, or fewer if
            no machine has enough CPUs. The workers of an actor share one copy of the dataset.
        cpus_per_worker: the number of CPUs that Ray reserves for each worker.
        actor_options: further options of the actors, as for ``ray.remote``: ``{"resources": {"decoders": 1}}``,
            ``"label_selector"``, ``"runtime_env"``, ``"scheduling_strategy"`` (default ``"SPREAD"``).

    Example:
        >>> RayWorkers(count=64)
        RayWorkers(count=64, address='auto', workers_per_actor=None, cpus_per_worker=1.0, actor_options={})
    """

    count: int = argument(integer, minimum=1)
    address: str = argument(string, default="auto")
    workers_per_actor: int | None = argument(integer, default=None, minimum=1)
    cpus_per_worker: float = argument(finite_number, default=1.0, minimum=0)
    actor_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "RayWorkers")
        if self.address.startswith("ray://"):
            raise ValueError(
                f"RayWorkers(address={self.address!r}): with Ray Client, each chunk would pass through a proxy; run "
                'the program on a machine that has joined the cluster with `ray start`, and set address="auto"'
            )
        options = mapping("RayWorkers(actor_options=…)", self.actor_options)
        if reserved := [name for name in options if name in SET_BY_GPULOAD]:
            raise ValueError(
                f"RayWorkers(actor_options=…) has {', '.join(map(repr, reserved))}, which gpuload sets itself; set "
                "CPUs with cpus_per_worker and workers_per_actor, and restarts with Faults(max_restarts=…)"
            )


# -- messages from actors ---------------------------------------------------------------------------------------------


@dataclass
class Done:
    """The result of a chunk, with the bytes of its slot if it has any, and the current counters of the actor's
    workers."""

    event: Event
    data: np.ndarray | None
    counters: np.ndarray


@dataclass
class Report:
    """A report from an actor: its machine, its state, and the deaths and warnings since the last report."""

    node: str
    address: str
    versions: dict[str, str]
    ready: bool = False
    deaths: list[tuple[str, str]] = field(default_factory=list)  # (cause with the sample, stack)
    warnings: list[str] = field(default_factory=list)
    failure: tuple[str, tuple[str, ...]] | None = None  # the text and kinds of the error that stopped the actor


# -- in the main process ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Actor:
    """An actor whose workers are numbered from `first`."""

    handle: Any
    first: int
    workers: int
    started_at: float
    report_requested_at: float  # when the pending report was requested
    chunks: int = 0  # the number of chunks in progress
    last_report: Report | None = None  # None until the actor has started, which may never happen
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
    """A pool of workers in a Ray cluster that process the chunks of one job.

    Args:
        job: the dataset, transforms and options, sent once to each machine.
        options: the options, such as the number of workers and the cluster's address.
        ring: the ring that holds the slots.
        timeout_s, queue_per_worker: as for a `WorkerPool`.

    Raises:
        WorkerError: the cluster was not found.
        ImportError: Ray is not installed.
        TypeError: the job cannot be sent.
    """

    def __init__(
        self,
        job: Job,
        options: RayWorkers,
        ring: Ring,
        *,
        timeout_s: float = 0.0,
        queue_per_worker: bool = False,
    ) -> None:
        super().__init__(ring)
        self._timeout_s = timeout_s
        self._queue_per_worker = queue_per_worker
        self._options = options
        self._report_s = min(REPORT_S, max(timeout_s / 4, 0.5)) if timeout_s else REPORT_S
        self._counters = np.zeros((2, options.count, len(FIELDS)), np.int64)  # index 0: dead actors; 1: current actors
        self._actors: list[_Actor] = []
        # The actor and request of each pending call, keyed by the reference to its result. Calls for a report have no
        # request.
        self._calls: dict[Any, tuple[_Actor, Request | None]] = {}
        self._died_at: dict[str, float] = {}  # the time of the last death that was counted, keyed by machine
        self._changes = b""
        parcel = pack(job)
        self._ray = connect_ray(options.address, "workers=RayWorkers(…)")
        self._session = self._ray.get_runtime_context().get_job_id()
        self._parcel = self._ray.put(parcel)
        self._per_actor = options.workers_per_actor or self._default_per_actor()
        try:
            for first in range(0, options.count, self._per_actor):
                self._start_actor(first)
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
            self._calls[actor.handle.process_chunk.remote(request.pack())] = actor, request
            actor.chunks += 1
        return actor is not None

    def _actor_for(self, request: Request) -> _Actor | None:
        """Return the least busy actor; None if all actors have enough chunks, or if none has started. For an iterable
        dataset, return the actor of the request's worker; None if this actor has not started."""
        if request.iterable is not None:
            actor = self._actors[request.iterable.worker // self._per_actor]
            return actor if actor.started else None
        actors = [actor for actor in self._actors if actor.started]
        actor = min(actors, key=lambda actor: actor.chunks / actor.workers, default=None)
        return None if actor is None or actor.chunks >= CHUNKS_PER_WORKER * actor.workers else actor

    def add_changes(self, packed: bytes) -> None:
        self._changes += packed
        self.changes_bytes = len(self._changes)
        for actor in self._actors:
            actor.handle.add_changes.remote(packed)  # Ray keeps the order of the calls to an actor

    def cancel_before(self, chunk: int) -> None:
        super().cancel_before(chunk)
        if self._is_connected:
            for actor in self._actors:
                if actor.started:
                    actor.handle.cancel_before.remote(chunk)

    def read_counters(self) -> np.ndarray:
        return self._counters.sum(axis=0)  # up to the last chunk of each actor

    def _step(self, wait_s: float, events: list[Event]) -> None:
        references = list(self._calls)
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        if not ready and wait_s > 0:
            start = time.monotonic()
            ready, _ = self._ray.wait(references, num_returns=1, timeout=min(wait_s, WAIT_S))
            self.waited_s += time.monotonic() - start
        for reference in ready:
            self._process_result(reference, events)
        self._watch(events)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        actors, self._actors = self._actors, []
        self._calls.clear()
        if not self._is_connected:
            return  # the actors ended with Ray
        with contextlib.suppress(Exception):
            alive = [actor.handle.close.remote() for actor in actors if actor.started]
            if alive:
                self._ray.wait(alive, num_returns=len(alive), timeout=CLOSE_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)
        self._parcel = None

    # -- starting ---------------------------------------------------------------------------------------------------

    def _default_per_actor(self) -> int:
        """Return a number of workers per actor for which at least one machine has enough CPUs."""
        cpus = max((node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        limit = math.floor(cpus / self._options.cpus_per_worker) if self._options.cpus_per_worker else WORKERS_PER_ACTOR
        return max(1, min(WORKERS_PER_ACTOR, limit, self._options.count))

    def _start_actor(self, first: int, index: int | None = None) -> None:
        workers = min(self._per_actor, self._options.count - first)
        pool_options = {
            "first": first,
            "total": self._options.count,
            "timeout_s": self._timeout_s,
            "queue_per_worker": self._queue_per_worker,
        }
        options = {"scheduling_strategy": "SPREAD", **self._options.actor_options}
        actor_class = self._ray.remote(Host).options(num_cpus=self._options.cpus_per_worker * workers, **options)
        handle = actor_class.remote(self._parcel, workers, self._ring.ring_bytes, pool_options, self._changes)
        now = time.monotonic()
        actor = _Actor(handle, first, workers, now, now)
        if index is None:
            self._actors.append(actor)
        else:
            self._actors[index] = actor
        self._request_report(actor)

    def _request_report(self, actor: _Actor) -> None:
        actor.report_requested_at = time.monotonic()
        self._calls[actor.handle.report.remote(self._report_s)] = actor, None

    # -- listening --------------------------------------------------------------------------------------------------

    def _process_result(self, reference: object, events: list[Event]) -> None:
        if reference not in self._calls:
            return  # the call's actor was replaced a moment ago
        actor, request = self._calls[reference]
        try:
            result: Done | Report = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(
                f"{actor.name} failed, which is a bug in gpuload; please report it:\n\n{error}"
            ) from error
        except self._ray.exceptions.RayError as error:
            if request is None or isinstance(error, self._ray.exceptions.RayActorError):
                self._replace(actor, _message_of(error), events)
            else:  # only the object is lost; the actor lives
                del self._calls[reference]
                actor.chunks -= 1
                events.append(self._make_lost(request, _message_of(error)))
            return
        del self._calls[reference]
        if isinstance(result, Report):
            self._process_report(actor, result)
        else:
            assert request is not None
            actor.chunks -= 1
            rows = self._counters[1, actor.first : actor.first + actor.workers]
            np.maximum(rows, result.counters, out=rows)  # results may arrive out of order
            events.append(self._store_result(request, result))

    def _store_result(self, request: Request, done: Done) -> Event:
        event = done.event
        if isinstance(event, Lost):
            self._ring.release_at(request.slot_offset)
        elif done.data is not None and request.chunk >= self._wanted_from:
            if len(done.data) > request.slot_bytes:
                event.data = done.data.copy()  # memory in the object store is read-only
                return event
            self._ring.bytes[request.slot_offset : request.slot_offset + len(done.data)] = done.data
        elif event.status is Status.DONE and event.nbytes:
            event.status = Status.UNWANTED
        return event

    def _make_lost(self, request: Request, cause: str) -> Lost:
        self._ring.release_at(request.slot_offset)
        return Lost(request.chunk, None, cause, killed_externally=True)

    def _process_report(self, actor: _Actor, report: Report) -> None:
        if not actor.started:
            self._compare_versions(report)
        actor.last_report, actor.warned = report, False
        self.pending_warnings += [f"{text} (on {report.address})" for text in report.warnings]
        if report.failure is not None:
            text, kinds = report.failure
            raise WorkerError(f"{text}\n\n(on {report.address}, a machine of the Ray cluster)", kinds)
        for cause, stack in report.deaths:
            self.deaths.add(f"{cause} on {report.address}", stack)
        self._request_report(actor)

    def _compare_versions(self, report: Report) -> None:
        """Compare the versions on an actor's machine with the local versions, since different versions may give
        different pixels.

        Raises:
            WorkerError: the versions of gpuload or Python differ.
        """
        local = local_versions()
        mismatches = {name: version for name, version in report.versions.items() if local.get(name) != version}
        mismatches |= dict.fromkeys(local.keys() - report.versions.keys(), "none")
        text = ", ".join(
            f"{name} {version} (here {local.get(name, 'none')})" for name, version in sorted(mismatches.items())
        )
        if {"gpuload", "python"} & mismatches.keys():
            raise WorkerError(f"{report.address} has {text}; install the same versions on all machines of the cluster")
        if mismatches:
            self._warn_once(
                text,
                f"{report.address} has {text}, so its pixels may differ from other machines' pixels; install the same "
                "versions on all machines of the cluster",
            )

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _replace(self, actor: _Actor, cause: str, events: list[Event]) -> None:
        """Replace an actor that has died or does not answer, and report its chunks as lost."""
        if not actor.started and "creation task" in cause:  # a new actor would fail too
            raise WorkerError(f"{actor.name} could not start: {cause}")
        calls = {reference: request for reference, (owner, request) in self._calls.items() if owner is actor}
        rows = slice(actor.first, actor.first + actor.workers)
        self._counters[0, rows] += self._counters[1, rows]
        self._counters[0, rows, field_indices["restarts"]] += 1
        self._counters[1, rows] = 0
        with contextlib.suppress(Exception):
            self._ray.kill(actor.handle)
        for reference, request in calls.items():
            del self._calls[reference]
            if request is not None:
                events.append(self._make_lost(request, f"{actor.name} died: {cause}"))
        self._start_actor(actor.first, self._actors.index(actor))
        if not actor.started and NODE_DIED in cause:  # Ray placed it on a machine that had just died
            return
        node = actor.last_report.node if actor.last_report else ""
        if actor.started_at >= self._died_at.get(node, -math.inf):
            self._died_at[node] = time.monotonic()
            self.deaths.add(f"{actor.name} died: {cause}")

    def _watch(self, events: list[Event]) -> None:
        """Replace actors that do not answer, if there is a timeout; otherwise warn about them."""
        now = time.monotonic()
        for actor in list(self._actors):
            silent_s = now - actor.report_requested_at
            if silent_s <= SLOW_S and (not self._timeout_s or silent_s <= self._timeout_s + 2 * self._report_s):
                continue
            report = next(call for call, (owner, request) in self._calls.items() if owner is actor and not request)
            if self._ray.wait([report], timeout=0)[0]:
                continue  # the report has arrived, but this program has not read it yet
            if self._timeout_s and actor.started:
                self._replace(actor, f"no answer for {silent_s:.0f} seconds", events)
            elif not actor.warned and silent_s > SLOW_S:
                actor.warned = True
                self.pending_warnings.append(self._explain_silence(actor, silent_s))

    def _explain_silence(self, actor: _Actor, silent_s: float) -> str:
        if actor.started:
            return f"{actor.name} has not answered for {silent_s:.0f} seconds; set timeout=… to replace such actors"
        requirements = f"{self._options.cpus_per_worker * actor.workers:g} free CPUs"
        if self._options.actor_options:
            requirements += " and the resources that actor_options request"
        free_cpus, cpus = self._ray.available_resources().get("CPU", 0), self._ray.cluster_resources().get("CPU", 0)
        return (
            f"{actor.name} is waiting for a machine with {requirements}: {free_cpus:g} of the cluster's {cpus:g} CPUs "
            "are free; add machines, use fewer workers, or set a smaller workers_per_actor"
        )

    # -- the connection -----------------------------------------------------------------------------------------------

    @property
    def _is_connected(self) -> bool:
        ray = self._ray
        return ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._session

    def _check_usable(self) -> None:
        super()._check_usable()
        if not self._is_connected:
            self.failure = error = WorkerError(
                "Ray was shut down while this Loader had workers in its cluster; create a new Loader"
            )
            raise error


def connect_ray(address: str, feature: str) -> Any:
    """Connect to a Ray cluster, and return the module `ray`. Messages name `feature`, the option that needs Ray.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        WorkerError: there is no cluster at this address.
    """
    ray = import_optional("ray", feature, "ray")
    import_optional("ray.exceptions", feature, "ray")
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise WorkerError(
                f"there is no Ray cluster at {address!r} ({_message_of(error)}). Start a cluster with `ray start "
                "--head` here and `ray start --address=…` on the other machines, or set "
                "the address of an existing cluster"
            ) from error
    return ray


def _message_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000]


def local_versions() -> dict[str, str]:
    """Return the versions, in this process, of the packages that determine the pixels: Python, gpuload and decoders."""
    versions = {"python": "{}.{}".format(*sys.version_info)}
    for name in ("gpuload", *DECODERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


# -- on another machine -----------------------------------------------------------------------------------------------


class Host:
    """The actor. It runs `workers` workers in a `WorkerPool` with `pool_options`, and a ring of `ring_bytes`. `changes`
    are the changes to the dataset so far, packed."""

    def __init__(
        self, parcel: Parcel, workers: int, ring_bytes: int, pool_options: dict[str, Any], changes: bytes
    ) -> None:
        self._changes = changes
        self._arguments = parcel, workers, ring_bytes, pool_options  # deleted by `_start`
        self._pool: WorkerPool | None = None
        # Requests that wait for a slot or for room in the queue, with the futures of their results.
        self._waiting: deque[tuple[Request, asyncio.Future[Done]]] = deque()
        self._in_flight: dict[int, tuple[Slot, asyncio.Future[Done]]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._report = Report("", os.uname().nodename, local_versions())  # the next report
        self._has_news = asyncio.Event()  # set when there is something to report

    async def report(self, within_s: float) -> Report:
        """Return a report as soon as there is something to report, but after `within_s` seconds at the latest. If a
        report is overdue, the caller knows that this actor or its machine hangs."""
        if self._pool is None and self._report.failure is None:
            self._start()
        self._poll()
        if self._report.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), within_s)
        self._has_news.clear()
        report, self._report = self._report, replace(self._report, deaths=[], warnings=[])
        return report

    async def process_chunk(self, request: bytes) -> Done:
        """Process a chunk, whose request is packed, and return the result."""
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._waiting.append((Request.unpack(request), future))
        self._poll()
        return await future

    async def add_changes(self, packed: bytes) -> None:
        """Store changes to the dataset for the chunks that follow."""
        if self._pool is None:
            self._changes += packed
        else:
            self._pool.add_changes(packed)

    async def cancel_before(self, chunk: int) -> None:
        """Cancel chunks with a smaller number."""
        if self._pool is not None:
            self._pool.cancel_before(chunk)

    async def close(self) -> None:
        """End the workers."""
        if self._ticker is not None:
            self._ticker.cancel()
        pool, self._pool = self._pool, None
        if pool is not None:
            self._report.failure = "closed", ()
            asyncio.get_running_loop().remove_reader(pool.fileno())
            pool.close()
            self._ring.close()

    def _node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def _start(self) -> None:
        # Ray puts folders of its internal modules on the import path of its processes.
        sys.path[:] = [entry for entry in sys.path if not entry.endswith(RAY_PATHS)]
        parcel, workers, ring_bytes, pool_options = self._arguments
        del self._arguments
        self._report.node = self._node()
        try:
            self._ring = Ring(ring_bytes)
            self._pool = WorkerPool(parcel, workers, self._ring, **pool_options)
            self._pool.add_changes(self._changes)
        except Exception as error:
            self._report.failure = str(error), error_class_names(error)
            return
        self._pool.deaths = Deaths(sys.maxsize)  # the main process enforces the limit for all actors together
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pool.fileno(), self._poll)
        self._ticker = loop.create_task(self._poll_regularly())

    async def _poll_regularly(self) -> None:
        """Poll regularly for events that no descriptor reports, such as a worker that hangs."""
        while True:
            await asyncio.sleep(POLL_S)
            self._poll()

    def _poll(self) -> None:
        pool, report = self._pool, self._report
        if pool is None or report.failure is not None:
            return
        try:
            for event in pool.collect_events(0.0):
                self._process_event(event)
            self._submit_chunks()
        except WorkerError as error:
            report.failure = str(error), error_class_names(error)
        report.warnings += pool.pending_warnings
        pool.pending_warnings.clear()
        report.deaths += [(cause, pool.deaths.stack) for cause in pool.deaths.causes]
        pool.deaths = Deaths(sys.maxsize)
        was_ready, report.ready = report.ready, pool.ready
        if report.deaths or report.warnings or report.failure or report.ready != was_ready:
            self._has_news.set()

    def _submit_chunks(self) -> None:
        assert self._pool is not None
        self._ring.collect()
        while self._waiting:
            request, future = self._waiting[0]
            slot = self._ring.acquire(request.slot_bytes)
            if slot is None:
                if not self._in_flight:
                    self._pool.recover_slots()
                return
            capacity_bytes = min(slot.capacity_bytes, request.slot_bytes)
            if not self._pool.submit(replace(request, slot_offset=slot.offset, slot_bytes=capacity_bytes)):
                return
            self._waiting.popleft()
            self._in_flight[request.chunk] = slot, future

    def _process_event(self, event: Event) -> None:
        assert self._pool is not None
        slot, future = self._in_flight.pop(event.chunk)
        done = Done(event, None, self._pool.read_counters())
        if isinstance(event, Reply):  # the pool releases the slot of a lost chunk
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
        if not future.done():
            future.set_result(done)
