"""What is known of an image before its pixels: format, size, orientation, and how it will be decoded.

`read_header` refuses files that are no images or would cost too much, before memory is taken for pixels. What decoding
takes is an estimate: what decoders were measured to take for each pixel, over the bytes of the result.
"""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

from gpuload.datasets.files import no_image, sniff, too_large
from gpuload.decode.jpeg_header import SOI, SOS, JpegHeader, has_end, read_scans, scan_markers
from gpuload.decode.options import Decode
from gpuload.decode.orientation import read_orientation
from gpuload.decode.pillow_images import PillowImage, open_image
from gpuload.decode.tiff import remedy
from gpuload.errors import DecodeError, one_line

__all__ = ["Header", "decoder_bytes", "ends", "read_header"]

# Bytes for a pixel, with Pillow 13: an image of 4, and for TIFF a strip that may be all of it, for WebP two canvases
# and a frame, for JPEG 2000 and AVIF what their libraries decode to. A PNM of 16 bits takes more, from as large a file.
MEMORY: Final[dict[str, int]] = {"TIFF": 8, "QOI": 8, "AVIF": 14, "WEBP": 16, "JPEG2000": 25}
USUAL, SEVERAL_SCANS = 4, 12  # a JPEG of several scans holds its coefficients
TILE_WIDTH, TILE_HEIGHT, SAMPLES = 322, 323, 277  # tags of TIFF


class Header(NamedTuple):
    """An image's format, stored size and orientation.

    Attributes:
        format: "JPEG", "PNG", …: by the content, not by the file's name.
        height, width: in pixels, as stored.
        orientation: 1 to 8, as EXIF counts; 1 where `Decode.exif` is off.
        mode: Pillow's name of the stored pixels: "L", "RGB", "CMYK", "P", "I;16" …
        jpeg: its markers, if the JPEG-only decoders may try it.
        opened: Pillow's open image, if not.
    """

    format: str
    height: int
    width: int
    orientation: int
    mode: str
    jpeg: JpegHeader | None
    opened: PillowImage | None


def read_header(data: bytes, options: Decode) -> Header:
    """Read the header of an image file.

    Raises:
        DecodeError: no image, an unknown format, a damaged header, or more bytes, pixels, scans or memory than
            `options` allow.
    """
    if options.max_bytes is not None and len(data) > options.max_bytes:
        raise DecodeError(too_large(len(data), options.max_bytes))
    if data.startswith(SOI):
        jpeg, scans = scan_markers(data), 1
        if jpeg is None:
            scans = data.count(SOS)
        else:
            height, width = jpeg.height, jpeg.width
            _check_size(height, width, height * width * (USUAL if jpeg.single_scan else SEVERAL_SCANS), options)
            if not jpeg.single_scan:
                scans, complete = read_scans(data, jpeg)
                _check_scans(scans, height, width, options)
                jpeg = jpeg._replace(complete=complete)
            if jpeg.plain:
                orientation = read_orientation(jpeg.exif, jpeg.xmp) if options.exif else 1
                mode = "L" if jpeg.components == 1 else "RGB"
                return Header("JPEG", height, width, orientation, mode, jpeg, None)
        return _by_pillow(data, "JPEG", options, scans)
    name = sniff(data)
    if name is None:
        if not data:
            raise DecodeError("the file is empty (0 bytes); expected an image")
        raise DecodeError(no_image(data, len(data)))
    return _by_pillow(data, name, options)


def ends(data: bytes, header: Header) -> bool:
    """Whether the file has an end, where its format says so: cheap, and finds what was cut off."""
    if header.format == "PNG":
        return b"IEND" in data[-64:]
    if header.format == "JPEG":
        return header.jpeg is not None and has_end(data, header.jpeg)
    return True


def _by_pillow(data: bytes, name: str, options: Decode, scans: int = 1) -> Header:
    try:
        opened = open_image(data, name)
    except Exception as error:
        raise DecodeError(
            f"the {name} header cannot be read: Pillow says {type(error).__name__}: "
            f"{one_line(str(error)) + remedy(name, data)}"
        ) from error
    _check_size(opened.height, opened.width, decoder_bytes(data, opened, scans), options)
    _check_scans(scans, opened.height, opened.width, options)
    orientation = 1
    if options.exif:
        with contextlib.suppress(Exception):  # a broken EXIF block is no orientation; broken pixels fail again later
            orientation = opened.orientation()
    return Header(name, opened.height, opened.width, orientation, opened.mode, None, opened)


def _check_size(height: int, width: int, memory: int, options: Decode) -> None:
    """Refuse an image of more pixels, or whose decoder would take more than `memory` bytes."""
    limit = options.max_pixels
    if limit is not None and height * width > limit:
        raise DecodeError(
            f"the header says {width:,}×{height:,} = {width * height:,} pixels, more than max_pixels={limit:,}: "
            "perhaps a decompression bomb; if it is not, pass Decode(max_pixels=…)"
        )
    limit = options.max_memory
    if limit is not None and memory > limit:
        raise DecodeError(
            f"decoding {width:,}×{height:,} pixels would take about {memory:,} bytes of memory, more than "
            f"max_memory={limit:,}: perhaps a decompression bomb; if it is not, pass Decode(max_memory=…)"
        )


def _check_scans(scans: int, height: int, width: int, options: Decode) -> None:
    """Refuse a JPEG of more scans, or of more scans for its size."""
    limit = options.max_scans
    if limit is not None and scans > limit:
        raise DecodeError(
            f"the JPEG comes in {scans:,} scans, more than max_scans={limit:,}: perhaps made to cost decoding time; "
            "if it is not, pass Decode(max_scans=…)"
        )
    limit, work = options.max_scan_pixels, scans * height * width
    if limit is not None and scans > 1 and work > limit:
        raise DecodeError(
            f"the JPEG comes in {scans:,} scans of {width:,}×{height:,} = {work:,} pixels, more than "
            f"max_scan_pixels={limit:,}: perhaps made to cost decoding time; if it is not, pass "
            "Decode(max_scan_pixels=…)"
        )


def decoder_bytes(data: bytes, opened: PillowImage, scans: int) -> int:
    """About how much memory Pillow takes to decode an image."""
    pixels = opened.height * opened.width
    match opened.format:
        case "JPEG2000" if (tile := _jpeg2000_tile(data)) is not None:  # decoded one after the other
            return USUAL * pixels + MEMORY["JPEG2000"] * min(tile, pixels)
        case "TIFF":  # a tile may be larger than the image
            width, height, samples = (opened.tag(tag) for tag in (TILE_WIDTH, TILE_HEIGHT, SAMPLES))
            return max(MEMORY["TIFF"] * pixels, width * height * samples)
        case "JPEG" | "MPO" if scans > 1:
            return SEVERAL_SCANS * pixels
        case name:
            return MEMORY.get(name, USUAL) * pixels


def _jpeg2000_tile(data: bytes) -> int | None:
    """The pixels of a tile, from the codestream's SIZ segment."""
    at = 0
    while data[at : at + 4] != b"\xff\x4f\xff\x51":  # a file of boxes, the codestream in one of them
        if data[at + 4 : at + 8] == b"jp2c":
            at += 16 if data[at : at + 4] == b"\0\0\0\1" else 8
            if data[at : at + 4] != b"\xff\x4f\xff\x51":
                return None
            break
        length = int.from_bytes(data[at : at + 4], "big")
        length = int.from_bytes(data[at + 8 : at + 16], "big") if length == 1 else length
        if length < 8:
            return None
        at += length
    width, height = (int.from_bytes(data[at + offset : at + offset + 4], "big") for offset in (24, 28))
    return width * height or None
