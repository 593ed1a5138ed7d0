"""`cut` of JPEGs by the index of gpuload: equal pixels, and indexes that are damaged, foreign or forged."""

from __future__ import annotations

import io
import struct
from unittest import mock
from zlib import crc32

import numpy as np
import pytest
from helpers.jpeg_crops import always_cutting, check_not_cut, check_pixels, jpeg_decoders, with_cutting, without_cutting
from helpers.jpeg_restarts import SAMPLINGS, header_of, make_jpeg
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, cut_files, find_grid, is_cuttable
from gpuload.decode.header import INDEX
from gpuload.decode.indexed import FIXED, point_bytes
from gpuload.decode.jpeg import SimpleJpeg
from gpuload.packing.jpeg_cuttable import add_index

Region = tuple[int, int, int, int]
TABLES = b"\xff\xdb\x00\x43"  # these bytes follow the index
SCAN_HEADER_BYTES = 14


def add_index_to(jpeg: bytes, max_bytes: int = 65_000) -> bytes:
    """Add an index of at most `max_bytes`, however small the image is: a smaller index has fewer points."""
    with mock.patch.multiple("gpuload.packing.jpeg_cuttable", MIN_SCAN_BYTES=0, MAX_GROWTH=0, ALLOWED_BYTES=max_bytes):
        with_index = add_index(jpeg, header_of(jpeg))
    return jpeg if with_index is None else with_index


@st.composite
def jpegs_and_regions(draw: st.DrawFn) -> tuple[bytes, Region, str]:
    """Draw a JPEG with an index, a region of it, and its sampling."""
    sampling = draw(st.sampled_from(list(SAMPLINGS)))
    mcus = draw(st.integers(2, 9)), draw(st.integers(1, 7))
    size = SAMPLINGS[sampling].mcu_size_wh
    missing_pixels = draw(st.integers(0, size[0] - 1)), draw(st.integers(0, size[1] - 1))
    seed, content = draw(st.integers(0, 3)), draw(st.sampled_from(["noise", "smooth", "few"]))
    jpeg = make_jpeg(sampling, mcus, missing_pixels_wh=missing_pixels, seed=seed, content=content)
    full_height, full_width = header_of(jpeg)[2:4]
    top = draw(st.just(0) | st.integers(0, full_height - 1))
    left = draw(st.just(0) | st.integers(0, full_width - 1))
    height = draw(st.just(full_height - top) | st.integers(1, full_height - top))
    width = draw(st.just(full_width - left) | st.integers(1, full_width - left))
    with_index = add_index_to(jpeg, draw(st.sampled_from([1_000, 1_300, 65_000])))
    assume(with_index != jpeg)
    return with_index, (top, left, height, width), sampling


@pytest.mark.slow
@settings(max_examples=400)
@given(jpegs_and_regions())
def test_indexed_cut_equals_the_region_of_the_entire_image(case):
    jpeg, region, sampling = case
    check_pixels(jpeg, sampling, [region], jpeg_decoders())


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("content", ["noise", "smooth", "few"])
def test_indexed_cut_at_the_edges_of_columns_and_of_the_image_equals_the_region(sampling, content):
    width, height = SAMPLINGS[sampling].mcu_size_wh
    jpeg = add_index_to(make_jpeg(sampling, (6, 4), missing_pixels_wh=(1, 1), content=content))
    regions = [
        (top, left, bottom - top, right - left)
        for top in (0, height - 1, height, height + 1)
        for left in (0, 2 * width - 1, 2 * width, 2 * width + 1)
        for bottom in (2 * height - 1, 2 * height, 2 * height + 1, 4 * height - 1)
        for right in (4 * width - 1, 4 * width, 4 * width + 1, 6 * width - 1)
    ]
    check_pixels(jpeg, sampling, regions, [SimpleJpeg()])


def test_indexed_cuts_of_photographs_equal_their_regions(photos):
    """Two of the four regions end at the image's edges."""
    rng, cut_count = np.random.default_rng(1), 0
    for path in photos:
        jpeg = path.read_bytes()
        header = header_of(jpeg)
        with_index = add_index(jpeg, header)
        image, _ = SimpleJpeg().decode(jpeg, header, False, (0, 0, header.height, header.width))
        for number in range(4):
            height, width = (int(rng.integers(1, size + 1)) for size in (header.height, header.width))
            top = (0, header.height - height)[number] if number < 2 else int(rng.integers(header.height - height + 1))
            left = (header.width - width, 0)[number] if number < 2 else int(rng.integers(header.width - width + 1))
            with always_cutting:
                part = cut(with_index, header_of(with_index), (top, left, height, width))
            pixels, message = SimpleJpeg().decode(part.data, part.header, False, part.region_tlhw)
            assert not message
            np.testing.assert_array_equal(pixels, image[top : top + height, left : left + width])
            cut_count += len(part.data) < len(jpeg)
    assert cut_count > 3 * len(photos)


