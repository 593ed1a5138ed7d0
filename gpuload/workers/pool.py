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

Workers are forked from a *template* (`gpuload.workers.template`), a process that is started first and has imported what
the dataset needs; until it is ready, workers are *due*. Where it says that it cannot be forked, or ends by itself
before it is ready, each worker is an interpreter of its own. One that dies later is replaced, which counts as a death;
its workers go on, and those that it was not yet forked for are due again. If it dies before it can tell of a worker
that it has forked, that worker is in no team, but may have taken a chunk: it is waited for until it has ended, and then
its queue is looked through as after a death.

Lifetime: `close` ends all workers, and so does the death of this process. A forked child never ends its parent's
workers: it closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import getLogger
from operator import itemgetter

import numpy as np

from gpuload.errors import WorkerError, visible
from gpuload.ring.ring import Ring, move, running_on, standard_streams_taken
from gpuload.workers.counters import place_of
from gpuload.workers.faults import Deaths
from gpuload.workers.inherited import import_path
from gpuload.workers.job import Job
from gpuload.workers.process import Process, Template, TemplateLost, WorkerProcess, check_platform
from gpuload.workers.protocol import (
    HELLO,
    HELLO_FAILED,
    LEFT,
    MESSAGE_BYTES,
    Board,
    Engine,
    Event,
    Lost,
    Queue,
    Reply,
    Request,
    read_with_file,
)
from gpuload.workers.shipping import Parcel, ship, warning_of_copies
from gpuload.workers.signals import deferred_signals, signals_enabled
from gpuload.workers.start import SLOW_START_S, Start

__all__ = ["RestartingEngine", "WorkerPool", "running_workers"]

