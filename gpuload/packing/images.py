"""Preparing images for a store: they are copied unchanged, resized, or made cuttable.

This module runs in the process that makes a part, with one `ImageConverter` per part. Pillow resizes with a Lanczos
filter. If a JPEG is much larger than the target size, the decoder first scales it to 1/2, 1/4 or 1/8, but not below
twice the target size. Orientation and ICC profile are preserved and not applied to the pixels, so a resized file is
displayed like the original.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpuload.checks import argument, check_fields, flag, integer
from gpuload.datasets.sample import Encoded, Image
from gpuload.decode.cut import is_cuttable
from gpuload.decode.decoder import Decoder
from gpuload.decode.header import Header, has_end_marker, read_header, scan_markers
from gpuload.decode.native_messages import run_and_capture
from gpuload.decode.options import Decode
from gpuload.decode.pillow_images import strict_pillow
from gpuload.errors import DecodeError, one_line
from gpuload.packing.jpeg_cuttable import make_cuttable

__all__ = ["ImageConverter", "ImageOptions"]

RESIZABLE_MODES: Final = {"JPEG": ("L", "RGB", "CMYK"), "PNG": ("L", "LA", "RGB", "RGBA")}
MAX_EXIF_BYTES: Final = 65_000  # the maximum size of EXIF data in one segment of a JPEG
ORIENTATION: Final = 0x0112
BYTES_PER_VALUE: Final = 2  # per pixel and channel; black-and-white noise takes 1.2 bytes at quality 100
HEADER_DECODE: Final = Decode()  # built once, because building it takes as long as reading a header
DRAFT_SCALE: Final = 2  # the minimum size at which a JPEG is decoded, relative to the target size


class UnfitSample(TypeError):
    """The error for a sample of a type that the store cannot hold, which usually affects all samples."""


@dataclass(frozen=True)
class ImageOptions:
    """The options for images, see `pack`."""

    short_side: int | None = argument(integer, default=None, minimum=1, maximum=65_500)
    quality: int = argument(integer, default=90, minimum=1, maximum=100)
    cuttable: bool = argument(flag, default=False)
    check: bool = argument(flag, default=False)
    exif: bool = argument(flag, default=False)

    def __post_init__(self) -> None:
        check_fields(self)


class ImageConverter:
    """A converter of single images to the data that a store holds.

    Args:
        options: the options of the job.
        exif: whether the images are turned upright when they are read; None means as the first image says.

    Attributes:
        exif: as the argument.
        unchanged_counts: the number of images that could not be changed as requested, by reason.
    """

    def __init__(self, options: ImageOptions, exif: bool | None = None) -> None:
        self._options = options
        self._decoder = Decoder(Decode(exif=options.exif or None))
        self.exif = exif
        self.unchanged_counts: Counter[str] = Counter()

    def convert_to_bytes(self, encoded: Encoded) -> bytes:
        """Return the bytes to store for an image.

        Raises:
            DecodeError: the image is damaged. Only its header and its end are checked, unless it is resized or `check`
                is set.
            GpuloadError: jpegtran is not installed.
        """
        options, data = self._options, encoded.data
        if self.exif is None:
            self.exif = bool(encoded.exif)
        if self.exif != bool(encoded.exif):
            raise UnfitSample(
                f"its image has exif={encoded.exif}, but earlier images have exif={self.exif}: a set turns either all "
                "of its images upright or none; pack them to two sets"
            )
        header = read_header(data, HEADER_DECODE, exif=True)
        needs_resize = options.short_side is not None and min(header.height, header.width) > options.short_side
        if needs_resize and _is_resizable(header):
            return self._make_cuttable(self._resize(data, header), header)
        if needs_resize:
            self.unchanged_counts[f"not resized: {header.format} of mode {header.mode}"] += 1
        if options.check or not has_end_marker(data, header):
            self._check_pixels(data, header)
        return self._make_cuttable(data, header)

    def convert_to_pixels(self, image: Any) -> np.ndarray:
        """Return the pixels to store in an array: H×W×C for an encoded image, and unchanged for a decoded image.

        With `short_side`, crop an encoded image to its central square, and resize the square to this side length.

        Raises:
            DecodeError: the image is damaged.
        """
        if isinstance(image, Image):
            return image.hwc
        if not isinstance(image, Encoded):
            return image
        pixels = self._decoder.decode(image, self._decoder.header(image))
        side = self._options.short_side
        if side is None:
            return pixels
        if pixels.dtype != np.uint8 or pixels.shape[2] not in (1, 3, 4):
            raise DecodeError(
                f"short_side resizes 8-bit grey, RGB and RGBA images, but this image has {pixels.shape[2]} channels of "
                f"{pixels.dtype}; omit short_side, or pack to a tar"
            )
        from PIL import Image as Pillow

        height, width, channels = pixels.shape
        square = min(height, width)
        top, left = (height - square) / 2, (width - square) / 2
        picture = Pillow.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        box = (left, top, left + square, top + square)
        resized = picture.resize((side, side), Pillow.Resampling.LANCZOS, box=box)
        return np.asarray(resized).reshape(side, side, channels)

    def _make_cuttable(self, data: bytes, header: Header) -> bytes:
        if not self._options.cuttable or header.format != "JPEG":
            return data
        cuttable = make_cuttable(data)
        jpeg = scan_markers(cuttable)
        if jpeg is None or not is_cuttable(cuttable, jpeg):
            self.unchanged_counts["not cuttable"] += 1
        return cuttable

    def _check_pixels(self, data: bytes, header: Header) -> None:
        """Decode the entire image to check it for damage."""
        full_region = (0, 0, header.height, header.width)
        if header.opened is None:
            self._decoder.decode(Encoded(data, "unchanged"), header._replace(orientation=1), full_region)
            return
        values, message = run_and_capture(header.opened.values, full_region)
        if values is None:
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {message}")

    def _resize(self, data: bytes, header: Header) -> bytes:
        from PIL import Image as Pillow
        from PIL.JpegImagePlugin import JpegImageFile, get_sampling
        from PIL.PngImagePlugin import PngImageFile

        short_side = self._options.short_side
        assert short_side is not None
        params: dict[str, Any] = {}
        box = None
        try:
            with strict_pillow():
                is_png = header.format == "PNG"
                image: Any = PngImageFile(io.BytesIO(data)) if is_png else JpegImageFile(io.BytesIO(data))
                if not is_png:
                    params = {"quality": self._options.quality, "subsampling": get_sampling(image), "optimize": True}
                width, height = _scaled_size(header, short_side)
                if not is_png and (draft := image.draft(None, (DRAFT_SCALE * width, DRAFT_SCALE * height))):
                    box = draft[1]
                image.load()
                if image.info.get("icc_profile"):
                    params["icc_profile"] = image.info["icc_profile"]
                exif = image.info.get("exif", b"")
                if 0 < len(exif) <= MAX_EXIF_BYTES:
                    params["exif"] = exif
                elif header.orientation != 1:  # the orientation is in XMP, or in EXIF data too long for Pillow
                    params["exif"] = Pillow.Exif()
                    params["exif"][ORIENTATION] = header.orientation
                return _encode(image.resize((width, height), Pillow.Resampling.LANCZOS, box=box), header.format, params)
        except Exception as error:
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {one_line(str(error))}") from error


def _encode(image: Any, format_name: str, options: dict[str, Any]) -> bytes:
    """Encode an image as a file.

    With ``optimize``, Pillow encodes a JPEG into a buffer of one or two bytes per pixel, but at least `MAXBLOCK` bytes.
    Noise takes up to three bytes per pixel, so encoding can fail unless `MAXBLOCK` is raised.
    """
    from PIL import ImageFile

    file, previous_limit = io.BytesIO(), ImageFile.MAXBLOCK
    width, height = image.size
    metadata_bytes = len(options.get("icc_profile", b"")) + 4 * MAX_EXIF_BYTES  # EXIF, a comment, tables
    ImageFile.MAXBLOCK = max(previous_limit, BYTES_PER_VALUE * len(image.getbands()) * width * height + metadata_bytes)
    try:
        image.save(file, format_name, **options)
    finally:
        ImageFile.MAXBLOCK = previous_limit
    return file.getvalue()


def _is_resizable(header: Header) -> bool:
    """Return whether the image can be resized without losing any of its properties. This is not possible if it has more
    than 8 bits per channel, a palette, a transparent colour, or several frames."""
    if header.mode not in RESIZABLE_MODES.get(header.format, ()):
        return False
    if header.format == "JPEG":
        return header.jpeg is None or header.jpeg.bits == 8
    opened = header.opened
    return opened is not None and opened.dtype == "uint8" and opened.is_plain


def _scaled_size(header: Header, short_side: int) -> tuple[int, int]:
    width, height = header.width, header.height
    if width <= height:
        return short_side, max(short_side, round(height * short_side / width))
    return max(short_side, round(width * (short_side / height))), short_side
