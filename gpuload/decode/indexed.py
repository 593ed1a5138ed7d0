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

Layout of the segment, little-endian: `INDEX`, `FIXED`, a `JOINT` for each kind of component, and the points. Those of
a row are one behind the other, the first at its left edge; behind all stands one more, where the last row ends. First
the bit of each row's first point, as uint32: from the scan's first byte, stuffed bytes counted. Then how many bits
behind that each point is, as uint16 or uint32; then the predictors, a component at a time, as int8 or int16.

Pure functions of the bytes, for workers. What does not fit gives None, and is decoded as if there were no index.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from gpuload.decode.grid import Cut, Grid, Region, is_interpolated, mcu_size, mcus, scan_start
from gpuload.decode.jpeg_header import EOI, INDEX, JpegHeader

__all__ = ["CATEGORIES", "FIXED", "JOINT", "PADDINGS", "Index", "cut_by_index", "digest", "read_index"]

# CRC-32 of all that follows in the segment; `digest`; bytes of the scan; MCUs from a point to the next; how many bytes
# a number of the second kind has, and a predictor of each component; how many kinds of components; that of each.
FIXED: Final = struct.Struct("<IIIHBBBBBBBB")
CATEGORIES, PADDINGS = 12, 8  # of a DC difference in 8-bit JPEGs; of bits that fill a byte
# Of a kind of component, how a joint is coded. For each category of DC difference the bits that it takes, and the code
# with zeros for the bits of the difference; for each number of bits, modulo 8, what follows in the MCU to reach it: AC
# coefficients, an end of block, and further blocks with the same DC coefficient.
JOINT: Final = np.dtype(
    [("sizes", "u1", CATEGORIES), ("lengths", "u1", PADDINGS), ("codes", "<u4", CATEGORIES), ("paddings", "<u8", PADDINGS)]
)
ENDS: Final = 256  # bytes of the scan at its begin and at its end that the digest holds
# For a difference, also a negative one: its category, and the bits that it is coded by.
_ALL: Final = np.concatenate((np.arange(2048), np.arange(-2048, 0)))
CATEGORY: Final = np.frexp(np.abs(_ALL))[1].astype(np.int64)
VALUE: Final = np.where(_ALL < 0, _ALL + (1 << CATEGORY) - 1, _ALL).astype(np.uint64)
PLACES: Final = np.arange(8)


