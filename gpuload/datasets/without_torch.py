"""Copies of torchvision's `ImageFolder` for workers, which can read them without importing torch or torchvision.

A copy is created in the main process each time a dataset is sent to workers; the user's object does not change. A copy
has the same attribute names as the dataset, so changes that a `Loader` sends to its running workers also apply to
the copy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, SupportsIndex

from gpuload.datasets.base import LabelledPaths, pack_labels
from gpuload.datasets.files import prefetch
from gpuload.datasets.kinds import type_name
from gpuload.datasets.sample import Encoded, read
from gpuload.datasets.scan import Paths

__all__ = ["FolderCopy", "SubsetCopy", "has_copy", "without_torch"]

FOLDER: Final = ("torchvision.datasets.folder", "ImageFolder")
SUBSET: Final = ("torch.utils.data.dataset", "Subset")


def without_torch(dataset: Any) -> Any:
    """Return a copy of a dataset that yields the same samples without torch, or the dataset itself.

    Copies exist for torchvision's ``ImageFolder(loader=gpuload.read)`` without transforms, and for torch's `Subset` of
    such a dataset. Subclasses are returned unchanged.
    """
    if not has_copy(dataset):
        return dataset
    if type_name(dataset) == SUBSET:
        return SubsetCopy(without_torch(dataset.dataset), dataset.indices)
    return FolderCopy(dataset.samples)


def has_copy(dataset: Any) -> bool:
    """Return whether `without_torch` returns a copy of a dataset."""
    kind = type_name(dataset)
    if kind == SUBSET:
        return _is_unchanged(dataset, "__getitem__", "__getitems__", "__len__") and has_copy(dataset.dataset)
    transforms = [getattr(dataset, name, None) for name in ("transform", "target_transform", "transforms")]
    return (
        kind == FOLDER
        and getattr(dataset, "loader", None) is read
        and transforms == [None] * 3
        and _is_unchanged(dataset, "__getitem__", "__len__")
        and not hasattr(dataset, "__getitems__")
    )


def _is_unchanged(dataset: Any, *methods: str) -> bool:
    """Return whether these methods are still those of the original class."""
    cls = type(dataset)
    return all(getattr(getattr(cls, name), "__module__", None) == cls.__module__ for name in methods)


class FolderCopy:
    """The samples of an ``ImageFolder(loader=gpuload.read)``.

    Args:
        samples: the dataset's list of (path, label), one per image.
    """

    def __init__(self, samples: list[Any]) -> None:
        self.samples: Any = _pack_samples(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        path, target = self.samples[index]
        return read(path), target

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Have the kernel prefetch the files of these samples, which will be read soon."""
        for index in indices:
            prefetch(self.samples[index][0])


class SubsetCopy:
    """A copy of a torch `Subset` of a copied dataset."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def will_need(self, indices: Iterable[Any]) -> None:
        """Have the kernel prefetch the files of these samples, which will be read soon."""
        self.dataset.will_need([self.indices[index] for index in indices])


def _pack_samples(samples: list[Any]) -> Sequence[Any]:
    """Pack (path, label) pairs; return other samples unchanged."""
    if not all(type(sample) is tuple and len(sample) == 2 and type(sample[0]) is str for sample in samples):
        return samples
    names = [path for path, _ in samples]
    shared = os.path.commonprefix([min(names), max(names)]) if names else ""  # noqa: RUF071  dirname follows
    folder = os.path.dirname(shared)
    prefix = os.path.join(folder, "")
    with contextlib.suppress(UnicodeEncodeError):
        relative_names = [os.fsencode(name[len(prefix) :]) for name in names]
        return LabelledPaths(
            Paths.pack_relative(folder, relative_names), pack_labels([target for _, target in samples])
        )
    return samples
