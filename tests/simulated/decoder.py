"""A decoder of a device that is not there. It does what real ones do: it refuses images, takes them in an order of its
own, has no room for many at once, and takes the memory of what it gave before for what it gives now. As a GPU's JPEG
engine does, it writes when it is called, whatever the streams still have to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch
from simulated.runtime import CURRENT

from gpuload.decode.header import scan_markers
from gpuload.decode.jpeg import SimpleJpeg
from gpuload.stage.decode import choose
from gpuload.stage.decode.backend import NoRoom, Pixels, Refused, Source

__all__ = ["ENGINE", "OTHER", "FakeDecoder", "decoding_with"]

ENGINE: Final = "fake (JPEG engine)"
OTHER: Final = "fake (GPU)"


class FakeDecoder:
    """Decodes plain JPEGs by libjpeg, which must not complain.

    Args:
        device: where the pixels go.
        refuses: says why an image is not decoded; "" for one that is.
        room_bytes: of what it gives at once.
        engine: whether it has a JPEG engine, which takes what is wider than high.
        regions: whether it gives regions alone.
        takes_freed_memory: whether it also writes to what was freed in the order of streams.

    Attributes:
        calls: the number of images of each call that had room.
        closed: whether it was closed.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        refuses: Callable[[bytes], str] = lambda data: "",
        room_bytes: int | None = None,
        engine: bool = True,
        regions: bool = False,
        takes_freed_memory: bool = False,
    ) -> None:
        self.names = (ENGINE, OTHER) if engine else (OTHER,)
        self.note = "" if engine else "no JPEG engine: this one has none"
        self.calls: list[int] = []
        self.closed = False
        self.regions, self.takes_freed_memory = regions, takes_freed_memory
        self._device, self._refuses, self._room_bytes = device, refuses, room_bytes
        self._given: list[torch.Tensor] = []
        self._jpeg = SimpleJpeg()

    def decode(self, sources: Sequence[Source]) -> list[Pixels | Refused]:
        assert not self.closed
        for tensor in self._given:
            if tensor.device.type == "cpu":
                tensor.fill_(0x5A)
            else:
                CURRENT[-1].spoil(tensor)
        self._given = []
        if self.takes_freed_memory and self._device.type != "cpu":
            CURRENT[-1].spoil_freed()
        sizes = [source.region_nbytes if self.regions else source.nbytes for source in sources]
        if self._room_bytes is not None and sum(sizes) > self._room_bytes:
            raise NoRoom("out of memory")
        self.calls.append(len(sources))
        found: list[Pixels | Refused] = [Refused("not reached")] * len(sources)
        for row in reversed(range(len(sources))):
            found[row] = self._one(sources[row])
        return found

    def close(self) -> None:
        self.closed = True

    def _one(self, source: Source) -> Pixels | Refused:
        data = source.data.tobytes()
        header = scan_markers(data)
        assert header is not None
        if why := self._refuses(data):
            return Refused(why)
        region = source.region_tlhw if self.regions else (0, 0, header.height, header.width)
        pixels, complaint = self._jpeg.decode(data, header, source.grey, region)
        if pixels is None:
            return Refused(complaint)
        tensor = torch.from_numpy(pixels.copy()).to(self._device)
        self._given.append(tensor)
        name = self.names[0] if source.width > source.height else self.names[-1]
        return Pixels(tensor, name, whole=not self.regions)


@contextlib.contextmanager
def decoding_with(**given: Any) -> Iterator[list[FakeDecoder]]:
    """Devices have this decoder within this; gives those that were made."""
    made: list[FakeDecoder] = []

    def find(device: torch.device, threads: int, backend: str) -> FakeDecoder:
        made.append(FakeDecoder(device, **given))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[choose.__module__], "find_decoder", find)
        yield made
