"""The properties of one image as NumPy records: properties of the file (`ROW`) and of the pixels (`PIXELS`). Workers
run this module in datasets that inspect the samples of other datasets. It does not import torch.

A file is damaged if its header cannot be read, or if it is truncated and so cannot be decoded. A file that only exceeds
a limit of `Decode` is not damaged. All sums over pixels are integers, so mean and std depend neither on the order of
images nor on the number of workers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np

from gpuload.datasets.files import FORMAT_BY_ENDING, read_starts
from gpuload.datasets.kinds import fetch_samples, is_deterministic
from gpuload.datasets.sample import Encoded, Image, explain_deep_pixels
from gpuload.datasets.tree import flatten
from gpuload.decode.decoder import Decoder
from gpuload.decode.header import (
    PROGRESSIVE,
    Header,
    JpegHeader,
    has_end_marker,
    read_header,
    read_orientation,
    scan_markers,
)
from gpuload.decode.options import Decode
from gpuload.errors import DecodeError, one_line

__all__ = [
    "CHANNELS", "DAMAGED", "FILE_FIELDS", "FORMATS", "GOOD", "KINDS", "MODES", "PIXELS", "REFUSED",
    "ROW", "SAMPLINGS", "ImageSizes", "InspectedImages", "SelectedImages", "class_name_of", "find_image",
    "inspect_file", "measure_pixels",
]  # fmt: skip

FORMATS: Final = ("?", *dict.fromkeys(FORMAT_BY_ENDING.values()), "array")
MODES: Final = (
    "?", "1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I;16", "I;16B", "I;16L", "I",
    "F", "other",
)  # fmt: skip
SAMPLINGS: Final = ("", "4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "other")
FACTORS: Final[dict[tuple[float, float], str]] = {
    (1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0", (1, 2): "4:4:0", (4, 1): "4:1:1",
}  # fmt: skip
GOOD, DAMAGED, REFUSED = 1, 2, 3  # states; 0 means that the row is not filled in yet
KINDS: Final = ("progressive", "restart_markers", "profile", "alpha", "deep", "misnamed")

ROW: Final = np.dtype(
    [
        ("state", "u1"), ("format", "u1"), ("mode", "u1"), ("sampling", "u1"), ("orientation", "u1"),
        *((kind, "?") for kind in KINDS), ("height", "i4"), ("width", "i4"), ("nbytes", "i8"), ("digest", "i8", 2),
        ("which", "u2"), ("index", "i8"), ("label", "i4"), ("measured", "?"), ("flat", "?"), ("pixels", "i8", 2),
    ]
)  # fmt: skip
"""One row per image. `digest` is a 128-bit hash of the file. `which` is the index of the dataset, `index` the index
of the sample in that dataset, and `label` the index of the class, or -1. `measured` says whether the pixels were
measured, `flat` whether the image is blank, and `pixels` is a hash of the pixels. Workers fill in the fields of the
file, `FILE_FIELDS`; `measure_files` fills in all others."""
FILE_FIELDS: Final = list(ROW.names or ())[:-6]

CHANNELS: Final = 16  # images with more channels are not part of the statistics
HISTOGRAMS: Final = 4  # the number of channels with a histogram
STRIP_PIXELS: Final = 1 << 20  # the number of pixels that are counted at a time
MAX_FLAT_STD: Final = 2.0  # an image whose pixels have a smaller standard deviation, scaled to 0–255, counts as blank

PIXELS: Final = np.dtype(
    [
        ("channels", "i8"), ("bits", "i8"), ("count", "i8"), ("flat", "i8"), ("digest", "i8", 2),
        ("sums", "i8", CHANNELS), ("squares", "i8", CHANNELS), ("levels", "i8", (HISTOGRAMS, 256)),
    ]
)  # fmt: skip
"""The pixels of one image. `bits` is 8 or 16, or 0 for floats; if it is 0, only `channels` is set. For 16 bits,
`levels` counts the values of the upper 8."""

START_BYTES: Final = 16 << 10  # longer headers, as with a large thumbnail or colour profile, are read a second time

UNLIMITED: Final = Decode(max_pixels=None, max_scans=None, max_scan_pixels=None, max_bytes=None, max_memory=None)
MAX_LABEL_LENGTH: Final = 100
LABEL_FIELDS: Final = ("cls", "label", "labels", "target", "class", "class_name")
ORIENTATION_MARKS: Final = (
    b"eXIf",
    b"tiff:Orientation",
)  # a PNG without these bytes has no orientation, and is not opened


def find_image(sample: Any) -> tuple[Encoded | Image, int | str | None]:
    """Return the first image in a sample of a gpuload dataset, and its label if that is a number or a short text.

    Raises:
        TypeError: the sample has no image.
    """
    label = None
    if isinstance(sample, Mapping):
        entries = tuple(sample.values())
        label = next((sample[name] for name in LABEL_FIELDS if name in sample), None)
    elif isinstance(sample, tuple | list):
        entries = tuple(sample)
        label = sample[1] if len(sample) > 1 else None
    else:
        entries = (sample,)
    leaves: list[Any] = []
    flatten(entries, leaves)
    image = next((leaf for leaf in leaves if isinstance(leaf, Encoded | Image)), None)
    if image is None:
        image = next((Image(leaf) for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.ndim in (2, 3)), None)
    if image is None:
        raise TypeError(
            f"the sample has no image, only {', '.join(type(leaf).__name__ for leaf in leaves) or 'nothing'}"
        )
    if isinstance(label, np.generic):
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | str) or len(str(label)) > MAX_LABEL_LENGTH:
        label = None
    return image, label


def class_name_of(dataset: object, index: int, label: int | str | None = None) -> str:
    """Return the name of a sample's class; "" if it has none. If `label` is None because the sample cannot be read, use
    the dataset's `labels`."""
    labels = getattr(dataset, "labels", None)
    if label is None and isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim == 1:
        label = int(labels[index])
    classes = getattr(dataset, "classes", None)
    if isinstance(label, int) and classes is not None and 0 <= label < len(classes):
        label = classes[label]
    return "" if label is None else str(label)


