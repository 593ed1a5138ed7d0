"""Batches of gpuload's and of torch's loader, and their comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import gpuload as gl


def cpu_loader(dataset: Any, *args: Any, **options: Any) -> gl.Loader:
    """Return a loader without workers, unless `options` say otherwise."""
    return gl.Loader(dataset, *args, **{"device": "cpu", "num_workers": 0, **options})


def gpuload_batches(dataset: Any, *args: Any, epochs: int = 1, **options: Any) -> list[Any]:
    with cpu_loader(dataset, *args, **options) as loader:
        return [batch for _ in range(epochs) for batch in loader]


def torch_batches(dataset: Any, *args: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """Return the batches of torch's DataLoader, without workers."""
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, *args, **options)
    return [batch for _ in range(epochs) for batch in loader]


def as_lists(batches: Any) -> list[Any]:
    """Return batches with tensors as lists."""
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


def alike(first: Any, second: Any) -> bool:
    """Return whether two batches are equal: types, dtypes, keys and their order, and all values."""
    import torch

    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if is_dataclass(first):
        return all(alike(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    if hasattr(first, "keys"):
        return list(first) == list(second) and all(alike(first[key], second[key]) for key in first)
    if isinstance(first, str | bytes) or not hasattr(first, "__iter__"):
        return first == second
    children: Iterator[tuple[Any, Any]] = zip(first, second, strict=False)
    return len(first) == len(second) and all(alike(*pair) for pair in children)
