"""TIFFs of which Pillow returns only a part: refused with mode="unchanged" and as masks."""

from __future__ import annotations

import io
import re
import struct

import numpy as np
import pytest
from helpers.decoders import decode
from PIL import Image

import gpuload as gl
from gpuload import DecodeError
from gpuload.decode import Decode, Decoder, tiff
from gpuload.decode.tiff import Page, read_pages

HEIGHT, WIDTH = 4, 6
Tags = dict[int, tuple[int, ...]]


def page_tags(samples: int = 1, bits: int = 8, **other_tags: tuple[int, ...]) -> Tags:
    """Return the tags of an uncompressed page of one strip, and further tags by number, such as t254=(1,)."""
    tags: Tags = {256: (WIDTH,), 257: (HEIGHT,), 258: (bits,) * samples, 259: (1,), 262: (1,), 273: (0,)}
    tags |= {277: (samples,), 278: (HEIGHT,), 279: (HEIGHT * WIDTH * samples * bits // 8,)}
    return tags | {int(name[1:]): value for name, value in other_tags.items()}


def tiff_file(*pages: Tags, order: str = "<", big: bool = False) -> bytes:
    """Encode a TIFF: for each page its strip, the values that do not fit into a directory, and the directory."""
    mark = b"II" if order == "<" else b"MM"
    number = "Q" if big else "I"
    data = bytearray(mark + (struct.pack(order + "HHHQ", 43, 8, 0, 0) if big else struct.pack(order + "HI", 42, 0)))
    link = len(data) - struct.calcsize(number)
    for value, tags in enumerate(pages, 1):
        strip = len(data)
        data += bytes([value]) * tags[279][0]
        entries = b""
        for tag, numbers in sorted({**tags, 273: (strip,)}.items()):
            packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
            if len(packed) > struct.calcsize(number):
                packed, outside = struct.pack(order + number, len(data)), packed
                data += outside
            entries += struct.pack(order + "HH" + number, tag, 4, len(numbers)) + packed.ljust(
                struct.calcsize(number), b"\0"
            )
        data += bytes(len(data) % 2)
        struct.pack_into(order + number, data, link, len(data))
        data += struct.pack(order + ("Q" if big else "H"), len(tags)) + entries
        link = len(data)
        data += bytes(struct.calcsize(number))
    return bytes(data)


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_read_pages_returns_each_page_in_both_byte_orders_and_of_big_tiffs(order: str, big: bool) -> None:
    data = tiff_file(page_tags(), page_tags(3, 16), page_tags(2, 8, t339=(2, 2), t32997=(5,)), order=order, big=big)
    assert read_pages(data) == [Page(1, 8, 1, 1), Page(3, 16, 1, 1), Page(2, 8, 2, 5)]


@pytest.mark.parametrize(("order", "big"), [("<", False), ("<", True), (">", False)])  # the kinds that Pillow reads
def test_decode_returns_the_first_page(order: str, big: bool) -> None:
    data = tiff_file(page_tags(), page_tags(3, 16), order=order, big=big)
    assert decode(data, "L").tolist() == np.ones((HEIGHT, WIDTH, 1)).tolist()


@pytest.mark.parametrize(
    ("pages", "lost"),
    [
        ([page_tags()] * 8, "8 pages, of which Pillow returns the first"),
        ([page_tags(bits=16)] * 2, "2 pages, of which Pillow returns the first"),
        ([page_tags(t255=(3,))] * 3, "3 pages, of which Pillow returns the first"),
        ([page_tags(2, t338=(0,))], "2 channels, of which Pillow returns 1"),
        ([page_tags(5, t262=(2,), t338=(0, 0))], "5 channels, of which Pillow returns 3"),
        ([page_tags(4, t262=(2,), t338=(0,))], "4 channels, of which Pillow returns 3"),
        ([page_tags(t32997=(8,))], "8 slices, of which Pillow returns the first"),
        ([page_tags(t339=(2,))], "signed 8-bit values, which Pillow returns as unsigned values"),
        ([page_tags(3, 16, t262=(2,), t284=(2,), t273=(8, 8, 8))], "16 bits per channel, of which Pillow returns 8"),
    ],
)
def test_mode_unchanged_refuses_a_tiff_that_pillow_returns_only_in_part(pages: list[Tags], lost: str) -> None:
    data = tiff_file(*pages)
    end = (
        r"; read it in the dataset, for example with tifffile.imread\(path\), and yield gpuload.Image\(array, "
        r"layout='CHW' or 'HWC'\) of uint8, uint16 or float32$"
    )
    text = f"^mode='unchanged' returns everything in a file, but this TIFF has {lost}{end}"
    with pytest.raises(DecodeError, match=text):
        decode(data, "unchanged")


def test_mask_of_several_pages_is_refused() -> None:
    decoder = Decoder(Decode())
    text = (
        "a mask must be a file with one value per pixel, but this TIFF has 2 pages, of which Pillow returns the "
        "first; read it in the dataset, for example with tifffile.imread(path), and yield gpuload.Mask(array)"
    )
    with pytest.raises(DecodeError, match=f"^{re.escape(text)}$"):
        decoder.mask_dtype(decoder.header(gl.Encoded(tiff_file(page_tags(), page_tags()))))
    assert decoder.mask_dtype(decoder.header(gl.Encoded(tiff_file(page_tags())))) == "uint8"


@pytest.mark.parametrize("tags", [{"t254": (1,)}, {"t254": (4,)}, {"t254": (5,)}, {"t255": (2,)}])
def test_reduced_copies_and_masks_do_not_count_as_pages(tags: dict[str, tuple[int, ...]]) -> None:
    """Cloud-optimized GeoTIFFs have pages that tag 254 or 255 marks as a reduced copy or a mask."""
    data = tiff_file(page_tags(bits=16), page_tags(bits=16, **tags), page_tags(**tags))
    assert decode(data, "unchanged")[:, :, 0].tolist() == np.full((HEIGHT, WIDTH), 0x0101).tolist()


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "LAB", "I;16", "F"])
def test_mode_unchanged_accepts_each_mode_that_pillow_writes(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (WIDTH, HEIGHT)).save(file, "TIFF")
    assert decode(file.getvalue(), "unchanged").shape[:2] == (HEIGHT, WIDTH)