class Index(NamedTuple):
    """An index as read from a file, of which nothing is checked yet but that it is long enough.

    `grid` has the points as its columns; `spacing` is MCUs, `scan` where the scan begins and ends.
    """

    grid: Grid
    mcu: tuple[int, int]
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
    mcu = mcu_size(data, header)
    if not spacing or not mcu[0] or not mcu[1] or data[start + fields[2] : start + fields[2] + 2] != EOI:
        return None
    in_row, rows = mcus(header, mcu)
    grid = Grid(-(-in_row // spacing), rows, spacing * mcu[0], mcu[1])
    return Index(grid, mcu, spacing, (start, start + fields[2]), fields, at + FIXED.size, end)


def digest(header: bytes | memoryview, scan: bytes | memoryview) -> int:
    """By what an index knows the file again, beside the length of the scan: the segments between them, and the scan's
    first bytes and last."""
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
    x0, x1, y0, y1 = part
    grid, (start, stop), view = index.grid, index.scan, memoryview(data)
    checksum, known, _, _, wide, *predictor_bytes, kinds = index.fields[:9]
    kind_of = index.fields[9 : 9 + header.components]
    count = grid.columns * grid.rows + 1
    sizes = (wide, *predictor_bytes[: header.components])
    points_at = index.joints_at + kinds * JOINT.itemsize
    if (
        points_at + 4 * (grid.rows + 1) + count * sum(sizes) != index.end
        or crc32(view[index.joints_at - FIXED.size + 4 : index.end]) != checksum
        or digest(view[index.end : start], view[start:stop]) != known
    ):
        return None

    # Where each stretch begins and ends, in bits; and the DC differences that lead from one to the next.
    number, each = y1 - y0, slice(y0 * grid.columns + x0, (y1 - 1) * grid.columns + x0 + 1, grid.columns)
    behind = slice(each.start + x1 - x0, each.stop + x1 - x0, grid.columns)
    rows = np.frombuffer(data, "<u4", grid.rows + 1, points_at).astype(np.int64)
    offsets_at = points_at + 4 * (grid.rows + 1)
    offsets = np.frombuffer(data, "<u4" if wide == 4 else "<u2", count, offsets_at)
    below = x1 == grid.columns  # a row ends where the next one begins
    begins, ends = rows[y0:y1] + offsets[each], rows[y0 + below : y1 + below] + offsets[behind]
    differences = np.zeros((number + 1, header.components), np.int64)
    at = offsets_at + wide * count
    for component in range(header.components):
        predictors = np.frombuffer(data, "i1" if sizes[1 + component] == 1 else "<i2", count, at)
        differences[:number, component] = predictors[each]
        differences[1:number, component] -= predictors[behind][:-1]
        at += sizes[1 + component] * count

    raw = np.frombuffer(data, np.uint8, stop - start + 2, start)
    joints = np.frombuffer(data, JOINT, kinds, index.joints_at)
    made = _joints(joints, kind_of, differences, begins, ends, raw)
    first = (begins + 7 >> 3) + ((begins & 7 > 0) & (raw[begins >> 3] == 0xFF)) + start  # stuffed: begins within 0xFF
    last = (ends >> 3) + start
    if (last < first).any():
        return None
    stretches = [view[one:other] for one, other in zip(first.tolist(), last.tolist(), strict=True)]

    at_left = x0 > 0 or not is_interpolated(index.mcu)[0]
    whole = not at_left and below
    above = not at_left and y0 > 0
    pieces: list[bytes | memoryview] = []
    if at_left:
        pieces += chain.from_iterable(zip(made, stretches, strict=False))
    else:
        if above:
            columns = (min(x1 * index.spacing, mcus(header, index.mcu)[0]) if whole else x1 * index.spacing + 1) - 1
            pieces += [_plain(joints, kind_of) * columns, made[0]]
        if whole:
            pieces.append(view[first[0] : last[-1]])
        else:
            pieces += chain.from_iterable(zip(stretches, made[1:], strict=True))
    if at_left or whole:
        pieces.append(_filled(raw, int(ends[-1])))

    top, left, *size = region_tlhw
    joint_width, joint_height = index.mcu[0] * (not whole), index.mcu[1] * above
    width = (header.width if below else x1 * grid.width) - x0 * grid.width + joint_width
    height = min(header.height, y1 * grid.height) - y0 * grid.height + joint_height
    head = bytearray(view[: header.index_at])
    head += view[index.end : start]
    frame_at = header.frame_at - (index.end - header.index_at)
    struct.pack_into(">HH", head, frame_at + 5, height, width)
    pieces.append(EOI)
    within = (
        top - y0 * grid.height + joint_height,
        left - x0 * grid.width + joint_width * at_left,
        size[0],
        size[1],
    )
    first_scan = header.first_scan - (index.end - header.index_at)
    changed = header._replace(
        height=height, width=width, exif=b"", xmp=b"", frame_at=frame_at, first_scan=first_scan, index_at=0
    )
    return Cut(bytes(head.join((b"", b"".join(pieces)))), changed, within)


def _joints(
    joints: np.ndarray,
    kind_of: tuple[int, ...],
    differences: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    raw: np.ndarray,
) -> list[bytes]:
    """The bytes before each stretch and behind the last: the bits that the stretch before has in its last byte, an MCU,
    and the bits that the stretch has in its first.

    What a component has is brought to a whole number of bytes, at most eight: one uint64 for each.
    """
    categories = CATEGORY[differences]
    kinds = np.array(kind_of)
    bits = joints["sizes"][kinds, categories].astype(np.uint64)
    words = joints["codes"][kinds, categories] | VALUE[differences]
    length = bits.copy()
    used = (ends & 7).astype(np.uint64)
    words[1:, 0] |= raw[ends >> 3] >> (8 - used) << bits[1:, 0]
    length[1:, 0] += used
    unused = (-begins & 7).astype(np.uint64)
    length[:-1, -1] += unused
    paddings = (-length.astype(np.int64)) & 7
    padding = joints["lengths"][kinds, paddings].astype(np.uint64)
    words = words << padding | joints["paddings"][kinds, paddings]
    words[:-1, -1] = words[:-1, -1] << unused | raw[begins >> 3] & ((1 << unused) - 1)
    size = (length + padding >> 3).astype(np.int64)
    shown = PLACES >= 8 - size[:, :, None]
    flat = words.astype(">u8").view(np.uint8).reshape(shown.shape)[shown].tobytes()
    stops = size.sum(1).cumsum().tolist()
    made = [flat[one:other] for one, other in zip([0, *stops], stops, strict=False)]
    return [piece.replace(b"\xff", b"\xff\0") for piece in made] if b"\xff" in flat else made


def _plain(joints: np.ndarray, kind_of: tuple[int, ...]) -> bytes:
    """An MCU of a whole number of bytes that changes no predictor."""
    made = b""
    for kind in kind_of:
        joint = joints[kind]
        bits = int(joint["sizes"][0])
        length = int(joint["lengths"][-bits & 7])
        word = int(joint["codes"][0]) << length | int(joint["paddings"][-bits & 7])
        made += word.to_bytes((bits + length) // 8, "big")
    return made.replace(b"\xff", b"\xff\0")


def _filled(raw: np.ndarray, end: int) -> bytes:
    """The last byte of a scan that ends with this bit, filled up with ones."""
    if not end & 7:
        return b""
    last = int(raw[end >> 3]) | 0xFF >> (end & 7)
    return b"\xff\0" if last == 0xFF else bytes((last,))
