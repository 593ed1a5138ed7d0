"""The messages between the parent and its workers, and what an engine is to the feed. It imports no torch.

Two kinds of channel, both inherited descriptors without a name:

- the *queue*: one SOCK_SEQPACKET pair; the parent sends `Request` messages, and all workers read the same end, so that
  an idle worker takes the next chunk and nothing waits for a slow file;
- for each worker a *reply* pair, SOCK_SEQPACKET, that only this worker writes to.

And for each worker a *lifeline*, a pipe that nobody writes to: when the parent's end of it closes, the kernel kills the
worker.

On one shared page, the *board*, the parent says which chunks are still wanted, and each worker notes what it is at, so
that the parent knows when the worker dies:

    offset 0             uint64   chunks with a smaller number are no longer wanted
    offset 64·(w + 1)    int64×3  the w-th worker: chunk, row, monotonic nanoseconds of the row's start
                  + 24   int64    1: the parent asks it to leave before it takes another chunk
    behind these         what workers count, see `gpuload.workers.counters`

Messages are small: positions, dataset indices, offsets. Pixels and array payloads lie in the chunk's slot or, if it is
too small for them, in a file in memory that only this chunk has: its descriptor comes with the reply.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import mmap
import os
import pickle
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.datasets.memory import memory_file
from gpuload.errors import LINES, DecodeError, ErrorRecord, WorkerError, kinds_of, one_line, visible
from gpuload.order.place import IterableStart
from gpuload.ring.columns import Columns
from gpuload.ring.ring import Ring, map_file, standard_streams_taken
from gpuload.workers.counters import ROW_BYTES, CounterTable
from gpuload.workers.inherited import pickled_by_value
from gpuload.workers.start import Start

if TYPE_CHECKING:  # not imported: it is of no use in a worker
    from gpuload.workers.faults import Deaths

__all__ = [
    "FORKED",
    "HELLO",
    "HELLO_FAILED",
    "IDLE",
    "LEFT",
    "MAX_CAUSE",
    "MESSAGE_BYTES",
    "STACK_SIGNAL",
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
    "next_request",
    "read_message",
    "read_with_file",
    "record_of",
    "send_reply",
    "socket_pair",
    "text_of",
    "traceback_of",
]

IDLE = -1
LEFT = -2  # the worker was asked to leave, and has: it took nothing that it did not do
MESSAGE_BYTES = 1 << 18  # more than any message has
STACK_SIGNAL = getattr(signal, "SIGRTMAX", 1) - 1  # asks a worker for its stack; user code may need the usual signals
# The first message of a worker: it is ready; then, marshalled, what its `start.Stopwatch` packed (b"" if it was forked)
# and where its modules differ (`inherited.differences`).
HELLO = b"hello"
HELLO_FAILED = b"failed"  # it could not start; then the exception's kinds, what it could not do, the traceback
TEMPLATE_READY = b"ready"  # the first message of a template: workers can be forked from it; then as in a HELLO
TEMPLATE_UNFIT = b"unfit"  # they cannot; then why
FORKED = b"\0"  # begins a template's answer that a worker was forked, which comes with its pidfd; else an error's text
_REPLY = struct.Struct("<qqqqq")
_NOTE = struct.Struct("<qqq")
_DESCRIPTOR = struct.Struct("i")
_LIMIT = struct.Struct("<Q")
_LEAVE = struct.Struct("<q")
MAX_REQUEST_BYTES = 160 * 1024  # a message must fit the socket's buffer
MAX_INLINE_BYTES = 48 * 1024  # of a reply, likewise; larger metadata goes into the slot
# How many characters of an error's text are kept: there may be thousands of records.
MAX_CAUSE: Final = 1000
MAX_TRACEBACK: Final = 8000


def arm_lifeline(fd: int, pid: int) -> None:
    """Make the kernel kill a process when the other end of its lifeline closes, even one that is stopped or hangs."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new SOCK_SEQPACKET pair, blocking, whatever ``socket.setdefaulttimeout()`` says."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:  # a timeout makes the descriptor itself non-blocking, in the worker too
        end.setblocking(True)
    return ends


def read_message(end: socket.socket, memory: memoryview, flags: int = 0) -> bytes:
    """Return the next message, empty if the other end is closed; `memory` of `MESSAGE_BYTES` is reused. (`recv`
    allocates a new buffer of that size for each message and frees it, which takes ten times as long as the message.)"""
    return memory[: end.recv_into(memory, 0, flags)].tobytes()


