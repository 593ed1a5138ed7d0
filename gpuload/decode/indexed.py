"""Crops cut out of a JPEG by its **index**, which says where in the coded bits the blocks of every few columns begin.

The index is a segment of the file (APP10) that `packing.jpeg_indexing` makes; the coded data are anybody's. For each
row of MCUs it has points: at which bit the MCU begins, and what its DC coefficients are predicted from. The bits from a
point to another one are a **stretch** of MCUs, and the stretches that a region touches are a smaller picture: one of
its rows each. But a row begins with other predictors than the one above ends with, and within a byte, and shifting all
bits would take longer than decoding saves. So a **joint** stands between two stretches: an MCU of our own, whose DC
differences lead to the right predictors, and whose AC coefficients are chosen so that the bits behind it keep their
places in their bytes. Bytes are copied as they are.

The joints are a column more, at the left, which nothing of the region is interpolated from: a point further left is
there. Only at the picture's left edge there is none, where chroma is interpolated. There the joints stand at the end
of the rows, at the right; and as the first one has to come before the first row, a row of such MCUs is put above it,
unless the picture begins there, and no joint is needed. The cut has no restart markers: libjpeg-turbo decodes a scan
that has some 4% more slowly.

Layout of the segment, little-endian: `INDEX`, `FIXED`, of each kind of component how it is coded in a joint, and the
points. Those of a row are one behind the other, the first at its left edge; behind all stands one more, where the last
row ends. A point is a number of as few bytes as hold it. From its lowest bit on: at which bit the MCU begins (from the
scan's first byte, stuffed bytes counted), from what the first component is predicted, and from what the others are.

Pure functions of the bytes, for workers. What does not fit gives None, and is decoded as if there were no index.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from gpuload.decode.grid import Cut, Grid, is_interpolated
from gpuload.decode.header import EOI, INDEX, JpegHeader, Region, mcu_size, mcus, sampling, scan_start

__all__ = [
    "CATEGORIES",
    "CODES",
    "FIXED",
    "PADDINGS",
    "SIZES",
    "WORD",
    "Index",
    "Wanted",
    "blocks_of",
    "cut_by_index",
    "digest",
    "is_intact",
    "point_bytes",
    "read_index",
]

# CRC-32 of all that follows in the segment; `digest`; bytes of the scan; MCUs from a point to the next; how many bits
# of a point say where it is, from what the first component is predicted, and each of the others; how many kinds of
# components; that of each; for how few bits there is a padding.
FIXED: Final = struct.Struct("<IIIHBBBBBBBB")
WORD: Final = 64  # bits of a block in a joint
POINT: Final = 64  # bits of a point at most
CATEGORIES: Final = 12  # of a DC difference in 8-bit JPEGs
SIZES, CODES, PADDINGS = np.dtype("u1"), np.dtype("<u4"), np.dtype("<i8")
POINTS: Final = np.dtype("<i8")  # as they are read, with bytes of what follows
ENDS: Final = 256  # bytes of the scan at its begin and at its end that the digest holds
# For a difference, also a negative one: its category, and the bits that it is coded by.
_ALL: Final = np.concatenate((np.arange(2048), np.arange(-2048, 0)))
CATEGORY: Final = np.frexp(np.abs(_ALL))[1].astype(np.int64)
VALUE: Final = np.where(_ALL < 0, _ALL + (1 << CATEGORY) - 1, _ALL)
CATEGORY[CATEGORY == CATEGORIES] = 1 << 32  # of -2048, which 8-bit JPEGs have not: a place in no table
NOTHING: Final = np.zeros(1, np.int64)
LOWER: Final = 0xFF >> np.arange(8)  # the bits of a byte from a bit on

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
    if point_bytes(header.components, *fields[4:7]) > POINT // 8 or max(fields[8:11]) >= fields[7]:
        return None
    in_row, rows = mcus(header, mcu)
    grid = Grid(-(-in_row // spacing), rows, spacing * mcu[0], mcu[1])
    return Index(grid, mcu, blocks_of(data, header), spacing, (start, stop), fields, at + FIXED.size, end)


def blocks_of(data: bytes, header: JpegHeader) -> tuple[int, ...]:
    """How many blocks of each component an MCU has."""
    return (1,) if header.components == 1 else _blocks(sampling(data, header))


@lru_cache(maxsize=64)
def _blocks(factors: bytes) -> tuple[int, ...]:
    return tuple((factor >> 4) * (factor & 15) for factor in factors)


def joint_bytes(kinds: int, lowest: int) -> int:
    """How many bytes say how so many kinds of components are coded in a joint.

    For each category of DC difference (`CATEGORIES`) the bits that it takes, of one kind after the other (`SIZES`),
    then its code with zeros for the bits of the difference (`CODES`). Then, for `lowest` to 63 bits, the AC
    coefficients and the end of block that take as many (`PADDINGS`).
    """
    return kinds * (CATEGORIES * (SIZES.itemsize + CODES.itemsize) + (WORD - lowest) * PADDINGS.itemsize)


def point_bytes(components: int, place: int, first: int, others: int) -> int:
    """The bytes of a point whose numbers have so many bits."""
    return (place + first + (components - 1) * others + 7) // 8


@lru_cache(maxsize=64)
def _shifts(components: int, place: int, first: int, others: int) -> tuple[int, ...]:
    """What is left of a point to its place; and by how much it is shifted up, and then down, to the number of each
    component."""
    widths = [first] + [others] * (components - 1)
    return (1 << place) - 1, *(POINT - place - end for end in accumulate(widths)), *(POINT - width for width in widths)


def is_intact(data: bytes, header: JpegHeader, index: Index) -> bool:
    """Whether an index is as it was made, and made for this file, as far as can be seen without reading all of it."""
    grid, (start, stop), view = index.grid, index.scan, memoryview(data)
    return (
        crc32(view[index.joints_at - FIXED.size + 4 : index.end]) == index.fields[0]
        and digest(view[index.end : start], view[start:stop]) == index.fields[1]
        and index.joints_at
        + joint_bytes(index.fields[7], index.fields[11])
        + point_bytes(header.components, *index.fields[4:7]) * (grid.columns * grid.rows + 1)
        == index.end
    )


def digest(header: bytes | memoryview, scan: bytes | memoryview) -> int:
    """By what an index knows its file again, beside the length of the scan: the segments between the two, and the
    scan's first bytes and last."""
    return crc32(scan[-ENDS:], crc32(scan[:ENDS], crc32(header)))


