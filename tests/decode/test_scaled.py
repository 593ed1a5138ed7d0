"""Decoding at a fraction of the size: the same place, the same pixels as without shortcuts, and when it is chosen."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from helpers.decoders import NAMES, decoder_by
from helpers.generated_images import jpeg_bytes
from helpers.jpeg_restarts import SAMPLINGS, make_jpeg
from PIL import Image

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.scaled import EIGHTHS, SUPPORT, Scaled, choose_eighths, resample
from gpuload.errors import DecodeError
from gpuload.packing.jpeg_cuttable import make_cuttable

Region = tuple[int, int, int, int]
HEIGHT, WIDTH = 611, 803  # not multiples of a block
SIZE_HW = (40, 44)
at_no_cost = mock.patch("gpuload.decode.scaled.SCALED_NS", -1e9)
REGIONS = [(0, 0, HEIGHT, WIDTH), (3, 5, 409, 370), (97, 213, 327, 355), (150, 433, 461, 370), (201, 441, 81, 91)]


@pytest.fixture(scope="module")
def slopes() -> np.ndarray:
    """611×803×3: the channels rise evenly to the right, downwards and to the left, so that the mean of a shifted
    result is wrong."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    rising = 255 * np.stack([x / WIDTH, y / HEIGHT, 1 - x / WIDTH], -1)
    return np.rint(rising).astype(np.uint8)


def decode_both_ways(
    decoder: Decoder, jpeg: bytes, region: Region, eighths: int, filter: str = "bilinear", mode: str = "RGB"
):
    """Decode a region to 40×44 pixels: at full size and then resampled, and at a number of eighths."""
    encoded = Encoded(jpeg, mode)
    header = decoder.header(encoded)
    exact = decoder.decode(encoded, header, region)
    fast = np.empty((*SIZE_HW, exact.shape[2]), np.uint8)
    decoder.decode_resized(encoded, header, region, eighths, filter, fast)
    resized = resample(Scaled(exact, (0, 0, *exact.shape[:2])), SIZE_HW, filter)
    return resized.astype(np.int64), fast.astype(np.int64)


def check_same_place(exact: np.ndarray, fast: np.ndarray, tolerance: int = 3) -> None:
    """Neighboring pixels differ by 1.5 to 6 levels, so a shift by half a pixel would change the mean by 1 to 3."""
    assert np.abs((fast - exact).mean(axis=(0, 1))).max() < 0.3
    assert np.abs(fast - exact).max() <= tolerance


def eighths_for(region: Region) -> int:
    return next(n for n in EIGHTHS if region[2] * n >= 8 * SIZE_HW[0] and region[3] * n >= 8 * SIZE_HW[1])


JPEG_OPTIONS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"subsampling": 2, "progressive": True},
    "restart markers": {"subsampling": 2, "restart_marker_rows": 2},
    "restart markers in a row": {"subsampling": 0, "restart_marker_blocks": 1},
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("kind", JPEG_OPTIONS)
def test_decode_resized_shows_the_region_of_each_kind_of_jpeg(slopes, kind, region):
    decoder = Decoder(Decode())
    exact, fast = decode_both_ways(
        decoder, jpeg_bytes(slopes, quality=98, **JPEG_OPTIONS[kind]), region, eighths_for(region)
    )
    assert decoder.counts["scaled"] == 1
    check_same_place(exact, fast)


