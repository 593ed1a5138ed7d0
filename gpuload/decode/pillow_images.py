"""Images through Pillow: opened by content, from a list of formats, and converted as Pillow converts.

Pillow's own ``Image.open`` is not used: it tries some forty plugins (one starts Ghostscript), and checks the size
against a process-wide limit with a process-wide warning. Here the first bytes choose one of the plugins below, which
decode in this process with their library alone, and the size is checked against `Decode.max_pixels`.

Pillow and each plugin are imported at their first use.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.decode.tiff import not_given

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFile import ImageFile

__all__ = ["CHANNELS", "VALUES", "PillowImage", "Region", "hint_on_truncated", "open_image", "quiet"]

Region = tuple[int, int, int, int]  # top, left, height, width

# How Pillow's names of the plugin and of its class begin.
PLUGINS: Final[dict[str, str]] = {
    "JPEG": "Jpeg", "PNG": "Png", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff", "WEBP": "WebP", "AVIF": "Avif",
    "JPEG2000": "Jpeg2K", "PPM": "Ppm", "QOI": "Qoi",
}  # fmt: skip
# Channels of the modes that have 8 bits each; `mode="unchanged"` refuses the others.
CHANNELS: Final[dict[str, int]] = {
    "1": 1, "L": 1, "P": 1, "LA": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "RGBX": 4, "CMYK": 4,
}  # fmt: skip

# Pillow's names of stored pixels with 16 bits a channel, which it cuts to the upper 8, and the name with which it takes
# the lower 8: that of the other byte order.
LOWER: Final[dict[str, str]] = {
    f"{mode};16{order}": f"{mode};16{other}" for mode in ("RGB", "RGBA") for order, other in ("BL", "LB", "NB")
}
# Modes with one number for each pixel, and a type that holds their values.
VALUES: Final[dict[str, str]] = {
    "1": "uint8", "L": "uint8", "P": "uint8", "I;16": "int32", "I;16B": "int32", "I;16L": "int32", "I": "int32",
}  # fmt: skip

_lock = threading.Lock()  # of the two that follow, which belong to `quiet`
_inside = 0
_truncated_flag = False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run Pillow without its warnings about odd files and without ``LOAD_TRUNCATED_IMAGES``: each file either decodes
    or raises, the same in every process.

    Several threads may be inside at once: the first one to enter remembers the flag, the last one to leave restores it.
    """
    from PIL import ImageFile

    global _inside, _truncated_flag
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _lock:
            if not _inside:
                _truncated_flag, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
            _inside += 1
        try:
            yield
        finally:
            with _lock:
                _inside -= 1
                if not _inside:
                    ImageFile.LOAD_TRUNCATED_IMAGES = _truncated_flag


def hint_on_truncated() -> str:
    """Return the end of the message for a file that cannot be decoded, if the program set Pillow's flag for truncated
    files; "" if it did not."""
    if not getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False):
        return ""
    return (
        ". PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set, but gpuload never fills up a truncated image: leave such files "
        'out with Loader(on_error="skip"), or decode them with Pillow in the dataset'
    )


def open_image(data: bytes, name: str) -> PillowImage:
    """Read the header of an image of a known format; raises whatever the plugin raises."""
    plugin = PLUGINS[name]
    with quiet():
        opener = getattr(importlib.import_module(f"PIL.{plugin}ImagePlugin"), f"{plugin}ImageFile")
        return PillowImage(data, lambda: opener(io.BytesIO(data)))


