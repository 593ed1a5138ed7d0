"""Chooses a device's decoder, or determines why it has none, once per session, in the main process.

A missing decoder is not an error: if the requested device cannot decode, the CPU does, with one warning, and
`Plan.decoder` gives the reason.
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
from gpuload.decode.jpeg import load_nvimgcodec
from gpuload.errors import one_line
from gpuload.stage.decode.nvimagecodec import NvImageCodec

__all__ = ["Choice", "choose", "decoders_for_threads", "find_decoder"]

PACKAGE: Final = "nvidia-nvimgcodec-cu"
WORKERS: Final = "workers (CPU)"


class Choice(NamedTuple):
    """The choice between decoding on the device and in workers.

    Attributes:
        decoder: the device's decoder; None if the device does not decode.
        share: the fraction of samples that the device decodes, 0 to 1.
        text: the name of the decoder and the reason for the choice, for `Plan.decoder`; None means that workers decode,
            as requested.
        warning: a warning to show once, if the device was requested but cannot decode; else "".
    """

    decoder: NvImageCodec | None
    share: float
    text: str | None
    warning: str = ""


def choose(options: Decode, device: torch.device, threads: int) -> Choice:
    """Choose the decoder for a loader on this device; the main process may use `threads` CPU threads for decoding."""
    if options.where == "cpu":
        return Choice(None, 0.0, None)
    try:
        decoder = find_decoder(device, threads)
    except Exception as error:  # a broken installation can raise anything
        reason = one_line(str(error) or type(error).__name__)
        return Choice(
            None,
            0.0,
            f"{WORKERS}, because {device} cannot decode: {reason}",
            f"Decode(where={options.where!r}): {device} cannot decode, so workers decode all images: {reason}",
        )
    share = options.device_share or 1.0
    split = f", {share:.0%} of the samples; {WORKERS} for the others" if options.where == "both" else ""
    note = f" ({decoder.note})" if decoder.note else ""
    return Choice(decoder, share, f"{', '.join(decoder.names)} on {device}{note}{split}")


def decoders_for_threads(decoder: NvImageCodec, device: torch.device, threads: int) -> list[NvImageCodec]:
    """Return the decoder and, on a GPU, a second one for another thread. On the CPU, a second thread would only wait
    for the first, since each call captures the C library's messages."""
    return [decoder] if device.type == "cpu" else [decoder, find_decoder(device, threads)]


def find_decoder(device: torch.device, threads: int) -> NvImageCodec:
    """Return the decoder of a device.

    Raises:
        Exception: the device has no usable decoder; the message has the reason and the remedy.
    """
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        raise RuntimeError("nvImageCodec decodes only on NVIDIA GPUs and on the CPU")
    if device.type != "cpu" and find_spec("triton") is None:
        raise RuntimeError("crops are copied by a Triton kernel, but Triton is not installed; run pip install triton")
    try:
        library = load_nvimgcodec()
    except Exception as error:
        raise RuntimeError(
            f"nvImageCodec cannot be imported ({type(error).__name__}: {error}); run {_install_command(device)}"
        ) from error
    try:
        return NvImageCodec(device, threads, library)
    except Exception as error:
        raise RuntimeError(f"{error}{_mismatch_hint(device)}") from error


def _install_command(device: torch.device) -> str:
    """Return the command that installs a decoder."""
    major = int((torch.version.cuda or "12").split(".")[0])
    if device.type != "cpu" and (driver := driver_version()) is not None:
        major = min(major, driver[0])
    return f"pip install 'gpuload[cu{major}]'"


def _mismatch_hint(device: torch.device) -> str:
    """Return a hint about mismatched CUDA versions, which can be why a GPU cannot decode; "" if versions match."""
    if device.type == "cpu":
        return ""
    majors, driver = sorted(_installed_majors()), driver_version()
    packages = " and ".join(f"{PACKAGE}{major}" for major in majors)
    if driver is not None and majors and majors[0] > driver[0]:
        return (
            f"; {packages} needs a driver for CUDA {majors[0]}, but this driver is for CUDA {driver[0]}.{driver[1]}: "
            f"update the driver, or run {_install_command(device)} instead"
        )
    torch_cuda = torch.version.cuda
    if torch_cuda is not None and majors and int(torch_cuda.split(".")[0]) not in majors:
        return f"; {packages} is for another CUDA version than torch ({torch_cuda}); run {_install_command(device)}"
    return ""


def _installed_majors() -> set[int]:
    """Return the major CUDA versions for which nvImageCodec is installed."""
    names = (distribution.metadata["Name"] or "" for distribution in importlib.metadata.distributions())
    matches = (re.fullmatch(PACKAGE + r"(\d+)", name.lower().replace("_", "-")) for name in names)
    return {int(match[1]) for match in matches if match is not None}


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports, major and minor; None without a driver."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
