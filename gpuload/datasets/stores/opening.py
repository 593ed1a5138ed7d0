"""Opening files for reads at offsets: the one place that knows where a path's bytes are.

Runs where datasets do. `OpenFiles` keeps the last few files open, each process its own: descriptors are never pickled.
It can map them, where a disk that fails may end the process by SIGBUS: 130 KB that are in memory are copied out of a
mapping in 8 µs, by `pread` in 12 to 25.
A path may be a URL: `gpuload.datasets.stores.remote` reads it, imported when the first URL is opened.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader
from typing import TYPE_CHECKING, Any, Final

from gpuload.datasets.files import FLAGS, KINDS, read_file
from gpuload.datasets.stores.remote_failures import shown

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Client, Remote, StorageOptions

__all__ = [
    "OpenFile",
    "OpenFiles",
    "client",
    "is_url",
    "named",
    "near_reads",
    "normal",
    "open_file",
    "open_seekable",
    "open_stream",
    "read_whole",
    "remote_for",
    "scope_of",
]

KEPT_OPEN: Final = 64
STREAM_BYTES: Final = 128 << 10
URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: Any) -> bool:
    """Whether a path is a URL, as ``s3://bucket/key`` is."""
    return isinstance(path, str) and "://" in path and URL.match(path) is not None


def named(path: str) -> str:
    """Return a path as messages show it: a URL without a password, and without a query, which may be a signature."""
    return shown(path) if is_url(path) else path


def normal(root: str, path: str) -> str:
    """Return a path below a root, or an absolute one, without ``..`` and the like. Of a URL nothing leads out of its
    beginning."""
    if not is_url(root):
        return os.path.normpath(os.path.join(root, path))
    start, between, path_of_root = root.partition("://")
    return start + between + os.path.normpath(os.path.join("/" + path_of_root, path))[1:]


def remote_for(paths: Any, storage_options: StorageOptions) -> Remote | None:
    """Return how the URLs among these paths are read; None if there are none.

    Raises:
        TypeError: `storage_options` are of a wrong type.
        ValueError: they are given, but no path is a URL.
    """
    listed = paths if isinstance(paths, list | tuple) else [paths]
    if any(map(is_url, listed)):
        from gpuload.datasets.stores.remote import Remote

        if isinstance(storage_options, Remote):
            return storage_options
        return Remote({} if storage_options is None else storage_options)
    if storage_options is not None:
        raise ValueError(
            f"storage_options= are for URLs such as 's3://bucket/key', got the path {next(iter(listed), None)!r}"
        )
    return None


def client(remote: Remote | None) -> Client:
    """Return what reads URLs in this process."""
    from gpuload.datasets.stores.remote import client_of

    return client_of(remote)


def scope_of(remote: Remote | None) -> tuple[str, ...]:
    """Return what belongs to the identity of whatever is cached of URLs, see `digest_of`; nothing for local files."""
    if remote is None:
        return ()
    from gpuload.datasets.stores.remote import digest_of

    return tuple(filter(None, [digest_of(remote)]))


