"""The Huffman codes of a JPEG's scan: read from its header, added to, and followed through the scan bit by bit.

For making an index (`jpeg_cuttable`): some 60 ms for a photograph.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from gpuload.decode.header import DHT, JpegHeader

__all__ = ["Block", "Table", "complete", "read_blocks", "read_tables", "segments", "walk", "write_tables"]

LONGEST: Final = 16  # bits of a code
CHUNK: Final = 1 << 16  # bytes of a scan of which the codes at each bit are looked up at once
MOST: Final = 2600  # more bytes than an MCU has: 10 blocks of 64 coefficients of 31 bits
# What a symbol adds to the number of coefficients; these are more than a block has.
END, WRONG = 100, 200


class Table(NamedTuple):
    """How many codes there are of 1 … 16 bits, and the symbols in their order."""

    counts: bytes
    symbols: bytes

    def codes(self) -> dict[int, tuple[int, int]]:
        """Return the code of each symbol and its bits."""
        codes: dict[int, tuple[int, int]] = {}
        code, at = 0, 0
        for bits, count in enumerate(self.counts, 1):
            for symbol in self.symbols[at : at + count]:
                codes[symbol] = (code, bits)
                code += 1
            at += count
            code <<= 1
        return codes


class Block(NamedTuple):
    """A block of an MCU: its component, in the order of the scan, and the tables of its coefficients."""

    component: int
    dc: Table
    ac: Table


def segments(data: bytes, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield marker, begin and end of the segments that begin before `stop`; of each fill byte too."""
    at = 2
    while at < stop:
        marker, length = struct.unpack_from(">HH", data, at)
        end = at + 1 if marker == 0xFFFF else at + 2 + length
        yield marker, at, end
        at = end


def read_tables(data: bytes, header: JpegHeader) -> tuple[dict[int, Table], list[tuple[int, int]]]:
    """Return the tables that hold at the first scan, by class and number as in the file, and their segments."""
    tables: dict[int, Table] = {}
    places = [(at, end) for marker, at, end in segments(data, header.first_scan) if marker == DHT]
    for at, end in places:
        inner = at + 4
        while inner < end:
            counts = data[inner + 1 : inner + 17]
            tables[data[inner]] = Table(counts, data[inner + 17 : inner + 17 + sum(counts)])
            inner += 17 + sum(counts)
    return tables, places


def write_tables(tables: dict[int, Table]) -> bytes:
    """Return a segment that defines them."""
    body = b"".join(bytes((number,)) + table.counts + table.symbols for number, table in tables.items())
    return struct.pack(">HH", DHT, len(body) + 2) + body


def complete(table: Table, symbols: Iterable[int]) -> Table | None:
    """Return the table with codes for these symbols too, the codes that it has being kept; None if there is no room.

    A code is never all ones, so behind the last there is always room for longer ones.
    """
    missing = [symbol for symbol in symbols if symbol not in table.symbols]
    if not missing:
        return table
    bits = max((bits for bits, count in enumerate(table.counts, 1) if count), default=1)
    free = max((code + 1 for code, length in table.codes().values() if length == bits), default=0)
    while bits <= LONGEST and free + len(missing) > (1 << bits) - 1:
        bits, free = bits + 1, free << 1
    if bits > LONGEST:
        return None
    counts = bytearray(table.counts)
    counts[bits - 1] += len(missing)
    return Table(bytes(counts), table.symbols + bytes(missing))


def read_blocks(data: bytes, header: JpegHeader, tables: dict[int, Table]) -> list[Block] | None:
    """Return the blocks of an MCU in their order; None where the header of the scan does not fit that of the frame."""
    at = header.first_scan + 4
    if data[at] != header.components:
        return None
    blocks: list[Block] = []
    for component in range(header.components):
        known, factors = data[header.frame_at + 10 + 3 * component : header.frame_at + 12 + 3 * component]
        number, used = data[at + 1 + 2 * component : at + 3 + 2 * component]
        dc, ac = tables.get(used >> 4), tables.get(0x10 | used & 15)
        if number != known or dc is None or ac is None:
            return None
        blocks += [Block(component, dc, ac)] * ((factors >> 4) * (factors & 15) if header.components > 1 else 1)
    return blocks


