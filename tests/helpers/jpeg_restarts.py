"""JPEGs of any chroma sampling, with or without restart markers, made without a codec that supports all samplings."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image

from gpuload.decode.header import JpegHeader, scan_markers

# For each sampling: Pillow's number of a sampling with equally many blocks per MCU, the size of an MCU with Pillow's
# sampling, the sampling factors of the first component, and the size of an MCU with these factors. The blocks of 4:4:0
# are those of 4:2:2 in other places.
SAMPLINGS = {
    "4:4:4": (0, (8, 8), 0x11, (8, 8)),
    "4:2:2": (1, (16, 8), 0x21, (16, 8)),
    "4:2:0": (2, (16, 16), 0x22, (16, 16)),
    "4:4:0": (1, (16, 8), 0x12, (8, 16)),
    "4:1:1": (2, (16, 16), 0x41, (32, 8)),
    "grey": (0, (8, 8), 0x11, (8, 8)),
    "grey 2×2": (0, (8, 8), 0x22, (8, 8)),  # the factors have no effect: a scan of one component is not interleaved
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
    """Make a JPEG of `mcus` MCUs across and down, without the last `short` pixels at the right and at the bottom.

    The content is noise; or smooth, with optimized tables; or of few levels, so that its tables have few codes.
    """
    known, (width, height), factors, size = SAMPLINGS[sampling]
    noise = np.random.default_rng(seed).integers(0, 256, (mcus[1] * height, mcus[0] * width, 3), np.uint8)
    if content == "smooth":
        noise = np.asarray(Image.fromarray(noise[::8, ::8]).resize(noise.shape[1::-1], Image.Resampling.BICUBIC))
    elif content == "few":
        noise = np.repeat(np.repeat(noise[::8, ::8] // 128 * 255, 8, 0), 8, 1)
    image = Image.fromarray(noise)
    options = {"quality": 60, "restart_marker_blocks": interval, "optimize": content != "noise"}
    file = io.BytesIO()
    if sampling.startswith("grey"):
        image.convert("L").save(file, "JPEG", **options)
    else:
        image.save(file, "JPEG", subsampling=known, **options)
    jpeg = bytearray(file.getvalue())
    at = header_of(bytes(jpeg)).frame_at
    struct.pack_into(">HH", jpeg, at + 5, mcus[1] * size[1] - short[1], mcus[0] * size[0] - short[0])
    jpeg[at + 11] = factors
    return bytes(jpeg)
