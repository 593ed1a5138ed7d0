"""The decoding options: one frozen object that validates itself at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from gpuload.checks import argument, check_fields, finite_number, flag, integer, one_of
from gpuload.datasets.files import MAX_BYTES, MAX_PIXELS

__all__ = ["Decode", "Scale", "select_device_samples"]

Scale = Literal["exact", "fast"]
# The golden ratio as a fraction of 2³². Its multiples modulo 2³² are evenly spread, also over every second or eighth
# position. This matters because each rank gets such a subset of the positions.
GOLDEN: Final = 2_654_435_769
RANGE: Final = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Options for decoding images.

    Args:
        where: where images are decoded. ``"cpu"``: in the workers. ``"device"``: the workers read files and headers,
            the loader's device decodes plain JPEGs (8 bits, one scan, RGB or grey) with nvImageCodec, and the workers
            decode all other images. If the device cannot decode, the workers decode all images, and ``loader.plan()``
            gives the reason. ``"both"``: the device decodes a share of the samples and the workers decode the rest.
        device_share: the share of samples that the device decodes; above 0 and below 1. Required with
            ``where="both"``. The position of a sample determines whether the device decodes it.
        device_memory: the maximum number of bytes on the device for decoded images that are not yet cropped. A batch is
            decoded in pieces that fit; an image that does not fit on its own is decoded on the CPU. The default is 1
            GiB.
        scale: with ``"fast"``, a JPEG that the first transform shrinks to less than half is decoded at a half, a
            quarter or an eighth of its size and resized in the worker. gpuload chooses the smallest size that still
            covers the result, and does this only if a cost model predicts less work. Random parameters are the same;
            pixel values (0–255) differ by a few units, as docs/performance.md shows. All other images are decoded as
            with ``"exact"``, and so are all images if the first transform is not a resize or crop with antialiasing;
            `Loader.plan` reports this.
        exif: turn all images upright by their EXIF (or XMP) orientation, as Pillow's ``ImageOps.exif_transpose`` does,
            or, with False, none. By default, as the dataset says (`Encoded.exif`): off, as in torchvision's
            ``ImageFolder``, except for Hugging Face's images. TIFFs are always upright, because Pillow turns them.
        index: use the index in cuttable JPEGs to cut out crops. Set it to False for JPEGs from untrusted sources: a
            forged index with a valid checksum can make a crop show the wrong pixels.
        max_pixels: refuse an image with more pixels according to its header, before memory is allocated. None means no
            limit, except for Pillow's own limit for WebP. The default is Pillow's limit.
        max_scans: refuse a JPEG with more scans, which are counted by their markers (500 scans in 5 KB cost seconds of
            CPU time). None means no limit.
        max_scan_pixels: refuse a JPEG with several scans if their number times its pixels is larger. None means no
            limit. The default is 2³¹: 12 scans of the largest image that `max_pixels` allows.
        max_bytes: refuse a larger file without reading it. This applies only to files that gpuload opens (`read`,
            `ImageFolder`, …). None means no limit. The default is 1 GiB.
        max_memory: refuse an image whose decoder would use more bytes of memory, by an estimate: 4 bytes per pixel, 12
            for progressive JPEG, 16 for WebP, 14 for AVIF, and 25 more per pixel of a JPEG 2000 tile. None means no
            limit. The default is 2 GiB.

    Raises:
        ValueError: ``where="both"`` has no `device_share`, another `where` has a `device_share`, or ``scale="fast"`` is
            combined with decoding on a device, which is exact.

    Example:
        >>> decode = Decode(exif=True, max_scans=100)
        >>> decode.max_scans, decode.max_pixels
        (100, 178956970)
    """

    where: Literal["cpu", "device", "both"] = argument(one_of, default="cpu", choices=("cpu", "device", "both"))
    device_share: float | None = argument(finite_number, default=None, above=0, below=1)
    device_memory: int = argument(integer, default=1 << 30, minimum=1)
    scale: Scale = argument(one_of, default="exact", choices=get_args(Scale))
    exif: bool | None = argument(flag, default=None)
    index: bool = argument(flag, default=True)
    max_pixels: int | None = argument(integer, default=MAX_PIXELS, optional=True, minimum=1)
    max_scans: int | None = argument(integer, default=256, optional=True, minimum=1)
    max_scan_pixels: int | None = argument(integer, default=1 << 31, optional=True, minimum=1)
    max_bytes: int | None = argument(integer, default=MAX_BYTES, optional=True, minimum=1)
    max_memory: int | None = argument(integer, default=2 << 30, optional=True, minimum=1)

    def __post_init__(self) -> None:
        check_fields(self, "Decode")
        if self.scale == "fast" and self.where != "cpu":
            raise ValueError(
                f"Decode(scale='fast') applies only to workers: it needs where='cpu', got where={self.where!r}"
            )
        if self.device_share is not None and self.where != "both":
            raise ValueError(
                f"Decode(device_share={self.device_share}) needs where='both', got where={self.where!r}: pass "
                "where='both' or leave out device_share"
            )
        if self.device_share is None and self.where == "both":
            raise ValueError(
                "Decode(where='both') needs device_share=…, the share of the samples that the device decodes. Compute "
                "it as device / (device + workers) from two rates in images/s. `gpuload bench DATA` shows the rate of "
                "all workers in the row 'decode'. For the rate of the device, run an epoch with Decode(where='device') "
                "in an empty loop and read the first line of print(loader.stats())"
            )


def select_device_samples(positions: np.ndarray, share: float) -> np.ndarray:
    """Return a bool array that selects the samples that the device decodes, based only on the samples' positions.

    Example:
        >>> select_device_samples(np.arange(8), 0.5).tolist()
        [True, False, True, False, True, True, False, True]
    """
    spread = (positions.astype(np.uint64) * np.uint64(GOLDEN)) % np.uint64(RANGE)
    return spread < np.uint64(round(share * RANGE))
