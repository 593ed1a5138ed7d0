"""The file of a cache: packed samples, found without a lock, added and evicted under one.

It lies in a memfd that workers inherit, or in a folder on disk; each process opens and maps it for itself. First come
numbers about the whole (`Head`), then counters of each process, then the table: for each sample of the dataset where
its entry lies (first page × 2**24 + number of pages; 0: nowhere), and when it was last asked for, counted in samples
asked for (0: never). All are u64. Then the entries, each from the beginning of a page on: `ENTRY` and the packed
sample. Entries are only ever appended, and given back as holes: no byte is written twice.

What is read counts only if the key, the sample's number, the length and the CRC-32 in it are right; an entry that was
evicted meanwhile reads as zeros. Whoever adds an entry holds the lock and sets `Head.dirty`. A process that is killed
loses the lock, and the next one that gets it sees the mark and gives back all that no word of the table leads to. A
lock of ``flock`` belongs to an open file, and ends with its last descriptor, so with a process that is killed. A
descriptor that was inherited is the same open file: so each process opens the memfd anew.

The least recently used entries go first, 1/64 of the cache at a time. Allowed bytes follow the hit rate. Once as many
samples were asked for *again* as the dataset has, the rates since the last time are looked at: how many were hits, and
how many would have been with all of the limit (those that were last asked for so recently that all since then would
fit). If that is below 1%, the cache is halved, to 1/16 at the least; if it is more than 1% above the hits, it is
doubled, up to the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.datasets.memory import memory_file

__all__ = ["Entries", "Folder", "Memory", "Shape"]

NAME: Final = "samples.gpuload-cache"
IN_USE: Final = "in-use"
PAGE: Final = 4096
PAGES_BITS: Final = 24
PAGES_MASK: Final = (1 << PAGES_BITS) - 1
MAGIC: Final = int.from_bytes(b"gpuload2", "little")
COUNTERS: Final = ("hits", "first", "again", "near", "too_large")
SLOTS: Final = 256  # of counters; processes beyond so many share them
SLOT_WORDS: Final = 8  # a cache line
ENTRY: Final = struct.Struct("<16sQQQ")  # the cache's key, the sample's number, bytes, CRC-32
EVICTED_AT_ONCE: Final = 64
LEAST_SHARE: Final = 16
WORTH: Final = 0.01
END: Final = 1 << 43  # a file longer than that begins anew: ext4 ends at 2**44
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
PUNCH_HOLE: Final = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Head(ctypes.Structure):
    """The numbers about the whole: what it is of, how much it may and does have, and since when rates are counted."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "magic", "samples", "key_low", "key_high", "limit", "allowed", "used", "entries",
            "evicted", "dirty", "slot", "clock", "again", "hits", "near", "boot",
        )
    ]  # fmt: skip


class Shape(NamedTuple):
    """Of a cache: how many samples the dataset has, the most bytes, and the key (16 bytes) of what is cached."""

    samples: int
    limit_bytes: int
    key: bytes

    @property
    def data_at(self) -> int:
        """Where entries begin."""
        return -(-(PAGE + SLOTS * SLOT_WORDS * 8 + 16 * self.samples) // PAGE) * PAGE

    @property
    def identity(self) -> list[int]:
        """What the first numbers of its `Head` are."""
        return [MAGIC, self.samples, *struct.unpack("<QQ", self.key)]


# -- where it lies ----------------------------------------------------------------------------------------------------


class Memory:
    """A memfd. Workers of a loader get it itself (`gpuload.workers.shipping`); any other copy is new and empty.

    Args:
        shape: of the cache.
        fd: of a memfd that this process inherited.
    """

    path = ""

    def __init__(self, shape: Shape, fd: int | None = None) -> None:
        self.shape, self.is_new = shape, fd is None
        if fd is None:
            made = memory_file("cache", shape.data_at)
            fd = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)  # not in the place of a standard stream
            os.close(made)
        else:
            os.set_inheritable(fd, False)
        self.fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)

    def open(self) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def ready(self) -> None:
        self.is_new = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self.shape,)


