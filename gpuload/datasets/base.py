"""The base class of datasets of image files: `ImageFolder`, `ImageFiles`, `FileList`, `Coco`, and results of `wrap`.

The main process collects the paths when a dataset is created, and sends them to the workers, which read the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from gpuload.datasets.files import prefetch, read_file
from gpuload.datasets.joined import Dataset
from gpuload.datasets.sample import Encoded, Mode
from gpuload.datasets.scan import LazySequence, Paths, full_path, normalize_index
from gpuload.datasets.stores.opening import client, display_path, is_url, read_files

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote

__all__ = ["ImageFileDataset", "LabelledPaths", "existing_folder", "pack_labels", "shrink_integers"]


class LabelledPaths(LazySequence[tuple[str, Any]]):
    """Pairs of a path and a label, stored in a few arrays that all workers share."""

    def __init__(self, paths: Paths, labels: Any) -> None:
        self.paths, self.labels = paths, labels

    def __len__(self) -> int:
        return len(self.labels)

    def _build_entry(self, index: int) -> tuple[str, Any]:
        label = self.labels[index]
        return self.paths[index], int(label) if isinstance(self.labels, np.ndarray) else label


class ImageFileDataset(Dataset):
    """The base class of all datasets of image files."""

    mode: Mode
    paths: Paths
    """The full path of each image, as str."""
    _remote: Remote | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return self.paths.root

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Have the kernel prefetch the files of these samples, which will be read soon."""
        if self._remote is None:
            for index in indices:
                prefetch(self.paths[self._normalize_index(index)])

    def _forget(self, index: int) -> list[str]:
        """Remove a file from the cache of its remote; see `gpuload.datasets.kinds.forget`."""
        return [] if self._remote is None else client(self._remote).forget(self.paths[index])

    def __getitem__(self, index: SupportsIndex) -> Any:
        if self._remote is not None:
            return self._fetch([index])[0]
        number = self._normalize_index(index)
        path = self.paths[number]
        return self._make_sample(number, Encoded(read_file(path), self.mode, path))

    def _make_sample(self, index: int, image: Encoded) -> Any:
        """Build the sample with this index from its image."""
        raise NotImplementedError

    @property
    def __getitems__(self) -> Any:
        """A function that fetches several samples in one request. This attribute exists only for URLs: local files are
        faster to read one by one, each just before it is decoded."""
        if self._remote is None:
            raise AttributeError("__getitems__")
        return self._fetch

    def _fetch(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        numbers = [self._normalize_index(index) for index in indices]
        paths = [self.paths[number] for number in numbers]
        files = zip(numbers, paths, read_files(paths, self._remote), strict=True)
        return [self._make_sample(number, Encoded(data, self.mode, display_path(path))) for number, path, data in files]

    def _normalize_index(self, index: SupportsIndex) -> int:
        return normalize_index(
            index, len(self.paths), lambda: f"{type(self).__name__}({self.root!r}) has {len(self)} images"
        )


def existing_folder(root: str | os.PathLike[str]) -> str:
    """Return a folder's absolute path, or a folder's URL without a trailing slash.

    Raises:
        FileNotFoundError, NotADirectoryError: the path does not exist, or is not a folder. A URL is not checked.
    """
    if is_url(root):
        return os.fsdecode(root).rstrip("/")
    folder = full_path(root)
    if not os.path.exists(folder):
        raise FileNotFoundError(f"{folder!r} does not exist; expected a folder of images (got {root!r})")
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{folder!r} is a file; expected a folder of images")
    return folder


def pack_labels(labels: Sequence[Any]) -> Any:
    """Pack integer labels into an array of the smallest type that holds them; return any other labels as a list."""
    array = np.asarray(labels) if {int}.issuperset(map(type, labels)) else np.empty(0)
    return shrink_integers(array) if array.dtype.kind in "iu" and len(array) else list(labels)


def shrink_integers(array: np.ndarray) -> np.ndarray:
    """Return integers in the smallest type that holds them all; return other numbers unchanged."""
    dtype = np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    return array.astype(dtype) if dtype.kind in "iu" else array  # numpy promotes uint64 with int8 to float64
