"""Map datasets of functions, which workers can import without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class MapDataset:
    """A dataset whose sample i is `function(i)`."""

    def __init__(self, function: Callable[[Any], Any] = int, samples: int = 10) -> None:
        self.function = function
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


class BatchedMapDataset(MapDataset):
    """A dataset that is read by `__getitems__` only, whose keys it lists in `calls`."""

    def __init__(self, function: Callable[[Any], Any] = int, samples: int = 10) -> None:
        super().__init__(function, samples)
        self.calls: list[list[Any]] = []

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("__getitem__ was called, although there is __getitems__")

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        self.calls.append(list(keys))
        return [self.function(key) for key in keys]
