"""What is known of an image file without its pixels, as a row of numbers. In workers; no torch.

A file is damaged if its header cannot be read, or if it ends early and so cannot be decoded. One that only a limit of
`Decode` refuses is not damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from gpuload.datasets.sample import Encoded, Image, too_deep
from gpuload.decode.decoder import Decoder
from gpuload.decode.header import PROGRESSIVE, Header, JpegHeader, ends, read_header, read_orientation, scan_markers
from gpuload.decode.options import Decode
from gpuload.errors import DecodeError, one_line

__all__ = [
    "ALPHA", "DAMAGED", "DEEP", "FORMATS", "GOOD", "MISNAMED", "MODES", "NAMED", "PROFILE", "PROGRESSIVE_JPEG",
    "REFUSED", "RESTARTS", "ROW", "SAMPLINGS", "Taken", "cause_of", "decoded", "digest_of", "look_at", "take_apart",
]  # fmt: skip

FORMATS: Final = ("?", "JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM", "QOI", "array")
MODES: Final = (
    "?", "1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I;16", "I;16B", "I;16L", "I",
    "F", "other",
)  # fmt: skip
SAMPLINGS: Final = ("", "4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "other")
FACTORS: Final[dict[tuple[float, float], str]] = {
    (1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0", (1, 2): "4:4:0", (4, 1): "4:1:1",
}  # fmt: skip
# Of names that say another format than the content. The ending is looked at without case.
NAMED: Final = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".gif": "GIF", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF",
    ".webp": "WEBP", ".avif": "AVIF", ".jp2": "JPEG2000", ".ppm": "PPM", ".pgm": "PPM", ".qoi": "QOI",
}  # fmt: skip
GOOD, DAMAGED, REFUSED = 1, 2, 3  # states; 0 is of rows that nothing is known of yet
PROGRESSIVE_JPEG, RESTARTS, PROFILE, ALPHA, DEEP, MISNAMED = (1 << bit for bit in range(6))

ROW: Final = np.dtype(
    [
        ("state", "u1"), ("format", "u1"), ("mode", "u1"), ("sampling", "u1"), ("orientation", "u1"), ("flags", "u2"),
        ("height", "i4"), ("width", "i4"), ("nbytes", "i8"), ("digest", "i8", 2), ("which", "u2"), ("label", "i4"),
    ]
)  # fmt: skip
"""One image. `digest`: 128 bits of the file's content. `which`: of several data sets. `label`: -1 where there is none.
The last two are filled in by `gather`."""

UNLIMITED: Final = Decode(max_pixels=None, max_scans=None, max_scan_pixels=None, max_bytes=None, max_memory=None)
LONGEST_LABEL: Final = 100
LABELS: Final = ("cls", "label", "labels", "target", "class", "class_name")
TURNED: Final = (b"eXIf", b"tiff:Orientation")  # without them a PNG need not be decoded to know how it is turned


class Taken(NamedTuple):
    """The parts of a sample that are looked at: its first image, and its label if that is a number or a word."""

    image: Encoded | Image
    label: int | str | None


def take_apart(sample: Any) -> Taken:
    """Find image and label in a sample of one of gpuload's datasets.

    Raises:
        TypeError: it has no image.
    """
    if isinstance(sample, Mapping):
        leaves = list(sample.values())
        label = next((sample[name] for name in LABELS if name in sample), None)
    elif isinstance(sample, tuple | list):
        leaves = list(sample)
        label = sample[1] if len(sample) > 1 else None
    else:
        leaves, label = [sample], None
    image = next((leaf for leaf in leaves if isinstance(leaf, Encoded | Image)), None)
    if image is None:
        image = next((Image(leaf) for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.ndim in (2, 3)), None)
    if image is None:
        raise TypeError(f"the sample holds no image: {', '.join(type(leaf).__name__ for leaf in leaves) or 'nothing'}")
    if isinstance(label, np.generic):
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | str) or len(str(label)) > LONGEST_LABEL:
        label = None
    return Taken(image, label)


def look_at(sample: Any, decoder: Decoder) -> tuple[np.ndarray, str]:
    """The first 11 numbers of a `ROW` for a sample, and as JSON what else is to be told: ``label``, ``cause``."""
    image, label = take_apart(sample)
    told: dict[str, Any] = {} if label is None else {"label": label}
    numbers = _of_array(image.hwc) if isinstance(image, Image) else _of_file(image, decoder, told)
    return np.array(numbers, np.int64), json.dumps(told) if told else ""


def cause_of(error: BaseException) -> str:
    """What is wrong with a sample, as one line."""
    return f"{type(error).__name__}: {one_line(str(error))}"


def digest_of(*parts: Any) -> tuple[int, int]:
    """128 bits of some bytes, as two signed numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    found = digest.digest()
    return int.from_bytes(found[:8], "little", signed=True), int.from_bytes(found[8:], "little", signed=True)


