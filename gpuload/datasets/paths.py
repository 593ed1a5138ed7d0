"""Millions of paths in one byte buffer.

Memory layout: `data` is uint8, all paths (relative to the root, in the file system's bytes) one after the other; path i
is `data[offsets[i] : offsets[i + 1]]`, with `offsets` in uint32, or int64 from 4 GiB of paths. Both are plain arrays,
so pickle protocol 5 sends them out-of-band, and all workers map one copy.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final, overload

import numpy as np

__all__ = ["Paths", "full_path"]

ENCODING: Final = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # what os.fsdecode takes
WIDE_BYTES: Final = 1 << 32  # from here offsets no longer fit uint32


def full_path(path: str | os.PathLike[str]) -> str:
    """A path that does not depend on the working directory; ``~`` is the user's home.

    Raises:
        FileNotFoundError: there is no home: HOME is not set, and the user is in no table.
    """
    full = os.path.expanduser(os.fsdecode(path))
    if full == "~" or full.startswith("~/"):  # else it would be a folder of that name, wherever the program is started
        raise FileNotFoundError(
            f"{path!r} is in a home that is not known: HOME is not set, and this user (number {os.getuid()}) is not in "
            "the table of users; set HOME, or name the whole path"
        )
    return os.path.abspath(full)


class Paths(Sequence[str]):
    """The paths of a dataset: a sequence that makes each str when it is asked for.

    Args:
        root: the folder that all paths are relative to.
        data: uint8, the relative paths one after the other.
        offsets: n + 1 integers, where each path begins and the last one ends.

    Example:
        >>> paths = Paths.pack("/data", [(b"a.jpgsub/b.jpg", np.array([5, 9]))])
        >>> paths[-1], len(paths)
        ('/data/sub/b.jpg', 2)
    """

    def __init__(self, root: str, data: np.ndarray, offsets: np.ndarray) -> None:
        self.root = root
        self.data = data
        self.offsets = offsets
        self._prefix = os.path.join(root, "")

    @classmethod
    def pack(cls, root: str, pieces: Iterable[tuple[bytes, np.ndarray]]) -> Paths:
        """Paths from pieces: relative paths joined without a separator, and the length of each."""
        pieces = list(pieces)
        data = np.frombuffer(bytearray().join(joined for joined, _ in pieces), np.uint8)
        lengths = [lengths for _, lengths in pieces]
        offsets = np.zeros(1 + sum(map(len, lengths)), np.uint32 if len(data) < WIDE_BYTES else np.int64)
        if lengths:
            np.cumsum(np.concatenate(lengths), out=offsets[1:])
        return cls(root, data, offsets)

    @classmethod
    def below(cls, root: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]]) -> Paths:
        """Pack paths, relative ones to the working directory, below the root if all are in it, else below ``/``."""
        names = [os.fsencode(path) for path in paths]
        given = os.path.join(os.fsencode(root), b"")
        if given and all(map(operator.methodcaller("startswith", given), names)):
            folder, names = os.path.abspath(root), [name[len(given) :] for name in names]
        else:
            folder, names = "/", [os.path.abspath(name)[1:] for name in names]
        return cls.pack(os.fsdecode(folder), [(b"".join(names), np.fromiter(map(len, names), np.int64, len(names)))])

    @property
    def nbytes(self) -> int:
        """How much memory the paths take."""
        return self.data.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i, n = operator.index(index), len(self.offsets) - 1
        if not -n <= i < n:
            raise IndexError(f"index {i} is out of range: there are {n} paths")
        i %= n
        start, end = self.offsets[i : i + 2].tolist()
        return self._prefix + str(self.data[start:end].data, *ENCODING)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Paths):
            return NotImplemented
        return (
            self.root == other.root
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.data, other.data)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} paths in {self.root!r}>"
