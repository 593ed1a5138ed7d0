"""Whether a device's decoders decode a region to the bits of that part of the whole image: `gpuload doctor` tries it,
in a process of its own, since a decoder that cannot may end its process. What comes of it decides, after a look at
several kinds of GPUs, which versions get into `gpuload.stage.decode.nvimagecodec.REGIONS_RIGHT`."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import torch

from gpuload.stage import device as devices
from gpuload.stage.decode.backend import Refused, Source, fetch
from gpuload.stage.decode.nvimagecodec import CPU, ENGINE, GPU, REGIONS_RIGHT, NvImageCodec, load_library

__all__ = ["find_fault", "try_regions"]

HEIGHT, WIDTH = 165, 221
# As (top, left, height, width): within, at each edge and corner, thin, and on the borders of 4:2:0's blocks of 16×16.
REGIONS: Final = (
    (0, 0, HEIGHT, WIDTH),
    (37, 51, 90, 101),
    (0, 0, 33, 47),
    (HEIGHT - 31, WIDTH - 45, 31, 45),
    (16, 32, 64, 80),
    (0, 17, HEIGHT, 1),
    (0, WIDTH - 1, HEIGHT, 1),
    (HEIGHT - 1, 0, 1, WIDTH),
    (HEIGHT - 1, WIDTH - 1, 1, 1),
)


def try_regions() -> dict[str, Any]:
    """Try the decoders of this machine's GPU, or of its CPU. Return the version, the device, what is wrong with each
    decoder ("" if nothing is), and those with which gpuload decodes regions."""
    on_gpu = devices.is_available() and devices.kind() == "cuda" and torch.version.hip is None
    device, library = devices.current_device() if on_gpu else torch.device("cpu"), load_library()
    faults = {}
    for name in (ENGINE, GPU) if on_gpu else (CPU,):
        try:
            decoder = NvImageCodec(device, 1, library, regions_right={name: (library.__version__,)}, only=name)
            faults[name] = find_fault(decoder, device)
        except RuntimeError as error:
            faults[name] = str(error)
    used = [name for name in faults if library.__version__ in REGIONS_RIGHT[name]]
    return {"version": library.__version__, "device": str(device), "faults": faults, "used": used}


def find_fault(decoder: NvImageCodec, device: torch.device) -> str:
    """Return what is wrong with the regions of a decoder that decodes them; "" if nothing is. Each must have the bits
    of that part of the whole picture, many in one call. Pictures of which it refuses the whole do not count."""
    compared = 0
    for data, grey in _pictures():
        file = np.frombuffer(data, np.uint8)
        sources = [Source(file, HEIGHT, WIDTH, grey, region) for region in REGIONS]
        [one] = decoder.decode(sources[:1])
        if isinstance(one, Refused):
            continue
        compared += 1
        whole = fetch(one, sources[0], device).astype(np.int64)
        for source, found in zip(sources, decoder.decode(sources), strict=True):
            if isinstance(found, Refused):
                return f"it refuses a region: {found.why}"
            top, left, height, width = source.region_tlhw
            levels = np.abs(fetch(found, source, device) - whole[top : top + height, left : left + width]).max()
            if levels:
                return f"the region {source.region_tlhw} is up to {levels} levels away from that part of the whole one"
    return "" if compared else "it refuses each picture of the trial"


def _pictures() -> list[tuple[bytes, bool]]:
    """Make JPEGs, and say whether they are grey."""
    from PIL import Image

    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
    picture = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    options: list[dict[str, Any]] = [{"subsampling": 2}, {"subsampling": 1}, {"subsampling": 0}]
    options.append({"subsampling": 2, "restart_marker_blocks": 4})
    pictures = []
    for grey, given in [(False, one) for one in options] + [(True, {})]:
        file = io.BytesIO()
        (picture.convert("L") if grey else picture).save(file, "JPEG", quality=90, **given)
        pictures.append((file.getvalue(), grey))
    return pictures
