"""The file of a cache: packed samples, found without a lock, added and evicted under one.

It is a memfd that workers inherit, or a file in a folder on disk; each process opens and maps it for itself. First come
numbers about the whole (`Head`), then counters of the processes, then the table: for each sample of the dataset where
its entry is (first page × 2**24 + number of pages; 0: nowhere), and when it was last asked for, counted in samples
asked for (0: never). All are u64. Then the entries, each from the beginning of a page on: `ENTRY` and the packed
sample. Entries are only ever appended, and given back as holes: no byte is written twice.

What is read counts only if the key, the sample's number, the length and the CRC-32 in it are right; an entry that was
evicted meanwhile reads as zeros. Whoever adds an entry holds the lock and sets `Head.dirty`. A process that is killed
loses the lock, and the next one that gets it sees the mark and gives back all that no word of the table leads to; so
does the first process after a start of the machine. A lock of ``flock`` belongs to an open file, and
ends with its last descriptor, so with a process that is killed. A descriptor that was inherited is the same open file:
so each process opens the memfd again.

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
from typing import Any, Final

import numpy as np

from gpuload.datasets.memory import memory_file

__all__ = ["CachePlace", "Entries"]

NAME: Final = "samples.gpuload-cache"
IN_USE: Final = "in-use"
PAGE: Final = 4096
PAGES_BITS: Final = 24
PAGES_MASK: Final = (1 << PAGES_BITS) - 1
COUNTERS: Final = ("hits", "first", "again", "near", "too_large")
SLOTS: Final = 256  # of counters: of two processes that share one, a count is lost now and then
SLOT_WORDS: Final = 8  # a cache line
ENTRY: Final = struct.Struct("<16sQQQ")  # the cache's key, the sample's number, bytes, CRC-32
EVICTED_AT_ONCE: Final = 64
LEAST_SHARE: Final = 16
WORTH: Final = 0.01
END: Final = 1 << 43  # a file longer than that begins again: ext4 ends at 2**44
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
LIBC: Final = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE: Final = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Head(ctypes.Structure):
    """Numbers about the whole: the cache's key, how much it may and does have, and the counters at the last look."""

    _fields_ = [
        ("key", ctypes.c_ubyte * 16),
        *(
            (name, ctypes.c_uint64)
            for name in ("limit", "allowed", "used", "entries", "evicted", "dirty", "clock", "boot")
        ),
        *((name, ctypes.c_uint64) for name in ("requests_before", "hits_before", "near_before")),
    ]


