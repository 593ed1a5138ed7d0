"""The file of a cache of packed samples. Reading takes no lock; adding and evicting do.

The file is a memfd that workers inherit, or a file in a folder on disk; each process opens and maps it separately. It
starts with the header (`Head`), followed by the counters of the processes and the table. For each sample of the
dataset, the table has the location of its entry (first page × 2**24 + number of pages; 0 for no entry) and the time of
its last request, counted in requests (0 for never). All of these values are u64. Then come the entries, each of which
starts on a page boundary and consists of an `ENTRY` and the packed sample. Entries are only ever appended, and are
freed by punching holes: no byte is written twice.

A reader accepts an entry only if its key, sample index, length and CRC-32 match; an entry that was evicted in the
meantime reads as zeros. A process that adds an entry holds the lock and sets `Head.dirty`. If the process is killed,
the lock is released; the next process that takes the lock finds `dirty` set, and frees all pages that the table does
not refer to. The first process after a reboot also frees these pages. An ``flock`` lock belongs to an open file
description and is released when its last descriptor is closed, which also happens when a process is killed. An
inherited descriptor shares its open file description with the parent's, so each process opens the memfd again.

The least recently used entries are evicted first, 1/64 of the cache at a time. The allowed bytes adapt to the hit rate:
each time the number of *repeated* requests since the last check reaches the number of samples, the hit rate is compared
with the *possible* hit rate, which the full limit would have given. It also counts as hits the misses whose samples
were requested so recently that all samples requested since would have fit. If the possible hit rate is below 1%, the
allowed bytes are halved, down to 1/16 of the limit; if it exceeds the hit rate by more than 1%, they are doubled, up to
the limit.
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

__all__ = ["CacheLocation", "Entries"]

FILE_NAME: Final = "samples.gpuload-cache"
LOCK_NAME: Final = "in-use"
PAGE: Final = 4096
PAGES_BITS: Final = 24
PAGES_MASK: Final = (1 << PAGES_BITS) - 1
# `near_misses` are repeated requests that would have been hits with the full limit.
COUNTERS: Final = ("hits", "first_misses", "repeated_misses", "near_misses", "too_large")
COUNTER_SETS: Final = 256  # sets of counters; two processes that share a set occasionally lose a count
COUNTER_SET_WORDS: Final = 8  # a cache line
ENTRY: Final = struct.Struct("<16sQQQ")  # the cache's key, and the sample's index, length in bytes and CRC-32
EVICTION_DIVISOR: Final = 64
MIN_SHARE_DIVISOR: Final = 16
MIN_GAIN: Final = 0.01
MAX_FILE_BYTES: Final = 1 << 43  # a longer file is emptied, since ext4's limit is 2**44 bytes
DISK_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
LIBC: Final = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE: Final = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Head(ctypes.Structure):
    """The header of the file: the cache's key, its allowed and used bytes, the number of requests (`clock`), an id of
    the machine's boot, and the counters at the last check."""

    _fields_ = [
        ("key", ctypes.c_ubyte * 16),
        *(
            (name, ctypes.c_uint64)
            for name in ("limit", "allowed", "used", "entries", "evicted", "dirty", "clock", "boot")
        ),
        *((name, ctypes.c_uint64) for name in ("requests_before", "hits_before", "near_before")),
    ]


