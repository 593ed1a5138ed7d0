"""Makes the index by which crops are cut out of a JPEG (`indexed`). For those who pack data sets, not for workers."""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

import numpy as np

from gpuload.decode.grid import mcu_size, mcus, scan_start
from gpuload.decode.huffman import Block, Table, complete, read_blocks, read_tables, walk, write_tables
from gpuload.decode.indexed import CATEGORIES, FIXED, JOINT, PADDINGS, digest
from gpuload.decode.jpeg_header import EOI, INDEX, JpegHeader, end_of_scan, scan_markers

__all__ = ["add_index"]

END: Final = 0x00  # the AC symbol that ends a block
DUMMIES: Final = (END, 0x01, 0x02)  # AC symbols that reach any number of bits: the others have 1 bit and 2 behind them
MOST_BYTES: Final = 65_533  # of a segment, without its length
LARGER: Final = 0.055  # how much larger a file may become
LEAST_BITS: Final = 8  # of a stretch, so that it does not begin and end within one byte
WORD: Final = 64  # bits that a component may have in a joint
NEIGHBOUR: Final = 7  # bits that a stretch may have in the byte of a joint
DIFFERENCE: Final = 2047  # the largest between two DC coefficients of 8-bit JPEGs
COMMENT: Final = 0xFFFE

Kind = tuple[Table, Table, int]  # tables of a component, and how many blocks of it an MCU has


