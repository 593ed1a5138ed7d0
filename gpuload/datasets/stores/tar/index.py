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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from gpuload.datasets.litter import is_litter
from gpuload.datasets.stores.opening import OpenFile, near_reads, open_file
from gpuload.datasets.stores.tar.headers import BLOCK, COMPRESSED, Damage, members
from gpuload.errors import visible

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote

__all__ = ["Shard", "Unusable", "build", "read", "restamped", "split_name", "table_of", "twice"]

MAGIC: Final = b"gltar\0\0\3"
# The first ones may lack what is behind the first end in an archive that was joined, the others have a weaker sum.
BEFORE: Final = (b"gltar\0\0\1", b"gltar\0\0\2")
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
        choices: for the dataset that reads it: by the numbers of a sample's fields, which of them it reads, and of
            those that are stored the number among them.
    """

    def __init__(self, path: str, table: np.ndarray) -> None:
        self.path = path
        self.table = table
        table.flags.writeable = False  # as one from a file is: a `Cached` on disk compares pickles
        _, self.size, self.mtime_ns, self.samples, self.members, *_, self.left_out = HEAD.unpack_from(table.data)
        self._columns: Columns | None = None
        self.choices: dict[bytes, tuple[list[str], list[tuple[str, int]]]] = {}

    @property
    def columns(self) -> Columns:
        """The parts of the table."""
        if self._columns is None:
            parts: list[Any] = [
                np.frombuffer(self.table, kind, count, at).astype(kind.newbyteorder("="), copy=False).data
                for at, count, kind in zip(*_layout(self.table)[:3], strict=True)
            ]
            names = parts.pop().tobytes()
            texts = tuple(name.decode("utf-8", "surrogateescape") for name in names.split(b"\0")) if names else ()
            self._columns = Columns._make([*parts, texts])
        return self._columns

    def key(self, number: int) -> str:
        """The key of a sample."""
        columns = self.columns
        return str(columns.keys[columns.key_ends[number] : columns.key_ends[number + 1]], "utf-8", "surrogateescape")

    def __reduce__(self) -> tuple[type[Shard], tuple[str, np.ndarray]]:
        return Shard, (self.path, self.table)

    def __repr__(self) -> str:
        return f"Shard({self.path!r}: {self.samples} samples)"


def build(path: str, remark: Any = lambda text: None, remote: Remote | None = None) -> Shard:
    """The shard with an index made from its headers.

    Args:
        path: of the archive.
        remark: called with what looks odd, as text.
        remote: how a URL is read.

    Raises:
        OSError: it cannot be read.
        Damage: it is cut off, no tar, or holds what is refused; or two samples with one key.
    """
    file = open_file(path, remote)
    _refuse_compressed(path, file)
    first, ends = array("Q"), array("Q", [0])
    blocks, sizes, fields = array("Q"), array("Q"), array("Q")
    names: dict[bytes, int] = {}
    seen: dict[bytes, int] = {}
    keys = bytearray()
    current: bytes | None = None
    here: set[int] = set()
    left_out = 0

    def unfinished(offset: int) -> None:
        remark(
            f"{path!r} ends at {offset:,} bytes without the empty blocks that close an archive: it may have been cut "
            f"off between two members; {len(first)} samples are in it"
        )

    def behind(offset: int) -> None:
        remark(
            f"{path!r} has {file.size - offset:,} bytes behind the end of the archive, from offset {offset:,} on, that "
            "are no archive; they are not read"
        )

    read_at = near_reads(file, WINDOW)
    try:
        for name, start, data, nbytes in members(read_at, path, file.size, unfinished=unfinished, behind=behind):
            split = split_name(name)
            if split is None:
                left_out += is_litter(name)
                continue
            key, field = split
            if key != current:
                if key in seen:
                    raise Damage(twice(path, key, seen[key], start), start, name)
                seen[key] = start
                first.append(len(blocks))
                keys += key
                ends.append(len(keys))
                current = key
                here.clear()
            number = names.setdefault(field, len(names))
            if number in here:
                raise Damage(twice(path, key, seen[key], start, field), start, name)
            here.add(number)
            blocks.append(data // BLOCK)
            sizes.append(nbytes)
            fields.append(number)
    except Damage as damage:
        split = split_name(damage.member) if damage.member else None
        whole = len(first) - bool(current is not None and split is not None and split[0] == current)
        count = f". {whole} whole samples lie before that; mend the shard, or leave it out" if first else ""
        raise Damage(f"{damage}{count}", damage.offset, damage.member) from None
    first.append(len(blocks))
    after = open_file(path, remote)
    if (after.size, after.mtime_ns) != (file.size, file.mtime_ns):
        raise Damage(f"{path!r} was changed while it was indexed; wait until it is written", 0)
    columns = first, ends, blocks, sizes, fields
    return Shard(path, table_of((file.size, file.mtime_ns), columns, bytes(keys), b"\0".join(names), left_out))


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and field by WebDataset's rule: the first dot of the last component is between them. None: no sample's."""
    dot = name.find(b".", slash := name.rfind(b"/") + 1)
    if dot <= slash or dot == len(name) - 1 or META.match(name) or (slash and in_litter(name[:slash])):
        return None
    return name[:dot], name[dot + 1 :].lower()


