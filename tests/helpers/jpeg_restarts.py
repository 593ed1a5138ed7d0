"""JPEGs of any chroma sampling, with or without restart markers, made without a codec that supports all samplings."""

from __future__ import annotations

import io
import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

from gpuload.decode.header import JpegHeader, scan_markers


class Sampling(NamedTuple):
    """A chroma sampling, and the sampling of Pillow that has equally many blocks per MCU: 4:2:2 in place of 4:4:0."""

    pillow_subsampling: int
    pillow_mcu_size_wh: tuple[int, int]
    factors: int  # of the first component
    mcu_size_wh: tuple[int, int]


SAMPLINGS = {
    "4:4:4": Sampling(0, (8, 8), 0x11, (8, 8)),
    "4:2:2": Sampling(1, (16, 8), 0x21, (16, 8)),
    "4:2:0": Sampling(2, (16, 16), 0x22, (16, 16)),
    "4:4:0": Sampling(1, (16, 8), 0x12, (8, 16)),
    "4:1:1": Sampling(2, (16, 16), 0x41, (32, 8)),
    "grey": Sampling(0, (8, 8), 0x11, (8, 8)),
    "grey 2×2": Sampling(0, (8, 8), 0x22, (8, 8)),  # one component is not interleaved, so its factors have no effect
}


def header_of(jpeg: bytes) -> JpegHeader:
    header = scan_markers(jpeg)
    assert header is not None
    return header


def make_jpeg(
    sampling: str,
    mcus_wh: tuple[int, int],
    *,
    interval: int = 0,
    missing_pixels_wh: tuple[int, int] = (0, 0),
    seed: int = 0,
    content: str = "noise",
) -> bytes:
    """Make a JPEG with a restart marker after every `interval` MCUs, or none. Its header cuts off the missing pixels.

    The content is noise; or smooth, with optimized tables; or of few levels, so that its tables have few codes.
    """
    pillow_subsampling, (width, height), factors, mcu_size_wh = SAMPLINGS[sampling]
    pixels = np.random.default_rng(seed).integers(0, 256, (mcus_wh[1] * height, mcus_wh[0] * width, 3), np.uint8)
    if content == "smooth":
        pixels = np.asarray(Image.fromarray(pixels[::8, ::8]).resize(pixels.shape[1::-1], Image.Resampling.BICUBIC))
    elif content == "few":
        pixels = np.repeat(np.repeat(pixels[::8, ::8] // 128 * 255, 8, 0), 8, 1)
    image = Image.fromarray(pixels)
    options = {"quality": 60, "restart_marker_blocks": interval, "optimize": content != "noise"}
    file = io.BytesIO()
    if sampling.startswith("grey"):
        image.convert("L").save(file, "JPEG", **options)
    else:
        image.save(file, "JPEG", subsampling=pillow_subsampling, **options)
    jpeg = bytearray(file.getvalue())
    width, height = (
        mcus * size - missing for mcus, size, missing in zip(mcus_wh, mcu_size_wh, missing_pixels_wh, strict=True)
    )
    frame = header_of(bytes(jpeg)).frame_at
    struct.pack_into(">HH", jpeg, frame + 5, height, width)
    jpeg[frame + 11] = factors
    return bytes(jpeg)