def _of_array(pixels: np.ndarray) -> list[int]:
    if pixels.ndim == 4:  # of a clip, the first frame
        pixels = pixels[0]
    height, width, channels = pixels.shape
    mode = MODES.index({1: "L", 3: "RGB", 4: "RGBA"}.get(channels, "other"))
    flags = DEEP if pixels.dtype != np.uint8 else 0
    digest = digest_of(repr((pixels.shape, str(pixels.dtype))).encode(), np.ascontiguousarray(pixels))
    return [GOOD, FORMATS.index("array"), mode, 0, 1, flags, height, width, pixels.nbytes, *digest]


def _of_file(encoded: Encoded, decoder: Decoder, told: dict[str, Any]) -> list[int]:
    data = encoded.data
    state, header = GOOD, None
    try:
        header = read_header(data, Decode())
    except DecodeError as error:
        told["cause"] = cause_of(error)
        state = DAMAGED
        try:
            header = read_header(data, UNLIMITED)
            state = REFUSED
        except DecodeError:
            pass
    if header is not None and state == GOOD and not ends(data, header):
        try:
            decoded(encoded, header, decoder)
        except Exception as error:
            state, told["cause"] = DAMAGED, cause_of(error)
    digest = digest_of(data)
    if header is None:
        return [state, 0, 0, 0, 1, 0, 0, 0, len(data), *digest]
    jpeg = header.jpeg or (scan_markers(data) if header.format == "JPEG" else None)
    flags = _flags(data, header, jpeg, encoded.source)
    return [
        state, FORMATS.index(header.format), MODES.index(header.mode if header.mode in MODES else "other"),
        SAMPLINGS.index(_sampling(data, jpeg)), _orientation(data, header), flags, header.height, header.width,
        len(data), *digest,
    ]  # fmt: skip


def decoded(encoded: Encoded, header: Header, decoder: Decoder) -> np.ndarray:
    """All pixels of an image, H×W×C: as a loader has them, but as stored where they have more than 8 bits."""
    deep = decoder.dtype(header) != "uint8" and (too_deep("", header.mode) is not None or encoded.mode == "unchanged")
    return decoder.decode(Encoded(encoded.data, "unchanged" if deep else encoded.mode), header)


def _flags(data: bytes, header: Header, jpeg: JpegHeader | None, source: str | None) -> int:
    flags, start = 0, data[: jpeg.first_scan if jpeg is not None else 1 << 16]
    if jpeg is not None:
        flags |= PROGRESSIVE_JPEG if jpeg.frame in PROGRESSIVE else 0
        flags |= RESTARTS if jpeg.restart_interval else 0
    if b"ICC_PROFILE\0" in start or b"iCCP" in start or b"ICCP" in start:
        flags |= PROFILE
    if header.mode in ("LA", "PA", "RGBA"):
        flags |= ALPHA
    if header.opened is not None and (header.opened.dtype != "uint8" or too_deep("", header.mode) is not None):
        flags |= DEEP
    named = NAMED.get(os.path.splitext(source or "")[1].lower())
    return flags | (MISNAMED if named is not None and named != header.format else 0)


def _sampling(data: bytes, jpeg: JpegHeader | None) -> str:
    """How a JPEG's colours are stored; "" if it has none."""
    if jpeg is None or jpeg.components < 3:
        return ""
    factors = [divmod(byte, 16) for byte in data[jpeg.frame_at + 11 : jpeg.frame_at + 10 + 3 * jpeg.components : 3]]
    if len(factors) < 3 or factors[1] != factors[2] or not all(factors[1]):
        return "other"
    (wide, high), (width, height) = factors[0], factors[1]
    return FACTORS.get((wide / width, high / height), "other")


def _orientation(data: bytes, header: Header) -> int:
    if header.jpeg is not None:
        return read_orientation(header.jpeg.exif, header.jpeg.xmp)
    if header.opened is None or (header.format == "PNG" and not any(mark in data for mark in TURNED)):
        return 1
    try:
        return header.opened.orientation()
    except Exception:  # a broken block is no orientation
        return 1