def read(path: str, index: str, stamp: tuple[int, int], remote: Remote | None = None) -> Shard | None:
    """The shard with the index from a file; None if there is none, or of another archive, or of one since changed, or
    if an earlier gpuload has made it.

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
    if table[:8].tobytes() in BEFORE:
        return None
    if len(table) < HEAD.size or len(table) % 8 or table[:8].tobytes() != MAGIC:
        raise Unusable(f"it is cut, or no index: it has {len(table):,} bytes")
    try:
        end = _layout(table)[3]
    except (ValueError, OverflowError) as error:
        raise Unusable(f"its head is damaged ({error})") from None
    if end != len(table):
        raise Unusable(f"it has {len(table):,} bytes, where its head says {end:,}")
    if _checksum(table) != HEAD.unpack_from(table.data)[-2]:
        raise Unusable("its checksum is wrong")
    shard = Shard(path, table)
    if (shard.size, shard.mtime_ns) != stamp:
        return None
    if not _leads_into_the_archive(shard):
        raise Unusable("it leads to places that are not in the archive")
    return shard


def _leads_into_the_archive(shard: Shard) -> bool:
    """Whether all that an index names is there: it may have come with the archive, from anybody."""
    first, key_ends, blocks, sizes, fields, keys, names = (
        np.frombuffer(shard.table, kind, count, at) for at, count, kind in zip(*_layout(shard.table)[:3], strict=True)
    )
    for ends, total in ((first, shard.members), (key_ends, len(keys))):
        if ends[0] != 0 or ends[-1] != total or (ends[1:] < ends[:-1]).any():
            return False
    if not shard.members:
        return True
    if int(fields.max()) >= names.tobytes().count(b"\0") + 1 or not len(names):
        return False
    last, most = int(blocks.max()), int(sizes.max())
    if last * BLOCK + most <= shard.size:  # nearly always, and the rest takes longer
        return True
    if last * BLOCK > shard.size or most > shard.size:
        return False
    return int((blocks.astype(np.int64) * BLOCK + sizes.astype(np.int64)).max()) <= shard.size


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
    arrays = [np.frombuffer(column, column.typecode) if column else np.zeros(0, np.uint8) for column in columns]
    kinds = [np.min_scalar_type(int(column.max()) if len(column) else 0) for column in arrays]
    arrays = [column.astype(kind) for column, kind in zip(arrays, kinds, strict=True)]
    widths = [kind.itemsize for kind in kinds]
    samples, total = len(arrays[0]) - 1, len(arrays[2])
    head = HEAD.pack(MAGIC, *stamp, samples, total, len(keys), len(names), *widths, 0, left_out)
    parts = [head, *(column.tobytes() for column in arrays), keys, names]
    table = np.frombuffer(bytearray().join(part + bytes(-len(part) % 8) for part in parts), np.uint8)
    table[HEAD.size - 16 : HEAD.size - 8] = np.frombuffer(struct.pack("<Q", _checksum(table)), np.uint8)
    return table


def _layout(table: np.ndarray) -> tuple[list[int], list[int], list[np.dtype], int]:
    """Where each part begins, how many numbers it has, of which type; and the end of the last."""
    _, _, _, samples, total, key_bytes, name_bytes, *widths, _, _ = HEAD.unpack_from(table.data)
    counts = [samples + 1, samples + 1, total, total, total, key_bytes, name_bytes]
    if not set(widths) <= {1, 2, 4, 8}:
        raise ValueError(f"its numbers are of {widths} bytes")
    kinds = [np.dtype(f"<u{width}") for width in (*widths, 1, 1)]
    starts, at = [], HEAD.size
    for count, kind in zip(counts, kinds, strict=True):
        starts.append(at)
        at += -(-count * kind.itemsize // 8) * 8
    return starts, counts, kinds, at


def _checksum(table: np.ndarray) -> int:
    """Return the CRC-32 of all bytes but those of the checksum itself."""
    at = HEAD.size - 16
    return crc32(table[at + 8 :].data, crc32(table[:at].data))


def _refuse_compressed(path: str, file: OpenFile) -> None:
    start = file.read_at(0, 6)
    for magic, name in COMPRESSED.items():
        if start.startswith(magic):
            raise Damage(
                f"{path!r} is compressed ({name}): nothing in it can be read without all that is before it. Unpack it "
                "to a plain tar, or read it in one pass, with TarShards(…, stream=True)",
                0,
            )


def twice(path: str, key: bytes, before: int, start: int, field: bytes | None = None) -> str:
    """What is said of two samples with one key, which begin at these offsets."""
    what = "" if field is None else f", with the field '{visible(field)}' again"
    return (
        f"{path!r} has two samples with the key '{visible(key)}': one at offset {before:,}, one at {start:,}{what}; "
        "the members of a sample lie side by side, and each key comes once in a shard (archives with the same keys are "
        "not joined, but shards of their own)"
    )
