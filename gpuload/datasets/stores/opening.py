"""Opening files for reads at offsets: the one place that knows where a path's bytes are.

Runs where datasets do. `OpenFiles` keeps the last few files open, each process its own: descriptors are never pickled.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from typing import Any, Final

import numpy as np

from gpuload.datasets.files import FLAGS, KINDS

__all__ = ["OpenFile", "OpenFiles", "open_file", "open_stream"]

KEPT_OPEN: Final = 64
AT_ONCE: Final = 1 << 30  # one call reads at most 2 GiB
STREAM_BYTES: Final = 128 << 10


class OpenFile:
    """A regular file, opened for reading; closed with its last reference, so no thread loses it while it reads.

    Args:
        path: where it is.

    Attributes:
        size, mtime_ns: bytes, and when it was last changed, as it was opened.

    Raises:
        OSError: it is missing, or no regular file.
    """

    __slots__ = ("_descriptor", "mtime_ns", "path", "size")

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self.path = path
        self._descriptor = os.open(path, FLAGS)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else KINDS.get(stat.S_IFMT(status.st_mode), "special")
            raise OSError(f"{path!r} is no regular file, but {what}")
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """These bytes; fewer only where the file ends."""
        data = os.pread(self._descriptor, min(nbytes, AT_ONCE), offset)
        if len(data) == nbytes or not data:
            return data
        parts, got = [data], len(data)
        while got < nbytes and (part := os.pread(self._descriptor, min(nbytes - got, AT_ONCE), offset + got)):
            parts.append(part)
            got += len(part)
        return b"".join(parts)

    def read_into(self, array: np.ndarray, offset: int) -> int:
        """Fill an array of uint8 with the bytes from an offset on. Returns how many there were."""
        view, got = array.data, 0
        while got < len(view) and (more := os.preadv(self._descriptor, [view[got : got + AT_ONCE]], offset + got)):
            got += more
        return got

    def read_randomly(self) -> None:
        """Tell the kernel to read nothing beyond what is asked for."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def open_file(path: str) -> OpenFile:
    """The file at this path, for reads at offsets. All stores open their files here."""
    return OpenFile(path)


class OpenFiles:
    """The files that were used last, kept open. A copy in another process, or from a pickle, begins with none.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int = KEPT_OPEN) -> None:
        self.limit = limit
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> OpenFile:
        """The file, opened if it is not; the one that was not used for longest is closed."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = open_file(path)
                while len(self._files) > self.limit:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(path)
            return file

    def __len__(self) -> int:
        return len(self._files)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[int]]:
        return OpenFiles, (self.limit,)


def open_stream(path: str) -> Any:
    """What is at this path, for reading from its beginning on: a file, a FIFO, or with ``"-"`` the standard input."""
    if path == "-":
        return open(0, "rb", buffering=STREAM_BYTES, closefd=False)
    return open(path, "rb", buffering=STREAM_BYTES)
