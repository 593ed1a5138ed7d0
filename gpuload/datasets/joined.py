"""What can be done with any of gpuload's map-style datasets (`Dataset`): ``+`` puts another one after it (`Joined`),
``map()`` changes its samples (`Mapped`).

Made in the main process, copied to workers. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from gpuload.datasets.classes import warn_of_other_classes
from gpuload.datasets.kinds import each_of, fetched, forget, maps_samples, natural_blocks
from gpuload.datasets.scan import from_start

__all__ = ["Dataset", "Joined", "Mapped", "View", "has_samples"]


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
        """Return several samples; those of one dataset are asked for together."""
        samples: dict[int, Any] = {}
        for dataset, rows, numbers in self._grouped(indices):
            samples |= zip(rows, fetched(dataset, numbers), strict=True)
        return [samples[row] for row in range(len(samples))]

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Let each dataset that can have the kernel read these samples, which are asked for soon."""
        for dataset, _, numbers in self._grouped(indices):
            if (will_need := getattr(dataset, "will_need", None)) is not None:
                will_need(numbers)

    def _forget(self, index: int) -> list[str]:
        """See `gpuload.datasets.kinds.forget`."""
        which, number = self._place(index)
        return forget(self.datasets[which], number)

    def blocks(self) -> np.ndarray | None:
        """Return where the blocks of each dataset begin, and the length; None if no dataset has any. A dataset without
        has blocks of one sample."""
        natural = [natural_blocks(dataset) for dataset in self.datasets]
        if all(blocks is None for blocks in natural):
            return None
        starts = [0, *self.cumulative_sizes]
        sizes = np.diff(starts)
        bounds = [np.arange(size + 1) if part is None else part for part, size in zip(natural, sizes, strict=True)]
        return np.concatenate([blocks + start for blocks, start in zip(bounds, starts, strict=False)])

    def _place(self, index: SupportsIndex) -> tuple[int, int]:
        """Return the number of a sample's dataset, and its own number in there."""
        number = from_start(index, len(self), f"the joined datasets have {len(self)} samples")
        which = bisect_right(self.cumulative_sizes, number)
        return which, number - (self.cumulative_sizes[which - 1] if which else 0)

    def _grouped(self, indices: Iterable[SupportsIndex]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Yield each dataset that samples are of, with their rows in `indices`, and their numbers in the dataset."""
        places = [self._place(index) for index in indices]
        for which in sorted({which for which, _ in places}):
            rows = [row for row, place in enumerate(places) if place[0] == which]
            yield self.datasets[which], rows, [places[row][1] for row in rows]

    def _each(self, indices: Iterable[SupportsIndex]) -> Callable[[int], Any] | None:
        """Return a function that gives the sample of a row, if samples are mapped: all are fetched now, each is mapped
        when it is asked for. None: `__getitems__` does all at once."""
        if not maps_samples(self):
            return None
        readers: dict[int, Callable[[], Any]] = {}
        for dataset, rows, numbers in self._grouped(indices):
            read = each_of(dataset, numbers) or fetched(dataset, numbers).__getitem__
            readers |= {row: partial(read, number) for number, row in enumerate(rows)}
        return lambda row: readers[row]()

    def __add__(self, other: Any) -> Joined:
        return Joined([*self.datasets, other]) if has_samples(other) else NotImplemented

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.datasets))


class View(Dataset):
    """Base of datasets that pass another one on, all of it but its samples.

    Attributes:
        dataset: the other one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def blocks(self) -> np.ndarray | None:
        """Return the blocks of the dataset."""
        return natural_blocks(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


class Mapped(View):
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
        super().__init__(dataset.dataset if mapped else dataset)
        self.fns: tuple[Callable[[Any], Any], ...] = (*dataset.fns, fn) if mapped else (fn,)

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

    def __repr__(self) -> str:
        names = [getattr(fn, "__qualname__", None) or repr(fn) for fn in self.fns]
        return repr(self.dataset) + "".join(f".map({name})" for name in names)


def has_samples(other: Any) -> bool:
    return hasattr(other, "__getitem__") and hasattr(other, "__len__") and not isinstance(other, str | dict)
