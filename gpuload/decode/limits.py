"""What decoding a file would cost, told from its header and held against the limits of `Decode`. Pure functions.

Memory is an estimate: the pixels times what decoders were measured to take for each, over the bytes of the result. It
is a bound for files made to cost memory; a photograph of usual size takes less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuload.decode.options import Decode
from gpuload.errors import DecodeError

if TYPE_CHECKING:
    from gpuload.decode.pillow_images import PillowImage

__all__ = ["SEVERAL_SCANS", "USUAL", "check_scans", "check_size", "decoder_bytes"]

# Bytes for a pixel, with Pillow 13: an image of 4, and for TIFF a strip that may be all of it, for WebP two canvases
# and a frame, for JPEG 2000 and AVIF what their libraries decode to. A PNM of 16 bits takes more, from as large a file.
MEMORY: Final[dict[str, int]] = {"TIFF": 8, "QOI": 8, "AVIF": 14, "WEBP": 16, "JPEG2000": 25}
USUAL, SEVERAL_SCANS = 4, 12  # a JPEG of several scans holds its coefficients
TILE_WIDTH, TILE_HEIGHT, SAMPLES = 322, 323, 277  # tags of TIFF


def check_size(height: int, width: int, memory: int, options: Decode) -> None:
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


def check_scans(scans: int, height: int, width: int, options: Decode) -> None:
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
