"""The workers' counters of times, samples and bytes. They are in shared memory, so they outlive the workers.

Memory layout: each worker has a row of 256 bytes, native int64, in the order of `FIELDS`. The rows follow the notes on
the *board* (`gpuload.workers.protocol`). Each worker writes only its own row, always in full: when a chunk ends, and
during a chunk after a step that took long. The parent writes to the row only while no process has the worker's number.
A replacement continues from its predecessor's counters. With ``num_workers=0``, the row is in ordinary memory of the
main process.

A worker is starting, busy or idle. Its row says which of these three timers is running, and since when; a reader adds
the time that has passed since then. Counters only grow. If a row is read while it is being written, some of its
counters can be one chunk newer than the others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from operator import attrgetter
from typing import Final

import numpy as np

from gpuload.decode.decoder import COUNT_KEYS

__all__ = ["FIELDS", "FLUSH_BYTES", "FLUSH_NS", "ROW_BYTES", "CounterTable", "WorkerCounters", "field_indices"]

ROW_BYTES: Final = 256
# Within a chunk, counters are flushed when reading a sample took FLUSH_NS, and after every FLUSH_BYTES of decoded
# pixels, so that a snapshot shows the progress of a slow chunk.
FLUSH_NS: Final = 20_000_000
FLUSH_BYTES: Final = 4_000_000
_clock = time.perf_counter_ns  # on Linux CLOCK_MONOTONIC, which all processes share


class WorkerCounters:
    """A worker's counters, in its own process. Code adds to the attributes directly; `begin`, `end` and `flush` write
    them to the row.

    Args:
        memory: the memory that holds the row; None means new ordinary memory, for counters of the main process.
        offset: the offset of the row in `memory`.

    Attributes:
        running: the index in `FIELDS` of the timer that is running; 0 means none.
        since: when that timer was started, in monotonic nanoseconds.
        start_ns: the time from the start of the process until it can take a chunk.
        queued_ns: the time that the worker was busy and runnable, but waited while other processes had the CPUs.
        decoded: the number of decoded images per decoder, which the decoders increase
            (`gpuload.decode.decoder.COUNT_KEYS`).
    """

    running: int
    since: int
    busy_ns: int
    idle_ns: int
    start_ns: int
    cpu_ns: int
    queued_ns: int
    read_ns: int
    header_ns: int
    decode_ns: int
    pack_ns: int
    collate_ns: int
    plan_ns: int
    chunks: int
    samples: int
    collated: int
    plans: int
    bytes_read: int
    bytes_decoded: int
    restarts: int

    def __init__(self, memory: mmap.mmap | bytearray | None = None, offset: int = 0) -> None:
        self._offset = offset
        self._cpu_before_ns = None if memory is None else time.process_time_ns()  # not counted in the main process
        self._memory = bytearray(ROW_BYTES) if memory is None else memory
        self._queue_fd, self._queued_before_ns = -1, 0
        values = _ROW.unpack_from(self._memory, offset)
        vars(self).update(zip(_NAMES, values, strict=False))
        self.decoded = dict(zip(COUNT_KEYS, values[-len(COUNT_KEYS) :], strict=True))
        if memory is None:
            self.running, self.since = IDLE, _clock()

    @property
    def table(self) -> CounterTable:
        """The row as a table with a single row, for readers."""
        return CounterTable(self._memory, self._offset, 1)

    def start_queue_time(self) -> None:
        """Start counting `queued_ns` for the calling process. It stays 0 if the kernel does not report this time."""
        with contextlib.suppress(OSError):
            self._queue_fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._queued_before_ns = self._read_queued_ns()

    def _read_queued_ns(self) -> int:
        return int(os.pread(self._queue_fd, 64, 0).split()[1]) if self._queue_fd >= 0 else 0  # 2 µs

    def begin(self) -> None:
        """Record that the worker is busy from now on."""
        self.switch(BUSY)
        self._queued_before_ns = self._read_queued_ns()  # earlier waits for a CPU were idle time, so they do not count

    def end(self) -> None:
        """Record that the worker is idle from now on."""
        self.flush(IDLE)

    def stop(self) -> None:
        """Record that the worker is exiting: from now on, no timer is running."""
        self.switch(0)

    def flush(self, running: int | None = None) -> None:
        """Write all counters to the row, and start the timer with index `running`. By default, the current timer
        continues."""
        if self._cpu_before_ns is not None:
            last_ns, self._cpu_before_ns = self._cpu_before_ns, time.process_time_ns()
            self.cpu_ns += self._cpu_before_ns - last_ns
        last_ns, self._queued_before_ns = self._queued_before_ns, self._read_queued_ns()
        self.queued_ns += self._queued_before_ns - last_ns
        self.switch(self.running if running is None else running)

    def switch(self, running: int) -> None:
        """Stop the running timer, start the timer with index `running`, and write all counters to the row."""
        now, name = _clock(), FIELDS[self.running]
        if self.running:
            setattr(self, name, getattr(self, name) + now - self.since)
        self.running, self.since = running, now
        _ROW.pack_into(self._memory, self._offset, *_read_values(self), *self.decoded.values())


_NAMES: Final = tuple(WorkerCounters.__annotations__)
_read_values = attrgetter(*_NAMES)
FIELDS: Final = (*_NAMES, *COUNT_KEYS)
field_indices: Final = {name: index for index, name in enumerate(FIELDS)}
BUSY, IDLE, START = field_indices["busy_ns"], field_indices["idle_ns"], field_indices["start_ns"]
_ROW: Final = struct.Struct(f"{len(FIELDS)}q")
assert _ROW.size <= ROW_BYTES


class CounterTable:
    """The rows of all workers, for readers.

    Args:
        memory: the memory that holds the rows.
        offset: the offset of the first row.
        workers: the number of workers.
        first: the number of the first worker. Workers are numbered consecutively.
    """

    def __init__(self, memory: mmap.mmap | bytearray, offset: int, workers: int, first: int = 0) -> None:
        self._memory: mmap.mmap | bytearray | None = memory
        self._offset, self._workers, self._first = offset, workers, first
        self._last = np.zeros((0, len(FIELDS)), np.int64)

    def open_row(self, worker: int) -> WorkerCounters:
        """Return a worker's row for writing. Call this in the worker itself, or while no process has its number."""
        assert self._memory is not None
        return WorkerCounters(self._memory, self._offset + ROW_BYTES * (worker - self._first))

    def read(self) -> np.ndarray:
        """Return all counters up to now, int64 (workers, `FIELDS`); after `close`, the final counters."""
        if self._memory is None:
            return self._last
        snapshot = bytes(self._memory[self._offset : self._offset + ROW_BYTES * self._workers])
        rows = np.frombuffer(snapshot, np.int64).reshape(self._workers, -1)[:, : len(FIELDS)].copy()
        timed = np.flatnonzero(rows[:, 0])
        running, since = rows[timed, :2].T
        rows[timed, running] += np.maximum(_clock() - since, 0)
        rows[:, :2] = 0
        return rows

    def mark_starting(self, worker: int) -> None:
        """Start a worker's `start_ns` timer. Call this just before its process is started."""
        self.open_row(worker).switch(START)

    def close_worker(self, worker: int, *, died: bool = True) -> None:
        """Stop a worker's running timer. Call this once no process has the worker's number. If the worker `died`, count
        a restart."""
        counters = self.open_row(worker)
        counters.restarts += died
        counters.switch(0)

    def close(self) -> None:
        """Read the final counters, and release the memory."""
        self._last, self._memory = self.read(), None