def test_mask_of_32_bits_keeps_its_values() -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((HEIGHT, WIDTH), 70_000, np.int32)).save(file, "TIFF")
    decoder, encoded = Decoder(Decode()), gl.Encoded(file.getvalue())
    header = decoder.header(encoded)
    out = np.empty((HEIGHT, WIDTH), decoder.mask_dtype(header))
    decoder.decode_mask(encoded, header, (0, 0, HEIGHT, WIDTH), out)
    assert (out == 70_000).all()


@pytest.mark.parametrize("bits", [16, 8])
def test_error_of_a_tiff_that_pillow_cannot_read_suggests_tifffile(bits: int) -> None:
    text = (
        f". If the file is not damaged but of a kind that Pillow does not read (it has 5 channels of {bits} bits), "
        "read it in the dataset, for example with tifffile.imread(path), and yield gpuload.Image(array"
    )
    text = f"^the TIFF header cannot be read: Pillow says SyntaxError: unknown.*{re.escape(text)}"
    with pytest.raises(DecodeError, match=text):
        decode(tiff_file(page_tags(5, bits)), "unchanged")


def test_read_pages_stops_at_cycles_truncation_and_max_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(tiff_file(page_tags(), page_tags()))
    (first_directory,) = struct.unpack_from("<I", data, 4)
    struct.pack_into("<I", data, len(data) - 4, first_directory)
    assert len(read_pages(bytes(data))) == 2
    twelve_pages = tiff_file(*[page_tags()] * 12)
    monkeypatch.setattr(tiff, "MAX_PAGES", 5)
    with pytest.raises(DecodeError, match="this TIFF has more than 5 pages, of which"):
        decode(twelve_pages, "unchanged")
    for length in range(len(twelve_pages)):  # fewer pages, and no error
        assert len(read_pages(twelve_pages[:length])) <= 6
