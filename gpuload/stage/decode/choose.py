"""Which decoder a device has, or why none: asked once for a session, in the main process.

Nothing here is an error: whoever asks for decoding on a device that cannot do it gets the CPU's, is told once, and
finds the reason in `Plan.decoder`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gpuload.decode import Decode
from gpuload.errors import one_line
from gpuload.stage.dali import DaliBackend
from gpuload.stage.decode.backend import DeviceDecoder
from gpuload.stage.decode.nvimagecodec import NvImageCodec, load_library
from gpuload.stage.decode.regions import fault_of_regions

__all__ = ["Choice", "choose", "find_decoder"]

PACKAGE: Final = "nvidia-nvimgcodec-cu"
WORKERS: Final = "workers (CPU)"


class Choice(NamedTuple):
    """Who decodes.

    Attributes:
        decoder: the device's, if it decodes.
        share: of the samples that it decodes, 0 to 1.
        text: who decodes and why, for `Plan.decoder`; None: workers, as was asked for.
        warning: what to tell the user once, if the device was to decode and cannot.
    """

    decoder: DeviceDecoder | None
    share: float
    text: str | None
    warning: str = ""


def choose(
    options: Decode, device: torch.device, threads: int, share: float | None = None, backend: str = "auto"
) -> Choice:
    """Who decodes for a loader on this device; `threads` of the CPU may be used in the main process, `share` was
    measured, if the options have none, and `backend` is what transforms were asked to run on."""
    if options.where == "cpu":
        return Choice(None, 0.0, None)
    try:
        decoder = find_decoder(device, threads, backend)
    except Exception as error:  # whatever a broken installation raises
        why = one_line(str(error) or type(error).__name__)
        return Choice(
            None,
            0.0,
            f"{WORKERS}, since {device} cannot: {why}",
            f"Decode(where={options.where!r}): {device} cannot decode, so the workers' CPUs decode all images: {why}",
        )
    if options.where == "both":
        share = options.device_share or share
        part = "a share of the samples, to be measured" if share is None else f"{share:.0%} of the samples"
        shared = f", {part}; {WORKERS}, the others"
    else:
        share, shared = 1.0, ""
    note = f" ({decoder.note})" if decoder.note else ""
    return Choice(decoder, share or 0.0, f"{', '.join(decoder.names)} on {device}{note}{shared}")


def find_decoder(device: torch.device, threads: int, backend: str = "auto") -> DeviceDecoder:
    """The decoder of a device: nvImageCodec, or DALI where that cannot be used; for the backend "dali" DALI first.

    Raises:
        Exception: there is none; the text says why, and what to do.
    """
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        raise RuntimeError("nvImageCodec and DALI decode on NVIDIA's GPUs and on the CPU alone")
    ways = [_nvimagecodec] if DaliBackend.missing(device) else [_nvimagecodec, _dali]
    reasons: list[str] = []
    for way in reversed(ways) if backend == "dali" else ways:
        try:
            found = way(device, threads)
        except Exception as error:  # whatever a broken installation raises
            reasons.append(one_line(str(error) or type(error).__name__))
            continue
        # A stage of DALI's frees to DALI's pool, or to CUDA's, which is nvImageCodec's, if DALI is told to use that.
        found.takes_freed_memory = backend == "dali"
        found.note = "; ".join([*reasons, found.note] if found.note else reasons)
        return found
    raise RuntimeError("; ".join(reasons))


def _dali(device: torch.device, threads: int) -> DeviceDecoder:
    try:
        from gpuload.stage.decode.dali import DaliDecoder
    except ImportError as error:
        raise RuntimeError(f"DALI cannot be imported ({error})") from error
    return DaliDecoder(device, threads)


def _nvimagecodec(device: torch.device, threads: int) -> DeviceDecoder:
    try:
        library = load_library()
    except Exception as error:
        raise RuntimeError(
            f"nvImageCodec cannot be imported ({type(error).__name__}: {error}); {_remedy(device)}"
        ) from error
    try:
        return NvImageCodec(device, threads, library, no_regions=lambda name: _no_regions(name, device, library))
    except Exception as error:
        raise RuntimeError(f"{error}{_mismatch(device)}") from error


def _no_regions(name: str, device: torch.device, library: Any) -> str:
    """Why a decoder is not to be used for regions; "" if it is."""
    if device.type == "cpu":
        return ""
    return fault_of_regions(name, device, (library.__version__, torch.cuda.get_device_name(device), _driver()))


def _driver() -> str:
    """NVIDIA's driver: its own version, which a container may hide, and that of its CUDA."""
    try:
        own = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        own = ""
    return f"{own} {driver_version()}"


def _remedy(device: torch.device) -> str:
    """What to install."""
    major = int((torch.version.cuda or "12").split(".")[0])
    if device.type != "cpu" and (driver := driver_version()) is not None:
        major = min(major, driver[0])
    return f"pip install 'gpuload[cu{major}]'"


def _mismatch(device: torch.device) -> str:
    """What versions say about a GPU that nothing decodes on; "" if nothing."""
    if device.type == "cpu":
        return ""
    built, driver = sorted(_installed()), driver_version()
    shown = " and ".join(f"{PACKAGE}{major}" for major in built)
    if driver is not None and built and built[0] > driver[0]:
        return (
            f"; {shown} needs a driver for CUDA {built[0]}, and this one is for CUDA {driver[0]}.{driver[1]}: update "
            f"the driver, or {_remedy(device)} in its place"
        )
    found = torch.version.cuda
    if found is not None and built and int(found.split(".")[0]) not in built:
        return f"; {shown} is for another CUDA than torch ({found}): {_remedy(device)}"
    return ""


def _installed() -> set[int]:
    """The CUDA versions whose nvImageCodec is installed."""
    names = (one.metadata["Name"] or "" for one in importlib.metadata.distributions())
    found = (re.fullmatch(PACKAGE + r"(\d+)", name.lower().replace("_", "-")) for name in names)
    return {int(match[1]) for match in found if match is not None}


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that NVIDIA's driver knows, major and minor; None without a driver."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