class PillowImage:
    """An image that Pillow has opened, decoded when pixels are asked for.

    Attributes:
        width, height, mode: Pillow's.
        dtype: of the numbers as stored, "uint8", "uint16" or "float32"; "uint8" for those that images cannot hold, too.
        lost: what a TIFF holds next to what Pillow gives, in words; None if nothing.
    """

    def __init__(self, data: bytes, open_: Callable[[], ImageFile]) -> None:
        self._open = open_
        self._image = image = open_()
        self.width, self.height = image.size
        self.format = image.format or ""
        self.mode: str = image.mode
        self._failure: Exception | None = None
        self._is_wide = image.format in ("PNG", "TIFF") and _stored_as(image) in LOWER
        # In a TIFF mode I is any integer; in the others it holds 16 bits.
        wide = self._is_wide or self.mode.startswith("I;16") or (self.mode == "I" and image.format != "TIFF")
        self.dtype: str = "uint16" if wide else "float32" if self.mode == "F" else "uint8"
        bits = 8 if self.mode in CHANNELS and self.dtype == "uint8" else 32
        self.lost = not_given(data, CHANNELS.get(self.mode, 1), bits) if image.format == "TIFF" else None

    def _load(self) -> None:
        # Pillow drops its list of tiles even if loading failed, and would give half-filled memory the next time.
        if self._failure is not None:
            raise self._failure
        try:
            if self.format == "PPM" and (faster := _rewritten_pnm(self._image)) is not None:
                self._image = type(self._image)(io.BytesIO(faster))
            self._image.load()
            if (size := self._image.size) != (self.width, self.height):
                raise ValueError(
                    f"the header says {self.width}×{self.height} pixels, the decoded image has {size[0]}×{size[1]}"
                )
        except Exception as error:
            self._failure = error
            raise

    def orientation(self) -> int:
        """Return the EXIF or XMP orientation as ``exif_transpose`` finds it (it may decode a PNG); 1 for a TIFF."""
        if self._image.format == "TIFF":
            return 1
        with quiet():
            if self._image.format == "PNG" and "exif" not in self._image.info:
                self._load()
            value = self._image.getexif().get(0x0112, 1)
        return value if value in range(1, 9) else 1

    @property
    def single(self) -> bool:
        """Whether it is one frame, in which no colour stands for transparency."""
        return "transparency" not in self._image.info and getattr(self._image, "n_frames", 1) == 1

    def tag(self, number: int) -> int:
        """Return the number that a tag of a TIFF holds; 0 if there is none."""
        value = self._image.tag_v2.get(number, 0)  # pyright: ignore[reportAttributeAccessIssue]
        return value if isinstance(value, int) else 0

    def pixels(self, mode: str, region_tlhw: Region) -> np.ndarray:
        """Return a region, H×W×C, converted to `mode` ("unchanged": as stored); raises whatever Pillow raises."""
        if mode == "unchanged" and self.dtype != "uint8":
            return self._deep(region_tlhw)
        with quiet():
            self._load()
            return self._convert(mode, region_tlhw)

    def values(self, region_tlhw: Region) -> np.ndarray:
        """Return a region's stored numbers, H×W: palette indices, greys of any depth; raises whatever Pillow raises."""
        with quiet():
            self._load()
            return _region(self._image, region_tlhw)

    def _deep(self, region_tlhw: Region) -> np.ndarray:
        numbers = self.values(region_tlhw).astype(self.dtype)
        if self._is_wide:
            with quiet():
                lower = self._open()
                lower.tile = [_stored_in(tile, LOWER[_stored_as(lower)]) for tile in lower.tile]
                numbers = (numbers << 8) | _region(lower, region_tlhw)
        return numbers if numbers.ndim == 3 else numbers[:, :, None]

    def pixels_before_damage(self, mode: str, region_tlhw: Region) -> np.ndarray | None:
        """`pixels` of a file that ends early; None if the damage reaches into the region.

        Pillow writes complete rows into zeroed memory until the data ends. So a region is whole if its last row or one
        below it has a pixel that is not zero (a picture that is black from there on is taken as damaged).
        """
        with quiet():
            try:
                self._image.load()
            except Exception:
                self._image.tile = []
            whole = np.asarray(self._image)
            top, _, height, _ = region_tlhw
            return self._convert(mode, region_tlhw) if whole[top + height - 1 :].any() else None

    def _convert(self, mode: str, region_tlhw: Region) -> np.ndarray:
        image: Image.Image = self._image
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


def _region(image: Image.Image, region_tlhw: Region) -> np.ndarray:
    top, left, height, width = region_tlhw
    return np.asarray(image)[top : top + height, left : left + width]


def _stored_as(image: ImageFile) -> str:
    """Return Pillow's name of the pixels in an opened file, such as ``"RGB;16B"``; "" where it has none."""
    arguments: Any = image.tile[0][3] if image.tile else ""
    arguments = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return arguments if isinstance(arguments, str) else ""


def _stored_in(tile: Any, name: str) -> Any:
    """Return one of Pillow's tiles, with another name of its pixels."""
    arguments = (name, *tile[3][1:]) if isinstance(tile[3], tuple) else name
    return tile._replace(args=arguments) if hasattr(tile, "_replace") else (*tile[:3], arguments)


def _may_crop(pixels: int) -> bool:
    """Return whether Pillow's ``crop``, which saves converting the rest, takes this size: it has a limit of its own."""
    from PIL import Image

    return Image.MAX_IMAGE_PIXELS is None or pixels <= Image.MAX_IMAGE_PIXELS


def _rewritten_pnm(image: Any) -> bytes | None:
    """Return an opened PNM of binary numbers whose maximum is not 255 as a file that Pillow reads at once; None for all
    others, and for a truncated one.

    Pillow reads such numbers one by one in Python, 600 times slower. Numbers become levels as in Pillow: of their
    maximum 255, or 65535 for grey of more than 8 bits, rounded.
    """
    if not image.tile or image.tile[0][0] != "ppm":
        return None
    _, _, offset, (_, most) = image.tile[0]
    (width, height), bands, data = image.size, len(image.getbands()), image.fp.getvalue()
    count, stored = width * height * bands, np.dtype("u1" if most < 256 else ">u2")
    if len(data) < offset + count * stored.itemsize:
        return None
    top, dtype = (65535, ">u2") if image.mode == "I" else (255, "u1")
    table = np.minimum(np.rint(np.arange(65536) / most * top), top).astype(dtype)
    levels = table[np.frombuffer(data, stored, count, offset)]
    return b"P%d %d %d %d\n" % (6 if bands == 3 else 5, width, height, top) + levels.tobytes()