def add_index(data: bytes, header: JpegHeader) -> bytes | None:
    """The file with an index, and without what stands behind the picture; None where it cannot have one.

    The coded data stay as they are. Codes that joints need, and the file does not have, are added to its tables.

    An index has a JPEG of one scan, 8 bits, Huffman coding, sequential, without restart markers, that is not damaged
    and not so small that the file would become more than 5.5% larger.
    """
    if not header.plain or not header.single_scan or header.restart_interval:
        return None
    if header.index_at:
        length = int.from_bytes(data[header.index_at + 2 : header.index_at + 4], "big")
        data = data[: header.index_at] + data[header.index_at + 2 + length :]
        known = scan_markers(data)
        return None if known is None else add_index(data, known)
    start, stop = scan_start(data, header), end_of_scan(data, header)
    scan = np.frombuffer(data, np.uint8, max(stop - start, 0), start)
    mcu = mcu_size(data, header)
    if data[stop : stop + 2] != EOI or not len(scan) or 8 * len(scan) >= 1 << 32 or not mcu[0] or not mcu[1]:
        return None
    stuffed = np.flatnonzero(scan == 0xFF) + 1
    if stuffed[-1:] == len(scan) or scan[stuffed].any():
        return None
    tables, segments = read_tables(data, header)
    blocks = read_blocks(data, header, tables)
    if blocks is None:
        return None
    in_row, rows = mcus(header, mcu)
    walked = walk(np.delete(scan, stuffed), blocks, in_row * rows)
    if walked is None:
        return None
    begins = walked[0][:: len(blocks)]  # of MCUs, and the end
    bits = begins + 8 * np.searchsorted(stuffed - np.arange(len(stuffed)), (begins >> 3) + 1)
    predictors = _predictors(walked[1], blocks)
    completed = _complete_tables(data, header, tables)
    blocks = None if completed is None else read_blocks(data, header, completed)
    if completed is None or blocks is None or np.ptp(np.append(predictors, 0)) > DIFFERENCE:
        return None
    kinds = [_kind(blocks, component) for component in range(header.components)]
    joints = {kind: _joint(kind) for kind in kinds}
    if not _fit_words([joints[kind] for kind in kinds]):
        return None

    at = _behind_metadata(data)
    if completed == tables:
        rest = data[at:start]
    else:
        kept = [at, *(end for segment in segments for end in segment), start]
        parts = [data[one:other] for one, other in zip(kept[::2], kept[1::2], strict=True)]
        rest = b"".join((write_tables(completed), *parts))
    for spacing in range(1, -(-in_row // 2) + 1):
        points = _points(bits, predictors, in_row, rows, spacing)
        if points is None:
            continue
        sizes, packed = points
        kind_of = [list(joints).index(kind) for kind in kinds]
        unknown = [0] * (3 - header.components)
        fixed = FIXED.pack(
            0, digest(rest, scan), len(scan), spacing, *sizes, *unknown, len(joints), *kind_of, *unknown
        )
        body = fixed[4:] + b"".join(joint.tobytes() for joint in joints.values()) + packed
        length = 2 + len(INDEX) + 4 + len(body)
        if length <= MOST_BYTES + 2 and length <= LARGER * len(data):
            segment = struct.pack(">HH", 0xFFEA, length) + INDEX + struct.pack("<I", crc32(body)) + body
            return b"".join((data[:at], segment, rest, scan, EOI))
    return None


def _predictors(differences: np.ndarray, blocks: list[Block]) -> np.ndarray:
    """The DC coefficients of the blocks before each MCU and behind all, (MCUs + 1, components)."""
    by_mcu = differences.reshape(-1, len(blocks))
    component = np.array([block.component for block in blocks])
    of_components = [by_mcu[:, component == number].sum(1) for number in range(component[-1] + 1)]
    sums = np.cumsum(np.stack(of_components, 1), 0)
    return np.concatenate((np.zeros_like(sums[:1]), sums))


def _complete_tables(data: bytes, header: JpegHeader, tables: dict[int, Table]) -> dict[int, Table] | None:
    """The tables of a file with all codes that a joint may need; None if one has no room for them."""
    completed = dict(tables)
    at = header.first_scan + 6
    for used in data[at : at + 2 * header.components : 2]:
        dc, ac = complete(completed[used >> 4], range(CATEGORIES)), complete(completed[0x10 | used & 15], (END,))
        if ac is not None and _dummies(ac) is None:
            ac = complete(ac, DUMMIES)
        if dc is None or ac is None:
            return None
        completed[used >> 4], completed[0x10 | used & 15] = dc, ac
    return completed


def _dummies(table: Table) -> list[tuple[int, int]] | None:
    """The shortest AC coefficients whose bits are 0, 1, … 7, modulo 8: these bits, and how many; None if there are no
    such coefficients."""
    codes = {}  # of a length the one that takes the fewest coefficients
    for symbol, (code, bits) in table.codes().items():
        run, size = symbol >> 4, symbol & 15
        if size and (bits + size not in codes or run < codes[bits + size][0]):
            codes[bits + size] = run, code << size
    best = {0: (0, 0, 0)}  # modulo 8: how many bits, these, coefficients
    for _ in range(PADDINGS):
        for length, bits, coefficients in list(best.values()):
            for more, (run, code) in codes.items():
                found = length + more, bits << more | code, coefficients + run + 1
                place = found[0] % PADDINGS
                if found[2] < 63 and (place not in best or found < best[place]):
                    best[place] = found
    return [(best[place][1], best[place][0]) for place in range(PADDINGS)] if len(best) == PADDINGS else None


def _kind(blocks: list[Block], component: int) -> Kind:
    ours = [block for block in blocks if block.component == component]
    return ours[0].dc, ours[0].ac, len(ours)


def _joint(kind: Kind) -> np.ndarray | None:
    """How a joint is coded in a component, a `JOINT`; None if it takes too many bits."""
    dc, ac, count = kind
    codes = dc.codes()
    end, end_bits = ac.codes()[END]
    same, same_bits = codes[0]
    tail, tail_bits = end, end_bits
    for _ in range(count - 1):
        tail = (tail << same_bits | same) << end_bits | end
        tail_bits += same_bits + end_bits
    joint = np.zeros((), JOINT)
    for category in range(CATEGORIES):
        code, bits = codes[category]
        joint["codes"][category], joint["sizes"][category] = code << category, bits + category
    for bits, length in _dummies(ac) or []:
        if length + tail_bits >= WORD:
            return None
        place = (length + tail_bits) % PADDINGS
        joint["paddings"][place], joint["lengths"][place] = bits << tail_bits | tail, length + tail_bits
    return joint


def _fit_words(joints: list[np.ndarray | None]) -> bool:
    """Whether each component's bits of a joint fit a word: the first one's with those of the stretch before, the last
    one's with those of the stretch behind."""
    for place, joint in enumerate(joints):
        if joint is None:
            return False
        neighbours = (place == 0) + (place == len(joints) - 1)
        if int(joint["sizes"].max()) + int(joint["lengths"].max()) + neighbours * NEIGHBOUR > WORD:
            return False
    return True


def _behind_metadata(data: bytes) -> int:
    """Where the first segment begins that is of the picture: none for applications, and no comment."""
    at = 2
    while True:
        marker, length = struct.unpack_from(">HH", data, at)
        if marker == 0xFFFF:
            at += 1
        elif 0xFFE0 <= marker <= 0xFFEF or marker == COMMENT:
            at += 2 + length
        else:
            return at


def _points(
    bits: np.ndarray, predictors: np.ndarray, in_row: int, rows: int, spacing: int
) -> tuple[list[int], bytes] | None:
    """The points every few MCUs: how many bytes a number and the predictors have, and all numbers; None if a stretch
    between two of them is too short."""
    starts = np.arange(rows + 1) * in_row
    points = np.append((starts[:-1, None] + np.arange(0, in_row, spacing)).ravel(), starts[-1])
    if np.diff(bits[points]).min() < LEAST_BITS:
        return None
    offsets = bits[points] - bits[points // in_row * in_row]
    wide = 4 if offsets.max() >= 1 << 16 else 2
    sizes, parts = [wide], [bits[starts].astype("<u4"), offsets.astype(f"<u{wide}")]
    for column in predictors[points].T:
        sizes.append(1 if -128 <= column.min() and column.max() < 128 else 2)
        parts.append(column.astype(f"<i{sizes[-1]}"))
    return sizes, b"".join(part.tobytes() for part in parts)
