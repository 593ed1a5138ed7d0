"""Decoding of images with Pillow, including conversion to another mode.

Pillow's ``Image.open`` is not used, because it tries about forty plugins (one of them starts Ghostscript) and checks
the size against a process-wide limit with a process-wide warning. Here, the first bytes of a file select one of the
plugins below, which decode in this process and use only their format's library. The size is checked against
`Decode.max_pixels`.

Pillow and each plugin are imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.decode.tiff import describe_lost_content

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFile import ImageFile

__all__ = ["CHANNELS", "MASK_DTYPES", "PillowImage", "Region", "open_image", "strict_pillow", "truncated_flag_hint"]

Region = tuple[int, int, int, int]  # top, left, height, width

# For each format, the common prefix of the names of Pillow's plugin module and plugin class.
PLUGINS: Final[dict[str, str]] = {
    "JPEG": "Jpeg", "PNG": "Png", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff", "WEBP": "WebP", "AVIF": "Avif",
    "JPEG2000": "Jpeg2K", "PPM": "Ppm", "QOI": "Qoi",
}  # fmt: skip
# The number of channels of each Pillow mode with 8-bit channels. `mode="unchanged"` refuses all other modes, except
# modes whose stored values have another type (`PillowImage.dtype`).
CHANNELS: Final[dict[str, int]] = {
    "1": 1, "L": 1, "P": 1, "LA": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "RGBX": 4, "CMYK": 4,
}  # fmt: skip

# Pillow's names of stored pixel formats with 16 bits per channel, of which Pillow returns the upper 8 bits. Each name
# is mapped to the name with the opposite byte order, with which Pillow returns the lower 8 bits.
LOWER_BITS: Final[dict[str, str]] = {
    f"{mode};16{order}": f"{mode};16{opposite}" for mode in ("RGB", "RGBA") for order, opposite in ("BL", "LB", "NB")
}
# The Pillow modes with one value per pixel, each with a dtype that can hold the mode's values.
MASK_DTYPES: Final[dict[str, str]] = {
    "1": "uint8", "L": "uint8", "P": "uint8", "I;16": "int32", "I;16B": "int32", "I;16L": "int32", "I": "int32",
}  # fmt: skip

# The chunks of a PNG that only describe the picture. Pillow unpacks them all, and refuses the file if one exceeds a
# limit that each program can set for itself (`PngImagePlugin.MAX_TEXT_CHUNK`).
DESCRIPTIONS: Final = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})
ORIENTATION_KEYWORDS: Final = frozenset({b"exif", b"xmp", b"Raw profile type exif", b"XML:com.adobe.xmp"})
MAX_UNPACKED_BYTES: Final = 1 << 20  # Pillow's default for MAX_TEXT_CHUNK
unpack_chunk = struct.Struct(">L4s").unpack_from

_lock = threading.Lock()  # guards the next two variables, which belong to `strict_pillow`
_threads_inside = 0
_truncated_flag = False


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Run Pillow without its warnings about unusual files and without ``LOAD_TRUNCATED_IMAGES``, so that each file
    either decodes or raises an error, in the same way in every process.

    Several threads can be in the context at the same time: the first thread to enter saves the flag, and the last
    thread to leave restores it.
    """
    from PIL import ImageFile

    global _threads_inside, _truncated_flag
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _lock:
            if not _threads_inside:
                _truncated_flag, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
            _threads_inside += 1
        try:
            yield
        finally:
            with _lock:
                _threads_inside -= 1
                if not _threads_inside:
                    ImageFile.LOAD_TRUNCATED_IMAGES = _truncated_flag


def truncated_flag_hint() -> str:
    """Return a hint to append to the error message for a file that cannot be decoded, if the program set Pillow's flag
    for truncated files; otherwise ""."""
    if not getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False):
        return ""
    return (
        ". PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set, but gpuload never fills in a truncated image: skip such files "
        'with Loader(on_error="skip"), or decode them with Pillow in the dataset'
    )


def open_image(data: bytes, format_name: str) -> PillowImage:
    """Read the header of an image of a known format; raises any error of the plugin."""
    plugin = PLUGINS[format_name]
    if format_name == "PNG":
        data = drop_descriptions(data)
    with strict_pillow():
        image_class = getattr(importlib.import_module(f"PIL.{plugin}ImagePlugin"), f"{plugin}ImageFile")
        return PillowImage(data, lambda: image_class(io.BytesIO(data)))