class OpenFile:
    """A regular file, opened for reading; closed with its last reference, so no thread loses it while it reads.

    Args:
        path: where it is.
        mapped: read it out of a mapping, where its filesystem allows that.

    Attributes:
        size, mtime_ns: bytes, and when it was last changed, as it was opened.

    Raises:
        OSError: it is missing, or no regular file.
    """

    __slots__ = ("_descriptor", "_held", "_map", "mtime_ns", "path", "size")

    def __init__(self, path: str, mapped: bool = False) -> None:
        self._held: list[int] = []
        self._map: mmap.mmap | None = None
        self.path = path
        self._held.extend(map(os.open, (path,), (FLAGS,)))  # so that no ctrl-C loses it, as in `read_file`
        self._descriptor = self._held[0]
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else KINDS.get(stat.S_IFMT(status.st_mode), "special")
            raise OSError(f"{path!r} is no regular file, but {what}")
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
        if mapped and self.size:
            with contextlib.suppress(OSError):  # some filesystems map nothing
                self._map = mmap.mmap(self._descriptor, self.size, mmap.MAP_SHARED, mmap.PROT_READ)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return these bytes; fewer only where the file ends."""
        if self._map is not None and os.fstat(self._descriptor).st_size >= self.size:  # else SIGBUS
            return self._map[offset : offset + nbytes]
        parts, end = [], offset + nbytes
        while offset < end and (part := os.pread(self._descriptor, end - offset, offset)):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def will_read(self, offset: int, nbytes: int) -> None:
        """Let the kernel read these bytes, which are asked for soon."""
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # as Python ends, `os` may be gone before
        for descriptor in self._held:
            close(descriptor)


def open_file(path: str, remote: Remote | None = None, *, mapped: bool = False) -> OpenFile:
    """Open the file at a path or URL, for reads at offsets. All stores open their files here."""
    if is_url(path):
        return client(remote).stat([path])[0]  # pyright: ignore[reportReturnType]
    return OpenFile(path, mapped)


def read_whole(paths: Sequence[str], remote: Remote | None = None) -> list[bytes]:
    """Read whole image files, those at URLs together."""
    return list(map(read_file, paths)) if remote is None else client(remote).read_files(paths)


def near_reads(file: OpenFile, nbytes: int) -> Callable[[int, int], bytes]:
    """Return a `read_at` for small reads that lie near each other: it reads at least this many bytes at once, and of a
    file at a URL as many as seem wise."""
    if not isinstance(file, OpenFile):
        from gpuload.datasets.stores.remote import RemoteIO

        return RemoteIO(file).read_at
    os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing beyond what is asked for
    stream = open(file._descriptor, "rb", nbytes, closefd=False)  # noqa: SIM115

    def read_at(offset: int, nbytes: int, file: OpenFile = file) -> bytes:  # its last reference closes the descriptor
        stream.seek(offset)
        return stream.read(nbytes)

    return read_at


class OpenFiles:
    """The files that were used last, kept open. A copy in another process, or from a pickle, begins with none.

    Args:
        limit: how many are kept.
        remote: how URLs are read, if they are URLs.
        mapped: read them out of mappings.
    """

    def __init__(self, limit: int = KEPT_OPEN, remote: Remote | None = None, mapped: bool = False) -> None:
        self.limit, self.remote, self.mapped = limit, remote, mapped
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> OpenFile:
        """Return the file, opened if it is not; the one that was not used for longest is closed."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = open_file(path, self.remote, mapped=self.mapped)
                while len(self._files) > self.limit:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(path)
            return file

    def read(self, places: Sequence[tuple[OpenFile, int, int]]) -> list[bytes]:
        """Return bytes at these places (a file of `get`, offset, how many); fewer only where a file ends. Those at URLs
        are asked for together."""
        if self.remote is None:
            return [file.read_at(offset, nbytes) for file, offset, nbytes in places]
        remote: Any = places
        return client(self.remote).read(remote)

    def look(self, paths: Iterable[str]) -> None:
        """Open the URLs among these that are not, together."""
        if self.remote is None:
            return
        with self._lock:
            new = [path for path in dict.fromkeys(paths) if path not in self._files]
        for file in client(self.remote).stat(new):
            with self._lock:
                self._files[file.path] = file  # pyright: ignore[reportArgumentType]

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[int, Remote | None, bool]]:
        return OpenFiles, (self.limit, self.remote, self.mapped)


def open_stream(path: str, remote: Remote | None = None) -> Any:
    """Open a path or URL for reading from its beginning on: a file, a FIFO, or with ``"-"`` the standard input."""
    if path == "-":
        return open(0, "rb", buffering=STREAM_BYTES, closefd=False)
    if is_url(path):
        return BufferedReader(open_seekable(path, remote), STREAM_BYTES)
    return open(path, "rb", buffering=STREAM_BYTES)


def open_seekable(path: str, remote: Remote | None = None) -> Any:
    """Open a path or URL as a file object, for libraries that read where they like."""
    if is_url(path):
        from gpuload.datasets.stores.remote import RemoteIO

        return RemoteIO(client(remote).stat([path])[0])
    return open(path, "rb")
