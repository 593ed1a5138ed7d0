"""`cut` of JPEGs by their restart markers: equal pixels, and files that cannot be cut."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
from helpers.decoders import decoder_by
from helpers.jpeg_crops import (
    always_cutting,
    check_not_cut,
    check_pixels,
    check_same_without_cutting,
    jpeg_decoders,
    with_cutting,
    without_cutting,
)
from helpers.jpeg_restarts import SAMPLINGS, header_of, make_jpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, cut_files, find_grid, is_cuttable
from gpuload.decode.jpeg import NvImageCodecRegions, SimpleJpeg

Region = tuple[int, int, int, int]


@st.composite
def jpegs_and_regions(draw: st.DrawFn) -> tuple[bytes, Region, str]:
    """Draw a JPEG with restart markers, a region of it, and its sampling."""
    sampling = draw(st.sampled_from(list(SAMPLINGS)))
    mcus = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    mcus_per_row = mcus[0]
    interval = draw(st.sampled_from([n for n in range(1, 25) if mcus_per_row % n == 0 or n % mcus_per_row == 0]))
    size = SAMPLINGS[sampling].mcu_size_wh
    missing_pixels = draw(st.integers(0, size[0] - 1)), draw(st.integers(0, size[1] - 1))
    jpeg = make_jpeg(sampling, mcus, interval=interval, missing_pixels_wh=missing_pixels, seed=draw(st.integers(0, 3)))
    full_height, full_width = header_of(jpeg)[2:4]
    top, left = draw(st.integers(0, full_height - 1)), draw(st.integers(0, full_width - 1))
    height, width = draw(st.integers(1, full_height - top)), draw(st.integers(1, full_width - left))
    return jpeg, (top, left, height, width), sampling


@pytest.mark.slow
@settings(max_examples=300)
@given(jpegs_and_regions())
def test_cut_by_restarts_equals_the_region_of_the_entire_image(case):
    jpeg, region, sampling = case
    check_pixels(jpeg, sampling, [region], jpeg_decoders())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cut_at_the_edges_of_intervals_interpolates_chroma_across_them(sampling):
    width, height = SAMPLINGS[sampling].mcu_size_wh
    jpeg = make_jpeg(sampling, (6, 4), interval=2, missing_pixels_wh=(1, 1))
    regions = [
        (top, left, bottom - top, right - left)
        for top in (height - 1, height, height + 1)
        for left in (2 * width - 1, 2 * width, 2 * width + 1)
        for bottom in (2 * height - 1, 2 * height, 2 * height + 1)
        for right in (4 * width - 1, 4 * width, 4 * width + 1)
    ]
    check_pixels(jpeg, sampling, regions, [SimpleJpeg()])


@pytest.mark.parametrize("sampling", ["4:2:2", "4:2:0"])
@pytest.mark.parametrize("missing", range(9, 15))
def test_cut_of_a_narrow_last_column_includes_the_column_before(sampling, missing):
    jpeg = make_jpeg(sampling, (4, 3), interval=1, missing_pixels_wh=(missing, 0))
    header = header_of(jpeg)
    last_column = 3 * 16  # three MCUs of 16 pixels are before it
    left = last_column + 1
    region = (0, left, header.height, header.width - left)
    image, _ = SimpleJpeg().decode(jpeg, header, False, (0, 0, header.height, header.width))
    with always_cutting:
        part = cut(jpeg, header, region)
    pixels, _ = SimpleJpeg().decode(part.data, part.header, False, part.region_tlhw)
    np.testing.assert_array_equal(pixels, image[:, left:])
    # libjpeg does not interpolate chroma in rows of one or two chroma samples, which are at most four pixels
    is_narrow = header.width - last_column <= 4
    assert part.header.width > 16 if is_narrow else part.header.width <= 16


def test_cut_is_a_jpeg_of_the_intervals_it_touches():
    jpeg = make_jpeg("4:2:0", (12, 9), interval=3)
    header = header_of(jpeg)
    grid = find_grid(jpeg, header)
    assert (grid.columns, grid.rows, grid.cell_width, grid.cell_height) == (4, 9, 48, 16)
    with always_cutting:
        part = cut(jpeg, header, (33, 50, 14, 45))
        wider = cut(jpeg, header, (32, 48, 16, 48))
    assert (part.header.height, part.header.width, part.region_tlhw) == (16, 48, (1, 2, 14, 45))
    assert len(part.data) < len(jpeg) / 12
    assert (wider.header.height, wider.header.width, wider.region_tlhw) == (48, 144, (16, 48, 16, 48))
    markers = re.findall(rb"\xff([\xd0-\xd9])", wider.data[wider.header.first_scan :])
    assert b"".join(markers) == b"\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7\xd9"


def test_cut_without_chroma_interpolation_has_no_margin():
    for sampling in ("4:4:4", "grey"):
        jpeg = make_jpeg(sampling, (8, 8), interval=2)
        with always_cutting:
            part = cut(jpeg, header_of(jpeg), (16, 16, 8, 16))
        assert (part.header.height, part.header.width, part.region_tlhw) == (8, 16, (0, 0, 8, 16))


@pytest.mark.parametrize(
    ("interval", "cells"),
    [(12, (1, 9)), (24, (1, 5)), (6, (2, 9)), (1, (12, 9)), (5, None), (7, None), (18, None), (13, None)],
)
def test_find_grid_counts_cells_if_intervals_divide_a_row_or_consist_of_rows(interval, cells):
    jpeg = make_jpeg("4:4:4", (12, 9), interval=interval)
    assert header_of(jpeg).restart_interval == interval
    grid = find_grid(jpeg, header_of(jpeg))
    assert (grid and (grid.columns, grid.rows)) == cells
    if cells is None:
        check_not_cut(jpeg, (16, 24, 30, 40))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True, "restart_marker_blocks": 4}, {"mode": "CMYK", "restart_marker_blocks": 4}]
)
def test_cut_is_none_for_progressive_and_cmyk_jpegs_and_those_without_restarts(picture, encode, options):
    jpeg = encode(picture, "JPEG", **options)
    with always_cutting:
        assert cut(jpeg, header_of(jpeg), (0, 0, 8, 8)) is None


@pytest.fixture(scope="module")
def large_jpeg() -> bytes:
    """512×384, 4:2:0, 32×24 MCUs in intervals of 4."""
    return make_jpeg("4:2:0", (32, 24), interval=4)


def test_cut_by_restarts_is_none_where_it_does_not_pay_off(large_jpeg):
    header = header_of(large_jpeg)
    for region in ((180, 250, 60, 100), (0, 0, 384, 128), (300, 0, 84, 512), (64, 64, 256, 256), (2, 66, 380, 440)):
        assert cut(large_jpeg, header, region) is not None, region
    for region in ((0, 0, 384, 512), (2, 2, 380, 508), (0, 0, 8, 512), (0, 40, 3, 3)):
        assert cut(large_jpeg, header, region) is None, region
    small = make_jpeg("4:2:0", (6, 6), interval=2)
    assert cut(small, header_of(small), (40, 40, 30, 30)) is None


@pytest.mark.parametrize("name", ["all", "nvImageCodec", "simplejpeg"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "unchanged"])
def test_decoder_passes_the_cut_to_the_jpeg_decoder(large_jpeg, monkeypatch, name, mode):
    decoder, region = Decoder(Decode()) if name == "all" else decoder_by(name), (100, 130, 90, 110)
    expected = without_cutting(decoder, large_jpeg, region, mode)
    assert expected is not None
    lengths = []
    for kind in (NvImageCodecRegions, SimpleJpeg):
        decode = kind.decode

        def spy(self, data, *arguments, decode=decode):
            lengths.append(len(data))
            return decode(self, data, *arguments)

        monkeypatch.setattr(kind, "decode", spy)
    np.testing.assert_array_equal(with_cutting(decoder, large_jpeg, region, mode), expected)
    assert len(lengths) == 1
    assert lengths[0] < len(large_jpeg) / 4, "the decoder got the entire file"


def test_pillow_decodes_the_same_region_with_cutting_enabled(large_jpeg):
    decoder, region = decoder_by("Pillow"), (100, 130, 90, 110)
    expected = without_cutting(Decoder(Decode()), large_jpeg, region)
    assert expected is not None
    np.testing.assert_array_equal(with_cutting(decoder, large_jpeg, region), expected)


def test_cut_files_loads_no_decoders(large_jpeg, encode):
    """The main process may cut files, and should not load decoders."""
    noise = np.random.default_rng(0).integers(0, 256, (384, 512, 3), np.uint8)
    files = [Encoded(data) for data in (encode(noise, "PNG"), encode(noise, "JPEG"), large_jpeg)]
    decoder, region = Decoder(Decode()), (100, 130, 90, 110)
    with mock.patch.object(Decoder, "jpeg_decoders", new_callable=mock.PropertyMock, side_effect=AssertionError):
        parts = decoder.cut_files([(file, decoder.header(file), region) for file in files])
    assert parts[0] is None
    assert [part.data is file.data for part, file in zip(parts[1:], files[1:], strict=True)] == [True, False]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_cut_is_turned_upright_by_exif(orientation, encode):
    rng = np.random.default_rng(orientation)
    noise = rng.integers(0, 256, (384, 512, 3), np.uint8)
    # a TIFF header and one entry: tag 0x0112 (orientation), type 3 (SHORT), one value
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + bytes((orientation, 0, 0, 0, 0, 0, 0, 0))
    jpeg = encode(noise, "JPEG", quality=60, restart_marker_blocks=4, exif=exif)
    decoder, region = Decoder(Decode(exif=True)), (60, 70, 90, 110)
    header = decoder.header(Encoded(jpeg))
    assert header.orientation == orientation
    image = decoder.decode(Encoded(jpeg), header)
    with mock.patch("gpuload.decode.decoder.cut_files", wraps=cut_files) as spied:
        pixels = with_cutting(decoder, jpeg, region)
    assert spied.call_count == 1
    np.testing.assert_array_equal(pixels, image[60:150, 70:180])


# Damages of a JPEG at a restart marker, which has two bytes; `end` is the offset after the marker.
DAMAGES = {
    "missing": lambda jpeg, end: jpeg[: end - 2] + jpeg[end:],
    "twice": lambda jpeg, end: jpeg[:end] + jpeg[end - 2 : end] + jpeg[end:],
    "misnumbered": lambda jpeg, end: jpeg[: end - 1] + bytes((0xD0 + (jpeg[end - 1] + 3) % 8,)) + jpeg[end:],
    "another marker": lambda jpeg, end: jpeg[:end] + b"\xff\xe5\x00\x04ab" + jpeg[end:],
    "an end": lambda jpeg, end: jpeg[: end - 1] + b"\xd9" + jpeg[end:],
    "fill bytes": lambda jpeg, end: jpeg[: end - 2] + b"\xff" + jpeg[end - 2 :],
    "cut off": lambda jpeg, end: jpeg[:end],
    "cut off, with an end": lambda jpeg, end: jpeg[:end] + b"\xff\xd9",
    "zeros": lambda jpeg, end: jpeg[:end] + bytes(len(jpeg) - end),
}


@pytest.mark.parametrize("interval", [5, 90, 150])
@pytest.mark.parametrize("damage", DAMAGES)
def test_jpeg_with_missing_or_misplaced_restarts_is_decoded_uncut(large_jpeg, damage, interval):
    """The damaged interval is above, within or below the region."""
    offsets, region = find_grid(large_jpeg, header_of(large_jpeg)).offsets, (150, 200, 80, 90)
    assert cut(large_jpeg, header_of(large_jpeg), region) is not None
    check_not_cut(DAMAGES[damage](large_jpeg, int(offsets[interval])), region)


def test_jpeg_without_its_end_is_not_cuttable(large_jpeg):
    other_end = large_jpeg[:-2] + b"\xff\xe1\x00\x02\xff\xd9"
    for end in (-2, -1, -40, header_of(large_jpeg).first_scan + 5):
        assert not is_cuttable(large_jpeg[:end], header_of(large_jpeg[:end])), end
    assert not is_cuttable(other_end, header_of(other_end))
    assert is_cuttable(large_jpeg + b"more than the picture", header_of(large_jpeg))


def test_jpeg_with_flipped_bits_decodes_equally_with_and_without_cutting(large_jpeg):
    """Damage stays within its interval, so a region that does not touch the interval has the right pixels."""
    rng = np.random.default_rng(3)
    scan_header_bytes, decoder, region = 14, Decoder(Decode()), (150, 200, 80, 90)
    scan = header_of(large_jpeg).first_scan + scan_header_bytes
    outcomes = {"as it was": 0, "other pixels": 0, "no cut": 0}
    intact = with_cutting(decoder, large_jpeg, region)
    # the intervals 75 and 76 are within the region
    region_bytes = slice(*(int(offset) for offset in find_grid(large_jpeg, header_of(large_jpeg)).offsets[[75, 77]]))
    for number in range(40):
        damaged = bytearray(large_jpeg)
        low, high = (scan, len(large_jpeg) - 2) if number % 2 else (region_bytes.start, region_bytes.stop - 2)
        for offset in rng.integers(low, high, 3):
            damaged[offset] ^= 1 << int(rng.integers(8))
        jpeg = bytes(damaged)
        pixels = check_same_without_cutting(jpeg, region)
        if cut(jpeg, header_of(jpeg), region) is None:
            outcomes["no cut"] += 1
        else:
            outcomes["as it was" if np.array_equal(pixels, intact) else "other pixels"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_jpeg_whose_cut_is_refused_is_decoded_uncut(large_jpeg, monkeypatch):
    decoder, region = Decoder(Decode()), (150, 200, 80, 90)
    expected = without_cutting(decoder, large_jpeg, region)
    assert expected is not None
    inputs = []
    for kind in (NvImageCodecRegions, SimpleJpeg):

        def refuse(self, data, header, grey, region_tlhw, out=None):
            inputs.append(data)
            return None, "no"

        monkeypatch.setattr(kind, "decode", refuse)
    np.testing.assert_array_equal(with_cutting(decoder, large_jpeg, region), expected)
    assert inputs[0] != large_jpeg
    assert set(inputs[1:]) == {large_jpeg}
    assert decoder.counts["cut"] == 0
