"""The messages between the parent and its workers, and the interface of an engine. This module imports no torch.

There are two kinds of channel, both anonymous SOCK_SEQPACKET socket pairs whose descriptors workers inherit:

- The *queue* carries `Request` messages from the parent. All workers read from the same end, so an idle worker takes
  the next chunk, and no chunk waits behind a slow file.
- A *reply* pair for each worker carries the worker's messages to the parent.

Each worker also has a *lifeline*, a pipe that is never written to: when the parent's end closes, the kernel kills the
worker.

The *board* is a block of shared memory. In it, the parent records which chunks are still wanted, and each worker
records its current row, so that if the worker dies, the parent knows which sample it was processing:

    offset 0             uint64   chunks with a smaller number are no longer wanted
    offset 64·(w + 1)    int64×3  note of the w-th worker: chunk, row, start time of the row in monotonic nanoseconds
                  + 24   int64    1 means that the parent asks the worker to leave before it takes another chunk
    after the notes               the workers' counters (`gpuload.workers.counters`)

Messages are small: positions, dataset indices, offsets. Pixels and the contents of arrays are in the chunk's slot. If
the slot is too small, they are in an anonymous file for this chunk only, whose descriptor is sent with the reply.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import marshal
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.datasets.memory import memory_file
from gpuload.errors import (
    UNESCAPED_WHITESPACE,
    DecodeError,
    ErrorRecord,
    WorkerError,
    error_class_names,
    one_line,
    visible,
)
from gpuload.order.place import IterableStart
from gpuload.ring.ring import Ring, map_file, reserve_standard_streams
from gpuload.workers.counters import ROW_BYTES, CounterTable
from gpuload.workers.inherited import pickle_by_value
from gpuload.workers.start import Start

if TYPE_CHECKING:  # workers do not need this module
    from gpuload.workers.faults import Deaths

__all__ = [
    "FORKED",
    "HELLO",
    "HELLO_FAILED",
    "IDLE",
    "LEFT",
    "MAX_CAUSE",
    "MESSAGE_BYTES",
    "REPLAYING",
    "SERVER_IMPORTS",
    "SERVER_LEAVES_OUT",
    "SERVER_READY",
    "STACK_SIGNAL",
    "TEMPLATE_MISFIT",
    "TEMPLATE_READY",
    "TEMPLATE_UNFIT",
    "Board",
    "Engine",
    "Event",
    "Lost",
    "Note",
    "Queue",
    "Reply",
    "Request",
    "Status",
    "arm_lifeline",
    "error_text",
    "error_traceback",
    "peek_request",
    "read_message",
    "read_with_file",
    "receive_request",
    "record_of",
    "send_reply",
    "send_request",
    "socket_pair",
]

IDLE = -1
REPLAYING = -1  # the row while an iterable dataset yields again the samples before its chunk
LEFT = -2  # the worker left because it was asked to, after it had finished every chunk that it had taken
MESSAGE_BYTES = 1 << 18  # larger than any message
STACK_SIGNAL = getattr(signal, "SIGRTMAX", 1) - 1  # asks a worker for its stack; user code may use the common signals
# The prefixes of each process's first message. HELLO means that a worker is ready. A marshalled pair follows: the
# packed `start.Stopwatch` (b"" if the worker was forked), and a text on modules that differ (`describe_differences`).
HELLO = b"hello"
HELLO_FAILED = b"failed"  # a worker could not start; followed by the exception's kinds, the failed step, the traceback
TEMPLATE_READY = b"ready"  # workers can be forked from the template; followed by its packed `Stopwatch`
TEMPLATE_UNFIT = b"unfit"  # no worker can be forked from the template; followed by the reason
TEMPLATE_MISFIT = b"misfit"  # the template cannot be forked from the fork server; followed by the reason
# What the fork server says: it imports a module, whose name follows; it will end because of this module, and the reason
# follows; it has imported everything that a request asked for.
SERVER_IMPORTS = b"imports"
SERVER_LEAVES_OUT = b"leaves out"
SERVER_READY = b"ready"
# A forked process sends its process ID after this prefix, with its pidfd; another answer is the text of an error.
FORKED = b"\0"
_REPLY = struct.Struct("<qqqqq")
_NOTE = struct.Struct("<qqq")
_DESCRIPTOR = struct.Struct("i")
_LIMIT = struct.Struct("<Q")
_LEAVE = struct.Struct("<q")
MAX_DESCRIPTORS = 253  # the kernel's limit for a message (SCM_MAX_FD)
SEND_S: Final = 60.0  # how long a fork request may wait for a full queue; on a busy machine, a template takes seconds
MAX_REQUEST_BYTES = 160 * 1024  # a message must fit into the socket's buffer
MAX_INLINE_BYTES = 48 * 1024  # of metadata in a reply, for the same reason; larger metadata goes into the slot
# The maximum lengths of an error's text and traceback in a record, in characters: there may be thousands of records.
MAX_CAUSE: Final = 1000
MAX_TRACEBACK: Final = 8000


def arm_lifeline(fd: int, pid: int) -> None:
    """Make the kernel kill a process when the other end of its lifeline closes, even if it is stopped or hangs."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def send_request(end: socket.socket, details: Any, descriptors: Sequence[int]) -> None:
    """Send a request to fork a process: its details, which can be marshalled, and its descriptors. A message can carry
    a limited number of descriptors, so further messages carry the rest.

    The kernel queues only a few messages: on a busy machine, interrupted sessions can leave requests that the other
    process has not received yet. Sending then waits until the process receives one or ends.

    Raises:
        OSError: the request could not be sent, or the queue was full for `SEND_S`.
        BrokenPipeError: it was sent only in part, or the other end is closed.
    """
    groups = [descriptors[start : start + MAX_DESCRIPTORS] for start in range(0, len(descriptors), MAX_DESCRIPTORS)]
    _send_message(end, marshal.dumps((details, len(descriptors))), groups[0] if groups else [])
    try:
        for group in groups[1:]:
            _send_message(end, b"+", group)
    except OSError as error:
        raise BrokenPipeError from error


