"""Types and helpers for a decoder on a device. A decoder takes `EncodedRegion` objects, and returns `Pixels` or a
`Refusal` for each. `gpuload.stage.decode.images` handles batches and failures."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from gpuload.decode.header import turn_upright

__all__ = [
    "DESTINATION",
    "EncodedRegion",
    "OutOfDeviceMemory",
    "Pixels",
    "Refusal",
    "copy_crops",
    "fetch",
    "run_self_test",
]

# The destination of a region: the upright H×W×C shape, the EXIF orientation to apply, and the offset of the first byte.
DESTINATION: Final = np.dtype([("shape", "i8", 3), ("orientation", "i8"), ("start", "i8")])
MAX_DIFFERENCE: Final = 4.0  # the largest mean difference in levels allowed between two decoders


class OutOfDeviceMemory(Exception):
    """The device does not have enough memory for all images of a call; fewer images may fit."""


class EncodedRegion(NamedTuple):
    """An image to decode.

    Attributes:
        data: the file's bytes, uint8; only valid until the image is decoded.
        height, width: size of the image as stored.
        grey: whether to decode to one channel instead of three.
        region_tlhw: the region to decode, in the coordinates of the image as stored.
    """

    data: np.ndarray
    height: int
    width: int
    grey: bool
    region_tlhw: Sequence[int]


class Pixels(NamedTuple):
    """The decoded region of an image, not turned upright. On a device, read it only on the stream on which it was
    decoded.

    Attributes:
        owner: an object that owns the memory, which is not reused while the owner is alive. On the CPU, the owner is
            the region itself, an H×W×C array of uint8.
        decoder: the name of the decoder in `Stats.decode.counts`.
        address, row_bytes: on a device, the address of the region's first pixel and the distance between rows.
    """

    owner: Any
    decoder: str
    address: int = 0
    row_bytes: int = 0


class Refusal(NamedTuple):
    """The reason why an image was not decoded."""

    reason: str


def copy_crops(pixels: Sequence[Pixels], destinations: np.ndarray, target: torch.Tensor) -> None:
    """Turn regions upright, and copy them into `target` (uint8) at `destinations` (N entries of dtype `DESTINATION`).
    On a device, one kernel on the current stream does this; the owners must stay alive until the kernel has
    finished."""
    if not len(pixels):
        return
    if target.device.type != "cpu":
        from gpuload.stage.decode.crops import launch  # Triton is an optional library, and slow to import

        addresses, row_bytes = np.array([(region.address, region.row_bytes) for region in pixels], np.int64).T
        launch(addresses, row_bytes, destinations, target)
        return
    memory = target.numpy()
    for (region, _, _, _), (shape, orientation, start) in zip(pixels, destinations.tolist(), strict=True):
        target_region = memory[start : start + region.size].reshape(shape)
        target_region[:] = region if orientation == 1 else turn_upright(region, orientation)


def fetch(pixels: Pixels, source: EncodedRegion, device: torch.device) -> np.ndarray:
    """Return a decoded region on the host, H×W×C, as stored."""
    shape = (*source.region_tlhw[2:], 1 if source.grey else 3)
    levels = torch.empty(math.prod(shape), dtype=torch.uint8, device=device)
    copy_crops([pixels], np.array([(shape, 1, 0)], DESTINATION), levels)
    return levels.cpu().numpy().reshape(shape)


def run_self_test(decode: Callable[[Sequence[EncodedRegion]], list[Pixels | Refusal]], device: torch.device) -> str:
    """Decode a small test image; return an error message if the result is wrong, else ""."""
    from PIL import Image

    ramp = np.add.outer(np.arange(48) * 3, np.arange(64) * 2).astype(np.uint8)
    picture = np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=2)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=95)
    source = EncodedRegion(np.frombuffer(file.getvalue(), np.uint8), 48, 64, False, (0, 0, 48, 64))
    [result] = decode([source])
    if isinstance(result, Refusal):
        return result.reason
    difference = np.abs(fetch(result, source, device).astype(np.float32) - np.asarray(Image.open(file))).mean()
    return (
        ""
        if difference <= MAX_DIFFERENCE
        else f"the decoder returned wrong pixels for a test image (mean error {difference:.0f} of 255); update or "
        "reinstall it"
    )
