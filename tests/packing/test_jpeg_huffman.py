"""Huffman tables of JPEGs: added codes, tables read and written, and the blocks that `walk_scan` finds."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.generated_images import encode
from helpers.jpeg_restarts import SAMPLINGS, header_of, restarted
from PIL import Image

from gpuload.decode.header import count_mcus, end_of_scan, mcu_layout, scan_start
from gpuload.packing.jpeg_huffman import HuffmanTable, add_codes, read_blocks, read_tables, walk_scan, write_tables

# Three codes of two bits and one code of three bits, for the symbols 0 … 3.
TABLE = HuffmanTable(bytes((0, 3, 1)) + bytes(13), bytes((0, 1, 2, 3)))


def scan_of(jpeg: bytes) -> np.ndarray:
    header = header_of(jpeg)
    scan = jpeg[scan_start(jpeg, header) : end_of_scan(jpeg, header)]
    return np.frombuffer(scan.replace(b"\xff\0", b"\xff"), np.uint8)


def walk(jpeg: bytes, scan: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    header = header_of(jpeg)
    tables, _ = read_tables(jpeg, header)
    blocks = read_blocks(jpeg, header, tables)
    mcus_per_row, rows = count_mcus(header, mcu_layout(jpeg, header)[0])
    return walk_scan(scan_of(jpeg) if scan is None else scan, blocks, mcus_per_row * rows)


def test_huffman_codes_count_up():
    assert TABLE.codes() == {0: (0b00, 2), 1: (0b01, 2), 2: (0b10, 2), 3: (0b110, 3)}


def test_add_codes_keeps_existing_codes():
    extended = add_codes(TABLE, (0, 7, 8, 9))
    codes = extended.codes()
    assert {symbol: codes[symbol] for symbol in range(4)} == TABLE.codes()
    assert {symbol: codes[symbol] for symbol in (7, 8, 9)} == {7: (0b11100, 5), 8: (0b11101, 5), 9: (0b11110, 5)}
    assert add_codes(TABLE, (3, 2)) is TABLE
    single = HuffmanTable(bytes((1,)) + bytes(15), b"\0")
    assert add_codes(single, (1,)).codes() == {0: (0, 1), 1: (0b10, 2)}
    assert add_codes(HuffmanTable(bytes(16), b""), (5,)).codes() == {5: (0, 1)}


def test_add_codes_without_room_returns_none():
    full = HuffmanTable(bytes((1,) * 16), bytes(range(16)))
    assert add_codes(full, (200,)) is None


def test_read_tables_returns_what_write_tables_wrote():
    jpeg = encode(np.zeros((40, 40, 3), np.uint8), "JPEG")
    tables, segments = read_tables(jpeg, header_of(jpeg))
    assert sorted(tables) == [0x00, 0x01, 0x10, 0x11]
    assert sum(end - begin for begin, end in segments) >= len(write_tables(tables))
    rewritten = jpeg[: segments[0][0]] + write_tables(tables) + jpeg[segments[-1][1] :]
    assert read_tables(rewritten, header_of(rewritten))[0] == tables


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("content", ["noise", "smooth", "few"])
def test_walk_scan_finds_consecutive_blocks_to_the_end(sampling, content):
    jpeg = restarted(sampling, (7, 5), 0, (3, 2), content=content)
    result = walk(jpeg)
    assert result is not None
    begins, differences = result
    assert len(begins) == len(differences) + 1
    assert (np.diff(begins) >= 2).all()
    assert 8 * len(scan_of(jpeg)) - begins[-1] in range(8)


def test_walk_scan_differences_equal_differences_of_block_means():
    """Flat blocks are coded by their DC coefficient alone, which is eight times the level at this quality."""
    levels = np.random.default_rng(0).integers(0, 256, (6, 9), np.uint8)
    jpeg = encode(np.repeat(np.repeat(levels, 8, 0), 8, 1), "JPEG", mode="L", quality=100)
    coefficients = np.cumsum(walk(jpeg)[1])
    np.testing.assert_array_equal(coefficients, 8 * (levels.ravel().astype(int) - 128))


def test_walk_scan_result_does_not_depend_on_the_chunk_size(monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    jpeg = encode(noise, "JPEG")
    expected = walk(jpeg)
    assert expected is not None
    monkeypatch.setattr("gpuload.packing.jpeg_huffman.CHUNK", 777)
    result = walk(jpeg)
    assert result is not None
    for values, expected_values in zip(result, expected, strict=True):
        np.testing.assert_array_equal(values, expected_values)


def test_walk_scan_of_wrong_or_missing_codes_returns_none():
    gradient = np.asarray(Image.linear_gradient("L").convert("RGB"))
    jpeg = encode(gradient, "JPEG")
    scan = scan_of(jpeg)
    scan_with_ones = scan.copy()
    scan_with_ones[40:44] = 0xFF
    assert walk(jpeg) is not None
    for damaged_scan in (scan[:-2], np.append(scan, np.uint8(0)), scan_with_ones, scan[:1], np.zeros_like(scan)):
        assert walk(jpeg, damaged_scan) is None
