"""The two JPEG-only decoders: nvImageCodec on the CPU, which decodes only a region, and simplejpeg.

Each decoder accepts a plain JPEG (`JpegHeader.is_plain`). It returns the stored pixels, H×W×C, possibly in `out`, and
an empty string; or None and the reason.

**Damage.** Both decoders use libjpeg-turbo, which fills missing pixels with grey and only *warns*. So the pixels are
discarded if there is any message about an image, even a single warning, and the next decoder is tried. Pillow, the last
decoder, decides. A file that ends before its picture is complete is refused, unless the region is above the damage (in
a progressive file, no row is). Data that is wrong but complete (flipped bits, or an end marker appended to a truncated
file) decodes, just as in Pillow. For a healthy file, these checks cost reading its last two bytes (a
file without an end-of-image marker is truncated and not passed to nvImageCodec) and the few µs of `native_messages`.

Each decoder belongs to one `Decoder` and one thread. It is created at the first JPEG, which takes 0.1 ms in addition to
the import (15 ms). nvImageCodec's image memory is reused, so pixels are valid only until the next call.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

import numpy as np

from gpuload.decode.header import EOI, JpegHeader, Region, has_eoi
from gpuload.decode.native_messages import native_messages, run_and_capture
from gpuload.errors import one_line

__all__ = ["JpegDecoder", "NvImageCodecRegions", "SimpleJpeg", "columns_to_decode", "decode_params", "load_nvimgcodec"]

NV_MAX_BYTES = 1 << 29  # limit of nvImageCodec's libjpeg extension (0.8 and 0.9); above it, another decoder is tried
MAX_REUSED_BYTES = 64 << 20  # larger image memory is freed at once, so that workers do not keep a panorama's memory
VERBOSITY = "PYNVIMGCODEC_VERBOSITY"


def columns_to_decode(left: int, width: int, image_width: int) -> tuple[int, int]:
    """Return the range of columns (end excluded) that nvImageCodec must decode for a region. A region of one column is
    widened to two, because a single column at the edge of a 4:2:0 JPEG would get wrong colours."""
    if width > 1 or image_width == 1:
        return left, left + width
    return max(left - 1, 0), max(left - 1, 0) + 2


def load_nvimgcodec() -> Any:
    """Import nvImageCodec, and return the module. Raise ImportError if it is missing, or older than 0.9, the first
    version that can decode without a GPU."""
    old_verbosity = os.environ.get(VERBOSITY)
    os.environ[VERBOSITY] = "0"  # read once, at import; otherwise C++ prints errors that bypass the C stderr
    try:
        nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
    finally:
        del os.environ[VERBOSITY]
        if old_verbosity is not None:
            os.environ[VERBOSITY] = old_verbosity
    if not hasattr(nvimgcodec, "NVIMGCODEC_DEVICE_CPU_ONLY"):
        raise ImportError(f"found version {getattr(nvimgcodec, '__version__', 'unknown')}, but 0.9 or newer is needed")
    return nvimgcodec


def decode_params(nvimgcodec: Any) -> dict[bool, Any]:
    """Return nvImageCodec's parameters for decoding, keyed by whether to decode to one channel instead of three."""
    return {
        grey: nvimgcodec.DecodeParams(
            apply_exif_orientation=False,
            color_spec=nvimgcodec.ColorSpec.GRAY if grey else nvimgcodec.ColorSpec.SRGB,
        )
        for grey in (False, True)
    }


class NvImageCodecRegions:
    """nvImageCodec's CPU decoder, with one thread."""

    name: ClassVar[str] = "nvImageCodec"

    def __init__(self) -> None:
        if native_messages() is None:
            raise ImportError("its messages cannot be captured with this C library")
        result, complaint = run_and_capture(self._create)
        if result is None:
            raise ImportError(complaint)

    def _create(self) -> bool:
        nvimgcodec = load_nvimgcodec()
        self._code_stream_class = nvimgcodec.CodeStream
        self._region_class = nvimgcodec.Region
        self._decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        )
        self._params = decode_params(nvimgcodec)
        self._image: object = None
        return True

    def decode(
        self, data: bytes, header: JpegHeader, grey: bool, region_tlhw: Region, out: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, str]:
        if not data.endswith(EOI) and not has_eoi(data, header):
            return None, "the file is truncated: it has no end-of-image marker"
        if header.height * header.width * header.components >= NV_MAX_BYTES:
            return None, f"not tried: {header.width:,}×{header.height:,} pixels exceed its {NV_MAX_BYTES:,}-byte limit"
        top, left, height, width = region_tlhw
        is_part = height != header.height or width != header.width
        if is_part and not header.is_complete:
            return None, "not tried: the missing data of an incomplete progressive JPEG depends on the entire image"
        start, stop = columns_to_decode(left, width, header.width)
        region = (top, start, top + height, stop) if is_part else None
        image, complaint = run_and_capture(self._decode_region, data, grey, region)
        pixels = None if image is None else np.asarray(image)
        self._image = image if pixels is not None and not complaint and pixels.nbytes <= MAX_REUSED_BYTES else None
        if pixels is None or complaint:
            return None, complaint or "it returned no image and no reason"
        return pixels[:, left - start : left - start + width], ""

    def _decode_region(self, data: bytes, grey: bool, region_tlbr: Region | None) -> Any:
        code_stream = self._code_stream_class(data)
        if region_tlbr is not None:
            code_stream = code_stream.get_sub_code_stream(region=self._region_class(*region_tlbr))
        return self._decoder.decode(code_stream, image=self._image, params=self._params[grey])


class SimpleJpeg:
    """libjpeg-turbo, used through simplejpeg. It always decodes the entire image, and writes directly to `out` if the
    region is the entire image."""

    name: ClassVar[str] = "simplejpeg"

    def __init__(self) -> None:
        from simplejpeg import decode_jpeg

        self.decode_jpeg = decode_jpeg

    def decode(
        self, data: bytes, header: JpegHeader, grey: bool, region_tlhw: Region, out: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, str]:
        try:
            buffer = out if out is not None and region_tlhw[2:] == (header.height, header.width) else None
            pixels = self.decode_jpeg(
                data, "GRAY" if grey else "RGB", fastdct=False, fastupsample=False, buffer=buffer, strict=True
            )
        except Exception as error:
            return None, one_line(f"{type(error).__name__}: {error}")
        if pixels.shape[:2] != (header.height, header.width):
            return (
                None,
                f"the header says {header.width}×{header.height} pixels, but got {pixels.shape[1]}×{pixels.shape[0]}",
            )
        top, left, height, width = region_tlhw
        return pixels[top : top + height, left : left + width], ""


JpegDecoder = NvImageCodecRegions | SimpleJpeg
