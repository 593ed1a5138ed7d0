"""The ring of slots that carries pixels: one memfd, mapped by the main process and by every worker.

Memory layout: a sparse memfd of `ring_bytes` bytes, mapped in full. Only pages that have been written to use memory. A
*slot* is a page-aligned range of the memfd that holds the results of one chunk. Released slots are reused, the most
recently released first, because its pages are still in the cache. When a larger slot is needed, free slots that are too
small are retired: their pages are returned to the system (by punching a hole), and a larger range is allocated. The
slots never exceed `ring_bytes`.

Ownership: only the main process hands out slots, and a slot has one user at a time: the worker that fills it, then the
main process until `release`, or the user's arrays if the slot was lent (`lend`). Back-pressure: `acquire` returns None
if the ring is full or the machine has no memory for another slot; the caller waits until a slot is released.

Lifetime: the kernel frees the memory when the last process that maps it exits. The memfd has no name and is not in
/dev/shm, so a killed process leaves nothing behind.
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
    "Ring", "Slot", "WorkerRing", "align", "is_inherited", "map_file", "map_ring", "move_processes", "on_collected",
    "reserve_standard_streams", "run_on_cpus",
]  # fmt: skip

GRANULE_BYTES = 64 * 1024
SPARE_S = 1.0  # minimum interval between two checks of the memory that the machine has left outside the ring
MARGIN_BYTES = 16 << 20  # reserved for the rest of the process tree, which also allocates memory between two checks
LENT_SHARE = 4  # lend at most 1/LENT_SHARE of the ring
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it


def align(nbytes: int, granule: int) -> int:
    """Return `nbytes` rounded up to a multiple of `granule`."""
    return -(-nbytes // granule) * granule


@dataclass(slots=True, eq=False)
class Slot:
    """A range of the ring: `capacity_bytes` bytes starting at `offset`."""

    offset: int
    capacity_bytes: int


def map_ring(fd: int, ring_bytes: int) -> mmap.mmap:
    """Map the entire ring into this process, shared and writable."""
    return mmap.mmap(fd, ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def map_file(fd: int, nbytes: int) -> np.ndarray:
    """Map the first `nbytes` bytes of a memory file, shared and writable. The mapping lives as long as the returned
    array. Before Python 3.13 it also holds a duplicate of the descriptor."""
    options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return np.frombuffer(mmap.mmap(fd, nbytes, **options), np.uint8)


@contextlib.contextmanager
def reserve_standard_streams() -> Iterator[None]:
    """Occupy descriptors 0, 1 and 2 within a context, so that no new file gets one of them. On exit, the
    descriptors that were closed before are closed again.

    A program can start with descriptors 0, 1 or 2 closed (cron, daemons), and the system assigns the lowest free
    descriptor. The ring could then become descriptor 1, and a worker's output would overwrite pixels.
    """
    opened_fds: list[int] = []
    try:
        while not all(map(_is_open, range(3))):
            opened_fds.append(os.open(os.devnull, os.O_RDWR))
        yield
    finally:
        for fd in opened_fds:
            os.close(fd)


def is_inherited(fd: int) -> bool:
    """Return whether a program started by this process inherits this descriptor."""
    return _is_open(fd) and os.get_inheritable(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def run_on_cpus(cpus: frozenset[int]) -> Iterator[None]:
    """Run the calling thread on these CPUs within a context, and restore its affinity on exit. If `cpus` is empty or
    the system refuses the CPUs, the affinity does not change. Processes and threads started in the context keep these
    CPUs.

    Memory is placed on the NUMA node of the CPU that first touches it, and page-locking touches it. So CPUs near a
    device place new memory and new processes near this device. `mbind` would need a privilege that containers deny.
    """
    old_cpus: set[int] = set()
    if cpus:
        with contextlib.suppress(OSError):
            old_cpus = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if old_cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, old_cpus)


def move_processes(pids: Iterable[int], cpus: frozenset[int]) -> None:
    """Move all threads of these processes to `cpus`; if `cpus` is empty, to the CPUs of the calling thread."""
    target_cpus = cpus or os.sched_getaffinity(0)
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), target_cpus)


class Ring:
    """The main process's side of the ring.

    Args:
        ring_bytes: the maximum shared memory for all slots, rounded up to a multiple of 64 KiB.
        memory_left: returns the number of bytes that the machine can still provide, or None if there is no limit.
            Called only for a new slot.
        near: the CPUs near which new slots are placed; `on_new` runs on these CPUs and must touch the slot's memory.

    Attributes:
        on_new: called with each new slot before its first use (for page-locking).
        on_retire: called before a slot's memory is returned to the system.
        slots_created: the number of slots created so far.
        slots_moved_out: the number of slots emptied by `move_out`.
        refusals: how often the ring became full.
        full_s: the total time for which the ring was full, in seconds, measured from each refusal to the next release.
    """

    def __init__(
        self,
        ring_bytes: int,
        *,
        memory_left: Callable[[], int | None] | None = None,
        near: frozenset[int] = frozenset(),
    ) -> None:
        self.ring_bytes = align(ring_bytes, GRANULE_BYTES)
        self._pid = os.getpid()
        self.on_new: Callable[[Slot], None] | None = None
        self.on_retire: Callable[[Slot], None] | None = None
        self._memory_left = memory_left
        self._near = near
        if sys.platform == "linux":
            with reserve_standard_streams():
                self.fd = memory_file("ring", self.ring_bytes)
                try:
                    self._map = map_ring(self.fd, self.ring_bytes)  # duplicates the descriptor
                except BaseException:
                    os.close(self.fd)
                    raise
            # A process that the user forks must not keep the ring's pages alive.
            self._map.madvise(mmap.MADV_DONTFORK)
            _rings.add(self)
        else:  # no worker processes on this platform, so private memory is enough
            self.fd = -1
            self._map = mmap.mmap(-1, self.ring_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._free: list[Slot] = []  # the most recently released slot comes last
        self._gaps: list[tuple[int, int]] = [(0, self.ring_bytes)]  # (offset, bytes) of ranges without a slot, sorted
        self._busy: dict[int, Slot] = {}  # keyed by offset
        self.slots_created = self.slots_moved_out = self.refusals = 0
        self.full_s, self._full_since = 0.0, 0.0
        self._lent_slots: dict[int, Slot] = {}
        self._forked_slots: list[Slot] = []  # on loan when the user forked, so never reused
        self._returned_loans: deque[int] = deque()
        self._loan_ids = itertools.count()
        self._spare_bytes, self._spare_since = 0, float("-inf")

    @property
    def slots(self) -> int:
        """The current number of slots, free and in use."""
        return len(self._free) + len(self._busy)

    @property
    def slot_bytes(self) -> int:
        """The total size of the existing slots in bytes; at most `ring_bytes`."""
        return self.ring_bytes - sum(size for _, size in self._gaps)

    @property
    def used_bytes(self) -> int:
        """The total size of the slots in use, in bytes."""
        return self.slot_bytes - sum(slot.capacity_bytes for slot in tuple(self._free))

    def acquire(self, nbytes: int, *, min_bytes: int | None = None) -> Slot | None:
        """Return a slot of at least `nbytes` bytes, or None if another slot must be released first.

        Args:
            nbytes: the requested capacity.
            min_bytes: a smaller sufficient size, if `nbytes` is a guess. It is used when the machine has no memory for
                the guess and no slot is in use whose release could free some.

        Raises:
            ValueError: `nbytes` exceeds the size of the ring.
            LimitError: the machine does not have the memory even for `min_bytes`, and no slot is in use.
        """
        if nbytes > self.ring_bytes:
            raise ValueError(f"{nbytes} bytes do not fit into a ring of {self.ring_bytes} bytes")
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].capacity_bytes >= nbytes:
                slot = self._free.pop(i)
                self._busy[slot.offset] = slot
                return slot
        minimum = nbytes if min_bytes is None else min(min_bytes, nbytes)
        while self._free:  # all free slots are too small, and the next requests are likely to be as large
            self._retire(self._free.pop())
        size = align(max(nbytes, 1), GRANULE_BYTES)
        if (offset := self._allocate_gap(size)) is None:
            return self._refuse()
        slot = Slot(offset, size)
        if (shortage := self._shortage()) is not None:
            self._add_gap(slot)
            if len(self._busy) > len(self._lent_slots) + len(self._forked_slots):
                return self._refuse()
            if nbytes <= max(minimum, 1):
                raise LimitError(shortage)
            return self.acquire(max(nbytes // 2, minimum), min_bytes=minimum)
        if self.on_new is not None:
            try:
                with run_on_cpus(self._near):
                    self.on_new(slot)
            except BaseException:
                self._add_gap(slot)
                raise
        self.slots_created += 1
        self._busy[slot.offset] = slot
        self._log_growth(slot)
        return slot

    def _refuse(self) -> None:
        """Count a refusal and start measuring the time, unless the ring is already full."""
        if not self._full_since:
            self.refusals, self._full_since = self.refusals + 1, time.perf_counter()

    def release(self, slot: Slot) -> None:
        """Return a slot to the ring once nothing reads or writes it any more."""
        self._free.append(self._busy.pop(slot.offset))
        if self._full_since:
            self.full_s, self._full_since = self.full_s + time.perf_counter() - self._full_since, 0.0

    def release_at(self, offset: int) -> None:
        """Release the slot in use at this offset, which is how requests identify slots."""
        self.release(self._busy[offset])

    def move_out(self, slot: Slot, nbytes: int) -> np.ndarray:
        """Copy the first `nbytes` bytes of a slot to ordinary memory and release the slot.

        Raises:
            LimitError: the machine has no memory for the copy. The slot remains in use.
        """
        if (shortage := self._shortage(nbytes)) is not None:
            raise LimitError(shortage)
        copy = self.view(slot)[:nbytes].copy()
        self.slots_moved_out += 1
        self.release(slot)
        return copy

    def spare_bytes(self) -> int:
        """Return the total number of bytes that chunks can use outside the ring: the size of the ring, or less if the
        machine will have less left once the ring is full. The check takes 0.4 ms, so its result is reused for
        `SPARE_S`."""
        now = time.monotonic()
        if now - self._spare_since > SPARE_S:
            left_bytes = self._memory_left() if self._memory_left is not None else None
            if left_bytes is not None:
                left_bytes -= self.ring_bytes - self._allocated_bytes() + MARGIN_BYTES
            self._spare_bytes = self.ring_bytes if left_bytes is None else max(0, min(left_bytes, self.ring_bytes))
            self._spare_since = now
        return self._spare_bytes

    def move_in(self, data: np.ndarray) -> Slot | None:
        """Copy uint8 data to a slot if slots are page-locked, because copying other memory to the device blocks the
        program. Return None if slots are not page-locked or the ring has no room; the data is then not copied."""
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
        """Lend a slot to arrays that are views of it. After the last array is collected, `collect` releases the slot.

        Return False if more than 1/LENT_SHARE of the ring would be on loan, because the user decides when a slot is
        returned.
        """
        lent_slots = [slot, *self._lent_slots.values(), *self._forked_slots]
        if self.fd < 0 or sum(lent_slot.capacity_bytes for lent_slot in lent_slots) > self.ring_bytes // LENT_SHARE:
            return False
        # A forked process keeps the arrays that existed at the fork.
        self._map.madvise(mmap.MADV_DOFORK, slot.offset, slot.capacity_bytes)
        loan_id = next(self._loan_ids)
        self._lent_slots[loan_id] = slot
        # There is one mark per array except the last. Finalizers can run in any thread, and a list's pop is atomic.
        marks = [loan_id] * (len(arrays) - 1)
        for array in arrays:
            on_collected(array, _on_array_collected, marks, self._returned_loans, loan_id)
        return True

    def collect(self) -> bool:
        """Release the lent slots whose arrays have all been collected; return True if there were any."""
        has_released = False
        while self._returned_loans:
            slot = self._lent_slots.pop(self._returned_loans.popleft(), None)
            if slot is not None:
                self._map.madvise(mmap.MADV_DONTFORK, slot.offset, slot.capacity_bytes)
                self.release(slot)
                has_released = True
        return has_released

    def close(self) -> None:
        """Retire the free slots and close the descriptor; the mapping ends with its last reference. Idempotent."""
        while self._free:
            slot = self._free.pop()
            if os.getpid() == self._pid:  # a forked child must not touch its parent's pages
                self._retire(slot)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.bytes = np.empty(0, np.uint8)
        if os.getpid() == self._pid:
            # Pages that one of the caller's tensors still refers to are freed together with the tensor.
            with contextlib.suppress(BufferError):
                self._map.close()

    def _shortage(self, extra_bytes: int = 0) -> str | None:
        """Return a message if the machine has no memory for all slots plus `extra_bytes`, otherwise None."""
        left_bytes = self._memory_left() if self._memory_left is not None else None
        if left_bytes is None:
            return None
        # Pages count against the limit only once they are written to, so `left_bytes` still includes promised bytes.
        promised = max(0, self.slot_bytes - self._allocated_bytes()) + extra_bytes
        if promised + MARGIN_BYTES <= left_bytes:
            return None
        return (
            f"decoded images need {promised:,} more bytes of memory, in addition to {MARGIN_BYTES:,} for the rest of "
            f"the program, but the program's control group has only {left_bytes:,} bytes left. Use a smaller "
            "batch_size or chunk_size, use fewer workers, start the transforms with a crop, or raise the memory limit "
            "of the container or job"
        )

    def _log_growth(self, slot: Slot) -> None:
        import logging  # used only in the main process; workers import this module too, and start faster without it

        logging.getLogger("gpuload.ring").debug(
            "the ring grows by a slot of %d bytes: %d slots, %d of %d bytes",
            slot.capacity_bytes,
            self.slots,
            self.slot_bytes,
            self.ring_bytes,
        )

    def _allocated_bytes(self) -> int:
        """Return the size of the ring's pages in bytes; 0 if unknown, which overestimates the promised bytes."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    def _allocate_gap(self, size: int) -> int | None:
        for i, (offset, gap_size) in enumerate(self._gaps):
            if gap_size >= size:
                self._gaps[i : i + 1] = [(offset + size, gap_size - size)] if gap_size > size else []
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
        merged_gaps: list[tuple[int, int]] = []
        for offset, size in self._gaps:
            if merged_gaps and sum(merged_gaps[-1]) == offset:
                merged_gaps[-1] = (merged_gaps[-1][0], merged_gaps[-1][1] + size)
            else:
                merged_gaps.append((offset, size))
        self._gaps = merged_gaps