class Wanted(NamedTuple):
    """What is to be cut: `data`, `header` and `region_tlhw` as for `cut`, `index` as `read_index` gives it, and `part`:
    the first column of its grid, the one behind the last, the first row, and the one behind the last."""

    data: bytes
    header: JpegHeader
    region_tlhw: Region
    index: Index
    part: tuple[int, int, int, int]


def cut_by_index(wanted: Sequence[Wanted]) -> list[Cut | None]:
    """The JPEGs of some columns and rows of indexes' grids; None where an index is not its file's.

    Several at once take less than half the time: NumPy takes hardly longer for the joints of many files than of one.
    """
    alike: dict[tuple[int, ...], list[int]] = {}  # with as many blocks
    found: list[Cut | None] = [None] * len(wanted)
    for number, one in enumerate(wanted):
        if is_intact(one.data, one.header, one.index):
            alike.setdefault(one.index.blocks, []).append(number)
    for numbers in alike.values():
        for number, made in zip(numbers, _cut_or_not([wanted[number] for number in numbers]), strict=True):
            found[number] = made
    return found


def _cut_or_not(wanted: list[Wanted]) -> list[Cut | None]:
    try:
        return _cut(wanted)
    except (IndexError, TypeError, ValueError):  # not made by `jpeg_indexing`, for all its right checksum
        return [None] if len(wanted) == 1 else [made for one in wanted for made in _cut_or_not([one])]


