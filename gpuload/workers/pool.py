"""The parent's side of the worker processes: starts them, feeds them, watches them, ends them.

Runs in the main process, in whichever thread iterates the loader; it starts no thread. It owns the processes and the
descriptors between them and the parent; slots and chunks belong to the caller, who gets *events*:

- `Reply`: a worker finished a chunk;
- `Lost`: the worker that had taken the chunk died; do it again, in another slot, under the next attempt number;
- `Freed`: nobody can write to the slot of a lost chunk any more.

A worker can die between taking a chunk off the queue and noting it on the board. So after a death, once the queue is
empty, chunks that are neither noted nor done are declared lost as well. A living worker may still come to note such a
chunk: its slot is freed only when each worker alive at that moment has replied to something since.

Lifetime: `close` ends all workers; so do the death of this process and, for the workers of a parent that forks, never
the child: it closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle  # noqa: F401  used by `ship`: loaded here, with torch, and not at the first iter()

from gpuload.errors import WorkerError
from gpuload.ring import Ring
from gpuload.workers.events import Event, Freed, Lost
from gpuload.workers.protocol import HELLO, HELLO_FAILED, IDLE, Board, Reply, Request
from gpuload.workers.runner import Job
from gpuload.workers.shipment import ship

__all__ = ["WorkerPool", "check_platform"]

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "TBB_NUM_THREADS",
)
MESSAGE_BYTES = 1 << 18
SLOW_SAMPLE_S = 60.0  # without a timeout, a sample that takes longer is named in a warning
CLOSE_GRACE_S = 1.0
WATCH_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    replies: socket.socket
    lifeline: int
    pidfd: int
    ready: bool = False
    killed_for: str | None = None
    warned_at: tuple[int, int] | None = None


@dataclass(slots=True)
class _Limbo:
    """A lost chunk that one of these workers may still hold."""

    chunk: int
    attempt: int
    suspects: set[int] = field(default_factory=set)


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
    """`workers` processes that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once.
        workers: how many processes, at least 1.
        ring: where the slots lie.
        timeout_s: a worker that stays at one sample longer is killed, and its chunk lost; 0: never.
        max_restarts: after so many deaths between two calls of `forgive`, the next is an error.

    Raises:
        RuntimeError: this platform or interpreter cannot start workers; use ``num_workers=0``.
        TypeError: the job cannot be sent.
    """

    def __init__(self, job: Job, workers: int, ring: Ring, *, timeout_s: float = 0.0, max_restarts: int = 10) -> None:
        check_platform()
        self.workers = workers
        self.timeout_s = timeout_s
        self.max_restarts = max_restarts
        self.restarts = 0
        self._pid = os.getpid()
        self._ring = ring
        self._deaths: list[str] = []
        self._flying: dict[tuple[int, int], Request] = {}  # sent, and neither replied to nor lost
        self._limbo: list[_Limbo] = []
        self._audit = False  # a death happened: look for chunks that were taken but not noted
        self.broken: WorkerError | None = None  # why it cannot go on
        self._closed = False
        self._team: dict[int, _Worker] = {}
        settings = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "standard_path": _standard_path(),
            "argv": [str(word) for word in sys.argv],
            "workers": workers,
            "ring_bytes": ring.ring_bytes,
        }
        self._board = Board(workers)
        self._job_fd = ship(job, settings)
        self._send_end, self._queue_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._epoll = select.epoll()
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
        return [worker.process.pid for worker in self._team.values()]

    def submit(self, request: Request) -> bool:
        """Put a chunk on the queue; False where the queue is full now. Never blocks."""
        self._check_usable()
        try:
            self._send_end.send(request.pack(), socket.MSG_DONTWAIT)
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
            wait = max(0.0, min(deadline - time.monotonic(), WATCH_INTERVAL_S))
            ready = self._epoll.poll(wait)
            # Whether the queue is empty is asked before the replies are read: see the module's docstring.
            empty = self._audit and self._queue_is_empty()
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
            if empty and self._audit:
                self._declare_lost(events)
            if not ready:
                self._watch()
            if events or time.monotonic() >= deadline:
                return events

    def close(self) -> None:
        """End all workers and free every descriptor. Idempotent; waits about a second at most."""
        if self._closed:
            return
        self._closed = True
        _pools.discard(self)
        self._board.wanted_from = 2**63
        self._send_end.close()  # idle workers see the end of the queue
        self._queue_end.close()
        deadline = time.monotonic() + CLOSE_GRACE_S
        for worker in self._team.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._team.values():
            os.close(worker.lifeline)  # SIGKILL for those that remain
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            worker.process.wait()
            self._forget(worker)
        self._team.clear()
        self._flying.clear()
        self._epoll.close()
        os.close(self._job_fd)
        self._board.close()

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline_theirs, lifeline_ours = os.pipe()
        self._board.write(number, IDLE, 0, 0)
        descriptors = (
            self._job_fd,
            self._ring.fd,
            self._board.fd,
            self._queue_end.fileno(),
            theirs.fileno(),
            lifeline_theirs,
        )
        command = [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            "-P",
            str(Path(__file__).with_name("bootstrap.py")),
            str(number),
            ",".join(map(str, descriptors)),
        ]
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", **dict.fromkeys(THREAD_VARIABLES, "1"))
        in_main = threading.current_thread() is threading.main_thread()
        # A ctrl-C between the child's start and its first line must not kill it with a traceback.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if in_main else None
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=environment)
        except OSError as error:
            ours.close()
            os.close(lifeline_ours)
            raise WorkerError(f"worker {number} could not be started with {sys.executable}: {error}") from error
        finally:
            theirs.close()
            os.close(lifeline_theirs)
            if blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            process.kill()
            process.wait()
            ours.close()
            os.close(lifeline_ours)
            raise WorkerError(
                f"worker {number} cannot be watched ({error}): pidfd_open needs Linux 5.3 and a free descriptor; "
                "num_workers=0 does the same work in this process"
            ) from error
        ours.setblocking(False)
        self._team[number] = _Worker(number, process, ours, lifeline_ours, pidfd)
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        self._epoll.register(pidfd, select.EPOLLIN)

    # -- listening --------------------------------------------------------------------------------------------------

    def _by_fd(self, fd: int) -> _Worker | None:
        for worker in self._team.values():
            if fd in (worker.pidfd, worker.replies.fileno()):
                return worker
        return None

    def _drain(self, worker: _Worker, events: list[Event]) -> None:
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

    def _bury(self, worker: _Worker, events: list[Event]) -> None:
        self._drain(worker, events)
        note = self._board.read(worker.number)
        status = worker.process.wait()
        cause = worker.killed_for or _describe_exit(status)
        self._forget(worker)
        os.close(worker.lifeline)
        del self._team[worker.number]
        if not worker.ready and status > 0:  # it ended by itself: it would again
            raise WorkerError(
                f"worker {worker.number} could not start: {cause}. What it said stands on the standard error; "
                "num_workers=0 does the same work in this process, where it can be debugged"
            )
        if self._flying.pop((note.chunk, note.attempt), None) is not None:
            events.append(Lost(note.chunk, note.attempt, note.row, cause, slot_is_free=True))
        for limbo in list(self._limbo):
            limbo.suspects.discard(worker.number)
            self._free_if_cleared(limbo, events)
        self._audit = True
        self.restarts += 1
        self._deaths.append(cause)
        if self.restarts > self.max_restarts:
            raise WorkerError(
                f"worker processes died {self.restarts} times in this epoch, more than "
                f"max_restarts={self.max_restarts} allows; the last causes: {'; '.join(self._deaths[-3:])}"
            )
        self._start(worker.number)

    def _queue_is_empty(self) -> bool:
        try:
            self._queue_end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False

    def _declare_lost(self, events: list[Event]) -> None:
        """The queue was empty: whatever is neither noted nor done went down with a worker, or is about to be noted."""
        for worker in self._team.values():
            self._drain(worker, events)
        notes = [self._board.read(number) for number in self._team]
        noted = {(note.chunk, note.attempt) for note in notes}
        for key in [key for key in self._flying if key not in noted]:
            del self._flying[key]
            # A worker says hello before it takes anything: one that has not yet cannot have this chunk.
            suspects = {number for number, worker in self._team.items() if worker.ready}
            self._limbo.append(_Limbo(*key, suspects))
            events.append(Lost(*key, row=None, cause="its worker died before it began", slot_is_free=False))
            self._free_if_cleared(self._limbo[-1], events)
        self._audit = False

    def _watch(self) -> None:
        """Kill workers that stay at one sample longer than the timeout, or name them in a warning."""
        now = time.monotonic_ns()
        for worker in self._team.values():
            note = self._board.read(worker.number)
            if note.chunk == IDLE or worker.killed_for:
                continue
            seconds = (now - note.since_ns) / 1e9
            request = self._flying.get((note.chunk, note.attempt))
            if request is None or note.row >= len(request.positions):
                continue
            what = f"at sample {request.indices[note.row]} (position {request.positions[note.row]})"
            if self.timeout_s and seconds > self.timeout_s:
                worker.killed_for = f"no progress for timeout={self.timeout_s:g} seconds"
                worker.process.kill()
            elif not self.timeout_s and seconds > SLOW_SAMPLE_S and worker.warned_at != (note.chunk, note.row):
                worker.warned_at = (note.chunk, note.row)
                warnings.warn(
                    f"worker {worker.number} (process {worker.process.pid}) has been {what} for {seconds:.0f} seconds; "
                    "timeout=… would end it",
                    RuntimeWarning,
                    stacklevel=2,
                )

    # -- ending -----------------------------------------------------------------------------------------------------

    def _forget(self, worker: _Worker) -> None:
        for fd in (worker.pidfd, worker.replies.fileno()):
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)
        worker.replies.close()
        os.close(worker.pidfd)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this Loader's workers belong to the process that this one was forked from; "
                "make a new Loader in the child"
            )
        if self._closed:
            raise RuntimeError("this Loader's workers are closed")
        if self.broken is not None:
            raise WorkerError(f"this epoch is over: {self.broken}")

    def _leave_to_parent(self) -> None:
        """In a forked child: close the copies, so that the workers still die with their real parent."""
        self._closed = True
        self._send_end.close()
        self._queue_end.close()
        for worker in self._team.values():
            worker.replies.close()
            os.close(worker.lifeline)
            os.close(worker.pidfd)
            worker.process.returncode = 0  # not ours to wait for
        self._epoll.close()
        os.close(self._job_fd)
        self._board.close()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def check_platform() -> None:
    """Refuse, with the remedy, where workers cannot be started.

    Raises:
        RuntimeError: not Linux, a frozen application, or an interpreter without an executable.
    """
    remedy = "use num_workers=0, which does the same work in this process"
    if sys.platform != "linux":
        raise RuntimeError(f"worker processes need Linux, this is {sys.platform}: {remedy}")
    if getattr(sys, "frozen", False):
        raise RuntimeError(f"a frozen application has no Python interpreter to start workers with: {remedy}")
    if not sys.executable:
        raise RuntimeError(f"sys.executable is empty, so there is no interpreter to start workers with: {remedy}")


def _standard_path() -> list[str]:
    """The entries of the import path that hold the standard library."""
    library = sysconfig.get_path("stdlib")
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    known = (library, f"{library}/lib-dynload")
    return [entry for entry in sys.path if entry in known or os.path.basename(entry) == zipped]


def _describe_exit(status: Any) -> str:
    if isinstance(status, int) and status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"exited with status {status}"
