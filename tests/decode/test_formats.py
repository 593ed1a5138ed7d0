"""Formats other than JPEG: the content decides the format, pixels equal Pillow's, and limits refuse large images."""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from helpers import generated_images
from helpers.decoders import decode, pillow_pixels
from PIL import Image, PngImagePlugin

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.header import Header
from gpuload.errors import DecodeError


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">L", len(content)) + name + content + struct.pack(">L", zlib.crc32(name + content))


def png(width: int, height: int, bits: int, color_type: int, rows: bytes) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">LLBBBBB", width, height, bits, color_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def gray_16_bit_png() -> bytes:
    rows = b"".join(b"\0" + np.arange(y * 999, y * 999 + 40 * 700, 700, dtype=">u2").tobytes() for y in range(30))
    return png(40, 30, 16, 0, rows)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
EXIF = b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x08\0\0\0\0\0\0\0"  # orientation 8
COMPRESSED_3_MIB = zlib.compress(bytes(3 << 20))
# Chunks with descriptions of the picture: longer than Pillow reads by default, or damaged.
UNUSED_CHUNKS = {
    "compressed text": (b"zTXt", b"Comment\0\0" + COMPRESSED_3_MIB),
    "compressed international text": (b"iTXt", b"Comment\0\1\0\0\0" + COMPRESSED_3_MIB),
    "compressed XMP": (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + COMPRESSED_3_MIB),
    "compressed EXIF": (b"zTXt", b"Raw profile type exif\0\0" + COMPRESSED_3_MIB),
    "colour profile": (b"iCCP", b"sRGB\0\0" + COMPRESSED_3_MIB),
    "text of a wrong method": (b"zTXt", b"Comment\0\7" + COMPRESSED_3_MIB),
}
# Chunks in which Pillow finds the orientation.
ORIENTATION_CHUNKS = {
    "XMP": (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
    "compressed XMP": (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP)),
    "text": (b"tEXt", b"Raw profile type exif\0\nexif\n26\n" + EXIF.hex().encode()),
    "compressed text": (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n26\n" + EXIF.hex().encode())),
    "EXIF": (b"eXIf", EXIF),
}


def as_ycck(cmyk_jpeg: bytes) -> bytes:
    """Change the Adobe marker of a CMYK JPEG so that it names the four components YCCK."""
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
    offset = cmyk_jpeg.index(marker)
    return cmyk_jpeg[: offset + len(marker)] + b"\x02" + cmyk_jpeg[offset + len(marker) + 1 :]


def two_frames(array: np.ndarray) -> dict[str, Any]:
    return {"save_all": True, "append_images": [Image.fromarray(255 - array)]}


def header_of(data: bytes, **options: Any) -> Header:
    return Decoder(Decode(**options)).header(Encoded(data))


FILES = {
    "PNG": lambda array, encode: encode(array, "PNG"),
    "PNG grey": lambda array, encode: encode(array, "PNG", "L"),
    "PNG 1 bit": lambda array, encode: encode(array, "PNG", "1"),
    "PNG palette": lambda array, encode: encode(array, "PNG", "P"),
    "PNG palette, transparent colour": lambda array, encode: encode(array, "PNG", "P", transparency=3),
    "PNG palette, transparent bytes": lambda array, encode: encode(array, "PNG", "P", transparency=bytes(range(200))),
    "PNG alpha": lambda array, encode: encode(np.dstack([array, array[:, :, 0]]), "PNG"),
    "PNG grey and alpha": lambda array, encode: encode(np.dstack([array, array[:, :, 0]]), "PNG", "LA"),
    "PNG 16-bit colour": lambda array, encode: png(
        2, 1, 16, 2, b"\0" + struct.pack(">6H", 0, 256, 511, 40000, 65279, 65535)
    ),
    "GIF": lambda array, encode: encode(array, "GIF"),
    "BMP": lambda array, encode: encode(array, "BMP"),
    "TIFF LZW": lambda array, encode: encode(array, "TIFF", compression="tiff_lzw"),
    "TIFF CMYK": lambda array, encode: encode(array, "TIFF", "CMYK"),
    "WebP": lambda array, encode: encode(array, "WEBP", quality=80),
    "WebP alpha": lambda array, encode: encode(np.dstack([array, array[:, :, 0]]), "WEBP", lossless=True),
    "AVIF": lambda array, encode: encode(array, "AVIF", quality=80),
    "JPEG 2000": lambda array, encode: encode(array, "JPEG2000"),
    "PPM": lambda array, encode: encode(array, "PPM"),
    "PGM": lambda array, encode: encode(array, "PPM", "L"),
    "QOI": lambda array, encode: encode(array, "QOI"),
    "JPEG CMYK": lambda array, encode: encode(array, "JPEG", "CMYK"),
    "JPEG YCCK": lambda array, encode: as_ycck(encode(array, "JPEG", "CMYK")),
    "GIF of two frames": lambda array, encode: encode(array, "GIF", **two_frames(array)),
    "MPO of two frames": lambda array, encode: encode(array, "MPO", **two_frames(array)),
}


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("kind", FILES)
def test_each_mode_and_region_equals_pillows_conversion(picture, encode, kind, mode):
    data = FILES[kind](picture, encode)
    expected = pillow_pixels(data, mode)
    np.testing.assert_array_equal(decode(data, mode), expected)
    height, width = expected.shape[:2]
    region = (height // 4, width // 3, max(1, height // 2), max(1, width // 2))
    expected = expected[region[0] : region[0] + region[2], region[1] : region[1] + region[3]]
    np.testing.assert_array_equal(decode(data, mode, region), expected)


@pytest.mark.parametrize(
    ("kind", "channels"),
    [("PNG grey", 1), ("PNG 1 bit", 1), ("PNG palette", 1), ("PNG grey and alpha", 2), ("PNG", 3), ("PNG alpha", 4),
     ("JPEG CMYK", 4)],
)  # fmt: skip
def test_mode_unchanged_keeps_the_stored_channels(picture, encode, kind, channels):
    data = FILES[kind](picture, encode)
    stored = np.asarray(Image.open(io.BytesIO(data)))
    stored = stored.astype(np.uint8) * 255 if stored.dtype == np.bool_ else stored
    pixels = decode(data, "unchanged")
    assert pixels.shape == (*stored.shape[:2], channels)
    np.testing.assert_array_equal(pixels.squeeze(), stored)


LEVELS_16 = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50
INTEGERS = "TIFF, 32-bit integers (Pillow mode 'I')"
FILES_OF_MORE_THAN_8_BITS = {
    "PNG, 16 bits per pixel (Pillow mode 'I;16')": gray_16_bit_png,
    "TIFF, 16 bits per pixel (Pillow mode 'I;16')": lambda: generated_images.encode(LEVELS_16, "TIFF"),
    "TIFF, 16 bits per pixel (Pillow mode 'I;16B')": lambda: generated_images.encode(LEVELS_16.astype(">u2"), "TIFF"),
    INTEGERS: lambda: generated_images.encode(LEVELS_16.astype(np.int32), "TIFF"),
    "TIFF, 32-bit floats (Pillow mode 'F')": lambda: generated_images.encode(LEVELS_16.astype(np.float32), "TIFF"),
    "JPEG2000, 16 bits per pixel (Pillow mode 'I;16')": lambda: generated_images.encode(LEVELS_16, "JPEG2000"),
    "PPM, 32-bit integers (Pillow mode 'I')": lambda: b"P5 40 30 65535\n" + LEVELS_16.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("kind", FILES_OF_MORE_THAN_8_BITS)
def test_more_than_8_bits_raise_decode_error_unless_unchanged(kind, mode):
    """Pillow would clip them, so that nearly all of the image becomes white."""
    file, _, description = kind.partition(", ")
    text = (
        f"this {file} holds {description}, which Pillow would clip to 8; to keep its values, yield "
        "gpuload.Encoded(data, mode='unchanged'), of uint16 or float32, or scale them to 0 … 255; if they are classes "
        "or depths, yield a gpuload.Mask"
    )
    decoder, encoded = Decoder(Decode()), Encoded(FILES_OF_MORE_THAN_8_BITS[kind](), mode)
    header = decoder.header(encoded)
    for refused in (lambda: decoder.channels(header, mode), lambda: decoder.decode(encoded, header, (2, 3, 4, 5))):
        with pytest.raises(DecodeError, match=re.escape(text)):
            refused()
    if kind == INTEGERS:
        text = "to keep its values, yield gpuload.Image(array) with the result of tifffile.imread, of"
        with pytest.raises(DecodeError, match=re.escape(text)):
            decoder.channels(decoder.header(Encoded(encoded.data, "unchanged")), "unchanged")


@pytest.mark.parametrize("region", [None, (2, 3, 4, 5)])
@pytest.mark.parametrize("kind", [kind for kind in FILES_OF_MORE_THAN_8_BITS if kind != INTEGERS])
def test_mode_unchanged_keeps_gray_levels_of_more_than_8_bits(kind, region):
    encoded, decoder = Encoded(FILES_OF_MORE_THAN_8_BITS[kind](), "unchanged"), Decoder(Decode())
    header = decoder.header(encoded)
    dtype = "float32" if kind.startswith("TIFF, 32-bit floats") else "uint16"
    assert (decoder.dtype(header), decoder.channels(header, "unchanged")) == (dtype, 1)
    pixels = decoder.decode(encoded, header, region)
    stored = np.asarray(Image.open(io.BytesIO(encoded.data)))[:, :, None].astype(dtype)
    assert stored.max() > 255
    assert pixels.dtype == dtype
    assert np.array_equal(pixels, stored if region is None else stored[2:6, 3:8])


def random_16_bit_colors(channels: int) -> np.ndarray:
    return np.random.default_rng(channels).integers(0, 65536, (30, 40, channels), np.uint16)


def png_16(image: np.ndarray, filters: bytes = b"\0") -> bytes:
    """Encode a PNG of 16 bits whose rows are filtered in turn by these filters (0: none, 1: left, 2: above)."""
    rows, above = [], np.zeros(image[0].nbytes, np.uint8)
    for y, row in enumerate(image.astype(">u2")):
        stored, filter_type = np.frombuffer(row.tobytes(), np.uint8), filters[y % len(filters)]
        left = np.concatenate([np.zeros(2 * image.shape[2], np.uint8), stored[: -2 * image.shape[2]]])
        rows.append(bytes([filter_type]) + (stored - [0, left, above][filter_type]).astype(np.uint8).tobytes())
        above = stored
    return png(image.shape[1], image.shape[0], 16, {3: 2, 4: 6}[image.shape[2]], b"".join(rows))


def tiff_16(image: np.ndarray, order: str = "<") -> bytes:
    """Encode an uncompressed TIFF of 16 bits."""
    height, width, channels = image.shape
    short, long, data_at = 3, 4, 8 + 2 + 11 * 12 + 4
    fields = [
        (256, short, 1, width), (257, short, 1, height), (258, short, channels, data_at), (259, short, 1, 1),
        (262, short, 1, 2), (273, long, 1, data_at + 8), (277, short, 1, channels), (278, short, 1, height),
        (279, long, 1, image.nbytes), (284, short, 1, 1), (338, short, channels - 3, 2),
    ]  # fmt: skip
    fields = [field for field in fields if field[2]]
    head = struct.pack(f"{order}2sHLH", b"II" if order == "<" else b"MM", 42, 8, len(fields))
    for tag, kind, count, value in fields:
        is_long = kind == long or count * 2 > 4
        head += struct.pack(f"{order}HHL", tag, kind, count)
        head += struct.pack(f"{order}L", value) if is_long else struct.pack(f"{order}HH", value, 0)
    body = struct.pack(f"{order}4H", 16, 16, 16, 16) + image.astype(f"{order}u2").tobytes()
    return (head + struct.pack(f"{order}L", 0)).ljust(data_at, b"\0") + body


@pytest.mark.parametrize("region", [None, (2, 3, 4, 5)])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize(
    "store",
    [png_16, lambda image: png_16(image, b"\1\2\0"), tiff_16, lambda image: tiff_16(image, ">")],
    ids=["PNG", "PNG, filtered", "TIFF", "TIFF, big-endian"],
)
def test_mode_unchanged_keeps_colors_of_16_bits(store, channels, region):
    """Pillow reduces them to 8 bits, as does mode="RGB"."""
    image = random_16_bit_colors(channels)
    encoded, decoder = Encoded(store(image), "unchanged"), Decoder(Decode())
    header = decoder.header(encoded)
    assert (decoder.dtype(header), decoder.channels(header, "unchanged")) == ("uint16", channels)
    pixels = decoder.decode(encoded, header, region)
    assert pixels.dtype == np.uint16
    assert np.array_equal(pixels, image if region is None else image[2:6, 3:8])
    mode = "RGB" if channels == 3 else "RGBA"
    assert np.array_equal(decode(encoded.data, mode), image >> 8)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate"])
def test_mode_unchanged_keeps_16_bits_of_compressed_tiffs(compression):
    data = generated_images.encode(LEVELS_16, "TIFF", compression=compression)
    assert np.array_equal(decode(data, "unchanged")[:, :, 0], LEVELS_16)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_images_of_up_to_8_bits_are_scaled_to_255(bits):
    maximum = 2**bits - 1
    for data in (png(8, 2, bits, 0, (b"\0" + b"\xff" * bits) * 2), b"P5 8 2 %d\n" % maximum + bytes([maximum]) * 16):
        assert (decode(data, "L") == 255).all()
        assert (decode(data) == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_image_of_one_pixel_decodes_like_pillow(encode, kind):
    data = encode(np.full((1, 1, 3), 200, np.uint8), kind)
    assert decode(data).shape == (1, 1, 3)
    np.testing.assert_array_equal(decode(data), pillow_pixels(data))


def test_format_comes_from_the_content_not_the_name(picture, encode):
    for file, name in (("PNG", "photo.jpg"), ("JPEG", "photo.png")):
        assert Decoder(Decode()).header(Encoded(encode(picture, file), source=name)).format == file


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the file is empty (0 bytes); expected an image"),
        (
            b"<html><body>404 Not Found",
            "not an image that gpuload decodes: 25 bytes that start with b'<html><body>404 ', an HTML page, such "
            "as a server sends when it refuses a request; download the file again",
        ),
        (
            b"some other text",
            "not an image that gpuload decodes: 15 bytes that start with b'some other text'; expected one of JPEG, "
            "PNG, GIF, BMP, TIFF, WebP, AVIF, JPEG 2000, PNM and QOI, recognised by its content",
        ),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "', a PostScript drawing; render it to PNG"),
        (b"\xff\xd8\xff", "the JPEG header cannot be read: Pillow says SyntaxError: not identified by this driver"),
        (b"\x89PNG\r\n\x1a\n", "the PNG header cannot be read: Pillow says"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "the WEBP header cannot be read: Pillow says"),
    ],
)
def test_data_that_is_not_an_image_raises_decode_error(data, text):
    with pytest.raises(DecodeError, match=re.escape(text)):
        Decoder(Decode()).header(Encoded(data, source="cat.jpg"))


def test_max_pixels_refuses_large_images_from_the_header(encode):
    jpeg = with_size(encode(np.zeros((8, 8, 3), np.uint8)), 20_000)
    files = [jpeg, png(20_000, 20_000, 1, 0, b""), b"P6 20000 20000 255\n" + bytes(99)]
    text = (
        "the header says 20,000×20,000 = 400,000,000 pixels, more than max_pixels=178,956,970: perhaps a decompression "
        "bomb; if it is not, pass Decode(max_pixels=…)"
    )
    for data in files:
        with pytest.raises(DecodeError, match=re.escape(text)):
            header_of(data)
        header = header_of(data, max_pixels=None)
        assert (header.height, header.width) == (20_000, 20_000)
    with pytest.raises(DecodeError, match="20×20 = 400 pixels, more than max_pixels=399"):
        Decoder(Decode(max_pixels=399)).header(Encoded(encode(np.zeros((20, 20, 3), np.uint8))))


def test_max_image_pixels_of_pillow_is_neither_used_nor_changed(picture, encode, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    np.testing.assert_array_equal(decode(encode(picture, "PNG"), "RGB", (1, 2, 60, 70)), picture[1:61, 2:72])
    assert Image.MAX_IMAGE_PIXELS == 100


def repeat_last_scan(jpeg: bytes, times: int) -> bytes:
    """Repeat the last scan of a progressive JPEG."""
    last_scan = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[last_scan:-2] * times + jpeg[-2:]


def test_max_scans_refuses_jpegs_of_many_scans(picture, encode):
    jpeg = encode(picture, "JPEG", progressive=True)
    scans = jpeg.count(b"\xff\xda")
    decoder = Decoder(Decode())
    assert decoder.header(Encoded(repeat_last_scan(jpeg, 256 - scans))).format == "JPEG"
    text = "the JPEG has 257 scans, more than max_scans=256: perhaps made to waste decoding time; if it is not, pass "
    with pytest.raises(DecodeError, match=re.escape(text + "Decode(max_scans=…)")):
        decoder.header(Encoded(repeat_last_scan(jpeg, 257 - scans)))
    with pytest.raises(DecodeError, match=f"the JPEG has {scans} scans, more than max_scans=3"):
        header_of(jpeg, max_scans=3)
    assert header_of(repeat_last_scan(jpeg, 500), max_scans=None).width == 122
    cmyk = encode(picture, "JPEG", "CMYK", progressive=True)
    with pytest.raises(DecodeError, match="scans, more than max_scans=3"):
        header_of(cmyk, max_scans=3)


def with_size(jpeg: bytes, side: int) -> bytes:
    """Change the size in a JPEG's header."""
    frame = max(map(jpeg.find, (b"\xff\xc0\x00\x11\x08", b"\xff\xc2\x00\x11\x08")))  # baseline, or progressive
    return jpeg[: frame + 5] + struct.pack(">HH", side, side) + jpeg[frame + 9 :]


def test_max_scan_pixels_refuses_many_scans_of_a_large_image(picture, encode):
    jpeg = encode(picture, "JPEG", progressive=True)
    scans = jpeg.count(b"\xff\xda")
    large = with_size(repeat_last_scan(jpeg, 13 - scans), 13_370)
    text = (
        "the JPEG has 13 scans of 13,370×13,370 = 2,323,839,700 pixels, more than max_scan_pixels=2,147,483,648: "
        "perhaps made to waste decoding time; if it is not, pass Decode(max_scan_pixels=…)"
    )
    with pytest.raises(DecodeError, match=re.escape(text)):
        header_of(large)
    assert header_of(large, max_scan_pixels=None).width == 13_370
    assert header_of(with_size(repeat_last_scan(jpeg, 12 - scans), 13_370)).width == 13_370
    assert header_of(repeat_last_scan(jpeg, 256 - scans)).width == 122
    with pytest.raises(DecodeError, match="more than max_scan_pixels=99"):  # also where Pillow reads the header
        header_of(jpeg[:20] + b"junk" + jpeg[20:], max_scan_pixels=99)
    assert header_of(encode(picture), max_scan_pixels=1).width == 122


def test_max_memory_refuses_images_that_take_more_to_decode(encode):
    """A WebP of 34 bytes once took 2.7 GB."""
    webp = encode(np.zeros((8, 8, 3), np.uint8), "WEBP", lossless=True)
    offset = webp.index(b"VP8L") + 9
    webp = webp[:offset] + struct.pack("<I", 16_382 | 10_899 << 14) + webp[offset + 4 :]  # width - 1 and height - 1
    assert len(webp) < 50
    text = (
        "decoding 16,383×10,900 pixels would take about 2,857,195,200 bytes of memory, more than "
        "max_memory=2,147,483,648: perhaps a decompression bomb; if it is not, pass Decode(max_memory=…)"
    )
    with pytest.raises(DecodeError, match=re.escape(text)):
        header_of(webp)
    assert header_of(webp, max_memory=None).width == 16_383
    small = np.zeros((8, 8, 3), np.uint8)
    for options in ({}, {"progressive": True}):  # no JPEG that `max_pixels` allows reaches the default max_memory
        jpeg = with_size(encode(small, **options), 13_377)
        assert header_of(jpeg).height == 13_377
        with pytest.raises(DecodeError, match="more than max_memory=500,000,000"):
            header_of(jpeg, max_memory=500_000_000)


@pytest.mark.parametrize("boxed", [False, True])
def test_max_memory_of_jpeg_2000_depends_on_the_tile_size(encode, boxed):
    """OpenJPEG decodes one tile at a time."""
    data = encode(np.zeros((64, 64, 3), np.uint8), "JPEG2000", no_jp2=not boxed)

    def tiled(side: int) -> bytes:
        offset = data.index(b"\xff\x4f\xff\x51") + 8
        changed = data[:offset] + struct.pack(">6I", 13_000, 13_000, 0, 0, side, side) + data[offset + 24 :]
        return changed.replace(b"ihdr" + struct.pack(">II", 64, 64), b"ihdr" + struct.pack(">II", 13_000, 13_000))

    assert header_of(tiled(1024)).width == 13_000
    with pytest.raises(DecodeError, match="would take about 4,901,000,000 bytes of memory, more than max_memory="):
        header_of(tiled(13_000))


def test_max_memory_counts_tiff_tiles_larger_than_the_image():
    # an image of 16×16 pixels (tags 256 and 257) in tiles of 60,000×60,000 (322 and 323)
    tags = {256: 16, 257: 16, 258: 8, 259: 5, 262: 1, 277: 1, 322: 60_000, 323: 60_000, 324: 8, 325: 100}
    tiff = b"II*\0" + struct.pack("<IH", 8, len(tags))
    tiff += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()) + bytes(100)
    with pytest.raises(DecodeError, match="16×16 pixels would take about 3,600,000,000 bytes of memory"):
        header_of(tiff)


def with_chunk(data: bytes, chunk: tuple[bytes, bytes], before: bytes) -> bytes:
    """Insert a chunk into a PNG, before the first chunk of another name."""
    position = data.index(before) - 4
    return data[:position] + png_chunk(*chunk) + data[position:]


@pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
@pytest.mark.parametrize("kind", UNUSED_CHUNKS)
def test_png_with_long_or_damaged_metadata_is_decoded(picture, encode, kind, before):
    data = encode(picture, "PNG")
    described = with_chunk(data, UNUSED_CHUNKS[kind], before)
    assert np.array_equal(decode(described), decode(data))
    assert np.array_equal(decode(described, "RGB", (3, 4, 5, 6)), decode(data, "RGB", (3, 4, 5, 6)))
    assert header_of(described, exif=True).orientation == 1


def test_png_with_more_text_than_pillow_allows_is_decoded(picture, encode, monkeypatch):
    data = encode(picture, "PNG")
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 1000)
    described = with_chunk(data, (b"tEXt", b"Comment\0" + bytes(1001)), b"IDAT")
    with pytest.raises(ValueError, match="Too much memory used in text chunks"):
        Image.open(io.BytesIO(described)).load()
    assert np.array_equal(decode(described), decode(data))


@pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
@pytest.mark.parametrize("kind", ORIENTATION_CHUNKS)
def test_png_orientation_is_read_from_each_chunk_that_pillow_reads(picture, encode, kind, before):
    data = with_chunk(encode(picture, "PNG"), ORIENTATION_CHUNKS[kind], before)
    data = with_chunk(data, UNUSED_CHUNKS["compressed text"], before)
    assert header_of(data, exif=True).orientation == 8


def test_png_truncated_within_a_text_chunk_raises_decode_error(picture, encode):
    data = with_chunk(encode(picture, "PNG"), (b"tEXt", b"Comment\0" + bytes(1000)), b"IDAT")
    with pytest.raises(DecodeError, match="the PNG header cannot be read"):
        decode(data[: data.index(b"Comment") + 100])
