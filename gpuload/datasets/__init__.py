"""Datasets that yield encoded images: what workers read. A name's module is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload.datasets.cached import Cached
    from gpuload.datasets.coco import Coco
    from gpuload.datasets.folder import ImageFiles, ImageFolder
    from gpuload.datasets.mix import Mix
    from gpuload.datasets.resident import DeviceCached
    from gpuload.datasets.stores.array import ArrayFile
    from gpuload.datasets.stores.filelist import FileList
    from gpuload.datasets.stores.hdf5 import HDF5
    from gpuload.datasets.stores.lmdb import LMDB
    from gpuload.datasets.stores.parquet import Parquet
    from gpuload.datasets.stores.tar.dataset import TarShards

__all__ = [
    "HDF5",
    "LMDB",
    "ArrayFile",
    "Cached",
    "Coco",
    "DeviceCached",
    "FileList",
    "ImageFiles",
    "ImageFolder",
    "Mix",
    "Parquet",
    "TarShards",
]

_HOMES = {
    "ArrayFile": "stores.array",
    "Cached": "cached",
    "Coco": "coco",
    "DeviceCached": "resident",
    "FileList": "stores.filelist",
    "HDF5": "stores.hdf5",
    "ImageFiles": "folder",
    "ImageFolder": "folder",
    "LMDB": "stores.lmdb",
    "Mix": "mix",
    "Parquet": "stores.parquet",
    "TarShards": "stores.tar.dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
