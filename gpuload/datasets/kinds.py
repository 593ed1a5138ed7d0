"""Recognises the kind of a user's dataset by the name of its class, without importing torch or other libraries.

A subclass may behave differently, so it does not count as its base class. This module runs in workers and in the main
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuload.datasets.tree import is_plain_tensor

__all__ = [
    "check_dataset",
    "fetch_samples",
    "forget",
    "is_deterministic",
    "is_iterable",
    "lazy_reader",
    "maps_samples",
    "natural_blocks",
    "row_bytes",
    "type_name",
    "uses_getitems",
]

LOADERS: Final = {  # objects that yield batches, by module and name
    ("gpuload.loader.loader", "Loader"),
    ("torch.utils.data.dataloader", "DataLoader"),
}
SPLITS: Final = {("datasets.dataset_dict", "DatasetDict"), ("datasets.dataset_dict", "IterableDatasetDict")}
PLAIN_CONTAINERS: Final = frozenset({np.ndarray, np.memmap, list, tuple, dict})  # indexing these runs no user code
TORCH: Final = "torch.utils.data.dataset"
SUBSET, STACK = (TORCH, "Subset"), (TORCH, "StackDataset")
CACHED: Final = ("gpuload.datasets.cached", "Cached")
JOINED: Final = {("gpuload.datasets.joined", "Joined"), ("gpuload.datasets.mix", "Mix")}
MAPPED: Final = ("gpuload.datasets.joined", "Mapped")
CONTAINERS: Final = {MAPPED, SUBSET, CACHED, *JOINED, STACK, (TORCH, "ConcatDataset")}


def check_dataset(dataset: Any) -> None:
    """Refuse objects that are easily mistaken for a dataset.

    Raises:
        TypeError: the object is a class, a loader, or a dict of splits; the message says what to pass instead.
    """
    if isinstance(dataset, type):
        raise TypeError(f"the dataset is the class {dataset.__name__} itself; pass an instance, {dataset.__name__}(…)")
    name, bases = type(dataset).__name__, {(base.__module__, base.__name__) for base in type(dataset).__mro__}
    if bases & LOADERS:
        raise TypeError(
            f"the dataset is a {name}, which yields batches; pass its dataset, loader.dataset, and give its "
            "batch_size, shuffle and collate_fn to gpuload.Loader"
        )
    if bases & SPLITS:
        raise TypeError(
            f"the dataset is a {name}, which contains several datasets; pass one: {', '.join(map(repr, dataset))}"
        )


def type_name(value: Any) -> tuple[str, str]:
    """Return the module and the name of an object's type."""
    return type(value).__module__, type(value).__name__


def _inner_datasets(dataset: Any) -> list[Any]:
    """Return the datasets inside a container of gpuload or torch; an empty list for any other dataset."""
    if type_name(dataset) not in CONTAINERS:
        return []
    datasets = vars(dataset).get("datasets")
    return list(datasets.values() if isinstance(datasets, dict) else datasets or [dataset.dataset])


def is_deterministic(dataset: Any, *, allow_plain_containers: bool = False) -> bool:
    """Return whether a dataset is known to draw no random numbers, so that no generator has to be seeded. This is known
    for gpuload's datasets without user functions, torch's TensorDataset, and torch's Subset and ConcatDataset of such
    datasets. With `allow_plain_containers`, it is also known for arrays, tensors, lists, tuples and dicts, and for a
    StackDataset of deterministic datasets."""
    if allow_plain_containers and (type(dataset) in PLAIN_CONTAINERS or is_plain_tensor(type(dataset))):
        return True
    if (kind := type_name(dataset)) == MAPPED or (kind == STACK and not allow_plain_containers):
        return False
    if kind in CONTAINERS:
        return all(
            is_deterministic(part, allow_plain_containers=allow_plain_containers) for part in _inner_datasets(dataset)
        )
    if kind[0].startswith("gpuload.datasets"):
        return all(getattr(dataset, name, None) is None for name in ("target_transform", "decode"))
    return kind == (TORCH, "TensorDataset")


