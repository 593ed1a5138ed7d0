"""The parent's side of the worker processes: starts, feeds, watches and ends them.

Runs in the main process, in whichever thread iterates the loader; it starts no thread. It owns the processes and the
descriptors between them and the parent; slots and chunks belong to the caller, who gets *events*:

- `Reply`: a worker has done a chunk;
- `Lost`: the worker that had taken the chunk died; do it again, in another slot, under the next attempt number;
- `Freed`: nobody can write to the slot of a lost chunk any more.

All workers take their chunks off one queue. Workers of an iterable dataset have a queue each, since each is asked for
its own samples; one that died is restarted where the request says: if the dataset repeats itself, nothing is lost.

A worker can die between taking a chunk off its queue and noting it on the board. So after a death, once the queue is
empty, its chunks that are neither noted nor done are declared lost as well. A living worker may still be about to note
such a chunk: its slot is freed only when each worker of that queue alive at that moment has replied to something since.

The number of workers can change at any time (`resize`): one that is not needed is asked to leave, does so between two
chunks, and notes on the board that it has `LEFT`. Nothing is lost by that, and it does not count as a death.

What is still on the queue when a worker dies is taken back, and sent again behind what has to be done again: where many
samples hang, one of them is known to be bad before each of the others has cost a worker.

Lifetime: `close` ends all workers, and so does the death of this process. A forked child never ends its parent's
workers: it closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import warnings
import weakref
from collections.abc import Callable

import numpy as np

from gpuload.errors import WorkerError
from gpuload.ring.affinity import move, running_on
from gpuload.ring.ring import Ring, standard_streams_taken
from gpuload.workers.counters import place_of
from gpuload.workers.deaths import Deaths
from gpuload.workers.engine import Event, Lost
from gpuload.workers.interrupts import held, let_through
from gpuload.workers.job import Job
from gpuload.workers.limbo import Limbo
from gpuload.workers.process import WorkerProcess, check_platform, settings_for
from gpuload.workers.protocol import (
    HELLO,
    HELLO_FAILED,
    LEFT,
    MESSAGE_BYTES,
    Board,
    Queue,
    Reply,
    Request,
)
from gpuload.workers.shipping import Parcel, ship, warning_of_copies
from gpuload.workers.watch import Watch, at_sample

__all__ = ["WorkerPool", "running_workers"]

CLOSE_GRACE_S = 1.0
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
    """`workers` processes that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once. A `Parcel` is one from another machine.
        workers: how many processes, at least 1.
        ring: where the slots lie.
        timeout_s: a worker that stays at one sample longer is killed, and its chunk lost; 0: never.
        max_restarts: after this many deaths between two calls of `forgive`, the next is an error.
        own_queues: a queue for each worker; `Request.iterable` says which worker is asked.
        first, total: the number of the first of these workers, and how many there are in other pools too.
        most: how many there may be after `resize`; as an attribute fewer, once a worker could not be added.
        cpus_for: the CPUs for so many workers; none: those of this process.

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
        max_restarts: int = 10,
        own_queues: bool = False,
        first: int = 0,
        total: int | None = None,
        most: int | None = None,
        cpus_for: Callable[[int], frozenset[int]] = lambda workers: frozenset(),
    ) -> None:
        check_platform()
        self.deaths = Deaths(max_restarts)
        self._pid = os.getpid()
        self._ring = ring
        self._flying: dict[tuple[int, int], Request] = {}  # sent, and neither replied to nor lost
        self._limbo = Limbo()
        self._taken_back: list[Request] = []  # in flight, and on no queue
        self._audit: set[int] = set()  # queues of dead workers: some chunks may be taken but not noted
        self.broken: WorkerError | None = None  # why it cannot continue
        self.waited_s = 0.0
        self._halted = self._closed = self._told = False  # the last: that no more workers can be added
        self._told_differences = False  # between modules here and in workers
        self._team: dict[int, WorkerProcess] = {}
        self.most = most = most or workers
        self._wanted, self._cpus_for = workers, cpus_for
        self._numbers = range(first, first + most)
        self._added: dict[int, str] = {}  # after a `resize`, and not ready yet; why it will not be, once that is known
        self._leaving: set[int] = set()  # asked to, and still there
        self._memory = memoryview(bytearray(MESSAGE_BYTES))
        self._by_fd: dict[int, WorkerProcess] = {}  # of the descriptors that epoll watches
        self._watch = Watch(timeout_s)
        self.unsaid: list[str] = []  # warnings; `gather` gives them
        with let_through(), standard_streams_taken():  # pickling may take long, and can be interrupted
            self._job_fds = ship(job, settings_for(most, first, total or most, ring.ring_bytes))
        if copies := warning_of_copies(self._job_fds[0], job, workers):
            self.unsaid.append(copies)
        with contextlib.ExitStack() as undo, standard_streams_taken():
            undo.callback(self._close_job)
            self._board = Board(most, first=first)
            undo.callback(self._board.close)
            self._queues: list[Queue] = []  # worker w reads number w % len
            for _ in range(workers if own_queues else 1):
                self._queues.append(Queue())
                undo.callback(self._queues[-1].close)
            self._epoll = select.epoll()
            undo.pop_all()
        _pools.add(self)
        try:
            for number in range(first, first + workers):
                self._start(number)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._team.values()]

    @property
    def ready(self) -> bool:
        """Whether each worker has said hello, without those that were added later."""
        return all(worker.ready or number in self._added for number, worker in self._team.items())

    @property
    def size(self) -> int:
        """How many workers there are or are being added, without those that leave."""
        return len(self._team) - len(self._leaving)

    @property
    def is_steady(self) -> bool:
        """Whether there are as many workers as were asked for, each ready; without those that leave, idle ones late."""
        return self.size == self._wanted and all(w.ready or n in self._leaving for n, w in self._team.items())

    def resize(self, workers: int) -> None:
        """Have so many workers, from 1 to `most`, on one queue. Never waits: `gather` starts those that are added, one
        at a time. If one cannot start, `gather` warns, and no more are added."""
        before, self._wanted = self._wanted, max(1, min(workers, self.most))
        if (cpus := self._cpus_for(self._wanted)) != self._cpus_for(before):
            move(self.pids, cpus)
        for number in sorted(self._team.keys() - self._leaving)[self._wanted :]:
            self._leaving.add(number)
            self._board.ask_to_leave(number)
        for number in sorted(self._leaving)[: max(0, self._wanted - self.size)]:
            self._leaving.discard(number)
            self._board.ask_to_leave(number, False)  # where it has left already, another one is started

    def wanted_cpu_s(self) -> dict[int, float]:
        """The processor time of each worker so far, and the time that it waited for a processor, by process."""
        return {worker.pid: worker.wanted_cpu_s() for worker in self._team.values()}

    def busy_s(self) -> float:
        """How long workers have been at chunks, all together, since the pool was made."""
        return self.counted()[:, place_of["busy_ns"]].sum() / 1e9

    def fileno(self) -> int:
        """A descriptor that can be read when `gather` has something to take in."""
        return self._epoll.fileno()

    def submit(self, request: Request) -> bool:
        """Put a chunk on its queue; False if that is full. Never blocks."""
        self._check_usable()
        if not self._queues[self._queue_of(request)].send(request):
            return False
        self._flying[request.chunk, request.attempt] = request
        if self._taken_back:
            self._send_again()
        return True

    def _send_again(self) -> None:
        while self._taken_back and self._queues[self._queue_of(self._taken_back[0])].send(self._taken_back[0]):
            self._taken_back.pop(0)

    def disown(self, before: int) -> None:
        """Chunks with a number below `before` are no longer wanted; workers stop theirs at the next sample."""
        self._board.wanted_from = before

    def counted(self) -> np.ndarray:
        """What each worker did, as `gpuload.workers.counters` has it; after `close`, until then."""
        return self._board.counters.read()

    def forgive(self) -> None:
        """Forget the deaths so far, for a new epoch."""
        self.deaths.forgive()

    def gather(self, timeout_s: float) -> list[Event]:
        """The events since the last call; waits up to `timeout_s` seconds for one.

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
        self._send_again()
        if self.size < self._wanted:
            self._add()
        while True:
            while self.unsaid and not events:  # a warning may raise, and would lose events
                warnings.warn(self.unsaid.pop(0), RuntimeWarning, stacklevel=2)
            wait = max(0.0, min(deadline - time.monotonic(), self._watch.interval_s))
            start = time.perf_counter()
            ready = self._epoll.poll(wait)
            if wait:
                self.waited_s += time.perf_counter() - start
            # Check for empty queues before reading replies: see the module's docstring.
            empty = {number for number in self._audit if self._queues[number].is_empty}
            dead = []
            for fd, _ in ready:
                worker = self._by_fd.get(fd)
                if worker is not None and fd == worker.pidfd:
                    dead.append(worker)
                elif worker is not None:
                    self._drain(worker, events)
            for worker in dead:
                self._bury(worker, events)
            for number in empty & self._audit:
                self._declare_lost(number, events)
            if self._watch.is_due:
                self.unsaid += self._watch.look(self._team.values(), self._board, self._flying)
            if events or time.monotonic() >= deadline:
                return events

    def close(self) -> None:
        """End all workers and free all descriptors. Idempotent; takes about a second at most."""
        if self._closed:
            return
        with contextlib.ExitStack() as stack:  # every step, even if another fails; the last comes first
            self.halt()
            self._closed = True
            _pools.discard(self)
            stack.callback(self._team.clear)
            stack.callback(self._by_fd.clear)
            stack.callback(self._board.close)
            stack.callback(self._close_job)
            stack.callback(self._epoll.close)
            deadline = time.monotonic() + CLOSE_GRACE_S
            for worker in self._team.values():
                stack.callback(worker.end, deadline)
            for queue in self._queues:
                stack.callback(queue.close)
            self._flying.clear()

    def halt(self) -> None:
        """Make workers end at their next sample, and `gather`, in another thread, within a second."""
        self._halted = True
        self._board.wanted_from = 2**63

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self._board.clear(number)
        queue = self._queues[number % len(self._queues)]
        shared = (self._job_fds[0], self._ring.fd, self._board.fd, queue.read_end.fileno())
        # Held: a process that was started must get into the team.
        with held(), standard_streams_taken(), running_on(self._cpus_for(self._wanted)):
            worker = self._team[number] = WorkerProcess(number, shared, self._job_fds[1:])
            for fd in worker.descriptors:
                self._by_fd[fd] = worker
                self._epoll.register(fd, select.EPOLLIN)

    def _add(self) -> None:
        """Start one more; if that fails, the others go on alone."""
        number = next((number for number in self._numbers if number not in self._team), None)
        if number is None:
            return  # until one that was asked to has left
        self._added[number] = ""
        try:
            self._start(number)
        except (WorkerError, OSError) as error:
            self._do_without(number, str(error))

    def _do_without(self, number: int, why: str) -> None:
        """A worker could not be added: no more are."""
        if (worker := self._team.pop(number, None)) is not None:
            self._unregister(worker)
            worker.end(0.0)
        self._board.counters.bury(number, died=False)
        del self._added[number]
        if self._wanted > self.size:
            self.most = max(1, self.size)
            self.resize(self.most)
        if not self._told:
            self.unsaid.append(f"a worker could not be added: {why}. {self.size} go on with the work, and no more come")
        self._told = True

    # -- listening --------------------------------------------------------------------------------------------------

    def _drain(self, worker: WorkerProcess, events: list[Event]) -> None:
        while True:
            try:
                message = self._memory[: worker.replies.recv_into(self._memory)]
            except (BlockingIOError, ConnectionResetError):
                return
            if not message:  # its end is closed; the pidfd tells of the death
                with contextlib.suppress(OSError):
                    self._epoll.unregister(worker.replies.fileno())
                return
            if not worker.ready:
                if message[: len(HELLO)] != HELLO:
                    text = str(message[len(HELLO_FAILED) :], errors="replace")
                    kinds, _, text = text.partition("\n")
                    if worker.number in self._added:
                        self._added[worker.number] = f"it {text.rstrip()}\n"
                        continue
                    raise WorkerError(f"worker {worker.number} {text}", kinds.split())
                worker.ready = True
                self._added.pop(worker.number, None)
                if (found := str(message[len(HELLO) :], errors="replace")) and not self._told_differences:
                    self._told_differences = True
                    self.unsaid.append(
                        f"{found}. Workers import modules anew, so they do not see what was set since: keep such "
                        "values on the dataset, or set them in worker_init_fn"
                    )
                continue
            reply = Reply.unpack(message)
            self._flying.pop((reply.chunk, reply.attempt), None)
            events.append(reply)
            if self._limbo.suspects:
                events += self._limbo.clear(worker.number, (reply.chunk, reply.attempt))

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _bury(self, worker: WorkerProcess, events: list[Event]) -> None:
        self._drain(worker, events)
        note = self._board.read(worker.number)
        cause, outside, stack = worker.wait()
        with held():  # a worker that is forgotten must not stay in the team
            self._unregister(worker)
            del self._team[worker.number]
            self._leaving.discard(worker.number)
            self._watch.forget(worker.number)
            worker.forget()
        if worker.number in self._added:
            self._do_without(worker.number, self._added[worker.number] or f"it was {cause}")
            return
        if not worker.ready and (worker.status or 0) > 0:  # it exited by itself, and would do so again
            raise WorkerError(
                f"worker {worker.number} could not start: {cause}. Its standard error says more; "
                "num_workers=0 does the same work in this process, where it can be debugged"
            )
        request = self._flying.pop((note.chunk, note.attempt), None)
        where = ""
        if request is not None:
            where = at_sample(request, note.row)
            events.append(Lost(note.chunk, note.attempt, note.row, cause, True, outside, stack))
        events += self._limbo.clear(worker.number)
        if note.chunk == LEFT:
            return
        self._board.counters.bury(worker.number)
        number = worker.number % len(self._queues)
        self._audit.add(number)
        self._taken_back += self._queues[number].take_back()
        self.deaths.add(cause + where, stack, f"worker {worker.number} (process {worker.pid})")
        if self.size < self._wanted:
            self._start(worker.number)

    def _queue_of(self, request: Request) -> int:
        return 0 if request.iterable is None else request.iterable.worker % len(self._queues)

    def _declare_lost(self, queue: int, events: list[Event]) -> None:
        """A queue was empty: its chunks neither noted nor done died with a worker, or are about to be noted."""
        team = {number: worker for number, worker in self._team.items() if number % len(self._queues) == queue}
        for worker in team.values():
            self._drain(worker, events)
        noted = {(note.chunk, note.attempt) for note in map(self._board.read, team)}
        noted |= {(request.chunk, request.attempt) for request in self._taken_back}
        sent = [key for key, request in self._flying.items() if self._queue_of(request) == queue]
        for key in [key for key in sent if key not in noted]:
            del self._flying[key]
            # A worker says hello before it takes a chunk: others cannot have this one.
            suspects = {number for number, worker in team.items() if worker.ready}
            events.append(Lost(*key, row=None, cause="its worker died before it began", slot_is_free=False))
            events += self._limbo.add(*key, suspects)
        self._audit.discard(queue)

    # -- ending -----------------------------------------------------------------------------------------------------

    def _unregister(self, worker: WorkerProcess) -> None:
        for fd in worker.descriptors:
            self._by_fd.pop(fd, None)
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

    def _close_job(self) -> None:
        while self._job_fds:
            os.close(self._job_fds.pop())

    def _leave_to_parent(self) -> None:
        """In a forked child: close the copies, so that the workers still die with their parent."""
        self._closed = True
        for queue in self._queues:
            queue.close()
        for worker in self._team.values():
            worker.leave_to_parent()
        self._epoll.close()
        self._close_job()
        self._board.close()


def running_workers() -> tuple[int, int]:
    """How many pools this process has, and how many workers are in them."""
    return len(_pools), sum(len(pool.pids) for pool in _pools)


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
