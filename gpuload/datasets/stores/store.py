"""The base class of all stores, and their common helpers for opening files lazily, negative indices, labels, and error
messages.

A store is created in the main process, which inspects its files once and keeps sizes and offsets in arrays. Open files
and connections belong to one process: they are opened when the first sample is read, are not pickled with the store,
and are reopened in a child after a fork.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from gpuload.datasets.files import KINDS, decode_error_at
from gpuload.datasets.joined import Dataset
from gpuload.datasets.litter import remove_litter
from gpuload.datasets.scan import full_path, normalize_index
from gpuload.datasets.stores.opening import client, is_url
from gpuload.errors import DecodeError, visible

__all__ = [
    "Patterns", "Store", "absolute_path", "as_list", "check_stamp", "decode_error_at", "existing_file", "labels_array",
    "match_pattern", "read_npy_header", "replace_errors", "stamp", "value_of",
]  # fmt: skip

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Store(Dataset):
    """A dataset that reads its samples from open files. Subclasses implement `_open` and `_read`.

    Attributes:
        path: the absolute path of the file or folder that is read.
    """

    path: str
    _opened: tuple[int, Any] | None = None  # process ID and handle

    def __len__(self) -> int:
        raise NotImplementedError

    def _open(self) -> Any:
        """Open the files in the process that reads them, and return a handle."""
        raise NotImplementedError

    def _read(self, handle: Any, indices: list[int]) -> list[Any]:
        """Return the samples at these indices (0 … n−1), in this order."""
        raise NotImplementedError

    @property
    def _handle(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def close(self) -> None:
        """Close the files that this process has opened. Reading another sample reopens them."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Return the samples at these indices. At URLs, samples that are close together share a request."""
        valid_indices = self._normalize_indices(indices)  # raises for a bad index before any file is opened
        return self._read(self._handle, valid_indices)

    def _normalize_indices(self, indices: Iterable[SupportsIndex]) -> list[int]:
        """Convert indices to the range 0 … n−1; negative indices count from the end."""
        count = len(self)
        return [
            normalize_index(index, count, lambda: f"{type(self).__name__}({self.path!r}) has {count} samples")
            for index in indices
        ]


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path. A URL is returned without trailing slashes."""
    return os.fsdecode(path).rstrip("/") if is_url(path) else full_path(path)


def existing_file(path: str | os.PathLike[str], expected: str, *, allow_streams: bool = False) -> str:
    """Return the absolute path of a file, after checking that it exists. A URL is checked later, by `stamp`.

    Args:
        path: the path of the file.
        expected: a description of the expected file, for the error message.
        allow_streams: also accept FIFOs and devices, which are read sequentially.

    Raises:
        OSError: the file does not exist, or is not a regular file (opening a FIFO would wait for a writer).
    """
    location = absolute_path(path)
    if is_url(location):
        return location
    if not os.path.exists(location):
        raise FileNotFoundError(f"{location!r} does not exist; expected {expected} (got {path!r})")
    if os.path.isdir(location):
        raise IsADirectoryError(f"{location!r} is a folder; expected {expected}")
    if not allow_streams and not os.path.isfile(location):
        kind = KINDS.get(stat.S_IFMT(os.stat(location).st_mode), "a special file")
        raise OSError(f"{location!r} is {kind}; expected {expected}, as a regular file")
    return location


def as_list(patterns: Patterns) -> list[Any]:
    """Return the patterns as a list, even if there is only one, or something that is not a pattern."""
    if isinstance(patterns, str | bytes | os.PathLike) or not isinstance(patterns, Iterable):
        return [patterns]
    return list(patterns)


def match_pattern(pattern: str, remote: Any = None) -> list[str]:
    """Return the files that match an absolute pattern with wildcards, sorted, without files of other programs."""
    paths = client(remote).glob(pattern) if is_url(pattern) else sorted(glob.glob(pattern, recursive=True))
    return remove_litter(paths, pattern)


@contextlib.contextmanager
def replace_errors(path: str, make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Replace an exception of a library with `make_error(message)`, which names the file. Exceptions that already name
    the file are not replaced."""
    try:
        yield
    except (ImportError, DecodeError):
        raise
    except Exception as error:
        if repr(path) in str(error) or getattr(error, "filename", None):
            raise
        raise make_error(visible(str(error)) or type(error).__name__) from error


def stamp(path: str, remote: Any = None) -> tuple[int, int]:
    """Return the size and the modification time (for a URL, the version) of a file, to detect changes."""
    if is_url(path):
        (file,) = client(remote).stat([path])
        return file.size, file.mtime_ns
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def check_stamp(path: str, expected: tuple[int, int], remote: object = None) -> None:
    """Raise a `DecodeError` if a file has changed since the dataset was created."""
    if (current := stamp(path, remote)) != expected:
        raise decode_error_at(
            path,
            f"it was changed after the dataset was created (it had {expected[0]:,} bytes, and now has {current[0]:,}); "
            "create the dataset again when the file is complete",
        )


def labels_array(labels: object, count: int, description: str) -> np.ndarray | None:
    """Return labels as an array with one entry per sample; None if `labels` is None.

    Args:
        labels: anything that `numpy.asarray` accepts.
        count: the number of samples.
        description: a description of the samples, for the error message.

    Raises:
        TypeError: labels are neither numbers nor strings, or differ in shape.
        ValueError: the numbers of labels and of samples differ.
    """
    if labels is None:
        return None
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise TypeError(
            f"labels must form an array with one entry per sample, all of the same shape: {error}"
        ) from None
    if array.dtype.kind not in "biufU":
        raise TypeError(f"labels must be numbers or strings, one per sample, got {array.dtype} of shape {array.shape}")
    if array.ndim == 0 or len(array) != count:
        raise ValueError(f"labels must have one entry for each of {description}, got shape {array.shape}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array in NumPy's format, and leave the file at the start of the data. Return the shape,
    whether the array is in Fortran order, and the dtype.

    Raises:
        ValueError, EOFError: the file is not an array, has a format version that is not used for arrays of numbers, or
            has an invalid shape (NumPy does not check the shape).
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"expected version 1.0 or 2.0 of numpy's format, got {version[0]}.{version[1]}")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"its shape must consist of integers of 0 or more, got {shape}")
    return shape, is_fortran, dtype


def value_of(array: np.ndarray, index: int) -> Any:
    """Return one entry of an array: a Python number or str, or an array."""
    value = array[index]
    return value.item() if isinstance(value, np.generic) else value
