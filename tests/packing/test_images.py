"""`ImageConverter`: which images keep their bytes, which are resized with their metadata, and which are refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from helpers.generated_images import encode, smooth_image
from PIL import Image, ImageFile

from gpuload.datasets.sample import Encoded
from gpuload.decode.cut import is_cuttable
from gpuload.decode.header import scan_markers
from gpuload.errors import DecodeError
from gpuload.packing.images import ImageConverter, ImageOptions

PROFILE = b"an ICC profile"


def encode_smooth(mode: str = "RGB", name: str = "JPEG", size: tuple[int, int] = (120, 80), **options: Any) -> bytes:
    return encode(smooth_image(size[1], size[0], 1), name, mode, **options)


def convert(data: bytes, **options: Any) -> tuple[bytes, dict[str, int]]:
    images = ImageConverter(ImageOptions(**options))
    return images.convert_to_bytes(Encoded(data)), images.unchanged_counts


def open_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("mode", "name"), [("RGB", "JPEG"), ("L", "PNG"), ("P", "GIF"), ("I;16", "PNG"), ("CMYK", "JPEG")]
)
def test_image_that_needs_no_resize_keeps_its_bytes(mode: str, name: str) -> None:
    data = encode_smooth(mode, name)
    assert convert(data) == convert(data, check=True) == convert(data, short_side=80) == (data, {})


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_resized_jpeg_keeps_mode_orientation_and_profile(mode: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_smooth(mode, size=(300, 200), exif=exif, icc_profile=PROFILE, quality=95, subsampling=1)
    small, unchanged = convert(data, short_side=50, quality=95)
    image = open_image(small)
    assert (image.size, image.mode, image.format, unchanged) == ((75, 50), mode, "JPEG", {})
    assert (image.getexif().get(0x0112, 1), image.info["icc_profile"]) == (orientation, PROFILE)
    expected = open_image(data).resize((75, 50), Image.Resampling.LANCZOS)
    difference = np.asarray(image, int) - np.asarray(expected, int)
    assert np.abs(difference).mean() < 3


def test_resized_jpeg_keeps_an_orientation_from_xmp() -> None:
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    data = encode_smooth()
    data = data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:]
    assert open_image(convert(data, short_side=40)[0]).getexif()[0x0112] == 6


def test_resized_jpeg_keeps_chroma_sampling_and_has_the_requested_quality() -> None:
    for sampling in (0, 1, 2):
        small, _ = convert(encode_smooth(subsampling=sampling), short_side=40)
        factors = {0: 0x11, 1: 0x21, 2: 0x22}[sampling]  # horizontal and vertical, of the luma
        header = scan_markers(small)
        assert header is not None
        assert small[header.frame_at + 11] == factors  # of the first component
    low_quality, _ = convert(encode_smooth(), short_side=60, quality=30)
    default_quality, _ = convert(encode_smooth(), short_side=60)
    assert len(low_quality) < len(default_quality)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_resized_png_stays_a_png_of_its_mode(mode: str) -> None:
    small, unchanged = convert(encode_smooth(mode, "PNG", icc_profile=PROFILE), short_side=40)
    image = open_image(small)
    assert (image.size, image.mode, image.format, unchanged) == ((60, 40), mode, "PNG", {})
    assert image.info["icc_profile"] == PROFILE


@pytest.mark.parametrize(
    ("mode", "name", "options", "counted_as"),
    [
        ("P", "PNG", {}, "PNG of mode P"),
        ("I;16", "PNG", {}, "PNG of mode I;16"),
        ("1", "PNG", {}, "PNG of mode 1"),
        ("RGB", "PNG", {"transparency": (1, 2, 3)}, "PNG of mode RGB"),
        ("P", "GIF", {}, "GIF of mode P"),
        ("RGB", "WEBP", {}, "WEBP of mode RGB"),
        ("RGB", "BMP", {}, "BMP of mode RGB"),
        ("RGB", "TIFF", {}, "TIFF of mode RGB"),
    ],
)
def test_image_that_cannot_be_resized_keeps_its_bytes_and_is_counted(
    mode: str, name: str, options: dict[str, Any], counted_as: str
) -> None:
    data = encode_smooth(mode, name, **options)
    assert convert(data, short_side=40) == (data, {f"not resized: {counted_as}": 1})


def test_image_smaller_than_short_side_keeps_its_bytes() -> None:
    assert convert(data := encode_smooth(), short_side=81) == (data, {})


@pytest.mark.parametrize("options", [{}, {"short_side": 40}, {"check": True}])
def test_damaged_image_raises_decode_error(options: dict[str, Any]) -> None:
    jpeg, png = encode_smooth(), encode_smooth(name="PNG")
    for damaged in (b"", b"nonsense", jpeg[:-300], png[: len(png) // 2], jpeg[:40]):
        with pytest.raises(DecodeError):
            convert(damaged, **options)


def test_damage_inside_the_data_raises_only_with_check() -> None:
    png = bytearray(encode_smooth(name="PNG"))
    png[len(png) // 2] ^= 0xFF
    assert convert(bytes(png)) == (bytes(png), {})
    with pytest.raises(DecodeError, match="the PNG cannot be decoded"):
        convert(bytes(png), check=True)


def test_convert_to_pixels_gives_the_central_square() -> None:
    images = ImageConverter(ImageOptions(short_side=20))
    pixels = images.convert_to_pixels(Encoded(encode_smooth("L", "PNG"), "L"))
    expected = open_image(encode_smooth("L", "PNG")).resize((20, 20), Image.Resampling.LANCZOS, box=(20, 0, 100, 80))
    np.testing.assert_array_equal(pixels[:, :, 0], np.asarray(expected))
    assert pixels.shape == (20, 20, 1)


def test_convert_to_pixels_turns_the_image_upright_with_exif_true() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    data = Encoded(encode_smooth(exif=exif))
    stored, upright = (ImageConverter(ImageOptions(exif=value)).convert_to_pixels(data) for value in (False, True))
    assert (stored.shape, upright.shape) == ((80, 120, 3), (120, 80, 3))
    np.testing.assert_array_equal(upright, np.rot90(stored, -1))


@pytest.mark.parametrize("size", [(683, 512), (512, 683), (376, 376)])
@pytest.mark.parametrize("sampling", [0, 2])
def test_resized_jpeg_of_any_width_is_cuttable_with_equal_pixels(size: tuple[int, int], sampling: int) -> None:
    data = jpeg_of_blurred_noise(size, subsampling=sampling)
    short_side = min(size) * 3 // 4
    expected, _ = convert(data, short_side=short_side)
    small, unchanged = convert(data, short_side=short_side, cuttable=True)
    assert unchanged == {}
    assert is_cuttable(small, scan_markers(small))
    assert open_image(small).size == open_image(expected).size
    np.testing.assert_array_equal(np.asarray(open_image(small)), np.asarray(open_image(expected)))


def test_jpeg_that_is_not_resized_is_made_cuttable() -> None:
    data = jpeg_of_blurred_noise((47 * 8, 300))
    cuttable, unchanged = convert(data, cuttable=True)
    np.testing.assert_array_equal(np.asarray(open_image(cuttable)), np.asarray(open_image(data)))
    assert is_cuttable(cuttable, scan_markers(cuttable))
    assert unchanged == {}
    assert convert(small := encode_smooth(), cuttable=True) == (small, {"not cuttable": 1})
    assert convert(png := encode_smooth(name="PNG"), cuttable=True) == (png, {})


@pytest.mark.parametrize("options", [{}, {"cuttable": True}])
@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_resized_noise_larger_than_pillows_buffer_is_written(
    mode: str, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    max_block = ImageFile.MAXBLOCK
    channels = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    noise = np.random.default_rng(0).integers(0, 2, (400, 400, channels), np.uint8) * 255
    file = io.BytesIO()
    Image.frombytes(mode, (400, 400), noise.tobytes()).save(file, "JPEG", quality=100, subsampling=0)
    small, _ = convert(file.getvalue(), short_side=399, quality=100, **options)
    image = open_image(small)
    assert (min(image.size), image.mode, np.asarray(image).std() > 30) == (399, mode, True)
    assert len(small) > image.width * image.height
    assert (ImageFile.MAXBLOCK, capfd.readouterr().err) == (max_block, "")


def jpeg_of_blurred_noise(size: tuple[int, int], **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (size[1] // 6, size[0] // 6, 3), np.uint8)
    return encode(np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)), "JPEG", **options)