class WorkerRing:
    """A worker's side of the ring.

    Args:
        fd: the descriptor of the ring's memfd.
        ring_bytes: the size of the ring.
    """

    def __init__(self, fd: int, ring_bytes: int) -> None:
        self._map = map_ring(fd, ring_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._populated: dict[int, tuple[int, int]] = {}  # slots' offsets → their size, and how far they are populated

    def view(self, slot: Slot) -> np.ndarray:
        """Return the slot's memory as a flat uint8 array."""
        return self._bytes[slot.offset : slot.offset + slot.capacity_bytes]

    def populate(self, slot: Slot, nbytes: int) -> None:
        """Map the pages of the first `nbytes` bytes of a slot into this process. Where the system cannot do that,
        pages are mapped when they are written.

        Each process that writes to a page for the first time has a page fault, even if the page exists. A single call
        for all pages takes 60% of the time of their faults. It takes 0.2 µs for a page that is already mapped, so the
        worker remembers how far it has populated a slot. If the slot at an offset has another size, the old slot was
        retired, and the pages are new. (If it has the same size, its new pages are mapped when they are written.) The
        rest of a slot is headroom that may never be written, and must not take memory.
        """
        capacity_bytes, populated_bytes = self._populated.get(slot.offset, (0, 0))
        if capacity_bytes != slot.capacity_bytes:
            populated_bytes = 0
        if nbytes <= populated_bytes:
            return
        end = align(nbytes, mmap.PAGESIZE)
        self._populated[slot.offset] = slot.capacity_bytes, end
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, slot.offset + populated_bytes, end - populated_bytes)
        except OSError as error:  # an older kernel, or no memory, in which case the write itself will fail
            if error.errno not in (errno.EINVAL, errno.ENOMEM, errno.EFAULT):
                raise


