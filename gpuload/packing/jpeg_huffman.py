"""The Huffman tables of a JPEG: reading tables, adding codes, and following the codes of a scan bit by bit.

`jpeg_cuttable` uses this module to build an index, which takes about 60 ms for a photo.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from gpuload.decode.header import DHT, JpegHeader

__all__ = [
    "CoefficientBlock",
    "HuffmanTable",
    "add_codes",
    "iterate_segments",
    "read_blocks",
    "read_tables",
    "walk_scan",
    "write_tables",
]

MAX_CODE_BITS: Final = 16
CHUNK: Final = 1 << 16  # bytes of a scan for which the codes at all bit offsets are looked up together
MAX_MCU_BYTES: Final = 2600  # an upper limit: 10 blocks of 64 coefficients of 31 bits
# Coefficient counts that mark an end of block and an invalid code; both exceed the size of a block.
END, INVALID = 100, 200


class HuffmanTable(NamedTuple):
    """A Huffman table: the number of codes of each length from 1 to 16 bits, and the symbols in the order of their
    codes."""

    counts: bytes
    symbols: bytes

    def codes(self) -> dict[int, tuple[int, int]]:
        """Return the code of each symbol, and the code's length in bits."""
        codes: dict[int, tuple[int, int]] = {}
        code, at = 0, 0
        for bits, count in enumerate(self.counts, 1):
            for symbol in self.symbols[at : at + count]:
                codes[symbol] = (code, bits)
                code += 1
            at += count
            code <<= 1
        return codes


class CoefficientBlock(NamedTuple):
    """A block of an MCU: the index of its component in the scan, and the tables for its coefficients."""

    component: int
    dc: HuffmanTable
    ac: HuffmanTable


