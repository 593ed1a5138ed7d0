"""Decoding JPEGs at 1/2, 1/4 or 1/8 of their size if the result is small: `Decode(scale="fast")`.

libjpeg builds a smaller picture from the low frequencies of each 8×8 block, reducing it to 4×4, 2×2 or 1×1 pixels. This
also antialiases, and it skips most of the arithmetic; the entropy-coded bytes must be read either way. Pillow resamples
that picture to the requested size, by a factor below two. Pillow's `resize` accepts boxes that begin and end within a
pixel, so the result shows exactly the same part of the picture as without scaling.

simplejpeg decodes from the first row to the last row of the region, because the header is changed to end the picture
there. If the file is cuttable, the region is cut out first (`cut`). In a progressive JPEG, all rows are decoded.

All functions are pure functions of the file and the region, so every process that decodes a sample makes the same
choice. This module runs in workers.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.decode.cut import cut, find_grid
from gpuload.decode.header import BLOCK, JpegHeader, Region, has_eoi, mcu_layout

__all__ = ["SUPPORT", "Scaled", "choose_eighths", "decode_scaled", "resample"]

# The antialiasing filters and their radii in Pillow. With other filters, scaling first would change the result.
SUPPORT: Final = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
# The scales for which libjpeg-turbo has vector code: 3/8 takes as long as 4/8, and 5/8 to 7/8 take longer than 8/8.
EIGHTHS: Final = (1, 2, 4)
# simplejpeg's message if the picture ends before its data. simplejpeg reports only the first warning, so there was no
# earlier warning.
MORE_ROWS: Final = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")

# The cost model, in ns. Only ratios of costs matter, and these vary less between machines than the costs themselves.
# `python -m benchmarks.scaled` fits the costs and tests the choices; these values were fitted to a quarter of its
# photographs. A *sample* is one value in a block: a pixel has three, or one and a half with 4:2:0. Reading the
# entropy-coded bytes costs the same either way, so it is omitted.
REGION_SAMPLE_NS, REGION_PIXEL_NS = 1.26, 4.5  # nvImageCodec, decoding part of a picture
WHOLE_SAMPLE_NS, WHOLE_PIXEL_NS = 1.2, 1.7  # simplejpeg, decoding a complete picture
SCALED_SAMPLE_NS: Final = {1: 0.49, 2: 0.84, 4: 1.2}
TAP_NS, SCALED_NS = 4.7, 630_000  # the cost of a tap of Pillow's filter, and the overhead per picture


class Scaled(NamedTuple):
    """Part of a smaller picture, H×W×C, and the region's position in it; the region's edges can fall within pixels."""

    pixels: np.ndarray
    region_tlhw: tuple[float, float, float, float]


def choose_eighths(
    data: bytes, header: JpegHeader, region_tlhw: Region, size_hw: tuple[int, int], interpolation: str
) -> int:
    """Choose the scale, in eighths, at which to decode a JPEG so that the region is at least as large as `size_hw`;
    both refer to the stored picture. Return 0 if full size costs less, or if the file or the interpolation does not
    allow scaling."""
    height, width = region_tlhw[2:]
    eighths = next((n for n in EIGHTHS if height * n >= 8 * size_hw[0] and width * n >= 8 * size_hw[1]), 0)
    if not (eighths and interpolation in SUPPORT and header.is_plain and header.is_complete and has_eoi(data, header)):
        return 0
    # The costs of decoding at full size and scaled, without the entropy-coded bytes.
    top, is_cut = region_tlhw[0], find_grid(data, header) is not None
    (mcu_width, mcu_height), _ = mcu_layout(data, header)
    samples = 1 + (header.components - 1) * 64 / (mcu_width * mcu_height)  # per pixel
    is_whole = is_cut or (height, width) == (header.height, header.width)
    sample_ns, pixel_ns = (WHOLE_SAMPLE_NS, WHOLE_PIXEL_NS) if is_whole else (REGION_SAMPLE_NS, REGION_PIXEL_NS)
    exact_ns = height * width * (samples * sample_ns + pixel_ns)
    decoded_pixels = height * width if is_cut else (top + height if _can_trim(header) else header.height) * header.width
    taps = 2 * SUPPORT[interpolation] * height * eighths / 8 * (width * eighths / 8 + size_hw[1])
    scaled_ns = SCALED_NS + decoded_pixels * samples * SCALED_SAMPLE_NS[eighths] + taps * TAP_NS
    return eighths if scaled_ns < exact_ns else 0


def decode_scaled(
    decode_jpeg: Any, data: bytes, header: JpegHeader, grey: bool, region_tlhw: Region, eighths: int
) -> Scaled | None:
    """Decode the part of the smaller picture that holds a region, with simplejpeg's `decode_jpeg`; return None if
    simplejpeg fails or reports damage."""
    top, left, height, width = region_tlhw
    short_jpeg, part = None, cut(data, header, region_tlhw)
    if part is not None:  # the cut begins at a block boundary, so the smaller picture's pixels are the same
        data, header, (top, left, height, width) = part
    elif (short_jpeg := _shorten(data, header, top + height)) is not None:
        data, header = short_jpeg
    scale = eighths / 8
    size = math.ceil(header.height * scale), math.ceil(header.width * scale)
    pixels = np.empty((*size, 1 if grey else 3), np.uint8)
    mode = "GRAY" if grey else "RGB"
    try:  # simplejpeg chooses the smallest scale that is at least this large
        decoded = decode_jpeg(data, mode, min_height=size[0], min_width=size[1], buffer=pixels, strict=True)
        if decoded.shape != pixels.shape:
            return None
    except Exception as error:
        if short_jpeg is None or not MORE_ROWS.fullmatch(str(error)):
            return None
    y0, x0 = int(top * scale), int(left * scale)
    y1, x1 = math.ceil((top + height) * scale), math.ceil((left + width) * scale)
    scaled_region = top * scale - y0, left * scale - x0, height * scale, width * scale
    return Scaled(pixels[y0:y1, x0:x1], scaled_region)


def _can_trim(header: JpegHeader) -> bool:
    """Return whether a JPEG is still valid if its header is changed to end the picture earlier."""
    return header.has_single_scan and not header.restart_interval


def _shorten(data: bytes, header: JpegHeader, row: int) -> tuple[bytes, JpegHeader] | None:
    """Return a JPEG whose header ends the picture after the blocks that contain the rows above `row`, so that nothing
    below is decoded; None if this is impossible or would change nothing."""
    if not _can_trim(header):
        return None
    mcu = mcu_layout(data, header)[0][1]
    height = -(-(row + (mcu > BLOCK)) // mcu) * mcu  # chroma can be interpolated from the row below
    if height >= header.height:
        return None
    at = header.frame_at + 5
    return b"".join((data[:at], struct.pack(">H", height), memoryview(data)[at + 2 :])), header._replace(height=height)


def resample(scaled: Scaled, size_hw: tuple[int, int], interpolation: str) -> np.ndarray:
    """Resize the region of a smaller picture with Pillow; return H×W×C."""
    from PIL import Image

    pixels, (top, left, height, width) = scaled
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    box = (left, top, min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0]))
    resized = image.resize((size_hw[1], size_hw[0]), getattr(Image.Resampling, interpolation.upper()), box)
    return np.asarray(resized).reshape(*size_hw, -1)
