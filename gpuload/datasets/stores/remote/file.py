"""A file at a URL, as stores read files: at offsets, or as a file object that libraries take."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from gpuload.datasets.stores.remote.client import Client, Part

__all__ = ["RemoteFile", "RemoteIO", "Windows"]

LEAST_WINDOW: Final = 64 << 10
MOST_WINDOW: Final = 32 << 20
KEPT_WINDOWS: Final = 8


class RemoteFile:
    """A file at a URL; see `OpenFile`, whose place it takes.

    Attributes:
        size: bytes.
        mtime_ns: no time, but a number that differs when the file does.
        time: when it was written, as text that sorts, or empty.
    """

    __slots__ = ("client", "mtime_ns", "path", "size", "time")

    def __init__(self, client: Client, url: str, found: tuple[int, int, str] | None = None) -> None:
        self.client, self.path = client, url
        self.size, self.mtime_ns, self.time = found or client.look([url])[0]

    def part(self, offset: int, nbytes: int) -> Part:
        """Bytes of it; fewer only where it ends."""
        begin = min(offset, self.size)
        return Part(self.path, begin, min(begin + nbytes, self.size), self.size, self.mtime_ns)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """These bytes; fewer only where the file ends."""
        return self.client.read([self.part(offset, nbytes)])[0]

    def read_into(self, array: np.ndarray, offset: int) -> int:
        """Fill an array of uint8 with the bytes from an offset on. Returns how many there were."""
        data = self.read_at(offset, len(array))
        array[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def read_randomly(self) -> None:
        """Nothing beyond what is asked for is ever read."""


class Windows:
    """Reads that lie near each other, by few requests.

    What is asked for next often lies just behind: then each window is twice as long as the last, up to 32 MiB, else
    64 KiB. So the headers of an archive of small members cost about what reading it through does, and those of large
    members one request each.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._windows: list[tuple[int, bytes]] = []
        self._end, self._length = 0, LEAST_WINDOW // 2

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """These bytes; fewer only where the file ends."""
        nbytes = min(nbytes, max(0, self._file.size - offset))
        for begin, data in reversed(self._windows):
            if begin <= offset and offset + nbytes <= begin + len(data):
                return data[offset - begin : offset - begin + nbytes]
        follows = self._end - nbytes <= offset <= self._end + self._length
        self._length = min(2 * self._length, MOST_WINDOW) if follows else LEAST_WINDOW
        data = self._file.read_at(offset, max(nbytes, self._length))
        self.add(offset, data)
        self._end = offset + len(data)
        return data[:nbytes]

    def add(self, begin: int, data: bytes) -> None:
        """Keep what was read by somebody else."""
        large = [number for number, (_, kept) in enumerate(self._windows) if len(kept) > LEAST_WINDOW]
        if len(data) > LEAST_WINDOW and large:
            del self._windows[large[0]]
        elif len(self._windows) >= KEPT_WINDOWS:
            del self._windows[0]
        self._windows.append((begin, data))


class RemoteIO(io.RawIOBase):
    """A file object that can be sought in.

    Attributes:
        size: bytes.
    """

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self.file, self.size = file, file.size
        self.name = file.path
        self._windows = Windows(file)
        self._loaded: list[tuple[int, bytes]] = []
        self._at = 0

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these ranges (begin, end) together, in place of those that were loaded before."""
        given = list(ranges)
        parts = [self.file.part(begin, end - begin) for begin, end in given]
        self._loaded = [(begin, data) for (begin, _), data in zip(given, self.file.client.read(parts), strict=True)]

    def unload(self) -> None:
        """Forget what was loaded."""
        self._loaded = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = min(len(view), max(0, self.size - self._at))
        data = self._bytes(self._at, nbytes)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _bytes(self, at: int, nbytes: int) -> bytes:
        for begin, data in self._loaded:
            if begin <= at and at + nbytes <= begin + len(data):
                return data[at - begin : at - begin + nbytes]
        return self._windows.read_at(at, nbytes)