class CacheLocation:
    """The location of a cache's file, in memory or in a folder. The folder is in use while a process has this object.

    Workers of a loader share a cache in memory (`gpuload.workers.shipping`); any other copy is new and empty.

    Args:
        samples: the number of samples in the dataset.
        limit_bytes: the maximum size of all entries.
        key: 16 bytes that are unique to the dataset, its version and the file format.
        folder: an absolute path; "" for memory.
        fd: in a worker, the inherited memfd, or -1 for a folder, which the main process has marked as in use.

    Attributes:
        fd: the memfd, or an open file whose lock marks the folder as in use.
        data_at: the offset of the first entry in the file.
        is_new: whether this process opened the cache itself, and can recreate it if no other process uses it.
    """

    def __init__(self, samples: int, limit_bytes: int, key: bytes, folder: str = "", fd: int | None = None) -> None:
        self.samples, self.limit_bytes, self.key, self.folder = samples, limit_bytes, key, folder
        self.data_at = -(-(PAGE + COUNTER_SETS * COUNTER_SET_WORDS * 8 + 16 * samples) // PAGE) * PAGE
        self.is_new = fd is None
        if fd is None and folder:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            fd = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        elif fd is None:
            memory_fd = memory_file("cache", self.data_at)
            fd = fcntl.fcntl(memory_fd, fcntl.F_DUPFD_CLOEXEC, 3)  # skip 0 to 2, the standard streams
            os.close(memory_fd)
        self.fd = fd
        if fd >= 0:
            os.set_inheritable(fd, False)
            self._finalizer = weakref.finalize(self, os.close, fd)
        if folder and self.is_new:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.is_new = False
                fcntl.flock(fd, fcntl.LOCK_SH)  # wait for a process that is creating the file

    def open(self) -> int:
        if not self.folder:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(os.path.join(self.folder, FILE_NAME), flags, 0o600)

    def share(self) -> None:
        """Allow other processes to use the cache, now that its file exists."""
        if self.folder:
            fcntl.flock(self.fd, fcntl.LOCK_SH)
        self.is_new = False

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheLocation, (self.samples, self.limit_bytes, self.key, self.folder, -1 if self.folder else None)


class Entries:
    """The entries of a cache, which this process has open.

    Args:
        location: the location of the cache file.

    Raises:
        ValueError: another process uses the cache for another dataset, or with another limit.
        OSError: the file system does not support holes, or is full.
    """

    def __init__(self, location: CacheLocation) -> None:
        self._location, self._lock = location, threading.Lock()
        self._fd = location.open()
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        is_same_cache = os.fstat(self._fd).st_size >= location.data_at and self._map()
        if location.is_new:
            self._prepare(is_same_cache)
            location.share()
        elif not is_same_cache:
            raise ValueError(
                f"the cache in {location.folder!r} is in use for another dataset, or another version of this one; "
                "give each a separate path="
            )
        elif self._head.limit != location.limit_bytes:
            raise ValueError(
                f"the cache in {location.folder!r} is in use with bytes_limit={self._head.limit}, got "
                f"{location.limit_bytes}; use the same limit in all processes"
            )
        self._counters = self._counter_sets[os.getpid() % COUNTER_SETS]

    def _prepare(self, is_same_cache: bool) -> None:
        """Create the file, or take over the file of an earlier run."""
        location = self._location
        if not is_same_cache:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, location.data_at)
            if location.folder:  # otherwise a write to the mapping would kill the process when the disk is full
                os.posix_fallocate(self._fd, 0, location.data_at)
            self._map()
            self._head.key[:] = location.key
        self._head.limit = self._head.allowed = location.limit_bytes
        if self._head.boot != (boot := _boot_id()):  # the machine may have crashed while a process wrote
            self._head.dirty, self._head.boot = 1, boot
        end = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, end + PAGE)
        _punch_hole(self._fd, end, PAGE)  # fail early if the file system does not support holes

    def _map(self) -> bool:
        """Map the beginning of the file; return whether it was created for these samples by this version."""
        mapping = mmap.mmap(self._fd, self._location.data_at)
        values, samples = np.frombuffer(mapping, np.uint64, offset=PAGE), self._location.samples
        self._head = Head.from_buffer(mapping)
        self._counter_sets = values[: COUNTER_SETS * COUNTER_SET_WORDS].reshape(COUNTER_SETS, COUNTER_SET_WORDS)
        self._words, self._last_requests = values[COUNTER_SETS * COUNTER_SET_WORDS :][: 2 * samples].reshape(2, samples)
        return bytes(self._head.key) == self._location.key

    def get(self, index: int, read: Callable[[memoryview], Any]) -> Any:
        """Return the result of `read` for a packed sample. Return None if the cache does not have the sample. If `read`
        returns None, drop the entry and return None."""
        head = self._head
        head.clock += 1  # a race with another process can lose a count, which does no harm
        now, last_request, word = head.clock, int(self._last_requests[index]), int(self._words[index])
        self._last_requests[index] = now
        if word:
            packed = self._read(index)
            sample = None if packed is None else read(packed)
            if sample is not None:
                self._count("hits")
                return sample
            self.drop(index, word)
        self._count("repeated_misses" if last_request else "first_misses")
        if last_request and (now - last_request) * head.used <= self._location.limit_bytes * max(1, head.entries):
            self._count("near_misses")
        return None

    def put(self, index: int, packed: bytes) -> None:
        """Add a packed sample, unless it is too large or the disk is full."""
        head, start = self._head, self._location.data_at
        pages = -(-(ENTRY.size + len(packed)) // PAGE)
        if pages * PAGE > self._location.limit_bytes // MIN_SHARE_DIVISOR or pages > PAGES_MASK:
            self._count("too_large")
            return
        entry = ENTRY.pack(self._location.key, index, len(packed), zlib.crc32(packed)) + packed
        with self._hold_lock():
            if self._words[index]:
                return  # another process has already added this sample
            self._adapt_allowed_bytes()
            try:
                excess_bytes = head.used + pages * PAGE - head.allowed
                if excess_bytes > 0:
                    self._evict(excess_bytes)
                if os.fstat(self._fd).st_size > MAX_FILE_BYTES:
                    self._evict(head.used)
                    os.ftruncate(self._fd, start)
                page = self._end
                _write(self._fd, entry, start + page * PAGE)
                self._words[index] = page << PAGES_BITS | pages
                head.used += pages * PAGE
                head.entries += 1
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS:
                    raise
                self._recover()  # free the pages of a partly written entry
                head.allowed = max(PAGE, head.used // 8 * 7)

    def drop(self, index: int, word: int | None = None) -> bool:
        """Drop the entry of a sample, and return whether an entry was dropped. If `word` is passed and differs from the
        one in the table, another process has replaced the entry in the meantime, and the new entry stays."""
        with self._hold_lock():
            current_word = int(self._words[index])
            if not current_word or word not in (None, current_word):
                return False
            if self._read(index) is None:  # the entry, or its word in the table, may be corrupt
                self._words[index] = 0
                self._recover()
            else:
                self._remove([index])
            return True

    def totals(self) -> dict[str, int]:
        """Return the counters of all processes and the size of the cache, as fields of `CacheStatistics`."""
        with self._hold_lock():
            head, (hits, first, repeated, _, too_large, *_) = self._head, self._counter_sets.sum(axis=0).tolist()
            counts = {"hits": hits, "misses": first + repeated, "evicted": head.evicted, "too_large": too_large}
            return {**counts, "entries": head.entries, "bytes_used": head.used, "bytes_allowed": head.allowed}

    def _count(self, name: str) -> None:
        self._counters[COUNTERS.index(name)] += np.uint64(1)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
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
        """The first page after all entries."""
        return -(-max(0, os.fstat(self._fd).st_size - self._location.data_at) // PAGE)

    def _read(self, index: int) -> memoryview | None:
        """Return the packed sample that the table refers to; None if the entry is not this sample or is incomplete."""
        page, pages = self._page_range(index)
        if page + pages > self._end:  # do not allocate memory for an invalid size in a corrupt file
            return None
        offset, capacity = self._location.data_at + page * PAGE, pages * PAGE - ENTRY.size
        entry_header = os.pread(self._fd, ENTRY.size, offset)
        if len(entry_header) < ENTRY.size:
            return None
        key, entry_index, nbytes, checksum = ENTRY.unpack(entry_header)
        if (key, entry_index) != (self._location.key, index) or not capacity - PAGE < nbytes <= capacity:
            return None
        packed = os.pread(self._fd, nbytes, offset + ENTRY.size)
        return memoryview(packed) if len(packed) == nbytes and zlib.crc32(packed) == checksum else None

    def _page_range(self, index: int) -> tuple[int, int]:
        """Return the first page of a sample's entry, and the number of pages."""
        word = int(self._words[index])
        return word >> PAGES_BITS, word & PAGES_MASK

    def _remove(self, indices: list[int]) -> None:
        for index in indices:
            page, pages = self._page_range(index)
            self._words[index] = 0
            _punch_hole(self._fd, self._location.data_at + page * PAGE, pages * PAGE)
            self._head.used -= pages * PAGE
            self._head.entries -= 1

    def _evict(self, min_bytes: int) -> None:
        live_indices = self._find_live_indices()
        indices_by_age = live_indices[np.argsort(self._last_requests[live_indices], kind="stable")]
        freed_bytes = np.cumsum(self._words[indices_by_age] & np.uint64(PAGES_MASK)) * PAGE
        bytes_to_free = max(min_bytes, self._head.allowed // EVICTION_DIVISOR)
        evicted_indices = indices_by_age[: int(np.searchsorted(freed_bytes, bytes_to_free)) + 1].tolist()
        self._remove(evicted_indices)
        self._head.evicted += len(evicted_indices)

    def _find_live_indices(self) -> np.ndarray:
        """Return the indices of the samples that have entries. The table may be corrupt, so first clear words that
        point beyond the end of the file. Also recompute the header's `used` and `entries`."""
        pages = self._words & np.uint64(PAGES_MASK)
        self._words[(pages == 0) | ((self._words >> np.uint64(PAGES_BITS)) + pages > self._end)] = 0
        live_indices = np.flatnonzero(self._words)
        self._head.used, self._head.entries = int(pages[live_indices].sum()) * PAGE, len(live_indices)
        return live_indices

    def _recover(self) -> None:
        """Free all pages that the table does not refer to, after a process was killed or the machine crashed."""
        words = np.sort(self._words[self._find_live_indices()])
        first_pages = (words >> np.uint64(PAGES_BITS)).astype(np.int64)
        end_pages = np.maximum.accumulate(first_pages + (words & np.uint64(PAGES_MASK)).astype(np.int64))
        begins, ends = np.append(0, end_pages), np.append(first_pages, self._end)
        gaps = np.flatnonzero(begins < ends)
        for begin, pages in zip(begins[gaps].tolist(), (ends - begins)[gaps].tolist(), strict=True):
            _punch_hole(self._fd, self._location.data_at + begin * PAGE, pages * PAGE)

    def _adapt_allowed_bytes(self) -> None:
        """Halve or double the allowed bytes, as the module's docstring describes."""
        head = self._head
        hits, _, repeated_misses, near_misses, *_ = self._counter_sets.sum(axis=0).tolist()
        requests = hits + repeated_misses - head.requests_before
        if requests < max(1, self._location.samples):
            return
        rate = (hits - head.hits_before) / requests
        possible_rate = rate + (near_misses - head.near_before) / requests
        if possible_rate < MIN_GAIN:
            head.allowed = max(head.limit // MIN_SHARE_DIVISOR, head.allowed // 2)
        elif possible_rate - rate > MIN_GAIN:
            head.allowed = min(head.limit, 2 * head.allowed)
        head.requests_before, head.hits_before, head.near_before = hits + repeated_misses, hits, near_misses


def _write(fd: int, data: bytes, offset: int) -> None:
    remaining: Any = memoryview(data)
    while remaining:
        written = os.pwrite(fd, remaining, offset)
        remaining, offset = remaining[written:], offset + written


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Punch a hole into a file, which frees the memory or disk space of these bytes.

    Raises:
        OSError: the file system does not support holes.
    """
    if LIBC.fallocate(fd, PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(
            code, f"cannot punch a hole in a file ({os.strerror(code)}); use a folder on ext4, XFS, btrfs or tmpfs"
        )


def _boot_id() -> int:
    """Return an integer that changes with each boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return int(file.read(18).replace(b"-", b""), 16)
