"""Crops cut out of a JPEG by its **index**, which says where in the coded bits the blocks of every few columns begin.

The index is a segment of the file (APP10) that `indexing` makes; the coded data are anybody's. For each row of MCUs it
has points: at which bit the MCU begins, and what its DC coefficients are predicted from. The bits from a point to
another one are a **stretch** of MCUs, and the stretches that a region touches are a smaller picture: one of its rows
each. But a row begins with other predictors than the one above ends with, and within a byte, and shifting all bits
would take longer than decoding saves. So a **joint** stands between two stretches: an MCU of our own, whose DC
differences lead to the right predictors, and whose AC coefficients are chosen so that the bits behind it keep their
places in their bytes. Bytes are copied as they are.

The joints are a column more, at the left, which nothing of the region is interpolated from: a point further left is
there. Only at the picture's left edge there is none, where chroma is interpolated. There the joints stand at the end
of the rows, at the right; and as the first one has to come before the first row, a row of such MCUs is put above it,
unless the picture begins there, and no joint is needed. The cut has no restart markers: libjpeg-turbo decodes a scan
that has some 4% more slowly.

Layout of the segment, little-endian: `INDEX`, `FIXED`, of each kind of component how it is coded in a joint, the bit at
which each row of MCUs begins, as uint32 (from the scan's first byte, stuffed bytes counted), and the points. Those of a
row are one behind the other, the first at its left edge; behind all stands one more, where the last row ends.

Pure functions of the bytes, for workers. What does not fit gives None, and is decoded as if there were no index.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from gpuload.decode.grid import Cut, Grid, Region, is_interpolated, mcu_size, mcus, scan_start
from gpuload.decode.jpeg_header import EOI, INDEX, JpegHeader

__all__ = [
    "CATEGORIES",
    "CODES",
    "FIXED",
    "PADDINGS",
    "ROWS",
    "SIZES",
    "WORD",
    "Index",
    "blocks_of",
    "cut_by_index",
    "digest",
    "is_intact",
    "point_type",
    "read_index",
]

# CRC-32 of all that follows in the segment; `digest`; bytes of the scan; MCUs from a point to the next; bytes of the
# three numbers of a point; how many kinds of components; that of each; for how few bits there is a padding.
FIXED: Final = struct.Struct("<IIIHBBBBBBBB")
WORD: Final = 64  # bits of a block in a joint
CATEGORIES: Final = 12  # of a DC difference in 8-bit JPEGs
SIZES, CODES, PADDINGS = np.dtype("u1"), np.dtype("<u4"), np.dtype("<i8")
ROWS: Final = np.dtype("<u4")
ENDS: Final = 256  # bytes of the scan at its begin and at its end that the digest holds
# For a difference, also a negative one: its category, and the bits that it is coded by.
_ALL: Final = np.concatenate((np.arange(2048), np.arange(-2048, 0)))
CATEGORY: Final = np.frexp(np.abs(_ALL))[1].astype(np.int64)
VALUE: Final = np.where(_ALL < 0, _ALL + (1 << CATEGORY) - 1, _ALL)


Piece = bytes | bytearray | memoryview


class Index(NamedTuple):
    """An index as read from a file, of which nothing is checked yet.

    `mcu` is the size of an MCU, `blocks` how many it has of each component, `spacing` how many MCUs a column of the
    grid has, `scan` where the scan begins and ends, `joints_at` where the segment says how joints are coded, `end`
    where it ends.
    """

    grid: Grid
    mcu: tuple[int, int]
    blocks: tuple[int, ...]
    spacing: int
    scan: tuple[int, int]
    fields: tuple[int, ...]
    joints_at: int
    end: int


def read_index(data: bytes, header: JpegHeader) -> Index | None:
    """The index of a file, None where it has none, or one that cannot be of this file."""
    at = header.index_at
    if not at or not header.plain or not header.single_scan or header.restart_interval:
        return None
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    at += 4 + len(INDEX)
    if end < at + FIXED.size or end > header.frame_at:
        return None
    fields = FIXED.unpack_from(data, at)
    spacing, start = fields[3], scan_start(data, header)
    stop = start + fields[2]
    mcu = mcu_size(data, header)
    if not spacing or not mcu[0] or not mcu[1] or data[stop : stop + 2] != EOI:
        return None
    in_row, rows = mcus(header, mcu)
    grid = Grid(-(-in_row // spacing), rows, spacing * mcu[0], mcu[1])
    return Index(grid, mcu, blocks_of(data, header), spacing, (start, stop), fields, at + FIXED.size, end)


def blocks_of(data: bytes, header: JpegHeader) -> tuple[int, ...]:
    """How many blocks of each component an MCU has."""
    if header.components == 1:
        return (1,)
    factors = data[header.frame_at + 11 : header.frame_at + 10 + 3 * header.components : 3]
    return tuple((factor >> 4) * (factor & 15) for factor in factors)


def joint_bytes(kinds: int, lowest: int) -> int:
    """How many bytes say how so many kinds of components are coded in a joint.

    For each category of DC difference (`CATEGORIES`) the bits that it takes, of one kind after the other (`SIZES`),
    then its code with zeros for the bits of the difference (`CODES`). Then, for `lowest` to 63 bits, the AC
    coefficients and the end of block that take as many (`PADDINGS`).
    """
    return kinds * (CATEGORIES * (SIZES.itemsize + CODES.itemsize) + (WORD - lowest) * PADDINGS.itemsize)


@lru_cache(maxsize=64)
def point_type(components: int, offset: int, first: int, others: int) -> np.dtype[np.void]:
    """A point: how many bits it is behind the first one of its row, and from what the DC coefficients of the first
    component and of the others are predicted there; numbers of so many bytes."""
    return np.dtype([("offset", f"<u{offset}"), ("first", f"<i{first}"), ("others", f"<i{others}", (components - 1,))])


def is_intact(data: bytes, header: JpegHeader, index: Index) -> bool:
    """Whether an index is as it was made, and made for this file, as far as can be seen without reading all of it."""
    grid, (start, stop), view = index.grid, index.scan, memoryview(data)
    return (
        crc32(view[index.joints_at - FIXED.size + 4 : index.end]) == index.fields[0]
        and digest(view[index.end : start], view[start:stop]) == index.fields[1]
        and index.joints_at
        + joint_bytes(index.fields[7], index.fields[11])
        + ROWS.itemsize * (grid.rows + 1)
        + point_type(header.components, *index.fields[4:7]).itemsize * (grid.columns * grid.rows + 1)
        == index.end
    )


def digest(header: bytes | memoryview, scan: bytes | memoryview) -> int:
    """By what an index knows its file again, beside the length of the scan: the segments between the two, and the
    scan's first bytes and last."""
    return crc32(scan[-ENDS:], crc32(scan[:ENDS], crc32(header)))


