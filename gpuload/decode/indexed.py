"""Crops cut out of a JPEG by its **index**, which says where in the coded bits the blocks of every few columns begin.

The index is a segment of the file (APP10) that `packing.jpeg_cuttable` makes; the coded data are anybody's. For each
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

Layout of the segment, little-endian: `INDEX`, `FIXED`, how joints are coded, and the points. For joints, of each kind
of component in turn: for each category of DC difference (`CATEGORIES`) the bits that it takes (`SIZES`), then its code
with zeros for the bits of the difference (`CODES`); and then, for `lowest` to 63 bits, the AC coefficients and the end
of block that take as many (`PADDINGS`). The points of a row are one behind the other, the first at its left edge;
behind all stands one more, where the last row ends. A point is a number of as few bytes as hold it. From its lowest bit
on: at which bit the MCU begins (from the scan's first byte, stuffed bytes counted), from what the first component is
predicted, and from what the others are.

Pure functions of the bytes, for workers. What does not fit gives None, and is decoded as if there were no index.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Final, Self
from zlib import crc32

import numpy as np

from gpuload.decode.grid import Cut, Grid, Part, Piece
from gpuload.decode.header import EOI, INDEX, JpegHeader, scan_start

__all__ = [
    "CATEGORIES", "CODES", "FIXED", "PADDINGS", "POINT", "POINTS", "SIZES", "WORD", "Index", "digest", "point_bytes",
]  # fmt: skip

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
COST_NS: Final = 120_000  # of cutting, measured: see `cut`


@dataclass
class Index(Grid):
    """An index as read from a file; a cell is a stretch of a row's MCUs.

    Attributes:
        widths: how many components there are, and the bits of a point's numbers: see `point_bytes`.
        kinds, kind_of, lowest: how many kinds of components, that of each, and for how few bits there is a padding.
        start, stop: where the scan begins and ends.
        joints_at, points_at, end: where the segment says how joints are coded, where its points are, and where it ends.
        tables: how joints are coded: `SIZES`, `CODES` and `PADDINGS`.
    """

    widths: tuple[int, int, int, int]
    kinds: int
    kind_of: list[int]
    lowest: int
    start: int
    stop: int
    joints_at: int
    points_at: int
    end: int
    tables: tuple[bytes, bytes, bytes]

    @classmethod
    def read(cls, data: bytes, header: JpegHeader, mcu: tuple[int, int], blocks: tuple[int, ...]) -> Self | None:
        """Return the index of a JPEG that has one; None if it cannot be of this file."""
        at = header.index_at
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        at += 4 + len(INDEX)
        if end < at + FIXED.size or end > header.frame_at:
            return None
        _, _, nbytes, spacing, place, first, others, kinds, *kind_of, lowest = FIXED.unpack_from(data, at)
        start, joints_at, widths = scan_start(data, header), at + FIXED.size, (header.components, place, first, others)
        stop = start + nbytes
        if not spacing or data[stop : stop + 2] != EOI:
            return None
        if point_bytes(*widths) > POINT // 8 or max(kind_of) >= kinds:
            return None
        codes_at = joints_at + kinds * CATEGORIES * SIZES.itemsize
        paddings_at = codes_at + kinds * CATEGORIES * CODES.itemsize
        points_at = paddings_at + kinds * (WORD - lowest) * PADDINGS.itemsize
        return cls(
            data, header, mcu, blocks, spacing, 1, COST_NS, widths, kinds, kind_of, lowest, start, stop, joints_at,
            points_at, end, (data[joints_at:codes_at], data[codes_at:paddings_at], data[paddings_at:points_at]),
        )  # fmt: skip

    def is_intact(self) -> bool:
        """Return whether the index is as it was made, and made for this file."""
        view, fixed_at = memoryview(self.data), self.joints_at - FIXED.size
        checksum, known, *_ = FIXED.unpack_from(view, fixed_at)
        return (
            crc32(view[fixed_at + 4 : self.end]) == checksum
            and digest(view[self.end : self.start], view[self.start : self.stop]) == known
            and self.points_at + point_bytes(*self.widths) * (self.columns * self.rows + 1) == self.end
        )

    @classmethod
    def cut(cls, parts: Sequence[Part[Self]]) -> list[Cut | None]:
        # Several at once take less than half the time: NumPy hardly needs longer for the joints of many files.
        try:
            return _cut(parts)
        except (IndexError, TypeError, ValueError):  # not made by `jpeg_cuttable`, for all its right checksum
            return [None] if len(parts) == 1 else [result for part in parts for result in cls.cut([part])]


def point_bytes(components: int, place: int, first: int, others: int) -> int:
    """Return the bytes of a point whose numbers have so many bits."""
    return (place + first + (components - 1) * others + 7) // 8


@lru_cache(maxsize=64)
def _shifts(components: int, place: int, first: int, others: int) -> tuple[int, ...]:
    """Return what is left of a point to its place; and by how much it is shifted up, and then down, to each
    component's number."""
    widths = [first] + [others] * (components - 1)
    return (1 << place) - 1, *(POINT - place - end for end in accumulate(widths)), *(POINT - width for width in widths)


