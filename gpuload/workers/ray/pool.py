"""The program's side of workers on other machines: an engine, as a `WorkerPool` is, over the actors of a Ray cluster.

Runs in the main process, in whichever thread iterates the loader; it starts no thread (Ray has its own). It owns the
actors. A chunk is one call of an actor, and its result one object: the packed reply and the bytes of the slot, which
are copied from the object store to the slot here and freed there. Each actor has two chunks for each of its workers at
most, so the object store never holds more than that, nor more than the ring. Only this program writes to slots here, so
that of a lost chunk is free at once; those on other machines follow the rule of `gpuload.workers.pool`.

Beside its chunks each actor has a call for a report in work, which comes back after some seconds even if there is
nothing to tell. So an actor that died is noticed by an error, and one that hangs, or whose machine does, by a report
that does not come. Its chunks are lost then, as those of a worker that died, and another actor takes its place, where
the cluster has room. Deaths of several actors of one machine at the same time count once.

Lifetime: `close` ends the actors. If this program dies, Ray ends them, and workers end with their actor.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpuload.errors import WorkerError, import_optional
from gpuload.ring.ring import Ring
from gpuload.workers.counters import FIELDS, place_of
from gpuload.workers.job import Job
from gpuload.workers.pool import RestartingEngine
from gpuload.workers.protocol import Event, Lost, Reply, Request, Status
from gpuload.workers.ray.host import Done, Host, Report, versions
from gpuload.workers.ray.options import CHUNKS_PER_WORKER, WORKERS_PER_ACTOR, RayWorkers
from gpuload.workers.shipping import pack

__all__ = ["RayPool", "connected"]

REPORT_S: Final = 5.0
NODE_DIED: Final = "its node has died"  # how Ray says that
SLOW_S: Final = 60.0  # a warning says what has not come for so long
WAIT_S: Final = 1.0
CLOSE_S: Final = 2.0


@dataclass(eq=False)
class _Actor:
    """An actor with the workers from number `first` on."""

    handle: Any
    first: int
    workers: int
    started_at: float
    asked_at: float  # for the report that is in work
    chunks: int = 0  # in work
    said: Report | None = None  # the last report; None: it has not started, and may never do
    warned: bool = False

    @property
    def started(self) -> bool:
        return self.said is not None

    @property
    def name(self) -> str:
        last = self.first + self.workers - 1
        numbers = f"worker {self.first}" if self.workers == 1 else f"workers {self.first} to {last}"
        return f"the Ray actor of {numbers}" + (f" on {self.said.address}" if self.said else "")


class RayPool(RestartingEngine):
    """Workers of a Ray cluster that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once to each machine.
        workers: how many, and where.
        ring: where the slots lie.
        timeout_s, max_restarts, own_queues: as for a `WorkerPool`.

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
        max_restarts: int = 10,
        own_queues: bool = False,
    ) -> None:
        super().__init__(ring, max_restarts)
        self._timeout_s = timeout_s
        self._own_queues = own_queues
        self._workers = workers
        self._report_s = min(REPORT_S, max(timeout_s / 4, 0.5)) if timeout_s else REPORT_S
        self._wanted_from = 0
        self._counted = np.zeros((2, workers.count, len(FIELDS)), np.int64)  # by actors that died; by those there are
        self._known: set[str] = set()  # what was warned of once and for all
        self._actors: list[_Actor] = []
        # In work, by the reference to the result; None: a report.
        self._calls: dict[Any, tuple[_Actor, Request | None]] = {}
        self._waiting: deque[Request] = deque()  # for an actor that starts
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
        """Whether each worker has said hello."""
        return all(actor.said is not None and actor.said.ready for actor in self._actors)

    def submit(self, request: Request) -> bool:
        """Give a chunk to an actor; False if all have enough. Never blocks."""
        self._check_usable()
        actor = self._actor_for(request)
        if actor is not None:
            self._send(request, actor)
        elif any(actor.started for actor in self._actors) and request.iterable is None:
            return False
        else:
            self._waiting.append(request)
        return True

    def _actor_for(self, request: Request) -> _Actor | None:
        """The actor that has the least to do, None if all have enough or none has started; or, for an iterable dataset,
        the one whose worker it is, if that has started."""
        if request.iterable is not None:
            actor = self._actors[request.iterable.worker // self._per_actor]
            return actor if actor.started else None
        actors = [actor for actor in self._actors if actor.started]
        actor = min(actors, key=lambda actor: actor.chunks / actor.workers, default=None)
        return None if actor is None or actor.chunks >= CHUNKS_PER_WORKER * actor.workers else actor

    def _send(self, request: Request, actor: _Actor) -> None:
        self._calls[actor.handle.do.remote(request.pack())] = actor, request
        actor.chunks += 1

    def cancel_before(self, chunk: int) -> None:
        """Chunks with a smaller number are no longer wanted; workers stop theirs at the next sample."""
        self._wanted_from = chunk
        if self._is_connected and not self._closed:
            for actor in self._actors:
                if actor.started:
                    actor.handle.cancel_before.remote(chunk)

    def counted(self) -> np.ndarray:
        """What each worker did, as `gpuload.workers.counters` has it, as of the last chunk of its actor."""
        return self._counted.sum(axis=0)

    def recover_slots(self) -> bool:
        """False: slots of lost chunks are free at once."""
        return False

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
        self._send_waiting(events)

    def _send_waiting(self, events: list[Event]) -> None:
        """What no actor could take when it came."""
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.chunk < self._wanted_from:
                events.append(Reply(request.chunk, request.attempt, Status.UNWANTED, 0, b""))
            elif (actor := self._actor_for(request)) is not None:
                self._send(request, actor)
            else:
                self._waiting.append(request)

    def close(self) -> None:
        """End all actors. Idempotent; takes a few seconds at most."""
        if self._closed:
            return
        self._closed = True
        actors, self._actors = self._actors, []
        self._calls.clear()
        self._waiting.clear()
        if os.getpid() != self._pid or not self._is_connected:
            return  # they are another process's; or have ended with Ray
        with contextlib.suppress(Exception):
            alive = [actor.handle.close.remote() for actor in actors if actor.said is not None]
            if alive:
                self._ray.wait(alive, num_returns=len(alive), timeout=CLOSE_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)
        self._parcel = None

    # -- starting ---------------------------------------------------------------------------------------------------

    def _fitting(self) -> int:
        """How many workers an actor has: so many that some machine can take it."""
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
        except self._ray.exceptions.RayActorError as error:
            self._replace(actor, _first_line(error), events)
            return
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{actor.name} failed, which is an error of gpuload:\n\n{error}") from error
        except self._ray.exceptions.RayError as error:  # the object is lost, not the actor
            if request is None:
                self._replace(actor, _first_line(error), events)
            else:
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
            if result.counted is not None:
                rows = self._counted[1, actor.first : actor.first + actor.workers]
                np.maximum(rows, result.counted, out=rows)  # results may come in another order
            events.append(self._received(request, result))

    def _received(self, request: Request, done: Done) -> Event:
        if done.lost is not None:
            self._ring.release_at(request.slot_offset)
            return done.lost
        reply = Reply.unpack(done.reply)
        if done.data is not None and request.chunk >= self._wanted_from:
            self._ring.bytes[request.slot_offset : request.slot_offset + len(done.data)] = done.data
        elif reply.status is Status.DONE and reply.nbytes:
            reply.status = Status.UNWANTED
        return reply

    def _lose(self, request: Request, cause: str) -> Lost:
        self._ring.release_at(request.slot_offset)
        return Lost(request.chunk, request.attempt, None, cause, outside=True)

    def _hear(self, actor: _Actor, report: Report) -> None:
        first = actor.said is None
        actor.said, actor.warned = report, False
        if first:
            self._compare(actor, report)
        self.unsaid += [f"{text} (on {report.address})" for text in report.warnings]
        if report.broken is not None:
            text, kinds = report.broken
            raise WorkerError(f"{text}\n\n(on {report.address}, a machine of the Ray cluster)", kinds)
        for cause, stack in report.deaths:
            self.deaths.add(f"{cause} on {report.address}", stack)
        self._ask(actor)

    def _compare(self, actor: _Actor, report: Report) -> None:
        """The same versions give the same pixels."""
        ours = versions()
        others = {name: theirs for name, theirs in report.versions.items() if ours.get(name) != theirs}
        others |= dict.fromkeys(ours.keys() - report.versions.keys(), "none")
        if not others:
            return
        told = ", ".join(f"{name} {theirs} (here {ours.get(name, 'none')})" for name, theirs in sorted(others.items()))
        if {"gpuload", "python"} & others.keys():
            raise WorkerError(f"{report.address} has {told}: install the same versions on all machines of the cluster")
        if told not in self._known:
            self._known.add(told)
            self.unsaid.append(f"{report.address} has {told}: its pixels may differ from those of other machines")

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _replace(self, actor: _Actor, cause: str, events: list[Event]) -> None:
        """An actor is gone, and with it its workers and what they made: its chunks are lost."""
        if actor.said is None and "creation task" in cause:  # it would fail again
            raise WorkerError(f"{actor.name} could not start: {cause}")
        theirs = {reference: request for reference, (other, request) in self._calls.items() if other is actor}
        rows = slice(actor.first, actor.first + actor.workers)
        self._counted[0, rows] += self._counted[1, rows]
        self._counted[0, rows, place_of["restarts"]] += 1
        self._counted[1, rows] = 0
        with contextlib.suppress(Exception):
            self._ray.kill(actor.handle)
        for reference, request in theirs.items():
            del self._calls[reference]
            if request is not None:
                events.append(self._lose(request, f"{actor.name} died: {cause}"))
        self._start(actor.first, self._actors.index(actor))
        if not actor.started and NODE_DIED in cause:  # sent to a machine of which Ray did not know yet that it is dead
            return
        node = actor.said.node if actor.said is not None else ""
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
            theirs = [
                reference for reference, (other, request) in self._calls.items() if other is actor and not request
            ]
            if self._ray.wait(theirs, timeout=0)[0]:
                continue  # it came while this program did something else
            if self._timeout_s and actor.started:
                self._replace(actor, f"no answer for {silent_s:.0f} seconds", events)
            elif not actor.warned and silent_s > SLOW_S:
                actor.warned = True
                self.unsaid.append(self._why_silent(actor, silent_s))

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
