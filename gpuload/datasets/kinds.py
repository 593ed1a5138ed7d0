"""What kind of dataset a user gave: how it is asked for samples. In workers and in the main process; no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["draws_nothing", "fetches_many", "is_iterable"]


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is gpuload's own, or torch's view of such: no generator needs to be seeded for it."""
    module = type(dataset).__module__
    if module.startswith("gpuload.datasets"):
        return getattr(dataset, "target_transform", None) is None
    if module == "torch.utils.data.dataset":
        name = type(dataset).__name__
        if name == "Subset":
            return draws_nothing(dataset.dataset)
        if name == "ConcatDataset":
            return all(map(draws_nothing, dataset.datasets))
        return name == "TensorDataset"
    return False


def fetches_many(dataset: Any) -> bool:
    """Whether it has a `__getitems__` of its own. Those of torch's views only pass on to the datasets within."""
    if type(dataset).__module__ == "torch.utils.data.dataset":
        if type(dataset).__name__ == "Subset":
            return fetches_many(dataset.dataset)
        if type(dataset).__name__ == "StackDataset":
            within = dataset.datasets
            return any(map(fetches_many, within.values() if isinstance(within, dict) else within))
    return callable(getattr(dataset, "__getitems__", None))


def is_iterable(dataset: Any) -> bool:
    """Whether it is an iterable dataset: torch's `IterableDataset`, or what has `__iter__` and no `__getitem__`."""
    if any(
        cls.__module__ == "torch.utils.data.dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    ):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
