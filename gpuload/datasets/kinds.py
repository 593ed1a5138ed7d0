"""What kind of dataset a user gave. In workers and in the main process; no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["draws_nothing", "fetches_many", "is_iterable"]


def draws_nothing(dataset: Any) -> bool:
    """Whether no generator has to be seeded for it: a dataset of gpuload's own, or torch's view of one."""
    module = type(dataset).__module__
    if module.startswith("gpuload.datasets"):
        if type(dataset).__name__ == "Joined":
            return all(map(draws_nothing, dataset.datasets))
        return all(getattr(dataset, name, None) is None for name in ("target_transform", "decode"))
    if module == "torch.utils.data.dataset":
        name = type(dataset).__name__
        if name == "Subset":
            return draws_nothing(dataset.dataset)
        if name == "ConcatDataset":
            return all(map(draws_nothing, dataset.datasets))
        return name == "TensorDataset"
    return False


def fetches_many(dataset: Any) -> bool:
    """Whether it has its own `__getitems__`; those of torch's views only call the datasets inside."""
    if type(dataset).__module__ == "torch.utils.data.dataset":
        if type(dataset).__name__ == "Subset":
            return fetches_many(dataset.dataset)
        if type(dataset).__name__ == "StackDataset":
            inner = dataset.datasets
            return any(map(fetches_many, inner.values() if isinstance(inner, dict) else inner))
    if getattr(dataset, "decode", None) is not None and type(dataset).__module__.startswith("gpuload.datasets."):
        return False  # the user's own function may draw, and then each sample is seeded for itself
    return callable(getattr(dataset, "__getitems__", None))


def is_iterable(dataset: Any) -> bool:
    """Whether it is torch's `IterableDataset`, or has `__iter__` and no `__getitem__`."""
    if any(
        cls.__module__ == "torch.utils.data.dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    ):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