def _cut(wanted: list[Wanted]) -> list[Cut | None]:
    """Cut files whose MCUs have as many blocks."""
    # Where each stretch begins and ends. All points of a file in turn, with nothing before and behind: so two that
    # follow on each other are the end of a stretch and the begin of the next one.
    read: list[np.ndarray] = []
    for data, header, _, (grid, _, _, _, _, fields, joints_at, _), (x0, x1, y0, y1) in wanted:
        nbytes = point_bytes(header.components, *fields[4:7])
        at = joints_at + joint_bytes(fields[7], fields[11]) + (y0 * grid.columns + x0) * nbytes
        steps = grid.columns * nbytes, (x1 - x0) * nbytes
        read += NOTHING, np.ndarray((y1 - y0, 2), POINTS, data, at, steps).ravel(), NOTHING
    points = np.concatenate(read)
    counts = [2 * (y1 - y0) + 2 for *_, (_, _, y0, y1) in wanted]
    ends = list(accumulate(counts))
    files = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    components = wanted[0].header.components
    shifts = np.array([_shifts(components, *one.index.fields[4:7]) for one in wanted]).T.repeat(counts, 1)
    bits = points & shifts[0]
    predicted = points << shifts[1 : 1 + components]
    predicted >>= shifts[1 + components :]

    bytes_at = bits >> 3
    bits &= 7
    of_files = zip(wanted, files, strict=True)
    edges = np.concatenate(
        [
            np.frombuffer(data, np.uint8, stop - start + 1, start)[bytes_at[part]]
            for (data, _, _, (_, _, _, _, (start, stop), *_), _), part in of_files
        ]
    )
    made = _joints(wanted, np.array(counts) // 2, predicted, bits, edges.astype(np.int64))
    bytes_at[1::2] += 1  # the first byte is in the joint
    bytes_at[1::2] += edges[1::2] == 0xFF  # so is one that was stuffed behind it
    places = bytes_at.tolist()
    return [
        _put_together(one, places[part], made[part.start // 2 : part.stop // 2], _filled(int(edges[at]), int(bits[at])))
        for one, part, at in zip(wanted, files, (end - 2 for end in ends), strict=True)
    ]


def _put_together(wanted: Wanted, ends: list[int], made: list[bytes], last: bytes) -> Cut | None:
    """The JPEG of a file.

    Args:
        wanted: what is to be cut.
        ends: of a number without meaning, and of each stretch, where it begins and ends, from the scan's first byte.
        made: the joints before each stretch, and the one behind the last.
        last: the last byte, where there is no joint behind the last stretch.
    """
    data, header, region_tlhw, index, (x0, x1, y0, y1) = wanted
    grid, (start, stop), scan = index.grid, index.scan, memoryview(data)[index.scan[0] :]
    below = x1 == grid.columns  # a row ends where the next one begins
    lasts = ends[2::2]
    stretches: list[Piece] = [scan[one:other] for one, other in zip(ends[1::2], lasts, strict=False)]
    if sum(map(len, stretches)) > stop - start:  # nor was this one: the cut would be as large as somebody likes
        return None

    at_left = x0 > 0 or not is_interpolated(index.mcu)[0]
    whole = not at_left and below
    above = not at_left and y0 > 0
    width = (header.width if below else x1 * grid.width) - x0 * grid.width + index.mcu[0] * (not whole)
    height = min(header.height, y1 * grid.height) - y0 * grid.height + index.mcu[1] * above
    gone = index.end - header.index_at
    head = bytearray(data[: header.index_at])
    head += data[index.end : start]
    struct.pack_into(">HH", head, header.frame_at - gone + 5, height, width)
    pieces: list[Piece] = [head]
    if above:
        pieces += [_plain(wanted) * (-(-width // index.mcu[0]) - 1), made[0]]
    elif not at_left:
        stretches[0] = scan[: lasts[0]]
    if at_left:
        pieces += _in_turn(made[:-1], stretches)
    elif whole:
        pieces += [stretches[0], scan[lasts[0] : lasts[-1]]]
    else:
        pieces += _in_turn(stretches, made[1:])
    if at_left or whole:
        pieces.append(last)
    pieces.append(EOI)
    top, left, *size = region_tlhw
    top, left = top - y0 * grid.height + index.mcu[1] * above, left - x0 * grid.width + index.mcu[0] * at_left
    frame, bits, components = header.frame, header.bits, header.components
    first_scan, frame_at = header.first_scan - gone, header.frame_at - gone
    changed = JpegHeader(frame, bits, height, width, components, first_scan, True, b"", b"", header.complete, frame_at)
    return Cut(b"".join(pieces), changed, (top, left, size[0], size[1]))


def _in_turn(one: Sequence[Piece], other: Sequence[Piece]) -> list[Piece]:
    pieces: list[Piece] = [b""] * (2 * len(one))
    pieces[::2], pieces[1::2] = one, other
    return pieces


def _joints(
    wanted: list[Wanted], counts: np.ndarray, predicted: np.ndarray, bits: np.ndarray, edges: np.ndarray
) -> list[bytes]:
    """The bytes before each stretch and behind a file's last: the bits that the stretch before has in its last byte, an
    MCU, and the bits that the stretch has in its first byte.

    Each block is a word of 64 bits, the first one with the bits before it, the last one with those behind it.

    Args:
        wanted: of the files.
        counts: of joints of each file.
        predicted: from what DC coefficients are predicted at the end of each stretch and at the begin of the next one,
            in turn, int64 (components, 2 · joints).
        bits: at which bits of a byte that is, int64 (2 · joints).
        edges: these bytes, int64.
    """
    tables = [_tables(one) for one in wanted]
    sizes, codes, paddings = (
        np.frombuffer(b"".join(parts), dtype).astype(np.int64)
        for parts, dtype in zip(zip(*tables, strict=True), (SIZES, CODES, PADDINGS), strict=True)
    )
    joint, padding, lowest = _places(wanted)
    behind = np.add.accumulate(counts) - 1  # the last joint of each file: nothing is behind it
    differences = predicted[:, 1::2] - predicted[:, ::2]
    differences[:, behind] = 0
    blocks = wanted[0].index.blocks
    if len(joint) > len(differences):  # a component's other blocks are predicted from its first one
        some, differences = differences, np.zeros((len(joint), differences.shape[1]), np.int64)
        differences[[0, *accumulate(blocks[:-1])]] = some
    which = CATEGORY[differences]
    which += joint.repeat(counts, 1)
    left = WORD - sizes[which]
    left[0] -= bits[::2]
    words = codes[which]
    words |= VALUE[differences]
    words <<= left
    ours = edges & LOWER[bits]
    edges ^= ours
    unused = 8 - bits[1::2]
    unused[behind] = ours[2 * behind + 1] = 0
    left[-1] -= unused
    if (left < lowest.repeat(counts)).any() or left.max() >= WORD:  # a place in another file's table
        raise ValueError("no padding has as many bits")
    left += padding.repeat(counts, 1)
    filled = paddings[left]
    filled[-1] <<= unused
    words |= filled
    words[0] |= edges[::2] << WORD - 8
    words[-1] |= ours[1::2]
    flat = words.T.astype(">i8", "C")
    pieces = flat.view(f"V{flat.itemsize * len(words)}").ravel().tolist()
    return [piece.replace(b"\xff", b"\xff\0") for piece in pieces]


def _tables(wanted: Wanted) -> tuple[bytes, bytes, bytes]:
    """How a file's joints are coded: see `joint_bytes`."""
    data, at, kinds, lowest = wanted.data, wanted.index.joints_at, wanted.index.fields[7], wanted.index.fields[11]
    codes_at = at + kinds * CATEGORIES * SIZES.itemsize
    paddings_at = codes_at + kinds * CATEGORIES * CODES.itemsize
    end = paddings_at + kinds * (WORD - lowest) * PADDINGS.itemsize
    return data[at:codes_at], data[codes_at:paddings_at], data[paddings_at:end]


def _places(wanted: list[Wanted]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where among all files' sizes and codes, and among the paddings, those of each block are, (blocks, files); and for
    how few bits each file has a padding."""
    joint: list[list[int]] = []
    padding: list[list[int]] = []
    lowests: list[int] = []
    kinds_before = paddings_before = 0
    for one in wanted:
        kinds, *kind_of, lowest = one.index.fields[7:]
        of_blocks = [kind for kind, count in zip(kind_of, one.index.blocks, strict=False) for _ in range(count)]
        joint.append([(kinds_before + kind) * CATEGORIES for kind in of_blocks])
        padding.append([paddings_before + kind * (WORD - lowest) - lowest for kind in of_blocks])
        lowests.append(lowest)
        kinds_before, paddings_before = kinds_before + kinds, paddings_before + kinds * (WORD - lowest)
    return np.array(joint).T, np.array(padding).T, np.array(lowests)


def _plain(wanted: Wanted) -> bytes:
    """An MCU of a whole number of bytes that changes no predictor."""
    nothing = np.zeros((len(wanted.index.blocks), 2), np.int64)
    return _joints([wanted], np.array([1]), nothing, nothing[0], nothing[0].copy())[0]


def _filled(last: int, bits: int) -> bytes:
    """The last byte of a scan, of which so many bits are used, filled up with ones."""
    if not bits:
        return b""
    last |= 0xFF >> bits
    return b"\xff\0" if last == 0xFF else bytes((last,))
