"""The options of a `Loader` that say how and where images are made. Main process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpuload.stage import accelerator
from gpuload.transforms import Chain

__all__ = ["StageOptions", "check_device"]


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Which transforms run where, and what they give; `check_stage` checks whether a backend can run them.

    Args:
        transforms, device, dtype, memory_format, backend: as for `Loader`.

    Attributes:
        transforms: a `Chain`.
        device: None: chosen at the first `iter()`.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    transforms: Chain
    device: Any
    dtype: str | None
    memory_format: str
    backend: str

    def __post_init__(self) -> None:
        given: Any = self.transforms
        found = {
            "transforms": given if isinstance(given, Chain) else Chain(given),
            "device": None if self.device is None else check_device(self.device),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "memory_format": str(self.memory_format).removeprefix("torch."),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)


def check_device(device: Any) -> torch.device:
    """A CPU, a CUDA or an XPU device, whether it exists or not. A number means a device of the kind that torch was
    built for; a CPU's number is dropped, as torch ignores it.

    Raises:
        TypeError, ValueError: it is neither.
    """
    text = f"device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or a torch.device of these kinds, got {device!r}"
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(text)
    try:
        found = torch.device(accelerator.kind() or "cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError):  # torch's message lists all kinds that it knows
        raise ValueError(text) from None
    if found.type not in ("cpu", *accelerator.KINDS):
        raise ValueError(text)
    return torch.device("cpu") if found.type == "cpu" else found
