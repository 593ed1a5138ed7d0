from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
from helpers import lacking
from helpers.decoders import decoder_by
from helpers.jpeg_crops import always, check_pixels, jpeg_decoders, with_cutting, without_cutting
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
def test_a_cut_has_the_pixels_of_the_whole_to_the_last_bit(case):
    jpeg, region, sampling = case
    check_pixels(jpeg, sampling, [region], jpeg_decoders())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_crop_that_ends_where_intervals_do_has_the_chroma_of_its_neighbours(sampling):
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
def test_a_last_column_too_narrow_for_libjpeg_to_interpolate_is_cut_with_the_one_before(sampling, short):
    jpeg = restarted(sampling, (4, 3), 1, (short, 0))
    header = header_of(jpeg)
    region = (0, 49, header.height, header.width - 49)
    whole, _ = SimpleJpeg().decode(jpeg, header, False, (0, 0, header.height, header.width))
    with always:
        made = cut(jpeg, header, region)
    pixels, _ = SimpleJpeg().decode(made.data, made.header, False, made.region_tlhw)
    np.testing.assert_array_equal(pixels, whole[:, 49:])
    assert (made.header.width > 16) == (header.width - 48 <= 4)


def test_a_cut_is_a_jpeg_of_the_intervals_that_a_region_touches():
    jpeg = restarted("4:2:0", (12, 9), 3)
    header = header_of(jpeg)
    grid = find_grid(jpeg, header)
    assert (grid.columns, grid.rows, grid.cell_width, grid.cell_height) == (4, 9, 48, 16)
    with always:
        made = cut(jpeg, header, (33, 50, 14, 45))
        wider = cut(jpeg, header, (32, 48, 16, 48))
    assert (made.header.height, made.header.width, made.region_tlhw) == (16, 48, (1, 2, 14, 45))
    assert len(made.data) < len(jpeg) / 12
    assert (wider.header.height, wider.header.width, wider.region_tlhw) == (48, 144, (16, 48, 16, 48))
    markers = re.findall(rb"\xff([\xd0-\xd9])", wider.data[wider.header.first_scan :])
    assert b"".join(markers) == b"\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7\xd9"


def test_no_margin_is_taken_where_chroma_is_not_interpolated():
    for sampling in ("4:4:4", "grey"):
        jpeg = restarted(sampling, (8, 8), 2)
        with always:
            made = cut(jpeg, header_of(jpeg), (16, 16, 8, 16))
        assert (made.header.height, made.header.width, made.region_tlhw) == (8, 16, (0, 0, 8, 16))


@pytest.mark.parametrize(("interval", "cells"), [(12, (1, 9)), (24, (1, 5)), (6, (2, 9)), (1, (12, 9))])
def test_intervals_of_rows_are_a_grid_too(interval, cells):
    jpeg = restarted("4:4:4", (12, 9), interval)
    grid = find_grid(jpeg, header_of(jpeg))
    assert (grid.columns, grid.rows) == cells


@pytest.mark.parametrize("interval", [5, 7, 18, 13])
def test_intervals_that_are_no_grid_are_decoded_as_before(interval):
    jpeg = restarted("4:4:4", (12, 9), interval)
    header = header_of(jpeg)
    assert header.restart_interval == interval
    assert find_grid(jpeg, header) is None
    with always:
        assert cut(jpeg, header, (0, 0, 8, 8)) is None
        decoder = Decoder(Decode())
        region = (16, 24, 30, 40)
        np.testing.assert_array_equal(with_cutting(decoder, jpeg, region), without_cutting(decoder, jpeg, region))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True, "restart_marker_blocks": 4}, {"mode": "CMYK", "restart_marker_blocks": 4}]
)
def test_other_jpegs_are_not_cut(picture, encode, options):
    jpeg = encode(picture, "JPEG", **options)
    with always:
        assert cut(jpeg, header_of(jpeg), (0, 0, 8, 8)) is None


