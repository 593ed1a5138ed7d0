"""The index of one shard: its samples and the positions of their fields, as read from tar headers.

An index is one array of bytes, identical in memory and on disk; workers map a shared copy. Numbers are little-endian.

- a header of 80 bytes: magic; size and mtime_ns of the archive; number of samples and of members; lengths of `keys` and
  of `names`; bytes per number in each of the five columns below (1, 2, 4 or 8); CRC-32 of all other bytes; number of
  skipped files of other programs;
- `first` (samples + 1): the index of each sample's first member, and the number of members;
- `key_ends` (samples + 1): the offsets in `keys` at which each key begins, and the offset at which the last key ends;
- `blocks` (members): the offset of each member's data, in blocks of 512 bytes;
- `sizes` (members): the size of each member's data in bytes;
- `fields` (members): the index of the field's name in `names`;
- `keys`: all keys, concatenated; `names`: the names of the fields, separated by zero bytes.

Each part begins at a multiple of 8 bytes. A sample with an image and a class takes 18 to 26 bytes plus its key.
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

from gpuload.datasets.litter import SkippedFiles, is_litter
from gpuload.datasets.stores.opening import buffered_read_at, open_file
from gpuload.datasets.stores.tar.headers import BLOCK, Damage, Member, compression_of, members
from gpuload.errors import visible

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote

__all__ = ["Shard", "UnusableIndex", "build", "fields_of", "make_table", "read", "split_name", "with_mtime"]

MAGIC: Final = b"gltar\0\0\3"
HEAD: Final = struct.Struct("<8sQqQQQQ5B3xQQ")
WINDOW: Final = 4096  # bytes per read, so that the header after a small member is already in memory
META: Final = re.compile(rb"__[^/]*__($|/)")  # the names of WebDataset's metadata
in_litter = functools.lru_cache(1024)(is_litter)  # called with folders, which many members share


class UnusableIndex(ValueError):
    """The error for a truncated or damaged index file."""


class IndexColumns(NamedTuple):
    """The parts of an index, as memoryviews: reading one number from a NumPy array takes three times as long."""

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
        path: the path or URL of the archive.
        table: the bytes of the index, uint8.

    Attributes:
        size, mtime_ns: size and modification time of the archive when it was indexed.
        samples, members: the number of samples and of members.
        skipped_files: the number of files left by other programs, which are not samples.
    """

    def __init__(self, path: str, table: np.ndarray) -> None:
        self.path = path
        self.table = table
        # Tables from files are read-only as well. A `Cached` on disk hashes pickles, which must not differ.
        table.flags.writeable = False
        _, self.size, self.mtime_ns, self.samples, self.members, *_, self.skipped_files = HEAD.unpack_from(table.data)

    @functools.cached_property
    def columns(self) -> IndexColumns:
        """Return views of the parts of the table."""
        *parts, names = (array.data for array in _arrays(self.table))
        texts = str(names, "utf-8", "surrogateescape").split("\0") if len(names) else ()
        return IndexColumns._make([*parts, tuple(texts)])

    def key(self, number: int) -> str:
        """Return the key of a sample."""
        columns = self.columns
        return str(columns.keys[columns.key_ends[number] : columns.key_ends[number + 1]], "utf-8", "surrogateescape")

    def __reduce__(self) -> tuple[type[Shard], tuple[str, np.ndarray]]:
        return Shard, (self.path, self.table)

    def __repr__(self) -> str:
        return f"Shard({self.path!r}: {self.samples} samples)"


