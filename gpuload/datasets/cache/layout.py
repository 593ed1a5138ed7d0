"""How a cache's file is laid out: numbers about the whole, counters of each process, a table, then the entries.

All numbers are u64. The table has two for each sample of the dataset: where its entry lies (first page × 2**24 + number
of pages; 0: nowhere), and when it was last asked for, counted in samples asked for (0: never). An entry begins at a
page: `ENTRY` and the packed sample. Entries are only ever appended, and given back as holes: no byte is written twice.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final, NamedTuple

import numpy as np

__all__ = ["COUNTERS", "ENTRY", "PAGE", "SLOTS", "Head", "Shape", "Tables", "boot_number", "check_sum"]

PAGE: Final = 4096
MAGIC: Final = int.from_bytes(b"gpuload1", "little")
SLOTS: Final = 256
COUNTERS: Final = ("hits", "first", "again", "near", "too_large", "unused", "unused", "unused")
ENTRY: Final = struct.Struct("<16sQQQ")  # the cache's key, the sample's number, bytes, checksum
HEAD_WORDS: Final = PAGE // 8


class Head:
    """Where the numbers about the whole are."""

    MAGIC, SAMPLES, KEY, KEY_2, LIMIT, ALLOWED, USED, ENTRIES = range(8)
    EVICTED, DIRTY, SLOT, CLOCK, AGAIN, HITS, NEAR, BOOT = range(8, 16)


class Shape(NamedTuple):
    """Of a cache: how many samples the dataset has, the most bytes, and the key (16 bytes) of what is cached."""

    samples: int
    limit_bytes: int
    key: bytes

    @property
    def data_at(self) -> int:
        """Where entries begin."""
        nbytes = PAGE + SLOTS * len(COUNTERS) * 8 + 16 * self.samples
        return -(-nbytes // PAGE) * PAGE


class Tables:
    """The mapped beginning of a cache's file.

    Attributes:
        head: uint64 (512,), see `Head`.
        slots: uint64 (256, 8): `COUNTERS` of each process.
        words, used: uint64 (samples,).
    """

    def __init__(self, fd: int, shape: Shape) -> None:
        self._map = mmap.mmap(fd, shape.data_at)
        numbers = np.frombuffer(self._map, np.uint64)
        self.head = numbers[:HEAD_WORDS]
        rest = numbers[HEAD_WORDS:]
        count = SLOTS * len(COUNTERS)
        self.slots = rest[:count].reshape(SLOTS, len(COUNTERS))
        self.words = rest[count : count + shape.samples]
        self.used = rest[count + shape.samples : count + 2 * shape.samples]

    def is_of(self, shape: Shape) -> bool:
        """Whether it was made for these samples, by this version."""
        expected = [MAGIC, shape.samples, *_halves(shape.key)]
        return self.head[: Head.LIMIT].tolist() == expected

    def begin(self, shape: Shape) -> None:
        """Make it empty."""
        self.words[:] = 0
        self.used[:] = 0
        self.slots[:] = 0
        self.head[:] = 0
        self.head[Head.LIMIT] = self.head[Head.ALLOWED] = shape.limit_bytes
        self.head[: Head.LIMIT] = [MAGIC, shape.samples, *_halves(shape.key)]


def _halves(key: bytes) -> tuple[int, int]:
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")


def check_sum(data: memoryview | bytes) -> int:
    """The sum of all bytes as numbers of 64 bits, modulo 2**64: 10 GB/s. It finds parts that are missing or of another
    entry, which is all that can happen."""
    whole = len(data) // 8 * 8
    total = int(np.frombuffer(data, np.uint64, whole // 8).sum(dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(data[whole:], "little") + len(data)) % 2**64


def boot_number() -> int:
    """Another number after each start of the machine."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return int(file.read(18).replace(b"-", b""), 16)