_watched: dict[int, weakref.ref] = {}
atexit.register(_watched.clear)


def on_collected(obj: object, function: Callable[..., object], *args: object) -> Callable[[], object]:
    """Call ``function(*args)`` when `obj` is collected, in the thread that drops the last reference. Return a
    function that cancels the call.

    Works like `weakref.finalize`, but without the registry that the interpreter iterates at shutdown. The interpreter
    raises an error if a daemon thread, which may be iterating a loader, adds to the registry during that iteration.
    Nothing is called once the interpreter shuts down.
    """

    def call(ref: weakref.ref, watched: dict[int, weakref.ref] = _watched) -> None:
        if watched.pop(id(ref), None) is not None:
            function(*args)

    ref = weakref.ref(obj, call)
    _watched[id(ref)] = ref  # keyed by id, because a reference hashes as its referent and arrays are not hashable
    return lambda: _watched.pop(id(ref), None)


def _on_array_collected(marks: list[int], returned_loans: deque[int], loan_id: int) -> None:
    """Remove a mark when an array on loan is collected; after the last array, report the loan as returned."""
    try:
        marks.pop()
    except IndexError:  # the last array
        returned_loans.append(loan_id)


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _after_fork_in_parent() -> None:
    """Set aside the slots on loan permanently, because the child can read them for as long as it lives."""
    for ring in list(_rings):
        returned_loans = set(ring._returned_loans)
        ring._forked_slots += [slot for loan_id, slot in ring._lent_slots.items() if loan_id not in returned_loans]
        ring._lent_slots = {loan_id: slot for loan_id, slot in ring._lent_slots.items() if loan_id in returned_loans}


def _after_fork_in_child() -> None:
    """Prevent the mapping from being closed: the ring is not mapped in the child, so its addresses can be in use for
    other memory."""
    for ring in list(_rings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring._map))


os.register_at_fork(after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):  # a sandbox without hole punching: pages stay until `close`
            return
        raise OSError(code, f"cannot return {nbytes} bytes of the ring to the system: {os.strerror(code)}")