class Folder:
    """A file in a folder of its own, which is in use as long as a process holds this.

    Args:
        path: the folder, as an absolute path.
        shape: of the cache.
        held: this process says that the folder is in use; copies in workers leave that to it.

    Attributes:
        is_new: no other process uses it, so it may be made anew.
    """

    def __init__(self, path: str, shape: Shape, held: bool = True) -> None:
        self.path, self.shape, self.is_new, self._held = path, shape, False, -1
        if held:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self._held = os.open(os.path.join(path, IN_USE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._finalizer = weakref.finalize(self, os.close, self._held)
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_new = True
            except BlockingIOError:
                fcntl.flock(self._held, fcntl.LOCK_SH)  # waits for one that is making it

    def open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(os.path.join(self.path, NAME), flags, 0o600)

    def ready(self) -> None:
        """From here on others may use it too."""
        if self._held >= 0:
            fcntl.flock(self._held, fcntl.LOCK_SH)
        self.is_new = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self.path, self.shape, False)


# -- what is in it ----------------------------------------------------------------------------------------------------


class Entries:
    """A cache, as one process has it open.

    Args:
        backing: where its file is.

    Raises:
        ValueError: others use it for another dataset, or with another limit.
        OSError: the file system has no holes, or is full.
    """

    def __init__(self, backing: Memory | Folder) -> None:
        self._shape = backing.shape
        self._lock = threading.Lock()
        self._fd = backing.open()
        close = weakref.finalize(self, os.close, self._fd)
        try:
            if backing.is_new:
                self._prepare(on_disk=bool(backing.path))
                backing.ready()
            elif os.fstat(self._fd).st_size < self._shape.data_at or not self._is_ours():
                raise ValueError(
                    f"the cache in {backing.path!r} is in use for another dataset, or another version of this one; "
                    "give each a path= of its own"
                )
            elif self._head.limit != self._shape.limit_bytes:
                raise ValueError(
                    f"the cache in {backing.path!r} is in use with bytes_limit={self._head.limit}, got "
                    f"{self._shape.limit_bytes}; give all its users the same"
                )
            with self._locked():
                self._counters = self._slots[self._head.slot % SLOTS]
                self._head.slot += 1
        except BaseException:
            close()
            raise

    def _prepare(self, on_disk: bool) -> None:
        """Make the file, or take it as another run has left it."""
        shape = self._shape
        if os.fstat(self._fd).st_size < shape.data_at or not self._is_ours():
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, shape.data_at)
            if on_disk:
                os.posix_fallocate(self._fd, 0, shape.data_at)  # or a full disk would kill who writes to the mapping
            self._map()
            self._head.magic, self._head.samples, self._head.key_low, self._head.key_high = shape.identity
        self._head.limit = self._head.allowed = shape.limit_bytes
        if self._head.boot != (boot := _boot_number()):  # the machine may have stopped while somebody wrote
            self._head.dirty, self._head.boot = 1, boot
        os.ftruncate(self._fd, max(os.fstat(self._fd).st_size, shape.data_at) + PAGE)
        _give_back(self._fd, os.fstat(self._fd).st_size - PAGE, PAGE)  # an error here, if it cannot

    def _is_ours(self) -> bool:
        """Map the file's beginning; returns whether it was made for these samples, by this version."""
        self._map()
        return [self._head.magic, self._head.samples, self._head.key_low, self._head.key_high] == self._shape.identity

    def _map(self) -> None:
        mapping = mmap.mmap(self._fd, self._shape.data_at)
        numbers = np.frombuffer(mapping, np.uint64, offset=PAGE)
        self._head = Head.from_buffer(mapping)
        self._slots = numbers[: SLOTS * SLOT_WORDS].reshape(SLOTS, SLOT_WORDS)
        table = numbers[SLOTS * SLOT_WORDS :]
        self._words, self._used = table[: self._shape.samples], table[self._shape.samples : 2 * self._shape.samples]

    def get(self, number: int, accept: Callable[[memoryview], bool]) -> bool:
        """Return whether a sample is there, and `accept` takes what is; else it is dropped."""
        head = self._head
        head.clock += 1  # another process may do so at the same time: a sample more or less
        now, before, word = head.clock, int(self._used[number]), int(self._words[number])
        self._used[number] = now
        if word:
            data = self._read(number, word)
            if data is not None and accept(data):
                self._count("hits")
                return True
            self.drop(number, word)
        self._count("again" if before else "first")
        if before and (now - before) * head.used <= self._shape.limit_bytes * max(1, head.entries):
            self._count("near")
        return False

    def put(self, number: int, packed: bytes) -> None:
        """Keep a packed sample, unless it is too large or the disk is full."""
        head, start = self._head, self._shape.data_at
        pages = -(-(ENTRY.size + len(packed)) // PAGE)
        if pages * PAGE > self._shape.limit_bytes // LEAST_SHARE or pages > PAGES_MASK:
            self._count("too_large")
            return
        entry = ENTRY.pack(self._shape.key, number, len(packed), zlib.crc32(packed)) + packed
        with self._locked():
            if self._words[number]:
                return  # another process was faster
            self._adapt()
            try:
                missing = head.used + pages * PAGE - head.allowed
                if missing > 0:
                    self._evict(missing)
                if os.fstat(self._fd).st_size > END:
                    self._evict(head.used)
                    os.ftruncate(self._fd, start)
                page = -(-(os.fstat(self._fd).st_size - start) // PAGE)
                _write(self._fd, entry, start + page * PAGE)
                self._words[number] = page << PAGES_BITS | pages
                head.used += pages * PAGE
                head.entries += 1
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._recover()  # what was written of it
                head.allowed = max(PAGE, head.used // 8 * 7)

    def drop(self, number: int, word: int | None = None) -> bool:
        """Drop the entry of a sample, the one that a word of the table leads to if it is given; returns whether there
        was one."""
        with self._locked():
            now = int(self._words[number])
            if not now or word not in (None, now):
                return False
            if self._read(number, now) is None:  # the word itself may be damaged
                self._words[number] = 0
                self._recover()
            else:
                self._remove([number])
            return True

    def totals(self) -> dict[str, int]:
        """Return the numbers of all processes together."""
        with self._locked():
            head, sums = self._head, self._slots.sum(axis=0).tolist()
            counted = dict(zip(COUNTERS, sums, strict=False))
            return counted | {name: getattr(head, name) for name in ("entries", "used", "allowed", "evicted")}

    def _count(self, name: str) -> None:
        self._counters[COUNTERS.index(name)] += np.uint64(1)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if self._head.dirty:
                    self._recover()
                self._head.dirty = 1
                yield
                self._head.dirty = 0
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read(self, number: int, word: int) -> memoryview | None:
        """Return the packed sample that a word of the table leads to; None if it is not that of this number, whole."""
        at, most = self._shape.data_at + (word >> PAGES_BITS) * PAGE, (word & PAGES_MASK) * PAGE - ENTRY.size
        head = os.pread(self._fd, ENTRY.size, at)
        if len(head) < ENTRY.size:
            return None
        key, its, nbytes, total = ENTRY.unpack(head)
        if (key, its) != (self._shape.key, number) or not most - PAGE < nbytes <= most:
            return None
        if at + ENTRY.size + nbytes > os.fstat(self._fd).st_size:  # no memory for what a damaged file says
            return None
        packed = os.pread(self._fd, nbytes, at + ENTRY.size)
        return memoryview(packed) if len(packed) == nbytes and zlib.crc32(packed) == total else None

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            word = int(self._words[number])
            page, pages = word >> PAGES_BITS, word & PAGES_MASK
            self._words[number] = 0
            _give_back(self._fd, self._shape.data_at + page * PAGE, pages * PAGE)
            self._head.used -= pages * PAGE
            self._head.entries -= 1

    def _evict(self, least_bytes: int) -> None:
        live = self._live()
        oldest = live[np.argsort(self._used[live], kind="stable")]
        freed = np.cumsum(self._words[oldest] & np.uint64(PAGES_MASK)) * PAGE
        wanted = max(least_bytes, self._head.allowed // EVICTED_AT_ONCE)
        evicted = oldest[: int(np.searchsorted(freed, wanted)) + 1].tolist()
        self._remove(evicted)
        self._head.evicted += len(evicted)

    def _live(self) -> np.ndarray:
        """Return which samples have entries; forget what lies beyond the file, where a damaged table may lead."""
        end = -(-max(0, os.fstat(self._fd).st_size - self._shape.data_at) // PAGE)
        pages = self._words & np.uint64(PAGES_MASK)
        self._words[(pages == 0) | ((self._words >> np.uint64(PAGES_BITS)) + pages > end)] = 0
        live = np.flatnonzero(self._words)
        self._head.used, self._head.entries = int(pages[live].sum()) * PAGE, len(live)
        return live

    def _recover(self) -> None:
        """After a process was killed, or the machine stopped: keep only what the table leads to."""
        start = self._shape.data_at
        words = np.sort(self._words[self._live()])
        firsts = (words >> np.uint64(PAGES_BITS)).astype(np.int64)
        lasts = np.maximum.accumulate(firsts + (words & np.uint64(PAGES_MASK)).astype(np.int64))
        end = -(-max(0, os.fstat(self._fd).st_size - start) // PAGE)
        for first, last in zip([0, *lasts.tolist()], [*firsts.tolist(), end], strict=True):
            if last > first:
                _give_back(self._fd, start + first * PAGE, (last - first) * PAGE)

    def _adapt(self) -> None:
        head = self._head
        hits, _, again, near, *_ = self._slots.sum(axis=0).tolist()
        seen = hits + again - head.again
        if seen < max(1, self._shape.samples):
            return
        rate = (hits - head.hits) / seen
        possible = rate + (near - head.near) / seen
        if possible < WORTH:
            head.allowed = max(head.limit // LEAST_SHARE, head.allowed // 2)
        elif possible - rate > WORTH:
            head.allowed = min(head.limit, 2 * head.allowed)
        head.again, head.hits, head.near = hits + again, hits, near


def _write(fd: int, data: bytes, offset: int) -> None:
    rest: Any = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, offset)
        rest, offset = rest[done:], offset + done


def _give_back(fd: int, offset: int, nbytes: int) -> None:
    """Make a hole in a file: these bytes take no more memory or disk.

    Raises:
        OSError: the file system has no holes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot give back parts of a file: {os.strerror(code)}")


def _boot_number() -> int:
    """Return another number after each start of the machine."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return int(file.read(18).replace(b"-", b""), 16)
