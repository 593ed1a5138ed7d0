"""gpuload: the image loader for people who train vision models on GPUs.

Worker processes read files and decode the region that the first crop needs; everything else happens for a whole batch
on the device. See `Loader`.

This module only re-exports, and imports what it names when it is first used: worker processes import gpuload too, and
must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload import transforms
    from gpuload.datasets import ImageFiles, ImageFolder
    from gpuload.decode import Decode
    from gpuload.errors import CollateError, DecodeError, GpuloadError, SampleError, WorkerError
    from gpuload.loader import BatchInfo, Loader
    from gpuload.sample import Encoded, Image, read

__version__ = "0.1.0"

_HOMES = {
    "BatchInfo": "gpuload.loader",
    "CollateError": "gpuload.errors",
    "Decode": "gpuload.decode",
    "DecodeError": "gpuload.errors",
    "Encoded": "gpuload.sample",
    "GpuloadError": "gpuload.errors",
    "Image": "gpuload.sample",
    "ImageFiles": "gpuload.datasets",
    "ImageFolder": "gpuload.datasets",
    "Loader": "gpuload.loader",
    "SampleError": "gpuload.errors",
    "WorkerError": "gpuload.errors",
    "read": "gpuload.sample",
    "transforms": "gpuload.transforms",
}

__all__ = [
    "BatchInfo",
    "CollateError",
    "Decode",
    "DecodeError",
    "Encoded",
    "GpuloadError",
    "Image",
    "ImageFiles",
    "ImageFolder",
    "Loader",
    "SampleError",
    "WorkerError",
    "__version__",
    "read",
    "transforms",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpuload' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if name == "transforms" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
