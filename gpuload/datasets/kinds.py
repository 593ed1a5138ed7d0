"""What kind of dataset a user gave, by the names of its classes, so that nothing is imported: no torch.

A class that a user derives from one of these may do more, and is another kind. In workers and in the main process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuload.datasets.tree import is_plain_tensor

__all__ = [
    "check_dataset",
    "check_map_style",
    "draws_nothing",
    "each_of",
    "fetched",
    "fetches_many",
    "forget",
    "is_iterable",
    "maps_samples",
    "natural_blocks",
    "row_bytes",
]

LOADERS: Final = {  # by module and name: what makes batches
    ("gpuload.loader.loader", "Loader"),
    ("torch.utils.data.dataloader", "DataLoader"),
}
SPLITS: Final = {("datasets.dataset_dict", "DatasetDict"), ("datasets.dataset_dict", "IterableDatasetDict")}
STORED: Final = frozenset({np.ndarray, np.memmap, list, tuple, dict})  # to index them runs no code of the user's
TORCH: Final = "torch.utils.data.dataset"
SUBSET, STACK = (TORCH, "Subset"), (TORCH, "StackDataset")
CACHED: Final = ("gpuload.datasets.cached", "Cached")
DEVICE_CACHED: Final = ("gpuload.datasets.resident", "DeviceCached")
JOINED: Final = {("gpuload.datasets.joined", "Joined"), ("gpuload.datasets.mix", "Mix")}
MAPPED: Final = ("gpuload.datasets.joined", "Mapped")
AROUND: Final = {MAPPED, SUBSET, CACHED, DEVICE_CACHED, *JOINED, STACK, (TORCH, "ConcatDataset")}


def check_dataset(dataset: Any) -> None:
    """Refuse what has a dataset's methods, or is made of some, and is none.

    Raises:
        TypeError: it is a class, a loader, or a dict of splits; the message says what to pass.
    """
    if isinstance(dataset, type):
        raise TypeError(
            f"the dataset is the class {dataset.__name__} itself; pass an object of it, {dataset.__name__}(…), with "
            "the arguments that it takes"
        )
    name, bases = type(dataset).__name__, {(base.__module__, base.__name__) for base in type(dataset).__mro__}
    if bases & LOADERS:
        raise TypeError(
            f"the dataset is a {name}, which makes batches of one; pass the dataset in it, loader.dataset, and give "
            "its batch_size, shuffle and collate_fn to gpuload.Loader"
        )
    if bases & SPLITS:
        raise TypeError(
            f"the dataset is a {name}, which holds several; pass one of them: {', '.join(map(repr, dataset))}"
        )


def check_map_style(dataset: Any, taker: str, changing: tuple[str, ...]) -> None:
    """Refuse a dataset whose samples cannot be cached.

    Raises:
        TypeError: it is no map-style dataset, or has a method, one of `changing`, by which its samples change; the
            message names the `taker`.
    """
    check_dataset(dataset)
    name = type(dataset).__name__
    if is_iterable(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{taker}() takes a map-style dataset, with a length and an index for each sample, got {name}")
    for method in changing:
        if callable(getattr(dataset, method, None)):
            raise TypeError(
                f"{name} has {method}(), so its samples change while it is used, and kept ones would not; cache what "
                "it reads from instead"
            )


def _kind(dataset: Any) -> tuple[str, str]:
    return type(dataset).__module__, type(dataset).__name__


def _inside(dataset: Any) -> list[Any]:
    """Return the datasets whose samples a dataset of gpuload's or torch's gives; none for any other."""
    if _kind(dataset) not in AROUND:
        return []
    several = vars(dataset).get("datasets")
    return list(several.values() if isinstance(several, dict) else several or [dataset.dataset])


def draws_nothing(dataset: Any, *, stored: bool = False) -> bool:
    """Return whether no generator has to be seeded for a dataset: one of gpuload's own, or one of torch's that only
    looks into such or into tensors; with `stored` also an array, tensor, list or dict of samples."""
    if stored and (type(dataset) in STORED or is_plain_tensor(type(dataset))):
        return True
    if (kind := _kind(dataset)) == MAPPED or (kind == STACK and not stored):
        return False
    if kind in AROUND:
        return all(draws_nothing(part, stored=stored) for part in _inside(dataset))
    if kind[0].startswith("gpuload.datasets"):
        return all(getattr(dataset, name, None) is None for name in ("target_transform", "decode"))
    return kind == (TORCH, "TensorDataset")


def fetches_many(dataset: Any) -> bool:
    """Return whether a dataset has its own `__getitems__`; those of torch's views only call the datasets inside.

    Where functions change samples, only if these are called one by one nevertheless, see `each_of`: they may draw, and
    then each sample is seeded for itself.
    """
    kind, inside = _kind(dataset), _inside(dataset)
    if maps_samples(dataset):
        inside = [part.dataset if _kind(part) == MAPPED else part for part in inside]
        return kind in (MAPPED, *JOINED) and any(map(fetches_many, inside)) and all(map(draws_nothing, inside))
    if kind in (SUBSET, STACK):
        return any(map(fetches_many, inside))
    if kind == CACHED:
        return any(fetches_many(part) or draws_nothing(part) for part in inside)
    if kind in JOINED:
        return any(map(fetches_many, inside)) and all(fetches_many(part) or draws_nothing(part) for part in inside)
    if getattr(dataset, "decode", None) is not None and kind[0].startswith("gpuload.datasets."):
        return False  # the user's own function may draw, and then each sample is seeded for itself
    return callable(getattr(dataset, "__getitems__", None))


def maps_samples(dataset: Any) -> bool:
    """Return whether functions of ``map()`` change a dataset's samples, or some of those that it is made of."""
    return _kind(dataset) == MAPPED or any(map(maps_samples, _inside(dataset)))


