"""What is known of an image before its pixels: format, size, orientation, and how it will be decoded.

`read_header` refuses files that are no images or too large, before memory is taken for pixels.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from gpuload.decode.jpeg_header import SOI, SOS, JpegHeader, count_scans, scan_markers
from gpuload.decode.options import Decode
from gpuload.decode.orientation import read_orientation
from gpuload.decode.pillow_images import FORMATS, PillowImage, open_image, sniff
from gpuload.errors import DecodeError, one_line

__all__ = ["Header", "read_header"]


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
        DecodeError: no image, an unknown format, a damaged header, or more pixels or scans than `options` allow.
    """
    if data.startswith(SOI):
        jpeg = scan_markers(data)
        if jpeg is not None:
            height, width = jpeg.height, jpeg.width
            max_pixels, max_scans = options.max_pixels, options.max_scans
            if max_pixels is not None and height * width > max_pixels:
                raise _too_large(height, width, max_pixels)
            if not jpeg.single_scan and max_scans is not None:
                _check_scans(count_scans(data, jpeg, max_scans), max_scans)
            if jpeg.plain:
                orientation = read_orientation(jpeg.exif, jpeg.xmp) if options.exif else 1
                mode = "L" if jpeg.components == 1 else "RGB"
                return Header("JPEG", height, width, orientation, mode, jpeg, None)
        elif options.max_scans is not None:
            _check_scans(data.count(SOS), options.max_scans)
        return _by_pillow(data, "JPEG", options)
    name = sniff(data)
    if name is None:
        if not data:
            raise DecodeError("the file is empty (0 bytes); expected an image")
        raise DecodeError(
            f"not an image that gpuload decodes: {len(data)} bytes that start with {data[:16]!r}; "
            f"expected one of {FORMATS}, recognised by its content"
        )
    return _by_pillow(data, name, options)


def _by_pillow(data: bytes, name: str, options: Decode) -> Header:
    try:
        opened = open_image(data, name)
    except Exception as error:
        raise DecodeError(
            f"the {name} header cannot be read: Pillow says {type(error).__name__}: {one_line(str(error))}"
        ) from error
    if options.max_pixels is not None and opened.height * opened.width > options.max_pixels:
        raise _too_large(opened.height, opened.width, options.max_pixels)
    orientation = 1
    if options.exif:
        with contextlib.suppress(Exception):  # a broken EXIF block is no orientation; broken pixels fail again later
            orientation = opened.orientation()
    return Header(name, opened.height, opened.width, orientation, opened.mode, None, opened)


def _too_large(height: int, width: int, limit: int) -> DecodeError:
    return DecodeError(
        f"the header says {width:,}×{height:,} = {width * height:,} pixels, more than max_pixels={limit:,}: "
        "perhaps a decompression bomb; if it is not, pass Decode(max_pixels=…)"
    )


def _check_scans(count: int, limit: int) -> None:
    if count > limit:
        raise DecodeError(
            f"the JPEG comes in {count:,} scans, more than max_scans={limit:,}: perhaps made to cost decoding time; "
            "if it is not, pass Decode(max_scans=…)"
        )
