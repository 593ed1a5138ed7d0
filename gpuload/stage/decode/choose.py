"""Which decoder a device has, or why none: asked once for a session, in the main process.

Nothing here is an error: whoever asks for decoding on a device that cannot do it gets the CPU's, is told once, and
finds the reason in `Plan.decoder`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from importlib.util import find_spec
from typing import Final, NamedTuple

import torch

from gpuload.decode import Decode
from gpuload.errors import one_line
from gpuload.stage.decode.nvimagecodec import NvImageCodec, load_library

__all__ = ["Choice", "choose", "find_decoder"]

PACKAGE: Final = "nvidia-nvimgcodec-cu"
WORKERS: Final = "workers (CPU)"


class Choice(NamedTuple):
    """Who decodes.

    Attributes:
        decoder: the device's, if it decodes.
        share: of the samples that the device decodes, 0 to 1.
        text: who decodes and why, for `Plan.decoder`; None means workers, as was asked for.
        warning: what to tell the user once, if the device was to decode and cannot.
    """

    decoder: NvImageCodec | None
    share: float
    text: str | None
    warning: str = ""


def choose(options: Decode, device: torch.device, threads: int) -> Choice:
    """Decide who decodes for a loader on this device; the main process may use `threads` of the CPU for it."""
    if options.where == "cpu":
        return Choice(None, 0.0, None)
    try:
        decoder = find_decoder(device, threads)
    except Exception as error:  # whatever a broken installation raises
        why = one_line(str(error) or type(error).__name__)
        return Choice(
            None,
            0.0,
            f"{WORKERS}, since {device} cannot: {why}",
            f"Decode(where={options.where!r}): {device} cannot decode, so the workers' CPUs decode all images: {why}",
        )
    share = options.device_share or 1.0
    shared = f", {share:.0%} of the samples; {WORKERS}, the others" if options.where == "both" else ""
    note = f" ({decoder.note})" if decoder.note else ""
    return Choice(decoder, share, f"{', '.join(decoder.names)} on {device}{note}{shared}")


def find_decoder(device: torch.device, threads: int) -> NvImageCodec:
    """Return the decoder of a device.

    Raises:
        Exception: there is none; the text says why, and what to do.
    """
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        raise RuntimeError("nvImageCodec decodes on NVIDIA's GPUs and on the CPU alone")
    if device.type != "cpu" and find_spec("triton") is None:
        raise RuntimeError("crops are copied by a kernel of Triton's, which is not installed; pip install triton")
    try:
        library = load_library()
    except Exception as error:
        raise RuntimeError(
            f"nvImageCodec cannot be imported ({type(error).__name__}: {error}); {_remedy(device)}"
        ) from error
    try:
        return NvImageCodec(device, threads, library)
    except Exception as error:
        raise RuntimeError(f"{error}{_mismatch(device)}") from error


def _remedy(device: torch.device) -> str:
    """Return what to install."""
    major = int((torch.version.cuda or "12").split(".")[0])
    if device.type != "cpu" and (driver := driver_version()) is not None:
        major = min(major, driver[0])
    return f"pip install 'gpuload[cu{major}]'"


def _mismatch(device: torch.device) -> str:
    """Return what versions say about a GPU that nothing decodes on; "" if nothing."""
    if device.type == "cpu":
        return ""
    built, driver = sorted(_installed()), driver_version()
    shown = " and ".join(f"{PACKAGE}{major}" for major in built)
    if driver is not None and built and built[0] > driver[0]:
        return (
            f"; {shown} needs a driver for CUDA {built[0]}, and this one is for CUDA {driver[0]}.{driver[1]}: update "
            f"the driver, or {_remedy(device)} in its place"
        )
    torch_cuda = torch.version.cuda
    if torch_cuda is not None and built and int(torch_cuda.split(".")[0]) not in built:
        return f"; {shown} is for another CUDA than torch ({torch_cuda}): {_remedy(device)}"
    return ""


def _installed() -> set[int]:
    """Return the CUDA versions whose nvImageCodec is installed."""
    names = (one.metadata["Name"] or "" for one in importlib.metadata.distributions())
    matches = (re.fullmatch(PACKAGE + r"(\d+)", name.lower().replace("_", "-")) for name in names)
    return {int(match[1]) for match in matches if match is not None}


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA that NVIDIA's driver knows, major and minor; None without a driver."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
