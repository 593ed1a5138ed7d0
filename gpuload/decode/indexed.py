"""Cutting crops out of a JPEG with its **index**, which records the bits at which MCUs begin, every few columns.

The index is a segment of the file (APP10) that `packing.jpeg_cuttable` writes; the coded data can be from any encoder.
For each row of MCUs the index has points. A point records the bit at which an MCU begins and the predictors of its DC
coefficients. The bits between two points of a row are a **stretch** of MCUs, and the stretches that a region touches
form a smaller picture, one stretch per row. However, the decoder would begin a row with the predictors at the end of
the row above, rows begin in the middle of a byte, and shifting all bits would take longer than the cut saves. So a
**joint** is inserted between two stretches: a synthetic MCU whose DC differences restore the right predictors, and
whose AC coefficients are chosen so that the bits after it keep their positions in their bytes. Bytes are copied
unchanged.

The joints form an extra column at the left. The region's chroma is not interpolated from this column, because the cut
begins at a point further left. At the left edge of the picture there is no such point, and chroma would be interpolated
from the joints. There the joints are placed at the right end of the rows. The first joint must still come before the
first row, so a row of synthetic MCUs is added above, unless the cut begins at the top of the picture and needs no
joint. The cut has no restart markers, because libjpeg-turbo decodes a scan with restart markers about 4% more slowly.

Layout of the segment, little-endian: `INDEX`, `FIXED`, the coding tables of joints, and the points. There are three
tables, each with a section for every kind of component; components of one kind have the same Huffman tables. The first
two have an entry for each category of DC difference (`CATEGORIES`): the number of bits of a difference (`SIZES`), and
the category's code, with zeros for the bits of the difference (`CODES`). The third has, for each length from
`min_padding` to 63 bits, the AC coefficients and the end of block that have this length (`PADDINGS`). The points of a
row are consecutive, starting at its left edge; one more point after all rows marks the end of the last row. A point is
an integer stored in as few bytes as possible. From its lowest bit up, it holds the bit at which the MCU begins (counted
from the scan's first byte, including stuffed bytes), the predictor of the first component, and the predictors of the
other components.

All functions are pure functions of the bytes and run in workers. A file that does not match its index yields None and
is decoded as if it had no index.
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

from gpuload.decode.grid import CellRange, Cut, Grid, Piece
from gpuload.decode.header import EOI, INDEX, JpegHeader, scan_start

__all__ = [
    "CATEGORIES", "CODES", "FIXED", "PADDINGS", "POINT", "POINTS", "SIZES", "WORD", "Index", "digest", "point_bytes",
]  # fmt: skip

# The fixed fields, in order: the CRC-32 of the segment after this field; the `digest`; the number of bytes in the scan;
# the number of MCUs from one point to the next; the number of bits in a point for its position, for the predictor of
# the first component, and for each other predictor; the number of kinds of components; the kind of each component; the
# length of the shortest padding in bits.
FIXED: Final = struct.Struct("<IIIHBBBBBBBB")
WORD: Final = 64  # the number of bits of a block in a joint
POINT: Final = 64  # the maximum number of bits in a point
CATEGORIES: Final = 12  # the number of categories of DC differences in 8-bit JPEGs
SIZES, CODES, PADDINGS = np.dtype("u1"), np.dtype("<u4"), np.dtype("<i8")
POINTS: Final = np.dtype("<i8")  # points are read as this type, together with some of the bytes that follow
ENDS: Final = 256  # the number of bytes at the start and at the end of the scan that the digest covers
# Tables indexed by DC difference (negative: counted from the end): its category, and the bits that encode it.
_DIFFERENCES: Final = np.concatenate((np.arange(2048), np.arange(-2048, 0)))
CATEGORY: Final = np.frexp(np.abs(_DIFFERENCES))[1].astype(np.int64)
VALUE: Final = np.where(_DIFFERENCES < 0, _DIFFERENCES + (1 << CATEGORY) - 1, _DIFFERENCES)
CATEGORY[CATEGORY == CATEGORIES] = 1 << 32  # -2048 does not occur in 8-bit JPEGs; this raises an IndexError
NO_POINT: Final = np.zeros(1, np.int64)
LOW_BITS: Final = 0xFF >> np.arange(8)  # LOW_BITS[i] selects all bits of a byte but the first i
COST_NS: Final = 120_000  # the measured time to cut one region, in nanoseconds; see `gpuload.decode.cut`


@dataclass
class Index(Grid):
    """An index read from a file; a cell of the grid is a stretch of a row's MCUs.

    Attributes:
        widths: the number of components and the bit widths of a point's fields: the arguments of `point_bytes`.
        kind_count: the number of kinds of components.
        component_kinds: the kind of each component.
        min_padding: the length of the shortest padding in bits.
        scan_at, scan_end: the offsets of the scan's start and end.
        tables_at, points_at, end: the offsets of the coding tables, of the points, and of the segment's end.
        tables: the coding tables of joints: `SIZES`, `CODES` and `PADDINGS`.
    """

    widths: tuple[int, int, int, int]
    kind_count: int
    component_kinds: list[int]
    min_padding: int
    scan_at: int
    scan_end: int
    tables_at: int
    points_at: int
    end: int
    tables: tuple[bytes, bytes, bytes]

    @classmethod
    def read(cls, data: bytes, header: JpegHeader, mcu: tuple[int, int], blocks: tuple[int, ...]) -> Self | None:
        """Return the index of a JPEG that has one; None if it cannot belong to this file."""
        pos = header.index_at
        end = pos + 2 + int.from_bytes(data[pos + 2 : pos + 4], "big")
        pos += 4 + len(INDEX)
        if end < pos + FIXED.size or end > header.frame_at:
            return None
        _, _, scan_bytes, spacing, position_bits, first_bits, other_bits, kind_count, *component_kinds, min_padding = (
            FIXED.unpack_from(data, pos)
        )
        scan_at, tables_at = scan_start(data, header), pos + FIXED.size
        widths = header.components, position_bits, first_bits, other_bits
        scan_end = scan_at + scan_bytes
        if not spacing or data[scan_end : scan_end + 2] != EOI:
            return None
        if point_bytes(*widths) > POINT // 8 or max(component_kinds) >= kind_count:
            return None
        codes_at = tables_at + kind_count * CATEGORIES * SIZES.itemsize
        paddings_at = codes_at + kind_count * CATEGORIES * CODES.itemsize
        points_at = paddings_at + kind_count * (WORD - min_padding) * PADDINGS.itemsize
        return cls(
            data, header, mcu, blocks, spacing, 1, COST_NS, widths, kind_count, component_kinds, min_padding, scan_at,
            scan_end, tables_at, points_at, end,
            (data[tables_at:codes_at], data[codes_at:paddings_at], data[paddings_at:points_at]),
        )  # fmt: skip

    def is_intact(self) -> bool:
        """Return whether the index is unchanged and was made for this file."""
        view, fixed_at = memoryview(self.data), self.tables_at - FIXED.size
        checksum, expected_digest, *_ = FIXED.unpack_from(view, fixed_at)
        return (
            crc32(view[fixed_at + 4 : self.end]) == checksum
            and digest(view[self.end : self.scan_at], view[self.scan_at : self.scan_end]) == expected_digest
            and self.points_at + point_bytes(*self.widths) * (self.columns * self.rows + 1) == self.end
        )

    @classmethod
    def cut(cls, parts: Sequence[CellRange[Self]]) -> list[Cut | None]:
        # Cutting several files together takes less than half the time per file, because NumPy's time grows little with
        # the number of joints.
        try:
            return _cut_parts(parts)
        except (IndexError, TypeError, ValueError):  # not an index by `jpeg_cuttable`, despite its checksum
            return [None] if len(parts) == 1 else [result for part in parts for result in cls.cut([part])]


def point_bytes(components: int, position_bits: int, first_bits: int, other_bits: int) -> int:
    """Return the size in bytes of a point whose fields have these bit widths."""
    return (position_bits + first_bits + (components - 1) * other_bits + 7) // 8


@lru_cache(maxsize=64)
def _shifts(components: int, position_bits: int, first_bits: int, other_bits: int) -> tuple[int, ...]:
    """Return the mask of a point's position field, then the left shifts and then the right shifts that extract each
    component's predictor."""
    widths = [first_bits] + [other_bits] * (components - 1)
    return (
        (1 << position_bits) - 1,
        *(POINT - position_bits - end for end in accumulate(widths)),
        *(POINT - width for width in widths),
    )


