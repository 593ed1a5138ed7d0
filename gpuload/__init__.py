"""gpuload: an image loader for training vision models on GPUs.

Worker processes read files and decode only the region that the first crop needs; everything else runs on the device,
for entire batches. See `Loader`.

Names are imported on first use, because worker processes also import gpuload and must not spend time importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuload import exporters, transforms
    from gpuload.batches.assemble import BatchInfo
    from gpuload.batches.augment import Augment
    from gpuload.batches.pad import Padded, keep, pad, pad_collate
    from gpuload.datasets.cached import Cached
    from gpuload.datasets.coco import Coco
    from gpuload.datasets.folder import ImageFiles, ImageFolder
    from gpuload.datasets.mix import Mix
    from gpuload.datasets.resident import DeviceCached
    from gpuload.datasets.sample import Boxes, Encoded, Image, Keypoints, Mask, read
    from gpuload.datasets.stores.array import ArrayFile
    from gpuload.datasets.stores.filelist import FileList
    from gpuload.datasets.stores.hdf5 import HDF5
    from gpuload.datasets.stores.lmdb import LMDB
    from gpuload.datasets.stores.parquet import Parquet
    from gpuload.datasets.stores.remote import Remote
    from gpuload.datasets.stores.tar.dataset import TarShards
    from gpuload.datasets.worker import get_worker_info
    from gpuload.datasets.wrap import wrap
    from gpuload.decode import Decode
    from gpuload.errors import (
        BackendError,
        CollateError,
        DecodeError,
        ErrorRecord,
        GpuloadError,
        LimitError,
        SampleError,
        TooManyErrors,
        WorkerError,
    )
    from gpuload.loader.headspace import headspace
    from gpuload.loader.loader import Loader
    from gpuload.loader.stats import Stats
    from gpuload.order.blocks import BlockShuffle
    from gpuload.packing.pack import pack
    from gpuload.packing.verify import verify
    from gpuload.rng.generators import sample_rng
    from gpuload.workers.faults import Faults
    from gpuload.workers.ray import RayWorkers

__version__ = "0.1.0"

_MODULE_NAMES = {
    "ArrayFile": "gpuload.datasets.stores.array",
    "Augment": "gpuload.batches.augment",
    "BackendError": "gpuload.errors",
    "BatchInfo": "gpuload.batches.assemble",
    "BlockShuffle": "gpuload.order.blocks",
    "Boxes": "gpuload.datasets.sample",
    "Cached": "gpuload.datasets.cached",
    "Coco": "gpuload.datasets.coco",
    "CollateError": "gpuload.errors",
    "Decode": "gpuload.decode",
    "DecodeError": "gpuload.errors",
    "DeviceCached": "gpuload.datasets.resident",
    "Encoded": "gpuload.datasets.sample",
    "ErrorRecord": "gpuload.errors",
    "Faults": "gpuload.workers.faults",
    "FileList": "gpuload.datasets.stores.filelist",
    "GpuloadError": "gpuload.errors",
    "HDF5": "gpuload.datasets.stores.hdf5",
    "Image": "gpuload.datasets.sample",
    "ImageFiles": "gpuload.datasets.folder",
    "ImageFolder": "gpuload.datasets.folder",
    "Keypoints": "gpuload.datasets.sample",
    "LMDB": "gpuload.datasets.stores.lmdb",
    "LimitError": "gpuload.errors",
    "Loader": "gpuload.loader.loader",
    "Mask": "gpuload.datasets.sample",
    "Mix": "gpuload.datasets.mix",
    "Padded": "gpuload.batches.pad",
    "Parquet": "gpuload.datasets.stores.parquet",
    "RayWorkers": "gpuload.workers.ray",
    "Remote": "gpuload.datasets.stores.remote",
    "SampleError": "gpuload.errors",
    "Stats": "gpuload.loader.stats",
    "TarShards": "gpuload.datasets.stores.tar.dataset",
    "TooManyErrors": "gpuload.errors",
    "WorkerError": "gpuload.errors",
    "exporters": "gpuload.exporters",
    "get_worker_info": "gpuload.datasets.worker",
    "headspace": "gpuload.loader.headspace",
    "keep": "gpuload.batches.pad",
    "pack": "gpuload.packing.pack",
    "pad": "gpuload.batches.pad",
    "pad_collate": "gpuload.batches.pad",
    "read": "gpuload.datasets.sample",
    "sample_rng": "gpuload.rng.generators",
    "transforms": "gpuload.transforms",
    "verify": "gpuload.packing.verify",
    "wrap": "gpuload.datasets.wrap",
}

__all__ = [
    "HDF5",
    "LMDB",
    "ArrayFile",
    "Augment",
    "BackendError",
    "BatchInfo",
    "BlockShuffle",
    "Boxes",
    "Cached",
    "Coco",
    "CollateError",
    "Decode",
    "DecodeError",
    "DeviceCached",
    "Encoded",
    "ErrorRecord",
    "Faults",
    "FileList",
    "GpuloadError",
    "Image",
    "ImageFiles",
    "ImageFolder",
    "Keypoints",
    "LimitError",
    "Loader",
    "Mask",
    "Mix",
    "Padded",
    "Parquet",
    "RayWorkers",
    "Remote",
    "SampleError",
    "Stats",
    "TarShards",
    "TooManyErrors",
    "WorkerError",
    "__version__",
    "exporters",
    "get_worker_info",
    "headspace",
    "keep",
    "pack",
    "pad",
    "pad_collate",
    "read",
    "sample_rng",
    "transforms",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    module_name = _MODULE_NAMES.get(name)
    if module_name is None:
        from gpuload.transforms.names import missing_name_error

        raise missing_name_error(__name__, name)
    module = importlib.import_module(module_name)
    value = module if module_name == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
