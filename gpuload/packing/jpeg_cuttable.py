"""JPEGs made cuttable: crops can be cut out of their bytes (`gpuload.decode.cut`), by an index that is made here.
`gpuload.decode.indexed` says what is in it and reads it."""

from __future__ import annotations

import struct
import subprocess
from typing import Final
from zlib import crc32

import numpy as np

from gpuload.decode.cut import is_cuttable
from gpuload.decode.header import (
    EOI,
    INDEX,
    SOI,
    JpegHeader,
    end_of_scan,
    mcu_layout,
    mcus,
    read_header,
    scan_markers,
    scan_start,
)
from gpuload.decode.indexed import (
    CATEGORIES,
    CODES,
    FIXED,
    PADDINGS,
    POINT,
    POINTS,
    SIZES,
    WORD,
    digest,
    point_bytes,
)
from gpuload.decode.options import Decode
from gpuload.errors import DecodeError, GpuloadError
from gpuload.packing.jpeg_huffman import (
    Block,
    Table,
    complete,
    read_blocks,
    read_tables,
    segments,
    walk,
    write_tables,
)

__all__ = ["add_index", "make_cuttable"]

END: Final = 0x00  # the AC symbol that ends a block
DUMMIES: Final = (END, 0x01, 0x02)  # AC symbols that reach any number of bits: the others have 1 bit and 2 behind them
MOST_BYTES: Final = 65_533  # of a segment, without its length
LARGER, AT_LEAST = 0.055, 2_000  # how much larger a file may become, and so many bytes in any case
LEAST_BITS: Final = 8  # between two points, so that no stretch begins and ends within a byte
SMALLEST: Final = 16_000  # bytes of a scan of which a part costs less to decode than to cut
DIFFERENCE: Final = 2047  # the largest between two DC coefficients of 8-bit JPEGs
COMMENT: Final = 0xFFFE

Kind = tuple[Table, Table]  # DC and AC tables of a component


def make_cuttable(data: bytes) -> bytes:
    """Return a JPEG of the same pixels, EXIF and ICC blocks, with an index that lets crops be cut out.

    What is coded stays as it is. Only a progressive JPEG, one of several scans, and one with restart markers are
    written anew, by jpegtran: the same coefficients, in one scan. What stands behind the picture (a phone's second
    picture, or film) is left out. Bytes that are cuttable already come back as they are, and so does what cannot be
    made cuttable: no JPEG or one of four components, twelve bits or arithmetic coding; it is damaged, smaller than
    16 KB, or larger than `Decode()` allows.

    Raises:
        GpuloadError: jpegtran is needed, and not installed.
    """
    try:
        header = read_header(data, Decode()).jpeg if data.startswith(SOI) else None
    except DecodeError:
        return data
    if header is None or not header.complete or not header.plain or is_cuttable(data, header):
        return data
    if header.single_scan and not header.restart_interval:
        return add_index(data, header) or data
    written = _in_one_scan(data)
    header_written = scan_markers(written)
    if header_written is None or header_written[1:5] != header[1:5]:
        return data
    return add_index(written, header_written) or data


def _in_one_scan(data: bytes) -> bytes:
    """Return what jpegtran makes of a JPEG; nothing if it complains."""
    try:
        done = subprocess.run(["jpegtran", "-copy", "all", "-optimize"], input=data, capture_output=True)
    except FileNotFoundError as error:
        raise GpuloadError(
            "making progressive JPEGs cuttable, and those with restart markers, needs the program jpegtran, which is "
            "not on PATH; install the package libjpeg-turbo-progs (Debian, Ubuntu), libjpeg-turbo-utils (Fedora) or "
            "jpeg-turbo (Homebrew)"
        ) from error
    return b"" if done.returncode or done.stderr else done.stdout  # a warning is damage


