"""What is known of an image by its pixels: levels, sums, and two kinds of hashes. In workers; no torch.

All sums are of integers, so mean and std do not depend on the order of images or on how many workers there are. The
hash of the looks is dHash: an image of 9×8 (and one of 8×9) grey pixels, and for each of 64 (and 64) neighbours, which
is lighter. It stays about the same when an image is resized or compressed anew.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from gpuload.datasets.sample import Image
from gpuload.decode.decoder import Decoder
from gpuload.inspection.files import cause_of, decoded, digest_of, take_apart

__all__ = ["CHANNELS", "FLAT", "PIXELS", "measure"]

CHANNELS: Final = 16  # images of more are left out of the statistics
LEVELS: Final = 4  # channels of which levels are counted
STRIP: Final = 1 << 20  # pixels that are counted at a time
FLAT: Final = 2.0  # an image whose levels deviate less from their mean shows nothing

PIXELS: Final = np.dtype(
    [
        ("channels", "i8"), ("bits", "i8"), ("count", "i8"), ("flat", "i8"), ("digest", "i8", 2), ("looks", "i8", 2),
        ("sums", "i8", CHANNELS), ("squares", "i8", CHANNELS), ("levels", "i8", (LEVELS, 256)),
    ]
)  # fmt: skip
"""One image. `bits`: 8 or 16; 0 for floats, of which nothing else is known. `levels`: of 16 bits, the upper 8."""


def measure(sample: Any, decoder: Decoder) -> tuple[np.ndarray, str]:
    """`PIXELS` of a sample as an array of its numbers, and as JSON the ``cause`` if it cannot be decoded."""
    found = np.zeros((), PIXELS)
    told = ""
    try:
        image = take_apart(sample).image
        if isinstance(image, Image):
            pixels = image.hwc[0] if image.hwc.ndim == 4 else image.hwc
        else:
            pixels = decoded(image, decoder.header(image), decoder)
    except Exception as error:
        told = json.dumps({"cause": cause_of(error)})
    else:
        _count(pixels, found)
    return found.reshape(1).view(np.int64), told


def _count(pixels: np.ndarray, found: np.ndarray) -> None:
    height, width, channels = pixels.shape
    found["channels"] = channels
    if pixels.dtype not in (np.uint8, np.uint16) or channels > CHANNELS:
        return
    bits = 8 * pixels.dtype.itemsize
    found["bits"], found["count"] = bits, height * width
    rows = max(1, STRIP // width)
    levels = np.arange(1 << bits, dtype=np.int64)
    flat = True
    for channel in range(channels):
        counts = np.zeros(1 << bits, np.int64)
        for top in range(0, height, rows):
            counts += np.bincount(pixels[top : top + rows, :, channel].ravel(), minlength=1 << bits)
        total, squares = int(counts @ levels), int(counts @ levels**2)
        found["sums"][channel], found["squares"][channel] = total, squares
        if channel < LEVELS:
            found["levels"][channel] = counts.reshape(256, -1).sum(axis=1)
        count = height * width
        flat = flat and squares * count - total**2 < (FLAT * count * (1 << bits) / 256) ** 2
    found["flat"] = flat
    found["digest"] = digest_of(repr((pixels.shape, bits)).encode(), np.ascontiguousarray(pixels))
    found["looks"] = _looks(pixels, bits)


def _looks(pixels: np.ndarray, bits: int) -> tuple[int, int]:
    from PIL import Image as Pillow

    if bits == 16:
        pixels = (pixels >> 8).astype(np.uint8)
    channels = pixels.shape[2]
    picture = Pillow.fromarray(pixels if channels in (3, 4) else np.ascontiguousarray(pixels[:, :, 0])).convert("L")
    hashes = []
    for size, axis in (((9, 8), 1), ((8, 9), 0)):
        small = np.asarray(picture.resize(size, Pillow.Resampling.HAMMING), np.int16)
        hashes.append(int(np.packbits(np.diff(small, axis=axis) > 0).view(np.int64)[0]))
    return hashes[0], hashes[1]
