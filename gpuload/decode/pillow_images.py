"""Images through Pillow: opened by content, from a list of formats, and converted as Pillow converts.

Pillow's own ``Image.open`` is not used: it tries some forty plugins (one starts Ghostscript), and holds the size
against a process-wide limit with a process-wide warning. Here the first bytes choose one of the plugins below, which
decode in this process with nothing but their library, and the size is held against `Decode.max_pixels`.

Runs wherever a `Decoder` runs. Pillow and each plugin are imported at their first use.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFile import ImageFile

__all__ = ["CHANNELS", "FORMATS", "VALUES", "PillowImage", "open_image", "quiet", "sniff"]

PLUGINS: Final[dict[str, tuple[str, str]]] = {
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "TIFF": ("TiffImagePlugin", "TiffImageFile"),
    "WEBP": ("WebPImagePlugin", "WebPImageFile"),
    "AVIF": ("AvifImagePlugin", "AvifImageFile"),
    "JPEG2000": ("Jpeg2KImagePlugin", "Jpeg2KImageFile"),
    "PPM": ("PpmImagePlugin", "PpmImageFile"),
    "QOI": ("QoiImagePlugin", "QoiImageFile"),
}
FORMATS: Final = "JPEG, PNG, GIF, BMP, TIFF, WebP, AVIF, JPEG 2000, PNM and QOI"
STARTS: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"qoif", "QOI"),
)
# Channels of the modes that hold 8 bits each; the others have no `mode="unchanged"` in uint8.
CHANNELS: Final[dict[str, int]] = {
    "1": 1, "L": 1, "P": 1, "LA": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "RGBX": 4, "CMYK": 4,
}  # fmt: skip

# Modes of one number for each pixel, and the type that holds all of them.
VALUES: Final[dict[str, str]] = {
    "1": "uint8", "L": "uint8", "P": "uint8", "I;16": "int32", "I;16B": "int32", "I;16L": "int32", "I": "int32",
}  # fmt: skip


def sniff(data: bytes) -> str | None:
    """The format that the first bytes name, or None; the file's name is never asked."""
    for start, name in STARTS:
        if data.startswith(start):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis", b"mif1", b"msf1"):
        return "AVIF"
    if data[:1] == b"P" and data[1:2] in tuple(b"%d" % kind for kind in range(1, 7)):
        return "PPM"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Pillow's warnings about odd files go nowhere: each file either decodes or raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def open_image(data: bytes, name: str) -> PillowImage:
    """Read the header of an image of a known format; raises whatever the plugin raises."""
    module, plugin = PLUGINS[name]
    with quiet():
        return PillowImage(getattr(importlib.import_module(f"PIL.{module}"), plugin)(io.BytesIO(data)))


class PillowImage:
    """An image that Pillow has opened; pixels are taken when they are asked for."""

    def __init__(self, image: ImageFile) -> None:
        self._image = image
        self.width, self.height = image.size
        self.mode: str = image.mode
        self._failure: Exception | None = None

    def _load(self) -> None:
        # Pillow drops its list of tiles even where loading failed, and would give half-filled memory the next time.
        if self._failure is not None:
            raise self._failure
        try:
            self._image.load()
        except Exception as error:
            self._failure = error
            raise

    def orientation(self) -> int:
        """The EXIF or XMP orientation, as ``exif_transpose`` finds it (a PNG may be decoded for it); 1 for a TIFF."""
        if self._image.format == "TIFF":
            return 1
        with quiet():
            if self._image.format == "PNG" and "exif" not in self._image.info:
                self._load()
            value = self._image.getexif().get(0x0112, 1)
        return value if value in range(1, 9) else 1

    def pixels(self, mode: str, region_tlhw: tuple[int, int, int, int]) -> np.ndarray:
        """A region, H×W×C, converted to `mode` ("unchanged": as stored); raises whatever Pillow raises."""
        with quiet():
            self._load()
            return self._convert(self._image, mode, region_tlhw)

    def values(self, region_tlhw: tuple[int, int, int, int]) -> np.ndarray:
        """The numbers that are stored in a region, H×W: palette indices, levels of any depth; raises whatever Pillow
        raises."""
        with quiet():
            self._load()
            image = self._image
            if image.size != (self.width, self.height):
                raise ValueError(
                    f"the header says {self.width}×{self.height} pixels, the decoded image has "
                    f"{image.width}×{image.height}"
                )
            top, left, height, width = region_tlhw
            return np.asarray(image)[top : top + height, left : left + width]

    def pixels_before_damage(self, mode: str, region_tlhw: tuple[int, int, int, int]) -> np.ndarray | None:
        """The same from a file that ends early, or None where the damage reaches into the region.

        Pillow writes complete rows into zeroed memory until the data ends. So a region is whole if in its last row or
        below there is a pixel that is not zero (a picture that is black from there on is taken as damaged).
        """
        with quiet():
            try:
                self._image.load()
            except Exception:
                self._image.tile = []
            whole = np.asarray(self._image)
            top, _, height, _ = region_tlhw
            return self._convert(self._image, mode, region_tlhw) if whole[top + height - 1 :].any() else None

    def _convert(self, image: Image.Image, mode: str, region_tlhw: tuple[int, int, int, int]) -> np.ndarray:
        if image.size != (self.width, self.height):
            raise ValueError(
                f"the header says {self.width}×{self.height} pixels, the decoded image has {image.width}×{image.height}"
            )
        top, left, height, width = region_tlhw
        box = (left, top, left + width, top + height)
        if (height, width) != (self.height, self.width) and _may_crop(height * width):
            image, box = image.crop(box), (0, 0, width, height)
        if mode != "unchanged" and image.mode != mode:
            image = image.convert(mode)
        pixels = np.asarray(image)
        if pixels.dtype == np.bool_:
            pixels = pixels.astype(np.uint8) * 255
        if pixels.dtype != np.uint8:
            raise ValueError(
                f"the image is stored as {pixels.dtype} (Pillow mode {image.mode!r}), not as 8-bit channels"
            )
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        return pixels[box[1] : box[3], box[0] : box[2]]


def _may_crop(pixels: int) -> bool:
    """Whether Pillow's ``crop``, which saves converting the rest, would not hold this size against its own limit."""
    from PIL import Image

    return Image.MAX_IMAGE_PIXELS is None or pixels <= Image.MAX_IMAGE_PIXELS
