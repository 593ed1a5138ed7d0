"""The decoders agree on entire images, regions, modes and orientations, with or without `out`; missing decoders."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import lacking
from helpers.decoders import NAMES, decoder_by, pillow_pixels
from helpers.programs import run_python
from PIL import Image

from gpuload.datasets.sample import Encoded, read
from gpuload.decode import Decode, Decoder
from gpuload.decode import decoder as decoder_module
from gpuload.errors import DecodeError

JPEGS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "low quality": {"quality": 8},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
    "optimised": {"optimize": True, "quality": 95},
    "RGB stored": {"keep_rgb": True},
    "grey": {"mode": "L"},
}
REGIONS = [
    (0, 0, 83, 122), (0, 0, 1, 1), (82, 121, 1, 1), (16, 16, 16, 16), (15, 17, 33, 31), (7, 1, 60, 3), (40, 64, 43, 58),
    (1, 0, 82, 121), (0, 1, 17, 120), (81, 119, 2, 3),
]  # fmt: skip
needs_nvimgcodec = lacking.needs("nvidia.nvimgcodec")


def levels_apart(first: np.ndarray, second: np.ndarray) -> int:
    assert first.shape == second.shape
    return int(np.abs(first.astype(int) - second).max())


@pytest.mark.parametrize("kind", JPEGS)
def test_each_decoder_equals_pillow_and_regions_are_slices(decoder, picture, encode, kind):
    photo = Encoded(encode(picture, "JPEG", **JPEGS[kind]))
    header = decoder.header(photo)
    assert (header.format, header.height, header.width, header.orientation) == ("JPEG", 83, 122, 1)
    image = decoder.decode(photo, header)
    assert levels_apart(image, pillow_pixels(photo.data)) <= 2
    for top, left, height, width in REGIONS:
        region = decoder.decode(photo, header, (top, left, height, width))
        np.testing.assert_array_equal(region, image[top : top + height, left : left + width])


@needs_nvimgcodec
@pytest.mark.parametrize("kind", JPEGS)
def test_regions_of_intact_jpegs_are_decoded_by_nvimagecodec_like_by_simplejpeg(picture, encode, kind, monkeypatch):
    photo = Encoded(encode(picture, "JPEG", **JPEGS[kind]))
    simplejpeg = decoder_by("simplejpeg")
    header = simplejpeg.header(photo)
    expected = {region: simplejpeg.decode(photo, header, region) for region in REGIONS}
    monkeypatch.setattr("gpuload.decode.jpeg.SimpleJpeg.decode", lambda *_: pytest.fail("fell back to simplejpeg"))
    monkeypatch.setattr("gpuload.decode.decoder.open_image", lambda *_: pytest.fail("fell back to Pillow"))
    for decoder in (decoder_by("nvImageCodec"), Decoder(Decode())):
        for region in REGIONS:  # if both decoders are there, simplejpeg decodes the entire image
            if len(decoder.jpeg_decoders[0]) == 1 or region[2:] != (header.height, header.width):
                np.testing.assert_array_equal(decoder.decode(photo, header, region), expected[region])


@pytest.mark.parametrize("subsampling", [0, 2])
def test_regions_of_an_incomplete_progressive_jpeg_are_slices(decoder, picture, encode, subsampling):
    """libjpeg smooths an image that lacks scans, with a result that depends on where the region ends."""
    jpeg = encode(picture, "JPEG", progressive=True, subsampling=subsampling)
    scan = jpeg.index(b"\xff\xda")
    incomplete = 0
    while (scan := jpeg.find(b"\xff\xda", scan + 1)) >= 0:
        photo = Encoded(jpeg[:scan] + b"\xff\xd9")
        header = decoder.header(photo)
        image = decoder.decode(photo, header)
        for top, left, height, width in REGIONS:
            region = decoder.decode(photo, header, (top, left, height, width))
            np.testing.assert_array_equal(region, image[top : top + height, left : left + width])
        incomplete += 1
    assert incomplete >= 5


@needs_nvimgcodec
@pytest.mark.parametrize(("height", "width"), [(40, 70), (17, 18), (20, 50), (33, 34), (9, 2), (9, 1)])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_single_columns_equal_those_of_the_entire_image(encode, height, width, subsampling):
    """Decoded alone, a column at the edge of a 4:2:0 JPEG of noise was up to 71 levels off."""
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    photo = Encoded(encode(noise, "JPEG", quality=95, subsampling=subsampling))
    nvimagecodec, simplejpeg = (decoder_by(name) for name in NAMES[:2])
    header = nvimagecodec.header(photo)
    image = simplejpeg.decode(photo, header)
    for left in range(width):
        for top, rows in ((0, height), (3, 5), (0, 1)):
            column = nvimagecodec.decode(photo, header, (top, left, rows, 1))
            np.testing.assert_array_equal(column, image[top : top + rows, left : left + 1])


@pytest.mark.parametrize("kind", JPEGS)
def test_entire_jpegs_are_decoded_by_simplejpeg_into_out(picture, encode, kind, monkeypatch):
    photo = Encoded(encode(picture, "JPEG", **JPEGS[kind]))
    monkeypatch.setattr(
        "gpuload.decode.jpeg.NvImageCodecRegions.decode", lambda *_: pytest.fail("went to nvImageCodec")
    )
    monkeypatch.setattr("gpuload.decode.decoder.open_image", lambda *_: pytest.fail("fell back to Pillow"))
    decoder = Decoder(Decode())
    header = decoder.header(photo)
    out = np.empty((header.height, header.width, 3), np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.decode.decoder.np.copyto", lambda *_: pytest.fail("copied"))
        decoder.decode(photo, header, None, out)
    np.testing.assert_array_equal(out, decoder_by("simplejpeg").decode(photo, header))


def test_regions_of_photographs_agree_across_decoders(photos):
    decoders = [decoder_by(name) for name in NAMES]
    rng = np.random.default_rng(3)
    for path in photos[::4]:
        photo = read(path)
        header = decoders[0].header(photo)
        height, width = (int(rng.integers(1, side + 1)) for side in (header.height, header.width))
        top, left = int(rng.integers(header.height - height + 1)), int(rng.integers(header.width - width + 1))
        region = (top, left, height, width)
        by_nvimagecodec, by_simplejpeg, by_pillow = (decoder.decode(photo, header, region) for decoder in decoders)
        np.testing.assert_array_equal(by_nvimagecodec, by_simplejpeg)
        assert levels_apart(by_nvimagecodec, by_pillow) <= 2
        assert levels_apart(by_nvimagecodec, pillow_pixels(photo.data)[top : top + height, left : left + width]) <= 2


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "unchanged"])
@pytest.mark.parametrize("kind", ["4:2:0", "grey"])
def test_each_mode_equals_pillows_conversion(decoder, picture, encode, kind, mode):
    photo = Encoded(encode(picture, "JPEG", **JPEGS[kind]), mode)
    header = decoder.header(photo)
    expected = pillow_pixels(photo.data, mode if mode != "unchanged" else "L" if kind == "grey" else "RGB")
    assert decoder.channels(header, mode) == expected.shape[2]
    region = decoder.decode(photo, header, (5, 9, 40, 50))
    assert levels_apart(region, expected[5:45, 9:59]) <= 2


def exif_block(orientation: int, order: str) -> bytes:
    exif = Image.Exif()
    exif.endian = order
    exif[0x010F] = "a maker"
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientations_are_applied_by_each_decoder(upright_decoder, picture, encode, orientation, order):
    photo = Encoded(encode(picture, "JPEG", exif=exif_block(orientation, order)))
    header = upright_decoder.header(photo)
    expected = pillow_pixels(photo.data, exif=True)
    assert header.orientation == orientation
    assert (header.height, header.width) == (83, 122)
    assert upright_decoder.size_hw(header) == expected.shape[:2]
    image = upright_decoder.decode(photo, header)
    assert levels_apart(image, expected) <= 2
    for top, left, height, width in [(3, 5, 40, 61), (0, 70, 83, 13), (50, 0, 1, 83)]:
        region = upright_decoder.decode(photo, header, (top, left, height, width))
        np.testing.assert_array_equal(region, image[top : top + height, left : left + width])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_exif_orientations_of_png_webp_tiff_and_avif_are_applied(picture, encode, orientation, kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 90} if kind == "AVIF" else {}
    photo = Encoded(encode(picture, kind, exif=exif_block(orientation, "<"), **options))
    decoder = Decoder(Decode(exif=True))
    header = decoder.header(photo)
    expected = pillow_pixels(photo.data, exif=True)
    assert decoder.size_hw(header) == expected.shape[:2]
    np.testing.assert_array_equal(decoder.decode(photo, header, (2, 3, 50, 60)), expected[2:52, 3:63])


def test_orientation_is_ignored_by_default(decoder, picture, encode):
    photo = Encoded(encode(picture, "JPEG", exif=exif_block(6, "<")))
    header = decoder.header(photo)
    assert decoder.size_hw(header) == (83, 122)
    assert levels_apart(decoder.decode(photo, header), pillow_pixels(photo.data)) <= 2


def test_orientation_in_xmp_is_applied_without_exif(upright_decoder, picture, encode):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    photo = Encoded(encode(picture, "JPEG", xmp=xmp))
    header = upright_decoder.header(photo)
    assert header.orientation == 8
    assert levels_apart(upright_decoder.decode(photo, header), pillow_pixels(photo.data, exif=True)) <= 2


@pytest.mark.parametrize("orientation", [1, 6])
def test_decode_writes_only_into_out(upright_decoder, picture, encode, orientation):
    photo = Encoded(encode(picture, "JPEG", exif=exif_block(orientation, "<")))
    header = upright_decoder.header(photo)
    ring = np.full(40 * 30 * 3 + 200, 77, np.uint8)
    out = ring[100:-100].reshape(40, 30, 3)
    assert upright_decoder.decode(photo, header, (11, 13, 40, 30), out) is out
    np.testing.assert_array_equal(out, upright_decoder.decode(photo, header, (11, 13, 40, 30)))
    assert set(ring[:100]) | set(ring[-100:]) == {77}


def test_pixels_are_unchanged_by_the_next_decode(decoder, picture, encode):
    first, second = (Encoded(encode(array)) for array in (picture, 255 - picture))
    pixels = decoder.decode(first, decoder.header(first))
    before = pixels.copy()
    decoder.decode(second, decoder.header(second))
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("region", [(0, 0, 84, 10), (-1, 0, 5, 5), (0, 120, 5, 3), (5, 5, 0, 5)])
def test_region_outside_the_image_or_out_of_a_wrong_shape_raises_value_error(decoder, picture, encode, region):
    photo = Encoded(encode(picture))
    text = f"the region (top, left, height, width) = {region} is not within H×W = (83, 122)"
    with pytest.raises(ValueError, match=re.escape(text)):
        decoder.decode(photo, decoder.header(photo), region)
    text = "out must be uint8 of shape (4, 5, 3), got uint8 of shape (4, 5, 1)"
    with pytest.raises(ValueError, match=re.escape(text)):
        decoder.decode(photo, decoder.header(photo), (0, 0, 4, 5), np.empty((4, 5, 1), np.uint8))


def test_decode_without_jpeg_decoders_uses_pillow(picture, encode, monkeypatch):
    def raise_import_error(self):
        raise ImportError("libjpeg.so.8: cannot open shared object file")

    monkeypatch.setattr("gpuload.decode.jpeg.NvImageCodecRegions.__init__", raise_import_error)
    monkeypatch.setattr("gpuload.decode.jpeg.SimpleJpeg.__init__", raise_import_error)
    decoder = Decoder(Decode())
    photo = Encoded(encode(picture))
    np.testing.assert_array_equal(decoder.decode(photo, decoder.header(photo)), pillow_pixels(photo.data))
    truncated = Encoded(photo.data[:-900])
    text = r"nvImageCodec: not usable .*libjpeg\.so\.8.*; simplejpeg: not usable .*; Pillow"
    with pytest.raises(DecodeError, match=text):
        decoder.decode(truncated, decoder.header(truncated))


@pytest.mark.processes
def test_importing_gpuload_decode_imports_neither_decoders_nor_torch():
    code = (
        "import sys, gpuload.decode\n"
        "print([name for name in ('torch', 'PIL', 'nvidia', 'simplejpeg') if name in sys.modules])"
    )
    assert run_python(code) == ("[]\n", "")


WITH_OLD_NVIMAGECODEC = """
import os, warnings
import numpy as np
import gpuload as gl
from gpuload import transforms as T
from helpers.generated_images import jpeg_bytes, smooth_image

