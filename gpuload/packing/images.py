"""What becomes of an image on its way into a store: its bytes as they are, or resized, or with an index.

Runs where parts are made, one `Images` for each. Pillow resizes, by Lanczos, a JPEG from a decoder that has already
halved it as long as it stays twice as large as it will be. Orientation and ICC profile are kept, as pixels are kept as
stored: a resized file is turned upright by whoever turns the original upright, and only then.
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
from gpuload.decode.header import Header, ends, read_header, scan_markers
from gpuload.decode.native_messages import listen
from gpuload.decode.options import Decode
from gpuload.decode.pillow_images import quiet
from gpuload.errors import DecodeError, one_line
from gpuload.packing.jpeg_cuttable import make_cuttable

__all__ = ["ImageOptions", "Images"]

RESIZED: Final = {"JPEG": ("L", "RGB", "CMYK"), "PNG": ("L", "LA", "RGB", "RGBA")}
MOST_EXIF: Final = 65_000  # bytes that one segment of a JPEG holds
ORIENTATION: Final = 0x0112
BUFFER: Final = 2  # bytes for a sample of a pixel; noise of black and white takes 1.2 at quality 100
AS_USUAL: Final = Decode(exif=True)  # built once: it takes as long as to read a header
LARGER: Final = 2  # times as large as it will be: so far a JPEG may be made smaller by its decoder


@dataclass(frozen=True)
class ImageOptions:
    """Options of images: see `pack`."""

    short_side: int | None = None
    quality: int = 90
    cuttable: bool = False
    check: bool = False
    exif: bool = False


class Images:
    """Prepares images, one at a time.

    Attributes:
        kept: how many images stayed as they were though something was asked for, by why.
    """

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._decoder = Decoder(Decode(exif=options.exif))
        self.kept: Counter[str] = Counter()

    def bytes_of(self, encoded: Encoded) -> bytes:
        """Return the bytes that are stored for an image.

        Raises:
            DecodeError: it is damaged, as far as was looked: the header and the end, or with `check` and where it is
                resized, all of it.
            GpuloadError: jpegtran is not installed.
        """
        options, data = self._options, encoded.data
        header = read_header(data, AS_USUAL)
        wanted = options.short_side is not None and min(header.height, header.width) > options.short_side
        if wanted and _resizable(header):
            return self._cuttable(self._resized(data, header), header)
        if wanted:
            self.kept[f"not resized: {header.format} of mode {header.mode}"] += 1
        if options.check or not ends(data, header):
            self._decode(data, header)
        return self._cuttable(data, header)

    def pixels_of(self, image: Any) -> np.ndarray:
        """Return the numbers that are stored for an image in an array: H×W×C of a file, else as they are.

        With `short_side` the middle square of it, of that side.

        Raises:
            DecodeError: it is damaged.
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
                f"short_side resizes grey, RGB and RGBA images of 8 bits, this one has {pixels.shape[2]} channels of "
                f"{pixels.dtype}"
            )
        from PIL import Image as Pillow

        height, width, channels = pixels.shape
        square = min(height, width)
        top, left = (height - square) / 2, (width - square) / 2
        picture = Pillow.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        box = (left, top, left + square, top + square)
        small = picture.resize((side, side), Pillow.Resampling.LANCZOS, box=box)
        return np.asarray(small).reshape(side, side, channels)

    def _cuttable(self, data: bytes, header: Header) -> bytes:
        if not self._options.cuttable or header.format != "JPEG":
            return data
        cuttable = make_cuttable(data)
        jpeg = scan_markers(cuttable)
        if jpeg is None or not is_cuttable(cuttable, jpeg):
            self.kept["not cuttable"] += 1
        return cuttable

    def _decode(self, data: bytes, header: Header) -> None:
        """Decode all of it, only to see whether that can be done."""
        whole = (0, 0, header.height, header.width)
        if header.opened is None:
            self._decoder.decode(Encoded(data, "unchanged"), header._replace(orientation=1), whole)
            return
        values, complaint = listen(header.opened.values, whole)
        if values is None:
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {complaint}")

    def _resized(self, data: bytes, header: Header) -> bytes:
        from PIL import Image as Pillow
        from PIL.JpegImagePlugin import JpegImageFile, get_sampling
        from PIL.PngImagePlugin import PngImageFile

        short = self._options.short_side
        assert short is not None
        saving: dict[str, Any] = {}
        box = None
        try:
            with quiet():
                is_png = header.format == "PNG"
                image: Any = PngImageFile(io.BytesIO(data)) if is_png else JpegImageFile(io.BytesIO(data))
                if not is_png:
                    saving = {"quality": self._options.quality, "subsampling": get_sampling(image), "optimize": True}
                width, height = _scaled(header, short)
                if not is_png and (drafted := image.draft(None, (LARGER * width, LARGER * height))):
                    box = drafted[1]
                image.load()
                if image.info.get("icc_profile"):
                    saving["icc_profile"] = image.info["icc_profile"]
                exif = image.info.get("exif", b"")
                if 0 < len(exif) <= MOST_EXIF:
                    saving["exif"] = exif
                elif header.orientation != 1:  # told by XMP, or in a block that is too long for Pillow to write
                    saving["exif"] = Pillow.Exif()
                    saving["exif"][ORIENTATION] = header.orientation
                return _saved(image.resize((width, height), Pillow.Resampling.LANCZOS, box=box), header.format, saving)
        except Exception as error:
            raise DecodeError(f"the {header.format} cannot be decoded: Pillow: {one_line(str(error))}") from error


def _saved(image: Any, name: str, options: dict[str, Any]) -> bytes:
    """Return the file of an image.

    With ``optimize`` a JPEG has to fit into a buffer of Pillow's: one or two bytes for a pixel, at least `MAXBLOCK`.
    Noise takes up to three, and failed.
    """
    from PIL import ImageFile

    file, before = io.BytesIO(), ImageFile.MAXBLOCK
    width, height = image.size
    beside = len(options.get("icc_profile", b"")) + 4 * MOST_EXIF  # EXIF, a comment, tables
    ImageFile.MAXBLOCK = max(before, BUFFER * len(image.getbands()) * width * height + beside)
    try:
        image.save(file, name, **options)
    finally:
        ImageFile.MAXBLOCK = before
    return file.getvalue()


def _resizable(header: Header) -> bool:
    """Return whether the picture can be made smaller without losing what it is; what has more bits, a palette, a
    colour that is transparent, or frames, stays."""
    if header.mode not in RESIZED.get(header.format, ()):
        return False
    if header.format == "JPEG":
        return header.jpeg is None or header.jpeg.bits == 8
    opened = header.opened
    return opened is not None and opened.dtype == "uint8" and opened.single


def _scaled(header: Header, short: int) -> tuple[int, int]:
    width, height = header.width, header.height
    if width <= height:
        return short, max(short, round(height * short / width))
    return max(short, round(width * (short / height))), short
