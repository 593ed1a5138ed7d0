"""A stand-in for nvImageCodec's module, whose decoders are Python functions, and a simulated GPU to run them on."""

from __future__ import annotations

import importlib
import io
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from simulated.runtime import simulated

from gpuload.stage.decode import nvimagecodec
from gpuload.stage.decode.nvimagecodec import NvImageCodec


class CodeStream:
    """An encoded image, or a region of it."""

    def __init__(self, data: np.ndarray, region: Any = None) -> None:
        self.data, self.region = data, region
        self.width, self.height = Image.open(io.BytesIO(data.tobytes())).size

    def tobytes(self) -> bytes:
        return self.data.tobytes()

    def get_sub_code_stream(self, region: Any) -> CodeStream:
        return CodeStream(self.data, region)


class GpuImage:
    """An image as nvImageCodec returns it on a GPU, with unused memory after each row."""

    def __init__(self, picture: np.ndarray) -> None:
        height, width, channels = picture.shape
        self.rows = np.full((height, width + 5, channels), 0x5A, np.uint8)
        self.rows[:, :width] = picture
        self.__cuda_array_interface__ = self.rows[:, :width].__array_interface__


class Library:
    """A stand-in for the module `nvimgcodec`; `decoders` maps kinds of backends to functions that decode."""

    NVIMGCODEC_DEVICE_CPU_ONLY = -99999
    __version__ = "0.9.0"
    CodeStream = CodeStream
    BackendKind = SimpleNamespace(CPU_ONLY="cpu", GPU_ONLY="gpu", HYBRID_CPU_GPU="hybrid", HW_GPU_ONLY="engine")
    ColorSpec = SimpleNamespace(GRAY="grey", SRGB="rgb")
    Backend = staticmethod(lambda kind: kind)
    Region = staticmethod(lambda *box: box)

    def __init__(self, **decoders: Any) -> None:
        self.decoders = decoders
        self.calls: list[dict[str, Any]] = []

    def DecodeParams(self, **params: Any) -> Any:
        return SimpleNamespace(**params)

    def Decoder(self, **options: Any) -> Any:
        self.calls.append(options)
        decode_all = self.decoders[options["backends"][0]]

        def decode(codes: list[Any], params: Any, cuda_stream: int) -> Any:
            return [None if picture is None else GpuImage(picture) for picture in decode_all(codes)]

        return SimpleNamespace(decode=decode)


def decode_images(codes: list[Any]) -> list[Any]:
    images = []
    for code in codes:
        image = np.array(Image.open(io.BytesIO(code.tobytes())))
        image = image if image.ndim == 3 else image[:, :, None]
        top, left, bottom, right = code.region or (0, 0, *image.shape[:2])
        images.append(image[top:bottom, left:right])
    return images


def decode_nothing(codes: list[Any]) -> list[Any]:
    return [None] * len(codes)


def decode_inverted(codes: list[Any]) -> list[Any]:
    return [255 - image for image in decode_images(codes)]


def run_out_of_memory(codes: list[Any]) -> list[Any]:
    raise RuntimeError("CUDA Runtime failure: 'out of memory'")


class SimulatedGpu:
    """A simulated GPU with a current stream; its decoders work only within the context."""

    device = torch.device("cuda", 1)

    def __enter__(self) -> SimulatedGpu:
        importlib.import_module("gpuload.stage.decode.crops")  # before launches are replaced by queued ones
        self._contexts = ExitStack()
        self._contexts.enter_context(simulated("eager"))
        patch = self._contexts.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()

    def decoder(
        self, exact_versions: Any = nvimagecodec.EXACT_REGION_VERSIONS, *, only: str = "", **decoders: Any
    ) -> NvImageCodec:
        """Make a decoder whose library has these functions for its backends."""
        return NvImageCodec(self.device, 3, Library(**decoders), exact_versions=exact_versions, only=only)