samples = [gl.Encoded(jpeg_bytes(smooth_image(40, 50, number))) for number in range(12)]
for workers in (0, 2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"transforms": [T.RandomCrop(8)], "num_workers": workers, "device": "cpu", "chunk_size": 1}
        with gl.Loader(samples, 4, **options) as loader:
            for _ in range(2):
                assert len(list(loader)) == 3
    texts = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    print(workers, len(texts), *texts)
"""


@pytest.mark.processes
def test_nvimagecodec_that_is_too_old_warns_once(tmp_path):
    package = tmp_path / "nvidia" / "nvimgcodec"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text('__version__ = "0.8.0"\n')
    tests = Path(__file__).parent.parent
    paths = os.pathsep.join(map(str, (tmp_path, tests, tests.parent)))
    output, _ = run_python(WITH_OLD_NVIMAGECODEC, env={**os.environ, "PYTHONPATH": paths})
    for workers, line in zip((0, 2), output.splitlines(), strict=True):
        assert line.startswith(f"{workers} 1 nvImageCodec is installed but cannot be used ("), line
        assert "found version 0.8.0, but 0.9 or newer is needed" in line
        assert "pip install --upgrade 'gpuload[cu13]'" in line


def test_missing_nvimagecodec_does_not_warn(picture, encode, monkeypatch):
    monkeypatch.setattr("gpuload.decode.decoder._is_installed", lambda name: False)
    monkeypatch.setattr("gpuload.decode.jpeg.NvImageCodecRegions.__init__", lambda self: 1 // 0)
    decoder = Decoder(Decode())
    photo = Encoded(encode(picture))
    decoder.decode(photo, decoder.header(photo))
    assert decoder.warning == ""


def test_empty_folder_does_not_count_as_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not decoder_module._is_installed("left_behind")
    assert not decoder_module._is_installed("left_behind.within")
    assert decoder_module._is_installed("gpuload.decode")
