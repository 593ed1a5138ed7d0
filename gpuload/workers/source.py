"""Where a chunk's samples come from: a map dataset by key, one or many at a time, or an iterable one by number.

Runs in a worker, or with num_workers=0 in the main process. Seeds the global generators before each sample of a user's
own dataset, so that what it draws is a function of (seed, epoch, position).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gpuload.order.place import IterablePlace
from gpuload.rng.generators import seed_generators, seeds_of
from gpuload.workers.iterable import Ended, Stream
from gpuload.workers.protocol import Request

__all__ = ["Ended", "Source", "is_iterable"]


class Source:
    """The samples of a dataset.

    Args:
        dataset: the user's, in this process.
        seed: of the loader.

    Attributes:
        seeds: whether the global generators are seeded before each sample.
        on_torch: called where the dataset has imported torch while it made its first samples.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self.seeds = not draws_nothing(dataset)
        self._many = fetches_many(dataset)
        self._without_torch = "torch" not in sys.modules
        self._stream: Stream | None = None
        self._told_epoch = -1
        self.on_torch: Callable[[], None] = lambda: None

    def open(self, request: Request, touch: Callable[[], None] = lambda: None) -> Callable[[int], Any]:
        """A function that gives the sample of a row of a chunk, asked in the order of the rows.

        `touch` is called for each sample that a stream passes over on the way.

        It raises `Ended` where a stream has no more samples, and whatever the dataset raises.
        """
        if request.told_epoch not in (-1, self._told_epoch):
            self._told_epoch = request.told_epoch
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                try:
                    set_epoch(request.told_epoch)
                except Exception as error:
                    return partial(_raise, error)
        if request.stream is not None:
            return self._from_stream(request, touch)
        if isinstance(request.indices, np.ndarray):
            keys: list[Any] = request.indices.tolist()
        else:
            keys = [int(key) if isinstance(key, np.integer) else key for key in request.indices]
        positions = request.positions.tolist()
        seeds = seeds_of(self._seed, request.epoch, request.positions) if self.seeds else []

        def one(row: int) -> Any:
            if seeds:
                seed_generators(self._seed, request.epoch, positions[row], seeds[row])
            sample = self._fetch_many([keys[row]])[0] if self._many else self._dataset[keys[row]]
            if self._without_torch and seeds and "torch" in sys.modules:
                # Imported on the way, and so neither seeded nor told which worker this is: once more.
                self._without_torch = False
                self.on_torch()
                return one(row)
            return sample

        if not self._many or len(keys) < 2:
            return one
        if self._without_torch and seeds:  # the same, as far as it can be told before
            one(0)
            self._without_torch = False
        if self.seeds:  # once for all of them: what they draw then depends on the chunk
            seed_generators(self._seed, request.epoch, positions[0])
        try:
            return self._fetch_many(keys).__getitem__
        except Exception:  # one by one: to find which
            return one

    def _fetch_many(self, keys: list[Any]) -> list[Any]:
        samples = list(self._dataset.__getitems__(keys))
        if len(samples) != len(keys):
            raise ValueError(
                f"{type(self._dataset).__name__}.__getitems__ was given {len(keys)} keys and returned "
                f"{len(samples)} samples; it must return one for each"
            )
        return samples

    def _from_stream(self, request: Request, touch: Callable[[], None]) -> Callable[[int], Any]:
        start = request.stream
        assert start is not None
        if self._stream is None or self._stream.run != start.run:
            self._stream = None  # the old one's iterator ends before the new one's begins
            self._stream = Stream(self._dataset, self._seed, start, request.epoch)
        numbers = np.asarray(request.indices).tolist()
        stream = self._stream
        stream.forget(start.samples)
        return lambda row: stream.get(numbers[row], touch)

    def place(self, request: Request, rows: int) -> IterablePlace | None:
        """How far the stream has come with so many rows of a chunk; None for a map dataset."""
        if self._stream is None:
            return None
        return self._stream.place(int(request.indices[0]) + rows)  # pyright: ignore[reportArgumentType]

    @property
    def broken(self) -> bool:
        """Whether the stream can give nothing more, after an error."""
        return self._stream is not None and self._stream.broken is not None


def _raise(error: Exception, row: int) -> Any:
    raise error


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
    """Whether it is a stream, and no map: torch's `IterableDataset`, or what has `__iter__` and no `__getitem__`."""
    if any(
        cls.__module__ == "torch.utils.data.dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    ):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
