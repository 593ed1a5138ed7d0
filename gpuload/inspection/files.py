"""What is known of one image, as rows of numbers: of its file without pixels (`ROW`), and of its pixels (`PIXELS`).
Workers run this, in datasets that look at the samples of other datasets. No torch.

A file is damaged if its header cannot be read, or if it ends early and so cannot be decoded. A file that only a limit
of `Decode` refuses is not damaged. All sums over pixels are of integers, so mean and std do not depend on the order of
images or on how many workers there are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from gpuload.datasets.sample import Encoded, Image, too_deep
from gpuload.decode.decoder import Decoder
from gpuload.decode.header import PROGRESSIVE, Header, JpegHeader, ends, read_header, read_orientation, scan_markers
from gpuload.decode.options import Decode
from gpuload.errors import DecodeError, one_line

__all__ = [
    "ALPHA", "CHANNELS", "DAMAGED", "DEEP", "FORMATS", "GOOD", "MISNAMED", "MODES", "NAMED", "PIXELS", "PROFILE",
    "PROGRESSIVE_JPEG", "REFUSED", "RESTARTS", "ROW", "SAMPLINGS", "ImageAndLabel", "Looked", "Picked", "find_image",
    "look_at", "measure",
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
# The formats that names say, to compare with the content. The ending is looked at without case.
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
"""One image's file. `digest`: 128 bits of its content. `which`: of several data sets. `label`: -1 where there is none.
The last two are filled in by `gather`."""
LOOKED_AT: Final = 11  # numbers of a `ROW` that workers fill in

CHANNELS: Final = 16  # images of more are left out of the statistics
LEVELS: Final = 4  # channels of which levels are counted
STRIP: Final = 1 << 20  # pixels that are counted at a time
FLAT: Final = 2.0  # an image whose levels deviate less from their mean shows nothing

PIXELS: Final = np.dtype(
    [
        ("channels", "i8"), ("bits", "i8"), ("count", "i8"), ("flat", "i8"), ("digest", "i8", 2),
        ("sums", "i8", CHANNELS), ("squares", "i8", CHANNELS), ("levels", "i8", (LEVELS, 256)),
    ]
)  # fmt: skip
"""One image's pixels. `bits`: 8 or 16; 0 for floats, of which nothing else is known. `levels`: of 16 bits, the upper
8."""

UNLIMITED: Final = Decode(max_pixels=None, max_scans=None, max_scan_pixels=None, max_bytes=None, max_memory=None)
LONGEST_LABEL: Final = 100
LABELS: Final = ("cls", "label", "labels", "target", "class", "class_name")
TURNED: Final = (b"eXIf", b"tiff:Orientation")  # without them a PNG need not be decoded to know how it is turned


class ImageAndLabel(NamedTuple):
    """What is looked at of a sample: its first image, and its label if that is a number or a word."""

    image: Encoded | Image
    label: int | str | None


def find_image(sample: Any) -> ImageAndLabel:
    """Find image and label in a sample of one of gpuload's datasets.

    Raises:
        TypeError: it has no image.
    """
    label = None
    if isinstance(sample, Mapping):
        leaves = list(sample.values())
        label = next((sample[name] for name in LABELS if name in sample), None)
    elif isinstance(sample, tuple | list):
        leaves = list(sample)
        label = sample[1] if len(sample) > 1 else None
    else:
        leaves = [sample]
    image = next((leaf for leaf in leaves if isinstance(leaf, Encoded | Image)), None)
    if image is None:
        image = next((Image(leaf) for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.ndim in (2, 3)), None)
    if image is None:
        raise TypeError(f"the sample holds no image: {', '.join(type(leaf).__name__ for leaf in leaves) or 'nothing'}")
    if isinstance(label, np.generic):
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | str) or len(str(label)) > LONGEST_LABEL:
        label = None
    return ImageAndLabel(image, label)


# -- the file ---------------------------------------------------------------------------------------------------------


def look_at(sample: Any, decoder: Decoder) -> tuple[np.ndarray, str]:
    """Return the first 11 numbers of a `ROW` for a sample, and as JSON its ``label`` and the ``cause`` of damage."""
    image, label = find_image(sample)
    notes: dict[str, Any] = {} if label is None else {"label": label}
    numbers = _of_array(image.hwc) if isinstance(image, Image) else _of_file(image, decoder, notes)
    return np.array(numbers, np.int64), json.dumps(notes) if notes else ""


def _of_array(pixels: np.ndarray) -> list[int]:
    if pixels.ndim == 4:  # of a clip, the first frame
        pixels = pixels[0]
    height, width, channels = pixels.shape
    mode = MODES.index({1: "L", 3: "RGB", 4: "RGBA"}.get(channels, "other"))
    flags = DEEP if pixels.dtype != np.uint8 else 0
    digest = _digest(repr((pixels.shape, str(pixels.dtype))).encode(), np.ascontiguousarray(pixels))
    return [GOOD, FORMATS.index("array"), mode, 0, 1, flags, height, width, pixels.nbytes, *digest]


def _of_file(encoded: Encoded, decoder: Decoder, notes: dict[str, Any]) -> list[int]:
    data = encoded.data
    state, header = GOOD, None
    try:
        header = read_header(data, Decode())
    except DecodeError as error:
        state, notes["cause"] = DAMAGED, _cause(error)
        try:
            header = read_header(data, UNLIMITED)
            state = REFUSED
        except DecodeError:
            return [state, 0, 0, 0, 1, 0, 0, 0, len(data), *_digest(data)]
    if state == GOOD and not ends(data, header):
        try:
            _decode(encoded, header, decoder)
        except Exception as error:
            state, notes["cause"] = DAMAGED, _cause(error)
    jpeg = header.jpeg or (scan_markers(data) if header.format == "JPEG" else None)
    return [
        state, FORMATS.index(header.format), MODES.index(header.mode if header.mode in MODES else "other"),
        SAMPLINGS.index(_sampling(data, jpeg)), _orientation(data, header), _flags(data, header, jpeg, encoded.source),
        header.height, header.width, len(data), *_digest(data),
    ]  # fmt: skip


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"


def _digest(*parts: Any) -> tuple[int, int]:
    """Return 128 bits of some bytes, as two signed numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    first, second = np.frombuffer(digest.digest(), "<i8").tolist()
    return first, second


