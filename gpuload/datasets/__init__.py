"""Datasets that yield encoded images: what workers read. A name's module is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.datasets.folder import ImageFiles, ImageFolder
    from gpuload.datasets.stores.tar.dataset import TarShards

_HOMES = {
    "ImageFiles": "folder",
    "ImageFolder": "folder",
    "TarShards": "stores.tar.dataset",
}

__all__ = ["ImageFiles", "ImageFolder", "TarShards"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
