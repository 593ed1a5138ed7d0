"""The options of decoding: one frozen object that checks itself when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from gpuload.datasets.files import MAX_BYTES, MAX_PIXELS

__all__ = ["Decode", "Scale", "device_rows"]

Scale = Literal["exact", "fast"]
# The golden ratio as a fraction of 2³²: its multiples spread evenly, also those of every second or eighth position, as
# a rank has them.
GOLDEN: Final = 2_654_435_769
WHOLE: Final = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How encoded images become pixels.

    Args:
        where: ``"cpu"``: workers decode. ``"device"``: workers read files and headers, and the loader's device decodes
            plain JPEGs (8 bits, one scan, RGB or grey), with nvImageCodec; workers decode all other images. On a device
            that cannot decode, workers decode all of them; ``loader.plan()`` says why. ``"both"``: the device decodes a
            share of the samples, workers the others.
        device_share: with ``"both"``, and required there: the share of samples that the device decodes, above 0 and
            below 1. Which ones is a function of their positions.
        device_memory: bytes that what is decoded may take on the device before it is cropped; a batch is decoded in
            pieces that fit, and an image that alone does not fit on the CPU. The default is 1 GiB.
        scale: ``"fast"``: a JPEG whose first transform makes it less than half as large is decoded at a half, a quarter
            or an eighth of its size, the smallest that still covers the result, and resized where it is decoded,
            wherever a model of the costs says that this is less work. Draws are the same; pixels differ by a few
            levels, as docs/performance.md shows. All other images are decoded as with ``"exact"``, and so are all where
            the first transform is not a resize or crop with antialiasing; `Loader.plan` says so.
        exif: turn images upright by their EXIF (or XMP) orientation, as Pillow's ``ImageOps.exif_transpose`` does. Off
            by default, as in torchvision's ``ImageFolder``. TIFFs are upright either way: Pillow turns them itself.
        index: cut crops out of cuttable JPEGs by the index in them. False is for JPEGs from strangers: an index that
            was forged, with a right checksum, can make a crop show other pixels than the picture has there.
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
        TypeError: `exif` or `index` is not a bool, a limit not an int, or `device_share` not a number.
        ValueError: `where` or `scale` is unknown, a limit is below 1, ``where="both"`` has no `device_share` or another
            `where` has one, or ``scale="fast"`` is to be on a device, which decodes exactly.

    Example:
        >>> decode = Decode(exif=True, max_scans=100)
        >>> decode.max_scans, decode.max_pixels
        (100, 178956970)
    """

    where: Literal["cpu", "device", "both"] = "cpu"
    device_share: float | None = None
    device_memory: int = 1 << 30
    scale: Scale = "exact"
    exif: bool = False
    index: bool = True
    max_pixels: int | None = MAX_PIXELS
    max_scans: int | None = 256
    max_scan_pixels: int | None = 1 << 31
    max_bytes: int | None = MAX_BYTES
    max_memory: int | None = 2 << 30

    def __post_init__(self) -> None:
        for name in ("exif", "index"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"Decode({name}=…) must be True or False, got {value!r}")
        self._check_where()
        if self.scale not in get_args(Scale):
            raise ValueError(f"Decode(scale=…) must be 'exact' or 'fast', got {self.scale!r}")
        if self.scale == "fast" and self.where != "cpu":
            raise ValueError(
                f"Decode(scale='fast') is how workers decode: it needs where='cpu', got where={self.where!r}"
            )
        for name in ("max_pixels", "max_scans", "max_scan_pixels", "max_bytes", "max_memory", "device_memory"):
            limit, optional = getattr(self, name), name != "device_memory"
            if limit is None and optional:
                continue
            none = ", or None for no limit" * optional
            if not isinstance(limit, int) or isinstance(limit, bool):
                raise TypeError(f"Decode({name}=…) must be an int{' or None' * optional}, got {limit!r}")
            if limit < 1:
                raise ValueError(f"Decode({name}=…) must be at least 1{none}, got {limit}")

    def _check_where(self) -> None:
        share: Any = self.device_share
        if self.where not in ("cpu", "device", "both"):
            raise ValueError(f"Decode(where=…) must be 'cpu', 'device' or 'both', got {self.where!r}")
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
            raise TypeError(f"Decode(device_share=…) must be a number above 0 and below 1, got {share!r}")
        if share is not None and not 0 < share < 1:
            raise ValueError(
                f"Decode(device_share=…) must be above 0 and below 1, got {share}; where='cpu' and where='device' "
                "decode all in one place"
            )
        if share is not None and self.where != "both":
            raise ValueError(
                f"Decode(device_share={share}) needs where='both', got where={self.where!r}: only there a share is "
                "decoded on the device"
            )
        if share is None and self.where == "both":
            raise ValueError(
                "Decode(where='both') needs device_share=…, the share of the samples that the device decodes: device / "
                "(device + workers), two rates in images/s. That of the workers is the row 'decode' with all of them "
                "in `gpuload bench DATA`; that of the device is in the first line of print(loader.stats()) after an "
                "epoch with Decode(where='device') in a loop that does nothing else"
            )


def device_rows(positions: np.ndarray, share: float) -> np.ndarray:
    """Return which of the samples at these positions the device decodes, bool: a function of each position alone.

    Example:
        >>> device_rows(np.arange(8), 0.5).tolist()
        [True, False, True, False, True, True, False, True]
    """
    spread = (positions.astype(np.uint64) * np.uint64(GOLDEN)) % np.uint64(WHOLE)
    return spread < np.uint64(round(share * WHOLE))
