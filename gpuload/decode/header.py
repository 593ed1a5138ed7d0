"""The header of an image: format, size, orientation, a JPEG's markers, and the cost of decoding.

`read_header` refuses files that are not images or would cost too much, before memory is allocated for pixels. The cost
is an estimate, based on the measured memory that decoders use per pixel in addition to the result.

The markers of a JPEG are scanned without decoding, which takes about 5 µs for a photograph. A file that is not a plain
sequence of segments has no `JpegHeader`: Pillow, which is more lenient, reads it instead.

Every decoder returns pixels as stored, and this module turns them upright for all decoders. So a region of the upright
image is first mapped to a region of the stored image. EXIF orientation `o` means that the upright image is the stored
image transposed (5 to 8), then flipped left-right (2, 3, 6, 7) and top-bottom (3, 4, 7, 8).

All functions depend only on their arguments.
"""

from __future__ import annotations

import contextlib
import re
import struct
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from gpuload.datasets.files import explain_large_file, explain_non_image, sniff
from gpuload.decode.options import Decode
from gpuload.decode.pillow_images import PillowImage, Region, open_image, strict_pillow
from gpuload.decode.tiff import remedy
from gpuload.errors import DecodeError, one_line

__all__ = [
    "BLOCK",
    "DHT",
    "EOI",
    "FLIPPED_X",
    "FLIPPED_Y",
    "INDEX",
    "PROGRESSIVE",
    "SOI",
    "Header",
    "JpegHeader",
    "Region",
    "count_mcus",
    "decoder_bytes",
    "end_of_scan",
    "has_end_marker",
    "has_eoi",
    "is_transposed",
    "mcu_layout",
    "read_header",
    "read_orientation",
    "read_scans",
    "scan_markers",
    "scan_start",
    "stored_region",
    "turn_upright",
]  # fmt: skip

