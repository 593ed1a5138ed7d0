"""The parent's side of the worker processes: starts them, feeds them, watches them, ends them.

Runs in the main process, in whichever thread iterates the loader; it starts no thread. It owns the processes and the
descriptors between them and the parent; slots and chunks belong to the caller, who gets *events*:

- `Reply`: a worker finished a chunk;
- `Lost`: the worker that had taken the chunk died; do it again, in another slot, under the next attempt number;
- `Freed`: nobody can write to the slot of a lost chunk any more.

All workers take their chunks off one queue. Those of an iterable dataset have a queue each, since each is asked for its
own samples; one that died is started anew, and begins where the request says: a dataset that gives the same again loses
nothing by it.

A worker can die between taking a chunk off its queue and noting it on the board. So after a death, once the queue is
empty, chunks of it that are neither noted nor done are declared lost as well. A living worker may still come to note
such a chunk: its slot is freed only when each worker of that queue alive at that moment has replied to something since.

Lifetime: `close` ends all workers; so do the death of this process and, for the workers of a parent that forks, never
the child: it closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field

import cloudpickle  # noqa: F401  used by `ship`: loaded here, with torch, and not at the first iter()

from gpuload.errors import WorkerError
from gpuload.ring.ring import Ring
from gpuload.workers.engine import Event, Freed, Lost
from gpuload.workers.interrupts import held, let_through
from gpuload.workers.job import Job, ship
from gpuload.workers.process import WorkerProcess, check_platform, standard_path
from gpuload.workers.protocol import HELLO, HELLO_FAILED, IDLE, Board, Note, Reply, Request

__all__ = ["WorkerPool"]

MESSAGE_BYTES = 1 << 18
SLOW_SAMPLE_S = 60.0  # without a timeout, a sample that takes longer is named in a warning
CLOSE_GRACE_S = 1.0
WATCH_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Limbo:
    """A lost chunk that one of these workers may still hold."""

    chunk: int
    attempt: int
    suspects: set[int] = field(default_factory=set)


class _Queue:
    """Where requests wait: this process sends, and one worker or all of them read the same end."""

    def __init__(self) -> None:
        self.send_end, self.read_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def is_empty(self) -> bool:
        try:
            self.read_end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self.read_end.close()
        self.send_end.close()  # idle workers see the end of the queue


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
    """`workers` processes that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once.
        workers: how many processes, at least 1.
        ring: where the slots lie.
        timeout_s: a worker that stays at one sample longer is killed, and its chunk lost; 0: never.
        max_restarts: after so many deaths between two calls of `forgive`, the next is an error.
        own_queues: each worker does what it is asked for by its number, as `Request.iterable` tells it.

    Raises:
        RuntimeError: this platform or interpreter cannot start workers; use ``num_workers=0``.
        TypeError: the job cannot be sent.
    """

    def __init__(
        self,
        job: Job,
        workers: int,
        ring: Ring,
        *,
        timeout_s: float = 0.0,
        max_restarts: int = 10,
        own_queues: bool = False,
    ) -> None:
        check_platform()
        self.timeout_s = timeout_s
        self.max_restarts = max_restarts
        self.restarts = 0
        self._pid = os.getpid()
        self._ring = ring
        self._deaths: list[str] = []
        self._flying: dict[tuple[int, int], Request] = {}  # sent, and neither replied to nor lost
        self._limbo: list[_Limbo] = []
        self._audit: set[int] = set()  # queues whose worker died: look for chunks that were taken but not noted
        self.broken: WorkerError | None = None  # why it cannot go on
        self._halted = False
        self._closed = False
        self._team: dict[int, WorkerProcess] = {}
        self._watch_interval_s = min(WATCH_INTERVAL_S, timeout_s / 4) if timeout_s else WATCH_INTERVAL_S
        self._watched_at = time.monotonic()
        self._unsaid: list[str] = []  # warnings
        self._warned: dict[int, Note | None] = {}  # what a worker was at when the last warning named it
        settings = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "standard_path": standard_path(),
            "argv": [str(word) for word in sys.argv],
            "workers": workers,
            "ring_bytes": ring.ring_bytes,
        }
        with let_through():  # pickling a large dataset takes its time, and leaves nothing behind
            self._job_fd = ship(job, settings)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._job_fd)
            self._board = Board(workers)
            undo.callback(self._board.close)
            self._queues: list[_Queue] = []  # worker w reads number w modulo how many there are
            for _ in range(workers if own_queues else 1):
                self._queues.append(_Queue())
                undo.callback(self._queues[-1].close)
            self._epoll = select.epoll()
            undo.pop_all()
        _pools.add(self)
        try:
            for number in range(workers):
                self._start(number)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._team.values()]

    def submit(self, request: Request) -> bool:
        """Put a chunk on its queue; False where that is full now. Never blocks."""
        self._check_usable()
        try:
            self._queues[self._queue_of(request)].send_end.send(request.pack(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self._flying[request.chunk, request.attempt] = request
        return True

    def disown(self, before: int) -> None:
        """Chunks with a number below `before` are no longer wanted; workers end those they are at, sample by sample."""
        self._board.wanted_from = before

    def forgive(self) -> None:
        """Start counting restarts anew (a new epoch)."""
        self.restarts = 0
        self._deaths.clear()

    def gather(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout_s` seconds for something to happen.

        Raises:
            WorkerError: a worker could not start, or workers died too often.
        """
        self._check_usable()
        try:
            return self._gather(timeout_s)
        except WorkerError as error:
            self.broken = error
            raise

    def _gather(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + timeout_s
        while True:
            while self._unsaid and not events:  # a warning may be an error: with nothing in hand
                warnings.warn(self._unsaid.pop(0), RuntimeWarning, stacklevel=2)
            wait = max(0.0, min(deadline - time.monotonic(), self._watch_interval_s))
            ready = self._epoll.poll(wait)
            # Whether a queue is empty is asked before the replies are read: see the module's docstring.
            empty = {number for number in self._audit if self._queues[number].is_empty}
            dead = []
            for fd, _ in ready:
                worker = self._by_fd(fd)
                if worker is None:
                    continue
                if fd == worker.pidfd:
                    dead.append(worker)
                else:
                    self._drain(worker, events)
            for worker in dead:
                self._bury(worker, events)
            for number in empty & self._audit:
                self._declare_lost(number, events)
            if time.monotonic() - self._watched_at > self._watch_interval_s:
                self._watch()
            if events or time.monotonic() >= deadline:
                return events

    def close(self) -> None:
        """End all workers and free every descriptor. Idempotent; waits about a second at most."""
        if self._closed:
            return
        with contextlib.ExitStack() as stack:  # every step, whatever becomes of another; the last comes first
            self.halt()
            self._closed = True
            _pools.discard(self)
            stack.callback(self._team.clear)
            stack.callback(self._board.close)
            stack.callback(os.close, self._job_fd)
            stack.callback(self._epoll.close)
            deadline = time.monotonic() + CLOSE_GRACE_S
            for worker in self._team.values():
                stack.callback(worker.end, deadline)
            for queue in self._queues:
                stack.callback(queue.close)
            self._flying.clear()

    def halt(self) -> None:
        """Let workers end at their next sample, and `gather`, in another thread, within a second."""
        self._halted = True
        self._board.wanted_from = 2**63

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self._board.write(number, IDLE, 0, 0)
        queue = self._queues[number % len(self._queues)]
        shared = (self._job_fd, self._ring.fd, self._board.fd, queue.read_end.fileno())
        with held():  # a process that was started is one of the team
            worker = self._team[number] = WorkerProcess(number, shared)
            for fd in worker.descriptors:
                self._epoll.register(fd, select.EPOLLIN)

    # -- listening --------------------------------------------------------------------------------------------------

    def _by_fd(self, fd: int) -> WorkerProcess | None:
        for worker in self._team.values():
            if fd in (worker.pidfd, worker.replies.fileno()):
                return worker
        return None

    def _drain(self, worker: WorkerProcess, events: list[Event]) -> None:
        while True:
            try:
                message = worker.replies.recv(MESSAGE_BYTES)
            except (BlockingIOError, ConnectionResetError):
                return
            if not message:  # its end is closed: the death itself is seen on the pidfd
                with contextlib.suppress(OSError):
                    self._epoll.unregister(worker.replies.fileno())
                return
            if not worker.ready:
                if message != HELLO:
                    text = message.removeprefix(HELLO_FAILED).decode(errors="replace")
                    raise WorkerError(f"worker {worker.number} could not unpack the dataset or transforms:\n\n{text}")
                worker.ready = True
                continue
            reply = Reply.unpack(message)
            self._flying.pop((reply.chunk, reply.attempt), None)
            events.append(reply)
            for limbo in list(self._limbo):
                limbo.suspects.discard(worker.number)
                if (limbo.chunk, limbo.attempt) == (reply.chunk, reply.attempt):
                    self._limbo.remove(limbo)
                else:
                    self._free_if_cleared(limbo, events)

    def _free_if_cleared(self, limbo: _Limbo, events: list[Event]) -> None:
        if not limbo.suspects:
            self._limbo.remove(limbo)
            events.append(Freed(limbo.chunk, limbo.attempt))

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _bury(self, worker: WorkerProcess, events: list[Event]) -> None:
        self._drain(worker, events)
        note = self._board.read(worker.number)
        cause, outside, stack = worker.wait()
        with held():  # a worker that is forgotten must not be found in the team
            self._unregister(worker)
            del self._team[worker.number]
            self._warned.pop(worker.number, None)
            worker.forget()
        if not worker.ready and (worker.status or 0) > 0:  # it ended by itself: it would again
            raise WorkerError(
                f"worker {worker.number} could not start: {cause}. What it said stands on the standard error; "
                "num_workers=0 does the same work in this process, where it can be debugged"
            )
        request = self._flying.pop((note.chunk, note.attempt), None)
        where = ""
        if request is not None:
            where = _at(request, note.row)
            events.append(
                Lost(note.chunk, note.attempt, note.row, cause, slot_is_free=True, outside=outside, stack=stack)
            )
        for limbo in list(self._limbo):
            limbo.suspects.discard(worker.number)
            self._free_if_cleared(limbo, events)
        self._audit.add(worker.number % len(self._queues))
        self.restarts += 1
        self._deaths.append(cause + where)
        if self.restarts > self.max_restarts:
            raise WorkerError(
                f"worker processes died {self.restarts} times in this epoch, more than "
                f"max_restarts={self.max_restarts} allows: {_counted(self._deaths)}. Look at these samples with "
                "num_workers=0, and at the machine's memory; Faults(max_restarts=…) allows more"
                + (f"\n\nWhere the last one was:\n{stack}" if stack else "")
            )
        self._start(worker.number)

    def _queue_of(self, request: Request) -> int:
        return 0 if request.iterable is None else request.iterable.worker % len(self._queues)

    def _declare_lost(self, queue: int, events: list[Event]) -> None:
        """A queue was empty: what is neither noted nor done of it went down with a worker, or is about to be noted."""
        team = {number: worker for number, worker in self._team.items() if number % len(self._queues) == queue}
        for worker in team.values():
            self._drain(worker, events)
        notes = [self._board.read(number) for number in team]
        noted = {(note.chunk, note.attempt) for note in notes}
        sent = [key for key, request in self._flying.items() if self._queue_of(request) == queue]
        for key in [key for key in sent if key not in noted]:
            del self._flying[key]
            # A worker says hello before it takes anything: one that has not yet cannot have this chunk.
            suspects = {number for number, worker in team.items() if worker.ready}
            self._limbo.append(_Limbo(*key, suspects))
            events.append(Lost(*key, row=None, cause="its worker died before it began", slot_is_free=False))
            self._free_if_cleared(self._limbo[-1], events)
        self._audit.discard(queue)

    def _watch(self) -> None:
        """Kill workers that stay at one sample longer than the timeout, or name them in a warning."""
        self._watched_at = time.monotonic()
        now = time.monotonic_ns()
        for worker in self._team.values():
            if worker.killed_for:
                continue
            if not worker.ready:
                self._warn_of_slow_start(worker)
                continue
            note = self._board.read(worker.number)
            request = self._flying.get((note.chunk, note.attempt))
            if request is None or note.row >= len(request.positions):
                continue  # time counts while it has claimed a chunk
            seconds = (now - note.since_ns) / 1e9
            if self.timeout_s and seconds > self.timeout_s:
                stack = worker.stack()
                if self._board.read(worker.number) != note:
                    continue  # it went on meanwhile
                worker.kill(f"no progress for timeout={self.timeout_s:g} seconds", stack)
            elif not self.timeout_s and seconds > SLOW_SAMPLE_S and self._warned.get(worker.number) != note:
                stack = worker.stack()
                if self._board.read(worker.number) != note:
                    continue
                self._warned[worker.number] = note
                self._unsaid.append(
                    f"worker {worker.number} (process {worker.pid}) has been{_at(request, note.row)} for "
                    f"{seconds:.0f} seconds; timeout=… would end it. Where it is:\n{stack}"
                )

    def _warn_of_slow_start(self, worker: WorkerProcess) -> None:
        if time.monotonic() - worker.started_at > SLOW_SAMPLE_S and worker.number not in self._warned:
            self._warned[worker.number] = None
            self._unsaid.append(
                f"worker {worker.number} (process {worker.pid}) has not been ready for {SLOW_SAMPLE_S:.0f} seconds: it "
                f"imports and unpacks the dataset. Where it is:\n{worker.stack()}"
            )

    # -- ending -----------------------------------------------------------------------------------------------------

    def _unregister(self, worker: WorkerProcess) -> None:
        for fd in worker.descriptors:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this Loader's workers belong to the process that this one was forked from; "
                "make a new Loader in the child"
            )
        if self._closed or self._halted:
            raise RuntimeError("this Loader's workers are closed")
        if self.broken is not None:
            raise WorkerError(f"this epoch is over: {self.broken}")

    def _leave_to_parent(self) -> None:
        """In a forked child: close the copies, so that the workers still die with their real parent."""
        self._closed = True
        for queue in self._queues:
            queue.close()
        for worker in self._team.values():
            worker.leave_to_parent()
        self._epoll.close()
        os.close(self._job_fd)
        self._board.close()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _at(request: Request, row: int) -> str:
    if row >= len(request.positions):
        return ""
    return f" at sample {request.indices[row]} (position {request.positions[row]})"


def _counted(deaths: list[str]) -> str:
    """The causes in the order in which they came first, each with how often it came."""
    return "; ".join(f"{cause} ({count} times)" if count > 1 else cause for cause, count in Counter(deaths).items())