def cut_by_index(
    data: bytes, header: JpegHeader, region_tlhw: Region, index: Index, part: tuple[int, int, int, int]
) -> Cut | None:
    """The JPEG of some columns and rows of an index's grid; None where the index is not this file's.

    Args:
        data, header, region_tlhw: as for `cut`.
        index: what `read_index` gives.
        part: the first column, the one behind the last, the first row, and the one behind the last.
    """
    try:
        return _cut(data, header, region_tlhw, index, part) if is_intact(data, header, index) else None
    except (IndexError, TypeError, ValueError):  # it has the right checksum, and was not made by `indexing`
        return None


def _cut(
    data: bytes, header: JpegHeader, region_tlhw: Region, index: Index, part: tuple[int, int, int, int]
) -> Cut | None:
    x0, x1, y0, y1 = part
    grid, (start, stop), view = index.grid, index.scan, memoryview(data)

    # Where each stretch begins and ends, in bits, and from what is predicted there.
    number = y1 - y0
    at = index.joints_at + joint_bytes(index.fields[7], index.fields[11])
    rows = np.frombuffer(data, ROWS, grid.rows + 1, at)
    kind_of_point = point_type(header.components, *index.fields[4:7])
    points = np.frombuffer(data, kind_of_point, grid.columns * grid.rows + 1, at + rows.nbytes)
    place = y0 * grid.columns + x0
    begins = points[place : place + (number - 1) * grid.columns + 1 : grid.columns]
    place += x1 - x0
    ends = points[place : place + (number - 1) * grid.columns + 1 : grid.columns]
    below = x1 == grid.columns  # a row ends where the next one begins
    bits = np.empty((2, number), np.int64)
    np.add(rows[y0:y1], begins["offset"], out=bits[0])
    np.add(rows[y0 + below : y1 + below], ends["offset"], out=bits[1])
    differences = np.zeros((sum(index.blocks), number + 1), np.int64)
    differences[0, :-1] = begins["first"]
    differences[0, 1:-1] -= ends["first"][:-1]
    if header.components > 1:
        others = slice(index.blocks[0], None, index.blocks[1])
        differences[others, :-1] = begins["others"].T
        differences[others, 1:-1] -= ends["others"][:-1].T

    raw = np.frombuffer(data, np.uint8, stop - start + 1, start)
    bytes_at = bits >> 3
    within = bits & 7
    edges = raw[bytes_at]
    made = _joints(data, index, differences, within, edges.astype(np.int64))
    bytes_at += start
    bytes_at[0] += 1  # the first byte is in the joint
    if 0xFF in edges[0].tobytes():
        bytes_at[0] += edges[0] == 0xFF  # so is one that was stuffed behind it
    firsts, lasts = bytes_at.tolist()
    stretches = [view[each] for each in map(slice, firsts, lasts)]
    if sum(map(len, stretches)) > stop - start:  # nor was this one: the cut would be as large as somebody likes
        return None

    at_left = x0 > 0 or not is_interpolated(index.mcu)[0]
    whole = not at_left and below
    above = not at_left and y0 > 0
    width = (header.width if below else x1 * grid.width) - x0 * grid.width + index.mcu[0] * (not whole)
    height = min(header.height, y1 * grid.height) - y0 * grid.height + index.mcu[1] * above
    gone = index.end - header.index_at
    head = bytearray().join((view[: header.index_at], view[index.end : start]))
    struct.pack_into(">HH", head, header.frame_at - gone + 5, height, width)
    pieces: list[Piece] = [head]
    if above:
        pieces += [_plain(data, index) * (-(-width // index.mcu[0]) - 1), made[0]]
    elif not at_left:
        stretches[0] = view[start : lasts[0]]
    if at_left:
        pieces += _in_turn(made[:-1], stretches)
    elif whole:
        pieces += [stretches[0], view[lasts[0] : lasts[-1]]]
    else:
        pieces += _in_turn(stretches, made[1:])
    if at_left or whole:
        pieces.append(_filled(int(edges[1, -1]), int(within[1, -1])))
    pieces.append(EOI)
    top, left, *size = region_tlhw
    top, left = top - y0 * grid.height + index.mcu[1] * above, left - x0 * grid.width + index.mcu[0] * at_left
    changed = header._replace(
        height=height,
        width=width,
        exif=b"",
        xmp=b"",
        frame_at=header.frame_at - gone,
        first_scan=header.first_scan - gone,
        index_at=0,
    )
    return Cut(b"".join(pieces), changed, (top, left, size[0], size[1]))


def _in_turn(one: Sequence[Piece], other: Sequence[Piece]) -> list[Piece]:
    pieces: list[Piece] = [b""] * (2 * len(one))
    pieces[::2], pieces[1::2] = one, other
    return pieces


def _joints(data: bytes, index: Index, differences: np.ndarray, within: np.ndarray, edges: np.ndarray) -> list[bytes]:
    """The bytes before each stretch and behind the last: the bits that the stretch before has in its last byte, an MCU,
    and the bits that the stretch has in its first byte.

    Each block is a word of 64 bits, the first one with the bits before it, the last one with those behind it.

    Args:
        differences: of DC coefficients, int64 (blocks, joints).
        within: at which bits of a byte stretches begin, and end, int64 (2, stretches).
        edges: these bytes, int64.
    """
    kinds, lowest = index.fields[7], index.fields[11]
    at = index.joints_at
    sizes = np.frombuffer(data, SIZES, kinds * CATEGORIES, at)
    codes = np.frombuffer(data, CODES, kinds * CATEGORIES, at := at + sizes.nbytes)
    paddings = np.frombuffer(data, PADDINGS, kinds * (WORD - lowest), at + codes.nbytes)
    joint, padding = _places(index.fields[8:11], index.blocks, lowest)
    which = CATEGORY[differences] + joint
    left = np.subtract(WORD, sizes[which], dtype=np.int64)
    low = 0xFF >> within
    ours = edges & low
    left[0, 1:] -= within[1]
    words = (codes[which] | VALUE[differences]) << left
    unused = 8 - within[0]
    left[-1, :-1] -= unused
    filled = paddings[left + padding]
    filled[-1, :-1] <<= unused
    words |= filled
    words[0, 1:] |= (edges[1] ^ ours[1]) << WORD - 8
    words[-1, :-1] |= ours[0]
    flat = words.T.astype(">i8", "C")
    made = flat.view(f"V{flat.itemsize * len(words)}").ravel().tolist()
    return [piece.replace(b"\xff", b"\xff\0") for piece in made] if 0xFF in flat.tobytes() else made


@lru_cache(maxsize=64)
def _places(kinds: tuple[int, ...], blocks: tuple[int, ...], lowest: int) -> tuple[np.ndarray, np.ndarray]:
    """Where among the sizes and codes, and among the paddings, those of each block are, (blocks, 1)."""
    column = np.repeat(kinds[: len(blocks)], blocks)[:, None]
    return column * CATEGORIES, column * (WORD - lowest) - lowest


def _plain(data: bytes, index: Index) -> bytes:
    """An MCU of a whole number of bytes that changes no predictor."""
    nothing = np.zeros((2, 0), np.int64)
    return _joints(data, index, np.zeros((sum(index.blocks), 1), np.int64), nothing, nothing)[0]


def _filled(last: int, bits: int) -> bytes:
    """The last byte of a scan, of which so many bits are used, filled up with ones."""
    if not bits:
        return b""
    last |= 0xFF >> bits
    return b"\xff\0" if last == 0xFF else bytes((last,))
