"""Making JPEGs cuttable: adding an index with which `gpuload.decode.cut` cuts crops out of the encoded bytes.
`gpuload.decode.indexed` describes the format of the index and reads it."""

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
    count_mcus,
    end_of_scan,
    mcu_layout,
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
    CoefficientBlock,
    HuffmanTable,
    add_codes,
    iterate_segments,
    read_blocks,
    read_tables,
    walk_scan,
    write_tables,
)

__all__ = ["add_index", "make_cuttable"]

END: Final = 0x00  # the AC symbol that ends a block
DUMMIES: Final = (END, 0x01, 0x02)  # AC symbols with 0, 1 and 2 bits after their codes; these can pad to any length
MAX_SEGMENT_BYTES: Final = 65_533  # the maximum size of a segment, without its length field
MAX_GROWTH, ALLOWED_BYTES = 0.055, 2_000  # a file may grow by this fraction, or by this number of bytes if that is more
MIN_BITS: Final = 8  # the minimum distance between points, so that no stretch begins and ends in the same byte
MIN_SCAN_BYTES: Final = 16_000  # bytes of a scan; decoding a smaller scan takes less time than cutting it
MAX_DC_DIFFERENCE: Final = 2047  # the largest difference between two DC coefficients in 8-bit JPEGs
COMMENT: Final = 0xFFFE

TablePair = tuple[HuffmanTable, HuffmanTable]  # the DC and AC tables of a component


def make_cuttable(data: bytes) -> bytes:
    """Return a JPEG with the same pixels, EXIF data and ICC profile, and with an index for cutting out crops.

    The encoded data are not changed, except that jpegtran rewrites progressive JPEGs, and JPEGs with multiple scans or
    restart markers, as one scan with the same coefficients. Data after the image (a phone's second image, or a
    video) are dropped. JPEGs that are already cuttable are returned unchanged, and so are files that cannot be made
    cuttable: other formats; JPEGs with four components, twelve bits, or arithmetic coding; files that are damaged,
    smaller than 16 KB, or larger than `Decode()` allows.

    Raises:
        GpuloadError: jpegtran is needed, but not installed.
    """
    try:
        header = read_header(data, Decode()).jpeg if data.startswith(SOI) else None
    except DecodeError:
        return data
    if header is None or not header.is_complete or not header.is_plain or is_cuttable(data, header):
        return data
    if header.has_single_scan and not header.restart_interval:
        return add_index(data, header) or data
    rewritten_data = _merge_scans(data)
    new_header = scan_markers(rewritten_data)
    if new_header is None or new_header[1:5] != header[1:5]:
        return data
    return add_index(rewritten_data, new_header) or data


def _merge_scans(data: bytes) -> bytes:
    """Rewrite a JPEG as one scan, with jpegtran. Return empty bytes if jpegtran reports a problem."""
    try:
        process = subprocess.run(["jpegtran", "-copy", "all", "-optimize"], input=data, capture_output=True)
    except FileNotFoundError as error:
        raise GpuloadError(
            "making progressive JPEGs, and JPEGs with restart markers, cuttable needs the program jpegtran, which is "
            "not on PATH; install the package libjpeg-turbo-progs (Debian, Ubuntu), libjpeg-turbo-utils (Fedora) or "
            "jpeg-turbo (Homebrew)"
        ) from error
    return b"" if process.returncode or process.stderr else process.stdout  # a warning means damage


