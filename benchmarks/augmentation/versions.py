"""What was measured, by number: versions of all that takes part, and the CUDA device."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

__all__ = ["cuda_device", "versions"]

PACKAGES = ("gpuload", "torch", "triton", "torchvision", "kornia", "numpy", "Pillow")
DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")


def versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *DALI):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)  # with the build, such as +cpu
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    return found


def cuda_device() -> str:
    """The current CUDA device, in words."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {properties.multi_processor_count} SMs"
