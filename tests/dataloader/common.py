"""Datasets that workers can import without torch, and the two loaders beside each other."""

from __future__ import annotations

import os
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any


class Made:
    """Sample i is what a function makes of i."""

    def __init__(self, function: Callable[[Any], Any] = int, samples: int = 10) -> None:
        self.function = function
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


class Many(Made):
    """The same, many at a time; `calls` are the keys that it was asked for."""

    def __init__(self, function: Callable[[Any], Any] = int, samples: int = 10) -> None:
        super().__init__(function, samples)
        self.calls: list[list[Any]] = []

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("asked for one, although it can give many")

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        self.calls.append(list(keys))
        return [self.function(key) for key in keys]


Pair = namedtuple("Pair", ["left", "right"])


class NamedDict(dict):
    """A mapping of the user's own."""


class NamedList(list):
    """A sequence of the user's own."""


def worker_info(key: Any) -> Any:
    """What torch tells of the worker that this runs in."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else (os.getpid(), info.id, info.num_workers, info.seed, type(info.dataset).__name__)


def global_random_numbers(key: Any) -> tuple[float, float, float]:
    """What the global generators give."""
    import numpy as np
    import torch

    return random.random(), float(np.random.rand()), float(torch.rand(()))


def gpuload_batches(dataset: Any, *args: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """All batches of some epochs."""
    import gpuload as gl

    with gl.Loader(dataset, *args, **{"device": "cpu", "num_workers": 0, **options}) as loader:
        return [batch for _ in range(epochs) for batch in loader]


def torch_batches(dataset: Any, *args: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """What torch's DataLoader gives, without workers."""
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, *args, **options)
    return [batch for _ in range(epochs) for batch in loader]


def alike(first: Any, second: Any) -> bool:
    """Whether two batches are equal: types, dtypes, keys and their order, and all values."""
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
    return len(first) == len(second) and all(alike(first_child, second_child) for first_child, second_child in children)
