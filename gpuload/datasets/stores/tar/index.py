"""The index of one shard: which samples are in it, and where their fields are. Built from headers, kept in a file.

An index is one array of bytes, in memory as in its file: workers map one copy of it. All numbers are little-endian.

- a head of 80 bytes: magic; size and mtime_ns of the archive; counts of samples and members; bytes of keys and of
  fields' names; bytes of a number in each of the five columns below (1, 2, 4 or 8); CRC-32 of everything else;
  how many files were left out that are no samples;
- `first` (samples + 1): the number of each sample's first member;
- `key_ends` (samples + 1): where in `keys` each key begins and the last one ends;
- `blocks` (members): where the bytes of each member begin, in blocks of 512;
- `sizes` (members): how many bytes;
- `fields` (members): the number of the field's name;
- `keys`: all keys, one after the other; `names`: those of the fields, with a zero between them.

Each part begins at a multiple of 8. A sample of an image and a class takes 18 to 26 bytes and its key.
"""

from __future__ import annotations

import functools
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import numpy as np

from gpuload.datasets.litter import LeftOut, is_litter
from gpuload.datasets.stores.opening import near_reads, open_file
from gpuload.datasets.stores.tar.headers import BLOCK, Damage, Member, compression_of, members
from gpuload.errors import visible

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote

__all__ = ["Shard", "Unusable", "build", "fields_of", "read", "restamped", "split_name", "table_of"]

MAGIC: Final = b"gltar\0\0\3"
HEAD: Final = struct.Struct("<8sQqQQQQ5B3xQQ")
WINDOW: Final = 4096  # read with a header: what follows a small member is there already
META: Final = re.compile(rb"__[^/]*__($|/)")  # WebDataset's own notes
in_litter = functools.lru_cache(1024)(is_litter)  # of folders, each of which holds many files


class Unusable(ValueError):
    """An index file that is cut or damaged."""


class Columns(NamedTuple):
    """Views of an index: a number of an array takes three times as long as one of a memoryview."""

    first: memoryview
    key_ends: memoryview
    blocks: memoryview
    sizes: memoryview
    fields: memoryview
    keys: memoryview
    names: tuple[str, ...]


class Shard:
    """A shard with its index.

    Args:
        path: of the archive.
        table: uint8, the index.

    Attributes:
        size, mtime_ns: of the archive, as it was indexed.
        samples, members: how many.
        left_out: how many files other programs have put in, which are no samples.
    """

    def __init__(self, path: str, table: np.ndarray) -> None:
        self.path = path
        self.table = table
        table.flags.writeable = False  # as one from a file is: a `Cached` on disk compares pickles
        _, self.size, self.mtime_ns, self.samples, self.members, *_, self.left_out = HEAD.unpack_from(table.data)

    @functools.cached_property
    def columns(self) -> Columns:
        """The parts of the table."""
        *parts, names = (array.data for array in _arrays(self.table))
        texts = str(names, "utf-8", "surrogateescape").split("\0") if len(names) else ()
        return Columns._make([*parts, tuple(texts)])

    def key(self, number: int) -> str:
        """The key of a sample."""
        columns = self.columns
        return str(columns.keys[columns.key_ends[number] : columns.key_ends[number + 1]], "utf-8", "surrogateescape")

    def __reduce__(self) -> tuple[type[Shard], tuple[str, np.ndarray]]:
        return Shard, (self.path, self.table)

    def __repr__(self) -> str:
        return f"Shard({self.path!r}: {self.samples} samples)"


