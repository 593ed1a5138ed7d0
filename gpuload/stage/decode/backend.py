"""What a decoder on a device takes and gives: files, and regions of pixels or the reason why not. It knows nothing of
batches and faults, which belong to `gpuload.stage.decode.images`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from gpuload.decode.header import upright

__all__ = ["PLACE", "NoRoom", "Pixels", "Refused", "Source", "complaint_about", "copy_crops", "fetch"]

# Where a region is to be: its upright shape H×W×C, the orientation of EXIF that is undone, its first byte.
PLACE: Final = np.dtype([("shape", "i8", 3), ("orientation", "i8"), ("start", "i8")])
MAX_LEVELS: Final = 4.0  # by which two decoders may differ on average: more is another picture


class NoRoom(Exception):
    """The device has no memory for these images together; fewer at a time may fit."""


class Source(NamedTuple):
    """An image to decode.

    Attributes:
        data: the file's bytes, uint8; valid while it is decoded.
        height, width: as stored.
        grey: to one channel, not three.
        region_tlhw: the part of the image that is wanted, as stored.
    """

    data: np.ndarray
    height: int
    width: int
    grey: bool
    region_tlhw: Sequence[int]


class Pixels(NamedTuple):
    """The wanted region of an image, decoded, as stored. On a device it can be read on the stream that was current.

    Attributes:
        owner: what keeps the memory, which is not written to again while the owner lives. On the CPU the region itself,
            an array H×W×C of uint8.
        decoder: which decoder it was, as `Stats.decoders` names it.
        address, row_bytes: on a device, where the region's first pixel is, and how far apart two rows are.
    """

    owner: Any
    decoder: str
    address: int = 0
    row_bytes: int = 0


class Refused(NamedTuple):
    """Why an image was not decoded: in the decoder's words, if it has any."""

    why: str


def copy_crops(pixels: Sequence[Pixels], places: np.ndarray, target: torch.Tensor) -> None:
    """Copy regions to their places, `PLACE` (N,), in one memory, uint8, each turned upright. On a device that is one
    kernel, on the current stream; the owners have to live until it is done."""
    if target.device.type != "cpu":
        from gpuload.stage.decode.crops import launch  # Triton is an optional library, and slow to import

        launch(pixels, places, target)
        return
    memory = target.numpy()
    for (region, _, _, _), (shape, orientation, start) in zip(pixels, places.tolist(), strict=True):
        place = memory[start : start + region.size].reshape(shape)
        place[:] = region if orientation == 1 else upright(region, orientation)


def fetch(pixels: Pixels, source: Source, device: torch.device) -> np.ndarray:
    """Return a decoded region on the host, H×W×C, as stored."""
    shape = (*source.region_tlhw[2:], 1 if source.grey else 3)
    levels = torch.empty(math.prod(shape), dtype=torch.uint8, device=device)
    copy_crops([pixels], np.array([(shape, 1, 0)], PLACE), levels)
    return levels.cpu().numpy().reshape(shape)


def complaint_about(decode: Callable[[Sequence[Source]], list[Pixels | Refused]], device: torch.device) -> str:
    """Return what is wrong with a decoder, found by a small picture that it has to decode; "" if nothing is."""
    from PIL import Image

    ramp = np.add.outer(np.arange(48) * 3, np.arange(64) * 2).astype(np.uint8)
    picture = np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=2)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=95)
    source = Source(np.frombuffer(file.getvalue(), np.uint8), 48, 64, False, (0, 0, 48, 64))
    [answer] = decode([source])
    if isinstance(answer, Refused):
        return answer.why
    difference = np.abs(fetch(answer, source, device).astype(np.float32) - np.asarray(Image.open(file))).mean()
    return "" if difference <= MAX_LEVELS else f"its picture is another one ({difference:.0f} levels away)"