def build(path: str, warn: Callable[[str], None] = lambda text: None, remote: Remote | None = None) -> Shard:
    """Build the index of a shard from its tar headers.

    Args:
        path: the path or URL of the archive.
        warn: called with the text of each warning about the archive.
        remote: the options for reading URLs.

    Raises:
        OSError: the archive cannot be read.
        Damage: the archive is truncated or not a tar, or has a forbidden member or two samples with the same key.
    """
    file = open_file(path, remote)
    if kind := compression_of(file.read_at(0, 6)):
        raise Damage(
            f"{path!r} is compressed ({kind}), so it can only be read from beginning to end. Unpack it to a plain tar, "
            "or read it in one pass, with TarShards(…, stream=True)"
        )
    first, ends = array("Q"), array("Q", [0])
    blocks, sizes, fields = array("Q"), array("Q"), array("Q")
    field_numbers: dict[bytes, int] = {}  # keyed by name
    keys, key, skipped_files = bytearray(), b"", SkippedFiles()
    count_suffix = lambda: f"; it has {len(first)} samples"  # noqa: E731
    archive = members(buffered_read_at(file, WINDOW), path, file.size, warn=warn, suffix=count_suffix)
    try:
        for (_, key), sample in groupby(fields_of(archive, path, skipped_files, {}), itemgetter(0, 1)):
            first.append(len(blocks))
            for _, _, name, member in sample:
                blocks.append(member.data // BLOCK)
                sizes.append(member.nbytes)
                fields.append(field_numbers.setdefault(name, len(field_numbers)))
            keys += key
            ends.append(len(keys))
    except Damage as damage:
        split = split_name(damage.member) if damage.member else None
        complete_count = len(first) - bool(first and split is not None and split[0] == key)
        hint = (
            f". {complete_count} complete samples precede the damage; repair the shard, or remove it from the list"
            if first
            else ""
        )
        raise Damage(f"{damage}{hint}", damage.member) from None
    first.append(len(blocks))
    reopened = open_file(path, remote)
    if (reopened.size, reopened.mtime_ns) != (file.size, file.mtime_ns):
        raise Damage(f"{path!r} changed while it was being indexed; wait until it is complete")
    columns, stamp = (first, ends, blocks, sizes, fields), (file.size, file.mtime_ns)
    return Shard(path, make_table(stamp, columns, bytes(keys), b"\0".join(field_numbers), skipped_files.files))


def fields_of(
    archive: Iterable[Member], path: str, skipped_files: SkippedFiles, first_offsets: dict[bytes, int] | None = None
) -> Iterator[tuple[int, bytes, bytes, Member]]:
    """Yield all fields of all samples, in archive order: the offset of the sample, the sample's key, the field's name,
    and the member that holds the field.

    Args:
        archive: the members of the archive.
        path: the path of the archive, for error messages.
        skipped_files: a counter to which files of other programs are added.
        first_offsets: a dict to which the offset of each key is added, to find repeated keys. None means only adjacent
            samples are compared.

    Raises:
        Damage: two samples have the same key.
    """
    sample_start, current_key, names = 0, None, set()
    for member in archive:
        if (split := split_name(member.name)) is None:
            if is_litter(member.name):
                skipped_files.add(member.name)
            continue
        key, name = split
        if key != current_key:
            if first_offsets is not None and first_offsets.setdefault(key, member.start) != member.start:
                raise _duplicate_key(path, key, first_offsets[key], member)
            sample_start, current_key, names = member.start, key, set()
        elif name in names:
            raise _duplicate_key(path, key, sample_start, member, f", which repeats the field '{visible(name)}'")
        names.add(name)
        yield sample_start, key, name, member


def _duplicate_key(path: str, key: bytes, offset: int, member: Member, detail: str = "") -> Damage:
    return Damage(
        f"{path!r} has two samples with the key '{visible(key)}': one at offset {offset:,}, one at {member.start:,}"
        f"{detail}; the members of a sample must be adjacent, and each key must be unique within a shard (do not "
        "concatenate archives with the same keys; use them as separate shards)",
        member.name,
    )


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Split a name into key and field at the first dot of its last component, as WebDataset does. Return None if the
    file is not part of a sample."""
    dot = name.find(b".", slash := name.rfind(b"/") + 1)
    if dot <= slash or dot == len(name) - 1 or META.match(name) or (slash and in_litter(name[:slash])):
        return None
    return name[:dot], name[dot + 1 :].lower()


def read(path: str, index: str, stamp: tuple[int, int], remote: Remote | None = None) -> Shard | None:
    """Return the shard with its index read from a file. Return None if there is no such file, or if the file belongs to
    another archive or to an earlier version of this archive.

    Args:
        path: the path or URL of the archive.
        index: the path or URL of the index.
        stamp: the stamp of the archive, see `store.stamp`.
        remote: the options for reading `index` if it is a URL.

    Raises:
        UnusableIndex: the file is truncated or damaged.
    """
    try:
        file = open_file(index, remote)
    except FileNotFoundError:
        return None
    table = np.frombuffer(file.read_at(0, file.size), np.uint8)
    if len(table) < HEAD.size or len(table) % 8 or table[:8].tobytes() != MAGIC:
        raise UnusableIndex(f"it is truncated, or not an index file ({len(table):,} bytes)")
    arrays = _arrays(table)
    if _checksum(table) != HEAD.unpack_from(table.data)[-2]:
        raise UnusableIndex("its checksum is wrong")
    shard = Shard(path, table)
    if (shard.size, shard.mtime_ns) != stamp:
        return None
    if not _points_into_archive(shard, arrays):
        raise UnusableIndex("it points to offsets outside the archive")
    return shard


def _points_into_archive(shard: Shard, arrays: list[np.ndarray]) -> bool:
    """Return whether all positions in the index are valid: like its archive, it may come from an untrusted source."""
    first, key_ends, blocks, sizes, fields, keys, names = arrays
    for ends, total in ((first, shard.members), (key_ends, len(keys))):
        if ends[0] != 0 or ends[-1] != total or (ends[1:] < ends[:-1]).any():
            return False
    if not shard.members:
        return True
    count = names.tobytes().count(b"\0") + 1 if len(names) else 0
    # Floats do not overflow, and represent integers up to 2**53 exactly.
    return bool(fields.max() < count and (blocks * float(BLOCK) + sizes).max() <= shard.size)


def with_mtime(shard: Shard, mtime_ns: int) -> Shard:
    """Return the same shard with another modification time in its index."""
    table = shard.table.copy()
    table[16:24] = np.frombuffer(struct.pack("<q", mtime_ns), np.uint8)
    table[HEAD.size - 16 : HEAD.size - 8] = np.frombuffer(struct.pack("<Q", _checksum(table)), np.uint8)
    return Shard(shard.path, table)


def make_table(
    stamp: tuple[int, int], columns: Iterable[array], keys: bytes, names: bytes, skipped_files: int = 0
) -> np.ndarray:
    """Build an index from an archive's stamp (see `store.stamp`) and the parts that the module's docstring lists."""
    arrays = [np.asarray(column) for column in columns]
    arrays = [array.astype(np.min_scalar_type(int(array.max(initial=0)))) for array in arrays]
    counts = len(arrays[0]) - 1, len(arrays[2]), len(keys), len(names)
    head = HEAD.pack(MAGIC, *stamp, *counts, *(array.itemsize for array in arrays), 0, skipped_files)
    parts = [head, *(array.tobytes() for array in arrays), keys, names]
    table = np.frombuffer(bytearray().join(part + bytes(-len(part) % 8) for part in parts), np.uint8)
    table[HEAD.size - 16 : HEAD.size - 8] = np.frombuffer(struct.pack("<Q", _checksum(table)), np.uint8)
    return table


def _arrays(table: np.ndarray) -> list[np.ndarray]:
    """Return the parts of a table.

    Raises:
        UnusableIndex: the header is damaged, or does not match the table's length.
    """
    _, _, _, samples, members, key_bytes, name_bytes, *widths, _, _ = HEAD.unpack_from(table.data)
    if not set(widths) <= {1, 2, 4, 8}:
        raise UnusableIndex(f"its header is damaged (numbers of {widths} bytes)")
    arrays, offset = [], HEAD.size
    counts = (samples + 1, samples + 1, members, members, members, key_bytes, name_bytes)
    for count, width in zip(counts, (*widths, 1, 1), strict=True):
        nbytes = count * width
        arrays.append(table[offset : offset + nbytes].view(f"<u{width}"))
        offset += -(-nbytes // 8) * 8
    if offset != len(table):
        raise UnusableIndex(f"it has {len(table):,} bytes, but its header states {offset:,}")
    return arrays


def _checksum(table: np.ndarray) -> int:
    """Return the CRC-32 of all bytes except the checksum itself."""
    offset = HEAD.size - 16
    return crc32(table[offset + 8 :].data, crc32(table[:offset].data))
