"""A decoder of the simulated device. Like a real one, it refuses images, decodes them in its own order, runs out of
memory for large calls, and reuses memory whose owner was collected. Like a GPU's JPEG engine, it writes as soon as it
is called, regardless of the streams."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from gpuload.decode.header import scan_markers
from gpuload.decode.jpeg import SimpleJpeg
from gpuload.stage.decode import choose
from gpuload.stage.decode.backend import EncodedRegion, OutOfDeviceMemory, Pixels, Refusal

__all__ = ["ENGINE", "FALLBACK", "FakeDecoder", "decoding_with"]

ENGINE: Final = "fake (JPEG engine)"
FALLBACK: Final = "fake (GPU)"  # decodes the images that the engine does not


class Owner(np.ndarray):
    """A region in the decoder's memory, on the host, where kernels are interpreted."""


class FakeDecoder:
    """A decoder of plain JPEG files, by libjpeg.

    Args:
        refuses: returns why an image is not decoded, or "".
        room_bytes: how many bytes one call can return.
        engine: whether there is a JPEG engine, which decodes images that are wider than high.
        regions: whether to decode only regions.
        before: called before each call.

    Attributes:
        calls: the number of images of each call that fit into memory.
        closed: whether the decoder was closed.
    """

    def __init__(
        self,
        *,
        refuses: Callable[[bytes], str] = lambda data: "",
        room_bytes: int | None = None,
        engine: bool = True,
        regions: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.names = (ENGINE, FALLBACK) if engine else (FALLBACK,)
        self.note = "" if engine else "no JPEG engine: this one has none"
        self.calls: list[int] = []
        self.closed = False
        self.decodes_regions = regions
        self._before = before
        self._refuses, self._room_bytes = refuses, room_bytes
        self._decoded: list[tuple[np.ndarray, weakref.ref[Owner]]] = []
        self._jpeg = SimpleJpeg()

    def decode(self, sources: Sequence[EncodedRegion]) -> list[Pixels | Refusal]:
        assert not self.closed
        self._before()
        for memory, owner in self._decoded:
            if owner() is None:
                memory.fill(0x5A)
        sizes = [(source.region_tlhw[2:] if self.decodes_regions else source[1:3], source.grey) for source in sources]
        nbytes = sum(height * width * (1 if grey else 3) for (height, width), grey in sizes)
        if self._room_bytes is not None and nbytes > self._room_bytes:
            raise OutOfDeviceMemory("out of memory")
        self.calls.append(len(sources))
        results: list[Pixels | Refusal] = [Refusal("not reached")] * len(sources)
        for row in reversed(range(len(sources))):
            results[row] = self._decode_one(sources[row])
        return results

    def close(self) -> None:
        self.closed = True

    def _decode_one(self, source: EncodedRegion) -> Pixels | Refusal:
        data = source.data.tobytes()
        header = scan_markers(data)
        assert header is not None
        if reason := self._refuses(data):
            return Refusal(reason)
        region = source.region_tlhw if self.decodes_regions else (0, 0, header.height, header.width)
        pixels, message = self._jpeg.decode(data, header, source.grey, region)
        if pixels is None:
            return Refusal(message)
        name = self.names[0] if source.width > source.height else self.names[-1]
        top, left, height, width = source.region_tlhw
        if self.decodes_regions:
            top = left = 0
        memory = pixels.copy()
        owner = memory[top : top + height, left : left + width].view(Owner)
        self._decoded.append((memory, weakref.ref(owner)))
        return Pixels(owner, name, owner.ctypes.data, memory.strides[0])


@contextlib.contextmanager
def decoding_with(**arguments: Any) -> Iterator[list[FakeDecoder]]:
    """Replace the decoder of devices within a context; yield the list of decoders created."""
    decoders: list[FakeDecoder] = []

    def find(device: torch.device, threads: int) -> FakeDecoder:
        decoders.append(FakeDecoder(**arguments))
        return decoders[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[choose.__module__], "find_decoder", find)
        yield decoders
