"""A tar shard as it is written, and its index from what is known then, so that nothing is read again.

Members have no owner and no time, so that the bytes depend on the samples alone; they are those that tarfile writes. A
header costs 3 µs, by tarfile 60: more than to read, hash and write a small photograph.
"""

from __future__ import annotations

import tarfile
from array import array
from collections.abc import Sequence
from typing import Final

from gpuload.datasets.stores.store import stamp
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.index import Shard, table_of
from gpuload.datasets.stores.tar.shards import keep
from gpuload.packing.durable import Hashed

__all__ = ["TarWriter"]

NAME, SIZE, SUM, AFTER_SUM = 100, 124, 148, 156  # where a header has its name's end, the size, the sum; all after it
MOST_BYTES: Final = 8**11 - 1  # that eleven octal digits tell
EMPTY: Final = bytes(BLOCK)


def _header(name: str, nbytes: int) -> bytes:
    """Of a member, by tarfile; ValueError for what a header cannot hold."""
    member = tarfile.TarInfo(name)
    member.size = nbytes
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


_LIKE: Final = _header("", 0)
_MODE, _TIME, _REST = _LIKE[NAME:SIZE], _LIKE[SIZE + 12 : SUM], _LIKE[AFTER_SUM:]
_SUM: Final = int(_LIKE[SUM : SUM + 6], 8) - sum(_LIKE[SIZE : SIZE + 12])  # of all but name and size


class TarWriter:
    """Writes samples to a shard, one after the other."""

    def __init__(self, file: Hashed) -> None:
        self._file = file
        self._first, self._ends = array("Q"), array("Q", [0])
        self._blocks, self._sizes, self._fields = array("Q"), array("Q"), array("Q")
        self._names: dict[str, int] = {}
        self._keys = bytearray()

    def add(self, key: str, fields: Sequence[tuple[str, bytes]]) -> None:
        """A sample: the ends of its files' names, which differ, and their bytes."""
        at = self._file.nbytes // BLOCK
        self._first.append(len(self._blocks))
        self._keys += key.encode()
        self._ends.append(len(self._keys))
        for field, data in fields:
            nbytes = len(data)
            for part in (header(f"{key}.{field}", nbytes), data, EMPTY[: -nbytes % BLOCK]):
                self._file.write(part)
            self._blocks.append(at + 1)
            self._sizes.append(nbytes)
            self._fields.append(self._names.setdefault(field, len(self._names)))
            at += 1 + -(-nbytes // BLOCK)

    def end(self) -> None:
        """What an archive ends with: two empty blocks, and more, until it is a number of whole records."""
        left = -(self._file.nbytes + 2 * BLOCK) % tarfile.RECORDSIZE
        self._file.write(bytes(2 * BLOCK + left))

    def keep_index(self, path: str) -> None:
        """Write the index of the shard, which lies there now, beside it."""
        columns = (array("Q", [*self._first, len(self._blocks)]), self._ends, self._blocks, self._sizes, self._fields)
        names = b"\0".join(name.encode("utf-8", "surrogateescape") for name in self._names)
        keep(Shard(path, table_of(stamp(path), columns, bytes(self._keys), names)))


def header(name: str, nbytes: int) -> bytes:
    """The header of a member, as tarfile writes it; ValueError for what a header cannot hold."""
    text = name.encode("utf-8", "surrogateescape")
    if len(text) > NAME or nbytes > MOST_BYTES:
        return _header(name, nbytes)
    size = b"%011o\0" % nbytes
    total = b"%06o\0 " % (_SUM + sum(text) + sum(size))
    return b"".join((text.ljust(NAME, b"\0"), _MODE, size, _TIME, total, _REST))
