"""What workers count: seconds, samples, bytes. It lies in shared memory, and so outlives the worker that counted.

Memory layout: a row of 256 bytes for each worker, native int64, in the order of `FIELDS`; behind the notes on the
*board* (`gpuload.workers.protocol`). Each worker writes only its own row, whole, when a chunk ends or something took
long; the parent writes to it only after the worker's death. A new worker continues its predecessor's numbers. With
``num_workers=0`` the row is ordinary memory of the main process.

A worker starts, is busy or is idle: a row says which of these times it is counting, and since when, and a reader adds
what has passed since. Numbers only grow. A reader may find a row half written: then a few of its numbers are a chunk
younger than the others.
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

from gpuload.decode.decoder import COUNTED

__all__ = ["FIELDS", "FLUSH_BYTES", "FLUSH_NS", "ROW_BYTES", "CounterTable", "Counters", "place_of"]

ROW_BYTES: Final = 256
# What takes long is written down before its chunk ends, so that a snapshot shows it: a sample that is read for so long,
# and so many bytes that were decoded.
FLUSH_NS: Final = 20_000_000
FLUSH_BYTES: Final = 4_000_000
_clock = time.perf_counter_ns  # on Linux that of all processes: CLOCK_MONOTONIC


class Counters:
    """Numbers of a worker, in its process. Attributes are added to as they are; `begin`, `end` and `flush` write them
    down.

    Args:
        memory: where the row is; default: ordinary memory, in the main process.
        at: its offset.

    Attributes:
        running: the place in `FIELDS` of the time that is being counted; 0: none is. since: from when on, monotonic ns.
        start_ns: the time from the start of the process until it can take a chunk.
        queued_ns: the time that a busy worker was runnable while others had the CPUs.
        decoded: images by decoder; a decoder counts here (`gpuload.decode.decoder.COUNTED`).
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

    def __init__(self, memory: mmap.mmap | bytearray | None = None, at: int = 0) -> None:
        self._at = at
        self._cpu_at = None if memory is None else time.process_time_ns()  # the main process counts its own
        self._memory = bytearray(ROW_BYTES) if memory is None else memory
        self._queue_fd, self._queued_at = -1, 0
        numbers = _ROW.unpack_from(self._memory, at)
        vars(self).update(zip(_NAMES, numbers, strict=False))
        self.decoded = dict(zip(COUNTED, numbers[-len(COUNTED) :], strict=True))
        if memory is None:
            self.running, self.since = IDLE, _clock()

    @property
    def table(self) -> CounterTable:
        """The row, for whoever reads it."""
        return CounterTable(self._memory, self._at, 1)

    def count_queue(self) -> None:
        """Count in `queued_ns` too, of the process that calls this; it stays 0 where the kernel does not tell."""
        with contextlib.suppress(OSError):
            self._queue_fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._queued_at = self._queued()

    def _queued(self) -> int:
        return int(os.pread(self._queue_fd, 64, 0).split()[1]) if self._queue_fd >= 0 else 0  # 2 µs

    def begin(self) -> None:
        """Note that there is something to do from now on."""
        self.go_on(BUSY)
        self._queued_at = self._queued()  # what it waited to wake up was idle time

    def end(self) -> None:
        """Note that there is nothing to do from now on."""
        self.flush(IDLE)

    def leave(self) -> None:
        """Note that the worker ends: from now on it is neither busy nor idle."""
        self.go_on(0)

    def flush(self, running: int | None = None) -> None:
        """Write all numbers down; by default there is more to do."""
        if self._cpu_at is not None:
            before, self._cpu_at = self._cpu_at, time.process_time_ns()
            self.cpu_ns += self._cpu_at - before
        before, self._queued_at = self._queued_at, self._queued()
        self.queued_ns += self._queued_at - before
        self.go_on(self.running if running is None else running)

    def go_on(self, running: int) -> None:
        """Count the time until now, go on with another one, and write all numbers down."""
        now, name = _clock(), FIELDS[self.running]
        if self.running:
            setattr(self, name, getattr(self, name) + now - self.since)
        self.running, self.since = running, now
        _ROW.pack_into(self._memory, self._at, *_numbers_of(self), *self.decoded.values())


_NAMES: Final = tuple(Counters.__annotations__)
_numbers_of = attrgetter(*_NAMES)
FIELDS: Final = (*_NAMES, *COUNTED)
place_of: Final = {name: place for place, name in enumerate(FIELDS)}
BUSY, IDLE, START = place_of["busy_ns"], place_of["idle_ns"], place_of["start_ns"]
_ROW: Final = struct.Struct(f"{len(FIELDS)}q")
assert _ROW.size <= ROW_BYTES


class CounterTable:
    """The rows of all workers, for whoever reads them.

    Args:
        memory: where the rows are.
        at: the offset of the first.
        workers: how many there are.
        first: the number of the first worker.
    """

    def __init__(self, memory: mmap.mmap | bytearray, at: int, workers: int, first: int = 0) -> None:
        self._memory: mmap.mmap | bytearray | None = memory
        self._at, self._workers, self._first = at, workers, first
        self._last = np.zeros((0, len(FIELDS)), np.int64)

    def of(self, worker: int) -> Counters:
        """Return a worker's own row: in its process, or while it has none."""
        assert self._memory is not None
        return Counters(self._memory, self._at + ROW_BYTES * (worker - self._first))

    def read(self) -> np.ndarray:
        """Return all numbers up to now, int64 (workers, `FIELDS`); once the table is closed, up to then."""
        if self._memory is None:
            return self._last
        whole = bytes(self._memory[self._at : self._at + ROW_BYTES * self._workers])
        rows = np.frombuffer(whole, np.int64).reshape(self._workers, -1)[:, : len(FIELDS)].copy()
        at_something = np.flatnonzero(rows[:, 0])
        running, since = rows[at_something, :2].T
        rows[at_something, running] += np.maximum(_clock() - since, 0)
        rows[:, :2] = 0
        return rows

    def starting(self, worker: int) -> None:
        """Note that a worker's process is about to be started."""
        self.of(worker).go_on(START)

    def close_worker(self, worker: int, *, died: bool = True) -> None:
        """Note that no process has this number any more; what it was at ends now. `died`: it counts as a restart."""
        counters = self.of(worker)
        counters.restarts += died
        counters.go_on(0)

    def close(self) -> None:
        """Let go of the memory."""
        self._last, self._memory = self.read(), None