def add_index(data: bytes, header: JpegHeader) -> bytes | None:
    """Return the file with an index, and without the data after the image; None if no index can be added.

    The encoded data are not changed. Codes that joints need but the file lacks are added to its tables.

    The file must be a sequential 8-bit JPEG with Huffman coding, a single scan and no restart markers. It must not be
    damaged, and must have 16 KB or more: cutting saves nothing in smaller files.
    """
    if not header.is_plain or not header.has_single_scan or header.restart_interval:
        return None
    if header.index_at:
        length = int.from_bytes(data[header.index_at + 2 : header.index_at + 4], "big")
        data = data[: header.index_at] + data[header.index_at + 2 + length :]
        new_header = scan_markers(data)
        return None if new_header is None else add_index(data, new_header)
    start, stop = scan_start(data, header), end_of_scan(data, header)
    encoded_scan, (mcu, counts) = data[start:stop], mcu_layout(data, header)
    if data[stop : stop + 2] != EOI or not MIN_SCAN_BYTES <= len(encoded_scan) < 1 << 29 or not mcu[0] or not mcu[1]:
        return None
    scan = np.frombuffer(encoded_scan, np.uint8)
    stuffed_at = np.flatnonzero(scan == 0xFF) + 1
    if scan[-1] == 0xFF or scan[stuffed_at].any():
        return None
    tables, table_segments = read_tables(data, header)
    blocks = read_blocks(data, header, tables)
    if blocks is None:
        return None
    mcus_per_row, rows = count_mcus(header, mcu)
    scan_blocks = walk_scan(np.delete(scan, stuffed_at), blocks, mcus_per_row * rows)
    if scan_blocks is None:
        return None
    mcu_starts = scan_blocks[0][:: len(blocks)]  # the first bit of each MCU, and the bit after the last
    bit_offsets = mcu_starts + 8 * np.searchsorted(stuffed_at - np.arange(len(stuffed_at)), (mcu_starts >> 3) + 1)
    predictors = _predictors(scan_blocks[1], blocks)
    full_tables = _complete_tables(data, header, tables)
    blocks = None if full_tables is None else read_blocks(data, header, full_tables)
    if full_tables is None or blocks is None or np.ptp(np.append(predictors, 0)) > MAX_DC_DIFFERENCE:
        return None
    table_pairs = list({block.component: (block.dc, block.ac) for block in blocks}.values())
    paddings = {pair: _paddings(pair[1]) for pair in table_pairs}
    fewest_bits = _fewest_bits(table_pairs, paddings)
    if fewest_bits is None or len(set(counts[1:])) > 1:
        return None
    pairs = [list(paddings).index(pair) for pair in table_pairs]
    packed_joints = _pack_joints(paddings, fewest_bits)

    # The index goes after application segments and comments, before the first segment that belongs to the image.
    skipped_markers = {0xFFFF, COMMENT, *range(0xFFE0, 0xFFF0)}
    index_at = next(at for marker, at, _ in iterate_segments(data, header.first_scan) if marker not in skipped_markers)
    if full_tables == tables:
        tables_and_segments = data[index_at:start]
    else:
        ends = [index_at, *(end for table_segment in table_segments for end in table_segment), start]
        other_segments = [data[begin:end] for begin, end in zip(ends[::2], ends[1::2], strict=True)]
        tables_and_segments = b"".join((write_tables(full_tables), *other_segments))
    content_digest = digest(tables_and_segments, encoded_scan)
    for spacing in range(1, -(-mcus_per_row // 2) + 1):
        widths_and_points = _pack_points(bit_offsets, predictors, mcus_per_row, rows, spacing)
        if widths_and_points is None:
            continue
        widths, packed_points = widths_and_points
        unused_fields = [0] * (3 - header.components)
        fixed = FIXED.pack(
            0, content_digest, len(encoded_scan), spacing, *widths, len(paddings), *pairs, *unused_fields, fewest_bits
        )
        body = fixed[4:] + packed_joints + packed_points
        length = 2 + len(INDEX) + 4 + len(body)
        if length <= MAX_SEGMENT_BYTES + 2 and length <= max(MAX_GROWTH * len(data), ALLOWED_BYTES):
            segment = struct.pack(">HH", 0xFFEA, length) + INDEX + struct.pack("<I", crc32(body)) + body
            return b"".join((data[:index_at], segment, tables_and_segments, encoded_scan, EOI))
    return None


def _predictors(differences: np.ndarray, blocks: list[CoefficientBlock]) -> np.ndarray:
    """Return, for the start of each MCU and the end of the last, the DC coefficient of each component's previous block:
    int64 (MCUs + 1, components)."""
    mcu_differences = differences.reshape(-1, len(blocks))
    component = np.array([block.component for block in blocks])
    component_sums = [mcu_differences[:, component == index].sum(1) for index in range(component[-1] + 1)]
    sums = np.cumsum(np.stack(component_sums, 1), 0)
    return np.concatenate((np.zeros_like(sums[:1]), sums))


def _complete_tables(
    data: bytes, header: JpegHeader, tables: dict[int, HuffmanTable]
) -> dict[int, HuffmanTable] | None:
    """Return a file's tables, with all codes added that a joint may need; None if a table has no room for them."""
    full_tables = dict(tables)
    at = header.first_scan + 6
    for selector in data[at : at + 2 * header.components : 2]:
        dc, ac = (
            add_codes(full_tables[selector >> 4], range(CATEGORIES)),
            add_codes(full_tables[0x10 | selector & 15], DUMMIES),
        )
        if dc is None or ac is None:
            return None
        full_tables[selector >> 4], full_tables[0x10 | selector & 15] = dc, ac
    return full_tables


def _paddings(ac: HuffmanTable) -> list[int | None]:
    """Return, for each length from 0 to 63, the bits that pad a joint after its DC difference: the codes of as few AC
    coefficients as possible, and an end of block. The entry is None if no codes have this total length."""
    end, end_bits = ac.codes()[END]
    codes: dict[int, tuple[int, int]] = {}  # the number of coefficients, and the bits; keyed by length
    for symbol, (code, bits) in ac.codes().items():
        run, size = symbol >> 4, symbol & 15
        if size and (bits + size not in codes or run + 1 < codes[bits + size][0]):
            codes[bits + size] = run + 1, code << size
    best_codes: list[tuple[int, int] | None] = [(0, 0)] + [None] * (WORD - 1)
    for length in range(1, WORD):
        for bits, (coefficients, code) in codes.items():
            prefix = best_codes[length - bits] if bits <= length else None
            if prefix is not None and (total := prefix[0] + coefficients) < 63:
                current = best_codes[length]
                if current is None or total < current[0]:
                    best_codes[length] = total, prefix[1] << bits | code
    paddings: list[int | None] = [None] * WORD
    for length in range(end_bits, WORD):
        padding_codes = best_codes[length - end_bits]
        paddings[length] = None if padding_codes is None else padding_codes[1] << end_bits | end
    return paddings


def _fewest_bits(table_pairs: list[TablePair], paddings: dict[TablePair, list[int | None]]) -> int | None:
    """Return the minimum number of bits to pad in a word; None if a required number of bits has no padding.

    In a word, the first component may follow bits of the previous stretch, and the last may precede bits of the next.
    """
    fewest_bits = WORD
    for index, pair in enumerate(table_pairs):
        sizes = _sizes(pair)
        component_bits = WORD - max(sizes) - 7 * (index == 0) - 8 * (index == len(table_pairs) - 1)
        if component_bits < 0 or None in paddings[pair][component_bits : WORD - min(sizes) + 1]:
            return None
        fewest_bits = min(fewest_bits, component_bits)
    return fewest_bits


def _sizes(pair: TablePair) -> list[int]:
    """Return the number of bits of a DC difference in each category."""
    return [bits + category for category, (_, bits) in sorted(pair[0].codes().items())][:CATEGORIES]


def _pack_joints(paddings: dict[TablePair, list[int | None]], fewest_bits: int) -> bytes:
    """Pack the tables that encode joints (see `gpuload.decode.indexed` for the format)."""
    sizes = [_sizes(pair) for pair in paddings]
    codes = [[pair[0].codes()[category][0] << category for category in range(CATEGORIES)] for pair in paddings]
    padded = [[bits or 0 for bits in bits_of_table[fewest_bits:]] for bits_of_table in paddings.values()]
    tables = (sizes, SIZES), (codes, CODES), (padded, PADDINGS)
    return b"".join(np.array(values, dtype).tobytes() for values, dtype in tables)


def _pack_points(
    bit_offsets: np.ndarray, predictors: np.ndarray, mcus_per_row: int, rows: int, spacing: int
) -> tuple[tuple[int, int, int], bytes] | None:
    """Return the bit widths of the values in a point, and the packed points, one per `spacing` MCUs. Return None if a
    stretch would begin and end in the same byte, or if a point has too many bits (from about 33 MB of encoded data)."""
    row_starts = np.arange(rows) * mcus_per_row
    indices = np.append((row_starts[:, None] + np.arange(0, mcus_per_row, spacing)).ravel(), rows * mcus_per_row)
    if np.diff(bit_offsets[indices]).min() < MIN_BITS:
        return None
    widths = (
        int(bit_offsets[-1]).bit_length(),
        _signed_bits(predictors[indices, :1]),
        _signed_bits(predictors[indices, 1:]),
    )
    if (nbytes := point_bytes(predictors.shape[1], *widths)) > POINT // 8:
        return None
    points, shift = bit_offsets[indices], widths[0]
    for component, values in enumerate(predictors[indices].T):
        width = widths[1 + (component > 0)]
        points |= (values & (1 << width) - 1) << shift
        shift += width
    return widths, points.astype(POINTS).view(np.uint8).reshape(len(indices), -1)[:, :nbytes].tobytes()


def _signed_bits(values: np.ndarray) -> int:
    return int(np.append(values ^ values >> 63, 0).max()).bit_length() + 1  # the XOR maps a negative n to -1 - n
