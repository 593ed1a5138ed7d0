"""What kind of dataset a user gave. In workers and in the main process; no torch."""

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
    "image_rows",
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
JOINED: Final = {("gpuload.datasets.joined", "Joined"), ("gpuload.datasets.mix", "Mix")}
MAPPED: Final = ("gpuload.datasets.joined", "Mapped")
AROUND = ("gpuload.datasets.cached", "gpuload.datasets.resident")  # samples of the dataset inside, kept


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


def draws_nothing(dataset: Any, *, stored: bool = False) -> bool:
    """Whether no generator has to be seeded for it: a dataset of gpuload's own, or one of torch's that only looks into
    such or into tensors; with `stored` also an array, tensor, list or dict of samples."""
    if stored and (type(dataset) in STORED or is_plain_tensor(type(dataset))):
        return True
    module, name = type(dataset).__module__, type(dataset).__name__
    if (module, name) == MAPPED:
        return False
    if module in AROUND or (module, name) == (TORCH, "Subset"):
        return draws_nothing(dataset.dataset, stored=stored)
    if (module, name) in JOINED or (module, name) == (TORCH, "ConcatDataset"):
        return all(draws_nothing(part, stored=stored) for part in dataset.datasets)
    if module.startswith("gpuload.datasets"):
        return all(getattr(dataset, name, None) is None for name in ("target_transform", "decode"))
    if (module, name) == (TORCH, "StackDataset") and stored:
        parts = dataset.datasets
        return all(draws_nothing(part, stored=True) for part in (parts.values() if isinstance(parts, dict) else parts))
    return (module, name) == (TORCH, "TensorDataset")


def fetches_many(dataset: Any) -> bool:
    """Whether it has its own `__getitems__`; those of torch's views only call the datasets inside.

    Where functions change samples, only if these are called one by one nevertheless, see `each_of`: they may draw, and
    then each sample is seeded for itself.
    """
    kind = _kind(dataset)
    if kind == MAPPED:
        return fetches_many(dataset.dataset) and draws_nothing(dataset.dataset)
    if maps_samples(dataset):
        inner = [part.dataset if _kind(part) == MAPPED else part for part in getattr(dataset, "datasets", ())]
        return kind in JOINED and any(map(fetches_many, inner)) and all(map(draws_nothing, inner))
    if type(dataset).__module__ == TORCH:
        if type(dataset).__name__ == "Subset":
            return fetches_many(dataset.dataset)
        if type(dataset).__name__ == "StackDataset":
            inner = dataset.datasets
            return any(map(fetches_many, inner.values() if isinstance(inner, dict) else inner))
    if type(dataset).__module__ == "gpuload.datasets.cached":
        return fetches_many(dataset.dataset) or draws_nothing(dataset.dataset)
    if kind in JOINED:
        parts = [(fetches_many(part), draws_nothing(part)) for part in dataset.datasets]
        return any(many for many, _ in parts) and all(many or nothing for many, nothing in parts)
    if getattr(dataset, "decode", None) is not None and type(dataset).__module__.startswith("gpuload.datasets."):
        return False  # the user's own function may draw, and then each sample is seeded for itself
    return callable(getattr(dataset, "__getitems__", None))


def maps_samples(dataset: Any) -> bool:
    """Return whether functions of ``map()`` change a dataset's samples, or some of those that it is made of."""
    kind = _kind(dataset)
    if kind == MAPPED:
        return True
    if kind[0] != TORCH and kind not in JOINED and kind[0] not in AROUND:
        return False
    several = vars(dataset).get("datasets", ())
    return any(map(maps_samples, several.values() if isinstance(several, dict) else several)) or maps_samples(
        vars(dataset).get("dataset")
    )


def _kind(dataset: Any) -> tuple[str, str]:
    return type(dataset).__module__, type(dataset).__name__


def fetched(dataset: Any, indices: list[int]) -> list[Any]:
    """Samples of a dataset, together if it can.

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
    """Drop a sample that cannot be decoded from the caches that it came through; returns the names of those that had
    it. What a server gave once by mistake is read anew then."""
    module, name = type(dataset).__module__, type(dataset).__name__
    if (module, name) == (TORCH, "Subset"):
        return forget(dataset.dataset, dataset.indices[index])
    if module == "gpuload.datasets.resident":
        return forget(dataset.dataset, index)
    is_ours = module.startswith("gpuload.datasets")
    return dataset._forget(index) if is_ours and hasattr(type(dataset), "_forget") else []


def each_of(dataset: Any, indices: list[int]) -> Callable[[int], Any] | None:
    """A function of a row that reads the sample of `indices` there when it is asked for, each once; None: the dataset
    has them all at once, or one by one."""
    is_ours = type(dataset).__module__.startswith("gpuload.")  # the user's own may do more than that
    return dataset._each(indices) if is_ours and hasattr(type(dataset), "_each") else None


def natural_blocks(dataset: Any) -> np.ndarray | None:
    """What a map dataset says by ``blocks()``: where the samples begin that it reads as one, and its length, as int64;
    None if it does not.

    Raises:
        TypeError, ValueError: what it gives is something else.
    """
    if not callable(blocks := getattr(dataset, "blocks", None)):
        return None
    found: Any = blocks()
    if found is None:
        return None
    bounds, count = np.asarray(found), len(dataset)
    told = f"{type(dataset).__name__}.blocks() must give where each block begins, and the length {count} as the last"
    if bounds.ndim != 1 or bounds.dtype.kind not in "iu":
        raise TypeError(f"{told}, as integers; got {bounds.dtype} of shape {bounds.shape}")
    bounds = bounds.astype(np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        shown = ", ".join(map(str, bounds[:4].tolist())) + (f", …, {bounds[-1]}" if len(bounds) > 4 else "")
        raise ValueError(f"{told}, in ascending order from 0 on; got {shown or 'nothing'}")
    return np.unique(bounds)


def row_bytes(dataset: Any) -> int:
    """How many bytes each image of a dataset takes, if workers copy them as they lie in an array; else 0."""
    kind = type(dataset)  # not the user's own, which may do more than that
    is_ours = (kind.__module__, kind.__name__) == ("gpuload.datasets.stores.array", "ArrayFile")
    return dataset._row_bytes if is_ours else 0


def image_rows(dataset: Any, numbers: list[int]) -> np.ndarray | None:
    """All images of a dataset with `row_bytes`, N×H×W×C, for one who copies those of these numbers."""
    return dataset._image_rows(numbers)


def is_iterable(dataset: Any) -> bool:
    """Whether it is torch's `IterableDataset`, or has `__iter__` and no `__getitem__`."""
    if any(cls.__module__ == TORCH and cls.__name__ == "IterableDataset" for cls in type(dataset).__mro__):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
