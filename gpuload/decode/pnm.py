"""PNM files of which Pillow reads one number after the other in Python: text, and binary ones that do not end at 255.

`rewritten` gives a file of the same pixels that Pillow reads at once; Pillow has the last word on damaged ones. In
workers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["rewritten"]

SLOW: Final = ("ppm", "ppm_plain")  # Pillow's names of its decoders in Python
SPACE: Final = b" \t\n\v\f\r"
BLOCK_BYTES: Final = 1 << 20


def rewritten(image: Any) -> bytes | None:
    """The file of an opened image, not loaded yet; None where Pillow's own way is as fast, or has to say what is wrong.

    Numbers become levels as in Pillow: of their maximum 255, or 65535 for grey of more than 8 bits, rounded.
    """
    if not image.tile or image.tile[0][0] not in SLOW:
        return None
    decoder, _, offset, args = image.tile[0]
    (width, height), data = image.size, image.fp.getvalue()
    if image.mode == "1":
        bits = _bits(data[offset:], width * height)
        if bits is None:
            return None
        return b"P4 %d %d\n" % (width, height) + np.packbits(bits.reshape(height, width), 1).tobytes()
    bands, most = len(image.getbands()), args[-1]
    top, dtype = (65535, ">u2") if image.mode == "I" else (255, "u1")
    table = np.minimum(np.rint(np.arange(65536) / most * top), top).astype(dtype)
    count = width * height * bands
    levels = _binary(data, offset, count, most, table) if decoder == "ppm" else _text(data, offset, count, most, table)
    if levels is None:
        return None
    return b"P%d %d %d %d\n" % (6 if bands == 3 else 5, width, height, top) + levels.tobytes()


def _bits(body: bytes, count: int) -> np.ndarray | None:
    digits = body.translate(None, SPACE)
    if len(digits) < count or digits.translate(None, b"01"):
        return None
    return np.frombuffer(digits, np.uint8, count) - ord("0")


def _binary(data: bytes, offset: int, count: int, most: int, table: np.ndarray) -> np.ndarray | None:
    dtype = np.dtype("u1" if most < 256 else ">u2")
    if len(data) < offset + count * dtype.itemsize:
        return None
    return table[np.frombuffer(data, dtype, count, offset)]


def _text(data: bytes, offset: int, count: int, most: int, table: np.ndarray) -> np.ndarray | None:
    if data[offset:].translate(None, b"0123456789" + SPACE):  # a comment, or no number
        return None
    levels, at, found = np.empty(count, table.dtype), offset, 0
    while at < len(data):
        block = data[at : at + BLOCK_BYTES]
        if at + len(block) < len(data):  # up to the end of a number
            block = block[: max(map(block.rfind, (bytes([space]) for space in SPACE))) + 1]
        numbers = np.fromstring(block, np.int64, sep=" ") if block.strip() else np.empty(0, np.int64)
        if not block or found + len(numbers) > count or (numbers > most).any():
            return None
        levels[found : found + len(numbers)] = table[numbers]
        at, found = at + len(block), found + len(numbers)
    return levels if found == count else None