# -- the file ---------------------------------------------------------------------------------------------------------


def inspect_file(image: Encoded | Image, decoder: Decoder, row: np.ndarray) -> None:
    """Fill in the fields of a `ROW` that describe the file. If the file is damaged or exceeds a limit, raise an error
    after filling in the fields that can be read."""
    row["orientation"] = 1
    if isinstance(image, Image):
        pixels = _first_frame(image)
        channels = pixels.shape[2]
        row["format"], row["nbytes"] = FORMATS.index("array"), pixels.nbytes
        row["height"], row["width"] = pixels.shape[:2]
        row["mode"] = MODES.index({1: "L", 3: "RGB", 4: "RGBA"}.get(channels, "other"))
        row["deep"] = pixels.dtype != np.uint8
        row["digest"] = _digest(repr((pixels.shape, str(pixels.dtype))).encode(), np.ascontiguousarray(pixels))
    else:
        row["nbytes"], row["digest"] = len(image.data), _digest(image.data)
        refusal = None
        try:
            header = read_header(image.data, Decode())
        except DecodeError as error:
            refusal = error
            try:
                header = read_header(image.data, UNLIMITED)
            except DecodeError:
                raise refusal from None
        _fill_header_fields(image, header, row)
        if refusal is not None:
            row["state"] = REFUSED
            raise refusal
        if not has_end_marker(image.data, header):
            _decode(image, header, decoder)
    row["state"] = GOOD


def _first_frame(image: Image) -> np.ndarray:
    """Return the H×W×C pixels of an image, or of the first frame of a clip."""
    return image.hwc[0] if image.hwc.ndim == 4 else image.hwc


