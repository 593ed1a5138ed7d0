"""The base class of all stores, and their common helpers for opening files lazily, negative indices, labels, and error
messages.

A store is created in the main process, which inspects its files once and keeps sizes and offsets in arrays. Open files
and connections belong to one process: they are opened when the first sample is read, are not pickled with the store,
and are reopened in a child after a fork.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from gpuload.datasets.files import KINDS, decode_error_at
from gpuload.datasets.joined import Dataset
from gpuload.datasets.scan import full_path, normalize_index
from gpuload.datasets.stores.opening import client, is_url
from gpuload.errors import DecodeError, visible

__all__ = [
    "Store",
    "absolute_path",
    "check_stamp",
    "decode_error_at",
    "existing_file",
    "labels_array",
    "naming_file",
    "read_npy_header",
    "stamp",
    "value_of",
]


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

    def _read(self, handle: Any, numbers: list[int]) -> list[Any]:
        """Return the samples with these numbers (0 … n−1), in the given order."""
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
        numbers = self._numbers(indices)  # raises for a bad index before any file is opened
        return self._read(self._handle, numbers)

    def _numbers(self, indices: Iterable[SupportsIndex]) -> list[int]:
        """Convert indices to numbers from 0; negative indices count from the end."""
        count = len(self)
        return [
            index
            if type(index) is int and 0 <= index < count
            else normalize_index(index, count, f"{type(self).__name__}({self.path!r}) has {count} samples")
            for index in indices
        ]


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path. A URL is returned without trailing slashes."""
    return os.fsdecode(path).rstrip("/") if is_url(path) else full_path(path)


def existing_file(path: str | os.PathLike[str], expected: str, *, streams: bool = False) -> str:
    """Return the absolute path of a file, after checking that it exists. A URL is checked later, by `stamp`.

    Args:
        path: the path of the file.
        expected: a description of the expected file, for the error message.
        streams: also accept FIFOs and devices, which are read sequentially.

    Raises:
        OSError: the file does not exist, or is not a regular file (opening a FIFO would wait for a writer).
    """
    full = absolute_path(path)
    if is_url(full):
        return full
    if not os.path.exists(full):
        raise FileNotFoundError(f"{full!r} does not exist; expected {expected} (got {path!r})")
    if os.path.isdir(full):
        raise IsADirectoryError(f"{full!r} is a folder; expected {expected}")
    if not streams and not os.path.isfile(full):
        kind = KINDS.get(stat.S_IFMT(os.stat(full).st_mode), "a special file")
        raise OSError(f"{full!r} is {kind}; expected {expected}, as a regular file")
    return full


@contextlib.contextmanager
def naming_file(path: str, error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Replace an exception of a library with `error_of(message)`, which names the file. Exceptions that already name
    the file are not replaced."""
    try:
        yield
    except (ImportError, DecodeError):
        raise
    except Exception as error:
        if repr(path) in str(error) or getattr(error, "filename", None):
            raise
        raise error_of(visible(str(error)) or type(error).__name__) from error


def stamp(path: str, remote: Any = None) -> tuple[int, int]:
    """Return the size and the modification time (for a URL, the version) of a file, to detect changes."""
    if is_url(path):
        (file,) = client(remote).stat([path])
        return file.size, file.mtime_ns
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def check_stamp(path: str, expected: tuple[int, int], remote: Any = None) -> None:
    """Raise a `DecodeError` if a file has changed since the dataset was created."""
    if (current := stamp(path, remote)) != expected:
        raise decode_error_at(
            path,
            f"it was changed after the dataset was created (it had {expected[0]:,} bytes, and now has {current[0]:,}); "
            "create the dataset again when the file is complete",
        )


def labels_array(labels: Any, count: int, samples: str) -> np.ndarray | None:
    """Return labels as an array with one entry per sample; None if `labels` is None.

    Args:
        labels: anything that `numpy.asarray` accepts.
        count: the number of samples.
        samples: a description of the samples, for the error message.

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
        raise ValueError(f"labels must have one entry for each of {samples}, got shape {array.shape}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array in NumPy's format. Return the shape, whether the array is in Fortran order, and the
    dtype; afterwards, the file's position is that of the first number.

    Raises:
        ValueError, EOFError: this is not an array, the format version is not one used for arrays of numbers, or the
            shape contains something other than lengths, which NumPy does not check.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"expected version 1.0 or 2.0 of numpy's format, got {version[0]}.{version[1]}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"its shape must consist of whole numbers of 0 or more, got {shape}")
    return shape, is_fortran, dtype


def value_of(array: np.ndarray, number: int) -> Any:
    """Return one entry of an array: a Python number or str, or an array."""
    value = array[number]
    return value.item() if isinstance(value, np.generic) else value