def _decode(encoded: Encoded, header: Header, decoder: Decoder) -> np.ndarray:
    """Return all pixels of an image, H×W×C: as a loader has them, but as stored where they have more than 8 bits."""
    deep = decoder.dtype(header) != "uint8" and (too_deep("", header.mode) is not None or encoded.mode == "unchanged")
    return decoder.decode(Encoded(encoded.data, "unchanged" if deep else encoded.mode), header)


def _flags(data: bytes, header: Header, jpeg: JpegHeader | None, source: str | None) -> int:
    start = data[: jpeg.first_scan if jpeg is not None else 1 << 16]
    named = NAMED.get(os.path.splitext(source or "")[1].lower())
    deep = header.opened is not None and (header.opened.dtype != "uint8" or too_deep("", header.mode) is not None)
    return (
        PROGRESSIVE_JPEG * (jpeg is not None and jpeg.frame in PROGRESSIVE)
        | RESTARTS * (jpeg is not None and bool(jpeg.restart_interval))
        | PROFILE * any(mark in start for mark in (b"ICC_PROFILE\0", b"iCCP", b"ICCP"))
        | ALPHA * (header.mode in ("LA", "PA", "RGBA"))
        | DEEP * deep
        | MISNAMED * (named is not None and named != header.format)
    )


def _sampling(data: bytes, jpeg: JpegHeader | None) -> str:
    """Return how a JPEG's colours are stored; "" if it has none."""
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


# -- the pixels -------------------------------------------------------------------------------------------------------


