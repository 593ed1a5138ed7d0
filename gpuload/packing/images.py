"""Preparing images for a store: they are copied unchanged, resized, or made cuttable.

Runs in the process that makes a part, with one `Images` per part. Pillow resizes with a Lanczos filter; for a JPEG, the
decoder first halves the size, as often as the result is at least twice the target size. Orientation and ICC
profile are preserved and not applied to the pixels, so a resized file is displayed like the original.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpuload.datasets.sample import Encoded, Image
from gpuload.decode.cut import is_cuttable
from gpuload.decode.decoder import Decoder
from gpuload.decode.header import Header, has_end_marker, read_header, scan_markers
from gpuload.decode.native_messages import run_and_capture
from gpuload.decode.options import Decode
from gpuload.decode.pillow_images import strict_pillow
from gpuload.errors import DecodeError, one_line
from gpuload.packing.jpeg_cuttable import make_cuttable

__all__ = ["ImageOptions", "Images"]

RESIZED: Final = {"JPEG": ("L", "RGB", "CMYK"), "PNG": ("L", "LA", "RGB", "RGBA")}
MAX_EXIF: Final = 65_000  # bytes in one segment of a JPEG
ORIENTATION: Final = 0x0112
BUFFER: Final = 2  # bytes per pixel and channel; black and white noise takes 1.2 at quality 100
HEADER_DECODE: Final = Decode(exif=True)  # built once: that takes as long as reading a header
DRAFT_SCALE: Final = 2  # the minimum size at which a JPEG is decoded, relative to the target size


@dataclass(frozen=True)
class ImageOptions:
    """The options for images, see `pack`."""

    short_side: int | None = None
    quality: int = 90
    cuttable: bool = False
    check: bool = False
    exif: bool = False


class Images:
    """A converter from images to the data that a store holds, for one image at a time.

    Attributes:
        kept: the number of images that could not be changed as requested, by reason.
    """

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._decoder = Decoder(Decode(exif=options.exif))
        self.kept: Counter[str] = Counter()

    def bytes_of(self, encoded: Encoded) -> bytes:
        """Return the bytes to store for an image.

        Raises:
            DecodeError: the image is damaged. Only its header and its end are checked, unless it is resized or `check`
                is set.
            GpuloadError: jpegtran is not installed.
        """
        options, data = self._options, encoded.data
        header = read_header(data, HEADER_DECODE)
        needs_resize = options.short_side is not None and min(header.height, header.width) > options.short_side
        if needs_resize and _is_resizable(header):
            return self._make_cuttable(self._resize(data, header), header)
        if needs_resize:
            self.kept[f"not resized: {header.format} of mode {header.mode}"] += 1
        if options.check or not has_end_marker(data, header):
            self._decode(data, header)
        return self._make_cuttable(data, header)

    def pixels_of(self, image: Any) -> np.ndarray:
        """Return the pixels to store for an image in an array: H×W×C for a file, unchanged for decoded images.

        With `short_side`, crop a file's pixels to the central square, and resize it to this length.

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
                f"{pixels.dtype}; leave short_side out, or pack to a tar"
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
            self.kept["not cuttable"] += 1
        return cuttable

    def _decode(self, data: bytes, header: Header) -> None:
        """Decode the entire image to check it for damage."""
        full_region = (0, 0, header.height, header.width)
        if header.opened is None:
            self._decoder.decode(Encoded(data, "unchanged"), header._replace(orientation=1), full_region)
            return
        values, complaint = run_and_capture(header.opened.values, full_region)
        if values is None:
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {complaint}")

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
                if 0 < len(exif) <= MAX_EXIF:
                    params["exif"] = exif
                elif header.orientation != 1:  # stored in XMP, or in an EXIF block that is too long for Pillow
                    params["exif"] = Pillow.Exif()
                    params["exif"][ORIENTATION] = header.orientation
                return _encode(image.resize((width, height), Pillow.Resampling.LANCZOS, box=box), header.format, params)
        except Exception as error:
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {one_line(str(error))}") from error


def _encode(image: Any, name: str, options: dict[str, Any]) -> bytes:
    """Encode an image as a file.

    With ``optimize``, Pillow encodes a JPEG into a buffer of one or two bytes per pixel, and at least `MAXBLOCK`. Noise
    takes up to three bytes per pixel, so encoding failed without a larger `MAXBLOCK`.
    """
    from PIL import ImageFile

    file, previous_limit = io.BytesIO(), ImageFile.MAXBLOCK
    width, height = image.size
    metadata_bytes = len(options.get("icc_profile", b"")) + 4 * MAX_EXIF  # EXIF, a comment, tables
    ImageFile.MAXBLOCK = max(previous_limit, BUFFER * len(image.getbands()) * width * height + metadata_bytes)
    try:
        image.save(file, name, **options)
    finally:
        ImageFile.MAXBLOCK = previous_limit
    return file.getvalue()


def _is_resizable(header: Header) -> bool:
    """Return whether the image can be resized without loss of properties. Images with more than 8 bits, a palette, a
    transparent colour, or several frames cannot."""
    if header.mode not in RESIZED.get(header.format, ()):
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
