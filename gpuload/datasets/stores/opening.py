"""Opening files for reads at offsets. All stores open local paths and URLs here.

This module runs in every process that reads a dataset. Each process has its own descriptors, which are never pickled.
Files can be memory-mapped: copying 130 KB of cached data takes 8 µs from a mapping, and 12 to 25 µs with `pread`. But
if the disk fails, reading a mapping can kill the process with SIGBUS. URLs are read by
`gpuload.datasets.stores.remote`, which is imported when the first URL is opened.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import TYPE_CHECKING, Any, Final

from gpuload.datasets.files import FLAGS, KINDS, read_file
from gpuload.datasets.stores.remote_failures import display_url, without_query

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Client, Remote, StorageOptions

__all__ = [
    "OpenFile",
    "buffered_read_at",
    "client",
    "display_path",
    "is_url",
    "join_path",
    "open_file",
    "open_seekable",
    "open_stream",
    "read_files",
    "remote_options",
    "scope_of",
    "without_query",
]

STREAM_BYTES: Final = 128 << 10
URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: object) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/key``."""
    return isinstance(path, str) and "://" in path and URL.match(path) is not None


def display_path(path: str) -> str:
    """Return a path for messages. A URL loses its password and its query, which may contain a signature."""
    return display_url(path) if is_url(path) else path


def join_path(root: str, path: str) -> str:
    """Join a root and a relative or absolute path, and resolve ``..``. At a URL, the result stays on the URL's host."""
    if not is_url(root):
        return os.path.normpath(os.path.join(root, path))
    scheme, separator, path_of_root = root.partition("://")
    return scheme + separator + os.path.normpath(os.path.join("/" + path_of_root, path))[1:]


def remote_options(paths: object, storage_options: StorageOptions) -> Remote | None:
    """Return the options for reading the URLs among these paths; None if no path is a URL.

    Raises:
        TypeError: `storage_options` have the wrong type.
        ValueError: `storage_options` were passed, but no path is a URL.
    """
    path_list = paths if isinstance(paths, list | tuple) else [paths]
    if any(map(is_url, path_list)):
        from gpuload.datasets.stores.remote import Remote

        if isinstance(storage_options, Remote):
            return storage_options
        return Remote({} if storage_options is None else storage_options)
    if storage_options is not None:
        raise ValueError(
            "storage_options= applies only to URLs such as 's3://bucket/key', but the path is "
            f"{next(iter(path_list), None)!r}; omit it"
        )
    return None


def client(remote: Remote | None) -> Client:
    """Return the client with which this process reads URLs."""
    from gpuload.datasets.stores.remote import client_of

    return client_of(remote)


def scope_of(remote: Remote | None) -> tuple[str, ...]:
    """Return the part of a cache's identity that depends on the options (see `digest_of`); empty for local files."""
    if remote is None:
        return ()
    from gpuload.datasets.stores.remote import digest_of

    return tuple(filter(None, [digest_of(remote)]))


class OpenFile:
    """A regular file that is open for reading. It is closed with its last reference, so never during a read.

    Args:
        path: the path of the file.
        use_mmap: read from a memory mapping, if the file system supports it.

    Attributes:
        size, mtime_ns: the size in bytes and the modification time when the file was opened.

    Raises:
        OSError: the file is missing, or is not a regular file.
    """

    __slots__ = ("_descriptor", "_descriptors", "_map", "mtime_ns", "path", "size")

    def __init__(self, path: str, use_mmap: bool = False) -> None:
        self._descriptors: list[int] = []
        self._map: mmap.mmap | None = None
        self.path = path
        self._descriptors.extend(map(os.open, (path,), (FLAGS,)))  # ctrl-C cannot leak the descriptor, see `read_file`
        self._descriptor = self._descriptors[0]
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else KINDS.get(stat.S_IFMT(status.st_mode), "a device")
            raise OSError(f"{path!r} is {kind}; expected a regular file")
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
        if use_mmap and self.size:
            with contextlib.suppress(OSError):  # some file systems do not support mappings
                self._map = mmap.mmap(self._descriptor, self.size, mmap.MAP_SHARED, mmap.PROT_READ)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes of a range; fewer only at the end of the file."""
        if self._map is not None and os.fstat(self._descriptor).st_size >= self.size:  # else reading raises SIGBUS
            return self._map[offset : offset + nbytes]
        parts, end = [], offset + nbytes
        while offset < end and (part := os.pread(self._descriptor, end - offset, offset)):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to prefetch a range."""
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, `os` may be cleared first
        for descriptor in self._descriptors:
            close(descriptor)


def open_file(path: str, remote: Remote | None = None) -> OpenFile:
    """Open the file at a path or URL for reads at offsets."""
    if is_url(path):
        return client(remote).stat([path])[0]  # pyright: ignore[reportReturnType]
    return OpenFile(path)


def read_files(paths: Sequence[str], remote: Remote | None = None) -> list[bytes]:
    """Read entire image files. URLs are read concurrently."""
    return list(map(read_file, paths)) if remote is None else client(remote).read_files(paths)


def buffered_read_at(file: OpenFile, nbytes: int) -> Callable[[int, int], bytes]:
    """Return a `read_at` function for small reads that are close together. Each system call reads at least `nbytes`
    bytes; a request to a URL reads a window of adaptive size."""
    if not isinstance(file, OpenFile):
        from gpuload.datasets.stores.remote import RemoteIO

        return RemoteIO(file).read_at
    os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    stream = open(file._descriptor, "rb", nbytes, closefd=False)  # noqa: SIM115

    def read_at(offset: int, nbytes: int, file: OpenFile = file) -> bytes:  # the reference keeps the descriptor open
        stream.seek(offset)
        return stream.read(nbytes)

    return read_at


def open_stream(path: str, remote: Remote | None = None) -> Any:
    """Open a file, a FIFO, a URL, or ``"-"`` (the standard input) for sequential reading."""
    if path == "-":
        return open(0, "rb", buffering=STREAM_BYTES, closefd=False)
    if is_url(path):
        return BufferedReader(open_seekable(path, remote), STREAM_BYTES)
    return open(path, "rb", buffering=STREAM_BYTES)


def open_seekable(path: str, remote: Remote | None = None) -> Any:
    """Open a path or URL as a seekable file object, for libraries that require one."""
    if is_url(path):
        from gpuload.datasets.stores.remote import RemoteIO

        return RemoteIO(client(remote).stat([path])[0])
    return open(path, "rb")
