"""The options of decoding: one frozen object that checks itself when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpuload.datasets.files import MAX_BYTES

__all__ = ["Decode", "Scale"]

Scale = Literal["exact", "fast"]


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How encoded images become pixels.

    Args:
        scale: ``"fast"``: a JPEG whose first transform makes it less than half as large is decoded at a half, a quarter
            or an eighth of its size, the smallest that still covers the result, and resized where it is decoded,
            wherever a model of the costs says that this is less work. Draws are the same; pixels differ by a few
            levels, as docs/performance.md shows. All other images are decoded as with ``"exact"``, and so are all where
            the first transform is not a resize or crop with antialiasing; `Loader.plan` says so.
        exif: turn images upright by their EXIF (or XMP) orientation, as Pillow's ``ImageOps.exif_transpose`` does. Off
            by default, as in torchvision's ``ImageFolder``. TIFFs are upright either way: Pillow turns them itself.
        max_pixels: refuse an image whose header says more pixels, before memory is taken for them; None for no limit
            (Pillow's own for WebP remains). The default is Pillow's.
        max_scans: refuse a JPEG of more scans, by its markers (500 scans in 5 KB cost seconds of CPU time); None for no
            limit.
        max_scan_pixels: refuse a JPEG of several scans with more pixels in all of them together; None for no limit. The
            default is 2³¹: 12 scans of the largest image that `max_pixels` allows.
        max_bytes: refuse a larger file, and do not read it, if gpuload reads it (`read`, `ImageFolder`, …); None for no
            limit. The default is 1 GiB.
        max_memory: refuse an image whose decoder would take more bytes of memory, by an estimate: 4 for each pixel,
            progressive JPEG 12, WebP 16, AVIF 14, a tile of JPEG 2000 25; None for no limit. The default is 2 GiB.

    Raises:
        TypeError: `exif` is not a bool, or a limit not an int.
        ValueError: a limit is below 1, or `scale` is neither ``"exact"`` nor ``"fast"``.

    Example:
        >>> decode = Decode(exif=True, max_scans=100)
        >>> decode.max_scans, decode.max_pixels
        (100, 178956970)
    """

    scale: Scale = "exact"
    exif: bool = False
    max_pixels: int | None = 178_956_970
    max_scans: int | None = 256
    max_scan_pixels: int | None = 1 << 31
    max_bytes: int | None = MAX_BYTES
    max_memory: int | None = 2 << 30

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(f"Decode(scale=…) must be 'exact' or 'fast', got {self.scale!r}")
        if not isinstance(self.exif, bool):
            raise TypeError(f"Decode(exif=…) must be True or False, got {self.exif!r}")
        for name in ("max_pixels", "max_scans", "max_scan_pixels", "max_bytes", "max_memory"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if not isinstance(limit, int) or isinstance(limit, bool):
                raise TypeError(f"Decode({name}=…) must be an int or None, got {limit!r}")
            if limit < 1:
                raise ValueError(f"Decode({name}=…) must be at least 1, or None for no limit, got {limit}")