def iterate_segments(data: bytes, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield marker, begin and end of each segment (or fill byte) that begins before `stop`."""
    at = 2
    while at < stop:
        marker, length = struct.unpack_from(">HH", data, at)
        end = at + 1 if marker == 0xFFFF else at + 2 + length
        yield marker, at, end
        at = end


def read_tables(data: bytes, header: JpegHeader) -> tuple[dict[int, HuffmanTable], list[tuple[int, int]]]:
    """Return the tables of the first scan, keyed by the byte that holds class and number; and the begin and end of each
    segment that defines tables."""
    tables: dict[int, HuffmanTable] = {}
    table_segments = [(at, end) for marker, at, end in iterate_segments(data, header.first_scan) if marker == DHT]
    for at, end in table_segments:
        table_at = at + 4
        while table_at < end:
            counts = data[table_at + 1 : table_at + 17]
            tables[data[table_at]] = HuffmanTable(counts, data[table_at + 17 : table_at + 17 + sum(counts)])
            table_at += 17 + sum(counts)
    return tables, table_segments


def write_tables(tables: dict[int, HuffmanTable]) -> bytes:
    """Return a segment that defines these tables."""
    body = b"".join(bytes((number,)) + table.counts + table.symbols for number, table in tables.items())
    return struct.pack(">HH", DHT, len(body) + 2) + body


def add_codes(table: HuffmanTable, symbols: Iterable[int]) -> HuffmanTable | None:
    """Add codes for these symbols to a table, without changing its codes. Return the new table; None if it has no room.

    No code consists only of ones, so longer codes can always be added after the last code, up to 16 bits.
    """
    missing_symbols = [symbol for symbol in symbols if symbol not in table.symbols]
    if not missing_symbols:
        return table
    bits = max((bits for bits, count in enumerate(table.counts, 1) if count), default=1)
    next_code = max((code + 1 for code, length in table.codes().values() if length == bits), default=0)
    while bits <= MAX_CODE_BITS and next_code + len(missing_symbols) > (1 << bits) - 1:
        bits, next_code = bits + 1, next_code << 1
    if bits > MAX_CODE_BITS:
        return None
    counts = bytearray(table.counts)
    counts[bits - 1] += len(missing_symbols)
    return HuffmanTable(bytes(counts), table.symbols + bytes(missing_symbols))


def read_blocks(data: bytes, header: JpegHeader, tables: dict[int, HuffmanTable]) -> list[CoefficientBlock] | None:
    """Return the blocks of an MCU in order; None if the headers of the scan and the frame do not match."""
    at = header.first_scan + 4
    if data[at] != header.components:
        return None
    blocks: list[CoefficientBlock] = []
    for component in range(header.components):
        expected, factors = data[header.frame_at + 10 + 3 * component : header.frame_at + 12 + 3 * component]
        number, selector = data[at + 1 + 2 * component : at + 3 + 2 * component]
        dc, ac = tables.get(selector >> 4), tables.get(0x10 | selector & 15)
        if number != expected or dc is None or ac is None:
            return None
        blocks += [CoefficientBlock(component, dc, ac)] * (
            (factors >> 4) * (factors & 15) if header.components > 1 else 1
        )
    return blocks


def walk_scan(scan: np.ndarray, blocks: list[CoefficientBlock], mcu_count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Follow the codes of a scan. Return None if a code is invalid, or the scan has too few or too many codes.

    Args:
        scan: the bytes of the scan, uint8, without the bytes stuffed after 0xFF.
        blocks: the blocks of an MCU.
        mcu_count: the number of MCUs.

    Returns:
        The first bit of each block, and the bit after the last block, int64; and the difference of each block's DC
        coefficient from that of the component's previous block, int64.
    """
    padded = np.concatenate((scan, np.full(2 * MAX_MCU_BYTES, 0xFF, np.uint8)))
    starts: list[np.ndarray] = []
    offset, remaining, bit = 0, mcu_count, 0
    while remaining:
        if offset > len(scan):
            return None
        block_starts, bit = _walk_chunk(padded[offset : offset + CHUNK + MAX_MCU_BYTES + 2], blocks, remaining, bit)
        if block_starts is None:
            return None
        starts.append(block_starts + 8 * offset)
        remaining -= len(block_starts) // len(blocks)
        offset, bit = offset + bit // 8, bit % 8
    end = 8 * offset + bit
    if not 0 <= 8 * len(scan) - end < 8:
        return None
    begins = np.concatenate(starts)
    differences = np.empty(len(begins), np.int64)
    for index, block in enumerate(blocks):
        block_differences = _read_dc(padded, begins[index :: len(blocks)], block.dc)
        if block_differences is None:
            return None
        differences[index :: len(blocks)] = block_differences
    return np.append(begins, end), differences


def _walk_chunk(
    scan: np.ndarray, blocks: list[CoefficientBlock], mcu_count: int, bit: int
) -> tuple[np.ndarray | None, int]:
    """Return the first bit of each block, for at most `mcu_count` MCUs that begin in the chunk, and the bit after the
    last block. If a code is invalid, return None instead of the first bits."""
    wide = scan.astype(np.uint32)
    next_24_bits = wide[:-2] << 16 | wide[1:-1] << 8 | wide[2:]
    windows = np.empty((len(next_24_bits), 8), np.uint16)  # the 16 bits that start at each bit
    for shift in range(8):
        windows[:, shift] = next_24_bits >> (8 - shift)
    flat = windows.ravel()
    lookups: dict[tuple[HuffmanTable, bool], tuple[bytes, bytes]] = {}
    for block in blocks:
        for table, is_dc in ((block.dc, True), (block.ac, False)):
            if (table, is_dc) not in lookups:
                bits, coefficients = _build_lookup(table, is_dc)
                lookups[table, is_dc] = bits[flat].tobytes(), coefficients[flat].tobytes()
    block_lookups = [(lookups[block.dc, True][0], *lookups[block.ac, False]) for block in blocks]
    starts: list[int] = []
    add_start = starts.append
    limit = 8 * min(CHUNK, len(next_24_bits) - MAX_MCU_BYTES)
    while mcu_count and bit < limit:
        for dc_bits, ac_bits, coefficients in block_lookups:
            add_start(bit)
            bit += dc_bits[bit]
            remaining = 63
            while remaining > 0:
                remaining -= coefficients[bit]
                bit += ac_bits[bit]
            if remaining and not 0 <= remaining + END < 63 + 1:
                return None, bit
        mcu_count -= 1
    return np.array(starts, np.int64), bit


def _code_windows(table: HuffmanTable) -> Iterator[tuple[slice, int, int]]:
    """Yield for each code the range of 16-bit windows that begin with it, the code's length in bits, and its symbol."""
    for symbol, (code, bits) in table.codes().items():
        yield slice(code << (MAX_CODE_BITS - bits), (code + 1) << (MAX_CODE_BITS - bits)), bits, symbol


def _build_lookup(table: HuffmanTable, is_dc: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return two uint8 arrays, indexed by 16-bit windows: the total length, in bits, of the first code and the value
    after it; and the number of coefficients that these bits encode."""
    bits = np.ones(1 << MAX_CODE_BITS, np.uint8)
    coefficients = np.full(1 << MAX_CODE_BITS, INVALID, np.uint8)
    for windows, length, symbol in _code_windows(table):
        run, size = (0, symbol) if is_dc else (symbol >> 4, symbol & 15)
        bits[windows] = min(length + size, 255)
        if size or run == 15:
            coefficients[windows] = run + 1
        elif not run:
            coefficients[windows] = END
    return bits, coefficients


def _read_dc(scan: np.ndarray, begins: np.ndarray, table: HuffmanTable) -> np.ndarray | None:
    """Decode the DC differences that begin at these bits. Return None if a code is not valid in 8-bit JPEGs."""
    byte, bit = begins >> 3, begins & 7
    window = np.zeros(len(begins), np.int64)
    for offset in range(5):
        window = window << 8 | scan[byte + offset]
    sizes_by_window = np.full(1 << MAX_CODE_BITS, 255, np.int64)
    lengths_by_window = np.zeros(1 << MAX_CODE_BITS, np.int64)
    for windows, length, symbol in _code_windows(table):
        sizes_by_window[windows], lengths_by_window[windows] = symbol, length
    code_window = window >> (24 - bit) & 0xFFFF
    size, length = sizes_by_window[code_window], lengths_by_window[code_window]
    if (size > 11).any():
        return None
    value = window >> (40 - bit - length - size) & ((1 << size) - 1)
    return np.where(value < 1 << np.maximum(size - 1, 0), value - (1 << size) + 1, value) * (size > 0)
