"""What a JPEG says before its pixels: a walk over its markers, without decoding.

Pure functions of the bytes (about 5 µs for a photograph). A file that is not a plain sequence of segments gives None:
Pillow, which is more lenient, reads it instead.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

__all__ = ["DHT", "EOI", "INDEX", "SOI", "SOS", "JpegHeader", "end_of_scan", "has_end", "read_scans", "scan_markers"]

SOI = b"\xff\xd8\xff"
EOI = b"\xff\xd9"
SOS = b"\xff\xda"
EXIF = b"Exif\0\0"
XMP = b"http://ns.adobe.com/xap/1.0/\0"
INDEX = b"gpuload index\0\x02"  # what an index of the scan begins with (`indexed`), and its version
DHT, JPG, DAC, DRI = 0xFFC4, 0xFFC8, 0xFFCC, 0xFFDD
FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {DHT, JPG, DAC}
PROGRESSIVE = frozenset({0xFFC2, 0xFFC6, 0xFFCA, 0xFFCE})
PASSED_OVER = frozenset({DHT, DAC, *range(0xFFDB, 0xFFFF)}) - {DRI, 0xFFE1, 0xFFEA}
segment_at = struct.Struct(">HH").unpack_from
frame_at = struct.Struct(">BHHB").unpack_from
number_at = struct.Struct(">H").unpack_from
TEM = 0x01  # the one marker without a length that may stand between segments
NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


class JpegHeader(NamedTuple):
    """The facts that decide how a JPEG is decoded.

    `frame` is its SOF marker (0xFFC0 baseline, 0xFFC1 extended, 0xFFC2 progressive …), `first_scan` the offset of its
    first SOS marker, `single_scan` whether libjpeg takes only one scan, `exif` its EXIF block (TIFF header first) or
    b"", `xmp` likewise, `complete` what `read_scans` says, `frame_at` the offset of the SOF marker, `restart_interval`
    how many MCUs stand between two restart markers, 0 for none, `index_at` the offset of the marker of its index, 0
    for none.
    """

    frame: int
    bits: int
    height: int
    width: int
    components: int
    first_scan: int
    single_scan: bool
    exif: bytes
    xmp: bytes
    complete: bool = True
    frame_at: int = 0
    restart_interval: int = 0
    index_at: int = 0

    @property
    def plain(self) -> bool:
        """Whether the JPEG-only decoders take it: 8 bits, Huffman, sequential or progressive, grey or 3 components."""
        return self.frame <= 0xFFC2 and self.bits == 8 and self.components in (1, 3)


def scan_markers(data: bytes) -> JpegHeader | None:
    """Walk from SOI to the first SOS; None if anything but well-formed segments comes."""
    at, frame, exif, xmp = 2, 0, b"", b""
    bits = height = width = components = start = interval = index = 0
    try:
        while True:
            marker, length = segment_at(data, at)
            if marker in PASSED_OVER:
                at += 2 + length
            elif marker in FRAMES:
                if frame:
                    return None
                frame, start = marker, at
                bits, height, width, components = frame_at(data, at + 4)
                at += 2 + length
            elif marker == 0xFFDA:
                if not frame or not height or not width:
                    return None
                single_scan = frame not in PROGRESSIVE and data[at + 4] == components
                return JpegHeader(
                    frame, bits, height, width, components, at, single_scan, exif, xmp, True, start, interval, index
                )
            elif marker == 0xFFE1:
                if data.startswith(EXIF, at + 4):
                    exif += data[at + 10 : at + 2 + length]
                elif data.startswith(XMP, at + 4):
                    xmp = data[at + 4 + len(XMP) : at + 2 + length]
                at += 2 + length
            elif marker == 0xFFEA:
                if data.startswith(INDEX, at + 4):
                    index = at
                at += 2 + length
            elif marker == DRI:
                (interval,) = number_at(data, at + 4)
                at += 2 + length
            elif marker == 0xFFFF:  # a fill byte
                at += 1
            else:
                return None
    except struct.error:
        return None


def read_scans(data: bytes, header: JpegHeader) -> tuple[int, bool]:
    """How many scans a JPEG has, and whether they give every coefficient to its last bit.

    Only a progressive JPEG, and a sequential one whose first scan leaves components out, may have several: in all
    others a second scan is an error to libjpeg. Like libjpeg this passes over what is no marker.
    """
    if header.single_scan:
        return 1, True
    count, at, progressive = 0, header.first_scan, header.frame in PROGRESSIVE
    missing: dict[int, bytearray] = {}  # for each component and coefficient, how many low bits have not come
    while (found := NEXT_MARKER.search(data, at)) is not None:
        at = found.start()
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == EOI[1]:
            break
        if marker == SOS[1]:
            count += 1
            if progressive and len(segment := data[at + 4 : at + 2 + length]) > 5:
                first, last, low = segment[-3], segment[-2], segment[-1] & 15
                for component in segment[1:-3:2]:
                    bits = missing.setdefault(component, bytearray(b"\xff" * 64))
                    bits[first : last + 1] = bytes((low,)) * len(bits[first : last + 1])
        at += 2 if marker == TEM else 2 + length
    complete = len(missing) == header.components and not any(map(any, missing.values()))
    return count, complete or not progressive


def end_of_scan(data: bytes, header: JpegHeader) -> int:
    """Where the entropy-coded data of the first scan ends: at the next marker but restarts, or with the file."""
    found = NEXT_MARKER.search(data, header.first_scan + 2)
    return len(data) if found is None else found.start()


def has_end(data: bytes, header: JpegHeader) -> bool:
    """Whether an end-of-image marker follows the first scan; a cut-off file has none."""
    return data.endswith(EOI) or data.rfind(EOI, header.first_scan) >= 0
