"""`cut` of JPEGs by their restart markers: equal pixels, and files that cannot be cut."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
from helpers.decoders import decoder_by
from helpers.jpeg_crops import (
    always,
    check_not_cut,
    check_pixels,
    check_same_without_cutting,
    jpeg_decoders,
    with_cutting,
    without_cutting,
)
from helpers.jpeg_restarts import SAMPLINGS, header_of, restarted
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, cut_files, find_grid, is_cuttable
from gpuload.decode.jpeg import NvImageCodecRegions, SimpleJpeg

Region = tuple[int, int, int, int]


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, Region, str]:
    sampling = draw(st.sampled_from(list(SAMPLINGS)))
    mcus = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    in_row = mcus[0]
    interval = draw(st.sampled_from([n for n in range(1, 25) if in_row % n == 0 or n % in_row == 0]))
    size = SAMPLINGS[sampling][3]
    short = draw(st.integers(0, size[0] - 1)), draw(st.integers(0, size[1] - 1))
    jpeg = restarted(sampling, mcus, interval, short, seed=draw(st.integers(0, 3)))
    full_height, full_width = header_of(jpeg)[2:4]
    top, left = draw(st.integers(0, full_height - 1)), draw(st.integers(0, full_width - 1))
    height, width = draw(st.integers(1, full_height - top)), draw(st.integers(1, full_width - left))
    return jpeg, (top, left, height, width), sampling


@pytest.mark.slow
@settings(max_examples=300)
@given(cases())
def test_cut_by_restarts_equals_the_region_of_the_entire_image(case):
    jpeg, region, sampling = case
    check_pixels(jpeg, sampling, [region], jpeg_decoders())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cut_at_the_edges_of_intervals_interpolates_chroma_across_them(sampling):
    width, height = SAMPLINGS[sampling][3]
    jpeg = restarted(sampling, (6, 4), 2, (1, 1))
    edges = [
        (top, left, bottom - top, right - left)
        for top in (height - 1, height, height + 1)
        for left in (2 * width - 1, 2 * width, 2 * width + 1)
        for bottom in (2 * height - 1, 2 * height, 2 * height + 1)
        for right in (4 * width - 1, 4 * width, 4 * width + 1)
    ]
    check_pixels(jpeg, sampling, edges, [SimpleJpeg()])


@pytest.mark.parametrize("sampling", ["4:2:2", "4:2:0"])
@pytest.mark.parametrize("short", range(9, 15))
def test_cut_of_a_narrow_last_column_includes_the_column_before(sampling, short):
    jpeg = restarted(sampling, (4, 3), 1, (short, 0))
    header = header_of(jpeg)
    region = (0, 49, header.height, header.width - 49)
    image, _ = SimpleJpeg().decode(jpeg, header, False, (0, 0, header.height, header.width))
    with always:
        part = cut(jpeg, header, region)
    pixels, _ = SimpleJpeg().decode(part.data, part.header, False, part.region_tlhw)
    np.testing.assert_array_equal(pixels, image[:, 49:])
    assert (part.header.width > 16) == (header.width - 48 <= 4)


def test_cut_is_a_jpeg_of_the_intervals_it_touches():
    jpeg = restarted("4:2:0", (12, 9), 3)
    header = header_of(jpeg)
    grid = find_grid(jpeg, header)
    assert (grid.columns, grid.rows, grid.cell_width, grid.cell_height) == (4, 9, 48, 16)
    with always:
        part = cut(jpeg, header, (33, 50, 14, 45))
        wider = cut(jpeg, header, (32, 48, 16, 48))
    assert (part.header.height, part.header.width, part.region_tlhw) == (16, 48, (1, 2, 14, 45))
    assert len(part.data) < len(jpeg) / 12
    assert (wider.header.height, wider.header.width, wider.region_tlhw) == (48, 144, (16, 48, 16, 48))
    markers = re.findall(rb"\xff([\xd0-\xd9])", wider.data[wider.header.first_scan :])
    assert b"".join(markers) == b"\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7\xd9"


def test_cut_without_chroma_interpolation_has_no_margin():
    for sampling in ("4:4:4", "grey"):
        jpeg = restarted(sampling, (8, 8), 2)
        with always:
            part = cut(jpeg, header_of(jpeg), (16, 16, 8, 16))
        assert (part.header.height, part.header.width, part.region_tlhw) == (8, 16, (0, 0, 8, 16))


@pytest.mark.parametrize(
    ("interval", "cells"),
    [(12, (1, 9)), (24, (1, 5)), (6, (2, 9)), (1, (12, 9)), (5, None), (7, None), (18, None), (13, None)],
)
def test_find_grid_of_intervals_that_divide_rows_or_are_rows(interval, cells):
    jpeg = restarted("4:4:4", (12, 9), interval)
    assert header_of(jpeg).restart_interval == interval
    grid = find_grid(jpeg, header_of(jpeg))
    assert (grid and (grid.columns, grid.rows)) == cells
    if cells is None:
        check_not_cut(jpeg, (16, 24, 30, 40))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True, "restart_marker_blocks": 4}, {"mode": "CMYK", "restart_marker_blocks": 4}]
)
def test_cut_of_jpegs_without_restarts_progressive_or_cmyk_is_none(picture, encode, options):
    jpeg = encode(picture, "JPEG", **options)
    with always:
        assert cut(jpeg, header_of(jpeg), (0, 0, 8, 8)) is None


@pytest.fixture(scope="module")
def large() -> bytes:
    """512×384, 4:2:0, 32×24 MCUs in intervals of 4."""
    return restarted("4:2:0", (32, 24), 4)


def test_cut_by_restarts_is_none_where_it_does_not_pay_off(large):
    header = header_of(large)
    for region in ((180, 250, 60, 100), (0, 0, 384, 128), (300, 0, 84, 512), (64, 64, 256, 256), (2, 66, 380, 440)):
        assert cut(large, header, region) is not None, region
    for region in ((0, 0, 384, 512), (2, 2, 380, 508), (0, 0, 8, 512), (0, 40, 3, 3)):
        assert cut(large, header, region) is None, region
    small = restarted("4:2:0", (6, 6), 2)
    assert cut(small, header_of(small), (40, 40, 30, 30)) is None


@pytest.mark.parametrize("name", ["all", "nvImageCodec", "simplejpeg"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "unchanged"])
def test_decoder_passes_the_cut_to_the_jpeg_decoder(large, monkeypatch, name, mode):
    decoder, region = Decoder(Decode()) if name == "all" else decoder_by(name), (100, 130, 90, 110)
    expected = without_cutting(decoder, large, region, mode)
    lengths = []
    for kind in (NvImageCodecRegions, SimpleJpeg):
        decode = kind.decode

        def spy(self, data, *arguments, decode=decode):
            lengths.append(len(data))
            return decode(self, data, *arguments)

        monkeypatch.setattr(kind, "decode", spy)
    np.testing.assert_array_equal(with_cutting(decoder, large, region, mode), expected)
    assert len(lengths) == 1
    assert lengths[0] < len(large) / 4


def test_pillow_decodes_uncut(large):
    decoder, region = decoder_by("Pillow"), (100, 130, 90, 110)
    np.testing.assert_array_equal(
        with_cutting(decoder, large, region), without_cutting(Decoder(Decode()), large, region)
    )


def test_cut_files_loads_no_decoders(large, encode):
    """The main process may cut files, and should not load decoders."""
    noise = np.random.default_rng(0).integers(0, 256, (384, 512, 3), np.uint8)
    files = [Encoded(data) for data in (encode(noise, "PNG"), encode(noise, "JPEG"), large)]
    decoder, region = Decoder(Decode()), (100, 130, 90, 110)
    with mock.patch.object(Decoder, "jpeg_decoders", new_callable=mock.PropertyMock, side_effect=AssertionError):
        parts = decoder.cut_files([(file, decoder.header(file), region) for file in files])
    assert parts[0] is None
    assert [part.data is file.data for part, file in zip(parts[1:], files[1:], strict=True)] == [True, False]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_cut_is_turned_upright_by_exif(orientation, encode):
    rng = np.random.default_rng(orientation)
    noise = rng.integers(0, 256, (384, 512, 3), np.uint8)
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


DAMAGES = {
    "missing": lambda jpeg, at: jpeg[: at - 2] + jpeg[at:],
    "twice": lambda jpeg, at: jpeg[:at] + jpeg[at - 2 : at] + jpeg[at:],
    "misnumbered": lambda jpeg, at: jpeg[: at - 1] + bytes((0xD0 + (jpeg[at - 1] + 3) % 8,)) + jpeg[at:],
    "another marker": lambda jpeg, at: jpeg[:at] + b"\xff\xe5\x00\x04ab" + jpeg[at:],
    "an end": lambda jpeg, at: jpeg[: at - 1] + b"\xd9" + jpeg[at:],
    "fill bytes": lambda jpeg, at: jpeg[: at - 2] + b"\xff" + jpeg[at - 2 :],
    "cut off": lambda jpeg, at: jpeg[:at],
    "cut off, with an end": lambda jpeg, at: jpeg[:at] + b"\xff\xd9",
    "zeros": lambda jpeg, at: jpeg[:at] + bytes(len(jpeg) - at),
}


@pytest.mark.parametrize("interval", [5, 90, 150])
@pytest.mark.parametrize("damage", DAMAGES)
def test_jpeg_with_missing_or_misplaced_restarts_is_decoded_uncut(large, damage, interval):
    """The damaged interval is above, within or below the region."""
    offsets, region = find_grid(large, header_of(large)).offsets, (150, 200, 80, 90)
    assert cut(large, header_of(large), region) is not None
    check_not_cut(DAMAGES[damage](large, int(offsets[interval])), region)


def test_jpeg_without_its_end_is_not_cuttable(large):
    other_end = large[:-2] + b"\xff\xe1\x00\x02\xff\xd9"
    for cut_off in (large[:-2], large[:-1], large[: header_of(large).first_scan + 5], large[:-40], other_end):
        assert not is_cuttable(cut_off, header_of(cut_off))
    assert is_cuttable(large + b"more than the picture", header_of(large))


def test_flipped_bits_between_restarts_decode_like_uncut(large):
    """Damage stays within its interval, so a region that does not touch the interval has the right pixels."""
    rng = np.random.default_rng(3)
    scan, decoder, region = header_of(large).first_scan + 14, Decoder(Decode()), (150, 200, 80, 90)
    outcomes = {"as it was": 0, "other pixels": 0, "no cut": 0}
    intact = with_cutting(decoder, large, region)
    inside = slice(*(int(offset) for offset in find_grid(large, header_of(large)).offsets[[75, 77]]))
    for number in range(40):
        damaged = bytearray(large)
        low, high = (scan, len(large) - 2) if number % 2 else (inside.start, inside.stop - 2)
        for at in rng.integers(low, high, 3):
            damaged[at] ^= 1 << int(rng.integers(8))
        jpeg = bytes(damaged)
        pixels = check_same_without_cutting(jpeg, region)
        if cut(jpeg, header_of(jpeg), region) is None:
            outcomes["no cut"] += 1
        else:
            outcomes["as it was" if np.array_equal(pixels, intact) else "other pixels"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_jpeg_whose_cut_is_refused_is_decoded_uncut(large, monkeypatch):
    decoder, region = Decoder(Decode()), (150, 200, 80, 90)
    expected = without_cutting(decoder, large, region)
    inputs = []
    for kind in (NvImageCodecRegions, SimpleJpeg):

        def refuse(self, data, header, grey, region_tlhw, out=None):
            inputs.append(data)
            return None, "no"

        monkeypatch.setattr(kind, "decode", refuse)
    np.testing.assert_array_equal(with_cutting(decoder, large, region), expected)
    assert inputs[0] != large
    assert all(data == large for data in inputs[1:])
    assert decoder.counts["cut"] == 0
