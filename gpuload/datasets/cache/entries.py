"""The entries of a cache: found without a lock, added and evicted under one.

Each process maps the table and reads entries by their offsets. What is read counts only if the key, the sample's number
and the checksum in it are right; an entry that was evicted meanwhile reads as zeros. Whoever adds an entry holds the
lock and a mark in the file, `Head.DIRTY`; a process that is killed loses the lock, and the next one that gets it sees
the mark and gives back all that no word of the table leads to.

Last used, first kept: `Head.CLOCK` counts the samples that are asked for, and the table notes when each was. What was
not used for longest goes first, 1/64 of the cache at a time.

Allowed bytes follow the hit rate. Once as many samples were asked for *again* as the dataset has, the rates since the
last time are looked at: how many were hits, and how many would have been with all of the limit (those that were last
asked for so recently that all since then would fit). If that is below 1%, the cache is halved, to 1/16 at the least; if
it is more than 1% above the hits, it is doubled, up to the limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from gpuload.datasets.cache.backing import Folder, Memory, give_back
from gpuload.datasets.cache.layout import COUNTERS, ENTRY, PAGE, SLOTS, Head, Tables, boot_number, check_sum

__all__ = ["Entries"]

EVICTED_AT_ONCE: Final = 64
LEAST_SHARE: Final = 16
WORTH: Final = 0.01
PAGES_BITS: Final = 24
END: Final = 1 << 43  # a file longer than that begins anew: ext4 ends at 2**44
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class Entries:
    """A cache, as one process has it open.

    Args:
        backing: where its file is.

    Raises:
        ValueError: others use it for another dataset, or with another limit.
        OSError: the file system has no holes, or is full.
    """

    def __init__(self, backing: Memory | Folder) -> None:
        self._shape, self._backing = backing.shape, backing
        self._lock = threading.Lock()
        self._fd = backing.open()
        close = weakref.finalize(self, os.close, self._fd)
        try:
            self._prepare(backing)
            self._tables = Tables(self._fd, self._shape)
            with self._locked():
                slot = int(self._tables.head[Head.SLOT])
                self._tables.head[Head.SLOT] += np.uint64(1)
            self._counters = self._tables.slots[slot % SLOTS]
        except BaseException:
            close()
            raise

    def _prepare(self, backing: Memory | Folder) -> None:
        """Make the file, or see that it is right."""
        shape = self._shape
        if isinstance(backing, Folder) and backing.is_new:
            if os.fstat(self._fd).st_size < shape.data_at:
                os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, shape.data_at)  # or a full disk would kill who writes to the mapping
            tables = Tables(self._fd, shape)
            if not tables.is_of(shape):
                os.ftruncate(self._fd, shape.data_at)
                os.posix_fallocate(self._fd, 0, shape.data_at)
                tables = Tables(self._fd, shape)
                tables.begin(shape)
            if tables.head[Head.BOOT] != (boot := boot_number()):
                tables.head[Head.DIRTY], tables.head[Head.BOOT] = 1, boot
            tables.head[Head.LIMIT] = tables.head[Head.ALLOWED] = shape.limit_bytes
            os.ftruncate(self._fd, max(os.fstat(self._fd).st_size, shape.data_at) + PAGE)
            give_back(self._fd, os.fstat(self._fd).st_size - PAGE, PAGE)
        elif isinstance(backing, Memory):
            tables = Tables(self._fd, shape)
            if not tables.is_of(shape):
                tables.begin(shape)
        else:
            if os.fstat(self._fd).st_size < shape.data_at or not Tables(self._fd, shape).is_of(shape):
                raise ValueError(
                    f"the cache in {backing.path!r} is in use for another dataset, or another version of this one; "
                    "give each a path= of its own"
                )
            limit = int(Tables(self._fd, shape).head[Head.LIMIT])
            if limit != shape.limit_bytes:
                raise ValueError(
                    f"the cache in {backing.path!r} is in use with bytes_limit={limit}, got {shape.limit_bytes}; give "
                    "all its users the same"
                )

    def get(self, number: int, accept: Callable[[memoryview], bool]) -> bool:
        """Whether a sample is there, and `accept` takes what is; else it is dropped."""
        tables, head = self._tables, self._tables.head
        head[Head.CLOCK] += np.uint64(1)  # another process may do so at the same time: a sample more or less
        now, before = int(head[Head.CLOCK]), int(tables.used[number])
        word = int(tables.words[number])
        if word:
            data = self._read(number, word)
            if data is not None and accept(data):
                tables.used[number] = now
                self._count("hits")
                return True
            with self._locked():
                if int(tables.words[number]) == word:
                    self._drop(number)
        tables.used[number] = now
        self._count("again" if before else "first")
        entries = max(1, int(head[Head.ENTRIES]))
        if before and (now - before) * int(head[Head.USED]) <= self._shape.limit_bytes * entries:
            self._count("near")
        return False

    def put(self, number: int, packed: bytes) -> None:
        """Keep a packed sample, unless it is too large or the disk is full."""
        tables, head = self._tables, self._tables.head
        pages = -(-(ENTRY.size + len(packed)) // PAGE)
        nbytes = pages * PAGE
        if nbytes > self._shape.limit_bytes // LEAST_SHARE or pages >> PAGES_BITS:
            self._count("too_large")
            return
        entry = ENTRY.pack(self._shape.key, number, len(packed), check_sum(packed)) + packed
        with self._locked():
            if tables.words[number]:
                return  # another process was faster
            self._adapt()
            try:
                missing = int(head[Head.USED]) + nbytes - int(head[Head.ALLOWED])
                if missing > 0:
                    self._evict(missing)
                end = os.fstat(self._fd).st_size
                if end > END:
                    self._evict(int(head[Head.USED]))
                    os.ftruncate(self._fd, self._shape.data_at)
                    end = self._shape.data_at
                page = -(-(end - self._shape.data_at) // PAGE)
                _write(self._fd, entry, self._shape.data_at + page * PAGE)
                tables.words[number] = page << PAGES_BITS | pages
                head[Head.USED] += np.uint64(nbytes)
                head[Head.ENTRIES] += np.uint64(1)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._recover()  # what was written of it
                head[Head.ALLOWED] = max(PAGE, int(head[Head.USED]) // 8 * 7)

    def totals(self) -> dict[str, int]:
        """The numbers of all processes together."""
        with self._locked():
            head, sums = self._tables.head, self._tables.slots.sum(axis=0).tolist()
            found = dict(zip(COUNTERS, sums, strict=True))
            names = {"entries": Head.ENTRIES, "used": Head.USED, "allowed": Head.ALLOWED, "evicted": Head.EVICTED}
            return found | {name: int(head[place]) for name, place in names.items()}

    def _count(self, name: str) -> None:
        self._counters[COUNTERS.index(name)] += np.uint64(1)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        head = self._tables.head
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if head[Head.DIRTY]:
                    self._recover()
                head[Head.DIRTY] = 1
                yield
                head[Head.DIRTY] = 0
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read(self, number: int, word: int) -> memoryview | None:
        page, pages = word >> PAGES_BITS, word & ((1 << PAGES_BITS) - 1)
        data = os.pread(self._fd, pages * PAGE, self._shape.data_at + page * PAGE)
        if len(data) < ENTRY.size:
            return None
        key, its, nbytes, total = ENTRY.unpack_from(data)
        packed = memoryview(data)[ENTRY.size : ENTRY.size + nbytes]
        right = (key, its) == (self._shape.key, number) and len(packed) == nbytes and check_sum(packed) == total
        return packed if right else None

    def _drop(self, *numbers: int) -> None:
        tables, head = self._tables, self._tables.head
        for number in numbers:
            word = int(tables.words[number])
            page, pages = word >> PAGES_BITS, word & ((1 << PAGES_BITS) - 1)
            tables.words[number] = 0
            give_back(self._fd, self._shape.data_at + page * PAGE, pages * PAGE)
            head[Head.USED] -= np.uint64(pages * PAGE)
            head[Head.ENTRIES] -= np.uint64(1)

    def _evict(self, least_bytes: int) -> None:
        tables = self._tables
        live = np.flatnonzero(tables.words)
        oldest = live[np.argsort(tables.used[live], kind="stable")]
        freed = np.cumsum(tables.words[oldest] & np.uint64((1 << PAGES_BITS) - 1)) * PAGE
        wanted = max(least_bytes, int(tables.head[Head.ALLOWED]) // EVICTED_AT_ONCE)
        gone = oldest[: int(np.searchsorted(freed, wanted)) + 1].tolist()
        self._drop(*gone)
        tables.head[Head.EVICTED] += np.uint64(len(gone))

    def _recover(self) -> None:
        """After a process was killed, or the machine stopped: only what the table leads to is kept."""
        tables, head, start = self._tables, self._tables.head, self._shape.data_at
        words = np.sort(tables.words[tables.words != 0])
        pages = (words & np.uint64((1 << PAGES_BITS) - 1)).astype(np.int64)
        begins = (words >> np.uint64(PAGES_BITS)).astype(np.int64)
        end = -(-max(0, os.fstat(self._fd).st_size - start) // PAGE)
        gaps = zip([0, *(begins + pages).tolist()], [*begins.tolist(), end], strict=True)
        for first, last in gaps:
            if last > first:
                give_back(self._fd, start + first * PAGE, (last - first) * PAGE)
        head[Head.USED], head[Head.ENTRIES] = int(pages.sum()) * PAGE, len(words)

    def _adapt(self) -> None:
        head = self._tables.head
        hits, _, again, near = self._tables.slots.sum(axis=0)[:4].tolist()
        seen = hits + again - int(head[Head.AGAIN])
        if seen < max(1, self._shape.samples):
            return
        rate = (hits - int(head[Head.HITS])) / seen
        possible = rate + (near - int(head[Head.NEAR])) / seen
        allowed, limit = int(head[Head.ALLOWED]), self._shape.limit_bytes
        if possible < WORTH:
            head[Head.ALLOWED] = max(limit // LEAST_SHARE, allowed // 2)
        elif possible - rate > WORTH:
            head[Head.ALLOWED] = min(limit, 2 * allowed)
        head[Head.AGAIN], head[Head.HITS], head[Head.NEAR] = hits + again, hits, near


def _write(fd: int, data: bytes, offset: int) -> None:
    rest: Any = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, offset)
        rest, offset = rest[done:], offset + done
