"""Operations on gpuload's map-style datasets (`Dataset`): ``+`` concatenates two datasets (`Joined`), and ``map()``
applies a function to the samples (`Mapped`).

The datasets are created in the main process and copied to workers. This module does not import torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, SupportsIndex

import numpy as np

from gpuload.checks import function
from gpuload.datasets.classes import warn_of_class_conflicts
from gpuload.datasets.kinds import fetch_samples, forget, lazy_reader, maps_samples, natural_blocks
from gpuload.datasets.scan import normalize_index

__all__ = ["Dataset", "Joined", "Mapped", "View", "is_map_style", "walk_datasets"]

MAX_DEPTH: Final = 8  # maximum depth of the search in nested datasets


class Dataset:
    """The base class of gpuload's map-style datasets."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("transform", "transforms"):
            raise ValueError(f"{name} would have no effect on a gpuload dataset; pass transforms=[…] to the Loader")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: SupportsIndex) -> Any:
        raise NotImplementedError

    def __add__(self, other: object) -> Joined:
        """Concatenate this dataset with another map-style dataset."""
        return Joined([self, other]) if is_map_style(other) else NotImplemented

    def map(self, fn: Callable[[Any], Any]) -> Any:
        """Return this dataset with a function applied to each sample, in the workers.

        Use it for captions and targets. Images are not decoded yet: transform them in ``Loader(transforms=…)``.

        Args:
            fn: a function that takes a sample of the dataset and returns its replacement. It may draw random numbers:
                gpuload seeds the global generators for each sample.

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
    """Concatenated datasets, the result of ``+``. It works like torch's ConcatDataset, but workers do not need torch.

    Attributes:
        datasets: the datasets.
        cumulative_sizes: for each dataset, the index after its last sample in the concatenation.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        warn_of_class_conflicts(self.datasets)
        self.cumulative_sizes: list[int] = np.cumsum([len(dataset) for dataset in self.datasets]).tolist()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: SupportsIndex) -> Any:
        dataset_index, inner_index = self._locate(index)
        return self.datasets[dataset_index][inner_index]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Return several samples; the samples of each dataset are fetched in one call."""
        samples: dict[int, Any] = {}
        for dataset, positions, inner_indices in self._group_by_dataset(indices):
            samples |= zip(positions, fetch_samples(dataset, inner_indices), strict=True)
        return [samples[position] for position in range(len(samples))]

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Have the kernel prefetch these samples, which will be read soon, if their dataset supports it."""
        for dataset, _, inner_indices in self._group_by_dataset(indices):
            if (will_need := getattr(dataset, "will_need", None)) is not None:
                will_need(inner_indices)

    def _forget(self, index: int) -> list[str]:
        """Remove a sample from caches; see `gpuload.datasets.kinds.forget`."""
        dataset_index, inner_index = self._locate(index)
        return forget(self.datasets[dataset_index], inner_index)

    def blocks(self) -> np.ndarray | None:
        """Return the index of the first sample of each block, then the total length; None if no dataset has blocks. In
        a dataset without blocks, each sample is a block."""
        blocks_by_dataset = [natural_blocks(dataset) for dataset in self.datasets]
        if all(blocks is None for blocks in blocks_by_dataset):
            return None
        starts = [0, *self.cumulative_sizes]
        sizes = np.diff(starts)
        bounds = [
            np.arange(size + 1) if blocks is None else blocks
            for blocks, size in zip(blocks_by_dataset, sizes, strict=True)
        ]
        return np.concatenate([blocks + start for blocks, start in zip(bounds, starts, strict=False)])

    def _locate(self, index: SupportsIndex) -> tuple[int, int]:
        """Return the index of the dataset that has a sample, and the sample's index in that dataset."""
        number = normalize_index(index, len(self), lambda: f"the joined datasets have {len(self)} samples")
        dataset_index = bisect_right(self.cumulative_sizes, number)
        return dataset_index, number - (self.cumulative_sizes[dataset_index - 1] if dataset_index else 0)

    def _group_by_dataset(self, indices: Iterable[SupportsIndex]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Group indices by dataset: yield each dataset with the positions of its samples in `indices`, and with the
        samples' indices in the dataset."""
        locations = [self._locate(index) for index in indices]
        for dataset_index in sorted({dataset_index for dataset_index, _ in locations}):
            positions = [position for position, location in enumerate(locations) if location[0] == dataset_index]
            yield self.datasets[dataset_index], positions, [locations[position][1] for position in positions]

    def _lazy_reader(self, indices: Iterable[SupportsIndex]) -> Callable[[int], Any] | None:
        """If samples are mapped, return a function that takes a position in `indices` and returns the sample. All
        samples are fetched now, and each is mapped when the function is called. None means that `__getitems__`
        suffices."""
        if not maps_samples(self):
            return None
        readers: dict[int, Callable[[], Any]] = {}
        for dataset, positions, inner_indices in self._group_by_dataset(indices):
            read = lazy_reader(dataset, inner_indices) or fetch_samples(dataset, inner_indices).__getitem__
            readers |= {position: partial(read, i) for i, position in enumerate(positions)}
        return lambda position: readers[position]()

    def __add__(self, other: object) -> Joined:
        return Joined([*self.datasets, other]) if is_map_style(other) else NotImplemented

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.datasets))


class View(Dataset):
    """The base class of datasets that wrap another dataset, and delegate all other attributes to it.

    Attributes:
        dataset: the inner dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def blocks(self) -> np.ndarray | None:
        """Return the blocks of the inner dataset."""
        return natural_blocks(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


class Mapped(View):
    """A dataset with functions applied to its samples, the result of ``map()``. All other attributes come from the
    inner dataset.

    Attributes:
        dataset: the inner dataset.
        fns: the functions, in the order in which they are applied.
    """

    def __init__(self, dataset: Any, fn: Callable[[Any], Any]) -> None:
        function("map(fn=…)", fn)
        is_mapped = isinstance(dataset, Mapped)
        super().__init__(dataset.dataset if is_mapped else dataset)
        self.fns: tuple[Callable[[Any], Any], ...] = (*dataset.fns, fn) if is_mapped else (fn,)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self._map(self.dataset[index])

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        return [self._map(sample) for sample in fetch_samples(self.dataset, list(indices))]  # pyright: ignore[reportArgumentType]

    def _lazy_reader(self, indices: list[int]) -> Callable[[int], Any]:
        """Return a function that takes a position in `indices` and returns the sample, as in `Joined._lazy_reader`."""
        read = lazy_reader(self.dataset, indices) or fetch_samples(self.dataset, indices).__getitem__
        return lambda position: self._map(read(position))

    def _forget(self, index: Any) -> list[str]:
        return forget(self.dataset, index)

    def _map(self, sample: Any) -> Any:
        for fn in self.fns:
            sample = fn(sample)
        return sample

    def __repr__(self) -> str:
        names = [getattr(fn, "__qualname__", None) or repr(fn) for fn in self.fns]
        return repr(self.dataset) + "".join(f".map({name})" for name in names)


def is_map_style(dataset: object) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, str | dict)


def walk_datasets(dataset: object, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yield a dataset and all datasets inside it, down to `depth` levels."""
    yield dataset
    attributes = vars(dataset) if depth and hasattr(dataset, "__dict__") else {}
    datasets = attributes.get("datasets")
    for part in (attributes.get("dataset"), *(datasets if isinstance(datasets, list | tuple) else ())):
        if part is not None:
            yield from walk_datasets(part, depth - 1)
