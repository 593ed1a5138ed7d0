"""JPEGs decoded at 1/2, 1/4 or 1/8 of their size, on the way to a small result: `Decode(scale="fast")`.

libjpeg makes a smaller picture out of the low frequencies of each block of 8×8 pixels: one of 4×4, 2×2 or 1×1. That
is antialiasing too, and leaves out most of the arithmetic; the entropy-coded bytes have to be read either way. What is
left to the size that is asked for, less than a factor of two, is resampled by Pillow, whose boxes may begin and end
within a pixel. So a result shows what it would show of the whole picture, without a shift.

simplejpeg decodes from the first row down to the region's last one: the header is told that the picture ends there.
Where the file is cuttable, the region is cut out first (`cut`). Of a progressive JPEG all rows are decoded.

Pure functions of the file and the region, so whoever decodes a sample makes the same choice. Run in workers.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.decode.cut import cut, find_grid
from gpuload.decode.header import BLOCK, JpegHeader, Region, has_end, mcu_layout

__all__ = ["SUPPORT", "Scaled", "choose_eighths", "decode_scaled", "resample"]

# The filters that smooth what becomes smaller, so that a smaller picture looks the same, and Pillow's radius of each.
SUPPORT: Final = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
# Those for which libjpeg-turbo has vector code: 3/8 takes as long as 4/8, and 5/8 to 7/8 take longer than 8/8.
EIGHTHS: Final = (1, 2, 4)
# simplejpeg's words where a picture ends before its data does, and nothing else was wrong: it tells the first warning.
MORE_ROWS: Final = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")

# What decides, in ns. Only how they compare counts, and that changes less from machine to machine than they do.
# `python -m benchmarks.scaled` fits them and tests the choices; these were fitted to a quarter of its photographs. A
# *sample* is a number in a block: a pixel has three, with 4:2:0 one and a half. Entropy-coded bytes cost both ways the
# same, so they are left out.
REGION_SAMPLE_NS, REGION_PIXEL_NS = 1.26, 4.5  # nvImageCodec, of a part of a picture
WHOLE_SAMPLE_NS, WHOLE_PIXEL_NS = 1.2, 1.7  # simplejpeg, of all of it
SCALED_SAMPLE_NS: Final = {1: 0.49, 2: 0.84, 4: 1.2}
TAP_NS, SCALED_NS = 4.7, 630_000  # of Pillow's filter, an input of an output; and for each picture


class Scaled(NamedTuple):
    """A part of a smaller picture, H×W×C, and where in it the region is: its edges may lie within pixels."""

    pixels: np.ndarray
    region_tlhw: tuple[float, float, float, float]


def choose_eighths(
    data: bytes, header: JpegHeader, region_tlhw: Region, size_hw: tuple[int, int], interpolation: str
) -> int:
    """Return how many eighths of its size a JPEG is decoded at, so that the region has at least the size that it is
    resized to, both of the picture as stored; 0: it is decoded as it is, since that costs less, or would be another
    picture."""
    height, width = region_tlhw[2:]
    eighths = next((n for n in EIGHTHS if height * n >= 8 * size_hw[0] and width * n >= 8 * size_hw[1]), 0)
    if not (eighths and interpolation in SUPPORT and header.plain and header.complete and has_end(data, header)):
        return 0
    # What both ways cost, but for the bytes.
    top, is_cut = region_tlhw[0], find_grid(data, header) is not None
    (mcu_width, mcu_height), _ = mcu_layout(data, header)
    samples = 1 + (header.components - 1) * 64 / (mcu_width * mcu_height)  # of a pixel
    whole = is_cut or (height, width) == (header.height, header.width)
    sample_ns, pixel_ns = (WHOLE_SAMPLE_NS, WHOLE_PIXEL_NS) if whole else (REGION_SAMPLE_NS, REGION_PIXEL_NS)
    exact_ns = height * width * (samples * sample_ns + pixel_ns)
    decoded = height * width if is_cut else (top + height if _can_end(header) else header.height) * header.width
    taps = 2 * SUPPORT[interpolation] * height * eighths / 8 * (width * eighths / 8 + size_hw[1])
    scaled_ns = SCALED_NS + decoded * samples * SCALED_SAMPLE_NS[eighths] + taps * TAP_NS
    return eighths if scaled_ns < exact_ns else 0


def decode_scaled(
    decode: Any, data: bytes, header: JpegHeader, grey: bool, region_tlhw: Region, eighths: int
) -> Scaled | None:
    """Decode a part of the smaller picture that holds a region by simplejpeg's `decode_jpeg`; None if it complains."""
    top, left, height, width = region_tlhw
    ended, part = None, cut(data, header, region_tlhw)
    if part is not None:  # it begins between two blocks, so the smaller picture's pixels are the same
        data, header, (top, left, height, width) = part
    elif (ended := _ended(data, header, top + height)) is not None:
        data, header = ended
    share = eighths / 8
    size = math.ceil(header.height * share), math.ceil(header.width * share)
    pixels = np.empty((*size, 1 if grey else 3), np.uint8)
    mode = "GRAY" if grey else "RGB"
    try:  # it takes the smallest picture that is as large as this
        decoded = decode(data, mode, min_height=size[0], min_width=size[1], buffer=pixels, strict=True)
        if decoded.shape != pixels.shape:
            return None
    except Exception as error:
        if ended is None or not MORE_ROWS.fullmatch(str(error)):
            return None
    y0, x0 = int(top * share), int(left * share)
    y1, x1 = math.ceil((top + height) * share), math.ceil((left + width) * share)
    extent = top * share - y0, left * share - x0, height * share, width * share
    return Scaled(pixels[y0:y1, x0:x1], extent)


def _can_end(header: JpegHeader) -> bool:
    """Return whether a JPEG whose header says that it ends earlier is still one."""
    return header.single_scan and not header.restart_interval


def _ended(data: bytes, header: JpegHeader, row: int) -> tuple[bytes, JpegHeader] | None:
    """Return a JPEG whose header says that it ends with the blocks above a row, so that nothing below is decoded; None
    if that cannot be, or would change nothing."""
    if not _can_end(header):
        return None
    block = mcu_layout(data, header)[0][1]
    height = -(-(row + (block > BLOCK)) // block) * block  # chroma may be interpolated from the row below
    if height >= header.height:
        return None
    at = header.frame_at + 5
    return b"".join((data[:at], struct.pack(">H", height), memoryview(data)[at + 2 :])), header._replace(height=height)


def resample(scaled: Scaled, size_hw: tuple[int, int], interpolation: str) -> np.ndarray:
    """Return the region of a smaller picture, resized as Pillow does it: H×W×C."""
    from PIL import Image

    pixels, (top, left, height, width) = scaled
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    extent = (left, top, min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0]))
    resized = image.resize((size_hw[1], size_hw[0]), getattr(Image.Resampling, interpolation.upper()), extent)
    return np.asarray(resized).reshape(*size_hw, -1)
