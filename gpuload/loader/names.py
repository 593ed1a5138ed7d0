"""What arguments of other libraries' loaders are called in `Loader`: for the error that it does not have one.

docs/howto/moving.md shows the table.
"""

from __future__ import annotations

import inspect
from typing import Final

from gpuload import transforms
from gpuload.errors import knows_arguments

__all__ = ["ARGUMENTS", "loader_arguments"]

ALONE: Final = "leave it out: gpuload.Loader does so by itself"
COUNT: Final = "write num_workers=…"
DATASET: Final = "write gpuload.Loader(gpuload.ImageFolder(root), …), or another dataset"
LENGTH: Final = "leave it out: an epoch is as long as the dataset, and each loop begins the next"
PREFETCH: Final = "write prefetch_factor=…, the number of batches in work besides the one in use"
SHARES: Final = "leave it out: samples are divided among ranks and workers, as torch.distributed or torchrun say"
TRANSFORMS: Final = "write transforms=[…], a list from gpuload.transforms"
UNEVEN: Final = "write drop_last=True, or uneven='pad', 'drop' or 'exact'"

ARGUMENTS: Final = {
    # DataLoader, StatefulDataLoader, WebLoader
    "pin_memory_device": "leave it out: device=… says where batches go",
    "snapshot_every_n_steps": "leave it out: every state is exact",
    "nodesplitter": SHARES,
    "workersplitter": SHARES,
    "resampled": "write weights=np.ones(len(dataset)) to draw with replacement",
    "shardshuffle": "write shuffle=True, which is the full shuffle, or shuffle='block'",
    # torchvision's datasets, fastai, and what else it is called
    "transform": TRANSFORMS,
    "augmentations": TRANSFORMS,
    "batch_tfms": TRANSFORMS,
    "batch_transforms": TRANSFORMS,
    "item_tfms": TRANSFORMS,
    "target_transform": "change the labels in the dataset",
    "batch": "write batch_size=…",
    "bs": "write batch_size=…",
    "buffer_size": "write shuffle=True, which is the full shuffle, or shuffle='block'",
    "n_workers": COUNT,
    "num_processes": COUNT,
    "prefetch": PREFETCH,
    "random_state": "write seed=…",
    "rng": "write seed=…",
    # timm
    "batch_size_choices": "write T.by_epoch({0: 128, 10: 224}) as a size, for sizes that change from epoch to epoch",
    "input_size_choices": "write T.by_epoch({0: 128, 10: 224}) as a size, for sizes that change from epoch to epoch",
    "distributed": SHARES,
    "fp16": "write dtype='float16'",
    "img_dtype": "write dtype=…",
    "input_size": "write transforms=T.from_timm(config, is_training=…), whose config has it",
    "is_training": "write transforms=T.from_timm(config, is_training=…), and shuffle=True, drop_last=True for training",
    "mean": "write transforms=[…, T.Normalize(mean, std)]",
    "num_aug_repeats": "write repeats=…",
    "num_aug_splits": "write transforms=[T.MultiView([…, …])], with a chain for each",
    "num_batches": LENGTH,
    "std": "write transforms=[…, T.Normalize(mean, std)]",
    "tf_preprocessing": "leave it out: TensorFlow's preprocessing is not in gpuload",
    "use_multi_epochs_loader": "leave it out: workers stay from epoch to epoch",
    "use_prefetcher": "leave it out: batches come on the device",
    "worker_seeding": "leave it out: what is drawn depends on seed, epoch and position alone",
    # DALI
    "auto_reset": LENGTH,
    "device_id": "write device=…, such as 0 or 'cuda:0'",
    "dynamic_shape": "write ragged='list' or ragged='pad'",
    "exec_async": ALONE,
    "exec_dynamic": ALONE,
    "exec_pipelined": ALONE,
    "file_list": "write gpuload.Loader(gpuload.FileList(manifest), …)",
    "file_root": DATASET,
    "fill_last_batch": UNEVEN,
    "initial_fill": "leave it out: shuffle=True is the full shuffle",
    "last_batch_padded": UNEVEN,
    "last_batch_policy": UNEVEN,
    "num_shards": "write world_size=…, or leave it out under torchrun",
    "num_threads": COUNT,
    "output_map": "leave it out: a batch has the structure of a sample, so let the dataset return dicts",
    "pad_last_batch": UNEVEN,
    "pipelines": f"{TRANSFORMS}; images are decoded, and labels put together, without being declared",
    "prefetch_queue_depth": PREFETCH,
    "prepare_first_batch": ALONE,
    "py_num_workers": COUNT,
    "py_start_method": "leave it out: workers are fresh interpreters",
    "random_shuffle": "write shuffle=True",
    "reader_name": LENGTH,
    "set_affinity": "leave it out, or write affinity='none'",
    "shard_id": "write rank=…, or leave it out under torchrun",
    "size": LENGTH,
    "stick_to_shard": SHARES,
    # FFCV
    "batches_ahead": PREFETCH,
    "custom_fields": "leave it out: a dataset returns what it likes",
    "fname": f"{DATASET}; a .beton file is not read, gpuload.pack makes sets of the same use",
    "indices": "write gpuload.Loader(torch.utils.data.Subset(dataset, indices), …)",
    "order": "write shuffle=True for OrderOption.RANDOM, shuffle='block' for QUASI_RANDOM, nothing for SEQUENTIAL",
    "os_cache": "leave it out, or write gpuload.Loader(gpuload.Cached(dataset, bytes_limit), …)",
    "recompile": "leave it out: nothing is compiled",
}


def _instead(argument: str) -> str | None:
    if argument in ARGUMENTS:
        return ARGUMENTS[argument]
    if argument in inspect.signature(transforms.from_timm).parameters:
        return f"write transforms=T.from_timm(config, {argument}=…)"
    return None


loader_arguments = knows_arguments(_instead)
"""Decorates the ``__init__`` of `Loader`: the error for an argument of another library's loader says what to write."""
