"""The workers' counters of seconds, samples and bytes. They are in shared memory, so they outlive the worker.

Memory layout: each worker has a row of 256 bytes, native int64, in the order of `FIELDS`. The rows follow the notes on
the *board* (`gpuload.workers.protocol`). Each worker writes only its own row, always in full: when a chunk ends, and
during a chunk after a step that took long. The parent writes to the row only while no process has the worker's number.
A replacement continues from the numbers of its predecessor. With ``num_workers=0``, the row is ordinary memory of the
main process.

A worker is starting, busy or idle. Its row says which of these three times is running, and since when; a reader adds
the time that has passed since then. Numbers only grow. In a row that is read while it is written, a few numbers are one
chunk newer than the others.
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

__all__ = ["FIELDS", "FLUSH_BYTES", "FLUSH_NS", "ROW_BYTES", "CounterTable", "Counters", "place_of"]

ROW_BYTES: Final = 256
# Within a chunk, counters are flushed after reading one sample for FLUSH_NS or decoding FLUSH_BYTES, so that a snapshot
# shows the progress of a slow chunk.
FLUSH_NS: Final = 20_000_000
FLUSH_BYTES: Final = 4_000_000
_clock = time.perf_counter_ns  # on Linux CLOCK_MONOTONIC, which all processes share


class Counters:
    """A worker's counters, in its own process. Code adds to the attributes directly; `begin`, `end` and `flush` write
    them to the row.

    Args:
        memory: the memory that holds the row; default: ordinary memory, in the main process.
        offset: the offset of the row in `memory`.

    Attributes:
        running: the index in `FIELDS` of the time that is running; 0 means none.
        since: when that time began to run, in monotonic nanoseconds.
        start_ns: the time from the start of the process until it can take a chunk.
        queued_ns: the time that the worker was busy and runnable while other processes had the CPUs.
        decoded: the number of images per decoder; decoders count here (`gpuload.decode.decoder.COUNT_KEYS`).
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
        self._cpu_at = None if memory is None else time.process_time_ns()  # the main process does not count CPU time
        self._memory = bytearray(ROW_BYTES) if memory is None else memory
        self._queue_fd, self._queued_at = -1, 0
        numbers = _ROW.unpack_from(self._memory, offset)
        vars(self).update(zip(_NAMES, numbers, strict=False))
        self.decoded = dict(zip(COUNT_KEYS, numbers[-len(COUNT_KEYS) :], strict=True))
        if memory is None:
            self.running, self.since = IDLE, _clock()

    @property
    def table(self) -> CounterTable:
        """The row as a table, for readers."""
        return CounterTable(self._memory, self._offset, 1)

    def count_queue(self) -> None:
        """Start to count `queued_ns` for the calling process; it stays 0 if the kernel does not report it."""
        with contextlib.suppress(OSError):
            self._queue_fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._queued_at = self._queued()

    def _queued(self) -> int:
        return int(os.pread(self._queue_fd, 64, 0).split()[1]) if self._queue_fd >= 0 else 0  # 2 µs

    def begin(self) -> None:
        """Record that the worker is busy from now on."""
        self.switch(BUSY)
        self._queued_at = self._queued()  # the wait for a CPU before this was idle time

    def end(self) -> None:
        """Record that the worker is idle from now on."""
        self.flush(IDLE)

    def leave(self) -> None:
        """Record that the worker is exiting: from now on it is neither busy nor idle."""
        self.switch(0)

    def flush(self, running: int | None = None) -> None:
        """Write all numbers to the row, and start the time with index `running`; by default the same time continues."""
        if self._cpu_at is not None:
            last, self._cpu_at = self._cpu_at, time.process_time_ns()
            self.cpu_ns += self._cpu_at - last
        last, self._queued_at = self._queued_at, self._queued()
        self.queued_ns += self._queued_at - last
        self.switch(self.running if running is None else running)

    def switch(self, running: int) -> None:
        """Stop the running time, start the time with index `running`, and write all numbers to the row."""
        now, name = _clock(), FIELDS[self.running]
        if self.running:
            setattr(self, name, getattr(self, name) + now - self.since)
        self.running, self.since = running, now
        _ROW.pack_into(self._memory, self._offset, *_numbers_of(self), *self.decoded.values())


_NAMES: Final = tuple(Counters.__annotations__)
_numbers_of = attrgetter(*_NAMES)
FIELDS: Final = (*_NAMES, *COUNT_KEYS)
place_of: Final = {name: index for index, name in enumerate(FIELDS)}
BUSY, IDLE, START = place_of["busy_ns"], place_of["idle_ns"], place_of["start_ns"]
_ROW: Final = struct.Struct(f"{len(FIELDS)}q")
assert _ROW.size <= ROW_BYTES


class CounterTable:
    """The rows of all workers, for readers.

    Args:
        memory: the memory that holds the rows.
        offset: the offset of the first row.
        workers: the number of workers.
        first: the number of the first worker.
    """

    def __init__(self, memory: mmap.mmap | bytearray, offset: int, workers: int, first: int = 0) -> None:
        self._memory: mmap.mmap | bytearray | None = memory
        self._offset, self._workers, self._first = offset, workers, first
        self._last = np.zeros((0, len(FIELDS)), np.int64)

    def of(self, worker: int) -> Counters:
        """Return a worker's row for writing: in the worker itself, or while no process has its number."""
        assert self._memory is not None
        return Counters(self._memory, self._offset + ROW_BYTES * (worker - self._first))

    def read(self) -> np.ndarray:
        """Return all numbers up to now, int64 (workers, `FIELDS`); after `close`, the final numbers."""
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
        """Start counting a worker's `start_ns`, just before its process is started."""
        self.of(worker).switch(START)

    def close_worker(self, worker: int, *, died: bool = True) -> None:
        """Stop a worker's running time, once no process has this number any more. If it `died`, count a restart."""
        counters = self.of(worker)
        counters.restarts += died
        counters.switch(0)

    def close(self) -> None:
        """Read the final numbers, and release the memory."""
        self._last, self._memory = self.read(), None
