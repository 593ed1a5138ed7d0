"""The parent's side of the worker processes: starts, feeds, watches and ends them.

Runs in the main process, in whichever thread iterates the loader; it starts no thread. It owns the processes and the
descriptors between them and the parent. The caller submits chunks, each with a slot of the ring, and gets one event for
each: a `Reply`, whose slot is the caller's again, or `Lost`, whose slot goes back to the ring from here.

All workers take their chunks off one queue. Workers of an iterable dataset have a queue each, since each is asked for
its own samples; one that died is restarted where the request says: if the dataset repeats itself, nothing is lost.

The failure model. A worker notes a chunk on the board once it has taken it off its queue, and notes that it is idle
once it has replied. If it dies with a chunk noted, that chunk is lost, and its slot free: nobody else writes there. But
it can die between taking and noting. So after a death, what is still on its queue is taken back, and the other chunks
that were sent there and are neither noted nor done are lost too. That may be wrong in one case: a living worker has
just taken such a chunk. It will write to the slot (or, if it is to plan a batch, read it), and reply. So the slot is
*written off*, which is kept apart from slots in work, until no worker that was ready at that moment can have the chunk.
A worker cannot have it once it has replied to another chunk (it has one at a time, and the lost one is on no queue),
once it has replied to this one (a second result, which is dropped), or once it has ended. Idle workers say nothing, so
in a small ring all slots may be written off, and none is left for a chunk that would make them speak. Then
`recover_slots` closes their queue: they leave at its end, and others take their places on a new one.

These are all the races there are: a request is on one queue or with one worker, and a worker touches a slot only
between taking its request and replying. So a slot never has two writers, each chunk ends once, and no slot is away for
longer than the workers that were there when it was written off.

What was taken back is sent again behind what has to be done again: where many samples hang, one of them is known to be
bad before each of the others has cost a worker.

The number of workers can change at any time (`resize`): one that is not needed is asked to leave, does so between two
chunks, and notes on the board that it has `LEFT`. Nothing is lost by that, and it does not count as a death.

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from logging import getLogger

import numpy as np

from gpuload.errors import WorkerError, visible
from gpuload.ring.ring import Ring, move, running_on, standard_streams_taken
from gpuload.workers.counters import place_of
from gpuload.workers.job import Job
from gpuload.workers.process import WorkerProcess, check_platform, settings_for
from gpuload.workers.protocol import (
    HELLO,
    HELLO_FAILED,
    LEFT,
    MESSAGE_BYTES,
    Board,
    Event,
    Lost,
    Note,
    Queue,
    Reply,
    Request,
)
from gpuload.workers.shipping import Parcel, ship, warning_of_copies
from gpuload.workers.signals import deferred_signals, signals_enabled

__all__ = ["Deaths", "RestartingEngine", "WorkerPool", "running_workers"]

CLOSE_GRACE_S = 1.0
SLOW_SAMPLE_S = 60.0  # without a timeout, a warning names a sample that takes longer
WATCH_INTERVAL_S = 1.0
logger = getLogger("gpuload.workers")
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class Deaths:
    """The deaths of workers in an epoch; more than `max_restarts` of them are an error.

    Attributes:
        causes: of each, with the sample that its worker was at.
        stack: where the last one was, if that is known.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.causes: list[str] = []
        self.stack = ""

    def add(self, cause: str, stack: str = "", who: str = "") -> None:
        """Count one, and log it; `who` it was, where `cause` does not say so.

        Raises:
            WorkerError: it was one too many.
        """
        self.causes.append(cause)
        self.stack = stack
        if len(self.causes) <= self._max_restarts:
            logger.warning(
                "a worker died: %s; another takes its place (death %d of this epoch, max_restarts=%d)",
                f"{who}: {cause}" if who else cause,
                len(self.causes),
                self._max_restarts,
            )
            return
        counted = Counter(self.causes)
        causes = "; ".join(f"{cause} ({count} times)" if count > 1 else cause for cause, count in counted.items())
        raise WorkerError(
            f"worker processes died {len(self.causes)} times in this epoch, more than "
            f"max_restarts={self._max_restarts} allows: {causes}. Look at these samples with "
            "num_workers=0, and at the machine's memory; Faults(max_restarts=…) allows more"
            + (f"\n\nWhere the last one was:\n{stack}" if stack else "")
        )

    def reset(self) -> None:
        """Begin to count anew."""
        self.causes, self.stack = [], ""


