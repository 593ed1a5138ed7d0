"""nvImageCodec as the device's decoder: on a GPU its JPEG engine, then its other decoders; on the CPU its CPU decoder.

On a GPU there are two, one after the other: one that only has the JPEG engine, and one without it, for what that
refuses. Given both at once, the library would share a batch among them by how many images it has, so pixels would
depend on the batch; this way they depend on the image alone, and it is known who decoded it. Each is tried at the start
with a small picture, and one that fails or gives something else is left out.

On the CPU, libjpeg's messages count as in `gpuload.decode.jpeg`: an image about which one is printed is refused. Which
of several images it was about is found by halves.

A batch is decoded by one call, and where its images are is read from the arrays' interface: DLPack would record and
wait for an event for each. They are written on the stream that was current, and nothing else orders them.

Images stay in memory of the library's own as long as their `Pixels` live. EXIF's orientation is not applied here.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.decode.jpeg import NV_MAX_BYTES, check_version, columns
from gpuload.decode.native_messages import listen
from gpuload.stage import device as devices
from gpuload.stage.decode.backend import NoRoom, Pixels, Refused, Source, complaint_about

__all__ = ["CPU", "ENGINE", "GPU", "REGIONS_RIGHT", "NvImageCodec", "load_library"]

ENGINE: Final = "nvImageCodec (JPEG engine)"
GPU: Final = "nvImageCodec (GPU)"
CPU: Final = "nvImageCodec (batch)"
# The versions that were seen to decode a region to the bits of that part of the whole image, by decoder; others decode
# whole images. `gpuload doctor` tries it in a process of its own. A version gets in once that was right on several
# kinds of GPUs and no report says otherwise. On GPUs 0.9.0 is not in: a region was refused once, on an H200, and
# https://github.com/NVIDIA/nvImageCodec/issues/55 has it fail, or end the process.
REGIONS_RIGHT: Final[Mapping[str, tuple[str, ...]]] = {CPU: ("0.9.0",), ENGINE: (), GPU: ()}
VERBOSITY: Final = "PYNVIMGCODEC_VERBOSITY"
# The chroma planes are enlarged as libjpeg does it, which all decoders of the CPU are; the default repeats pixels.
OPTIONS: Final = ":fancy_upsampling=1"
# The engine writes when it is called, and what others free to CUDA's pool in the order of a stream comes to it at once.
DALIS_POOL: Final = "DALI_USE_CUDA_MALLOC_ASYNC"
SHARED_POOL: Final = "it would write to memory that {} takes back while it is still read"
OUT_OF_MEMORY: Final = ("out of memory", "out_of_memory", "bad_alloc", "allocation", "allocator")
NOTHING: Final = Refused("it gave no image and no reason")
Box = tuple[int, int, int, int]  # top, left, bottom, right


def load_library() -> Any:
    """Return the module; ImportError says why there is none, or that it is too old."""
    before = os.environ.get(VERBOSITY)
    os.environ[VERBOSITY] = "0"  # read once, at the import: else C++ prints errors past the C library's stderr
    try:
        library: Any = importlib.import_module("nvidia.nvimgcodec")
    finally:
        del os.environ[VERBOSITY]
        if before is not None:
            os.environ[VERBOSITY] = before
    check_version(library)
    return library


class NvImageCodec:
    """Decodes on one device, on its current stream, from one thread.

    Args:
        device: where.
        threads: of the CPU that it may use.
        library: the module ``nvidia.nvimgcodec``.
        regions_right: see `REGIONS_RIGHT`.
        only: the name of the decoder that is used alone; "": all.

    Attributes:
        names: its decoders, as `Stats.decoders` names them, in the order in which they try.
        note: what a user should know of them; else "".
        regions: memory is taken for regions alone; else, for some images at least, for the whole image.

    Raises:
        RuntimeError: none of its decoders works here; the text says what each complained about.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        library: Any,
        *,
        regions_right: Mapping[str, Sequence[str]] = REGIONS_RIGHT,
        only: str = "",
    ) -> None:
        self._library, self._device, self._on_cpu = library, device, device.type == "cpu"
        kinds = library.BackendKind
        wanted = {CPU: [kinds.CPU_ONLY]}
        missing: dict[str, str] = {}
        if not self._on_cpu:
            wanted = {ENGINE: [kinds.HW_GPU_ONLY], GPU: [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]}
            if whose := _shared_pool(device):
                del wanted[ENGINE]
                missing[ENGINE] = SHARED_POOL.format(whose)
        self._params = {
            grey: library.DecodeParams(
                apply_exif_orientation=False,
                color_spec=library.ColorSpec.GRAY if grey else library.ColorSpec.SRGB,
            )
            for grey in (False, True)
        }
        self._with_regions = {name for name in wanted if library.__version__ in regions_right.get(name, ())}
        self._decoders: dict[str, Any] = {}
        for name, backends in wanted.items():
            if only not in ("", name):
                continue
            decoder, message = listen(self._make, backends, threads)
            complaint = message or "it cannot be made"
            if decoder is not None:
                complaint = complaint_about(functools.partial(self._run, name, decoder), device)
            if complaint:
                missing[name] = complaint
            else:
                self._decoders[name] = decoder
        if not self._decoders:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in missing.items()))
        self.names = tuple(self._decoders)
        self.regions = self._with_regions.issuperset(self.names)
        notes = [f"no JPEG engine: {missing[ENGINE]}"] if ENGINE in missing else []
        if whole := [name for name in self.names if name not in self._with_regions]:
            notes.append(f"{' and '.join(whole)} {library.__version__}: whole images")
        self.note = "; ".join(notes)

    def _make(self, kinds: list[Any], threads: int) -> Any:
        library = self._library
        here = library.NVIMGCODEC_DEVICE_CPU_ONLY if self._on_cpu else self._device.index
        backends = [library.Backend(kind) for kind in kinds]
        return library.Decoder(device_id=here, max_num_cpu_threads=threads, backends=backends, options=OPTIONS)

    def decode(self, sources: Sequence[Source]) -> list[Pixels | Refused]:
        """Return a result for each image, in their order; NoRoom if the device has no memory for all of them."""
        answers: list[Pixels | Refused] = [NOTHING] * len(sources)
        undecided = list(range(len(sources)))
        for name, decoder in self._decoders.items():
            for grey in (False, True):
                rows = [row for row in undecided if sources[row].grey is grey]
                if rows:
                    for row, one in zip(rows, self._run(name, decoder, [sources[row] for row in rows]), strict=True):
                        answers[row] = one
            undecided = [row for row in undecided if type(answers[row]) is Refused]
            if not undecided:
                break
        return answers

    def close(self) -> None:
        """Give memory back."""
        self._decoders = {}

    def _run(self, name: str, decoder: Any, sources: Sequence[Source]) -> list[Pixels | Refused]:
        """Decode images of one kind of colour with one decoder."""
        boxes = [_box(source) if name in self._with_regions else None for source in sources]
        images, message = listen(self._call, decoder, sources, boxes)
        if images is None and any(words in message.lower() for words in OUT_OF_MEMORY):
            raise NoRoom(message)
        if images is not None and not self._on_cpu:
            message = ""  # it is about no image: these are refused without a word
        if message and (middle := len(sources) // 2):
            return [one for half in (sources[:middle], sources[middle:]) for one in self._run(name, decoder, half)]
        if images is None or message:
            return [Refused(message) if message else NOTHING] * len(sources)
        return [
            NOTHING if image is None else self._pixels(name, source, box, image)
            for source, box, image in zip(sources, boxes, images, strict=True)
        ]

    def _call(self, decoder: Any, sources: Sequence[Source], boxes: Sequence[Box | None]) -> list[Any]:
        stream, channels = 0, 1 if sources[0].grey else 3
        if not self._on_cpu:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        elif any(source.height * source.width * channels >= NV_MAX_BYTES for source in sources):
            raise ValueError("an image is beyond its limit")
        code_stream, region = self._library.CodeStream, self._library.Region
        codes = [code_stream(source.data) for source in sources]
        for row, box in enumerate(boxes):
            if box is not None:
                code, (_, height, width, *_) = codes[row], sources[row]
                if code.height != height or code.width != width:  # beyond the image, it would be filled
                    raise ValueError(f"the header says {height}×{width} pixels, it finds others")
                codes[row] = code.get_sub_code_stream(region=region(*box))
        return decoder.decode(codes, params=self._params[sources[0].grey], cuda_stream=stream)

    def _pixels(self, name: str, source: Source, box: Box | None, image: Any) -> Pixels | Refused:
        """Find the wanted region in what was decoded: the box, or the whole image."""
        _, image_height, image_width, grey, (top, left, height, width) = source
        first_row, first_column, end_row, end_column = box or (0, 0, image_height, image_width)
        channels = 1 if grey else 3
        memory: Any = np.asarray(image) if self._on_cpu else image.__cuda_array_interface__
        shape = memory.shape if self._on_cpu else memory["shape"]
        if shape != (end_row - first_row, end_column - first_column, channels):
            return Refused(f"the header says {image_height}×{image_width} pixels, it decodes others")
        top, left = top - first_row, left - first_column
        if self._on_cpu:
            return Pixels(memory[top : top + height, left : left + width], name)
        row_bytes = memory["strides"][0] if memory.get("strides") else shape[1] * channels
        return Pixels(image, name, memory["data"][0] + top * row_bytes + left * channels, row_bytes)


def _box(source: Source) -> Box | None:
    """Return what is decoded for a source's region; None means the whole image."""
    _, image_height, image_width, _, (top, left, height, width) = source
    if height == image_height and width == image_width:
        return None
    start, stop = columns(left, width, image_width)
    return top, start, top + height, stop


def _shared_pool(device: torch.device) -> str:
    """Return whose memory comes from CUDA's own pool of a device, as nvImageCodec's does; "" if nobody's."""
    if devices.shares_its_memory(device):
        return "torch's allocator cudaMallocAsync"
    return f"DALI ({DALIS_POOL}=1)" if os.environ.get(DALIS_POOL, "0") not in ("", "0") else ""