def digest(header: bytes | memoryview, scan: bytes | memoryview) -> int:
    """Return the checksum that identifies, together with the scan's length, the file that an index belongs to. The
    checksum covers the segments between the index and the scan, and the scan's first and last bytes."""
    return crc32(scan[-ENDS:], crc32(scan[:ENDS], crc32(header)))


def _cut_parts(parts: Sequence[CellRange[Index]]) -> list[Cut | None]:
    """Cut files whose MCUs have the same `blocks`."""
    # The start and end of each stretch. The points of each file are padded with a zero before and after them, so that
    # each pair of entries is the end of one stretch and the start of the next.
    point_arrays: list[np.ndarray] = []
    for index, _, x0, x1, y0, y1 in parts:
        nbytes = point_bytes(*index.widths)
        first_at = index.points_at + (y0 * index.columns + x0) * nbytes
        strides = index.columns * nbytes, (x1 - x0) * nbytes
        point_arrays += NO_POINT, np.ndarray((y1 - y0, 2), POINTS, index.data, first_at, strides).ravel(), NO_POINT
    points = np.concatenate(point_arrays)
    counts = [2 * (y1 - y0) + 2 for *_, y0, y1 in parts]
    ends = list(accumulate(counts))
    file_runs = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    components = parts[0].grid.header.components
    shifts = np.array([_shifts(*part.grid.widths) for part in parts]).T.repeat(counts, 1)
    bit_offsets = points & shifts[0]
    predictors = points << shifts[1 : 1 + components]
    predictors >>= shifts[1 + components :]

    byte_offsets = bit_offsets >> 3
    bit_offsets &= 7
    edges = np.concatenate(
        [
            np.frombuffer(index.data, np.uint8, index.scan_end - index.scan_at + 1, index.scan_at)[byte_offsets[run]]
            for (index, *_), run in zip(parts, file_runs, strict=True)
        ]
    )
    joints = _make_joints(parts, np.array(counts) // 2, predictors, bit_offsets, edges.astype(np.int64))
    byte_offsets[1::2] += 1  # the first byte is part of the joint
    byte_offsets[1::2] += edges[1::2] == 0xFF  # a stuffed byte after it is also part of the joint
    offsets = byte_offsets.tolist()
    return [
        _assemble(
            part,
            offsets[run],
            joints[run.start // 2 : run.stop // 2],
            _last_byte(int(edges[last_at]), int(bit_offsets[last_at])),
        )
        for part, run, last_at in zip(parts, file_runs, (end - 2 for end in ends), strict=True)
    ]


def _assemble(part: CellRange[Index], offsets: list[int], joints: list[bytes], last_byte: bytes) -> Cut | None:
    """Assemble the JPEG of a part.

    Args:
        part: the part to cut.
        offsets: an unused value, followed by the start and end of each stretch, counted from the scan's first byte.
        joints: the joint before each stretch, and the joint after the last stretch.
        last_byte: the last byte, used if there is no joint after the last stretch.
    """
    index, _, x0, x1, y0, _ = part
    scan, stops, (mcu_width, mcu_height) = memoryview(index.data)[index.scan_at :], offsets[2::2], index.mcu
    stretches: list[Piece] = [scan[first:stop] for first, stop in zip(offsets[1::2], stops, strict=False)]
    if sum(map(len, stretches)) > index.scan_end - index.scan_at:  # a forged index could make the cut arbitrarily large
        return None
    coded: list[Piece] = []
    segment = index.header.index_at, index.end
    if x0 or not index.chroma_margins_xy[0]:
        coded += chain.from_iterable(zip(joints, stretches, strict=False))
        return part.build_jpeg([*coded, last_byte, EOI], x_margins=(mcu_width, 0), segment=segment)
    is_whole = x1 == index.columns  # a row ends where the next one begins
    right_margin = 0 if is_whole else mcu_width
    if y0:
        width = min(index.header.width, x1 * index.cell_width) + right_margin
        coded += _plain_mcu(part) * (-(-width // mcu_width) - 1), joints[0]
    else:
        stretches[0] = scan[: stops[0]]
    if is_whole:
        coded += stretches[0], scan[stops[0] : stops[-1]], last_byte
    else:
        coded += chain.from_iterable(zip(stretches, joints[1:], strict=True))
    return part.build_jpeg([*coded, EOI], x_margins=(0, right_margin), y_margin=mcu_height * (y0 > 0), segment=segment)


def _make_joints(
    parts: Sequence[CellRange[Index]],
    counts: np.ndarray,
    predictors: np.ndarray,
    bit_offsets: np.ndarray,
    edges: np.ndarray,
) -> list[bytes]:
    """Return the bytes before each stretch and after each file's last stretch: the previous stretch's bits in its last
    byte, an MCU, and the next stretch's bits in its first byte.

    Each block is a word of 64 bits. The first word also holds the bits before the MCU, the last word the bits after it.

    Args:
        parts: the parts, one per file.
        counts: the number of joints of each file.
        predictors: the DC predictors at the end of each stretch and at the start of the next stretch, alternating,
            int64 (components, 2 · joints).
        bit_offsets: the offsets of these ends and starts within their bytes, int64 (2 · joints).
        edges: the bytes that contain these ends and starts, int64; changed in place.
    """
    tables = zip(*(part.grid.tables for part in parts), strict=True)
    sizes, codes, paddings = (
        np.frombuffer(b"".join(file_tables), dtype).astype(np.int64)
        for file_tables, dtype in zip(tables, (SIZES, CODES, PADDINGS), strict=True)
    )
    code_offsets, padding_offsets, min_paddings = _table_offsets(parts)
    last_joints = np.add.accumulate(counts) - 1  # the last joint of each file, which no stretch follows
    differences = predictors[:, 1::2] - predictors[:, ::2]
    differences[:, last_joints] = 0
    blocks = parts[0].grid.blocks
    if len(code_offsets) > len(differences):  # a component's other blocks are predicted from its first one
        coded, differences = differences, np.zeros((len(code_offsets), differences.shape[1]), np.int64)
        differences[[0, *accumulate(blocks[:-1])]] = coded
    code_index = CATEGORY[differences]
    code_index += code_offsets.repeat(counts, 1)
    free_bits = WORD - sizes[code_index]
    free_bits[0] -= bit_offsets[::2]
    words = codes[code_index]
    words |= VALUE[differences]
    words <<= free_bits
    next_bits = edges & LOW_BITS[bit_offsets]
    edges ^= next_bits
    unused = 8 - bit_offsets[1::2]
    unused[last_joints] = next_bits[2 * last_joints + 1] = 0
    free_bits[-1] -= unused
    if (free_bits < min_paddings.repeat(counts)).any() or free_bits.max() >= WORD:  # outside the file's table
        raise ValueError("no padding has this many bits")
    free_bits += padding_offsets.repeat(counts, 1)
    padding_words = paddings[free_bits]
    padding_words[-1] <<= unused
    words |= padding_words
    words[0] |= edges[::2] << WORD - 8
    words[-1] |= next_bits[1::2]
    flat = words.T.astype(">i8", "C")
    pieces = flat.view(f"V{flat.itemsize * len(words)}").ravel().tolist()
    return [piece.replace(b"\xff", b"\xff\0") for piece in pieces]


def _table_offsets(parts: Sequence[CellRange[Index]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the offsets of each block's tables among all files' sizes and codes, and among all paddings, both (blocks,
    files); and the smallest number of bits for which each file has a padding."""
    code_offsets: list[list[int]] = []
    padding_offsets: list[list[int]] = []
    min_paddings: list[int] = []
    kinds_before = paddings_before = 0
    for index, *_ in parts:
        kind_count, min_padding = index.kind_count, index.min_padding
        block_kinds = [
            kind for kind, count in zip(index.component_kinds, index.blocks, strict=False) for _ in range(count)
        ]
        code_offsets.append([(kinds_before + kind) * CATEGORIES for kind in block_kinds])
        padding_offsets.append([paddings_before + kind * (WORD - min_padding) - min_padding for kind in block_kinds])
        min_paddings.append(min_padding)
        kinds_before, paddings_before = kinds_before + kind_count, paddings_before + kind_count * (WORD - min_padding)
    return np.array(code_offsets).T, np.array(padding_offsets).T, np.array(min_paddings)


def _plain_mcu(part: CellRange[Index]) -> bytes:
    """Return an MCU that fills an integer number of bytes and changes no predictor."""
    zeros = np.zeros((len(part.grid.blocks), 2), np.int64)
    return _make_joints([part], np.array([1]), zeros, zeros[0], zeros[0].copy())[0]


def _last_byte(byte: int, bits: int) -> bytes:
    """Return the last byte of a scan with `bits` used bits, padded with ones; b"" if no bits are used."""
    if not bits:
        return b""
    byte |= 0xFF >> bits
    return b"\xff\0" if byte == 0xFF else bytes((byte,))