def _send_message(end: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    writable = select.poll()
    writable.register(end, select.POLLOUT)
    deadline = time.monotonic() + SEND_S
    while True:
        try:
            socket.send_fds(end, [message], descriptors)
            return
        except BlockingIOError:
            if not writable.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise


def receive_request(end: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the details and descriptors of the next request; None if the other end is closed.

    There are too few descriptors if this process has too many open files.
    """
    message, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return None
    details, count = marshal.loads(message)  # sent by the parent
    for _ in range((count - 1) // MAX_DESCRIPTORS):
        _, further, _, _ = socket.recv_fds(end, MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        descriptors += further
    return details, descriptors


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new SOCK_SEQPACKET pair. They block even if ``socket.setdefaulttimeout()`` was called."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:  # a default timeout makes the descriptor itself non-blocking, also in the worker
        end.setblocking(True)
    return ends


def read_message(end: socket.socket, memory: memoryview, flags: int = 0) -> bytes:
    """Return the next message; empty if the other end is closed. `memory` is a buffer of `MESSAGE_BYTES` that the
    caller reuses, since `recv` would allocate a buffer of this size for each message, which takes ten times as long as
    reading it."""
    return memory[: end.recv_into(memory, 0, flags)].tobytes()


def read_with_file(end: socket.socket, memory: memoryview) -> tuple[memoryview, FileIO | None]:
    """Return the next message, which is a view of `memory`, and the file that was sent with it, which the caller
    closes. The file is None if none was sent, or if this process has too many open files to receive it."""
    space = socket.CMSG_LEN(_DESCRIPTOR.size)
    nbytes, ancillary, _, _ = end.recvmsg_into([memory], space, socket.MSG_CMSG_CLOEXEC)
    for _, _, data in ancillary:
        if len(data) == _DESCRIPTOR.size:
            fd = _DESCRIPTOR.unpack(data)[0]
            if fd <= 2:  # the program was started without this standard stream
                low_fd, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
                os.close(low_fd)
            return memory[:nbytes], FileIO(fd, "r+")
    return memory[:nbytes], None


def peek_request(end: socket.socket, memory: memoryview) -> Request | None:
    """Return the next request without removing it from the queue; None if the queue is empty or closed."""
    try:
        message = read_message(end, memory, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    return Request.unpack(message) if message else None


@dataclass(slots=True)
class Request:
    """A request to load a chunk: its samples, and the slot for their pixels. No two requests have the same chunk number
    `chunk`: a chunk that is repeated gets a new number.

    `positions` and `indices` are int64 arrays of the same length; `indices` may also be a list of arbitrary keys.
    `epoch`, `step` and `size_hw` are those of the batch (`BatchSpec`), on which arguments of transforms can depend.
    `is_complete_batch` means that the chunk is a complete batch. For an iterable dataset, `indices` are the sample
    numbers in the worker's pass, and `iterable` identifies the pass. `epoch_sent` is passed to the dataset's
    ``set_epoch()``; -1 means no call. `changes` is how many bytes of changes to the dataset the worker has to read
    and apply, since the job was sent (`gpuload.workers.dataset_changes`).
    `is_planning` means that the request is for the plan of a batch instead of a chunk (`gpuload.workers.planned`).
    `spare_bytes` is the maximum size of the separate memory for a chunk that does not fit in its slot.
    """

    chunk: int
    epoch: int
    slot_offset: int
    slot_bytes: int
    positions: np.ndarray
    indices: np.ndarray | list[object]
    step: int = 0
    size_hw: tuple[int, int] | None = None
    is_complete_batch: bool = False
    iterable: IterableStart | None = None
    epoch_sent: int = -1
    is_planning: bool = False
    changes: int = 0
    spare_bytes: int = 0

    def pack(self) -> bytes:
        # Send arrays as bytes: pickling two short NumPy arrays would take longer than the rest of this function.
        indices = self.indices
        is_array = isinstance(indices, np.ndarray)
        numbers = self.chunk, self.epoch, self.slot_offset, self.slot_bytes
        samples = self.positions.tobytes(), is_array, indices.tobytes() if is_array else _pickle_keys(indices)
        options = (
            self.step,
            self.size_hw,
            self.is_complete_batch,
            self.iterable,
            self.epoch_sent,
            self.is_planning,
            self.changes,
            self.spare_bytes,
        )
        message = pickle.dumps((numbers, samples, options), 5)
        if len(message) > MAX_REQUEST_BYTES:
            subject = "the dataset's state_dict()" if self.iterable is not None else "the sampler's keys"
            raise ValueError(
                f"the request for a chunk of {len(self.positions)} samples has {len(message):,} bytes, but at most "
                f"{MAX_REQUEST_BYTES:,} can be sent to a worker; reduce the size of {subject}, or use num_workers=0"
            )
        return message

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        # The parent wrote this: keys from the user's sampler, never the contents of a file.
        (chunk, epoch, offset, nbytes), (positions, is_array, keys), options = pickle.loads(message)
        indices = np.frombuffer(keys, np.int64) if is_array else pickle.loads(keys)
        return cls(chunk, epoch, offset, nbytes, np.frombuffer(positions, np.int64), indices, *options)


def _pickle_keys(keys: list[object]) -> bytes:
    try:
        packed = pickle.dumps(keys, 5)
        if b"__mp_main__" not in packed:  # the name of the script in a process that `multiprocessing` spawned
            return packed
    except (pickle.PicklingError, AttributeError, TypeError):  # the keys' class is defined in __main__
        pass
    import cloudpickle

    with pickle_by_value():
        return cloudpickle.dumps(keys, 5)


class Status(enum.IntEnum):
    """The outcome of a chunk."""

    DONE = 0
    TOO_LARGE = 1  # the chunk needs `nbytes` bytes, more than it may use, and has to be repeated
    UNWANTED = 2  # the chunk's epoch was abandoned


_STATUSES = tuple(Status)  # indexed by value, since calling the enum takes longer than unpacking a reply's other fields


@dataclass(slots=True)
class Reply:
    """The outcome of one chunk.

    `nbytes` is the size of the chunk in its slot or, for TOO_LARGE, the size that the chunk needs. `meta` is the packed
    description of the chunk's samples (`gpuload.ring.packing`). If the description is too long for a message, it is in
    the slot, and `meta_at` is its offset and length. `plain` means that the description contains nothing unusual
    (`Columns.is_plain`), so it need not be read yet.

    If the chunk did not fit in its slot, the pixels and the description are in a separate `file`; `data` is its
    mapping. The file is anonymous, so its memory is freed once no process has it open or mapped.
    """

    chunk: int
    status: Status
    nbytes: int
    meta: bytes
    meta_at: tuple[int, int] | None = None
    plain: bool = False
    file: FileIO | None = None
    data: np.ndarray | None = None

    def pack(self) -> bytes:
        offset, length = self.meta_at or (-1, 0)
        flags = self.plain << 7 | (self.file is not None) << 6 | self.status
        return _REPLY.pack(self.chunk, flags, self.nbytes, offset, length) + self.meta

    @classmethod
    def unpack(cls, message: bytes | memoryview, file: FileIO | None = None) -> Reply:
        chunk, flags, nbytes, offset, length = _REPLY.unpack_from(message)
        meta, meta_at = bytes(message[_REPLY.size :]), None if offset < 0 else (offset, length)
        reply = cls(chunk, _STATUSES[flags & 63], nbytes, meta, meta_at, plain=bool(flags & 128))
        if flags & 64:
            reply.map(file)
        return reply

    def map(self, file: FileIO | None) -> None:
        """Map the file that holds the chunk's bytes, and close it. If the file was not received, because this process
        has too many open files, or cannot be mapped, the reply becomes TOO_LARGE."""
        self.file = None
        if file is not None:
            with file, reserve_standard_streams(), contextlib.suppress(OSError):
                self.data = map_file(file.fileno(), max(1, self.nbytes))[: self.nbytes]
        if self.data is None:
            self.status, self.meta, self.meta_at, self.plain = Status.TOO_LARGE, b"", None, False


def send_reply(end: socket.socket, reply: Reply) -> None:
    """Send a worker's reply, with its file if it has one."""
    if reply.file is None:
        end.send(reply.pack())
        return
    with reply.file:
        try:
            socket.send_fds(end, [reply.pack()], [reply.file.fileno()])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many descriptors were sent but not received yet
                raise
            end.send(Reply(reply.chunk, Status.TOO_LARGE, reply.nbytes, b"").pack())


@dataclass(slots=True, frozen=True)
class Lost:
    """The outcome of a chunk whose worker died at `row`; None means that the worker died before it recorded a row, or
    while an iterable dataset yielded earlier samples again: the death is then no fault of the chunk's samples.

    `cause` describes the cause of death, and `stack` is the worker's stack when it crashed. `killed_externally` means
    that the cause was outside the worker, such as SIGKILL (memory ran out, or somebody killed the worker).
    """

    chunk: int
    row: int | None
    cause: str
    killed_externally: bool = False
    stack: str = ""


Event = Reply | Lost


class Engine:
    """Base class of engines, which load chunks in processes, in actors of a cluster, or in the main process. Each
    submitted chunk ends with exactly one event. The engine itself returns the slot of a `Lost` chunk to the ring, once
    no worker can write to the slot any longer.

    Attributes:
        failure: the error that stopped the engine; None if it can continue.
        waited_s: the total time that `collect_events` has waited for workers.
        deaths: the deaths of workers in this epoch; the feed sets a new object at the start of each epoch.
        changes_bytes: the size of all changes to the dataset since the job was sent.
        started_at: when ``iter()`` was called, in monotonic seconds; the total time in `start` counts from here.
        start: the durations of the slowest process's start on this machine.
    """

    deaths: Deaths

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.failure: WorkerError | None = None
        self.waited_s = 0.0
        self.changes_bytes = 0
        self.started_at = time.monotonic()
        self.start = Start()
        self._wanted_from = 0
        self._halted = False

    @property
    def ready(self) -> bool:
        """Whether all workers have started."""
        return True

    def submit(self, request: Request) -> bool:
        """Accept a chunk and its slot; return False if the engine is busy. In that case, or if an error is raised, the
        slot is freed. This never blocks."""
        submitted = False
        try:
            submitted = self._submit(request)
        finally:
            if not submitted:
                self._ring.release_at(request.slot_offset)
        return submitted

    def _submit(self, request: Request) -> bool:
        raise NotImplementedError

    def add_changes(self, packed: bytes) -> None:
        """Store changes to the dataset, which workers apply before the next chunk that is submitted."""
        raise NotImplementedError

    def exchange(self, job: object) -> list[Event]:
        """Replace all workers by new ones, which get a new job. Return the events of the chunks in progress, which are
        lost, but not because of a death.

        Raises:
            TypeError: the job cannot be sent, and the workers stay.
        """
        raise NotImplementedError

    def cancel_before(self, chunk: int) -> None:
        """Cancel chunks with a smaller number; a chunk in progress ends at its next sample."""
        self._wanted_from = chunk

    def collect_events(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait up to `timeout_s` seconds for one.

        Raises:
            WorkerError: a worker could not start, or workers died too often.
        """
        raise NotImplementedError

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when `collect_events` has something to return; None if there is none."""
        return None

    def recover_slots(self) -> bool:
        """Start freeing the slots of lost chunks; return False if all slots are free. Call this while no chunk is in
        progress, until it returns False."""
        return False

    def read_counters(self) -> np.ndarray:
        """Return each worker's counters so far, int64 (workers, `gpuload.workers.counters.FIELDS`)."""
        raise NotImplementedError

    def halt(self) -> None:
        """Make a `collect_events` call that is running in another thread end soon."""
        self._halted = True
        self.cancel_before(2**63)

    def close(self) -> None:
        """End all workers and free their resources. Idempotent."""


class Queue:
    """A queue of requests, which the parent sends. One worker, or all workers, read from the same end."""

    def __init__(self) -> None:
        self.send_end, self.read_end = socket_pair()

    def send(self, request: Request) -> bool:
        """Send a request; return False if the queue is full. This never blocks."""
        try:
            self.send_end.send(request.pack(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def withdraw(self) -> list[Request]:
        """Remove and return the requests that no worker has taken yet."""
        requests = []
        with contextlib.suppress(BlockingIOError):
            while True:
                requests.append(Request.unpack(self.read_end.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)))
        return requests

    def close(self) -> None:
        self.read_end.close()
        self.send_end.close()  # idle workers reach the end of the queue, and exit


@dataclass(slots=True, frozen=True)
class Note:
    """A worker's current chunk and row, and when the worker began the row. `chunk` is `IDLE` between chunks, and `LEFT`
    once the worker has left. `row` is `REPLAYING` while an iterable dataset yields earlier samples again."""

    chunk: int
    row: int
    since_ns: int


class Board:
    """The shared memory with the notes and `counters` of the workers, which are numbered from `first`. The parent
    creates it. Each worker writes only its own note and counters. The parent writes these only while no process has the
    worker's number; in addition, it asks workers to leave."""

    def __init__(self, workers: int, fd: int | None = None, first: int = 0) -> None:
        notes_bytes = 64 * (workers + 1)
        self.nbytes = notes_bytes + ROW_BYTES * workers
        self._first = first
        if fd is None:
            fd = memory_file("board", self.nbytes)
        self.fd = fd
        self._map = mmap.mmap(fd, self.nbytes)
        self.counters = CounterTable(self._map, notes_bytes, workers, first)

    def cancel_before(self, chunk: int) -> None:
        """Cancel chunks with a smaller number."""
        _LIMIT.pack_into(self._map, 0, chunk)

    def write(self, worker: int, chunk: int, row: int = 0) -> None:
        _NOTE.pack_into(self._map, self._note_offset(worker), chunk, row, time.monotonic_ns())

    def make_row_writer(self, worker: int, chunk: int) -> Callable[[int], None]:
        """Return a function that writes the worker's current row of a chunk. It is called for each sample, so it is
        fast."""
        pack, memory, offset, clock = _NOTE.pack_into, self._map, self._note_offset(worker), time.monotonic_ns
        return lambda row: pack(memory, offset, chunk, row, clock())

    def make_wanted_check(self, chunk: int) -> Callable[[], bool]:
        """Return a function that returns whether a chunk is still wanted. It is called for each sample, so it is
        fast."""
        unpack, memory = _LIMIT.unpack_from, self._map
        return lambda: unpack(memory, 0)[0] <= chunk

    def read(self, worker: int) -> Note:
        return Note(*_NOTE.unpack_from(self._map, self._note_offset(worker)))

    def clear(self, worker: int) -> None:
        """Reset a worker's note and timer for the process that is about to be started with this number."""
        self.counters.mark_starting(worker)
        self.write(worker, IDLE)
        self.ask_to_leave(worker, False)

    def ask_to_leave(self, worker: int, leave: bool = True) -> None:
        """Ask a worker to leave after its current chunk or, with `leave=False`, to stay, unless it has already left."""
        _LEAVE.pack_into(self._map, self._note_offset(worker) + _NOTE.size, leave)

    def may_stay(self, worker: int) -> bool:
        """Return whether the worker was not asked to leave."""
        return not _LEAVE.unpack_from(self._map, self._note_offset(worker) + _NOTE.size)[0]

    def _note_offset(self, worker: int) -> int:
        return 64 * (worker - self._first + 1)

    def close(self) -> None:
        if self.fd >= 0:
            self.counters.close()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def record_of(
    epoch: int, position: Any, index: Any, source: str | None, error: BaseException, location: str = ""
) -> ErrorRecord:
    """Return the record of a sample that failed. `source` is the file of its images, and `location` is the location of
    the failed image in the sample."""
    if source is None and isinstance(error, OSError | DecodeError) and isinstance(error.filename, str):
        source = error.filename
    return ErrorRecord(
        epoch=epoch,
        position=int(position),
        index=int(index) if isinstance(index, np.integer) else index,
        source=source,
        cause=one_line(f"{type(error).__name__}: {error_text(error)}", MAX_CAUSE)
        + (f" (in {location})" if location not in ("", "sample") else ""),
        traceback=error_traceback(error),
        kinds=error_class_names(error),
    )


def error_traceback(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, safe to print on a terminal."""
    return visible("".join(traceback.format_exception(error)), UNESCAPED_WHITESPACE)[-MAX_TRACEBACK:]


def error_text(error: BaseException) -> str:
    """Return the text of an exception, or a replacement if the ``__str__`` of a user's class fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text is not available: {type(failure).__name__})"