def _fill_header_fields(image: Encoded, header: Header, row: np.ndarray) -> None:
    data = image.data
    jpeg = header.jpeg or (scan_markers(data) if header.format == "JPEG" else None)
    row["format"], row["height"], row["width"] = FORMATS.index(header.format), header.height, header.width
    row["mode"] = MODES.index(header.mode if header.mode in MODES else "other")
    row["sampling"] = SAMPLINGS.index(_sampling(data, jpeg))
    row["orientation"] = 1 if image.exif else _orientation(data, header)  # turned upright when it is decoded
    start = data[: jpeg.first_scan if jpeg is not None else 1 << 16]
    implied_format = FORMAT_BY_ENDING.get(os.path.splitext(image.source or "")[1].lower())
    row["progressive"] = jpeg is not None and jpeg.frame in PROGRESSIVE
    row["restart_markers"] = jpeg is not None and bool(jpeg.restart_interval)
    row["profile"] = any(mark in start for mark in (b"ICC_PROFILE\0", b"iCCP", b"ICCP"))
    row["alpha"] = header.mode in ("LA", "PA", "RGBA")
    opened = header.opened
    row["deep"] = opened is not None and (opened.dtype != "uint8" or explain_deep_pixels("", header.mode) is not None)
    row["misnamed"] = implied_format is not None and implied_format != header.format