@pytest.fixture(scope="module")
def large() -> bytes:
    """512×384, 4:2:0, 32×24 MCUs in intervals of 4."""
    return restarted("4:2:0", (32, 24), 4)


def test_a_crop_is_cut_where_that_pays(large):
    header = header_of(large)
    for region in ((180, 250, 60, 100), (0, 0, 384, 128), (300, 0, 84, 512), (64, 64, 256, 256), (2, 66, 380, 440)):
        assert cut(large, header, region) is not None, region
    for region in ((0, 0, 384, 512), (2, 2, 380, 508), (0, 0, 8, 512), (0, 40, 3, 3)):
        assert cut(large, header, region) is None, region
    small = restarted("4:2:0", (6, 6), 2)
    assert cut(small, header_of(small), (40, 40, 30, 30)) is None


@pytest.mark.parametrize("name", ["all", "nvImageCodec", "simplejpeg"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "unchanged"])
def test_the_decoder_cuts_by_itself(large, monkeypatch, name, mode):
    if name == "nvImageCodec":
        lacking.nvimgcodec()
    decoder, region = Decoder(Decode()) if name == "all" else decoder_by(name), (100, 130, 90, 110)
    expected = without_cutting(decoder, large, region, mode)
    seen = []
    for kind in (NvImageCodecRegions, SimpleJpeg):
        decode = kind.decode

        def spy(self, data, *rest, decode=decode):
            seen.append(len(data))
            return decode(self, data, *rest)

        monkeypatch.setattr(kind, "decode", spy)
    np.testing.assert_array_equal(with_cutting(decoder, large, region, mode), expected)
    assert len(seen) == 1
    assert seen[0] < len(large) / 4


def test_pillow_alone_cuts_nothing(large):
    decoder, region = decoder_by("Pillow"), (100, 130, 90, 110)
    np.testing.assert_array_equal(
        with_cutting(decoder, large, region), without_cutting(Decoder(Decode()), large, region)
    )


def test_cutting_loads_no_decoders(large, encode):
    """What has no images may be read in the main process, which is to stay small."""
    noise = np.random.default_rng(0).integers(0, 256, (384, 512, 3), np.uint8)
    files = [Encoded(data) for data in (encode(noise, "PNG"), encode(noise, "JPEG"), large)]
    decoder, region = Decoder(Decode()), (100, 130, 90, 110)
    with mock.patch.object(Decoder, "jpeg_decoders", new_callable=mock.PropertyMock, side_effect=AssertionError):
        found = decoder.cut_files([(file, decoder.header(file), region) for file in files])
    assert found[0] is None
    assert [part.data is file.data for part, file in zip(found[1:], files[1:], strict=True)] == [True, False]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_cut_is_turned_upright_as_the_whole_is(orientation, encode):
    rng = np.random.default_rng(orientation)
    noise = rng.integers(0, 256, (384, 512, 3), np.uint8)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + bytes((orientation, 0, 0, 0, 0, 0, 0, 0))
    jpeg = encode(noise, "JPEG", quality=60, restart_marker_blocks=4, exif=exif)
    decoder, region = Decoder(Decode(exif=True)), (60, 70, 90, 110)
    header = decoder.header(Encoded(jpeg))
    assert header.orientation == orientation
    whole = decoder.decode(Encoded(jpeg), header)
    with mock.patch("gpuload.decode.decoder.cut_files", wraps=cut_files) as spied:
        pixels = with_cutting(decoder, jpeg, region)
    assert spied.call_count == 1
    np.testing.assert_array_equal(pixels, whole[60:150, 70:180])


def without_marker(jpeg: bytes, at: int) -> bytes:
    return jpeg[: at - 2] + jpeg[at:]