@pytest.fixture(scope="module")
def large_jpeg() -> bytes:
    """512×384, 4:2:0, 32×24 MCUs."""
    return add_index_to(make_jpeg("4:2:0", (32, 24)), 3_000)


def test_indexed_cut_is_a_jpeg_without_restarts_of_the_blocks_it_touches(large_jpeg):
    header = header_of(large_jpeg)
    index = find_grid(large_jpeg, header)
    assert (index.rows, index.cell_height, index.cell_width) == (24, 16, 16 * index.cell_mcus_across)
    part = cut(large_jpeg, header, (100, 250, 60, 100))
    assert part.header[:5] == header_of(part.data)[:5]
    assert (part.header.index_at, part.header.restart_interval) == (0, 0)
    assert part.header.first_scan == header_of(part.data).first_scan
    assert part.header.frame_at == header_of(part.data).frame_at
    assert len(part.data) < len(large_jpeg) / 10
    assert part.header.height == 80  # five rows of blocks
    assert part.header.width <= 100 + 2 * index.cell_width + 16


def test_indexed_cut_of_middle_rows_has_margins_above_and_to_the_left(large_jpeg):
    sizes = {}
    with always_cutting:
        for left in (0, 40):
            for top in (0, 40):
                part = cut(large_jpeg, header_of(large_jpeg), (top, left, 30, 512 - left))
                sizes[left, top] = part.region_tlhw[:2], part.header.height
    assert sizes[0, 0] == ((0, 0), 32)
    assert sizes[0, 40] == ((16 + 8, 0), 16 + 48)
    assert sizes[40, 0][0][1] > 16
    assert sizes[40, 40][0][0] == 8