@pytest.mark.parametrize("filter", SUPPORT)
@pytest.mark.parametrize("eighths", EIGHTHS)
def test_decode_resized_with_each_filter_at_each_scale_shows_the_region(slopes, filter, eighths):
    decoder = Decoder(Decode())
    exact, fast = decode_both_ways(decoder, jpeg_bytes(slopes, quality=98), (97, 213, 400, 411), eighths, filter)
    assert decoder.counts["scaled"] == 1
    check_same_place(exact, fast, tolerance=4)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_resized_turns_images_upright(slopes, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoder = Decoder(Decode(exif=True))
    jpeg = jpeg_bytes(slopes, quality=98, exif=exif)
    region = (31, 64, 409, 501) if orientation < 5 else (64, 31, 501, 409)
    exact, fast = decode_both_ways(decoder, jpeg, region, 1)
    assert decoder.counts["scaled"] == 1
    check_same_place(exact, fast)


@pytest.mark.parametrize("mode", ["L", "RGB", "unchanged"])
def test_decode_resized_of_gray_images_shows_the_region_in_each_mode(slopes, encode, mode):
    decoder = Decoder(Decode())
    exact, fast = decode_both_ways(decoder, encode(slopes[:, :, 0], quality=98), (90, 13, 402, 411), 1, mode=mode)
    assert decoder.counts["scaled"] == 1
    assert exact.shape == fast.shape == (*SIZE_HW, 3 if mode == "RGB" else 1)
    check_same_place(exact, fast)


@pytest.mark.parametrize("sampling", [name for name in SAMPLINGS if "grey" not in name])
def test_decode_resized_does_not_depend_on_the_rows_below(sampling):
    jpeg = make_jpeg(sampling, (24, 28))
    decoder, out = Decoder(Decode()), [np.empty((20, 20, 3), np.uint8) for _ in range(2)]
    encoded, region = Encoded(jpeg), (0, 0, 96, 170)
    header = decoder.header(encoded)
    decoder.decode_resized(encoded, header, region, 4, "bilinear", out[0])
    with mock.patch("gpuload.decode.scaled._shorten", return_value=None):
        decoder.decode_resized(encoded, header, region, 4, "bilinear", out[1])
    assert decoder.counts["scaled"] == 2
    np.testing.assert_array_equal(*out)


@pytest.mark.parametrize("cut_by", ["markers", "index"])
def test_decode_resized_of_a_cut_region_equals_uncut(cut_by):
    jpeg = make_jpeg("4:2:0", (40, 30), interval=4 if cut_by == "markers" else 0, seed=5)
    if cut_by == "index":
        jpeg = make_cuttable(jpeg)
    decoder = Decoder(Decode())
    encoded = Encoded(jpeg)
    header = decoder.header(encoded)
    assert header.jpeg is not None
    unmarked = header._replace(jpeg=header.jpeg._replace(restart_interval=0, index_at=0))
    for region in [(200, 330, 201, 283), (0, 0, 130, 200), (301, 5, 179, 177)]:
        out = [np.empty((20, 20, 3), np.uint8) for _ in range(2)]
        with mock.patch("gpuload.decode.cut._pays_off", return_value=True):
            decoder.decode_resized(encoded, header, region, 2, "bilinear", out[0])
        with mock.patch("gpuload.decode.scaled._shorten", return_value=None):  # markers after the rows give a warning
            decoder.decode_resized(encoded, unmarked, region, 2, "bilinear", out[1])
        np.testing.assert_array_equal(*out)
    assert decoder.counts["scaled"] == 6


class TestDamage:
    REGION = (8, 13, 290, 411)

    def test_damage_below_the_region_changes_nothing(self, slopes):
        jpeg = jpeg_bytes(slopes, quality=98)
        damaged = jpeg[: len(jpeg) * 3 // 4] + bytes(len(jpeg) // 4 - 2) + jpeg[-2:]
        decoder = Decoder(Decode())
        (_, intact), (_, fast) = (decode_both_ways(decoder, data, self.REGION, 1) for data in (jpeg, damaged))
        assert decoder.counts["scaled"] == 2
        np.testing.assert_array_equal(fast, intact)

    @pytest.mark.parametrize(
        ("decoder_name", "damage", "region"),
        [
            (None, lambda jpeg, offset: jpeg[:offset] + b"\xff\xfe" * 20 + jpeg[offset + 40 :], REGION),
            (None, lambda jpeg, offset: jpeg[:-2] + bytes(100) + jpeg[-2:], (0, 0, HEIGHT, WIDTH)),
            ("Pillow", lambda jpeg, offset: jpeg, REGION),
        ],
        ids=["wrong markers in the region", "surplus bytes", "Pillow"],
    )
    def test_damage_in_the_region_surplus_bytes_and_pillow_fall_back_to_exact_decoding(
        self, slopes, decoder_name, damage, region
    ):
        jpeg = jpeg_bytes(slopes, quality=98)
        decoder = Decoder(Decode()) if decoder_name is None else decoder_by(decoder_name)
        exact, fast = decode_both_ways(decoder, damage(jpeg, len(jpeg) // 5), region, 1)
        assert decoder.counts["scaled"] == 0
        np.testing.assert_array_equal(fast, exact)

    def test_refusal_has_the_message_of_exact_decoding(self, slopes):
        jpeg = jpeg_bytes(slopes, quality=98)
        encoded, decoder = Encoded(jpeg[: len(jpeg) // 4]), Decoder(Decode())
        header, out = decoder.header(encoded), np.empty((*SIZE_HW, 3), np.uint8)
        with pytest.raises(DecodeError) as exact:
            decoder.decode(encoded, header, (8, 13, 590, 411))
        with pytest.raises(DecodeError) as fast:
            decoder.decode_resized(encoded, header, (8, 13, 590, 411), 1, "bilinear", out)
        assert str(fast.value) == str(exact.value)


class TestChoice:
    def choose(
        self, jpeg: bytes, region: Region, size: tuple[int, int], filter="bilinear", mode="RGB", **options
    ) -> int:
        decoder = Decoder(Decode(**options))
        encoded = Encoded(jpeg, mode)
        return decoder.eighths(encoded, decoder.header(encoded), region, size, filter)

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            ((76, 100), 1),
            ((77, 100), 2),
            ((76, 101), 2),
            ((152, 200), 2),
            ((153, 200), 4),
            ((305, 401), 4),
            ((306, 401), 0),
        ],
    )
    def test_choose_eighths_takes_the_smallest_scale_that_covers_the_result(self, slopes, size, expected):
        with at_no_cost:
            assert self.choose(jpeg_bytes(slopes), (0, 0, HEIGHT, WIDTH), size) == expected

    def test_choose_eighths_is_0_where_scaling_costs_more(self, slopes):
        jpeg = jpeg_bytes(slopes)
        assert self.choose(jpeg, (0, 0, HEIGHT, WIDTH), SIZE_HW) == 1
        # the rows above would cost more than the region
        assert self.choose(jpeg, (HEIGHT - 160, 0, 160, 176), SIZE_HW) == 0
        at_high_cost = mock.patch("gpuload.decode.scaled.SCALED_NS", 1e9)
        with at_high_cost:
            assert self.choose(jpeg, (0, 0, HEIGHT, WIDTH), SIZE_HW) == 0

    @pytest.mark.parametrize(
        ("expected", "kind"), [(4, {}), (0, {"restart_marker_blocks": 7}), (0, {"progressive": True})]
    )
    def test_choose_eighths_counts_rows_below_that_cannot_be_dropped(self, slopes, expected, kind):
        jpeg = jpeg_bytes(slopes, subsampling=0, **kind)
        with mock.patch("gpuload.decode.scaled.SCALED_NS", 0):
            assert self.choose(jpeg, (0, 0, 100, WIDTH), SIZE_HW) == expected
            assert self.choose(jpeg, (0, 0, HEIGHT, WIDTH), SIZE_HW) == 1

    def test_choose_eighths_is_0_where_pixels_would_differ(self, slopes, encode):
        region, jpeg = (0, 0, HEIGHT, WIDTH), jpeg_bytes(slopes)
        assert self.choose(jpeg, region, SIZE_HW, "nearest") == 0
        assert self.choose(jpeg, region, SIZE_HW, "plain bilinear") == 0
        assert self.choose(jpeg, region, SIZE_HW, mode="L") == 0  # Pillow converts to gray
        assert self.choose(encode(slopes, "JPEG", "CMYK"), region, SIZE_HW) == 0
        assert self.choose(encode(slopes, "PNG"), region, SIZE_HW) == 0
        assert self.choose(jpeg[:-500], region, SIZE_HW) == 0
        progressive = jpeg_bytes(slopes, progressive=True)
        assert self.choose(progressive, region, SIZE_HW) == 1
        last_scan = progressive.rfind(b"\xff\xda")
        assert self.choose(progressive[:last_scan] + b"\xff\xd9", region, SIZE_HW) == 0

    def test_choose_eighths_of_a_rotated_image_uses_the_stored_size(self, slopes):
        exif = Image.Exif()
        exif[0x0112] = 6
        jpeg, upright = jpeg_bytes(slopes, exif=exif), (0, 0, WIDTH, HEIGHT)
        with at_no_cost:
            assert self.choose(jpeg, upright, (100, 76), exif=True) == 1
            assert self.choose(jpeg, upright, (76, 100), exif=True) == 2

    def test_choose_eighths_is_the_same_for_each_decoder(self, slopes):
        jpeg = jpeg_bytes(slopes)
        header = Decoder(Decode()).header(Encoded(jpeg))
        assert header.jpeg is not None
        expected = choose_eighths(jpeg, header.jpeg, (0, 0, HEIGHT, WIDTH), SIZE_HW, "bilinear")
        for name in NAMES:
            decoder = decoder_by(name)
            assert decoder.eighths(Encoded(jpeg), header, (0, 0, HEIGHT, WIDTH), SIZE_HW, "bilinear") == expected == 1
            assert decoder.counts == dict.fromkeys(decoder.counts, 0)