DAMAGES = {
    "missing": without_marker,
    "twice": lambda jpeg, at: jpeg[:at] + jpeg[at - 2 : at] + jpeg[at:],
    "misnumbered": lambda jpeg, at: jpeg[: at - 1] + bytes((0xD0 + (jpeg[at - 1] + 3) % 8,)) + jpeg[at:],
    "another marker": lambda jpeg, at: jpeg[:at] + b"\xff\xe5\x00\x04ab" + jpeg[at:],
    "an end": lambda jpeg, at: jpeg[: at - 1] + b"\xd9" + jpeg[at:],
    "fill bytes": lambda jpeg, at: jpeg[: at - 2] + b"\xff" + jpeg[at - 2 :],
    "cut off": lambda jpeg, at: jpeg[:at],
    "cut off, with an end": lambda jpeg, at: jpeg[:at] + b"\xff\xd9",
    "zeros": lambda jpeg, at: jpeg[:at] + bytes(len(jpeg) - at),
}


@pytest.mark.parametrize("where", [5, 90, 150])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_whose_markers_are_not_all_there_in_order_is_decoded_as_before(large, damage, where):
    """Above, within and below the region."""
    table = find_grid(large, header_of(large)).offsets
    damaged = DAMAGES[damage](large, int(table[where]))
    region = (150, 200, 80, 90)
    assert cut(large, header_of(large), region) is not None
    assert cut(damaged, header_of(damaged), region) is None
    assert not is_cuttable(damaged, header_of(damaged))
    decoder = Decoder(Decode())
    expected, found = without_cutting(decoder, damaged, region), with_cutting(decoder, damaged, region)
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(found, expected)


def test_a_file_of_which_only_the_end_is_missing_is_decoded_as_before(large):
    another = large[:-2] + b"\xff\xe1\x00\x02\xff\xd9"
    for cut_off in (large[:-2], large[:-1], large[: header_of(large).first_scan + 5], large[:-40], another):
        assert not is_cuttable(cut_off, header_of(cut_off))
    assert is_cuttable(large + b"more than the picture", header_of(large))


def test_wrong_data_between_markers_gives_the_pixels_of_before(large):
    """Damage stays within an interval, so a cut that does not touch it has right pixels, as the whole has there."""
    rng = np.random.default_rng(3)
    scan, decoder, region = header_of(large).first_scan + 14, Decoder(Decode()), (150, 200, 80, 90)
    outcomes = {"as it was": 0, "other pixels": 0, "no cut": 0}
    right = with_cutting(decoder, large, region)
    inside = slice(*(int(offset) for offset in find_grid(large, header_of(large)).offsets[[75, 77]]))
    for number in range(40):
        damaged = bytearray(large)
        low, high = (scan, len(large) - 2) if number % 2 else (inside.start, inside.stop - 2)
        for at in rng.integers(low, high, 3):
            damaged[at] ^= 1 << int(rng.integers(8))
        jpeg = bytes(damaged)
        expected, found = without_cutting(decoder, jpeg, region), with_cutting(decoder, jpeg, region)
        assert (found is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(found, expected)
        if cut(jpeg, header_of(jpeg), region) is None:
            outcomes["no cut"] += 1
        else:
            outcomes["as it was" if np.array_equal(found, right) else "other pixels"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_a_complaint_about_a_cut_is_none_about_the_file(large, monkeypatch):
    """The whole file is decoded then, by one decoder after the other."""
    decoder, region = Decoder(Decode()), (150, 200, 80, 90)
    expected = without_cutting(decoder, large, region)
    seen = []
    for kind in (NvImageCodecRegions, SimpleJpeg):

        def refuse(self, data, header, grey, region_tlhw, out=None):
            seen.append(data)
            return None, "no"

        monkeypatch.setattr(kind, "decode", refuse)
    np.testing.assert_array_equal(with_cutting(decoder, large, region), expected)
    assert seen[0] != large
    assert all(data == large for data in seen[1:])
    assert decoder.counts["cut"] == 0
