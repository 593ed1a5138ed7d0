"""Copies of torchvision's `ImageFolder` for workers, which import neither torch nor torchvision to read them.

Made in the main process each time that workers are sent a dataset; the user's own object stays what it was. A copy has
the attributes of the dataset under their names, so changes that a `Loader` sends to its workers later apply to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, SupportsIndex

from gpuload.datasets.base import LabelledPaths, pack_labels
from gpuload.datasets.files import will_read
from gpuload.datasets.sample import Encoded, read
from gpuload.datasets.scan import Paths

__all__ = ["FolderCopy", "SubsetCopy", "without_torch"]

FOLDER: Final = ("torchvision.datasets.folder", "ImageFolder")
SUBSET: Final = ("torch.utils.data.dataset", "Subset")


def without_torch(dataset: Any) -> Any:
    """Return a copy that yields the samples of a dataset without torch, or the dataset itself.

    There is one of torchvision's ``ImageFolder(loader=gpuload.read)`` without transforms, and of torch's `Subset` of
    one. Subclasses stay what they are.
    """
    kind = type(dataset).__module__, type(dataset).__qualname__
    if kind == SUBSET and _is_unchanged(dataset, "__getitem__", "__getitems__", "__len__"):
        inner = without_torch(dataset.dataset)
        return dataset if inner is dataset.dataset else SubsetCopy(inner, dataset.indices)
    transforms = [getattr(dataset, name, None) for name in ("transform", "target_transform", "transforms")]
    if (
        kind == FOLDER
        and getattr(dataset, "loader", None) is read
        and transforms == [None] * 3
        and _is_unchanged(dataset, "__getitem__", "__len__")
        and not hasattr(dataset, "__getitems__")
    ):
        return FolderCopy(dataset.samples)
    return dataset


def _is_unchanged(dataset: Any, *methods: str) -> bool:
    """Return whether nobody has replaced these methods of a class."""
    cls = type(dataset)
    return all(getattr(getattr(cls, name), "__module__", None) == cls.__module__ for name in methods)


class FolderCopy:
    """The samples of an ``ImageFolder(loader=gpuload.read)``.

    Args:
        samples: path and label of each image, as the dataset has them.
    """

    def __init__(self, samples: list[Any]) -> None:
        self.samples: Any = _packed(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        path, target = self.samples[index]
        return read(path), target

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Let the kernel read the files of these samples, which are asked for soon."""
        for index in indices:
            will_read(self.samples[index][0])


class SubsetCopy:
    """A selection of samples of a copy, as torch's `Subset` has them."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def will_need(self, indices: Iterable[Any]) -> None:
        """Let the kernel read the files of these samples, which are asked for soon."""
        self.dataset.will_need([self.indices[index] for index in indices])


def _packed(samples: list[Any]) -> Sequence[Any]:
    """Pack pairs; samples that are anything else stay a list."""
    if not all(type(sample) is tuple and len(sample) == 2 and type(sample[0]) is str for sample in samples):
        return samples
    names = [path for path, _ in samples]
    shared = os.path.commonprefix([min(names), max(names)]) if names else ""  # noqa: RUF071  its folder is taken
    folder = os.path.dirname(shared)
    prefix = os.path.join(folder, "")
    with contextlib.suppress(UnicodeEncodeError):
        inner = [os.fsencode(name[len(prefix) :]) for name in names]
        return LabelledPaths(Paths.of(folder, inner), pack_labels([target for _, target in samples]))
    return samples
