"""The parent's side of the worker processes: it starts workers, sends them requests, watches them, and ends them.

This module runs in the main process, in whichever thread iterates the loader, and starts no thread. The pool owns the
processes and the descriptors that connect them to the parent. The caller submits chunks, each with a slot of the ring,
and gets one event per chunk: a `Reply`, which returns the slot to the caller, or a `Lost`, whose slot the pool returns
to the ring.

All workers take chunks from one shared queue. Workers of an iterable dataset have one queue each, since each reads a
different share of the samples. A replacement for a dead worker starts at the position in the request, so no sample is
lost if the dataset yields the same samples again.

Failure model: a worker records a chunk on the board after it has taken the chunk from its queue, and records that it is
idle after it has replied. If a worker dies with a recorded chunk, that chunk is lost, and its slot is free: no other
process writes to it. But a worker can also die after taking a chunk and before recording it. So after a death, all
chunks still on the worker's queue are withdrawn, and other unfinished chunks that were sent to that queue are declared
lost unless the board has them. This is wrong in one case: a living worker has just taken such a chunk, and will still
write to the slot (or read it, to plan a batch) and reply. So the slot is *written off*: it is not reused until no
worker that was ready at that moment can have the chunk. A worker cannot have the chunk once it has replied to another
chunk (it has only one chunk at a time, and the lost chunk is on no queue), once it has replied to this chunk (the
second result is dropped), or once it has ended. Idle workers send nothing, so in a small ring, all slots can be written
off, with no free slot for another chunk that these workers could reply to. `recover_slots` then closes the workers'
queue: they exit, and new workers use a new queue.

There are no other races: a request is on one queue or with one worker, and a worker touches a slot only between taking
the request and replying. So a slot never has two writers, each chunk ends exactly once, and a written-off slot is freed
at the latest when all workers that were running when it was written off have ended.

Withdrawn chunks are sent again after the chunks that must be repeated: if many samples hang, one of them is identified
as bad before each of the other samples has killed a worker.

The number of workers can change at any time (`resize`). A surplus worker is asked to leave, exits between two chunks,
and records `LEFT` on the board. No chunk is lost, and the exit does not count as a death.

Workers are forked from a *template* (`gpuload.workers.template`), a process that is started first and imports the
modules that the dataset needs. Until the template is ready, workers are *due*. If no worker can be forked from it, or
if it exits by itself before it is ready, each worker is started as a separate interpreter. A template that dies later
is replaced, which counts as a death; its workers continue, and workers that are not forked yet remain due. A worker
that was requested from a template is *pending* until it says that it exists, which is the first thing that it does. If
it never does, it has taken no chunk, and becomes due again. If a process cannot be started while other workers run, the
pool tries again every second.

Lifetime: `close` ends all workers, and so does the death of this process. A forked child of this process never ends the
workers; it only closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from io import FileIO
from logging import getLogger
from operator import itemgetter
from typing import Any

import numpy as np

from gpuload.errors import WorkerError, visible
from gpuload.ring.ring import Ring, move_processes, reserve_standard_streams, run_on_cpus
from gpuload.workers.counters import field_indices
from gpuload.workers.fork_server import launch_template, make_template
from gpuload.workers.inherited import import_path
from gpuload.workers.job import Job, append_changes
from gpuload.workers.process import (
    FORK_LIMIT_S,
    ForkerLost,
    Process,
    Template,
    WorkerProcess,
    check_platform,
    describe_exit,
)
from gpuload.workers.protocol import (
    HELLO,
    HELLO_FAILED,
    LEFT,
    MESSAGE_BYTES,
    REPLAYING,
    Board,
    Event,
    Lost,
    Queue,
    Reply,
    Request,
    read_with_file,
)
from gpuload.workers.restarting import RestartingEngine
from gpuload.workers.shipping import Parcel, copy_warning, ship
from gpuload.workers.signals import deferred_signals
from gpuload.workers.start import SLOW_START_S, Start

__all__ = ["WorkerPool", "count_pools_and_workers"]

CLOSE_GRACE_S = 1.0
SLOW_SAMPLE_S = 60.0  # without a timeout, there is a warning if a sample takes longer
WATCH_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 1.0  # after a process could not be started
logger = getLogger("gpuload.workers")
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool(RestartingEngine):
    """A pool of worker processes that process the chunks of one job.

    Args:
        job: the dataset, transforms and options, sent once. A `Parcel` is a job from another machine.
        workers: the initial number of workers, at least 1.
        ring: the ring that holds the slots.
        timeout_s: a worker that spends more time on one sample is killed, and its chunk is lost; 0 means no limit.
        queue_per_worker: whether each worker has its own queue; `Request.iterable` then selects the worker.
        first, total: the number of this pool's first worker, and the total number of workers in all pools.
        libraries: the modules that the fork server imports for the workers, each with the file of its package; None
            means that the fork server is not used.
        max_workers: the maximum for `resize`; the attribute decreases if a worker cannot be added.
        cpus_for: returns the CPUs on which a given number of workers should run; an empty set means the CPUs of this
            process.

    Raises:
        RuntimeError: this platform or interpreter cannot start workers; use ``num_workers=0``.
        TypeError: the job cannot be sent.
    """

    def __init__(
        self,
        job: Job | Parcel,
        workers: int,
        ring: Ring,
        *,
        timeout_s: float = 0.0,
        queue_per_worker: bool = False,
        first: int = 0,
        total: int | None = None,
        libraries: Mapping[str, str] | None = None,
        max_workers: int | None = None,
        cpus_for: Callable[[int], frozenset[int]] = lambda workers: frozenset(),
    ) -> None:
        check_platform()
        super().__init__(ring)
        self._in_flight: dict[int, Request] = {}  # the requests whose chunks have not ended, keyed by chunk number
        # The requests of lost chunks with the workers that may still have them, keyed by chunk number.
        self._written_off: dict[int, tuple[Request, set[WorkerProcess]]] = {}
        self._requests_to_resend: list[Request] = []  # requests in flight that were withdrawn from their queue
        self._team: dict[int, WorkerProcess] = {}  # keyed by worker number
        self._template: Template | None = None
        self._libraries = libraries
        self._is_template_fit = True  # False means that workers are separate interpreters
        # The numbers of the workers to start once the template is ready; True means that `resize` added the worker.
        self._due_workers: dict[int, bool] = {}
        self._retry_at = 0.0  # no process is started before this time, in monotonic seconds
        self.max_workers = max_workers = max_workers or workers
        self._target_size, self._cpus_for = workers, cpus_for
        self._worker_numbers = range(first, first + max_workers)
        self._memory = memoryview(bytearray(MESSAGE_BYTES))
        self._processes_by_fd: dict[int, WorkerProcess | Template] = {}  # keyed by the descriptors that epoll watches
        self._timeout_s = timeout_s
        self._check_interval_s = min(WATCH_INTERVAL_S, timeout_s / 4) if timeout_s else WATCH_INTERVAL_S
        self._checked_at = time.monotonic()
        self._settings = {
            "path": import_path(),
            "argv": [str(word) for word in sys.argv],
            "workers": max_workers,
            "first": first,
            "total": total or max_workers,
            "ring_bytes": ring.ring_bytes,
        }
        with reserve_standard_streams():
            self._job_fds = ship(job, self._settings)
        with contextlib.ExitStack() as undo, reserve_standard_streams():
            undo.callback(self._close_job)
            self._board = Board(max_workers, first=first)
            undo.callback(self._board.close)
            self._epoll = select.epoll()
            undo.callback(self._epoll.close)
            # Worker w reads queue w % len(queues).
            self._queues = [Queue() for _ in range(workers if queue_per_worker else 1)]
            undo.callback(self._close_queues)
            self._resources = undo.pop_all()
        _pools.add(self)
        try:
            self._start_team(job)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._team.values() if worker.pid is not None]

    @property
    def ready(self) -> bool:
        """Whether all initial workers have sent `HELLO`."""
        return all(self._due_workers.values()) and all(worker.ready or worker.added for worker in self._team.values())

    @property
    def _processes(self) -> list[WorkerProcess | Template]:
        return [*self._team.values(), *filter(None, [self._template])]

    @property
    def _staying_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self._team.values() if not worker.leaving]

    @property
    def size(self) -> int:
        """The number of workers that are running or due, except workers that are leaving."""
        return len(self._staying_workers) + len(self._due_workers)

    @property
    def is_steady(self) -> bool:
        """Whether exactly the requested number of workers is ready, not counting workers that are leaving."""
        return (
            self.size == self._target_size
            and not self._due_workers
            and all(worker.ready for worker in self._staying_workers)
        )

    def resize(self, workers: int) -> None:
        """Set the number of workers, which must share a queue, to a number from 1 to `max_workers`. This never waits:
        `collect_events` starts added workers one at a time. If one cannot start, `collect_events` warns, and the pool
        adds no more."""
        old_size, self._target_size = self._target_size, max(1, min(workers, self.max_workers))
        if (cpus := self._cpus_for(self._target_size)) != self._cpus_for(old_size):
            move_processes(self.pids, cpus)
        team = [worker for _, worker in sorted(self._team.items())]
        staying, leaving = ([worker for worker in team if worker.leaving is flag] for flag in (False, True))
        for number in sorted(self._due_workers)[max(0, self._target_size - len(staying)) :]:
            del self._due_workers[number]
            self._board.counters.close_worker(number, died=False)
        changing = staying[self._target_size :] or leaving[: max(0, self._target_size - len(staying))]
        for worker in changing:  # if a worker leaves before it is asked to stay, `_replace` starts a new one
            worker.leaving = not worker.leaving
            self._board.ask_to_leave(worker.number, worker.leaving)

    def wanted_cpu_s(self) -> dict[int, float]:
        """Return the CPU time that each worker has used or waited for so far, keyed by process ID."""
        return {worker.pid: worker.wanted_cpu_s() for worker in self._team.values() if worker.pid is not None}

    def busy_s(self) -> float:
        """Return the total time that all workers have spent on chunks since the pool was created, in seconds."""
        return self.read_counters()[:, field_indices["busy_ns"]].sum() / 1e9

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `collect_events` has something to process."""
        return self._epoll.fileno()

    def _submit(self, request: Request) -> bool:
        self._check_usable()
        if not self._queue_of(request).send(request):
            return False
        self._in_flight[request.chunk] = request
        self._resend()
        return True

    def _resend(self) -> None:
        while self._requests_to_resend and self._queue_of(self._requests_to_resend[0]).send(
            self._requests_to_resend[0]
        ):
            self._requests_to_resend.pop(0)

    def add_changes(self, packed: bytes) -> None:
        append_changes(self._job_fds[0], packed, self.changes_bytes)
        self.changes_bytes += len(packed)

    def exchange(self, job: Any) -> list[Event]:
        with deferred_signals():  # no process or descriptor may be left without an owner
            with reserve_standard_streams():
                job_fds = ship(job, self._settings)
            team, events = [*self._team.values()], []
            self._end_processes()  # before new ones unpickle, since both would need the memory
            for worker in team:
                self._board.counters.close_worker(worker.number, died=False)
            self._close_job()
            self._job_fds, self.changes_bytes = job_fds, 0
            self._requests_to_resend.clear()
            for _, suspects in self._written_off.values():
                suspects.clear()
            for chunk in list(self._in_flight):
                events.append(self._declare_lost(Lost(chunk, None, "the dataset was sent again")))
            with reserve_standard_streams():
                self._queues = [Queue() for _ in self._queues]
        self._start_team(job)
        return events

    def cancel_before(self, chunk: int) -> None:
        self._board.cancel_before(chunk)

    def read_counters(self) -> np.ndarray:
        return self._board.counters.read()  # after `close`: the final counts

    def recover_slots(self) -> bool:
        """Replace the workers that may still write to slots of lost chunks; return False if there are no such slots.

        Call this while no chunk is in progress, until it returns False (see the module's docstring). Workers exit when
        they reach the end of their queue; idle workers exit immediately.
        """
        suspects = {worker for _, workers in self._written_off.values() for worker in workers}
        for index, queue in enumerate(self._queues):
            if any(worker.queue is queue for worker in suspects):
                with deferred_signals(), reserve_standard_streams():
                    self._queues[index] = Queue()
                    for worker in self._team_of(queue):
                        worker.leaving = True
                    queue.close()
        return bool(suspects)

    def close(self) -> None:
        if self._closed:
            return
        # Run every step even if another step fails, in the reverse order of the calls below.
        with self._resources, contextlib.ExitStack() as stack:
            self.halt()
            self._closed = True
            _pools.discard(self)
            stack.callback(self._end_processes)
            self._in_flight.clear()

    def _end_processes(self) -> None:
        """End all workers and the template: close their queues and sockets, wait for them, and kill those that stay."""
        deadline = time.monotonic() + CLOSE_GRACE_S
        for process in self._processes:
            self._unregister(process)
        with contextlib.ExitStack() as stack:  # in the reverse order of the calls below
            stack.callback(self._team.clear)
            pending = [worker for worker in self._team.values() if worker.pid is None]
            others = [worker for worker in self._team.values() if worker.pid is not None]
            for worker in pending:
                stack.callback(worker.end, deadline)
            if self._template is not None:
                stack.callback(setattr, self, "_template", None)
                stack.callback(self._template.end, deadline)
                stack.callback(self._template.finish)
            for worker in others:
                stack.callback(worker.end, deadline)
            stack.callback(self._close_queues)

    def _close_job(self) -> None:
        for fd in self._job_fds:
            os.close(fd)

    def _close_queues(self) -> None:
        """Close the queues, so that idle workers reach the end of their queue and exit."""
        for queue in self._queues:
            queue.close()

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start_team(self, job: Job | Parcel) -> None:
        """Start the template and as many workers as are wanted, which get `job`."""
        if warning := copy_warning(self._job_fds[0], job, self._target_size):
            self._warn_once("copies", warning)
        self._due_workers.clear()
        self._is_template_fit, self._retry_at = True, 0.0
        self._start_template()
        for number in self._worker_numbers[: self._target_size]:
            self._start(number)

    def _start_template(self) -> None:
        job_fd, *shared_memory_fds = self._job_fds
        shared = (job_fd, self._ring.fd, self._board.fd, *shared_memory_fds)
        with deferred_signals(), reserve_standard_streams(), run_on_cpus(self._cpus_for(self._target_size)):
            self._template = (
                launch_template(shared)
                if self._libraries is None
                else make_template(shared, self._settings["path"], self._libraries)
            )
            self._register(self._template)

    def _start(self, number: int, *, added: bool = False) -> None:
        """Start a worker now, or once the template is ready."""
        self._board.clear(number)
        self._due_workers[number] = added
        self._start_due()

    def _start_due(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        if self._is_template_fit and self._template is None:
            try:
                self._start_template()
            except (WorkerError, OSError) as error:
                self._retry_later(error)
        while self._due_workers and (self._template.ready if self._template else not self._is_template_fit):
            number, added = next(iter(self._due_workers.items()))
            queue, (job_fd, *shared_memory_fds) = self._queues[number % len(self._queues)], self._job_fds
            shared = (job_fd, self._ring.fd, self._board.fd, queue.read_end.fileno(), *shared_memory_fds)
            # A ctrl-C between the start of a process and its entry in the team would leave a process that nobody ends.
            with deferred_signals(), reserve_standard_streams(), run_on_cpus(self._cpus_for(self._target_size)):
                try:
                    worker = WorkerProcess(number, shared, self._template)
                except ForkerLost:  # the worker remains due until there is a new template
                    return
                except (WorkerError, OSError) as error:
                    if not added:
                        self._retry_later(error)
                        return
                    del self._due_workers[number]
                    self._stop_adding(number, str(error))
                    continue
                del self._due_workers[number]
                self._team[number] = worker
                worker.queue, worker.added = queue, added
                self._register(worker)

    def _retry_later(self, error: Exception) -> None:
        """Start no process for a while, after one could not be started.

        Raises:
            WorkerError, OSError: there is no other worker.
        """
        if not self._team:
            raise error
        self._retry_at = time.monotonic() + RETRY_INTERVAL_S
        self._warn_once(
            "a start that failed", f"{error}. The other workers continue, and gpuload tries again every second"
        )

    def _accept(self, process: WorkerProcess | Template, message: memoryview, pidfile: FileIO | None) -> None:
        """Process the answer to a request to fork a process."""
        if not (reason := process.accept(message, pidfile)):
            self._register(process)
            return
        error = WorkerError(f"{process.name} could not be forked: {reason}; use num_workers=0 to load in this process")
        if isinstance(process, Template):
            self._end_template()
        else:
            self._leave_team(process)
            if process.added:
                self._stop_adding(process.number, str(error))
            if process.added or self.size >= self._target_size:
                return
            self._due_workers[process.number] = False
        self._retry_later(error)

    def _leave_team(self, worker: WorkerProcess) -> None:
        """Remove a pending worker from the team, and wait until it has ended if it was forked."""
        with deferred_signals():
            self._unregister(worker)
            del self._team[worker.number]
            worker.end(0.0)
        self._board.clear(worker.number)

    def _register(self, process: WorkerProcess | Template) -> None:
        for fd in process.descriptors:
            if fd not in self._processes_by_fd:
                self._processes_by_fd[fd] = process
                self._epoll.register(fd, select.EPOLLIN)

    def _read_template(self, template: Template) -> None:
        """Read a message of the template, which says whether workers can be forked from it."""
        message, file = memoryview(b""), None
        with contextlib.suppress(ConnectionResetError):
            message, file = read_with_file(template.replies, self._memory)
        if not message:
            with contextlib.suppress(OSError):
                self._epoll.unregister(template.replies.fileno())
            if template.pid is None:
                self._replace_template(template)
            return  # otherwise the template has ended, as its pidfd will report
        if template.pid is None:
            self._accept(template, message, file)
            return
        template.read_readiness(message)
        if template.misfit_reason:
            logger.info(
                "the template is a separate interpreter, since it cannot be forked from the fork server: %s",
                template.misfit_reason,
            )
            self._libraries = None
            self._end_template()
            self._start_template()
            return
        if template.ready:
            self._record_start(template.start)
            logger.info("workers are forked from a template (process %d)", template.pid)
        else:
            self._is_template_fit = False
            self._end_template()
            logger.info(
                "each worker is a separate interpreter, since workers cannot be forked from the template: %s",
                template.unfit_reason,
            )
        self._start_due()

    def _replace_template(self, template: Template) -> None:
        """Replace a template that has ended, unless a new one would fail in the same way."""
        ending = template.wait()
        was_not_forked = template.pid is None and ending.status is None
        self._end_template()
        if template.was_ready or ending.killed_externally or was_not_forked:
            if not was_not_forked:
                self.deaths.add(ending.cause, ending.stack, template.title)
            elif status := template.forker_status():
                self.deaths.add(describe_exit(status), "", "the fork server")
            try:
                self._start_template()
            except (WorkerError, OSError) as error:
                self._retry_later(error)
        else:
            self._is_template_fit = False
            self._start_due()

    def _end_template(self) -> None:
        if self._template is not None:
            template, self._template = self._template, None
            self._unregister(template)
            template.finish()
            template.end(time.monotonic() + CLOSE_GRACE_S)

    def _add(self) -> None:
        """Start an additional worker. If it cannot start, the pool continues without it."""
        free_numbers = (n for n in self._worker_numbers if n not in self._team and n not in self._due_workers)
        if (number := next(free_numbers, None)) is not None:  # otherwise wait until a worker has left
            self._start(number, added=True)

    def _stop_adding(self, number: int, reason: str) -> None:
        """Stop adding workers after worker `number` could not be added."""
        self._board.counters.close_worker(number, died=False)
        if self._target_size > self.size:
            self.max_workers = max(1, self.size)
            self.resize(self.max_workers)
        text = f"a worker could not be added: {reason}. The number of workers stays at {self.size}"
        self._warn_once("a worker that was added", text)

    # -- listening --------------------------------------------------------------------------------------------------

    def _step(self, wait_s: float, events: list[Event]) -> None:
        self._resend()
        self._start_due()
        if self.size < self._target_size:
            self._add()
        start = time.perf_counter()
        ready = self._epoll.poll(min(wait_s, self._check_interval_s))
        if wait_s:
            self.waited_s += time.perf_counter() - start
        # Look up all processes first: the loop below closes descriptors, and their numbers are reused.
        readable = [
            (process, fd == process.pidfd) for fd, _ in ready if (process := self._processes_by_fd.get(fd)) is not None
        ]
        for process, has_ended in sorted(readable, key=itemgetter(1)):
            if isinstance(process, Template):
                if process is self._template:
                    (self._replace_template if has_ended else self._read_template)(process)
            elif self._team.get(process.number) is process:
                (self._replace if has_ended else self._drain)(process, events)
        if time.monotonic() - self._checked_at > self._check_interval_s:
            self._checked_at = time.monotonic()
            self._check_progress()

    def _drain(self, worker: WorkerProcess, events: list[Event]) -> None:
        while True:
            try:
                message, file = read_with_file(worker.replies, self._memory)
            except (BlockingIOError, ConnectionResetError):
                return
            if not message:  # the worker has closed its end of the socket, and its pidfd will report its death
                with contextlib.suppress(OSError):
                    self._epoll.unregister(worker.replies.fileno())
                if worker.pid is None:
                    self._restart_pending(worker)
                return
            if worker.pid is None:
                self._accept(worker, message, file)
                if worker.pid is None:
                    return
                continue
            if not worker.ready:
                self._greet(worker, message)
                continue
            reply = Reply.unpack(message, file)
            if self._in_flight.pop(reply.chunk, None) is not None:
                events.append(reply)
            elif reply.chunk in self._written_off:
                self._written_off[reply.chunk][1].clear()
            if self._written_off:
                self._clear_suspect(worker)

    def _restart_pending(self, worker: WorkerProcess) -> None:
        """Start a worker again that has ended before it existed for the pool, or whose template has."""
        ending = worker.wait()
        self._leave_team(worker)
        if ending.status is not None:
            self.deaths.add(ending.cause, ending.stack, worker.name)
        if self.size < self._target_size:
            self._start(worker.number, added=worker.added)

    def _greet(self, worker: WorkerProcess, message: memoryview) -> None:
        """Process the first message of a worker."""
        if message[: len(HELLO)] != HELLO:
            text = str(message[len(HELLO_FAILED) :], errors="replace")
            error_class_names, _, text = text.partition("\n")
            if not worker.added:
                raise WorkerError(f"worker {worker.number} {text}", error_class_names.split())
            worker.failure_reason = f"it {text.rstrip()}\n"
            return
        worker.ready = True
        packed, differences = marshal.loads(message[len(HELLO) :])  # sent by our own worker
        self._record_start(Start.unpack(packed, worker.started_at) if packed else self.start)
        if differences:
            self._warn_once(
                "modules",
                f"{differences}. Workers import modules again, so they do not see values or functions that were set "
                "after the import; store them in the dataset, or set them in worker_init_fn",
            )

    def _record_start(self, start: Start) -> None:
        """Record the start of the template or a worker if it is the slowest so far. Once all workers are ready, log the
        slowest start if workers took long."""
        if self.start.seconds:
            return
        if start.interpreter_start_s > self.start.interpreter_start_s:
            self.start = start
        if self.ready:
            self.start = replace(self.start, seconds=time.monotonic() - self.started_at)
            if self.start.seconds > SLOW_START_S:
                summary = f"{self.start.describe()}. {self.start.advise()}".rstrip(". ")
                logger.info("workers were ready after %.1f s: %s", self.start.seconds, summary)

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _replace(self, worker: WorkerProcess, events: list[Event]) -> None:
        """Handle the end of a worker's process: report its chunk as lost, count the death, and start a replacement
        unless fewer workers are wanted."""
        self._drain(worker, events)
        note, ending = self._board.read(worker.number), worker.wait()
        with deferred_signals():  # a worker with closed descriptors must not stay in the team
            self._unregister(worker)
            del self._team[worker.number]
            worker.close_descriptors()
        if worker.added and not worker.ready:
            self._stop_adding(worker.number, worker.failure_reason or f"it was {ending.cause}")
            return
        if not worker.ready and (ending.status or 0) > 0:  # it exited by itself, and so would a new worker
            raise WorkerError(
                f"worker {worker.number} could not start: {ending.cause}. See its standard error for details, or use "
                "num_workers=0 to load in this process and debug there"
            )
        self._clear_suspect(worker)
        if note.chunk != LEFT:
            at_sample = ""
            if (request := self._in_flight.get(note.chunk)) is not None:
                at_sample = _describe_sample(request, note.row)
                row = None if note.row == REPLAYING else note.row
                events.append(
                    self._declare_lost(Lost(note.chunk, row, ending.cause, ending.killed_externally, ending.stack))
                )
            self._audit(worker.queue, events)
            self._board.counters.close_worker(worker.number)
            self.deaths.add(ending.cause + at_sample, ending.stack, worker.title)
        if self.size < self._target_size:
            self._start(worker.number)

    def _queue_of(self, request: Request) -> Queue:
        return self._queues[0 if request.iterable is None else request.iterable.worker % len(self._queues)]

    def _team_of(self, queue: Queue) -> list[WorkerProcess]:
        return [worker for worker in self._team.values() if worker.queue is queue]

    def _audit(self, queue: Queue, events: list[Event]) -> None:
        """Declare lost the chunks that a dead worker may have taken from this queue without recording them."""
        if queue not in self._queues:
            return  # the queue's chunks were declared lost before the queue was replaced
        self._requests_to_resend += queue.withdraw()
        team = self._team_of(queue)
        for worker in team:
            self._drain(worker, events)
        located_chunks = {request.chunk for request in self._requests_to_resend}
        located_chunks |= {self._board.read(worker.number).chunk for worker in team}
        # A worker says hello before it takes a chunk, so workers that are not ready cannot have one.
        suspects = [worker for worker in team if worker.ready]
        for chunk, request in list(self._in_flight.items()):
            if self._queue_of(request) is queue and chunk not in located_chunks:
                events.append(self._declare_lost(Lost(chunk, None, "its worker died before starting on it"), suspects))

    def _declare_lost(self, lost: Lost, suspects: Iterable[WorkerProcess] = ()) -> Lost:
        """Record that a chunk is lost, and return `lost`. The chunk's slot is freed, or written off while one of the
        suspects may still have the chunk."""
        self._written_off[lost.chunk] = self._in_flight.pop(lost.chunk), set(suspects)
        self._clear_suspect()
        return lost

    def _clear_suspect(self, worker: WorkerProcess | None = None) -> None:
        """Record that `worker`, which has ended or replied, has no lost chunk. Free the slots of the lost chunks that
        no worker can have any longer."""
        for chunk, (request, suspects) in list(self._written_off.items()):
            suspects -= {worker}
            if not suspects:
                del self._written_off[chunk]
                self._ring.release_at(request.slot_offset)

    # -- workers that hang on a sample ------------------------------------------------------------------------------

    def _check_progress(self) -> None:
        """Kill workers that exceed the timeout on one sample; if there is no timeout, warn about slow workers."""
        now_ns = time.monotonic_ns()
        limit_s = min(self._timeout_s or FORK_LIMIT_S, FORK_LIMIT_S)
        for process in self._processes:
            if not process.ready:
                self._check_start(process)
            if (forker := process.stuck_forker(limit_s)) is not None and not forker.was_killed:
                forker.kill(f"it did not fork a process for {limit_s:g} seconds", "")
        for worker in self._team.values():
            note = self._board.read(worker.number)
            request, _ = self._written_off.get(note.chunk, (self._in_flight.get(note.chunk), None))
            if not worker.ready or worker.was_killed or request is None or note.row >= len(request.positions):
                continue  # the timeout applies only while a worker processes a sample
            seconds = (now_ns - note.since_ns) / 1e9
            if seconds <= (self._timeout_s or SLOW_SAMPLE_S) or worker.warned_note == note:
                continue
            stack = worker.stack()
            if self._board.read(worker.number) != note:
                continue  # the worker has begun another row in the meantime
            if self._timeout_s:
                worker.kill(f"no progress for timeout={self._timeout_s:g} seconds", stack)
            else:
                worker.warned_note = note
                self.pending_warnings.append(
                    f"{worker.title} has been{_describe_sample(request, note.row)} for "
                    f"{seconds:.0f} seconds; set timeout=… to kill and restart such workers. Its stack:\n{stack}"
                )

    def _check_start(self, process: Process) -> None:
        if time.monotonic() - process.started_at > SLOW_SAMPLE_S and not process.warned_of_start:
            process.warned_of_start = True
            self.pending_warnings.append(
                f"{process.title} has been starting for {SLOW_SAMPLE_S:.0f} seconds: it is "
                f"importing modules or unpickling the dataset. Its stack:\n{process.stack()}"
            )

    # -- ending -----------------------------------------------------------------------------------------------------

    def _unregister(self, process: WorkerProcess | Template) -> None:
        for fd in process.descriptors:
            self._processes_by_fd.pop(fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def _leave_to_parent(self) -> None:
        """Close this forked child's copies of the descriptors, so that the workers still die with their parent."""
        self._closed = True
        with self._resources:
            for process in self._processes:
                process.leave_to_parent()


def _describe_sample(request: Request, row: int) -> str:
    """Return a phrase for a message that names a worker's current sample; "" if it is not processing a sample."""
    if row >= len(request.positions):
        return ""
    place = " at"
    if row == REPLAYING:
        place, row = " on the way to", 0
    return f"{place} sample {visible(str(request.indices[row]))} (position {request.positions[row]})"


def count_pools_and_workers() -> tuple[int, int]:
    """Return the number of open pools in this process, and the total number of their workers."""
    return len(_pools), sum(len(pool._team) + len(pool._due_workers) for pool in _pools)


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
