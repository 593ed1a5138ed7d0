"""nvImageCodec as the device's decoder: on a GPU its JPEG engine, then its other decoders; on the CPU its CPU decoder.

On a GPU there are two, one after the other: one that only has the JPEG engine, and one without it, for what that
refuses. Given both at once, the library would share a batch among them by how many images it has, so pixels would
depend on the batch; this way they depend on the image alone, and it is known who decoded it. Each is tried at the start
with a small picture, and one that fails or gives something else is left out.

On the CPU, libjpeg's messages count as in `gpuload.decode.jpeg`: an image about which one is printed is refused. Who of
several images it was about is found out by halves.

Regions are decoded alone by those decoders that do it right: the CPU's does, and `gpuload.stage.decode.regions` says it
of others. An image's region goes to no other part of the library than the whole would, so the rest above is unchanged.

Images stay in memory of the library's own until the next call. EXIF's orientation is not applied here.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.decode.jpeg import NV_MAX_BYTES, check_version, columns
from gpuload.decode.native_messages import listen
from gpuload.stage import device as devices
from gpuload.stage.decode.backend import NoRoom, Pixels, Refused, Source
from gpuload.stage.decode.trial import complaint_about

__all__ = ["CPU", "ENGINE", "GPU", "OUT_OF_MEMORY", "SHARED_POOL", "NvImageCodec", "load_library"]

ENGINE: Final = "nvImageCodec (JPEG engine)"
GPU: Final = "nvImageCodec (GPU)"
CPU: Final = "nvImageCodec (batch)"
VERBOSITY: Final = "PYNVIMGCODEC_VERBOSITY"
# The chroma planes are enlarged as libjpeg does it, which all decoders of the CPU are; the default repeats pixels.
OPTIONS: Final = ":fancy_upsampling=1"
# The engine writes when it is called, and what torch frees in the order of some stream comes to it at once.
SHARED_POOL: Final = "it would write to memory that torch's allocator cudaMallocAsync takes back while it is still read"
OUT_OF_MEMORY: Final = ("out of memory", "out_of_memory", "bad_alloc", "allocation", "allocator")
Box = tuple[int, int, int, int]  # top, left, bottom, right


def load_library() -> Any:
    """The module; ImportError says why there is none, or that it is too old: of versions before 0.8 a tensor outlives
    the memory of its image."""
    before = os.environ.get(VERBOSITY)
    os.environ[VERBOSITY] = "0"  # read once, at the import: else C++ prints errors past the C library's stderr
    try:
        library: Any = importlib.import_module("nvidia.nvimgcodec")
    finally:
        if before is None:
            del os.environ[VERBOSITY]
        else:
            os.environ[VERBOSITY] = before
    check_version(library)
    return library


class NvImageCodec:
    """Decodes on one device.

    Args:
        device: where.
        threads: of the CPU that it may use.
        library: the module ``nvidia.nvimgcodec``.
        no_regions: why a decoder, by its name, is not to be used for regions; "" if it is. Called for those that work.
        only: the name of the decoder that is used alone; "": all.

    Raises:
        RuntimeError: none of its decoders works here; the text says what each complained about.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        library: Any,
        *,
        no_regions: Callable[[str], str] = lambda name: "",
        only: str = "",
    ) -> None:
        self._device, self._library = device, library
        kinds = library.BackendKind
        wanted = {CPU: [kinds.CPU_ONLY]}
        if device.type != "cpu":
            wanted = {ENGINE: [kinds.HW_GPU_ONLY], GPU: [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]}
        missing: dict[str, str] = {}
        if ENGINE in wanted and devices.shares_its_memory(device):
            del wanted[ENGINE]
            missing[ENGINE] = SHARED_POOL
        self._params = {
            grey: library.DecodeParams(
                apply_exif_orientation=False,
                color_spec=library.ColorSpec.GRAY if grey else library.ColorSpec.SRGB,
            )
            for grey in (False, True)
        }
        self.takes_freed_memory = False  # its memory is its own
        self._decoders: dict[str, Any] = {}
        self._images: list[Any] = []
        self._whole: set[str] = set()  # the decoders without regions
        for name, backends in wanted.items():
            if only not in ("", name):
                continue
            made, said = listen(self._make, backends, threads)
            complaint = said or "it cannot be made"
            if made is not None:
                complaint = complaint_about(functools.partial(self._run, name, made))
            if complaint:
                missing[name] = complaint
            else:
                self._decoders[name] = made
        if not self._decoders:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in missing.items()))
        self.names = tuple(self._decoders)
        notes = [f"no JPEG engine: {missing[ENGINE]}"] if ENGINE in missing else []
        for name in self.names:
            if why := no_regions(name):
                self._whole.add(name)
                notes.append(f"{name} decodes whole images: {why}")
        self.note, self.regions = "; ".join(notes), not self._whole

    def _make(self, kinds: list[Any], threads: int) -> Any:
        library = self._library
        here = library.NVIMGCODEC_DEVICE_CPU_ONLY if self._device.type == "cpu" else self._device.index
        backends = [library.Backend(kind) for kind in kinds]
        return library.Decoder(device_id=here, max_num_cpu_threads=threads, backends=backends, options=OPTIONS)

    def decode(self, sources: Sequence[Source]) -> list[Pixels | Refused]:
        found: list[Pixels | Refused] = [Refused("")] * len(sources)
        self._images = []
        rest = list(range(len(sources)))
        for name, decoder in self._decoders.items():
            for grey in (False, True):
                rows = [row for row in rest if sources[row].grey is grey]
                if rows:
                    made = self._run(name, decoder, [sources[row] for row in rows])
                    for row, one in zip(rows, made, strict=True):
                        found[row] = one
            rest = [row for row in rest if isinstance(found[row], Refused)]
            if not rest:
                break
        return found

    def close(self) -> None:
        self._images, self._decoders = [], {}

    def _run(self, name: str, decoder: Any, sources: Sequence[Source]) -> list[Pixels | Refused]:
        """Decode images of one kind of colour with one decoder."""
        boxes = [_box(source) if source.partial and name not in self._whole else None for source in sources]
        images, said = listen(self._call, decoder, sources, boxes)
        if images is None and any(words in said.lower() for words in OUT_OF_MEMORY):
            raise NoRoom(said)
        if images is not None and self._device.type != "cpu":
            said = ""  # it is about no image: these are refused without a word
        if said and (middle := len(sources) // 2):
            return [one for half in (sources[:middle], sources[middle:]) for one in self._run(name, decoder, half)]
        if images is None or said:
            return [Refused(said or "it gave no image and no reason")] * len(sources)
        found: list[Pixels | Refused] = []
        for source, box, image in zip(sources, boxes, images, strict=True):
            if image is None:
                found.append(Refused("it gave no image and no reason"))
                continue
            self._images.append(image)
            tensor = torch.from_numpy(np.asarray(image)) if self._device.type == "cpu" else torch.from_dlpack(image)
            top, start, bottom, stop = box or (0, 0, source.height, source.width)
            if tuple(tensor.shape) != (bottom - top, stop - start, 1 if source.grey else 3):
                found.append(Refused(f"the header says {source.height}×{source.width} pixels, it decodes others"))
            elif box is None:
                found.append(Pixels(tensor, name))
            else:
                left = source.region_tlhw[1] - start
                found.append(Pixels(tensor[:, left : left + source.region_tlhw[3]], name, whole=False))
        return found

    def _call(self, decoder: Any, sources: Sequence[Source], boxes: Sequence[Box | None]) -> list[Any]:
        large = any(source.nbytes >= NV_MAX_BYTES for source in sources) and self._device.type == "cpu"
        if large:
            raise ValueError("an image is beyond its limit")
        stream = 0 if self._device.type == "cpu" else torch.cuda.current_stream(self._device).cuda_stream
        codes = [self._stream(source, box) for source, box in zip(sources, boxes, strict=True)]
        return decoder.decode(codes, params=self._params[sources[0].grey], cuda_stream=stream)

    def _stream(self, source: Source, box: Box | None) -> Any:
        code = self._library.CodeStream(source.data)
        if box is None:
            return code
        if (code.height, code.width) != (source.height, source.width):  # beyond the image, it would be filled
            raise ValueError(f"the header says {source.height}×{source.width} pixels, it finds others")
        return code.get_sub_code_stream(region=self._library.Region(*box))


def _box(source: Source) -> Box:
    """What is decoded for a source's region."""
    top, left, height, width = source.region_tlhw
    start, stop = columns(left, width, source.width)
    return top, start, top + height, stop
