"""nvImageCodec as the decoder of a device: the JPEG engine and other decoders of a GPU, or the CPU decoder.

On a GPU, two decoders are called one after the other: the first uses only the JPEG engine; the second, without the
engine, decodes the images that the first decoder refuses. A single decoder with both would split a batch according to
its size, so pixels would depend on the batch. With two decoders, pixels depend only on the image, and it is known which
decoder produced them. Each decoder is tested at the start with a small image, and is not used if it fails or returns
wrong pixels.

On the CPU, libjpeg's messages are treated as in `gpuload.decode.jpeg`: an image that causes a message is refused. In a
batch, that image is found by bisection.

A batch is decoded with one call. Addresses of images are read from `__cuda_array_interface__`, because DLPack would
record an event and wait for it for each image. Writes are ordered only on the stream that is current during the call.

Images stay in the library's memory as long as their `Pixels` are alive. EXIF orientation is not applied here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.decode.jpeg import NV_MAX_BYTES, columns_to_decode, decode_params
from gpuload.decode.native_messages import run_and_capture, run_and_describe
from gpuload.stage import device as devices
from gpuload.stage.decode.backend import EncodedRegion, OutOfDeviceMemory, Pixels, Refusal, run_self_test

__all__ = ["CPU", "ENGINE", "EXACT_REGION_VERSIONS", "GPU", "NvImageCodec"]

ENGINE: Final = "nvImageCodec (JPEG engine)"
GPU: Final = "nvImageCodec (GPU)"
CPU: Final = "nvImageCodec (batch)"
# For each decoder, the versions that decode a region to exactly the same pixels as the entire image; with other
# versions, entire images are decoded. `gpuload doctor` tests this in a separate process. A version is added when it has
# passed this test on different GPU models and has no reported bugs. 0.9.0 is not listed for GPUs: an H200 once refused
# a region, and https://github.com/NVIDIA/nvImageCodec/issues/55 reports errors and crashes.
EXACT_REGION_VERSIONS: Final[Mapping[str, tuple[str, ...]]] = {CPU: ("0.9.0",), ENGINE: (), GPU: ()}
# Upsample the chroma planes as libjpeg, on which all CPU decoders are based, does; the default repeats pixels.
OPTIONS: Final = ":fancy_upsampling=1"
# The engine writes immediately, not in stream order, so it must not use memory that other libraries free in stream
# order.
DALI_POOL: Final = "DALI_USE_CUDA_MALLOC_ASYNC"
SHARED_POOL: Final = "the engine could write to memory that {} has freed but another stream still reads"
OUT_OF_MEMORY: Final = ("out of memory", "out_of_memory", "bad_alloc", "allocation", "allocator")
NO_REASON: Final = Refusal("it returned no image and no reason")
Box = tuple[int, int, int, int]  # top, left, bottom, right


class NvImageCodec:
    """A decoder of batches on the current stream of one device, for use by one thread.

    Args:
        device: the device that decodes.
        threads: the number of CPU threads that the library may use.
        library: the module ``nvidia.nvimgcodec``.
        exact_versions: see `EXACT_REGION_VERSIONS`.
        only: the name of the only decoder to use; "" for all decoders.

    Attributes:
        names: the names of the decoders in `Stats.decode.counts`, in the order in which the decoders are called.
        note: a note about the decoders for the user, or "".
        decodes_regions: whether every decoder decodes only regions; if False, some images are decoded completely and
            need memory for all of their pixels.

    Raises:
        RuntimeError: no decoder works here; the message gives the reason for each.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        library: Any,
        *,
        exact_versions: Mapping[str, Sequence[str]] = EXACT_REGION_VERSIONS,
        only: str = "",
    ) -> None:
        self._library, self._device, self._on_cpu = library, device, device.type == "cpu"
        kinds = library.BackendKind
        kinds_by_decoder = {CPU: [kinds.CPU_ONLY]}
        errors: dict[str, str] = {}
        if not self._on_cpu:
            kinds_by_decoder = {ENGINE: [kinds.HW_GPU_ONLY], GPU: [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]}
            if pool_user := _shared_pool_user(device):
                del kinds_by_decoder[ENGINE]
                errors[ENGINE] = SHARED_POOL.format(pool_user)
        self._params = decode_params(library)
        self._region_decoders = {
            name for name in kinds_by_decoder if library.__version__ in exact_versions.get(name, ())
        }
        self._decoders: dict[str, Any] = {}
        for name, backends in kinds_by_decoder.items():
            if only not in ("", name):
                continue
            decoder, message = run_and_capture(self._make_decoder, backends, threads)
            error = message or "the decoder could not be created"
            if decoder is not None:
                error = run_self_test(functools.partial(self._decode_with, name, decoder), device)
            if error:
                errors[name] = error
            else:
                self._decoders[name] = decoder
        if not self._decoders:
            raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in errors.items()))
        self.names = tuple(self._decoders)
        self.decodes_regions = self._region_decoders.issuperset(self.names)
        notes = [f"no JPEG engine: {errors[ENGINE]}"] if ENGINE in errors else []
        if without_regions := [name for name in self.names if name not in self._region_decoders]:
            notes.append(f"{' and '.join(without_regions)} {library.__version__} decodes entire images, not regions")
        self.note = "; ".join(notes)

    def _make_decoder(self, backend_kinds: list[Any], threads: int) -> Any:
        library = self._library
        device_id = library.NVIMGCODEC_DEVICE_CPU_ONLY if self._on_cpu else self._device.index
        backends = [library.Backend(kind) for kind in backend_kinds]
        return library.Decoder(device_id=device_id, max_num_cpu_threads=threads, backends=backends, options=OPTIONS)

    def decode(self, sources: Sequence[EncodedRegion]) -> list[Pixels | Refusal]:
        """Return a result for each image, in order; raise OutOfDeviceMemory if the device does not have enough memory
        for all of them."""
        results: list[Pixels | Refusal] = [NO_REASON] * len(sources)
        pending_rows = list(range(len(sources)))
        for name, decoder in self._decoders.items():
            for grey in (False, True):
                rows = [row for row in pending_rows if sources[row].grey is grey]
                if rows:
                    for row, result in zip(
                        rows, self._decode_with(name, decoder, [sources[row] for row in rows]), strict=True
                    ):
                        results[row] = result
            pending_rows = [row for row in pending_rows if type(results[row]) is Refusal]
            if not pending_rows:
                break
        return results

    def close(self) -> None:
        """Free the memory of the decoders."""
        self._decoders = {}

    def _decode_with(self, name: str, decoder: object, sources: Sequence[EncodedRegion]) -> list[Pixels | Refusal]:
        """Decode images, all grey or all in colour, with one decoder."""
        boxes = [_box(source) if name in self._region_decoders else None for source in sources]
        # On a GPU, no image is refused with a message, and capturing messages would make threads wait for each other.
        run = run_and_capture if self._on_cpu else run_and_describe
        images, message = run(self._decode_batch, decoder, sources, boxes)
        if images is None and any(words in message.lower() for words in OUT_OF_MEMORY):
            raise OutOfDeviceMemory(message)
        if message and (middle := len(sources) // 2):
            return self._decode_with(name, decoder, sources[:middle]) + self._decode_with(
                name, decoder, sources[middle:]
            )
        if images is None or message:
            return [Refusal(message) if message else NO_REASON] * len(sources)
        return [
            NO_REASON if image is None else self._extract_pixels(name, source, box, image)
            for source, box, image in zip(sources, boxes, images, strict=True)
        ]

    def _decode_batch(self, decoder: Any, sources: Sequence[EncodedRegion], boxes: Sequence[Box | None]) -> list[Any]:
        stream, channels = 0, 1 if sources[0].grey else 3
        if not self._on_cpu:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        elif any(source.height * source.width * channels >= NV_MAX_BYTES for source in sources):
            raise ValueError("an image exceeds the size limit of nvImageCodec")
        open_stream, region = self._library.CodeStream, self._library.Region
        code_streams = [open_stream(source.data) for source in sources]
        for row, box in enumerate(boxes):
            if box is not None:
                code_stream, (_, height, width, *_) = code_streams[row], sources[row]
                if (
                    code_stream.height != height or code_stream.width != width
                ):  # pixels outside the image would be padding
                    raise ValueError(f"the header says {height}×{width} pixels, but nvImageCodec reads another size")
                code_streams[row] = code_stream.get_sub_code_stream(region=region(*box))
        return decoder.decode(code_streams, params=self._params[sources[0].grey], cuda_stream=stream)

    def _extract_pixels(self, name: str, source: EncodedRegion, box: Box | None, image: Any) -> Pixels | Refusal:
        """Return a source's region from the decoded image, which covers the box or, without a box, the entire image."""
        _, image_height, image_width, grey, (top, left, height, width) = source
        first_row, first_column, end_row, end_column = box or (0, 0, image_height, image_width)
        channels = 1 if grey else 3
        memory: Any = np.asarray(image) if self._on_cpu else image.__cuda_array_interface__
        shape = memory.shape if self._on_cpu else memory["shape"]
        if shape != (end_row - first_row, end_column - first_column, channels):
            return Refusal(
                f"the header says {image_height}×{image_width} pixels, but the decoded image has another size"
            )
        top, left = top - first_row, left - first_column
        if self._on_cpu:
            return Pixels(memory[top : top + height, left : left + width], name)
        row_bytes = memory["strides"][0] if memory.get("strides") else shape[1] * channels
        return Pixels(image, name, memory["data"][0] + top * row_bytes + left * channels, row_bytes)


def _box(source: EncodedRegion) -> Box | None:
    """Return the box to decode for a source's region, or None to decode the entire image."""
    _, image_height, image_width, _, (top, left, height, width) = source
    if height == image_height and width == image_width:
        return None
    start, stop = columns_to_decode(left, width, image_width)
    return top, start, top + height, stop


def _shared_pool_user(device: torch.device) -> str:
    """Return the name of the library that shares a device's CUDA memory pool with nvImageCodec; "" if there is none."""
    if devices.shares_memory_pool(device):
        return "torch's allocator cudaMallocAsync"
    return f"DALI ({DALI_POOL}=1)" if os.environ.get(DALI_POOL, "0") not in ("", "0") else ""