def drop_descriptions(png: bytes) -> bytes:
    """Return a PNG without its texts and colour profile, except for texts in which Pillow looks for the orientation. A
    chunk that is truncated stays."""
    parts: list[bytes] = []
    start, pos = 0, 8
    while pos + 8 <= len(png):
        length, kind = unpack_chunk(png, pos)
        end = pos + 12 + length  # behind the chunk's length, name and checksum
        if kind in DESCRIPTIONS and end <= len(png) and not _may_state_orientation(kind, png[pos + 8 : end - 4]):
            parts.append(png[start:pos])
            start = end
        pos = end
    return b"".join((*parts, png[start:])) if parts else png


def _may_state_orientation(kind: bytes, content: bytes) -> bool:
    keyword, _, text = content.partition(b"\0")
    if kind == b"iCCP" or keyword not in ORIENTATION_KEYWORDS:
        return False
    if kind == b"zTXt":
        packed = text[1:]
    elif kind == b"iTXt" and text[:1] not in (b"", b"\0"):
        packed = text[2:].split(b"\0", 2)[-1]  # behind the language and the translated keyword
    else:
        return True
    inflater = zlib.decompressobj()
    try:
        inflater.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error:
        return False
    return not inflater.unconsumed_tail


class PillowImage:
    """An image opened by Pillow, which is decoded on the first request for pixels.

    Attributes:
        width, height, format, mode: as in Pillow.
        dtype: the type of the stored values: "uint8", "uint16" or "float32". It is also "uint8" for types that gpuload
            does not support in images.
        lost_content: a description of the content of a TIFF that Pillow drops; None if there is none.
    """

    def __init__(self, data: bytes, open_: Callable[[], ImageFile]) -> None:
        self._open = open_
        self._image = image = open_()
        self.width, self.height = image.size
        self.format = image.format or ""
        self.mode: str = image.mode
        self._failure: Exception | None = None
        self._is_16_bit_rgb = image.format in ("PNG", "TIFF") and _stored_format(image) in LOWER_BITS
        # In a TIFF, mode I can be any integer; in all other formats it holds 16 bits.
        is_uint16 = self._is_16_bit_rgb or self.mode.startswith("I;16") or (self.mode == "I" and image.format != "TIFF")
        self.dtype: str = "uint16" if is_uint16 else "float32" if self.mode == "F" else "uint8"
        bits = 8 if self.mode in CHANNELS and self.dtype == "uint8" else 32
        self.lost_content = (
            describe_lost_content(data, CHANNELS.get(self.mode, 1), bits) if image.format == "TIFF" else None
        )

    def _load(self) -> None:
        # Pillow drops its list of tiles even if loading failed, and would return half-filled memory the next time.
        if self._failure is not None:
            raise self._failure
        try:
            if self.format == "PPM" and (pnm := _rewrite_pnm(self._image)) is not None:
                self._image = type(self._image)(io.BytesIO(pnm))
            self._image.load()
            if (size := self._image.size) != (self.width, self.height):
                raise ValueError(
                    f"the header says {self.width}×{self.height} pixels, but the decoded image has {size[0]}×{size[1]}"
                )
        except Exception as error:
            self._failure = error
            raise

    def orientation(self) -> int:
        """Return the EXIF or XMP orientation that ``exif_transpose`` uses; 1 for a TIFF. This can decode a PNG."""
        if self._image.format == "TIFF":
            return 1
        with strict_pillow():
            if self._image.format == "PNG" and "exif" not in self._image.info:
                self._load()
            value = self._image.getexif().get(0x0112, 1)
        return value if value in range(1, 9) else 1

    @property
    def is_plain(self) -> bool:
        """Whether the image has a single frame and no colour marked as transparent."""
        return "transparency" not in self._image.info and getattr(self._image, "n_frames", 1) == 1

    def tag(self, number: int) -> int:
        """Return the integer value of a TIFF tag; 0 if there is none."""
        value = self._image.tag_v2.get(number, 0)  # pyright: ignore[reportAttributeAccessIssue]
        return value if isinstance(value, int) else 0

    def pixels(self, mode: str, region_tlhw: Region) -> np.ndarray:
        """Return a region, H×W×C, converted to `mode` ("unchanged" means as stored); raises Pillow's errors."""
        if mode == "unchanged" and self.dtype != "uint8":
            return self._deep_pixels(region_tlhw)
        with strict_pillow():
            self._load()
            return self._convert(mode, region_tlhw)

    def values(self, region_tlhw: Region) -> np.ndarray:
        """Return a region's stored values, H×W: palette indices or grey values of any depth; raises Pillow's
        errors."""
        with strict_pillow():
            self._load()
            return _crop_array(self._image, region_tlhw)

    def _deep_pixels(self, region_tlhw: Region) -> np.ndarray:
        values = self.values(region_tlhw).astype(self.dtype)
        if self._is_16_bit_rgb:
            with strict_pillow():
                lower_image = self._open()
                lower_image.tile = [
                    _replace_format(tile, LOWER_BITS[_stored_format(lower_image)]) for tile in lower_image.tile
                ]
                values = (values << 8) | _crop_array(lower_image, region_tlhw)
        return values if values.ndim == 3 else values[:, :, None]

    def pixels_before_damage(self, mode: str, region_tlhw: Region) -> np.ndarray | None:
        """Return `pixels` of a file that ends early; None if the damage extends into the region.

        Pillow writes complete rows into zeroed memory until the data ends. So a region is complete if its last row or a
        row below it has a non-zero pixel. A picture that is black from there on is treated as damaged.
        """
        with strict_pillow():
            try:
                self._image.load()
            except Exception:
                self._image.tile = []
            image = np.asarray(self._image)
            top, _, height, _ = region_tlhw
            return self._convert(mode, region_tlhw) if image[top + height - 1 :].any() else None

    def _convert(self, mode: str, region_tlhw: Region) -> np.ndarray:
        image: Image.Image = self._image
        top, left, height, width = region_tlhw
        box = (left, top, left + width, top + height)
        if (height, width) != (self.height, self.width) and _can_crop(height * width):
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