class RestartingEngine:
    """What engines share whose workers can die: whether they can go on, the count of deaths, and warnings to give.

    Attributes:
        broken: why it cannot continue.
        waited_s: how long `gather` has waited for something to be done.
        unsaid: warnings; the next `gather` gives them, before it has events that a warning which raises would lose.
    """

    def __init__(self, ring: Ring, max_restarts: int) -> None:
        self.deaths = Deaths(max_restarts)
        self.broken: WorkerError | None = None
        self.waited_s = 0.0
        self.unsaid: list[str] = []
        self._ring = ring
        self._pid = os.getpid()
        self._halted = self._closed = False

    def reset_restart_count(self) -> None:
        """Forget the deaths so far, for a new epoch."""
        self.deaths.reset()

    def gather(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait up to `timeout_s` seconds for one.

        Raises:
            WorkerError: a worker could not start, or workers died too often.
        """
        events: list[Event] = []
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_usable()
            while self.unsaid:
                warnings.warn(self.unsaid.pop(0), RuntimeWarning, stacklevel=2)
            try:
                self._step(max(0.0, deadline - time.monotonic()), events)
            except WorkerError as error:
                self.broken = error
                raise
            if events or time.monotonic() >= deadline:
                return events

    def halt(self) -> None:
        """Make `gather`, in another thread, end within a second."""
        self._halted = True

    def _step(self, wait_s: float, events: list[Event]) -> None:
        """Take in what has happened; wait up to `wait_s` for something, or less."""
        raise NotImplementedError

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


class WorkerPool(RestartingEngine):
    """`workers` processes that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once. A `Parcel` is one from another machine.
        workers: how many processes, at least 1.
        ring: where the slots lie.
        timeout_s: a worker that stays at one sample longer is killed, and its chunk lost; 0: never.
        max_restarts: after this many deaths between two calls of `reset_restart_count`, the next is an error.
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
        super().__init__(ring, max_restarts)
        self._flying: dict[tuple[int, int], Request] = {}  # sent, and neither replied to nor lost
        # Lost chunks, each with the workers that may have it all the same.
        self._written_off: dict[tuple[int, int], tuple[Request, set[int]]] = {}
        self._taken_back: list[Request] = []  # in flight, and on no queue
        self._warned_of_adding = self._warned_of_modules = False
        self._team: dict[int, WorkerProcess] = {}
        self.most = most = most or workers
        self._wanted, self._cpus_for = workers, cpus_for
        self._numbers = range(first, first + most)
        self._added: dict[int, str] = {}  # after a `resize`, and not ready yet; why it will not be, once that is known
        self._leaving: set[int] = set()  # asked to, and still there
        self._memory = memoryview(bytearray(MESSAGE_BYTES))
        self._by_fd: dict[int, WorkerProcess] = {}  # of the descriptors that epoll watches
        self._watch = Watch(timeout_s)
        with signals_enabled(), standard_streams_taken():  # pickling may take long, and can be interrupted
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
        self._send_again()
        return True

    def _send_again(self) -> None:
        while self._taken_back and self._queues[self._queue_of(self._taken_back[0])].send(self._taken_back[0]):
            self._taken_back.pop(0)

    def cancel_before(self, chunk: int) -> None:
        """Chunks with a smaller number are no longer wanted; workers stop theirs at the next sample."""
        self._board.wanted_from = chunk

    def counted(self) -> np.ndarray:
        """What each worker did, as `gpuload.workers.counters` has it; after `close`, until then."""
        return self._board.counters.read()

    def recover_slots(self) -> bool:
        """Replace the workers that may still write to slots of lost chunks; False if there are no such slots.

        To be called when nothing is in work, and again until the slots are free: see the module's docstring. Workers
        leave at the end of their queue, those that wait there at once.
        """
        suspects = {number for _, numbers in self._written_off.values() for number in numbers}
        for index in {number % len(self._queues) for number in suspects - self._leaving}:
            with deferred_signals(), standard_streams_taken():
                queue, self._queues[index] = self._queues[index], Queue()
                self._taken_back += queue.take_back()
                queue.close()
            self._leaving |= {number for number in self._team if number % len(self._queues) == index}
        return bool(suspects)

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
        super().halt()
        self._board.wanted_from = 2**63

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self._board.clear(number)
        queue = self._queues[number % len(self._queues)]
        shared = (self._job_fds[0], self._ring.fd, self._board.fd, queue.read_end.fileno())
        # Else a ctrl-C may come before a process that was started is in the team.
        with deferred_signals(), standard_streams_taken(), running_on(self._cpus_for(self._wanted)):
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
        if not self._warned_of_adding:
            self._warned_of_adding = True
            self.unsaid.append(f"a worker could not be added: {why}. {self.size} go on with the work, and no more come")

    # -- listening --------------------------------------------------------------------------------------------------

    def _step(self, wait_s: float, events: list[Event]) -> None:
        self._send_again()
        if self.size < self._wanted:
            self._add()
        start = time.perf_counter()
        ready = self._epoll.poll(min(wait_s, self._watch.interval_s))
        if wait_s:
            self.waited_s += time.perf_counter() - start
        dead = []
        for fd, _ in ready:
            worker = self._by_fd.get(fd)
            if worker is not None and fd == worker.pidfd:
                dead.append(worker)
            elif worker is not None:
                self._drain(worker, events)
        for worker in dead:
            self._replace(worker, events)
        if self._watch.is_due:
            requests = self._flying | {key: request for key, (request, _) in self._written_off.items()}
            self.unsaid += self._watch.look(self._team.values(), self._board, requests)

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
                self._greet(worker, message)
                continue
            reply = Reply.unpack(message)
            key = reply.chunk, reply.attempt
            if self._flying.pop(key, None) is not None:
                events.append(reply)
            elif key in self._written_off:
                self._written_off[key][1].clear()
            if self._written_off:
                self._acquit(worker.number)

    def _greet(self, worker: WorkerProcess, message: memoryview) -> None:
        """Take in the first message of a worker."""
        if message[: len(HELLO)] != HELLO:
            text = str(message[len(HELLO_FAILED) :], errors="replace")
            kinds, _, text = text.partition("\n")
            if worker.number not in self._added:
                raise WorkerError(f"worker {worker.number} {text}", kinds.split())
            self._added[worker.number] = f"it {text.rstrip()}\n"
            return
        worker.ready = True
        self._added.pop(worker.number, None)
        differences = str(message[len(HELLO) :], errors="replace")
        if differences and not self._warned_of_modules:
            self._warned_of_modules = True
            self.unsaid.append(
                f"{differences}. Workers import modules anew, so they do not see what was set since: keep such "
                "values on the dataset, or set them in worker_init_fn"
            )

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _replace(self, worker: WorkerProcess, events: list[Event]) -> None:
        """A worker's process has ended: its chunk is lost, and another one takes its place."""
        self._drain(worker, events)
        note = self._board.read(worker.number)
        cause, outside, stack = worker.wait()
        with deferred_signals():  # a worker whose descriptors are free must not stay in the team
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
        self._acquit(worker.number)
        if note.chunk != LEFT:
            where, key = "", (note.chunk, note.attempt)
            if (request := self._flying.get(key)) is not None:
                where = at_sample(request, note.row)
                events.append(self._lose(Lost(*key, note.row, cause, outside, stack)))
            self._audit(worker.number % len(self._queues), events)
            self._board.counters.bury(worker.number)
            self.deaths.add(cause + where, stack, f"worker {worker.number} (process {worker.pid})")
        if self.size < self._wanted:
            self._start(worker.number)

    def _queue_of(self, request: Request) -> int:
        return 0 if request.iterable is None else request.iterable.worker % len(self._queues)

    def _audit(self, queue: int, events: list[Event]) -> None:
        """Declare lost what a dead worker of this queue may have taken, and not noted: see the module's docstring."""
        self._taken_back += self._queues[queue].take_back()
        team = {number: worker for number, worker in self._team.items() if number % len(self._queues) == queue}
        for worker in team.values():
            self._drain(worker, events)
        known = {(note.chunk, note.attempt) for note in map(self._board.read, team)}
        known |= {(request.chunk, request.attempt) for request in self._taken_back}
        # A worker says hello before it takes a chunk: others cannot have one.
        suspects = [number for number, worker in team.items() if worker.ready]
        for key, request in list(self._flying.items()):
            if self._queue_of(request) == queue and key not in known:
                events.append(self._lose(Lost(*key, None, "its worker died before it began"), suspects))

    def _lose(self, lost: Lost, suspects: Iterable[int] = ()) -> Lost:
        """Give back the slot of a lost chunk; write it off as long as one of these workers may have the chunk."""
        key = lost.chunk, lost.attempt
        self._written_off[key] = self._flying.pop(key), set(suspects)
        self._acquit()
        return lost

    def _acquit(self, worker: int = -1) -> None:
        """Free the slots of lost chunks that nobody can have any more: `worker` has ended, or replied."""
        for key, (request, suspects) in list(self._written_off.items()):
            suspects.discard(worker)
            if not suspects:
                del self._written_off[key]
                self._ring.release_at(request.slot_offset)

    # -- ending -----------------------------------------------------------------------------------------------------

    def _unregister(self, worker: WorkerProcess) -> None:
        for fd in worker.descriptors:
            self._by_fd.pop(fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

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


class Watch:
    """Looks now and then at workers that stay at one sample: kills them after a timeout, warns of them without one.

    Args:
        timeout_s: a worker that stays at one sample longer is killed; 0: never.

    Attributes:
        interval_s: between two looks.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.interval_s = min(WATCH_INTERVAL_S, timeout_s / 4) if timeout_s else WATCH_INTERVAL_S
        self._looked_at = time.monotonic()
        self._warned: dict[int, Note | None] = {}  # what a worker was at when the last warning named it

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._looked_at > self.interval_s

    def forget(self, worker: int) -> None:
        """Its process is gone; the next one with its number is another."""
        self._warned.pop(worker, None)

    def look(
        self, team: Iterable[WorkerProcess], board: Board, requests: Mapping[tuple[int, int], Request]
    ) -> list[str]:
        """Kill workers that are over the timeout. Return the warnings to give: of slow ones, if there is none."""
        self._looked_at = time.monotonic()
        now, texts = time.monotonic_ns(), []
        for worker in team:
            if worker.killed_for:
                continue
            if not worker.ready:
                texts += self._slow_start(worker)
                continue
            note = board.read(worker.number)
            request = requests.get((note.chunk, note.attempt))
            if request is None or note.row >= len(request.positions):
                continue  # time counts only while it has a chunk
            seconds = (now - note.since_ns) / 1e9
            if seconds <= (self._timeout_s or SLOW_SAMPLE_S):
                continue
            if not self._timeout_s and self._warned.get(worker.number) == note:
                continue
            stack = worker.stack()
            if board.read(worker.number) != note:
                continue  # it has gone on
            if self._timeout_s:
                worker.kill(f"no progress for timeout={self._timeout_s:g} seconds", stack)
            else:
                self._warned[worker.number] = note
                texts.append(
                    f"worker {worker.number} (process {worker.pid}) has been{at_sample(request, note.row)} for "
                    f"{seconds:.0f} seconds; timeout=… would end it. Where it is:\n{stack}"
                )
        return texts

    def _slow_start(self, worker: WorkerProcess) -> list[str]:
        if time.monotonic() - worker.started_at <= SLOW_SAMPLE_S or worker.number in self._warned:
            return []
        self._warned[worker.number] = None
        return [
            f"worker {worker.number} (process {worker.pid}) has not been ready for {SLOW_SAMPLE_S:.0f} seconds: it "
            f"imports and unpacks the dataset. Where it is:\n{worker.stack()}"
        ]


def at_sample(request: Request, row: int) -> str:
    """Say where a worker is, as a part of a sentence; empty if at no sample."""
    if row >= len(request.positions):
        return ""
    return f" at sample {visible(str(request.indices[row]))} (position {request.positions[row]})"


def running_workers() -> tuple[int, int]:
    """Count the pools of this process, and the workers in them."""
    return len(_pools), sum(len(pool.pids) for pool in _pools)


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
