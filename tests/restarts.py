"""JPEGs of any chroma sampling, with restart markers or without, made without a codec that knows them all."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image

from gpuload.decode.header import JpegHeader, scan_markers

# Pillow's name of a sampling with as many blocks in an MCU, an MCU's pixels there, the sampling factors of the first
# component, and an MCU's pixels with them. The blocks of 4:2:2 are those of 4:4:0 in another place.
SAMPLINGS = {
    "4:4:4": (0, (8, 8), 0x11, (8, 8)),
    "4:2:2": (1, (16, 8), 0x21, (16, 8)),
    "4:2:0": (2, (16, 16), 0x22, (16, 16)),
    "4:4:0": (1, (16, 8), 0x12, (8, 16)),
    "4:1:1": (2, (16, 16), 0x41, (32, 8)),
    "grey": (0, (8, 8), 0x11, (8, 8)),
    "grey 2×2": (0, (8, 8), 0x22, (8, 8)),  # which says nothing: a scan of one component is not interleaved
}


def header_of(jpeg: bytes) -> JpegHeader:
    header = scan_markers(jpeg)
    assert header is not None
    return header


def restarted(
    sampling: str,
    mcus: tuple[int, int],
    interval: int,
    short: tuple[int, int] = (0, 0),
    seed: int = 0,
    content: str = "noise",
) -> bytes:
    """A JPEG of so many MCUs across and down, less so many pixels at the right and at the bottom.

    Its content is noise; or smooth, with tables of its own; or few levels, so that its tables have few codes.
    """
    known, (width, height), factors, size = SAMPLINGS[sampling]
    noise = np.random.default_rng(seed).integers(0, 256, (mcus[1] * height, mcus[0] * width, 3), np.uint8)
    if content == "smooth":
        noise = np.asarray(Image.fromarray(noise[::8, ::8]).resize(noise.shape[1::-1], Image.Resampling.BICUBIC))
    elif content == "few":
        noise = np.repeat(np.repeat(noise[::8, ::8] // 128 * 255, 8, 0), 8, 1)
    image = Image.fromarray(noise)
    told = {"quality": 60, "restart_marker_blocks": interval, "optimize": content != "noise"}
    file = io.BytesIO()
    if sampling.startswith("grey"):
        image.convert("L").save(file, "JPEG", **told)
    else:
        image.save(file, "JPEG", subsampling=known, **told)
    jpeg = bytearray(file.getvalue())
    at = header_of(bytes(jpeg)).frame_at
    struct.pack_into(">HH", jpeg, at + 5, mcus[1] * size[1] - short[1], mcus[0] * size[0] - short[0])
    jpeg[at + 11] = factors
    return bytes(jpeg)