FORGERIES = {
    "none": lambda jpeg: b"",
    "longer codes": lambda jpeg: forge_index(jpeg, FIXED.size - 4, b"\x28" * 24),
    "a negative number of paddings": lambda jpeg: forge_paddings(jpeg),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_cut_files_equals_cut_of_each_file(large_jpeg, forgery):
    """The files have various tables and layouts, restart markers, no index, or an index that does not fit."""
    rng = np.random.default_rng(7)
    files = [
        add_index_to(make_jpeg(sampling, (24, 20), content=content), max_bytes)
        for sampling in SAMPLINGS
        for content, max_bytes in (("smooth", 65_000), ("noise", 3_000))
    ]
    files += [
        large_jpeg,
        with_index_of_another_picture(large_jpeg),
        flip_bit(large_jpeg, header_of(large_jpeg).index_at + 700),
        make_jpeg("4:4:4", (24, 20), interval=4),
    ]
    files += [make_jpeg("4:2:0", (24, 20)), *filter(None, [FORGERIES[forgery](large_jpeg)])]
    requests = []
    for number, jpeg in enumerate([*files, large_jpeg, *files, large_jpeg]):
        header = header_of(jpeg)
        height, width = int(rng.integers(30, header.height - 30)), int(rng.integers(30, header.width - 30))
        top, left = int(rng.integers(header.height - height + 1)), int(rng.integers(header.width - width + 1))
        requests.append((jpeg, header, (top, left * (number < len(files)), height, width)))  # half of them at left 0
    with always_cutting:
        parts, each_alone = cut_files(requests), [cut(*request) for request in requests]
    assert parts == each_alone
    assert 20 < sum(part is not None for part in parts) < len(parts)


def replace_bytes(jpeg: bytes, offset: int, value: bytes) -> bytes:
    return jpeg[:offset] + value + jpeg[offset + len(value) :]


def flip_bit(jpeg: bytes, offset: int) -> bytes:
    return replace_bytes(jpeg, offset, bytes((jpeg[offset] ^ 4,)))


def extend_index(jpeg: bytes) -> bytes:
    """Append bytes to the index and update the length of its segment, but not the checksum."""
    index_at = header_of(jpeg).index_at
    length = struct.unpack_from(">H", jpeg, index_at + 2)[0]
    end = index_at + 2 + length
    return jpeg[: index_at + 2] + struct.pack(">H", length + 3) + jpeg[index_at + 4 : end] + b"abc" + jpeg[end:]


def with_index_of_another_picture(jpeg: bytes) -> bytes:
    """Replace the image by another of the same size but keep the index, like a program that copies all segments."""
    file = io.BytesIO()
    rotated = Image.open(io.BytesIO(jpeg)).transpose(Image.Transpose.ROTATE_180)
    rotated.save(file, "JPEG", quality=60, subsampling=2)
    other = file.getvalue()
    return jpeg[: jpeg.index(TABLES, header_of(jpeg).index_at)] + other[other.index(TABLES) :]


DAMAGES = {
    "its last byte": lambda jpeg: flip_bit(jpeg, jpeg.index(TABLES, header_of(jpeg).index_at) - 1),
    "its length": extend_index,
    "its version": lambda jpeg: replace_bytes(jpeg, header_of(jpeg).index_at + 4 + len(INDEX) - 1, b"\x01"),
    "another width": lambda jpeg: replace_bytes(jpeg, header_of(jpeg).frame_at + 7, b"\x01\xff"),
    "another picture": with_index_of_another_picture,
    "a byte less": lambda jpeg: jpeg[:-500] + jpeg[-499:],
    "the scan's start": lambda jpeg: flip_bit(jpeg, header_of(jpeg).first_scan + 30),
    "the scan's end": lambda jpeg: flip_bit(jpeg, len(jpeg) - 20),
    "cut off": lambda jpeg: jpeg[:-900],
    "cut off, with an end": lambda jpeg: jpeg[:-900] + b"\xff\xd9",
    "nothing after the header": lambda jpeg: jpeg[: header_of(jpeg).first_scan + SCAN_HEADER_BYTES],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_index_that_does_not_fit_the_file_is_not_used(large_jpeg, damage):
    region = (150, 200, 80, 90)
    assert cut(large_jpeg, header_of(large_jpeg), region) is not None
    check_not_cut(DAMAGES[damage](large_jpeg), region)


def test_index_with_any_changed_byte_is_not_used(large_jpeg):
    header = header_of(large_jpeg)
    end = large_jpeg.index(TABLES, header.index_at)
    for offset in range(header.index_at + 4, end, 41):
        damaged = flip_bit(large_jpeg, offset)
        assert cut(damaged, header_of(damaged), (150, 200, 80, 90)) is None


def test_indexed_cut_is_right_where_bits_above_are_flipped(large_jpeg):
    """The entire image has other pixels there, or none: the bits that follow a flipped bit are misread."""
    rng, decoder, region = np.random.default_rng(3), Decoder(Decode()), (250, 300, 80, 90)
    intact, better_than_uncut, refused = with_cutting(decoder, large_jpeg, region), 0, 0
    scan = header_of(large_jpeg).first_scan + SCAN_HEADER_BYTES + 256  # a change before it makes the index unused
    for _ in range(20):
        offset = int(rng.integers(scan, scan + (len(large_jpeg) - scan) // 3))
        damaged = flip_bit(large_jpeg, offset)
        pixels = with_cutting(decoder, damaged, region)
        if pixels is None or cut(damaged, header_of(damaged), region) is None:
            refused += 1
            continue
        np.testing.assert_array_equal(pixels, intact)
        uncut = without_cutting(decoder, damaged, region)
        better_than_uncut += uncut is None or not np.array_equal(uncut, intact)
    assert better_than_uncut > 10, "too few of the 20 bits changed pixels without cutting"
    assert refused == 0


def forge_index(jpeg: bytes, offset: int, value: bytes) -> bytes:
    """Replace bytes of the index, and update its checksum."""
    begin = header_of(jpeg).index_at + 4 + len(INDEX)
    end = jpeg.index(TABLES, begin)
    body = replace_bytes(jpeg[begin + 4 : end], offset, value)
    return jpeg[:begin] + struct.pack("<I", crc32(body)) + body + jpeg[end:]


def forge_paddings(jpeg: bytes) -> bytes:
    """Give the index a negative number of paddings, and update its length and checksum."""
    header = header_of(jpeg)
    index_at, index = header.index_at, find_grid(jpeg, header)
    fields = [*FIXED.unpack_from(jpeg, index.tables_at - FIXED.size)[:-1], 90]  # a min_padding of more than 64 bits
    removed_bytes = index.kind_count * 8 * (fields[-1] - index.min_padding)
    body = FIXED.pack(*fields)[4:] + jpeg[index.tables_at + removed_bytes : index.end]
    segment = INDEX + struct.pack("<I", crc32(body)) + body
    return jpeg[: index_at + 2] + struct.pack(">H", 2 + len(segment)) + segment + jpeg[index.end :]


def test_forged_index_can_change_pixels_but_decoding_succeeds(large_jpeg):
    """Pixels may be wrong, as in any forged file, but decoding neither fails nor takes more memory."""
    rng, decoder, region = np.random.default_rng(5), Decoder(Decode()), (150, 200, 80, 90)
    header = header_of(large_jpeg)
    size = large_jpeg.index(TABLES, header.index_at) - header.index_at - 4 - len(INDEX) - 4
    cut_count = 0
    for number in range(400):
        offset = number % 28 if number < 200 else int(rng.integers(28, size - 8))
        jpeg = forge_index(large_jpeg, offset, rng.bytes(4))
        part = cut(jpeg, header_of(jpeg), region)
        if part is not None:
            assert len(part.data) < 2 * len(jpeg)
            cut_count += 1
        assert with_cutting(decoder, jpeg, region) is not None, "decoding failed"
    assert 0 < cut_count < 400


def test_forged_index_changes_no_pixel_if_index_is_false(large_jpeg):
    """With the index, some of these regions have other pixels: a forger chooses what is seen."""
    rng, region = np.random.default_rng(5), (150, 200, 80, 90)
    with_index, without_index = Decoder(Decode()), Decoder(Decode(index=False))
    header = header_of(large_jpeg)
    size = large_jpeg.index(TABLES, header.index_at) - header.index_at - 4 - len(INDEX) - 4
    image, changed_count = with_cutting(without_index, large_jpeg, region), 0
    assert image is not None
    for _ in range(60):
        jpeg = forge_index(large_jpeg, int(rng.integers(28, size - 8)), rng.bytes(4))
        np.testing.assert_array_equal(with_cutting(without_index, jpeg, region), image)
        changed_count += not np.array_equal(with_cutting(with_index, jpeg, region), image)
    assert changed_count > 0, "no forged index changed pixels"
    assert (without_index.counts["cut"], with_index.counts["cut"] > 0) == (0, True)


def test_index_with_swapped_halves_is_not_used(large_jpeg):
    header = header_of(large_jpeg)
    begin, end = header.index_at + 4 + len(INDEX) + 4 + 100, large_jpeg.index(TABLES, header.index_at)
    step = (end - begin) // 2
    first, second = large_jpeg[begin : begin + step], large_jpeg[begin + step : begin + 2 * step]
    swapped = large_jpeg[:begin] + second + first + large_jpeg[begin + 2 * step :]
    assert sorted(swapped) == sorted(large_jpeg)
    assert swapped != large_jpeg
    assert (is_cuttable(large_jpeg, header), is_cuttable(swapped, header_of(swapped))) == (True, False)


def test_cut_files_gives_a_forged_index_no_tables_of_other_files(large_jpeg):
    jpeg, header, region = forge_index(large_jpeg, FIXED.size - 8, b"\x02"), header_of(large_jpeg), (150, 200, 80, 90)
    requests = [(jpeg, header_of(jpeg), region), (large_jpeg, header, region)]  # component kind 2; only 0 and 1 exist
    assert cut_files(requests) == [None, cut(large_jpeg, header, region)]


def test_forged_index_whose_parts_all_hold_the_entire_scan_is_not_used(large_jpeg):
    header = header_of(large_jpeg)
    index = find_grid(large_jpeg, header)
    columns, nbytes = index.columns, point_bytes(*index.widths)
    count = index.rows * columns + 1
    points_offset = large_jpeg.index(TABLES, header.index_at) - count * nbytes - (index.tables_at - FIXED.size + 4)
    places = np.zeros(count, "<u8")
    places[::columns] = 8 * (len(large_jpeg) - header.first_scan - 100)  # where a row begins, and the one above ends
    jpeg = forge_index(large_jpeg, points_offset, places.view(np.uint8).reshape(count, 8)[:, :nbytes].tobytes())
    with always_cutting:
        assert cut(large_jpeg, header, (0, 100, 384, 412)) is not None
        assert cut(jpeg, header_of(jpeg), (0, 100, 384, 412)) is None