def add_index(data: bytes, header: JpegHeader) -> bytes | None:
    """Return the file with an index, and without what stands behind the picture; None where it cannot have one.

    The coded data stay as they are. Codes that joints need, and the file does not have, are added to its tables.

    It can have one if it has one scan, 8 bits, Huffman coding, is sequential, without restart markers, not damaged, and
    has 16 KB or more: of a smaller one cutting saves nothing.
    """
    if not header.plain or not header.single_scan or header.restart_interval:
        return None
    if header.index_at:
        length = int.from_bytes(data[header.index_at + 2 : header.index_at + 4], "big")
        data = data[: header.index_at] + data[header.index_at + 2 + length :]
        known = scan_markers(data)
        return None if known is None else add_index(data, known)
    start, stop = scan_start(data, header), end_of_scan(data, header)
    coded, (mcu, counts) = data[start:stop], mcu_layout(data, header)
    if data[stop : stop + 2] != EOI or not SMALLEST <= len(coded) < 1 << 29 or not mcu[0] or not mcu[1]:
        return None
    scan = np.frombuffer(coded, np.uint8)
    stuffed = np.flatnonzero(scan == 0xFF) + 1
    if scan[-1] == 0xFF or scan[stuffed].any():
        return None
    tables, table_places = read_tables(data, header)
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
    kinds = list({block.component: (block.dc, block.ac) for block in blocks}.values())
    paddings = {kind: _paddings(kind[1]) for kind in kinds}
    lowest = _fewest_bits(kinds, paddings)
    if lowest is None or len(set(counts[1:])) > 1:
        return None
    kind_of = [list(paddings).index(kind) for kind in kinds]
    packed_joints = _pack_joints(paddings, lowest)

    # Before the first segment that is of the picture: none for applications, and no comment.
    others = {0xFFFF, COMMENT, *range(0xFFE0, 0xFFF0)}
    at = next(at for marker, at, _ in segments(data, header.first_scan) if marker not in others)
    if completed == tables:
        tables_and_segments = data[at:start]
    else:
        ends = [at, *(end for place in table_places for end in place), start]
        between = [data[begin:end] for begin, end in zip(ends[::2], ends[1::2], strict=True)]
        tables_and_segments = b"".join((write_tables(completed), *between))
    known = digest(tables_and_segments, coded)
    for spacing in range(1, -(-in_row // 2) + 1):
        points = _points(bits, predictors, in_row, rows, spacing)
        if points is None:
            continue
        sizes, packed = points
        more = [0] * (3 - header.components)
        fixed = FIXED.pack(0, known, len(coded), spacing, *sizes, len(paddings), *kind_of, *more, lowest)
        body = fixed[4:] + packed_joints + packed
        length = 2 + len(INDEX) + 4 + len(body)
        if length <= MOST_BYTES + 2 and length <= max(LARGER * len(data), AT_LEAST):
            segment = struct.pack(">HH", 0xFFEA, length) + INDEX + struct.pack("<I", crc32(body)) + body
            return b"".join((data[:at], segment, tables_and_segments, coded, EOI))
    return None


def _predictors(differences: np.ndarray, blocks: list[Block]) -> np.ndarray:
    """Return the DC coefficients of the blocks before each MCU and behind all, (MCUs + 1, components)."""
    by_mcu = differences.reshape(-1, len(blocks))
    component = np.array([block.component for block in blocks])
    of_components = [by_mcu[:, component == number].sum(1) for number in range(component[-1] + 1)]
    sums = np.cumsum(np.stack(of_components, 1), 0)
    return np.concatenate((np.zeros_like(sums[:1]), sums))


def _complete_tables(data: bytes, header: JpegHeader, tables: dict[int, Table]) -> dict[int, Table] | None:
    """Return the tables of a file with all codes that a joint may need; None if one has no room for them."""
    completed = dict(tables)
    at = header.first_scan + 6
    for used in data[at : at + 2 * header.components : 2]:
        dc, ac = complete(completed[used >> 4], range(CATEGORIES)), complete(completed[0x10 | used & 15], DUMMIES)
        if dc is None or ac is None:
            return None
        completed[used >> 4], completed[0x10 | used & 15] = dc, ac
    return completed


def _paddings(ac: Table) -> list[int | None]:
    """Return, for 0 to 63 bits, those that may follow on the DC difference in a joint: AC coefficients, as few as
    possible, and an end of block. None where no coefficients take as many bits."""
    end, end_bits = ac.codes()[END]
    codes: dict[int, tuple[int, int]] = {}  # of each length: how many coefficients, and the bits
    for symbol, (code, bits) in ac.codes().items():
        run, size = symbol >> 4, symbol & 15
        if size and (bits + size not in codes or run + 1 < codes[bits + size][0]):
            codes[bits + size] = run + 1, code << size
    best: list[tuple[int, int] | None] = [(0, 0)] + [None] * (WORD - 1)
    for length in range(1, WORD):
        for bits, (coefficients, code) in codes.items():
            before = best[length - bits] if bits <= length else None
            if before is not None and (coefficient := before[0] + coefficients) < 63:
                now = best[length]
                if now is None or coefficient < now[0]:
                    best[length] = coefficient, before[1] << bits | code
    padded: list[int | None] = [None] * WORD
    for length in range(end_bits, WORD):
        dummies = best[length - end_bits]
        padded[length] = None if dummies is None else dummies[1] << end_bits | end
    return padded


def _fewest_bits(kinds: list[Kind], paddings: dict[Kind, list[int | None]]) -> int | None:
    """Return the fewest bits that are padded in a word; None if there is a number of bits that cannot be reached.

    The first component may have bits of the stretch before in a word, the last one some of the stretch behind.
    """
    fewest_so_far = WORD
    for place, kind in enumerate(kinds):
        sizes = _sizes(kind)
        fewest = WORD - max(sizes) - 7 * (place == 0) - 8 * (place == len(kinds) - 1)
        if fewest < 0 or None in paddings[kind][fewest : WORD - min(sizes) + 1]:
            return None
        fewest_so_far = min(fewest_so_far, fewest)
    return fewest_so_far


def _sizes(kind: Kind) -> list[int]:
    """Return the bits of a DC difference of each category."""
    return [bits + category for category, (_, bits) in sorted(kind[0].codes().items())][:CATEGORIES]


def _pack_joints(paddings: dict[Kind, list[int | None]], lowest: int) -> bytes:
    """Return how joints are coded: see `gpuload.decode.indexed`."""
    sizes = [_sizes(kind) for kind in paddings]
    codes = [[kind[0].codes()[category][0] << category for category in range(CATEGORIES)] for kind in paddings]
    padded = [[bits or 0 for bits in bits_of_table[lowest:]] for bits_of_table in paddings.values()]
    tables = (sizes, SIZES), (codes, CODES), (padded, PADDINGS)
    return b"".join(np.array(numbers, number).tobytes() for numbers, number in tables)


def _points(
    bits: np.ndarray, predictors: np.ndarray, in_row: int, rows: int, spacing: int
) -> tuple[tuple[int, int, int], bytes] | None:
    """Return the points every few MCUs: how many bits their numbers have, and the points; None if a stretch would begin
    and end within a byte, or a point has too many bits (some 33 MB of coded data)."""
    starts = np.arange(rows) * in_row
    at = np.append((starts[:, None] + np.arange(0, in_row, spacing)).ravel(), rows * in_row)
    if np.diff(bits[at]).min() < LEAST_BITS:
        return None
    widths = int(bits[-1]).bit_length(), _bits_of(predictors[at, :1]), _bits_of(predictors[at, 1:])
    if (nbytes := point_bytes(predictors.shape[1], *widths)) > POINT // 8:
        return None
    points, shift = bits[at], widths[0]
    for component, numbers in enumerate(predictors[at].T):
        width = widths[1 + (component > 0)]
        points |= (numbers & (1 << width) - 1) << shift
        shift += width
    return widths, points.astype(POINTS).view(np.uint8).reshape(len(at), -1)[:, :nbytes].tobytes()


def _bits_of(numbers: np.ndarray) -> int:
    return int(np.append(numbers ^ numbers >> 63, 0).max()).bit_length() + 1  # ^: as many bits as -1 - n has