def _crop_array(image: Image.Image, region_tlhw: Region) -> np.ndarray:
    top, left, height, width = region_tlhw
    return np.asarray(image)[top : top + height, left : left + width]


def _stored_format(image: ImageFile) -> str:
    """Return Pillow's name of the pixel format in an opened file, such as ``"RGB;16B"``; "" if it has none."""
    arguments: Any = image.tile[0][3] if image.tile else ""
    arguments = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return arguments if isinstance(arguments, str) else ""


def _replace_format(tile: Any, format_name: str) -> Any:
    """Return one of Pillow's tiles with another pixel format name."""
    arguments = (format_name, *tile[3][1:]) if isinstance(tile[3], tuple) else format_name
    return tile._replace(args=arguments) if hasattr(tile, "_replace") else (*tile[:3], arguments)


def _can_crop(pixels: int) -> bool:
    """Return whether Pillow's ``crop``, which saves converting the remaining pixels, accepts this size."""
    from PIL import Image

    return Image.MAX_IMAGE_PIXELS is None or pixels <= Image.MAX_IMAGE_PIXELS


def _rewrite_pnm(image: Any) -> bytes | None:
    """Rewrite an opened binary PNM whose maximum is not 255 as a file that Pillow reads quickly; None for all other
    files, and for truncated files.

    Pillow reads such values one by one in Python, 600 times slower. They are scaled and rounded as in Pillow: the
    maximum becomes 255, or 65535 for grey of more than 8 bits.
    """
    if not image.tile or image.tile[0][0] != "ppm":
        return None
    _, _, offset, (_, maximum) = image.tile[0]
    (width, height), bands, data = image.size, len(image.getbands()), image.fp.getvalue()
    count, stored_dtype = width * height * bands, np.dtype("u1" if maximum < 256 else ">u2")
    if len(data) < offset + count * stored_dtype.itemsize:
        return None
    new_maximum, dtype = (65535, ">u2") if image.mode == "I" else (255, "u1")
    table = np.minimum(np.rint(np.arange(65536) / maximum * new_maximum), new_maximum).astype(dtype)
    scaled_values = table[np.frombuffer(data, stored_dtype, count, offset)]
    return b"P%d %d %d %d\n" % (6 if bands == 3 else 5, width, height, new_maximum) + scaled_values.tobytes()