def uses_getitems(dataset: Any) -> bool:
    """Return whether samples of a dataset are read with `__getitems__`. torch's Subset and StackDataset implement
    `__getitems__` by calling the inner datasets, so the result depends on the inner datasets.

    A dataset with functions passed to ``map()`` qualifies only if these functions are still called one by one
    (`lazy_reader`): they may draw random numbers, and the generators are seeded for each sample.
    """
    kind, inner_datasets = type_name(dataset), _inner_datasets(dataset)
    if maps_samples(dataset):
        inner_datasets = [part.dataset if type_name(part) == MAPPED else part for part in inner_datasets]
        return (
            kind in (MAPPED, *JOINED)
            and any(map(uses_getitems, inner_datasets))
            and all(map(is_deterministic, inner_datasets))
        )
    if kind in (SUBSET, STACK):
        return any(map(uses_getitems, inner_datasets))
    if kind == CACHED:
        return any(uses_getitems(part) or is_deterministic(part) for part in inner_datasets)
    if kind in JOINED:
        return any(map(uses_getitems, inner_datasets)) and all(
            uses_getitems(part) or is_deterministic(part) for part in inner_datasets
        )
    if getattr(dataset, "decode", None) is not None and kind[0].startswith("gpuload.datasets."):
        return False  # the user's function may draw random numbers, so the generators are seeded for each sample
    return callable(getattr(dataset, "__getitems__", None))


def maps_samples(dataset: Any) -> bool:
    """Return whether functions passed to ``map()`` change the samples of a dataset, or of one of its inner datasets."""
    return type_name(dataset) == MAPPED or any(map(maps_samples, _inner_datasets(dataset)))


def fetch_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return samples of a dataset, in one call if the dataset supports that.

    Raises:
        ValueError: ``__getitems__`` returned the wrong number of samples.
    """
    if not uses_getitems(dataset):
        return [dataset[index] for index in indices]
    samples = list(dataset.__getitems__(indices))
    if len(samples) != len(indices):
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__ was called with {len(indices)} keys and returned "
            f"{len(samples)} samples; it must return one sample for each key"
        )
    return samples


def forget(dataset: Any, index: Any) -> list[str]:
    """Remove a damaged sample from all caches, so that it is read again. Return the names of the caches that had the
    sample."""
    if type_name(dataset) == SUBSET:
        return forget(dataset.dataset, dataset.indices[index])
    return dataset._forget(index) if _has_gpuload_method(dataset, "_forget") else []


def lazy_reader(dataset: Any, indices: list[int]) -> Callable[[int], Any] | None:
    """Return a function that takes a position in `indices` and returns the sample; it must be called once per position.
    Return None if `fetch_samples` suffices."""
    return dataset._lazy_reader(indices) if _has_gpuload_method(dataset, "_lazy_reader") else None


def _has_gpuload_method(dataset: Any, method: str) -> bool:
    return type(dataset).__module__.startswith("gpuload.datasets.") and hasattr(type(dataset), method)


def natural_blocks(dataset: Any) -> np.ndarray | None:
    """Return the block boundaries of a map-style dataset, from its method ``blocks()``, as int64: the index of the
    first sample of each block, then the length. Each block is read as a unit. Return None if the dataset has no blocks.

    Raises:
        TypeError, ValueError: the method returned anything else.
    """
    blocks: Any = getattr(dataset, "blocks", None)
    if not callable(blocks) or (starts := blocks()) is None:
        return None
    bounds, count = np.asarray(starts), len(dataset)
    rule = f"{type(dataset).__name__}.blocks() must return the first index of each block, then the length {count}"
    if bounds.ndim != 1 or bounds.dtype.kind not in "iu":
        raise TypeError(f"{rule}, as integers; got {bounds.dtype} of shape {bounds.shape}")
    bounds = bounds.astype(np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        shown = ", ".join(map(str, bounds[:4].tolist())) + (f", …, {bounds[-1]}" if len(bounds) > 4 else "")
        raise ValueError(f"{rule}, in ascending order from 0; got {shown or 'nothing'}")
    return np.unique(bounds)


def row_bytes(dataset: Any) -> int:
    """Return the size of an image in bytes if workers copy the images unchanged from an array; otherwise 0."""
    return dataset._row_bytes if type_name(dataset) == ("gpuload.datasets.stores.array", "ArrayFile") else 0


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset is a torch `IterableDataset`, or has `__iter__` and no `__getitem__`."""
    if any(cls.__module__ == TORCH and cls.__name__ == "IterableDataset" for cls in type(dataset).__mro__):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
