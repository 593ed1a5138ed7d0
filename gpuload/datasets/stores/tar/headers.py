"""The members of a tar archive, read from its headers alone: ustar, GNU's long names, pax records.

A name is only ever a name: it may be absolute or hold ``..``, since nothing is written or opened by it. Links, sparse
members and devices are refused: their bytes are not where the header says.

Archives may be joined with ``cat``: the empty blocks that close one are passed over, as ``tar -i`` does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final

from gpuload.errors import visible

__all__ = ["BLOCK", "COMPRESSED", "Damage", "Member", "has_header", "members"]

BLOCK: Final = 512
EMPTY: Final = bytes(BLOCK)
COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
MOST_DIGITS: Final = 40  # of a size in pax records
MOST_EXTENDED: Final = 1 << 20  # bytes of a long name, or of pax records
REFUSED: Final = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a character device", b"4": "a block device", b"6": "a FIFO",
    b"S": "a sparse file", b"M": "the rest of a file from another volume",
}  # fmt: skip
NO_DATA: Final = (b"5",)  # folders
SKIPPED: Final = (b"5", b"g", b"V", b"D")  # and what is true of all members, a volume's name, a folder's content

Member = tuple[bytes, int, int, int]
"""Name, where its headers begin, where its bytes begin, how many they are."""


class Damage(ValueError):
    """An archive that is cut off, damaged, or holds what is not read; the message says which, and where.

    Attributes:
        offset: where in the archive.
        member: the name that is concerned, if it is known.
    """

    def __init__(self, text: str, offset: int, member: bytes | None = None) -> None:
        super().__init__(text)
        self.offset, self.member = offset, member


def members(
    read_at: Callable[[int, int], bytes],
    shard: str,
    size: int | None = None,
    start: int = 0,
    unfinished: Callable[[int], None] = lambda offset: None,
    behind: Callable[[int], None] = lambda offset: None,
) -> Iterator[Member]:
    """The regular files of an archive, in order.

    Args:
        read_at: gives the bytes at an offset; fewer only at the end. Offsets never decrease.
        shard: what errors call the archive.
        size: its bytes, if that is known before it is read.
        start: where the headers of the first member begin.
        unfinished: called with the offset if the archive ends without the two empty blocks that close it.
        behind: called with the offset where something else than an archive follows these blocks; it is not read.

    Raises:
        Damage: it is cut off, no tar, or holds a member that is refused.
    """
    offset = begin = start
    long_name, pax_size, sparse = b"", None, False
    follows = b""
    while True:
        block, follows = follows or read_at(offset, BLOCK), b""
        if len(block) < BLOCK:
            if block or offset != begin or not offset:
                raise _short(block, offset, shard)
            unfinished(offset)
            return
        if not block[0] and block == EMPTY:
            offset, follows = _behind_the_end(read_at, offset + BLOCK, shard, behind)
            if not follows:
                return
            begin = offset
            long_name, pax_size, sparse = b"", None, False
            continue
        kind = block[156:157]
        try:
            nbytes = _number(block[124:136])
            if not _sum_is_right(block):
                raise ValueError
        except ValueError:
            raise _no_header(block, offset, shard) from None
        name = long_name or _name(block)
        if kind not in b"xgLK":
            nbytes = nbytes if pax_size is None else pax_size
            kind = b"S" if sparse else kind
        data = offset + BLOCK
        if nbytes < 0:
            raise Damage(
                f"{shard!r}: the member {_text(name)} at offset {offset:,} has a size of {nbytes:,} bytes, which is "
                "negative; the archive is damaged, make it again",
                offset,
                name,
            )
        after = data if kind in NO_DATA else data + (nbytes + BLOCK - 1) // BLOCK * BLOCK
        if kind in REFUSED:
            raise Damage(
                f"{shard!r}: the member {_text(name)} at offset {offset:,} is {REFUSED[kind]}; expected files that "
                "hold their own bytes. Make the archive again, with links followed (tar --dereference, and without "
                "--sparse)",
                offset,
                name,
            )
        if size is not None and data + nbytes > size and kind not in NO_DATA:
            raise _beyond(name, offset, data, nbytes, size, shard)
        if kind in b"xL":
            if nbytes > MOST_EXTENDED:
                raise Damage(f"{shard!r}: a name or its records at offset {offset:,} take {nbytes:,} bytes", offset)
            content = read_at(data, nbytes)
            if len(content) < nbytes:
                raise _short(content, data, shard)
            if kind == b"L":
                long_name = content.rstrip(b"\0")
            else:
                long_name, pax_size, sparse = _extended(content, offset, shard, long_name)
        elif kind != b"K":
            if kind not in SKIPPED and (kind != b"\0" or not name.endswith(b"/")):  # the oldest archives' folders
                yield name, begin, data, nbytes
            long_name, pax_size, sparse, begin = b"", None, False, after
        offset = after


def _behind_the_end(
    read_at: Callable[[int, int], bytes], offset: int, shard: str, behind: Callable[[int], None]
) -> tuple[int, bytes]:
    """Where an archive begins that is joined to one that ends before this offset, and its first header; no bytes if
    there is none.

    Raises:
        Damage: there is a header, but its checksum is wrong.
    """
    while (block := read_at(offset, BLOCK)) == EMPTY:
        offset += BLOCK
    if len(block) == BLOCK and has_header(block):
        return offset, block
    if block[257:262] == b"ustar":
        raise _no_header(block, offset, shard)
    if block.strip(b"\0"):
        behind(offset)
    return offset, b""


def has_header(block: bytes) -> bool:
    """Whether these 512 bytes are a header, or an empty block, as an archive without members has it."""
    try:
        return len(block) == BLOCK and (block == EMPTY or _sum_is_right(block))
    except ValueError:
        return False


def _sum_is_right(block: bytes) -> bool:
    # Adler's low half is 1 + the sum of the bytes, modulo 65521: 0.3 µs, where sum() takes 3.
    said = _number(block[148:156])
    if zlib.adler32(block) & 0xFFFF == (1 + said - 256 + sum(block[148:156])) % 65521:
        return True
    return said == 256 + sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:])  # old writers


def _number(field: bytes) -> int:
    """A number in octal digits, or as GNU has it for large ones, in base 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field[1:], "big") - (1 << 8 * (len(field) - 1))
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        return block[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _extended(content: bytes, offset: int, shard: str, name: bytes) -> tuple[bytes, int | None, bool]:
    """The path and the size that pax records give the next member, if they do; and whether it is sparse."""
    at, nbytes, sparse = 0, None, False
    while at < len(content) and content[at]:
        length, space, _ = content[at : at + 24].partition(b" ")
        if not space or not length.isdigit() or not 4 < at + int(length) <= len(content) or not int(length):
            raise Damage(f"{shard!r}: the pax records at offset {offset:,} are damaged", offset)
        key, _, value = content[at + len(length) + 1 : at + int(length) - 1].partition(b"=")
        if key == b"path":
            name = value.rstrip(b"\0")
        elif key == b"size":
            nbytes = _pax_size(value, offset, shard)
        elif key.startswith(b"GNU.sparse"):
            sparse = True
        at += int(length)
    return name, nbytes, sparse


def _pax_size(value: bytes, offset: int, shard: str) -> int:
    if len(value) > MOST_DIGITS or not value.removeprefix(b"-").isdigit():
        shown = repr(value if len(value) <= MOST_DIGITS else value[:MOST_DIGITS] + b"...")
        raise Damage(
            f"{shard!r}: the pax records at offset {offset:,} say that the next member has a size of {shown}, which is "
            "no number of bytes; the archive is damaged, make it again",
            offset,
        )
    return int(value)


def _no_header(block: bytes, offset: int, shard: str) -> Damage:
    if offset:
        return Damage(
            f"{shard!r}: at offset {offset:,} a member's header was expected, but its checksum is wrong (it begins "
            f"with {block[:16]!r}); the archive is damaged, make it again",
            offset,
        )
    return Damage(
        f"{shard!r} is no tar archive: it begins with {block[:16]!r}, where the header of its first member, with a "
        "right checksum, was expected",
        offset,
    )


def _short(block: bytes, offset: int, shard: str) -> Damage:
    if not offset and not block:
        return Damage(f"{shard!r} is no tar archive: it has 0 bytes; one without members has two blocks of zeros", 0)
    if not offset and not has_header(block):
        return Damage(f"{shard!r} is no tar archive: it has {len(block)} bytes that begin with {block[:16]!r}", 0)
    return Damage(
        f"{shard!r} is cut off at {offset + len(block):,} bytes, in the headers of a member at offset {offset:,}",
        offset,
    )


def _beyond(name: bytes, offset: int, data: int, nbytes: int, size: int, shard: str) -> Damage:
    if nbytes > size:
        return Damage(
            f"{shard!r}: the member {_text(name)} at offset {offset:,} has a size of {nbytes:,} bytes, more than the "
            f"whole archive ({size:,}): it is cut off, or its header is damaged",
            offset,
            name,
        )
    return Damage(
        f"{shard!r} is cut off at {size:,} bytes: the member {_text(name)} at offset {offset:,} has {nbytes:,} bytes "
        f"from {data:,} on, of which {max(0, size - data):,} are there",
        offset,
        name,
    )


def _text(name: bytes) -> str:
    return f"'{visible(name)}'"