def read_with_file(end: socket.socket, memory: memoryview) -> tuple[memoryview, FileIO | None]:
    """Return the next message, in `memory`, and the file that came with it, which the caller closes. None also if this
    process has too many files open to get another."""
    space = socket.CMSG_LEN(_DESCRIPTOR.size)
    nbytes, ancillary, _, _ = end.recvmsg_into([memory], space, socket.MSG_CMSG_CLOEXEC)
    for _, _, data in ancillary:
        if len(data) == _DESCRIPTOR.size:
            return memory[:nbytes], FileIO(_DESCRIPTOR.unpack(data)[0], "r+")
    return memory[:nbytes], None


def next_request(end: socket.socket, memory: memoryview) -> Request | None:
    """The request that some worker takes next; it stays where it is. None if none is waiting."""
    try:
        message = read_message(end, memory, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    return Request.unpack(message) if message else None


@dataclass(slots=True)
class Request:
    """A chunk to do: its samples, and the slot that they go to. No two requests have the same `chunk`: one that is
    done again gets another number.

    `positions` and `indices` are int64 arrays of one length; `indices` may be a list of any keys instead. `whole` says
    that the chunk is the whole batch. For an iterable dataset `indices` count the samples of the worker's own pass,
    and `iterable` says which pass. `epoch_sent` goes to the dataset's own ``set_epoch()``; -1: no call. `changes`: see
    `gpuload.workers.inherited`. With `plans` it asks for the plan of a batch instead (see `gpuload.workers.planned`).
    `spare_bytes` is how much memory of its own a chunk may take that does not fit its slot.
    """

    chunk: int
    epoch: int
    slot_offset: int
    slot_bytes: int
    positions: np.ndarray
    indices: np.ndarray | list[object]
    whole: bool = False
    iterable: IterableStart | None = None
    epoch_sent: int = -1
    plans: bool = False
    changes: bytes = b""
    spare_bytes: int = 0

    def pack(self) -> bytes:
        # Bytes: NumPy's pickles of two short arrays would take longer than everything else.
        indices = self.indices
        is_array = isinstance(indices, np.ndarray)
        numbers = self.chunk, self.epoch, self.slot_offset, self.slot_bytes
        samples = self.positions.tobytes(), is_array, indices.tobytes() if is_array else _pickled_keys(indices)
        others = self.whole, self.iterable, self.epoch_sent, self.plans, self.changes, self.spare_bytes
        message = pickle.dumps((numbers, samples, others), 5)
        if len(message) > MAX_REQUEST_BYTES:
            what = "the dataset's state_dict()" if self.iterable is not None else "its keys"
            raise ValueError(
                f"the request for a chunk of {len(self.positions)} samples has {len(message):,} bytes, more than "
                f"{MAX_REQUEST_BYTES:,}: {what} are too large to be sent to a worker with each chunk"
            )
        return message

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        # The parent wrote this: keys from the user's sampler, never the contents of a file.
        (chunk, epoch, offset, nbytes), (positions, is_array, keys), others = pickle.loads(message)
        indices = np.frombuffer(keys, np.int64) if is_array else pickle.loads(keys)
        return cls(chunk, epoch, offset, nbytes, np.frombuffer(positions, np.int64), indices, *others)


def _pickled_keys(keys: list[object]) -> bytes:
    try:
        packed = pickle.dumps(keys, 5)
        if b"__mp_main__" not in packed:  # the script, in a process that `multiprocessing` spawned
            return packed
    except (pickle.PicklingError, AttributeError, TypeError):  # of a class in __main__
        pass
    import cloudpickle

    with pickled_by_value():
        return cloudpickle.dumps(keys, 5)


class Status(enum.IntEnum):
    """How a chunk ended."""

    DONE = 0
    TOO_LARGE = 1  # `nbytes` are needed, more than it may have; it has to be done again
    UNWANTED = 2  # its epoch was abandoned


_STATUSES = tuple(Status)  # by number: to call the enumeration takes longer than all else of a reply


@dataclass(slots=True)
class Reply:
    """The end of one chunk.

    `nbytes` is the size of the chunk in its slot (for TOO_LARGE: the size needed). `meta` is the packed description of
    its samples (see `ring/packing.py`); if too long for a message, it is in the slot: `meta_at`, offset and length.
    `plain` says that nothing in it is unusual (`Columns.is_plain`), so that it need not be read yet. An engine
    without processes may give the `content` itself.

    A chunk that did not fit its slot has all of this in memory of its own: a `file`, on its way, and `data`, once it is
    mapped. The file has no name, so the memory goes with whoever has it open or mapped.
    """

    chunk: int
    status: Status
    nbytes: int
    meta: bytes
    meta_at: tuple[int, int] | None = None
    content: Columns | None = None
    plain: bool = False
    file: FileIO | None = None
    data: np.ndarray | None = None

    def pack(self) -> bytes:
        offset, length = self.meta_at or (-1, 0)
        ended = self.plain << 7 | (self.file is not None) << 6 | self.status
        return _REPLY.pack(self.chunk, ended, self.nbytes, offset, length) + self.meta

    @classmethod
    def unpack(cls, message: bytes | memoryview, file: FileIO | None = None) -> Reply:
        chunk, ended, nbytes, offset, length = _REPLY.unpack_from(message)
        meta, meta_at = bytes(message[_REPLY.size :]), None if offset < 0 else (offset, length)
        reply = cls(chunk, _STATUSES[ended & 63], nbytes, meta, meta_at, plain=bool(ended & 128))
        if ended & 64:
            reply.map(file)
        return reply

    def map(self, file: FileIO | None) -> None:
        """Map the file with the chunk's bytes, and close it. The chunk counts as too large where that fails: too many
        files are open here, so that it did not come, or there is no room for the mapping."""
        self.file = None
        if file is not None:
            with file, standard_streams_taken(), contextlib.suppress(OSError):
                self.data = map_file(file.fileno(), max(1, self.nbytes))[: self.nbytes]
        if self.data is None:
            self.status, self.meta, self.meta_at, self.plain = Status.TOO_LARGE, b"", None, False


def send_reply(end: socket.socket, reply: Reply) -> None:
    """Send a worker's reply, with the file that it has."""
    if reply.file is None:
        end.send(reply.pack())
        return
    with reply.file:
        try:
            socket.send_fds(end, [reply.pack()], [reply.file.fileno()])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # so many descriptors are on their way between processes
                raise
            end.send(Reply(reply.chunk, Status.TOO_LARGE, reply.nbytes, b"").pack())


@dataclass(slots=True, frozen=True)
class Lost:
    """The end of a chunk whose worker died, at `row`, or before it noted a row (None).

    `cause` says why, `outside` whether by SIGKILL (memory ran out, or somebody killed it), `stack` where it crashed.
    """

    chunk: int
    row: int | None
    cause: str
    outside: bool = False
    stack: str = ""


Event = Reply | Lost


class Engine:
    """Does chunks: processes, actors of a cluster, or the main process itself. Each chunk that was submitted ends by
    one event. The slot of one that is `Lost` goes back to the ring by itself, once no worker can write there any more.

    Attributes:
        broken: why it cannot continue.
        waited_s: how long `gather` has waited for something to be done.
        deaths: of workers in this epoch; the feed begins to count again with each.
        begun_at: when ``iter()`` was called, monotonic seconds, for `start`: the start of processes of this machine.
    """

    deaths: Deaths

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.broken: WorkerError | None = None
        self.waited_s = 0.0
        self.begun_at = time.monotonic()
        self.start = Start()
        self._wanted_from = 0
        self._halted = False

    @property
    def ready(self) -> bool:
        """Whether each worker has started."""
        return True

    def submit(self, request: Request) -> bool:
        """Take a chunk and its slot; False if there is enough to do: then, or after an error, the slot is free. Never
        blocks."""
        submitted = False
        try:
            submitted = self._submit(request)
        finally:
            if not submitted:
                self._ring.release_at(request.slot_offset)
        return submitted

    def _submit(self, request: Request) -> bool:
        raise NotImplementedError

    def cancel_before(self, chunk: int) -> None:
        """Chunks with a smaller number are no longer wanted; one that is in work ends at its next sample."""
        self._wanted_from = chunk

    def gather(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait up to `timeout_s` seconds for one.

        Raises:
            WorkerError: a worker could not start, or workers died too often.
        """
        raise NotImplementedError

    def recover_slots(self) -> bool:
        """Make the slots of lost chunks free; False if all are. Called when nothing is in work, until it is False."""
        return False

    def counted(self) -> np.ndarray:
        """Return what each worker did so far, as `gpuload.workers.counters` has it."""
        raise NotImplementedError

    def halt(self) -> None:
        """Make `gather`, in another thread, end soon."""
        self._halted = True
        self.cancel_before(2**63)

    def close(self) -> None:
        """End all workers and free what they need. Idempotent."""


class Queue:
    """Where requests wait: this process sends, and one worker, or all, read the same end."""

    def __init__(self) -> None:
        self.send_end, self.read_end = socket_pair()

    def send(self, request: Request) -> bool:
        """False if it is full. Never blocks."""
        try:
            self.send_end.send(request.pack(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def take_back(self) -> list[Request]:
        """Return the requests that no worker has taken yet."""
        requests = []
        with contextlib.suppress(BlockingIOError):
            while True:
                requests.append(Request.unpack(self.read_end.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)))
        return requests

    def close(self) -> None:
        self.read_end.close()
        self.send_end.close()  # idle workers see the end of the queue


@dataclass(slots=True, frozen=True)
class Note:
    """The row of a chunk that a worker is at, and since when; `chunk` is `IDLE` between chunks, `LEFT` at the end."""

    chunk: int
    row: int
    since_ns: int


class Board:
    """The shared page of notes of the workers from number `first` on, with their `counters`. The parent makes it; each
    worker writes only its own lines, in which the parent writes while no process has them, and asks it to leave."""

    def __init__(self, workers: int, fd: int | None = None, first: int = 0) -> None:
        notes = 64 * (workers + 1)
        self.nbytes = notes + ROW_BYTES * workers
        self._first = first
        if fd is None:
            fd = memory_file("board", self.nbytes)
        self.fd = fd
        self._map = mmap.mmap(fd, self.nbytes)
        self.counters = CounterTable(self._map, notes, workers, first)

    def cancel_before(self, chunk: int) -> None:
        """Say that chunks with a smaller number are no longer wanted."""
        _LIMIT.pack_into(self._map, 0, chunk)

    def write(self, worker: int, chunk: int, row: int = 0) -> None:
        _NOTE.pack_into(self._map, self._line(worker), chunk, row, time.monotonic_ns())

    def noting(self, worker: int, chunk: int) -> Callable[[int], None]:
        """A function that writes the row of a chunk that a worker is at: called for each sample."""
        pack, memory, at, clock = _NOTE.pack_into, self._map, self._line(worker), time.monotonic_ns
        return lambda row: pack(memory, at, chunk, row, clock())

    def wanting(self, chunk: int) -> Callable[[], bool]:
        """A function that says whether a chunk is still wanted: called for each sample."""
        unpack, memory = _LIMIT.unpack_from, self._map
        return lambda: unpack(memory, 0)[0] <= chunk

    def read(self, worker: int) -> Note:
        return Note(*_NOTE.unpack_from(self._map, self._line(worker)))

    def clear(self, worker: int) -> None:
        """Make room for another process with this number, which is about to be started."""
        self.counters.starting(worker)
        self.write(worker, IDLE)
        self.ask_to_leave(worker, False)

    def ask_to_leave(self, worker: int, leave: bool = True) -> None:
        """Ask a worker to leave once it has done its chunk; or take that back, perhaps too late."""
        _LEAVE.pack_into(self._map, self._line(worker) + _NOTE.size, leave)

    def may_stay(self, worker: int) -> bool:
        """Whether a worker was not asked to leave."""
        return not _LEAVE.unpack_from(self._map, self._line(worker) + _NOTE.size)[0]

    def _line(self, worker: int) -> int:
        return 64 * (worker - self._first + 1)

    def close(self) -> None:
        if self.fd >= 0:
            self.counters.close()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def record_of(
    epoch: int, position: Any, index: Any, source: str | None, error: BaseException, place: str = ""
) -> ErrorRecord:
    """Return the record of the sample at a position, whose images came from `source`; `place` is where in the sample
    the image is that failed."""
    if source is None and isinstance(error, OSError | DecodeError) and isinstance(error.filename, str):
        source = error.filename
    return ErrorRecord(
        epoch=epoch,
        position=int(position),
        index=int(index) if isinstance(index, np.integer) else index,
        source=source,
        cause=one_line(f"{type(error).__name__}: {text_of(error)}", MAX_CAUSE)
        + (f" (in {place})" if place not in ("", "sample") else ""),
        traceback=traceback_of(error),
        kinds=kinds_of(error),
    )


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, with the exceptions behind it, which a terminal may be given."""
    return visible("".join(traceback.format_exception(error)), LINES)[-MAX_TRACEBACK:]


def text_of(error: BaseException) -> str:
    """Return what an exception says; it may be of a class of the user's own, which cannot."""
    try:
        return str(error)
    except Exception as worse:
        return f"(its text is not available: {type(worse).__name__})"
