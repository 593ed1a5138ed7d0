"""What a decoder on a device is to gpuload: files in, whole images or regions out, or the reason why not. It knows
nothing of batches, crops and faults; those are `gpuload.stage.decode.images`' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

__all__ = ["DeviceDecoder", "NoRoom", "Pixels", "Refused", "Source"]


class NoRoom(Exception):
    """The device has no memory for these images together; fewer at a time may fit."""


class Source(NamedTuple):
    """An image to decode.

    Attributes:
        data: the file's bytes, uint8; valid while it is decoded.
        height, width: as stored.
        grey: to one channel, not three.
        region_tlhw: the part of it that is wanted, as stored.
    """

    data: np.ndarray
    height: int
    width: int
    grey: bool
    region_tlhw: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        """Of the whole image, decoded."""
        return self.height * self.width * (1 if self.grey else 3)

    @property
    def region_nbytes(self) -> int:
        """Of the region, decoded."""
        return self.region_tlhw[2] * self.region_tlhw[3] * (1 if self.grey else 3)

    @property
    def partial(self) -> bool:
        """Not all of the image is wanted."""
        return self.region_tlhw != (0, 0, self.height, self.width)


@dataclass(slots=True)
class Pixels:
    """A decoded image.

    Attributes:
        tensor: uint8 H×W×C on the device, as stored; valid until the next `decode`, once the current stream has come
            that far.
        decoder: which one decoded it, as `Stats.decoders` names it.
        whole: it is all of the image; else the region alone.
    """

    tensor: torch.Tensor
    decoder: str
    whole: bool = True


class Refused(NamedTuple):
    """Why an image was not decoded: in the decoder's words, if it has any."""

    why: str


class DeviceDecoder(Protocol):
    """Decodes on one device, on its current stream, from one thread.

    Attributes:
        names: the decoders that it has, as `Stats.decoders` names them, the one that tries first first.
        note: what a user should know of them; else "".
        regions: they give regions alone; if not, some or all give whole images.
        takes_freed_memory: what it writes to may be memory that others freed in the order of the current stream.
    """

    names: tuple[str, ...]
    note: str
    regions: bool
    takes_freed_memory: bool

    def decode(self, sources: Sequence[Source]) -> list[Pixels | Refused]:
        """One result for each image, in their order.

        Raises:
            NoRoom: the device has no memory for all of them.
        """
        ...

    def close(self) -> None:
        """Give memory back."""
        ...
