"""What is known of an image before its pixels: format, size, orientation, and how it will be decoded.

`read_header` refuses files that are no images or too large, before memory is taken for pixels.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from gpuload.datasets.files import no_image, sniff, too_large
from gpuload.decode.jpeg_header import SOI, SOS, JpegHeader, read_scans, scan_markers
from gpuload.decode.limits import SEVERAL_SCANS, USUAL, check_scans, check_size, decoder_bytes
from gpuload.decode.options import Decode
from gpuload.decode.orientation import read_orientation
from gpuload.decode.pillow_images import PillowImage, open_image
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
            check_size(height, width, height * width * (USUAL if jpeg.single_scan else SEVERAL_SCANS), options)
            if not jpeg.single_scan:
                scans, complete = read_scans(data, jpeg)
                check_scans(scans, height, width, options)
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


def _by_pillow(data: bytes, name: str, options: Decode, scans: int = 1) -> Header:
    try:
        opened = open_image(data, name)
    except Exception as error:
        raise DecodeError(
            f"the {name} header cannot be read: Pillow says {type(error).__name__}: {one_line(str(error))}"
        ) from error
    check_size(opened.height, opened.width, decoder_bytes(data, opened, scans), options)
    check_scans(scans, opened.height, opened.width, options)
    orientation = 1
    if options.exif:
        with contextlib.suppress(Exception):  # a broken EXIF block is no orientation; broken pixels fail again later
            orientation = opened.orientation()
    return Header(name, opened.height, opened.width, orientation, opened.mode, None, opened)