def fetched(dataset: Any, indices: list[int]) -> list[Any]:
    """Return samples of a dataset, together if it can.

    Raises:
        ValueError: its ``__getitems__`` returned more or fewer than asked for.
    """
    if not fetches_many(dataset):
        return [dataset[index] for index in indices]
    samples = list(dataset.__getitems__(indices))
    if len(samples) != len(indices):
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__ was given {len(indices)} keys and returned "
            f"{len(samples)} samples; it must return one for each"
        )
    return samples


def forget(dataset: Any, index: Any) -> list[str]:
    """Drop a sample that cannot be decoded from the caches that it came through, so that it is read again; return the
    names of the caches that had it."""
    if _kind(dataset) == SUBSET:
        return forget(dataset.dataset, dataset.indices[index])
    if _kind(dataset) == DEVICE_CACHED:
        return forget(dataset.dataset, index)
    return dataset._forget(index) if _is_ours_with(dataset, "_forget") else []


def each_of(dataset: Any, indices: list[int]) -> Callable[[int], Any] | None:
    """Return a function of a row that reads the sample of `indices` there when it is asked for, each once; None means
    that the dataset has them all at once, or one by one."""
    return dataset._each(indices) if _is_ours_with(dataset, "_each") else None


def _is_ours_with(dataset: Any, method: str) -> bool:
    return type(dataset).__module__.startswith("gpuload.datasets.") and hasattr(type(dataset), method)


def natural_blocks(dataset: Any) -> np.ndarray | None:
    """Return what a map dataset says by ``blocks()``: where the samples begin that it reads as one, and its length, as
    int64; None if it does not.

    Raises:
        TypeError, ValueError: what it gives is something else.
    """
    blocks: Any = getattr(dataset, "blocks", None)
    if not callable(blocks) or (starts := blocks()) is None:
        return None
    bounds, count = np.asarray(starts), len(dataset)
    rule = f"{type(dataset).__name__}.blocks() must give where each block begins, and the length {count} as the last"
    if bounds.ndim != 1 or bounds.dtype.kind not in "iu":
        raise TypeError(f"{rule}, as integers; got {bounds.dtype} of shape {bounds.shape}")
    bounds = bounds.astype(np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        shown = ", ".join(map(str, bounds[:4].tolist())) + (f", …, {bounds[-1]}" if len(bounds) > 4 else "")
        raise ValueError(f"{rule}, in ascending order from 0 on; got {shown or 'nothing'}")
    return np.unique(bounds)


def row_bytes(dataset: Any) -> int:
    """Return how many bytes each image of a dataset takes, if workers copy them as they lie in an array; else 0."""
    return dataset._row_bytes if _kind(dataset) == ("gpuload.datasets.stores.array", "ArrayFile") else 0


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset is torch's `IterableDataset`, or has `__iter__` and no `__getitem__`."""
    if any(cls.__module__ == TORCH and cls.__name__ == "IterableDataset" for cls in type(dataset).__mro__):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