def measure(sample: Any, decoder: Decoder) -> tuple[np.ndarray, str]:
    """Return `PIXELS` of a sample as an array of its numbers, and as JSON the ``cause`` if it cannot be decoded."""
    measured = np.zeros((), PIXELS)
    notes = ""
    try:
        image = find_image(sample).image
        if isinstance(image, Image):
            pixels = image.hwc[0] if image.hwc.ndim == 4 else image.hwc
        else:
            pixels = _decode(image, decoder.header(image), decoder)
    except Exception as error:
        notes = json.dumps({"cause": _cause(error)})
    else:
        _count(pixels, measured)
    return measured.reshape(1).view(np.int64), notes


def _count(pixels: np.ndarray, measured: np.ndarray) -> None:
    height, width, channels = pixels.shape
    measured["channels"] = channels
    if pixels.dtype not in (np.uint8, np.uint16) or channels > CHANNELS:
        return
    bits, count = 8 * pixels.dtype.itemsize, height * width
    measured["bits"], measured["count"] = bits, count
    rows = max(1, STRIP // width)
    levels = np.arange(1 << bits, dtype=np.int64)
    flat = True
    for channel in range(channels):
        counts = np.zeros(1 << bits, np.int64)
        for top in range(0, height, rows):
            counts += np.bincount(pixels[top : top + rows, :, channel].ravel(), minlength=1 << bits)
        total, squares = int(counts @ levels), int(counts @ levels**2)
        measured["sums"][channel], measured["squares"][channel] = total, squares
        if channel < LEVELS:
            measured["levels"][channel] = counts.reshape(256, -1).sum(axis=1)
        flat = flat and squares * count - total**2 < (FLAT * count * (1 << bits) / 256) ** 2
    measured["flat"] = flat
    measured["digest"] = _digest(repr((pixels.shape, bits)).encode(), np.ascontiguousarray(pixels))


# -- datasets for workers ---------------------------------------------------------------------------------------------


class Looked:
    """A dataset of what is known of samples of other datasets.

    Args:
        datasets: the data sets.
        which, indices: for each sample, its data set and its index there.
        how: ``"files"``: `look_at`; ``"pixels"``: `measure`.
    """

    def __init__(
        self, datasets: list[Any], which: np.ndarray, indices: np.ndarray, how: Literal["files", "pixels"]
    ) -> None:
        self._datasets, self._which, self._indices, self._how = datasets, which, indices, how
        self._decoder: Decoder | None = None

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> tuple[int, np.ndarray, str]:
        self._decoder = self._decoder or Decoder(Decode())
        files = self._how == "files"
        try:
            sample = self._datasets[self._which[number]][int(self._indices[number])]
            return number, *(look_at if files else measure)(sample, self._decoder)
        except Exception as error:  # whatever a dataset raises for a sample that it cannot read
            notes = json.dumps({"cause": _cause(error), "source": getattr(error, "filename", None)})
            numbers = np.zeros(LOOKED_AT if files else PIXELS.itemsize // 8, np.int64)
            numbers[0] = DAMAGED if files else 0
            return number, numbers if files else numbers[None], notes

    def will_need(self, numbers: list[int]) -> None:
        """Let data sets that can have the kernel read these samples, which are asked for soon."""
        for number in numbers:
            dataset = self._datasets[self._which[number]]
            if (will_need := getattr(dataset, "will_need", None)) is not None:
                will_need([int(self._indices[number])])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoder": None}


class Picked:
    """A dataset of some images of others, each with its label, or 0 if that is no number.

    Args:
        datasets, which, indices: as for `Looked`.
        deep: for each sample, whether its image is decoded as it is stored, as it has more than 8 bits.
    """

    def __init__(self, datasets: list[Any], which: np.ndarray, indices: np.ndarray, deep: np.ndarray) -> None:
        self._datasets, self._which, self._indices, self._deep = datasets, which, indices, deep

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> tuple[Encoded | Image, int]:
        image, label = find_image(self._datasets[self._which[number]][int(self._indices[number])])
        if isinstance(image, Encoded) and self._deep[number]:
            image = Encoded(image.data, "unchanged", image.source)
        return image, label if isinstance(label, int) else 0
