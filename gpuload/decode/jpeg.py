"""The two JPEG-only decoders: nvImageCodec on the CPU, which decodes a region alone, and simplejpeg.

Each takes a plain JPEG (`JpegHeader.plain`) and gives the pixels as stored, H×W×C, perhaps in `out`, and ""; or None
and its complaint.

**Damage.** Both use libjpeg-turbo, which fills missing pixels with grey and only *warns*. So any message about an
image, even one warning, discards its pixels, and the next decoder tries. Pillow, the last, decides: a file that ends
before its picture is refused, unless the region is above the damage (a progressive file has no such rows); data that is
wrong but complete (flipped bits, an end marker put on a cut file) decodes, as it does for everybody who uses Pillow. A
healthy file pays for this with a look at its last two bytes (one without an end-of-image marker is cut off, and not
given to nvImageCodec) and the few µs of `native_messages`.

Each belongs to one `Decoder` and one thread, and is made at its first JPEG, in 0.1 ms after the import (15 ms).
nvImageCodec's image memory is reused, so pixels are valid until the next call.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

import numpy as np

from gpuload.decode.header import EOI, JpegHeader, Region, has_end
from gpuload.decode.native_messages import listen, native_messages
from gpuload.errors import one_line

__all__ = ["JpegDecoder", "NvImageCodec", "SimpleJpeg", "check_version", "columns"]

NV_MAX_BYTES = 1 << 29  # its libjpeg extension's limit (0.8 and 0.9): above it the library tries another decoder
KEEP_BYTES = 64 << 20  # larger image memory is freed after the image, or one panorama would stay in every worker
VERBOSITY = "PYNVIMGCODEC_VERBOSITY"


def columns(left: int, width: int, all_of_them: int) -> tuple[int, int]:
    """Return the first column that nvImageCodec is to decode for a region, and the one after the last: a column alone,
    at the edge of a 4:2:0 JPEG, would get wrong colours."""
    if width > 1 or all_of_them == 1:
        return left, left + width
    return max(left - 1, 0), max(left - 1, 0) + 2


def check_version(nvimgcodec: Any) -> None:
    """Raise an ImportError if nvImageCodec is older than 0.9, which is the first with a decoder without a GPU."""
    if not hasattr(nvimgcodec, "NVIMGCODEC_DEVICE_CPU_ONLY"):
        raise ImportError(f"version {getattr(nvimgcodec, '__version__', 'unknown')}, and 0.9 or newer is needed")


class NvImageCodec:
    """nvImageCodec's CPU decoder, with one thread."""

    name: ClassVar[str] = "nvImageCodec"

    def __init__(self) -> None:
        if native_messages() is None:
            raise ImportError("its messages cannot be caught with this C library")
        decoder, complaint = listen(self._make)
        if decoder is None:
            raise ImportError(complaint)

    def _make(self) -> bool:
        before = os.environ.get(VERBOSITY)
        os.environ[VERBOSITY] = "0"  # read once, at the import: else C++ prints errors past the C library's stderr
        try:
            nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
        finally:
            del os.environ[VERBOSITY]
            if before is not None:
                os.environ[VERBOSITY] = before
        check_version(nvimgcodec)
        self._code = nvimgcodec.CodeStream
        self._region = nvimgcodec.Region
        self._decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        )
        self._params = {
            grey: nvimgcodec.DecodeParams(
                apply_exif_orientation=False,
                color_spec=nvimgcodec.ColorSpec.GRAY if grey else nvimgcodec.ColorSpec.SRGB,
            )
            for grey in (False, True)
        }
        self._image: Any = None
        return True

    def decode(
        self, data: bytes, header: JpegHeader, grey: bool, region_tlhw: Region, out: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, str]:
        if not data.endswith(EOI) and not has_end(data, header):
            return None, "the file is cut off: there is no end-of-image marker"
        if header.height * header.width * header.components >= NV_MAX_BYTES:
            return None, f"not tried: {header.width:,}×{header.height:,} pixels are beyond its limit"
        top, left, height, width = region_tlhw
        part = height != header.height or width != header.width
        if part and not header.complete:
            return None, "not tried: what an incomplete progressive JPEG lacks is made up from the whole image"
        start, stop = columns(left, width, header.width)
        region = (top, start, top + height, stop) if part else None
        image, complaint = listen(self._decode_region, data, grey, region)
        pixels = None if image is None else np.asarray(image)
        self._image = image if pixels is not None and not complaint and pixels.nbytes <= KEEP_BYTES else None
        if pixels is None or complaint:
            return None, complaint or "it returned no image and no reason"
        return pixels[:, left - start : left - start + width], ""

    def _decode_region(self, data: bytes, grey: bool, region_tlbr: Region | None) -> Any:
        code = self._code(data)
        if region_tlbr is not None:
            code = code.get_sub_code_stream(region=self._region(*region_tlbr))
        return self._decoder.decode(code, image=self._image, params=self._params[grey])


class SimpleJpeg:
    """libjpeg-turbo through simplejpeg: decodes the whole image, into `out` if that is the region."""

    name: ClassVar[str] = "simplejpeg"

    def __init__(self) -> None:
        from simplejpeg import decode_jpeg

        self.decode_jpeg = decode_jpeg

    def decode(
        self, data: bytes, header: JpegHeader, grey: bool, region_tlhw: Region, out: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, str]:
        try:
            within = out if out is not None and region_tlhw[2:] == (header.height, header.width) else None
            whole = self.decode_jpeg(
                data, "GRAY" if grey else "RGB", fastdct=False, fastupsample=False, buffer=within, strict=True
            )
        except Exception as error:
            return None, one_line(f"{type(error).__name__}: {error}")
        if whole.shape[:2] != (header.height, header.width):
            return None, f"the header says {header.width}×{header.height} pixels, it decodes {whole.shape[:2][::-1]}"
        top, left, height, width = region_tlhw
        return whole[top : top + height, left : left + width], ""


JpegDecoder = NvImageCodec | SimpleJpeg
