"""The eight EXIF orientations: read from EXIF or XMP, applied to regions and to pixels.

Every decoder gives pixels as stored; turning them is done here, for all decoders. So a region in the upright image
first becomes one in the stored image. Pure functions.

Orientation `o` means: the upright image is the stored one, transposed (5 to 8), then flipped left-right (2, 3, 6, 7)
and top-bottom (3, 4, 7, 8).
"""

from __future__ import annotations

import re
import struct

import numpy as np

from gpuload.decode.pillow_images import quiet

__all__ = ["is_transposed", "read_orientation", "stored_region", "upright"]

TAG = 0x0112
FLIPPED_X = frozenset({2, 3, 6, 7})
FLIPPED_Y = frozenset({3, 4, 7, 8})
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(="|>)([0-9])')


def is_transposed(orientation: int) -> bool:
    """Whether the upright image has height and width exchanged."""
    return orientation >= 5


def stored_region(
    region_tlhw: tuple[int, int, int, int], orientation: int, upright_hw: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Where a region of the upright image is in the stored one (top, left, height, width)."""
    top, left, height, width = region_tlhw
    if orientation in FLIPPED_X:
        left = upright_hw[1] - left - width
    if orientation in FLIPPED_Y:
        top = upright_hw[0] - top - height
    return (left, top, width, height) if orientation >= 5 else (top, left, height, width)


def upright(pixels_hwc: np.ndarray, orientation: int) -> np.ndarray:
    """A view of stored pixels, turned upright."""
    if orientation >= 5:
        pixels_hwc = pixels_hwc.transpose(1, 0, 2)
    if orientation in FLIPPED_X:
        pixels_hwc = pixels_hwc[:, ::-1]
    if orientation in FLIPPED_Y:
        pixels_hwc = pixels_hwc[::-1]
    return pixels_hwc


def read_orientation(exif: bytes, xmp: bytes) -> int:
    """The orientation that an EXIF block states, else an XMP packet, else 1.

    Agrees with Pillow's ``exif_transpose``: the plain case (one entry, a SHORT) is read here, all others by Pillow.
    """
    if not exif and not xmp:
        return 1
    value = _plain_orientation(exif) if exif else 0
    if value is None:
        value = _orientation_by_pillow(exif)
    if value == 0 and xmp:
        found = XMP_ORIENTATION.search(xmp)
        value = int(found[2]) if found else 1
    return value if 1 <= value <= 8 else 1


def _plain_orientation(exif: bytes) -> int | None:
    """The orientation, 0 if there is none; None if the block is not plain."""
    order = "<" if exif[:4] == b"II*\0" else ">" if exif[:4] == b"MM\0*" else ""
    if not order or len(exif) < 14:
        return None
    (directory,) = struct.unpack_from(order + "L", exif, 4)
    if directory + 2 > len(exif):
        return None
    (count,) = struct.unpack_from(order + "H", exif, directory)
    entries = exif[directory + 2 : directory + 2 + 12 * count]
    if len(entries) < 12 * count:
        return None
    tags = struct.unpack(order + "H10x" * count, entries)
    if TAG not in tags:
        return 0
    if tags.count(TAG) > 1:
        return None
    kind, number, value = struct.unpack_from(order + "HLH", entries, 12 * tags.index(TAG) + 2)
    return value if kind == 3 and number == 1 and value else None


def _orientation_by_pillow(exif: bytes) -> int:
    from PIL import Image

    found = Image.Exif()
    try:
        with quiet():
            found.load(b"Exif\0\0" + exif)
            value = found.get(TAG)
    except Exception:  # a broken block, whatever Pillow raises for it: no orientation
        return 0
    if value is None:
        return 0
    return value if isinstance(value, int) and value else 1
