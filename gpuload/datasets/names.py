"""Replacements for the arguments of other libraries' datasets, named in the error for an unknown argument."""

from __future__ import annotations

from typing import Final

from gpuload.errors import explain_unknown_arguments

__all__ = ["dataset_arguments"]

TRANSFORM_IN_BATCHES: Final = "images are transformed in batches, by gpuload.Loader(dataset, transforms=[…])"
SHUFFLE_IN_LOADER: Final = (
    "gpuload.Loader(dataset, shuffle=True) shuffles samples, and divides them among ranks and workers"
)

REPLACEMENTS: Final = {
    # torchvision
    "transform": TRANSFORM_IN_BATCHES,
    "transforms": TRANSFORM_IN_BATCHES,
    "target_transform": "change its label array before creating the Loader: dataset.labels = table[dataset.labels]",
    "loader": "samples contain the bytes of files, which the Loader decodes; decode=gpuload.Decode(…) sets the options",
    "is_valid_file": "extensions=('.jpg', …) selects the files that are images",
    "classes": "its images have no labels; gpuload.ImageFolder has classes",
    "allow_empty": "pass classes=[…] with the names of all classes; a class may then have no images",
    "annFile": "write annotations=…",
    # WebDataset
    "urls": "write shards=…",
    "shardshuffle": SHUFFLE_IN_LOADER,
    "nodesplitter": SHUFFLE_IN_LOADER,
    "workersplitter": SHUFFLE_IN_LOADER,
    "resampled": "gpuload.Loader(dataset, weights=np.ones(len(dataset))) draws with replacement",
    "handler": "gpuload.Loader(dataset, on_error='skip') skips samples that fail",
    "cache_dir": "gpuload.Cached(dataset, bytes_limit, where='disk', path=…) caches samples on a local disk",
    # common to many libraries
    "shuffle": SHUFFLE_IN_LOADER,
    "batch_size": "gpuload.Loader(dataset, batch_size=…) sets the batch size",
    "num_workers": "gpuload.Loader(dataset, num_workers=…) reads in several processes",
}

dataset_arguments = explain_unknown_arguments(REPLACEMENTS.get)
"""A decorator for the ``__init__`` of a dataset: the error for another library's argument names the replacement."""
