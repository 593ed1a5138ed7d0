"""DALI as the device's decoder: ``decoders.image``, on a GPU its backend "mixed", on the CPU its backend "cpu".

DALI has nvImageCodec built in. It raises for a whole batch if one image is bad, without saying which: that is found out
by halves, as for libjpeg's messages on the CPU, which count as in `gpuload.decode.jpeg`. On a GPU it shares a batch
among the JPEG engine and other decoders, whose levels differ, so the engine is asked to take all that it can
(`hw_decoder_load`): by default it would take some by their places in the batch. Images are decoded whole.

Results stay in DALI's memory until the next call. DALI's operators take that of each other as soon as it is freed, in
the order of the stream, which the JPEG engine does not keep: see `DeviceDecoder.takes_freed_memory`. Where DALI and
torch take memory from CUDA's own pool, it may come from any stream, and the engine is left out. EXIF's orientation is
not applied here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import torch

from gpuload.decode.jpeg import NV_MAX_BYTES
from gpuload.decode.native_messages import listen
from gpuload.stage.dali.engine import Engine, ndd, own, samples, types
from gpuload.stage.decode.backend import NoRoom, Pixels, Refused, Source
from gpuload.stage.decode.nvimagecodec import OUT_OF_MEMORY, SHARED_POOL
from gpuload.stage.decode.trial import complaint_about
from gpuload.stage.device import shares_its_memory

__all__ = ["CPU", "MIXED", "DaliDecoder"]

MIXED: Final = "DALI (mixed)"
CPU: Final = "DALI (CPU)"
CUDAS_POOL: Final = "DALI_USE_CUDA_MALLOC_ASYNC"


class DaliDecoder:
    """Decodes on one device.

    Args:
        device: where.
        threads: of the CPU that it may use.

    Raises:
        RuntimeError: it does not work here; the text says what it complained about.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._name = CPU if device.type == "cpu" else MIXED
        self._options: dict[str, Any] = {"device": "cpu"}
        if device.type != "cpu":
            shared = shares_its_memory(device) and os.environ.get(CUDAS_POOL, "0") not in ("", "0")
            self._options = {"device": "gpu", "hw_decoder_load": 0.0 if shared else 1.0}
        self._engine = Engine(device, threads)
        self._kept: list[Any] = []
        self.names, self.regions = (self._name,), False
        self.takes_freed_memory = False
        self.note = f"no JPEG engine: {SHARED_POOL}" if self._options.get("hw_decoder_load") == 0 else ""
        if complaint := complaint_about(self.decode):
            raise RuntimeError(f"{self._name}: {complaint}")

    def decode(self, sources: Sequence[Source]) -> list[Pixels | Refused]:
        found: list[Pixels | Refused] = [Refused("")] * len(sources)
        self._kept = []
        for grey in (False, True):
            rows = [row for row, source in enumerate(sources) if source.grey is grey]
            made = self._run([sources[row] for row in rows], grey)
            for row, one in zip(rows, made, strict=True):
                found[row] = one
        return found

    def close(self) -> None:
        self._kept = []
        del self._engine  # with DALI's threads and operators

    def _run(self, sources: Sequence[Source], grey: bool) -> list[Pixels | Refused]:
        """Decode images of one kind of colour."""
        if not sources:
            return []
        images, said = listen(self._call, sources, grey)
        if images is None and any(words in said.lower() for words in OUT_OF_MEMORY):
            raise NoRoom(said)
        if images is not None and not self._engine.on_cpu:
            said = ""  # as for nvImageCodec: what it refuses, it raises
        if (images is None or said) and (middle := len(sources) // 2):
            return [one for half in (sources[:middle], sources[middle:]) for one in self._run(half, grey)]
        if images is None or said:
            return [Refused(said or "it gave no image and no reason")]
        self._kept += images
        found: list[Pixels | Refused] = []
        for source, image in zip(sources, images, strict=True):
            tensor = image.torch()
            if tuple(tensor.shape) != (source.height, source.width, 1 if grey else 3):
                found.append(Refused(f"the header says {source.height}×{source.width} pixels, it decodes others"))
            else:
                found.append(Pixels(tensor, self._name))
        return found

    def _call(self, sources: Sequence[Source], grey: bool) -> list[Any]:
        if self._engine.on_cpu and any(source.nbytes >= NV_MAX_BYTES for source in sources):
            raise ValueError("an image is beyond its limit")
        with self._engine.running():
            decoded = ndd.decoders.image(
                ndd.as_batch([source.data for source in sources]),
                output_type=types.GRAY if grey else types.RGB,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,
                **self._options,
            )
            return samples(own(decoded))