CLOSE_GRACE_S = 1.0
SLOW_SAMPLE_S = 60.0  # without a timeout, a warning names a sample that takes longer
WATCH_INTERVAL_S = 1.0
logger = getLogger("gpuload.workers")
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class RestartingEngine(Engine):
    """Base of engines whose workers can die: the count of deaths, and warnings to give.

    Attributes:
        pending_warnings: given by the next `gather`, before it has events that a warning which raises would lose.
    """

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.deaths = Deaths()
        self.pending_warnings: list[str] = []
        self._warned_of: set[str] = set()
        self._closed = False

    def gather(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_usable()
            while self.pending_warnings:
                warnings.warn(self.pending_warnings.pop(0), RuntimeWarning, stacklevel=2)
            try:
                self._step(max(0.0, deadline - time.monotonic()), events)
            except WorkerError as error:
                self.broken = error
                raise
            if events or time.monotonic() >= deadline:
                return events

    def _step(self, wait_s: float, events: list[Event]) -> None:
        """Take in what has happened; wait up to `wait_s` for something, or less."""
        raise NotImplementedError

    def _check_usable(self) -> None:
        if self._closed or self._halted:
            raise RuntimeError("this Loader's workers are closed")
        if self.broken is not None:
            raise WorkerError(f"this epoch is over: {self.broken}")

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned_of:
            self._warned_of.add(about)
            self.pending_warnings.append(text)


class WorkerPool(RestartingEngine):
    """`workers` processes that do chunks of one job.

    Args:
        job: dataset, transforms and options; sent once. A `Parcel` is one from another machine.
        workers: how many processes, at least 1.
        ring: where the slots lie.
        timeout_s: a worker that stays at one sample longer is killed, and its chunk lost; 0: never.
        own_queues: a queue for each worker; `Request.iterable` says which worker is asked.
        first, total: the number of the first of these workers, and how many there are in other pools too.
        most: how many there may be after `resize`; as an attribute fewer, once a worker could not be added.
        cpus_for: the CPUs for this many workers; none: those of this process.

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
        own_queues: bool = False,
        first: int = 0,
        total: int | None = None,
        most: int | None = None,
        cpus_for: Callable[[int], frozenset[int]] = lambda workers: frozenset(),
    ) -> None:
        check_platform()
        super().__init__(ring)
        self._flying: dict[int, Request] = {}  # sent, and neither replied to nor lost
        # Lost chunks, each with the workers that may have it all the same.
        self._written_off: dict[int, tuple[Request, set[WorkerProcess]]] = {}
        self._taken_back: list[Request] = []  # in flight, and on no queue
        self._to_audit: list[Queue] = []  # a worker that was never in the team may have taken a chunk there
        self._team: dict[int, WorkerProcess] = {}
        self._template: Template | None = None  # none: workers have interpreters of their own
        self._due: dict[int, bool] = {}  # workers to be started once the template is ready, and whether these are added
        self.most = most = most or workers
        self._wanted, self._cpus_for = workers, cpus_for
        self._numbers = range(first, first + most)
        self._memory = memoryview(bytearray(MESSAGE_BYTES))
        self._by_fd: dict[int, WorkerProcess | Template] = {}  # of the descriptors that epoll watches
        self._timeout_s = timeout_s
        self._look_every_s = min(WATCH_INTERVAL_S, timeout_s / 4) if timeout_s else WATCH_INTERVAL_S
        self._looked_at = time.monotonic()
        settings = {
            "path": import_path(),
            "argv": [str(word) for word in sys.argv],
            "workers": most,
            "first": first,
            "total": total or most,
            "ring_bytes": ring.ring_bytes,
        }
        with signals_enabled(), standard_streams_taken():  # pickling may take long, and can be interrupted
            self._job_fds = ship(job, settings)
        if copies := warning_of_copies(self._job_fds[0], job, workers):
            self.pending_warnings.append(copies)
        with contextlib.ExitStack() as undo, standard_streams_taken():
            for fd in self._job_fds:
                undo.callback(os.close, fd)
            self._board = Board(most, first=first)
            undo.callback(self._board.close)
            self._epoll = select.epoll()
            undo.callback(self._epoll.close)
            self._queues: list[Queue] = []  # worker w reads number w % len
            undo.callback(self._close_queues)
            for _ in range(workers if own_queues else 1):
                self._queues.append(Queue())
            self._resources = undo.pop_all()
        _pools.add(self)
        try:
            self._start_template()
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
        return all(self._due.values()) and all(worker.ready or worker.added for worker in self._team.values())

    @property
    def _processes(self) -> list[Process]:
        return [*self._team.values(), *filter(None, [self._template])]

    @property
    def _staying(self) -> list[WorkerProcess]:
        return [worker for worker in self._team.values() if not worker.leaving]

    @property
    def size(self) -> int:
        """How many workers there are or are being added, without those that leave."""
        return len(self._staying) + len(self._due)

    @property
    def is_steady(self) -> bool:
        """Whether there are as many workers as were asked for, each ready; without those that leave, idle ones late."""
        return self.size == self._wanted and not self._due and all(worker.ready for worker in self._staying)

    def resize(self, workers: int) -> None:
        """Set the number of workers, from 1 to `most`, on one queue. Never waits: `gather` starts those that are added,
        one at a time. If one cannot start, `gather` warns, and no more are added."""
        before, self._wanted = self._wanted, max(1, min(workers, self.most))
        if (cpus := self._cpus_for(self._wanted)) != self._cpus_for(before):
            move(self.pids, cpus)
        by_number = [worker for _, worker in sorted(self._team.items())]
        staying, leaving = ([worker for worker in by_number if worker.leaving is leaves] for leaves in (False, True))
        for number in sorted(self._due)[max(0, self._wanted - len(staying)) :]:
            del self._due[number]
            self._board.counters.close_worker(number, died=False)
        leaving_now = staying[self._wanted :] or leaving[: max(0, self._wanted - len(staying))]
        for worker in leaving_now:  # where one that is to stay after all has left already, another one is started
            worker.leaving = not worker.leaving
            self._board.ask_to_leave(worker.number, worker.leaving)

    def wanted_cpu_s(self) -> dict[int, float]:
        """The processor time of each worker so far, and the time that it waited for a processor, by process."""
        return {worker.pid: worker.wanted_cpu_s() for worker in self._team.values()}

    def busy_s(self) -> float:
        """How long workers have been at chunks, all together, since the pool was made."""
        return self.counted()[:, place_of["busy_ns"]].sum() / 1e9

    def fileno(self) -> int:
        """A descriptor that can be read when `gather` has something to take in."""
        return self._epoll.fileno()

    def _submit(self, request: Request) -> bool:
        self._check_usable()
        if not self._queue_of(request).send(request):
            return False
        self._flying[request.chunk] = request
        self._send_again()
        return True

    def _send_again(self) -> None:
        while self._taken_back and self._queue_of(self._taken_back[0]).send(self._taken_back[0]):
            self._taken_back.pop(0)

    def cancel_before(self, chunk: int) -> None:
        self._board.cancel_before(chunk)

    def counted(self) -> np.ndarray:
        return self._board.counters.read()  # after `close`, until then

    def recover_slots(self) -> bool:
        """Replace the workers that may still write to slots of lost chunks; False if there are no such slots.

        To be called when nothing is in work, and again until the slots are free: see the module's docstring. Workers
        leave at the end of their queue, those that wait there at once.
        """
        suspects = {worker for _, workers in self._written_off.values() for worker in workers}
        for place, queue in enumerate(self._queues):
            if any(worker.queue is queue for worker in suspects):
                with deferred_signals(), standard_streams_taken():
                    self._queues[place] = Queue()
                    for worker in self._team_of(queue):
                        worker.leaving = True
                    queue.close()
        return bool(suspects)

    def close(self) -> None:
        if self._closed:
            return
        # Every step, even if another fails; the last of the stack comes first.
        with self._resources, contextlib.ExitStack() as stack:
            self.halt()
            self._closed = True
            _pools.discard(self)
            stack.callback(self._team.clear)
            stack.callback(self._by_fd.clear)
            deadline = time.monotonic() + CLOSE_GRACE_S
            if self._template is not None:
                stack.callback(self._template.end, deadline)
                stack.callback(self._template.replies.close)
            for worker in self._team.values():
                stack.callback(worker.end, deadline)
            stack.callback(self._close_queues)
            self._flying.clear()

    def _close_queues(self) -> None:
        """Let idle workers see the end of their queue, and leave."""
        for queue in self._queues:
            queue.close()

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start_template(self) -> None:
        job_fd, *others = self._job_fds
        with deferred_signals(), standard_streams_taken(), running_on(self._cpus_for(self._wanted)):
            self._template = Template((job_fd, self._ring.fd, self._board.fd, *others))
            self._register(self._template)

    def _start(self, number: int, *, added: bool = False) -> None:
        """Start a worker now, or once the template is ready."""
        self._board.clear(number)
        self._due[number] = added
        self._start_due()

    def _start_due(self) -> None:
        job_fd, *others = self._job_fds
        while self._due and (self._template is None or self._template.ready):
            number, added = next(iter(self._due.items()))
            queue = self._queues[number % len(self._queues)]
            shared = (job_fd, self._ring.fd, self._board.fd, queue.read_end.fileno(), *others)
            # Else a ctrl-C may come before a process that was started is in the team.
            with deferred_signals(), standard_streams_taken(), running_on(self._cpus_for(self._wanted)):
                try:
                    worker = WorkerProcess(number, shared, self._template)
                except TemplateLost:  # it is due until there is another
                    self._note_lost_fork(number, queue)
                    return
                except (WorkerError, OSError) as error:
                    self._note_lost_fork(number, queue)
                    del self._due[number]
                    if not added:
                        raise
                    self._do_without(number, str(error))
                    continue
                del self._due[number]
                self._team[number] = worker
                worker.queue, worker.added = queue, added
                self._register(worker)

    def _note_lost_fork(self, number: int, queue: Queue) -> None:
        """A worker may have been forked, and may have taken a chunk, of which nobody was told before it ended."""
        self._board.clear(number)
        self._to_audit.append(queue)

    def _register(self, process: WorkerProcess | Template) -> None:
        for fd in process.descriptors:
            self._by_fd[fd] = process
            self._epoll.register(fd, select.EPOLLIN)

    def _hear(self, template: Template) -> None:
        """Take in what the template says: once, whether it can be forked."""
        if template.was_ready or not template.hear():  # it has ended, of which its pidfd tells
            with contextlib.suppress(OSError):
                self._epoll.unregister(template.replies.fileno())
            return
        if template.ready:
            self._take_start(template.start)
            logger.info("workers are forked from a template (process %d)", template.pid)
        else:
            self._end_template()
            logger.info("each worker is an interpreter of its own, since no template can be forked: %s", template.unfit)
        self._start_due()

    def _replace_template(self, template: Template) -> None:
        """Replace a template that has ended, unless another would end as this one did."""
        ending = template.wait()
        self._end_template()
        if template.was_ready or ending.outside:
            self.deaths.add(ending.cause, ending.stack, f"{template.name} (process {template.pid})")
            self._start_template()
        else:
            self._start_due()

    def _end_template(self) -> None:
        if self._template is not None:
            template, self._template = self._template, None
            self._unregister(template)
            template.replies.close()
            template.end(time.monotonic() + CLOSE_GRACE_S)

    def _add(self) -> None:
        """Start one more; if that fails, the others go on alone."""
        free = (number for number in self._numbers if number not in self._team and number not in self._due)
        if (number := next(free, None)) is not None:  # else once one that was asked to has left
            self._start(number, added=True)

    def _do_without(self, number: int, why: str) -> None:
        """A worker could not be added: no more are."""
        self._board.counters.close_worker(number, died=False)
        if self._wanted > self.size:
            self.most = max(1, self.size)
            self.resize(self.most)
        text = f"a worker could not be added: {why}. {self.size} go on with the work, and no more come"
        self._warn_once("a worker that was added", text)

    # -- listening --------------------------------------------------------------------------------------------------

    def _step(self, wait_s: float, events: list[Event]) -> None:
        self._send_again()
        if self.size < self._wanted:
            self._add()
        start = time.perf_counter()
        ready = self._epoll.poll(min(wait_s, self._look_every_s))
        if wait_s:
            self.waited_s += time.perf_counter() - start
        # Looked up now: below, descriptors are closed, and their numbers given to others.
        ended = [(process, fd == process.pidfd) for fd, _ in ready if (process := self._by_fd.get(fd)) is not None]
        for process, has_ended in sorted(ended, key=itemgetter(1)):
            if not isinstance(process, Template):
                (self._replace if has_ended else self._drain)(process, events)
            elif process is self._template:
                (self._replace_template if has_ended else self._hear)(process)
        while self._to_audit:
            self._audit(self._to_audit.pop(), events)
        if time.monotonic() - self._looked_at > self._look_every_s:
            self._looked_at = time.monotonic()
            self._look()

    def _drain(self, worker: WorkerProcess, events: list[Event]) -> None:
        while True:
            try:
                message, file = read_with_file(worker.replies, self._memory)
            except (BlockingIOError, ConnectionResetError):
                return
            if not message:  # its end is closed; the pidfd tells of the death
                with contextlib.suppress(OSError):
                    self._epoll.unregister(worker.replies.fileno())
                return
            if not worker.ready:
                self._greet(worker, message)
                continue
            reply = Reply.unpack(message, file)
            if self._flying.pop(reply.chunk, None) is not None:
                events.append(reply)
            elif reply.chunk in self._written_off:
                self._written_off[reply.chunk][1].clear()
            if self._written_off:
                self._acquit(worker)

    def _greet(self, worker: WorkerProcess, message: memoryview) -> None:
        """Take in the first message of a worker."""
        if message[: len(HELLO)] != HELLO:
            text = str(message[len(HELLO_FAILED) :], errors="replace")
            kinds, _, text = text.partition("\n")
            if not worker.added:
                raise WorkerError(f"worker {worker.number} {text}", kinds.split())
            worker.refusal = f"it {text.rstrip()}\n"
            return
        worker.ready = True
        packed, differences = marshal.loads(message[len(HELLO) :])  # of this session's own process
        self._take_start(Start.unpack(packed, worker.started_at) if packed else self.start)
        if differences:
            self._warn_once(
                "modules",
                f"{differences}. Workers import modules again, so they do not see what was set since: keep such "
                "values on the dataset, or set them in worker_init_fn",
            )

    def _take_start(self, start: Start) -> None:
        """Take in what the template or a worker took to start, until each worker is ready: the slowest is told."""
        if self.start.seconds:
            return
        if start.before_workers_s > self.start.before_workers_s:
            self.start = start
        if self.ready:
            self.start = replace(self.start, seconds=time.monotonic() - self.begun_at)
            if self.start.seconds > SLOW_START_S:
                summary = f"{self.start.describe()}. {self.start.advise()}".rstrip(". ")
                logger.info("workers were ready after %.1f s: %s", self.start.seconds, summary)

    # -- deaths -----------------------------------------------------------------------------------------------------

    def _replace(self, worker: WorkerProcess, events: list[Event]) -> None:
        """Take in that a worker's process has ended: report its chunk as lost, count the death, and start another
        worker in its place unless fewer are wanted."""
        self._drain(worker, events)
        note, ending = self._board.read(worker.number), worker.wait()
        with deferred_signals():  # a worker whose descriptors are free must not stay in the team
            self._unregister(worker)
            del self._team[worker.number]
            worker.forget()
        if worker.added and not worker.ready:
            self._do_without(worker.number, worker.refusal or f"it was {ending.cause}")
            return
        if not worker.ready and ending.status > 0:  # it exited by itself, and would do so again
            raise WorkerError(
                f"worker {worker.number} could not start: {ending.cause}. Its standard error says more; "
                "num_workers=0 does the same work in this process, where it can be debugged"
            )
        self._acquit(worker)
        if note.chunk != LEFT:
            where = ""
            if (request := self._flying.get(note.chunk)) is not None:
                where = _at_sample(request, note.row)
                events.append(self._lose(Lost(note.chunk, note.row, ending.cause, ending.outside, ending.stack)))
            self._audit(worker.queue, events)
            self._board.counters.close_worker(worker.number)
            self.deaths.add(ending.cause + where, ending.stack, f"worker {worker.number} (process {worker.pid})")
        if self.size < self._wanted:
            self._start(worker.number)

    def _queue_of(self, request: Request) -> Queue:
        return self._queues[0 if request.iterable is None else request.iterable.worker % len(self._queues)]

    def _team_of(self, queue: Queue) -> list[WorkerProcess]:
        return [worker for worker in self._team.values() if worker.queue is queue]

    def _audit(self, queue: Queue, events: list[Event]) -> None:
        """Declare lost what a dead worker of this queue may have taken, and not noted: see the module's docstring."""
        if queue not in self._queues:
            return  # all that was on it was lost before others took its place
        self._taken_back += queue.take_back()
        team = self._team_of(queue)
        for worker in team:
            self._drain(worker, events)
        known = {request.chunk for request in self._taken_back}
        known |= {self._board.read(worker.number).chunk for worker in team}
        # A worker says hello before it takes a chunk: others cannot have one.
        suspects = [worker for worker in team if worker.ready]
        for chunk, request in list(self._flying.items()):
            if self._queue_of(request) is queue and chunk not in known:
                events.append(self._lose(Lost(chunk, None, "its worker died before it began"), suspects))

    def _lose(self, lost: Lost, suspects: Iterable[WorkerProcess] = ()) -> Lost:
        """Give back the slot of a lost chunk; write it off as long as one of these workers may have the chunk."""
        self._written_off[lost.chunk] = self._flying.pop(lost.chunk), set(suspects)
        self._acquit()
        return lost

    def _acquit(self, worker: WorkerProcess | None = None) -> None:
        """Free the slots of lost chunks that nobody can have any more: `worker` has ended, or replied."""
        for chunk, (request, suspects) in list(self._written_off.items()):
            suspects -= {worker}
            if not suspects:
                del self._written_off[chunk]
                self._ring.release_at(request.slot_offset)

    # -- workers that stay at one sample ----------------------------------------------------------------------------

    def _look(self) -> None:
        """Kill workers that stay at one sample for longer than the timeout; without one, warn of slow ones."""
        now_ns = time.monotonic_ns()
        for process in self._processes:
            if not process.ready:
                self._look_at_start(process)
        for worker in self._team.values():
            note = self._board.read(worker.number)
            request, _ = self._written_off.get(note.chunk, (self._flying.get(note.chunk), None))
            if not worker.ready or worker.was_killed or request is None or note.row >= len(request.positions):
                continue  # time counts only while it has a chunk
            seconds = (now_ns - note.since_ns) / 1e9
            if seconds <= (self._timeout_s or SLOW_SAMPLE_S) or worker.warned_at == note:
                continue
            stack = worker.stack()
            if self._board.read(worker.number) != note:
                continue  # it has gone on
            if self._timeout_s:
                worker.kill(f"no progress for timeout={self._timeout_s:g} seconds", stack)
            else:
                worker.warned_at = note
                self.pending_warnings.append(
                    f"worker {worker.number} (process {worker.pid}) has been{_at_sample(request, note.row)} for "
                    f"{seconds:.0f} seconds; timeout=… would end it. Where it is:\n{stack}"
                )

    def _look_at_start(self, process: Process) -> None:
        if time.monotonic() - process.started_at > SLOW_SAMPLE_S and not process.warned_at:
            process.warned_at = True
            self.pending_warnings.append(
                f"{process.name} (process {process.pid}) has not been ready for {SLOW_SAMPLE_S:.0f} seconds: it "
                f"imports and unpacks the dataset. Where it is:\n{process.stack()}"
            )

    # -- ending -----------------------------------------------------------------------------------------------------

    def _unregister(self, process: WorkerProcess | Template) -> None:
        for fd in process.descriptors:
            self._by_fd.pop(fd, None)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def _leave_to_parent(self) -> None:
        """Close the copies in a forked child, so that the workers still die with their parent."""
        self._closed = True
        with self._resources:
            for process in self._processes:
                process.leave_to_parent()


def _at_sample(request: Request, row: int) -> str:
    """Say where a worker is, as a part of a sentence; empty if at no sample."""
    if row >= len(request.positions):
        return ""
    return f" at sample {visible(str(request.indices[row]))} (position {request.positions[row]})"


def running_workers() -> tuple[int, int]:
    """Count the pools of this process, and the workers in them."""
    return len(_pools), sum(len(pool._team) + len(pool._due) for pool in _pools)


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