def walk(scan: np.ndarray, blocks: list[Block], count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Follow the codes of a scan; None if they are wrong, or not as many as there should be.

    Args:
        scan: its bytes, uint8, those behind 0xFF left out.
        blocks: of an MCU.
        count: of MCUs.

    Returns:
        The bit at which each block begins and at last the one behind all, int64; and the difference of each block's DC
        coefficient from that of the component's block before, int64.
    """
    padded = np.concatenate((scan, np.full(2 * MOST, 0xFF, np.uint8)))
    starts: list[np.ndarray] = []
    base, left, bit = 0, count, 0
    while left:
        if base > len(scan):
            return None
        block_starts, bit = _walk_chunk(padded[base : base + CHUNK + MOST + 2], blocks, left, bit)
        if block_starts is None:
            return None
        starts.append(block_starts + 8 * base)
        left -= len(block_starts) // len(blocks)
        base, bit = base + bit // 8, bit % 8
    end = 8 * base + bit
    if not 0 <= 8 * len(scan) - end < 8:
        return None
    begins = np.concatenate(starts)
    differences = np.empty(len(begins), np.int64)
    for place, block in enumerate(blocks):
        read = _read_dc(padded, begins[place :: len(blocks)], block.dc)
        if read is None:
            return None
        differences[place :: len(blocks)] = read
    return np.append(begins, end), differences


def _walk_chunk(scan: np.ndarray, blocks: list[Block], count: int, bit: int) -> tuple[np.ndarray | None, int]:
    """Return the first bits of the blocks of so many MCUs, or of those that begin in the chunk; and the bit behind."""
    wide = scan.astype(np.uint32)
    three = wide[:-2] << 16 | wide[1:-1] << 8 | wide[2:]
    windows = np.empty((len(three), 8), np.uint16)  # the 16 bits that begin at each bit
    for shift in range(8):
        windows[:, shift] = three >> (8 - shift)
    flat = windows.ravel()
    steps: dict[tuple[Table, bool], tuple[bytes, bytes]] = {}
    for block in blocks:
        for table, is_dc in ((block.dc, True), (block.ac, False)):
            if (table, is_dc) not in steps:
                bits, coefficients = _lookup(table, is_dc)
                steps[table, is_dc] = bits[flat].tobytes(), coefficients[flat].tobytes()
    plan = [(steps[block.dc, True][0], *steps[block.ac, False]) for block in blocks]
    starts: list[int] = []
    note = starts.append
    limit = 8 * min(CHUNK, len(three) - MOST)
    while count and bit < limit:
        for dc_bits, ac_bits, coefficients in plan:
            note(bit)
            bit += dc_bits[bit]
            left = 63
            while left > 0:
                left -= coefficients[bit]
                bit += ac_bits[bit]
            if left and not 0 <= left + END < 63 + 1:
                return None, bit
        count -= 1
    return np.array(starts, np.int64), bit


def _entries(table: Table) -> Iterator[tuple[slice, int, int]]:
    """Yield for each code the windows of 16 bits that begin with it, its bits, and its symbol."""
    for symbol, (code, bits) in table.codes().items():
        yield slice(code << (LONGEST - bits), (code + 1) << (LONGEST - bits)), bits, symbol


def _lookup(table: Table, is_dc: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return for each 16 bits how many belong to the code that they begin with and the number behind it, uint8; and
    how many coefficients that is, uint8."""
    bits = np.ones(1 << LONGEST, np.uint8)
    coefficients = np.full(1 << LONGEST, WRONG, np.uint8)
    for windows, length, symbol in _entries(table):
        run, size = (0, symbol) if is_dc else (symbol >> 4, symbol & 15)
        bits[windows] = min(length + size, 255)
        if size or run == 15:
            coefficients[windows] = run + 1
        elif not run:
            coefficients[windows] = END
    return bits, coefficients


def _read_dc(scan: np.ndarray, begins: np.ndarray, table: Table) -> np.ndarray | None:
    """Return the differences that are coded at these bits; None if one of them is no code of 8-bit JPEGs."""
    byte, bit = begins >> 3, begins & 7
    window = np.zeros(len(begins), np.int64)
    for place in range(5):
        window = window << 8 | scan[byte + place]
    sizes = np.full(1 << LONGEST, 255, np.int64)
    lengths = np.zeros(1 << LONGEST, np.int64)
    for windows, length, symbol in _entries(table):
        sizes[windows], lengths[windows] = symbol, length
    first = window >> (24 - bit) & 0xFFFF
    size, length = sizes[first], lengths[first]
    if (size > 11).any():
        return None
    value = window >> (40 - bit - length - size) & ((1 << size) - 1)
    return np.where(value < 1 << np.maximum(size - 1, 0), value - (1 << size) + 1, value) * (size > 0)
