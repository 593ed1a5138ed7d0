"""The options of decoding: one frozen object that checks itself when it is built."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decode"]


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How encoded images become pixels.

    Args:
        exif: turn images upright by their EXIF (or XMP) orientation, as Pillow's ``ImageOps.exif_transpose`` does. Off
            by default, as in torchvision's ``ImageFolder``. TIFFs are upright either way: Pillow turns them itself.
        max_pixels: refuse an image whose header says more pixels, before memory is taken for them; None for no limit
            (Pillow's own for WebP remains). The default is Pillow's.
        max_scans: refuse a JPEG of more scans, by its markers (500 scans in 5 KB cost seconds of CPU time); None for no
            limit.

    Raises:
        TypeError: `exif` is not a bool, or a limit not an int.
        ValueError: a limit is below 1.

    Example:
        >>> Decode(exif=True, max_scans=100)
        Decode(exif=True, max_pixels=178956970, max_scans=100)
    """

    exif: bool = False
    max_pixels: int | None = 178_956_970
    max_scans: int | None = 256

    def __post_init__(self) -> None:
        if not isinstance(self.exif, bool):
            raise TypeError(f"Decode(exif=…) must be True or False, got {self.exif!r}")
        for name in ("max_pixels", "max_scans"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if not isinstance(limit, int) or isinstance(limit, bool):
                raise TypeError(f"Decode({name}=…) must be an int or None, got {limit!r}")
            if limit < 1:
                raise ValueError(f"Decode({name}=…) must be at least 1, or None for no limit, got {limit}")
