"""The ring of slots that pixels travel in: one memfd, mapped by the main process and by every worker.

Memory layout: a sparse memfd of `ring_bytes` bytes, mapped whole. Only the pages that were written to cost memory. A
*slot* is a page-aligned range of it that holds the results of one chunk. Released slots are handed out again, the most
recently used first: its pages are in the cache. When larger ones are needed, free slots that are too small are retired:
their pages go back to the system (a hole is punched), and a larger range is taken. `ring_bytes` is never exceeded.

Ownership: only the main process hands out slots, and a slot has one user at a time: the worker that fills it, then the
main process, until `release`; or, if it was lent (`lend`), the user's arrays. Back-pressure: `acquire` returns None if
the ring is full, or the machine has no memory for another slot; the caller waits until one is released.

Lifetime: the kernel frees the memory with the last process that maps it. It has no name and is not in /dev/shm, so a
killed process leaves nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.datasets.memory import memory_file
from gpuload.errors import LimitError

__all__ = [
    "Ring", "Slot", "align", "is_inherited", "map_file", "map_ring", "move", "on_collected", "running_on",
    "standard_streams_taken",
]  # fmt: skip

GRANULE_BYTES = 64 * 1024
SPARE_S = 1.0  # between two looks at what the machine has left besides the ring
MARGIN_BYTES = 16 << 20  # for the rest of the process tree, which takes memory too between two checks
LENT_SHARE = 4  # lend at most 1/LENT_SHARE of the ring
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


def align(nbytes: int, granule: int) -> int:
    """Return `nbytes` rounded up to a multiple of `granule`."""
    return -(-nbytes // granule) * granule


@dataclass(slots=True, eq=False)
class Slot:
    """A range of the ring: `capacity_bytes` bytes from `offset` on."""

    offset: int
    capacity_bytes: int


def map_ring(fd: int, ring_bytes: int) -> mmap.mmap:
    """Map the whole ring, shared and writable, into this process."""
    return mmap.mmap(fd, ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def map_file(fd: int, nbytes: int) -> np.ndarray:
    """Return the first bytes of a file in memory, mapped: shared, writable, as long as the array lives. Until then the
    mapping has a descriptor of its own; from Python 3.13 on it needs none."""
    options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return np.frombuffer(mmap.mmap(fd, nbytes, **options), np.uint8)


@contextlib.contextmanager
def standard_streams_taken() -> Iterator[None]:
    """A context in which no new descriptor is 0, 1 or 2; afterwards those that were closed are closed again.

    A program may start with descriptors 0, 1 or 2 closed (cron, daemons), and the system gives out the lowest free
    number: the ring would become descriptor 1, and what a worker prints would be written into pixels.
    """
    opened: list[int] = []
    try:
        while not all(map(_is_open, range(3))):
            opened.append(os.open(os.devnull, os.O_RDWR))
        yield
    finally:
        for fd in opened:
            os.close(fd)


def is_inherited(fd: int) -> bool:
    """Return whether a program that this process starts gets this descriptor."""
    return _is_open(fd) and os.get_inheritable(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """A context in which the calling thread runs on these CPUs; afterwards it runs where it did before. With no CPUs,
    or ones that the system refuses, it stays where it is. A process or thread that it starts in the context keeps
    them.

    Memory lies on the NUMA node of the CPU that first touches it, and page-locking touches it. So new memory and new
    processes lie near a device without a right of their own, which `mbind` needs: containers refuse that.
    """
    before: set[int] = set()
    if cpus:
        with contextlib.suppress(OSError):
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if before:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)


def move(pids: Iterable[int], cpus: frozenset[int]) -> None:
    """Let all threads of these processes run on these CPUs; none: on those of the calling thread."""
    there = cpus or os.sched_getaffinity(0)
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), there)


class Ring:
    """The main process's side of the ring.

    Args:
        ring_bytes: the most shared memory for all slots together; rounded up to 64 KiB.
        on_new: called with each new slot before its first use (page-locking).
        on_retire: called before a slot's memory is given back.
        memory_left: how many bytes the machine still allows, None for no limit; called only for a new slot.
        near: CPUs near which a new slot is to lie; `on_new` is called there, and has to touch its memory.

    Attributes:
        slots_made: how many slots were made so far; moved_out: how many were emptied by `move_out`.
        refused: how often it was full, and full_s: how long, from a refusal to the next release.

    Raises:
        ValueError: `ring_bytes` is not positive.
    """

    def __init__(
        self,
        ring_bytes: int,
        *,
        on_new: Callable[[Slot], None] | None = None,
        on_retire: Callable[[Slot], None] | None = None,
        memory_left: Callable[[], int | None] | None = None,
        near: frozenset[int] = frozenset(),
    ) -> None:
        if ring_bytes <= 0:
            raise ValueError(f"ring_bytes must be positive, got {ring_bytes}")
        self.ring_bytes = align(ring_bytes, GRANULE_BYTES)
        self._pid = os.getpid()
        self.on_new = on_new
        self.on_retire = on_retire
        self._memory_left = memory_left
        self._near = near
        if sys.platform == "linux":
            with standard_streams_taken():
                self.fd = memory_file("ring", self.ring_bytes)
                try:
                    self._map = map_ring(self.fd, self.ring_bytes)  # has a descriptor of its own
                except BaseException:
                    os.close(self.fd)
                    raise
            # A process that the user forks must not keep the ring's pages alive.
            self._map.madvise(mmap.MADV_DONTFORK)
            _rings.add(self)
        else:  # there are no worker processes, so private memory is enough
            self.fd = -1
            self._map = mmap.mmap(-1, self.ring_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._free: list[Slot] = []  # the most recently released last
        self._gaps: list[tuple[int, int]] = [(0, self.ring_bytes)]  # (offset, bytes) that belong to no slot, sorted
        self._busy: dict[int, Slot] = {}  # by offset
        self.slots_made = self.moved_out = self.refused = 0
        self.full_s, self._full_since = 0.0, 0.0
        self._lent: dict[int, Slot] = {}
        self._forked: list[Slot] = []  # lent when the user forked, and never reused
        self._returned: deque[int] = deque()
        self._loans = itertools.count()
        self._spare_bytes, self._spare_since = 0, float("-inf")

    @property
    def slots(self) -> int:
        """How many slots exist now, free and in use."""
        return len(self._free) + len(self._busy)

    @property
    def slot_bytes(self) -> int:
        """How many bytes the existing slots span together; at most `ring_bytes`."""
        return self.ring_bytes - sum(size for _, size in self._gaps)

    @property
    def used_bytes(self) -> int:
        """How many bytes the slots in use span."""
        return self.slot_bytes - sum(slot.capacity_bytes for slot in tuple(self._free))

    def acquire(self, nbytes: int, *, least_bytes: int | None = None) -> Slot | None:
        """Return a slot of at least `nbytes` bytes, or None if one has to be released first.

        Args:
            nbytes: how large it has to be.
            least_bytes: if `nbytes` is a guess: a size that is enough if the machine has no memory for the guess and no
                slot is in use whose release could change that.

        Raises:
            ValueError: `nbytes` is more than the whole ring.
            LimitError: the machine does not even have the memory for `least_bytes`, and no slot is in use.
        """
        if nbytes > self.ring_bytes:
            raise ValueError(f"{nbytes} bytes do not fit into a ring of {self.ring_bytes} bytes")
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].capacity_bytes >= nbytes:
                slot = self._free.pop(i)
                self._busy[slot.offset] = slot
                return slot
        minimum = nbytes if least_bytes is None else min(least_bytes, nbytes)
        while self._free:  # all too small, as the next ones that are needed will find
            self._retire(self._free.pop())
        size = align(max(nbytes, 1), GRANULE_BYTES)
        if (offset := self._take_gap(size)) is None:
            return self._refuse()
        slot = Slot(offset, size)
        if (lacking := self._lacking()) is not None:
            self._add_gap(slot)
            if len(self._busy) > len(self._lent) + len(self._forked):
                return self._refuse()
            if nbytes <= max(minimum, 1):
                raise LimitError(lacking)
            return self.acquire(max(nbytes // 2, minimum), least_bytes=minimum)
        if self.on_new is not None:
            try:
                with running_on(self._near):
                    self.on_new(slot)
            except BaseException:
                self._add_gap(slot)
                raise
        self.slots_made += 1
        self._busy[slot.offset] = slot
        self._log_growth(slot)
        return slot

    def _refuse(self) -> None:
        if not self._full_since:
            self.refused, self._full_since = self.refused + 1, time.perf_counter()

    def release(self, slot: Slot) -> None:
        """Give a slot back: nobody reads or writes it any more."""
        self._free.append(self._busy.pop(slot.offset))
        if self._full_since:
            self.full_s, self._full_since = self.full_s + time.perf_counter() - self._full_since, 0.0

    def release_at(self, offset: int) -> None:
        """Give back the slot in use that begins here, as a request names it."""
        self.release(self._busy[offset])

    def move_out(self, slot: Slot, nbytes: int) -> np.ndarray:
        """Return the first `nbytes` bytes of a slot as a copy in ordinary memory; the slot is released.

        Raises:
            LimitError: the machine has no memory for the copy; the slot remains in use.
        """
        if (lacking := self._lacking(nbytes)) is not None:
            raise LimitError(lacking)
        copy = self.view(slot)[:nbytes].copy()
        self.moved_out += 1
        self.release(slot)
        return copy

    def spare_bytes(self) -> int:
        """Return how many bytes chunks may take besides the ring, all together: as many as it has, or what the machine
        has left when the ring is full. That is looked up once in a while: it takes 0.4 ms."""
        now = time.monotonic()
        if now - self._spare_since > SPARE_S:
            left = self._memory_left() if self._memory_left is not None else None
            if left is not None:
                left -= self.ring_bytes - self._allocated_bytes() + MARGIN_BYTES
            self._spare_bytes = self.ring_bytes if left is None else max(0, min(left, self.ring_bytes))
            self._spare_since = now
        return self._spare_bytes

    def move_in(self, data: np.ndarray) -> Slot | None:
        """Return a slot with these bytes, uint8, if slots are page-locked: other memory is copied to the device while
        the program waits. None means they stay where they are, or there is no room."""
        slot = None
        if self.on_new is not None and len(data) <= self.ring_bytes:
            with contextlib.suppress(LimitError):
                slot = self.acquire(len(data))
        if slot is not None:
            self.view(slot)[: len(data)] = data
        return slot

    def view(self, slot: Slot) -> np.ndarray:
        """Return the slot's memory as a flat uint8 array."""
        return self.bytes[slot.offset : slot.offset + slot.capacity_bytes]

    def lend(self, slot: Slot, arrays: Sequence[np.ndarray]) -> bool:
        """Leave a slot to arrays that are views of it, until the last of them is gone: then `collect` releases it.

        False if more than 1/LENT_SHARE of the ring would be lent: the user decides when it comes back.
        """
        lent = [slot, *self._lent.values(), *self._forked]
        if self.fd < 0 or sum(other.capacity_bytes for other in lent) > self.ring_bytes // LENT_SHARE:
            return False
        # A process that the user forks keeps the arrays that it was forked with.
        self._map.madvise(mmap.MADV_DOFORK, slot.offset, slot.capacity_bytes)
        number = next(self._loans)
        self._lent[number] = slot
        # One mark for each array but the last: finalizers may run in any thread, and a list's pop is atomic.
        marks = [number] * (len(arrays) - 1)
        for array in arrays:
            on_collected(array, _come_back, marks, self._returned, number)
        return True

    def collect(self) -> bool:
        """Release lent slots that have come back; True if there were any."""
        collected = False
        while self._returned:
            slot = self._lent.pop(self._returned.popleft(), None)
            if slot is not None:
                self._map.madvise(mmap.MADV_DONTFORK, slot.offset, slot.capacity_bytes)
                self.release(slot)
                collected = True
        return collected

    def close(self) -> None:
        """Retire the free slots and close the descriptor; the mapping goes with its last reference. Idempotent."""
        while self._free:
            slot = self._free.pop()
            if os.getpid() == self._pid:  # a forked child must not touch its parent's pages
                self._retire(slot)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.bytes = np.empty(0, np.uint8)
        if os.getpid() == self._pid:
            # If a tensor of the caller still refers to the pages, they go when it does.
            with contextlib.suppress(BufferError):
                self._map.close()

    def _lacking(self, besides_bytes: int = 0) -> str | None:
        """Why the machine has no memory for all slots and `besides_bytes` more; None if it has."""
        left = self._memory_left() if self._memory_left is not None else None
        if left is None:
            return None
        # Pages count against the limit when they are first written to, so `left` still includes what is promised.
        promised = max(0, self.slot_bytes - self._allocated_bytes()) + besides_bytes
        if promised + MARGIN_BYTES <= left:
            return None
        return (
            f"decoded images need {promised:,} more bytes of memory, besides {MARGIN_BYTES:,} for the rest of "
            f"the program, but its control group has only {left:,} bytes left. Use a smaller batch_size or "
            "chunk_size, fewer workers, let the first transform crop, or raise the memory limit of the container or job"
        )

    def _log_growth(self, slot: Slot) -> None:
        import logging  # only the main process gets here; workers import this module too, and start sooner without

        logging.getLogger("gpuload.ring").debug(
            "the ring grows by a slot of %d bytes: %d slots, %d of %d bytes",
            slot.capacity_bytes,
            self.slots,
            self.slot_bytes,
            self.ring_bytes,
        )

    def _allocated_bytes(self) -> int:
        """Return how much of the ring has pages; 0 if not known, so that too much counts as promised, not too
        little."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    def _take_gap(self, size: int) -> int | None:
        for i, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def _retire(self, slot: Slot) -> None:
        if self.on_retire is not None:
            self.on_retire(slot)
        self._add_gap(slot)
        if self.fd >= 0:
            _punch_hole(self.fd, slot.offset, slot.capacity_bytes)

    def _add_gap(self, slot: Slot) -> None:
        self._gaps.append((slot.offset, slot.capacity_bytes))
        self._gaps.sort()
        merged: list[tuple[int, int]] = []
        for offset, room in self._gaps:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((offset, room))
        self._gaps = merged


_watched: dict[int, weakref.ref] = {}
atexit.register(_watched.clear)


def on_collected(thing: object, function: Callable[..., object], *args: object) -> Callable[[], object]:
    """Call ``function(*args)`` when `thing` is collected, in whatever thread lets go of it; return what calls this off.

    As `weakref.finalize`, but without a registry that the interpreter walks as it ends: there it complains if a daemon
    thread, which may iterate a loader, adds to it meanwhile. Nothing is called once the interpreter ends.
    """

    def call(ref: weakref.ref, watched: dict[int, weakref.ref] = _watched) -> None:
        if watched.pop(id(ref), None) is not None:
            function(*args)

    ref = weakref.ref(thing, call)
    _watched[id(ref)] = ref  # its own hash is that of what it refers to: arrays have none
    return lambda: _watched.pop(id(ref), None)


def _come_back(marks: list[int], returned: deque[int], number: int) -> None:
    """Note that an array that a slot was lent to is gone."""
    try:
        marks.pop()
    except IndexError:  # the last array
        returned.append(number)


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _after_fork_in_parent() -> None:
    """The child sees what is lent now, for as long as it likes: those slots are never written to again."""
    for ring in list(_rings):
        back = set(ring._returned)
        ring._forked += [slot for number, slot in ring._lent.items() if number not in back]
        ring._lent = {number: slot for number, slot in ring._lent.items() if number in back}


def _after_fork_in_child() -> None:
    """The ring is not mapped in the child, which may map something else at its addresses: never unmap that."""
    for ring in list(_rings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring._map))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):  # a sandbox without holes: the pages stay until the ring goes
            return
        raise OSError(code, f"cannot give back {nbytes} bytes of the ring: {os.strerror(code)}")