class CachePlace:
    """Where the file of a cache is, in memory or in a folder, which is in use as long as a process has this.

    Workers of a loader get a cache in memory as it is (`gpuload.workers.shipping`); any other copy is new and empty.

    Args:
        samples: how many the dataset has.
        limit_bytes: the most that all entries may take.
        key: 16 bytes that no other dataset, version or form of the file has.
        folder: an absolute path; "" for memory.
        fd: in a worker, a memfd that it inherited; -1 for a folder, which the main process says is in use.

    Attributes:
        fd: the memfd, or an open file whose lock says that the folder is in use.
        data_at: where entries begin in the file.
        is_new: no other process uses it, so it may be made again.
    """

    def __init__(self, samples: int, limit_bytes: int, key: bytes, folder: str = "", fd: int | None = None) -> None:
        self.samples, self.limit_bytes, self.key, self.folder = samples, limit_bytes, key, folder
        self.data_at = -(-(PAGE + SLOTS * SLOT_WORDS * 8 + 16 * samples) // PAGE) * PAGE
        self.is_new = fd is None
        if fd is None and folder:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            fd = os.open(os.path.join(folder, IN_USE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        elif fd is None:
            memory = memory_file("cache", self.data_at)
            fd = fcntl.fcntl(memory, fcntl.F_DUPFD_CLOEXEC, 3)  # not in the place of a standard stream
            os.close(memory)
        self.fd = fd
        if fd >= 0:
            os.set_inheritable(fd, False)
            self._finalizer = weakref.finalize(self, os.close, fd)
        if folder and self.is_new:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.is_new = False
                fcntl.flock(fd, fcntl.LOCK_SH)  # waits for a process that is making it

    def open(self) -> int:
        if not self.folder:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(os.path.join(self.folder, NAME), flags, 0o600)

    def share(self) -> None:
        """Let others use it too: it is made."""
        if self.folder:
            fcntl.flock(self.fd, fcntl.LOCK_SH)
        self.is_new = False

    def __reduce__(self) -> tuple[Any, ...]:
        return CachePlace, (self.samples, self.limit_bytes, self.key, self.folder, -1 if self.folder else None)


class Entries:
    """A cache, as one process has it open.

    Args:
        place: where its file is.

    Raises:
        ValueError: others use it for another dataset, or with another limit.
        OSError: the file system has no holes, or is full.
    """

    def __init__(self, place: CachePlace) -> None:
        self._place, self._lock = place, threading.Lock()
        self._fd = place.open()
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        is_ours = os.fstat(self._fd).st_size >= place.data_at and self._map()
        if place.is_new:
            self._prepare(is_ours)
            place.share()
        elif not is_ours:
            raise ValueError(
                f"the cache in {place.folder!r} is in use for another dataset, or another version of this one; "
                "give each a path= of its own"
            )
        elif self._head.limit != place.limit_bytes:
            raise ValueError(
                f"the cache in {place.folder!r} is in use with bytes_limit={self._head.limit}, got "
                f"{place.limit_bytes}; give all its users the same"
            )
        self._counters = self._slots[os.getpid() % SLOTS]

    def _prepare(self, is_ours: bool) -> None:
        """Make the file, or take it as another run has left it."""
        place = self._place
        if not is_ours:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, place.data_at)
            if place.folder:  # or a full disk would kill whoever writes to the mapping
                os.posix_fallocate(self._fd, 0, place.data_at)
            self._map()
            self._head.key[:] = place.key
        self._head.limit = self._head.allowed = place.limit_bytes
        if self._head.boot != (boot := _boot_number()):  # the machine may have stopped while a process wrote
            self._head.dirty, self._head.boot = 1, boot
        end = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, end + PAGE)
        _give_back(self._fd, end, PAGE)  # an error here, if it cannot

    def _map(self) -> bool:
        """Map the file's beginning; returns whether it was made for these samples, by this version."""
        mapping = mmap.mmap(self._fd, self._place.data_at)
        numbers, samples = np.frombuffer(mapping, np.uint64, offset=PAGE), self._place.samples
        self._head = Head.from_buffer(mapping)
        self._slots = numbers[: SLOTS * SLOT_WORDS].reshape(SLOTS, SLOT_WORDS)
        self._words, self._used = numbers[SLOTS * SLOT_WORDS :][: 2 * samples].reshape(2, samples)
        return bytes(self._head.key) == self._place.key

    def get(self, number: int, read: Callable[[memoryview], Any]) -> Any:
        """Return what `read` makes of a packed sample. None if there is none, or if `read` returns None, and then the
        entry is dropped."""
        head = self._head
        head.clock += 1  # another process may do so at the same time: a sample more or less
        now, before, word = head.clock, int(self._used[number]), int(self._words[number])
        self._used[number] = now
        if word:
            packed = self._read(number)
            sample = None if packed is None else read(packed)
            if sample is not None:
                self._count("hits")
                return sample
            self.drop(number, word)
        self._count("again" if before else "first")
        if before and (now - before) * head.used <= self._place.limit_bytes * max(1, head.entries):
            self._count("near")
        return None

    def put(self, number: int, packed: bytes) -> None:
        """Keep a packed sample, unless it is too large or the disk is full."""
        head, start = self._head, self._place.data_at
        pages = -(-(ENTRY.size + len(packed)) // PAGE)
        if pages * PAGE > self._place.limit_bytes // LEAST_SHARE or pages > PAGES_MASK:
            self._count("too_large")
            return
        entry = ENTRY.pack(self._place.key, number, len(packed), zlib.crc32(packed)) + packed
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
                page = self._end
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
        """Drop the entry of a sample; returns whether there was one. Another than that of `word`, if it is given, has
        come from another process meanwhile and stays."""
        with self._locked():
            now = int(self._words[number])
            if not now or word not in (None, now):
                return False
            if self._read(number) is None:  # its word in the table may be damaged
                self._words[number] = 0
                self._recover()
            else:
                self._remove([number])
            return True

    def totals(self) -> dict[str, int]:
        """Return what all processes together have counted, and what the cache has, as `CacheStatistics` calls it."""
        with self._locked():
            head, (hits, first, again, _, too_large, *_) = self._head, self._slots.sum(axis=0).tolist()
            done = {"hits": hits, "misses": first + again, "evicted": head.evicted, "too_large": too_large}
            return {**done, "entries": head.entries, "bytes_used": head.used, "bytes_allowed": head.allowed}

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

    @property
    def _end(self) -> int:
        """The first page behind all entries."""
        return -(-max(0, os.fstat(self._fd).st_size - self._place.data_at) // PAGE)

    def _read(self, number: int) -> memoryview | None:
        """Return the packed sample that the table leads to; None if it is not that of this number, whole."""
        page, pages = self._pages(number)
        if page + pages > self._end:  # no memory for what a damaged file says
            return None
        at, room = self._place.data_at + page * PAGE, pages * PAGE - ENTRY.size
        head = os.pread(self._fd, ENTRY.size, at)
        if len(head) < ENTRY.size:
            return None
        key, its, nbytes, checksum = ENTRY.unpack(head)
        if (key, its) != (self._place.key, number) or not room - PAGE < nbytes <= room:
            return None
        packed = os.pread(self._fd, nbytes, at + ENTRY.size)
        return memoryview(packed) if len(packed) == nbytes and zlib.crc32(packed) == checksum else None

    def _pages(self, number: int) -> tuple[int, int]:
        """Return the first page of a sample's entry, and their number."""
        word = int(self._words[number])
        return word >> PAGES_BITS, word & PAGES_MASK

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            page, pages = self._pages(number)
            self._words[number] = 0
            _give_back(self._fd, self._place.data_at + page * PAGE, pages * PAGE)
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
        """Return which samples have entries; clear words that lead beyond the file: the table may be damaged."""
        pages = self._words & np.uint64(PAGES_MASK)
        self._words[(pages == 0) | ((self._words >> np.uint64(PAGES_BITS)) + pages > self._end)] = 0
        live = np.flatnonzero(self._words)
        self._head.used, self._head.entries = int(pages[live].sum()) * PAGE, len(live)
        return live

    def _recover(self) -> None:
        """After a process was killed, or the machine stopped: keep only what the table leads to."""
        words = np.sort(self._words[self._live()])
        firsts = (words >> np.uint64(PAGES_BITS)).astype(np.int64)
        lasts = np.maximum.accumulate(firsts + (words & np.uint64(PAGES_MASK)).astype(np.int64))
        begins, ends = np.append(0, lasts), np.append(firsts, self._end)
        gaps = np.flatnonzero(begins < ends)
        for begin, pages in zip(begins[gaps].tolist(), (ends - begins)[gaps].tolist(), strict=True):
            _give_back(self._fd, self._place.data_at + begin * PAGE, pages * PAGE)

    def _adapt(self) -> None:
        """Halve or double the bytes that are allowed, see above."""
        head = self._head
        hits, _, again, near, *_ = self._slots.sum(axis=0).tolist()
        requests = hits + again - head.requests_before
        if requests < max(1, self._place.samples):
            return
        rate = (hits - head.hits_before) / requests
        possible = rate + (near - head.near_before) / requests
        if possible < WORTH:
            head.allowed = max(head.limit // LEAST_SHARE, head.allowed // 2)
        elif possible - rate > WORTH:
            head.allowed = min(head.limit, 2 * head.allowed)
        head.requests_before, head.hits_before, head.near_before = hits + again, hits, near


def _write(fd: int, data: bytes, offset: int) -> None:
    remaining: Any = memoryview(data)
    while remaining:
        done = os.pwrite(fd, remaining, offset)
        remaining, offset = remaining[done:], offset + done


def _give_back(fd: int, offset: int, nbytes: int) -> None:
    """Make a hole in a file: these bytes take no more memory or disk.

    Raises:
        OSError: the file system has no holes.
    """
    if LIBC.fallocate(fd, PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot give back parts of a file: {os.strerror(code)}")


def _boot_number() -> int:
    """Return another number after each start of the machine."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return int(file.read(18).replace(b"-", b""), 16)
