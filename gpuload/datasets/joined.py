"""What can be done with any of gpuload's map-style datasets (`Dataset`): ``+`` puts another one after it (`Joined`),
``map()`` changes its samples (`Mapped`).

Made in the main process, copied to workers. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from gpuload.datasets.classes import warn_of_other_classes
from gpuload.datasets.kinds import each_of, fetched, forget, maps_samples, natural_blocks
from gpuload.datasets.scan import from_start

__all__ = ["Dataset", "Joined", "Mapped", "has_samples"]


class Dataset:
    """Base of gpuload's map-style datasets."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: SupportsIndex) -> Any:
        raise NotImplementedError

    def __add__(self, other: Any) -> Joined:
        """Put another map-style dataset after this one."""
        return Joined([self, other]) if has_samples(other) else NotImplemented

    def map(self, fn: Callable[[Any], Any]) -> Any:
        """Return this dataset with each sample changed by a function, in the workers.

        It is for captions and targets; images are not decoded yet, and are for ``Loader(transforms=…)``.

        Args:
            fn: gets a sample as the dataset gives it, and returns the sample to use in its place. It may draw random
                numbers: gpuload seeds the global generators for each sample.

        Raises:
            TypeError: `fn` cannot be called.

        Example:
            >>> words = Joined([["a cat", "a dog"], ["a bird"]])
            >>> tokens = words.map(lambda caption: [1, *caption.encode(), 2])
            >>> len(tokens), tokens[0]
            (3, [1, 97, 32, 99, 97, 116, 2])
        """
        return Mapped(self, fn)


class Joined(Dataset):
    """Datasets one after the other, as torch's ConcatDataset has them: what ``+`` makes. Workers need no torch for it.

    Attributes:
        datasets: the datasets.
        cumulative_sizes: where each ends.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        warn_of_other_classes(self.datasets)
        self.cumulative_sizes: list[int] = np.cumsum([len(dataset) for dataset in self.datasets]).tolist()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: SupportsIndex) -> Any:
        which, number = self._place(index)
        return self.datasets[which][number]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Several samples; those of one dataset are asked for together."""
        places = [self._place(index) for index in indices]
        samples: list[Any] = [None] * len(places)
        for which in sorted({which for which, _ in places}):
            rows = [row for row, (its, _) in enumerate(places) if its == which]
            for row, sample in zip(rows, fetched(self.datasets[which], [places[row][1] for row in rows]), strict=True):
                samples[row] = sample
        return samples

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Let each dataset that can have the kernel read these samples, which are asked for soon."""
        for which, number in map(self._place, indices):
            if (will_need := getattr(self.datasets[which], "will_need", None)) is not None:
                will_need([number])

    def _forget(self, index: int) -> list[str]:
        """See `gpuload.datasets.kinds.forget`."""
        which, number = self._place(index)
        return forget(self.datasets[which], number)

    def blocks(self) -> np.ndarray | None:
        """Where the blocks of each dataset begin, and the length; single samples of one that has none. None if none
        has any."""
        own = [natural_blocks(dataset) for dataset in self.datasets]
        if all(bounds is None for bounds in own):
            return None
        sizes = np.diff([0, *self.cumulative_sizes])
        whole = [np.arange(size + 1) if bounds is None else bounds for bounds, size in zip(own, sizes, strict=True)]
        starts = [0, *self.cumulative_sizes[:-1]]
        return np.concatenate([bounds + start for bounds, start in zip(whole, starts, strict=True)])

    def _place(self, index: SupportsIndex) -> tuple[int, int]:
        """The number of its dataset, and its number in there."""
        number = from_start(index, len(self), f"the joined datasets have {len(self)} samples")
        which = bisect_right(self.cumulative_sizes, number)
        return which, number - (self.cumulative_sizes[which - 1] if which else 0)

    def _each(self, indices: Iterable[SupportsIndex]) -> Callable[[int], Any] | None:
        """Return a function that gives the sample of a row, if samples are mapped: all are fetched now, each is mapped
        when it is asked for. None: `__getitems__` does all at once."""
        if not maps_samples(self):
            return None
        places = [self._place(index) for index in indices]
        readers: list[Any] = [None] * len(places)
        for which in sorted({which for which, _ in places}):
            part = self.datasets[which]
            rows = [row for row, (its, _) in enumerate(places) if its == which]
            numbers = [places[row][1] for row in rows]
            reader = each_of(part, numbers) or fetched(part, numbers).__getitem__
            for number, row in enumerate(rows):
                readers[row] = partial(reader, number)
        return lambda row: readers[row]()

    def __add__(self, other: Any) -> Joined:
        return Joined([*self.datasets, other]) if has_samples(other) else NotImplemented

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.datasets))


class Mapped(Dataset):
    """A dataset whose samples functions have changed, which is what ``map()`` makes. Its other attributes are those of
    the dataset.

    Attributes:
        dataset: the dataset.
        fns: the functions, in the order in which they are called.
    """

    def __init__(self, dataset: Any, fn: Callable[[Any], Any]) -> None:
        if not callable(fn):
            raise TypeError(f"map() takes a function of a sample, which returns the new one, got {fn!r}")
        mapped = isinstance(dataset, Mapped)
        self.dataset: Any = dataset.dataset if mapped else dataset
        self.fns: tuple[Callable[[Any], Any], ...] = (*dataset.fns, fn) if mapped else (fn,)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self._map(self.dataset[index])

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        return [self._map(sample) for sample in fetched(self.dataset, list(indices))]  # pyright: ignore[reportArgumentType]

    def _each(self, indices: list[int]) -> Callable[[int], Any]:
        """Return a function that gives the sample of a row, as `Joined._each` does."""
        read = each_of(self.dataset, indices) or fetched(self.dataset, indices).__getitem__
        return lambda row: self._map(read(row))

    def _forget(self, index: Any) -> list[str]:
        return forget(self.dataset, index)

    def _map(self, sample: Any) -> Any:
        for fn in self.fns:
            sample = fn(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __repr__(self) -> str:
        return f"{self.dataset!r}{''.join(f'.map({_name(fn)})' for fn in self.fns)}"


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def has_samples(other: Any) -> bool:
    return hasattr(other, "__getitem__") and hasattr(other, "__len__") and not isinstance(other, str | dict)
