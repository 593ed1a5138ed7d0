"""What all stores share: files that are opened where they are read, indices from the end, labels, words for errors.

A store is made in the main process, which looks at its files once and keeps sizes and places in arrays. What it opens
to read samples belongs to one process: it is opened at the first sample, left behind when the store is pickled, and
opened again in a child after a fork.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from gpuload.datasets.files import KINDS, damaged
from gpuload.datasets.joined import Dataset
from gpuload.datasets.scan import from_start, full_path
from gpuload.datasets.stores.opening import client, is_url
from gpuload.errors import DecodeError, visible

__all__ = [
    "Store",
    "absolute",
    "check_stamp",
    "damaged",
    "existing_file",
    "labels_array",
    "naming",
    "read_npy_header",
    "stamp",
    "value_of",
]


class Store(Dataset):
    """Samples that are read from open files; a subclass says how, in `_open` and `_read`.

    Attributes:
        path: what it reads, as an absolute path.
    """

    path: str
    _opened: tuple[int, Any] | None = None  # the process, and what it opened

    def __len__(self) -> int:
        raise NotImplementedError

    def _open(self) -> Any:
        """Open the files, in the process that reads them."""
        raise NotImplementedError

    def _read(self, handle: Any, numbers: list[int]) -> list[Any]:
        """Return the samples of these numbers, each 0 … n−1, in this order."""
        raise NotImplementedError

    @property
    def _handle(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def close(self) -> None:
        """Close what this process has opened. The next sample opens it again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Return several samples; neighbours at URLs are read together."""
        numbers = self._numbers(indices)  # before anything is opened
        return self._read(self._handle, numbers)

    def _numbers(self, indices: Iterable[SupportsIndex]) -> list[int]:
        """Return indices that may count from the end as numbers from 0."""
        count = len(self)
        return [
            index
            if type(index) is int and 0 <= index < count
            else from_start(index, count, f"{type(self).__name__}({self.path!r}) has {count} samples")
            for index in indices
        ]


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that does not depend on the working directory; a URL as it is."""
    return os.fsdecode(path).rstrip("/") if is_url(path) else full_path(path)


def existing_file(path: str | os.PathLike[str], expected: str, *, streams: bool = False) -> str:
    """Return the absolute path of a file. A URL is looked at when its stamp is taken.

    Args:
        path, expected: where it is, and what it should be, for the message.
        streams: take FIFOs and devices too, which are read from their beginning on.

    Raises:
        OSError: there is none, or it is no regular file; a FIFO, opened, waits for who writes to it.
    """
    full = absolute(path)
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
def naming(path: str, error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Turn whatever a library raises into an error that names the file: `error_of` what it says. Errors that name it
    pass as they are."""
    try:
        yield
    except (ImportError, DecodeError):
        raise
    except Exception as error:
        if repr(path) in str(error) or getattr(error, "filename", None):
            raise
        raise error_of(visible(str(error)) or type(error).__name__) from error


def stamp(path: str, remote: Any = None) -> tuple[int, int]:
    """Return what a file is known by: how many bytes it has, and when it was written (for a URL, its version)."""
    if is_url(path):
        (file,) = client(remote).stat([path])
        return file.size, file.mtime_ns
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def check_stamp(path: str, expected: tuple[int, int], remote: Any = None) -> None:
    """Raise a `DecodeError` if a file is not the one that the dataset was made of."""
    if (now := stamp(path, remote)) != expected:
        raise damaged(
            path,
            f"it has been written to since the dataset was made, when it had {expected[0]:,} bytes (now {now[0]:,}); "
            "make the dataset again, once the file is finished",
        )


def labels_array(labels: Any, count: int, what: str) -> np.ndarray | None:
    """Return labels as an array, one for each sample; None if there are none.

    Args:
        labels: anything that `numpy.asarray` takes.
        count, what: how many samples there are, and of what, for the message.

    Raises:
        TypeError: they are neither numbers nor strings of one shape.
        ValueError: there are more or fewer than samples.
    """
    if labels is None:
        return None
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise TypeError(f"labels must be an array of one entry for each sample, of one shape: {error}") from None
    if array.dtype.kind not in "biufU":
        raise TypeError(
            f"labels must be numbers or strings, one for each sample, got {array.dtype} of shape {array.shape}"
        )
    if array.ndim == 0 or len(array) != count:
        raise ValueError(f"labels has the shape {array.shape}, but there must be one for each of {what}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, whether columns come first, and dtype of an array in NumPy's format, up to where its numbers begin.

    Raises:
        ValueError, EOFError: it is none, or not of a version that arrays of numbers have; or its shape holds other
            things than lengths, which NumPy does not look at.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"numpy's format {version[0]}.{version[1]} is not read, but 1.0 and 2.0")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"its shape {shape} must hold whole numbers of 0 or more")
    return shape, by_columns, dtype


def value_of(array: np.ndarray, number: int) -> Any:
    """Return one entry: a plain number or str, or an array."""
    value = array[number]
    return value.item() if isinstance(value, np.generic) else value