def _digest(*parts: Any) -> np.ndarray:
    """Return a 128-bit hash of these bytes, as two signed integers."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return np.frombuffer(digest.digest(), "<i8")


def _decode(encoded: Encoded, header: Header, decoder: Decoder) -> np.ndarray:
    """Decode an image to H×W×C, as in a loader, but without conversion if it has more than 8 bits per channel."""
    is_deep = decoder.dtype(header) != "uint8" and (
        explain_deep_pixels("", header.mode) is not None or encoded.mode == "unchanged"
    )
    return decoder.decode(Encoded(encoded.data, "unchanged" if is_deep else encoded.mode), header)


def _sampling(data: bytes, jpeg: JpegHeader | None) -> str:
    """Return the chroma sampling of a JPEG; "" if it has no colours."""
    if jpeg is None or jpeg.components < 3:
        return ""
    factors = [divmod(byte, 16) for byte in data[jpeg.frame_at + 11 : jpeg.frame_at + 10 + 3 * jpeg.components : 3]]
    if len(factors) < 3 or factors[1] != factors[2] or not all(factors[1]):
        return "other"
    (luma_width, luma_height), (chroma_width, chroma_height) = factors[0], factors[1]
    return FACTORS.get((luma_width / chroma_width, luma_height / chroma_height), "other")


def _orientation(data: bytes, header: Header) -> int:
    if header.jpeg is not None:
        return read_orientation(header.jpeg.exif, header.jpeg.xmp)
    if header.opened is None or (header.format == "PNG" and not any(mark in data for mark in ORIENTATION_MARKS)):
        return 1
    try:
        return header.opened.orientation()
    except Exception:  # a corrupt EXIF block counts as no orientation
        return 1


# -- the pixels -------------------------------------------------------------------------------------------------------


def measure_pixels(image: Encoded | Image, decoder: Decoder, record: np.ndarray) -> None:
    """Fill in a `PIXELS` record. Errors of the decoder are not caught."""
    pixels = _first_frame(image) if isinstance(image, Image) else _decode(image, decoder.header(image), decoder)
    height, width, channels = pixels.shape
    record["channels"] = channels
    if pixels.dtype not in (np.uint8, np.uint16) or channels > CHANNELS:
        return
    bits, count = 8 * pixels.dtype.itemsize, height * width
    record["bits"], record["count"] = bits, count
    rows = max(1, STRIP_PIXELS // width)
    values = np.arange(1 << bits, dtype=np.int64)
    is_flat = True
    for channel in range(channels):
        counts = np.zeros(1 << bits, np.int64)
        for top in range(0, height, rows):
            counts += np.bincount(pixels[top : top + rows, :, channel].ravel(), minlength=1 << bits)
        total, squares = int(counts @ values), int(counts @ values**2)
        record["sums"][channel], record["squares"][channel] = total, squares
        if channel < HISTOGRAMS:
            record["levels"][channel] = counts.reshape(256, -1).sum(axis=1)
        is_flat = is_flat and squares * count - total**2 < (MAX_FLAT_STD * count * (1 << bits) / 256) ** 2
    record["flat"] = is_flat
    record["digest"] = _digest(repr((pixels.shape, bits)).encode(), np.ascontiguousarray(pixels))


# -- datasets for workers ---------------------------------------------------------------------------------------------


class InspectedImages:
    """A dataset that inspects images of other datasets. Yields an image's row index, its `ROW` or `PIXELS` as bytes,
    the name of its class, and the cause of its damage ("" for none).

    Args:
        datasets: the datasets.
        rows: each image's `ROW`.
        row_indices: the rows of the images to inspect.
        pixels: whether to measure pixels; otherwise files are checked.
    """

    def __init__(self, datasets: list[Any], rows: np.ndarray, row_indices: np.ndarray, *, pixels: bool) -> None:
        self._datasets, self._row_indices, self._pixels = datasets, row_indices, pixels
        self._dataset_indices, self._indices = rows["which"][row_indices], rows["index"][row_indices]

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(Decode())

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, position: int) -> tuple[int, np.ndarray, str, str]:
        dataset, index = self._datasets[self._dataset_indices[position]], int(self._indices[position])
        record, label, cause = np.zeros(1, PIXELS if self._pixels else ROW), None, ""
        try:
            image, label = find_image(dataset[index])
            (measure_pixels if self._pixels else inspect_file)(image, self._decoder, record[0])
        except Exception as error:  # a dataset may raise anything for a sample that it cannot read
            cause = f"{type(error).__name__}: {one_line(str(error))}"
            if not self._pixels and record["state"] != REFUSED:
                record["state"] = DAMAGED
        return int(self._row_indices[position]), record.view(np.uint8), class_name_of(dataset, index, label), cause

    def will_need(self, positions: list[int]) -> None:
        """Have the kernel prefetch these samples, which will be read soon, if their dataset supports it."""
        for position in positions:
            if (will_need := getattr(self._datasets[self._dataset_indices[position]], "will_need", None)) is not None:
                will_need([int(self._indices[position])])


class ImageSizes:
    """A dataset of the heights and widths of another dataset's images, int32 (2,).

    Only the first `START_BYTES` of each file are read if no user's function can see or keep them. If the header does
    not end there, the complete file is read. So is one that is turned upright, unless it is a JPEG, whose orientation
    comes before its size in the file.

    Args:
        dataset: the dataset.
        decode: the options that decide whether images are turned upright.
    """

    def __init__(self, dataset: Any, decode: Decode) -> None:
        self._dataset, self._decode = dataset, decode
        self._start_bytes = START_BYTES if is_deterministic(dataset) else None

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self._decode)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[np.ndarray]:
        with read_starts(self._start_bytes):
            samples = fetch_samples(self._dataset, indices)
        sizes = (
            self._size_hw(sample, self._start_bytes) or self._size_hw(self._dataset[index])
            for index, sample in zip(indices, samples, strict=True)
        )
        return [np.array(size_hw, np.int32) for size_hw in sizes]

    def _size_hw(self, sample: Any, start_bytes: int | None = None) -> tuple[int, ...] | None:
        """Return the height and width of a sample's image; None if its file is longer than `start_bytes` and has to be
        read completely to know them."""
        image, _ = find_image(sample)
        if isinstance(image, Image):
            return _first_frame(image).shape[:2]
        is_start = len(image.data) == start_bytes
        try:
            header = self._decoder.header(image)
        except DecodeError as error:
            if is_start:
                return None
            error.filename = image.source
            raise
        is_certain = not is_start or header.jpeg is not None or not self._decoder.turns_upright(image)
        return self._decoder.size_hw(header) if is_certain else None


class SelectedImages:
    """A dataset of selected images of other datasets, each with its label, or 0 if the label is not a number. Images
    with more than 8 bits per channel are decoded without conversion.

    Args:
        datasets: the datasets.
        rows: the `ROW` of each image.
    """

    def __init__(self, datasets: list[Any], rows: np.ndarray) -> None:
        self._datasets, self._rows = datasets, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> tuple[Encoded | Image, int]:
        row = self._rows[position]
        image, label = find_image(self._datasets[row["which"]][int(row["index"])])
        if isinstance(image, Encoded) and row["deep"]:
            image = Encoded(image.data, "unchanged", image.source)
        return image, label if isinstance(label, int) else 0