# The memory in bytes per pixel that Pillow 13 uses. The image itself takes 4. In addition, TIFF needs a strip that can
# be as large as the image, WebP two canvases and a frame, and JPEG 2000 and AVIF the buffers of their libraries. A
# 16-bit PNM takes more, but its file is equally large.
BYTES_PER_PIXEL: Final[dict[str, int]] = {"TIFF": 8, "QOI": 8, "AVIF": 14, "WEBP": 16, "JPEG2000": 25}
BASE_BYTES, MULTI_SCAN_BYTES = 4, 12  # the decoder of a JPEG with several scans also holds its coefficients
TILE_WIDTH, TILE_HEIGHT, SAMPLES = 322, 323, 277  # TIFF tags
SOI = b"\xff\xd8\xff"
EOI = b"\xff\xd9"
SOS = b"\xff\xda"
EXIF = b"Exif\0\0"
XMP = b"http://ns.adobe.com/xap/1.0/\0"
INDEX = b"gpuload index\0\x02"  # signature and version of gpuload's scan index; see `gpuload.decode.indexed`
DHT, JPG, DAC, DRI = 0xFFC4, 0xFFC8, 0xFFCC, 0xFFDD
FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {DHT, JPG, DAC}
PROGRESSIVE = frozenset({0xFFC2, 0xFFC6, 0xFFCA, 0xFFCE})
SKIPPED_MARKERS = frozenset({DHT, DAC, *range(0xFFDB, 0xFFFF)}) - {DRI, 0xFFE1, 0xFFEA}
unpack_segment = struct.Struct(">HH").unpack_from
unpack_frame = struct.Struct(">BHHB").unpack_from
unpack_uint16 = struct.Struct(">H").unpack_from
TEM = 0x01  # the only marker between segments that has no length
NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
BLOCK: Final = 8  # the width and height of a block in pixels
ORIENTATION_TAG = 0x0112
FLIPPED_X = frozenset({2, 3, 6, 7})
FLIPPED_Y = frozenset({3, 4, 7, 8})
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(="|>)([0-9])')


class Header(NamedTuple):
    """An image's format, stored size and orientation.

    Attributes:
        format: "JPEG", "PNG", …, determined by the content, not by the file name.
        height, width: the stored size in pixels.
        orientation: the EXIF orientation, 1 to 8; 1 if it was not asked for.
        mode: Pillow's name for the stored pixel format: "L", "RGB", "CMYK", "P", "I;16" …
        jpeg: the JPEG's markers if the JPEG-only decoders can try it, else None.
        opened: Pillow's open image for all other files, else None.
    """

    format: str
    height: int
    width: int
    orientation: int
    mode: str
    jpeg: JpegHeader | None
    opened: PillowImage | None


def read_header(data: bytes, options: Decode, *, exif: bool = False) -> Header:
    """Read the header of an image file, with its orientation if `exif`; `Decode.exif` is not used.

    Raises:
        DecodeError: the file is not an image, its format is unknown, its header is damaged, or it needs more bytes,
            pixels, scans or memory than `options` allow.
    """
    if options.max_bytes is not None and len(data) > options.max_bytes:
        raise DecodeError(explain_large_file(len(data), options.max_bytes))
    if data.startswith(SOI):
        jpeg, scans = scan_markers(data), 1
        if jpeg is None:
            scans = data.count(SOS)
        else:
            jpeg = jpeg if options.index else jpeg._replace(index_at=0)
            height, width = jpeg.height, jpeg.width
            check_size(
                height, width, height * width * (BASE_BYTES if jpeg.has_single_scan else MULTI_SCAN_BYTES), options
            )
            if not jpeg.has_single_scan:
                scans, is_complete = read_scans(data, jpeg)
                _check_scans(scans, height, width, options)
                jpeg = jpeg._replace(is_complete=is_complete)
            if jpeg.is_plain:
                orientation = read_orientation(jpeg.exif, jpeg.xmp) if exif else 1
                mode = "L" if jpeg.components == 1 else "RGB"
                return Header("JPEG", height, width, orientation, mode, jpeg, None)
        return _read_with_pillow(data, "JPEG", options, exif, scans)
    format_name = sniff(data)
    if format_name is None:
        if not data:
            raise DecodeError("the file is empty (0 bytes); expected an image")
        raise DecodeError(explain_non_image(data, len(data)))
    return _read_with_pillow(data, format_name, options, exif)


def has_end_marker(data: bytes, header: Header) -> bool:
    """Return whether the file has its format's end marker, as a cheap test for truncated files; True for formats
    without an end marker."""
    if header.format == "PNG":
        return b"IEND" in data[-64:]
    if header.format == "JPEG":
        return header.jpeg is not None and has_eoi(data, header.jpeg)
    return True


def _read_with_pillow(data: bytes, format_name: str, options: Decode, exif: bool, scans: int = 1) -> Header:
    try:
        opened = open_image(data, format_name)
    except Exception as error:
        raise DecodeError(
            f"the {format_name} header cannot be read: Pillow says {type(error).__name__}: "
            f"{one_line(str(error)) + remedy(format_name, data)}"
        ) from error
    check_size(opened.height, opened.width, decoder_bytes(data, opened, scans), options)
    _check_scans(scans, opened.height, opened.width, options)
    orientation = 1
    if exif:
        with contextlib.suppress(Exception):  # a broken EXIF block means no orientation; damaged pixels raise later
            orientation = opened.orientation()
    return Header(format_name, opened.height, opened.width, orientation, opened.mode, None, opened)


def check_size(height: int, width: int, memory_bytes: int, options: Decode) -> None:
    """Refuse an image that exceeds the limits; `memory_bytes` is what its decoder would use."""
    limit = options.max_pixels
    if limit is not None and height * width > limit:
        raise DecodeError(
            f"the header says {width:,}×{height:,} = {width * height:,} pixels, more than max_pixels={limit:,}: "
            "perhaps a decompression bomb; if it is not, pass Decode(max_pixels=…)"
        )
    limit = options.max_memory
    if limit is not None and memory_bytes > limit:
        raise DecodeError(
            f"decoding {width:,}×{height:,} pixels would take about {memory_bytes:,} bytes of memory, more than "
            f"max_memory={limit:,}: perhaps a decompression bomb; if it is not, pass Decode(max_memory=…)"
        )


def _check_scans(scans: int, height: int, width: int, options: Decode) -> None:
    """Refuse a JPEG that exceeds the limits on scans or on pixels summed over scans."""
    limit = options.max_scans
    if limit is not None and scans > limit:
        raise DecodeError(
            f"the JPEG has {scans:,} scans, more than max_scans={limit:,}: perhaps made to waste decoding time; "
            "if it is not, pass Decode(max_scans=…)"
        )
    limit, total_pixels = options.max_scan_pixels, scans * height * width
    if limit is not None and scans > 1 and total_pixels > limit:
        raise DecodeError(
            f"the JPEG has {scans:,} scans of {width:,}×{height:,} = {total_pixels:,} pixels, more than "
            f"max_scan_pixels={limit:,}: perhaps made to waste decoding time; if it is not, pass "
            "Decode(max_scan_pixels=…)"
        )


def decoder_bytes(data: bytes, opened: PillowImage, scans: int) -> int:
    """Estimate the memory that Pillow uses to decode an image, in bytes."""
    pixels = opened.height * opened.width
    match opened.format:
        case "JPEG2000" if (tile_pixels := _jpeg2000_tile_pixels(data)) is not None:  # decoded one tile at a time
            return BASE_BYTES * pixels + BYTES_PER_PIXEL["JPEG2000"] * min(tile_pixels, pixels)
        case "TIFF":  # a tile can be larger than the image
            width, height, samples = (opened.tag(tag) for tag in (TILE_WIDTH, TILE_HEIGHT, SAMPLES))
            return max(BYTES_PER_PIXEL["TIFF"] * pixels, width * height * samples)
        case "JPEG" | "MPO" if scans > 1:
            return MULTI_SCAN_BYTES * pixels
        case name:
            return BYTES_PER_PIXEL.get(name, BASE_BYTES) * pixels


def _jpeg2000_tile_pixels(data: bytes) -> int | None:
    """Return the number of pixels in a tile, from the codestream's SIZ segment; None if it cannot be found."""
    pos = 0
    while data[pos : pos + 4] != b"\xff\x4f\xff\x51":  # the file consists of boxes, one of which holds the codestream
        if data[pos + 4 : pos + 8] == b"jp2c":
            pos += 16 if data[pos : pos + 4] == b"\0\0\0\1" else 8
            if data[pos : pos + 4] != b"\xff\x4f\xff\x51":
                return None
            break
        length = int.from_bytes(data[pos : pos + 4], "big")
        length = int.from_bytes(data[pos + 8 : pos + 16], "big") if length == 1 else length
        if length < 8:
            return None
        pos += length
    width, height = (int.from_bytes(data[pos + offset : pos + offset + 4], "big") for offset in (24, 28))
    return width * height or None


class JpegHeader(NamedTuple):
    """The properties of a JPEG that determine how it is decoded.

    Attributes:
        frame: the SOF marker (0xFFC0 baseline, 0xFFC1 extended, 0xFFC2 progressive …).
        bits: the number of bits per sample.
        height, width, components: the size in pixels and the number of components.
        first_scan: the offset of the first SOS marker.
        has_single_scan: whether the JPEG can have only one scan, so that libjpeg treats a second one as an error.
        exif: the EXIF block, starting with the TIFF header; b"" if there is none.
        xmp: the XMP packet; b"" if there is none.
        is_complete: whether the scans define every coefficient to its last bit, see `read_scans`.
        frame_at: the offset of the SOF marker.
        restart_interval: the number of MCUs between two restart markers; 0 if there are none.
        index_at: the offset of the index's marker; 0 if there is none.
    """

    frame: int
    bits: int
    height: int
    width: int
    components: int
    first_scan: int
    has_single_scan: bool
    exif: bytes
    xmp: bytes
    is_complete: bool = True
    frame_at: int = 0
    restart_interval: int = 0
    index_at: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the JPEG-only decoders accept the JPEG: 8 bits, Huffman coding, sequential or progressive, 1 or 3
        components."""
        return self.frame <= 0xFFC2 and self.bits == 8 and self.components in (1, 3)


def scan_markers(data: bytes) -> JpegHeader | None:
    """Read the segments from SOI to the first SOS; return None if any of them is malformed or unexpected."""
    pos, frame, exif, xmp = 2, 0, b"", b""
    bits = height = width = components = frame_at = restart_interval = index_at = 0
    try:
        while True:
            marker, length = unpack_segment(data, pos)
            if marker in SKIPPED_MARKERS:
                pass
            elif marker in FRAMES:
                if frame:
                    return None
                frame, frame_at = marker, pos
                bits, height, width, components = unpack_frame(data, pos + 4)
            elif marker == 0xFFDA:
                if not frame or not height or not width:
                    return None
                has_single_scan = frame not in PROGRESSIVE and data[pos + 4] == components
                return JpegHeader(
                    frame, bits, height, width, components, pos, has_single_scan, exif, xmp, True, frame_at,
                    restart_interval, index_at,
                )  # fmt: skip
            elif marker == 0xFFE1:
                if data.startswith(EXIF, pos + 4):
                    exif += data[pos + 10 : pos + 2 + length]
                elif data.startswith(XMP, pos + 4):
                    xmp = data[pos + 4 + len(XMP) : pos + 2 + length]
            elif marker == 0xFFEA:
                index_at = pos if data.startswith(INDEX, pos + 4) else index_at
            elif marker == DRI:
                (restart_interval,) = unpack_uint16(data, pos + 4)
            elif marker == 0xFFFF:  # a fill byte
                length = -1
            else:
                return None
            pos += 2 + length
    except struct.error:
        return None


def read_scans(data: bytes, header: JpegHeader) -> tuple[int, bool]:
    """Return the number of scans in a JPEG, and whether they define every coefficient to its last bit.

    Only a progressive JPEG, or a sequential one whose first scan omits components, can have several scans. For all
    other JPEGs, libjpeg treats a second scan as an error. Like libjpeg, this function skips bytes that are not markers.
    """
    if header.has_single_scan:
        return 1, True
    count, pos, is_progressive = 0, header.first_scan, header.frame in PROGRESSIVE
    missing_bits: dict[int, bytearray] = {}  # for each component and coefficient, the number of low bits not yet read
    while (match := NEXT_MARKER.search(data, pos)) is not None:
        pos = match.start()
        marker, length = data[pos + 1], int.from_bytes(data[pos + 2 : pos + 4], "big")
        if marker == EOI[1]:
            break
        if marker == SOS[1]:
            count += 1
            if is_progressive and len(segment := data[pos + 4 : pos + 2 + length]) > 5:
                first, last, low = segment[-3], segment[-2], segment[-1] & 15
                for component in segment[1:-3:2]:
                    bits = missing_bits.setdefault(component, bytearray(b"\xff" * 64))
                    bits[first : last + 1] = bytes((low,)) * len(bits[first : last + 1])
        pos += 2 if marker == TEM else 2 + length
    is_complete = len(missing_bits) == header.components and not any(map(any, missing_bits.values()))
    return count, is_complete or not is_progressive


def end_of_scan(data: bytes, header: JpegHeader) -> int:
    """Return the end of the first scan's entropy-coded data: the next marker except restarts, or the end of file."""
    match = NEXT_MARKER.search(data, header.first_scan + 2)
    return len(data) if match is None else match.start()


def has_eoi(data: bytes, header: JpegHeader) -> bool:
    """Return whether an end-of-image marker follows the first scan; a truncated file has none."""
    return data.endswith(EOI) or data.rfind(EOI, header.first_scan) >= 0


def mcu_layout(data: bytes, header: JpegHeader) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return an MCU's width and height in pixels, and the number of its blocks for each component."""
    if header.components == 1:  # regardless of the sampling factors: a scan of one component is not interleaved
        return (BLOCK, BLOCK), (1,)
    return _parse_sampling(data[header.frame_at + 11 : header.frame_at + 10 + 3 * header.components : 3])


@lru_cache(maxsize=64)
def _parse_sampling(sampling: bytes) -> tuple[tuple[int, int], tuple[int, ...]]:
    across, down = zip(*((factors >> 4, factors & 15) for factors in sampling), strict=True)
    return (BLOCK * max(across), BLOCK * max(down)), tuple(x * y for x, y in zip(across, down, strict=True))


def count_mcus(header: JpegHeader, mcu_size: tuple[int, int]) -> tuple[int, int]:
    """Return the number of MCUs of this size (width, height) in a row and in a column."""
    return -(-header.width // mcu_size[0]), -(-header.height // mcu_size[1])


def scan_start(data: bytes, header: JpegHeader) -> int:
    """Return the offset of the first scan's entropy-coded data."""
    pos = header.first_scan + 2
    return pos + int.from_bytes(data[pos : pos + 2], "big")


def is_transposed(orientation: int) -> bool:
    """Return whether turning the image upright swaps its height and width."""
    return orientation >= 5


def stored_region(region_tlhw: Region, orientation: int, upright_hw: tuple[int, int]) -> Region:
    """Map a region of the upright image to the stored image (top, left, height, width)."""
    top, left, height, width = region_tlhw
    if orientation in FLIPPED_X:
        left = upright_hw[1] - left - width
    if orientation in FLIPPED_Y:
        top = upright_hw[0] - top - height
    return (left, top, width, height) if orientation >= 5 else (top, left, height, width)


def turn_upright(pixels_hwc: np.ndarray, orientation: int) -> np.ndarray:
    """Return an upright view of stored pixels."""
    if orientation >= 5:
        pixels_hwc = pixels_hwc.transpose(1, 0, 2)
    if orientation in FLIPPED_X:
        pixels_hwc = pixels_hwc[:, ::-1]
    if orientation in FLIPPED_Y:
        pixels_hwc = pixels_hwc[::-1]
    return pixels_hwc


def read_orientation(exif: bytes, xmp: bytes) -> int:
    """Return the orientation from an EXIF block, else from an XMP packet, else 1.

    The result agrees with Pillow's ``exif_transpose``: this module reads the common case (one entry of type SHORT), and
    Pillow reads all other cases.
    """
    value = _parse_orientation(exif) if exif else 0
    if value is None:
        value = _read_orientation_with_pillow(exif)
    if value == 0 and xmp and (match := XMP_ORIENTATION.search(xmp)):
        value = int(match[2])
    return value if 1 <= value <= 8 else 1


def _parse_orientation(exif: bytes) -> int | None:
    """Return the orientation, 0 if there is none, or None if the block is not the common case."""
    order = "<" if exif[:4] == b"II*\0" else ">" if exif[:4] == b"MM\0*" else ""
    if not order:
        return None
    try:
        (directory,) = struct.unpack_from(order + "L", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, directory)
        tags = struct.unpack_from(order + "H10x" * count, exif, directory + 2)
    except struct.error:  # the block is truncated
        return None
    if ORIENTATION_TAG not in tags:
        return 0
    value_type, value_count, value = struct.unpack_from(
        order + "HLH", exif, directory + 12 * tags.index(ORIENTATION_TAG) + 4
    )
    return value if tags.count(ORIENTATION_TAG) == 1 and value_type == 3 and value_count == 1 and value else None


def _read_orientation_with_pillow(exif: bytes) -> int:
    from PIL import Image

    metadata = Image.Exif()
    try:
        with strict_pillow():
            metadata.load(b"Exif\0\0" + exif)
            value = metadata.get(ORIENTATION_TAG)
    except Exception:  # a broken block means no orientation, whatever Pillow raises
        return 0
    return 0 if value is None else value if isinstance(value, int) and value else 1