def build(path: str, remark: Callable[[str], None] = lambda text: None, remote: Remote | None = None) -> Shard:
    """Return the shard with an index made from its headers.

    Args:
        path: of the archive.
        remark: called with what looks odd, as text.
        remote: how a URL is read.

    Raises:
        OSError: it cannot be read.
        Damage: it is cut off, no tar, or holds what is refused; or two samples with one key.
    """
    file = open_file(path, remote)
    if kind := compression_of(file.read_at(0, 6)):
        raise Damage(
            f"{path!r} is compressed ({kind}): nothing in it can be read without all that is before it. Unpack it to a "
            "plain tar, or read it in one pass, with TarShards(…, stream=True)"
        )
    first, ends = array("Q"), array("Q", [0])
    blocks, sizes, fields = array("Q"), array("Q"), array("Q")
    numbers: dict[bytes, int] = {}  # of the fields' names
    keys, key, left_out = bytearray(), b"", LeftOut()
    count = lambda: f"; {len(first)} samples are in it"  # noqa: E731
    archive = members(near_reads(file, WINDOW), path, file.size, remark=remark, suffix=count)
    try:
        for (_, key), sample in groupby(fields_of(archive, path, left_out, {}), itemgetter(0, 1)):
            first.append(len(blocks))
            for _, _, name, member in sample:
                blocks.append(member.data // BLOCK)
                sizes.append(member.nbytes)
                fields.append(numbers.setdefault(name, len(numbers)))
            keys += key
            ends.append(len(keys))
    except Damage as damage:
        split = split_name(damage.member) if damage.member else None
        whole = len(first) - bool(first and split is not None and split[0] == key)
        before = f". {whole} complete samples come before that; fix the shard, or remove it" if first else ""
        raise Damage(f"{damage}{before}", damage.member) from None
    first.append(len(blocks))
    after = open_file(path, remote)
    if (after.size, after.mtime_ns) != (file.size, file.mtime_ns):
        raise Damage(f"{path!r} was changed while it was indexed; wait until it is written")
    columns, stamp = (first, ends, blocks, sizes, fields), (file.size, file.mtime_ns)
    return Shard(path, table_of(stamp, columns, bytes(keys), b"\0".join(numbers), left_out.files))


def fields_of(
    archive: Iterable[Member], path: str, left_out: LeftOut, seen: dict[bytes, int] | None = None
) -> Iterator[tuple[int, bytes, bytes, Member]]:
    """Yield the fields of all samples, in the order of the archive: of each where its sample begins, the sample's key,
    the field's name, and the member that holds it.

    Args:
        archive: its members.
        path: of the archive.
        left_out: what other programs have put in is counted here.
        seen: where each key begins is noted here, and none may come again; None means only neighbours are looked at.

    Raises:
        Damage: there are two samples with one key.
    """
    begin, current, names = 0, None, set()
    for member in archive:
        if (split := split_name(member.name)) is None:
            if is_litter(member.name):
                left_out.add(member.name)
            continue
        key, name = split
        if key != current:
            if seen is not None and seen.setdefault(key, member.start) != member.start:
                raise _twice(path, key, seen[key], member)
            begin, current, names = member.start, key, set()
        elif name in names:
            raise _twice(path, key, begin, member, f", with the field '{visible(name)}' again")
        names.add(name)
        yield begin, key, name, member


def _twice(path: str, key: bytes, before: int, member: Member, again: str = "") -> Damage:
    return Damage(
        f"{path!r} has two samples with the key '{visible(key)}': one at offset {before:,}, one at {member.start:,}"
        f"{again}; the members of a sample lie side by side, and each key comes once in a shard (archives with the "
        "same keys are not joined, but shards of their own)",
        member.name,
    )


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and field by WebDataset's rule: the first dot of the last component is between them. None means no
    sample's."""
    dot = name.find(b".", slash := name.rfind(b"/") + 1)
    if dot <= slash or dot == len(name) - 1 or META.match(name) or (slash and in_litter(name[:slash])):
        return None
    return name[:dot], name[dot + 1 :].lower()


def read(path: str, index: str, stamp: tuple[int, int], remote: Remote | None = None) -> Shard | None:
    """Return the shard with the index from a file; None if there is none, or of another archive, or of one since
    changed.

    Args:
        path: of the archive.
        index: of the index.
        stamp: the archive's, see `store.stamp`.
        remote: how `index` is read, if it is a URL.

    Raises:
        Unusable: the file is cut or damaged.
    """
    try:
        file = open_file(index, remote)
    except FileNotFoundError:
        return None
    table = np.frombuffer(file.read_at(0, file.size), np.uint8)
    if len(table) < HEAD.size or len(table) % 8 or table[:8].tobytes() != MAGIC:
        raise Unusable(f"it is cut, or no index: it has {len(table):,} bytes")
    arrays = _arrays(table)
    if _checksum(table) != HEAD.unpack_from(table.data)[-2]:
        raise Unusable("its checksum is wrong")
    shard = Shard(path, table)
    if (shard.size, shard.mtime_ns) != stamp:
        return None
    if not _leads_into_the_archive(shard, arrays):
        raise Unusable("it leads to places that are not in the archive")
    return shard


def _leads_into_the_archive(shard: Shard, arrays: list[np.ndarray]) -> bool:
    """Return whether all that an index names is there: it may have come with the archive, from anybody."""
    first, key_ends, blocks, sizes, fields, keys, names = arrays
    for ends, total in ((first, shard.members), (key_ends, len(keys))):
        if ends[0] != 0 or ends[-1] != total or (ends[1:] < ends[:-1]).any():
            return False
    if not shard.members:
        return True
    count = names.tobytes().count(b"\0") + 1 if len(names) else 0
    # As floats, which do not overflow, and are exact up to 2**53.
    return bool(fields.max() < count and (blocks * float(BLOCK) + sizes).max() <= shard.size)


def restamped(shard: Shard, mtime_ns: int) -> Shard:
    """The same shard, known by another time."""
    table = shard.table.copy()
    table[16:24] = np.frombuffer(struct.pack("<q", mtime_ns), np.uint8)
    table[HEAD.size - 16 : HEAD.size - 8] = np.frombuffer(struct.pack("<Q", _checksum(table)), np.uint8)
    return Shard(shard.path, table)


def table_of(
    stamp: tuple[int, int], columns: Iterable[array], keys: bytes, names: bytes, left_out: int = 0
) -> np.ndarray:
    """The index of an archive with this size and time, see `store.stamp`; columns, keys and names as its parts are."""
    arrays = [np.asarray(column) for column in columns]
    arrays = [array.astype(np.min_scalar_type(int(array.max(initial=0)))) for array in arrays]
    counts = len(arrays[0]) - 1, len(arrays[2]), len(keys), len(names)
    head = HEAD.pack(MAGIC, *stamp, *counts, *(array.itemsize for array in arrays), 0, left_out)
    parts = [head, *(array.tobytes() for array in arrays), keys, names]
    table = np.frombuffer(bytearray().join(part + bytes(-len(part) % 8) for part in parts), np.uint8)
    table[HEAD.size - 16 : HEAD.size - 8] = np.frombuffer(struct.pack("<Q", _checksum(table)), np.uint8)
    return table


def _arrays(table: np.ndarray) -> list[np.ndarray]:
    """Return the parts of a table.

    Raises:
        Unusable: it has no such parts.
    """
    _, _, _, samples, members, key_bytes, name_bytes, *widths, _, _ = HEAD.unpack_from(table.data)
    if not set(widths) <= {1, 2, 4, 8}:
        raise Unusable(f"its head is damaged (its numbers are of {widths} bytes)")
    arrays, at = [], HEAD.size
    counts = (samples + 1, samples + 1, members, members, members, key_bytes, name_bytes)
    for count, width in zip(counts, (*widths, 1, 1), strict=True):
        nbytes = count * width
        arrays.append(table[at : at + nbytes].view(f"<u{width}"))
        at += -(-nbytes // 8) * 8
    if at != len(table):
        raise Unusable(f"it has {len(table):,} bytes, where its head says {at:,}")
    return arrays


def _checksum(table: np.ndarray) -> int:
    """Return the CRC-32 of all bytes but those of the checksum itself."""
    at = HEAD.size - 16
    return crc32(table[at + 8 :].data, crc32(table[:at].data))