def digest(header: bytes | memoryview, scan: bytes | memoryview) -> int:
    """Return by what an index knows its file again, next to the length of the scan: the segments between the two, and
    the scan's first bytes and last."""
    return crc32(scan[-ENDS:], crc32(scan[:ENDS], crc32(header)))


def _cut(parts: Sequence[Part[Index]]) -> list[Cut | None]:
    """Cut files whose MCUs have as many blocks."""
    # Where each stretch begins and ends. All points of a file in turn, with nothing before and behind: so two that
    # follow on each other are the end of a stretch and the begin of the next one.
    read: list[np.ndarray] = []
    for index, _, x0, x1, y0, y1 in parts:
        nbytes = point_bytes(*index.widths)
        at = index.points_at + (y0 * index.columns + x0) * nbytes
        steps = index.columns * nbytes, (x1 - x0) * nbytes
        read += NOTHING, np.ndarray((y1 - y0, 2), POINTS, index.data, at, steps).ravel(), NOTHING
    points = np.concatenate(read)
    counts = [2 * (y1 - y0) + 2 for *_, y0, y1 in parts]
    ends = list(accumulate(counts))
    files = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    components = parts[0].grid.header.components
    shifts = np.array([_shifts(*part.grid.widths) for part in parts]).T.repeat(counts, 1)
    bits = points & shifts[0]
    predicted = points << shifts[1 : 1 + components]
    predicted >>= shifts[1 + components :]

    bytes_at = bits >> 3
    bits &= 7
    edges = np.concatenate(
        [
            np.frombuffer(index.data, np.uint8, index.stop - index.start + 1, index.start)[bytes_at[places]]
            for (index, *_), places in zip(parts, files, strict=True)
        ]
    )
    joints = _joints(parts, np.array(counts) // 2, predicted, bits, edges.astype(np.int64))
    bytes_at[1::2] += 1  # the first byte is in the joint
    bytes_at[1::2] += edges[1::2] == 0xFF  # so is one that was stuffed behind it
    places = bytes_at.tolist()
    return [
        _put_together(part, places[of], joints[of.start // 2 : of.stop // 2], _filled(int(edges[at]), int(bits[at])))
        for part, of, at in zip(parts, files, (end - 2 for end in ends), strict=True)
    ]


def _put_together(part: Part[Index], ends: list[int], joints: list[bytes], last: bytes) -> Cut | None:
    """Return the JPEG of a part.

    Args:
        part: what is cut.
        ends: of a number without meaning, and of each stretch, where it begins and ends, from the scan's first byte.
        joints: the joints before each stretch, and the one behind the last.
        last: the last byte, where there is no joint behind the last stretch.
    """
    index, _, x0, x1, y0, _ = part
    scan, lasts, (mcu_width, mcu_height) = memoryview(index.data)[index.start :], ends[2::2], index.mcu
    stretches: list[Piece] = [scan[one:other] for one, other in zip(ends[1::2], lasts, strict=False)]
    if sum(map(len, stretches)) > index.stop - index.start:  # nor was this one: the cut would be as large as any
        return None
    coded: list[Piece] = []
    dropped = index.header.index_at, index.end
    if x0 or not index.is_interpolated[0]:
        coded += chain.from_iterable(zip(joints, stretches, strict=False))
        return part.jpeg([*coded, last, EOI], beside=(mcu_width, 0), dropped=dropped)
    is_whole = x1 == index.columns  # a row ends where the next one begins
    right = 0 if is_whole else mcu_width
    if y0:
        width = min(index.header.width, x1 * index.width) + right
        coded += _plain(part) * (-(-width // mcu_width) - 1), joints[0]
    else:
        stretches[0] = scan[: lasts[0]]
    if is_whole:
        coded += stretches[0], scan[lasts[0] : lasts[-1]], last
    else:
        coded += chain.from_iterable(zip(stretches, joints[1:], strict=True))
    return part.jpeg([*coded, EOI], beside=(0, right), above=mcu_height * (y0 > 0), dropped=dropped)


def _joints(
    parts: Sequence[Part[Index]], counts: np.ndarray, predicted: np.ndarray, bits: np.ndarray, edges: np.ndarray
) -> list[bytes]:
    """Return the bytes before each stretch and behind a file's last: the bits that the stretch before has in its last
    byte, an MCU, and the bits that the stretch has in its first byte.

    Each block is a word of 64 bits, the first one with the bits before it, the last one with those behind it.

    Args:
        parts: of the files.
        counts: of joints of each file.
        predicted: from what DC coefficients are predicted at the end of each stretch and at the begin of the next one,
            in turn, int64 (components, 2 · joints).
        bits: at which bits of a byte that is, int64 (2 · joints).
        edges: these bytes, int64.
    """
    tables = zip(*(part.grid.tables for part in parts), strict=True)
    sizes, codes, paddings = (
        np.frombuffer(b"".join(of_files), dtype).astype(np.int64)
        for of_files, dtype in zip(tables, (SIZES, CODES, PADDINGS), strict=True)
    )
    joint, padding, lowest = _places(parts)
    behind = np.add.accumulate(counts) - 1  # the last joint of each file: nothing is behind it
    differences = predicted[:, 1::2] - predicted[:, ::2]
    differences[:, behind] = 0
    blocks = parts[0].grid.blocks
    if len(joint) > len(differences):  # a component's other blocks are predicted from its first one
        coded, differences = differences, np.zeros((len(joint), differences.shape[1]), np.int64)
        differences[[0, *accumulate(blocks[:-1])]] = coded
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


def _places(parts: Sequence[Part[Index]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where among all files' sizes and codes, and among the paddings, those of each block are, (blocks, files);
    and for how few bits each file has a padding."""
    joint: list[list[int]] = []
    padding: list[list[int]] = []
    lowests: list[int] = []
    kinds_before = paddings_before = 0
    for index, *_ in parts:
        kinds, lowest = index.kinds, index.lowest
        of_blocks = [kind for kind, count in zip(index.kind_of, index.blocks, strict=False) for _ in range(count)]
        joint.append([(kinds_before + kind) * CATEGORIES for kind in of_blocks])
        padding.append([paddings_before + kind * (WORD - lowest) - lowest for kind in of_blocks])
        lowests.append(lowest)
        kinds_before, paddings_before = kinds_before + kinds, paddings_before + kinds * (WORD - lowest)
    return np.array(joint).T, np.array(padding).T, np.array(lowests)


def _plain(part: Part[Index]) -> bytes:
    """Return an MCU of a whole number of bytes that changes no predictor."""
    nothing = np.zeros((len(part.grid.blocks), 2), np.int64)
    return _joints([part], np.array([1]), nothing, nothing[0], nothing[0].copy())[0]


def _filled(last: int, bits: int) -> bytes:
    """Return the last byte of a scan, of which so many bits are used, filled up with ones."""
    if not bits:
        return b""
    last |= 0xFF >> bits
    return b"\xff\0" if last == 0xFF else bytes((last,))
