"""Reading files at URLs through fsspec, with merged ranges, concurrent requests, timeouts and retries.

`Remote` holds the options as plain values, which are sent to workers. A `Client` opens file systems, which hold threads
and connections, so it belongs to one process and is never pickled. After a fork, the child opens another client.
Requests run on fsspec's thread; methods of file systems that are not asynchronous run on threads of the client.

fsspec's functions for ranges are not used. `cat_ranges` has no timeout, and reads the ranges of a file system that is
not asynchronous one at a time; `merge_offset_ranges` loses the end of a range that contains another range (in fsspec
2025.3, which is supported). Over HTTP, fsspec never retries a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from gpuload.checks import argument, check_fields, finite_number, integer, mapping
from gpuload.datasets import files
from gpuload.datasets.litter import SkippedFiles, is_litter
from gpuload.datasets.scan import Paths
from gpuload.datasets.stores.cached import cache_folder
from gpuload.datasets.stores.remote_cache import DiskCache
from gpuload.datasets.stores.remote_failures import check_length, display_url, failure_of, http_system, s3_system
from gpuload.errors import DecodeError, import_optional, visible

__all__ = ["Client", "Remote", "RemoteFile", "RemoteIO", "RemoteScanner", "StorageOptions", "client_of", "digest_of"]

GAP_BYTES: Final = 256 << 10
BLOCK_BYTES: Final = 128 << 10  # blocks of the disk cache
PIECE_BYTES: Final = 8 << 20  # longer ranges are split into several requests
MIN_WINDOW_BYTES: Final = 64 << 10
MAX_WINDOW_BYTES: Final = 32 << 20
CACHED_WINDOWS: Final = 8
BYTES_PER_S: Final = 1 << 20  # the timeout of a request grows by one second for each MiB
# File systems use these names for the version of a file. The most reliable come first, modification times last.
TIME_KEYS: Final = ("LastModified", "Last-Modified", "last_modified", "mtime", "modified", "updated", "created")
VERSION_KEYS: Final = ("ETag", "etag", "md5Hash", "generation", "blob_id", "sha256", *TIME_KEYS)
# These variables determine which store or account the libraries behind fsspec use for a URL.
ENVIRONMENT: Final = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING", "HF_ENDPOINT", "STORAGE_EMULATOR_HOST",
)  # fmt: skip
CHECKED_SYSTEMS: Final = {
    "fsspec.implementations.http.HTTPFileSystem": http_system,
    "s3fs.core.S3FileSystem": s3_system,
}
EXTRAS: Final = {"http": "remote", "https": "remote", "s3": "s3", "gs": "gs", "hf": "hf"}


# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Remote:
    """Options for reading URLs: ``storage_options=gl.Remote({"anon": True}, cache_bytes=50 << 30)``.

    Args:
        options: arguments of fsspec's file system (keys, tokens, endpoints), like the ``storage_options`` of pandas.
            They are sent to the workers, and never displayed.
        gap_bytes: two ranges of one file that are read together become one request if the gap between them is no
            larger than this.
        in_flight: the maximum number of requests that a process has in flight.
        retries: how often to repeat a request that timed out, lost its connection, was answered with 429 or 5xx, or
            whose response was truncated. The delay is 0.25 s and doubles each time, up to 10 s, unless the server
            requests another delay.
        timeout_s: the timeout of a request, in seconds. One second is added for each MiB of the response.
        cache_bytes: the maximum size of a disk cache for the data, which all processes of this machine share. The least
            recently used data is evicted first; 0 disables the cache.
        cache_folder: the folder of this cache. Default: ``remote`` in ``$GPULOAD_CACHE``, else in ``~/.cache/gpuload``.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    gap_bytes: int = argument(integer, default=GAP_BYTES, minimum=0)
    in_flight: int = argument(integer, default=16, minimum=1)
    retries: int = argument(integer, default=5, minimum=0)
    timeout_s: float = argument(finite_number, default=60.0, above=0)
    cache_bytes: int = argument(integer, default=0, minimum=0)
    cache_folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        mapping("storage_options, unless it is a gpuload.Remote,", self.options)
        check_fields(self, "Remote")

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.options)) or "none"
        return f"<Remote, with the options {names}>"


StorageOptions = Mapping[str, Any] | Remote | None


def digest_of(remote: Remote) -> str:
    """Return a digest of all settings that select the store and the account in addition to the URL: the options,
    fsspec's configuration, and environment variables. The digest is empty if none is set. Data cached under one digest
    is not visible under another."""
    fsspec_config = import_optional("fsspec.config", "datasets at URLs", "remote").conf
    environment = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    scope = [dict(remote.options), fsspec_config, environment]
    text = json.dumps(scope, sort_keys=True, default=_digest_of_object)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if any(scope) else ""


def _digest_of_object(value: object) -> list[str]:
    try:
        data = pickle.dumps(value)
    except Exception:  # pickling may raise any error; with a random digest, no cached data is shared
        data = os.urandom(16)
    return [f"{type(value).__module__}.{type(value).__qualname__}", hashlib.blake2b(data, digest_size=16).hexdigest()]


# -- requests ---------------------------------------------------------------------------------------------------------


Request = Callable[[], Awaitable[Any]]


_defaults = Remote()
_clients: WeakKeyDictionary[Remote, tuple[int, Client]] = WeakKeyDictionary()
_lock = threading.RLock()  # held while a client or a file system is being opened
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # pyright: ignore[reportAttributeAccessIssue]


def client_of(remote: Remote | None) -> Client:
    """Return the client of this process for these options; None means the default options."""
    remote = remote or _defaults
    with _lock:
        pid, client = _clients.get(remote, (0, None))
        if client is None or pid != os.getpid():
            client = Client(remote)
            _clients[remote] = os.getpid(), client
        return client


class Client:
    """A reader of URLs with the options of a `Remote`.

    Attributes:
        requests: the number of requests made so far.

    Raises:
        OSError: the cache folder cannot be written.
    """

    def __init__(self, remote: Remote) -> None:
        # A reference to the `Remote` would keep its entry in `_clients` alive forever.
        self.gap_bytes, self.retries, self.timeout_s = remote.gap_bytes, remote.retries, remote.timeout_s
        self.requests = 0
        self._options = dict(remote.options)
        self._systems: dict[str, Any] = {}
        self._gate = asyncio.Semaphore(remote.in_flight)
        self._threads = ThreadPoolExecutor(remote.in_flight, "gpuload-remote")
        self._disk: DiskCache | None = None
        if remote.cache_bytes:
            folder = os.fspath(remote.cache_folder or os.path.join(cache_folder(), "remote"))
            self._disk = DiskCache(folder, remote.cache_bytes, digest_of(remote))

    def read(self, ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
        """Return ranges of files, each given as a file, an offset, and a number of bytes. A result is shorter only at
        the end of a file.

        Raises:
            OSError: a range cannot be read; the first error is raised.
        """
        spans = [(file, min(offset, file.size), min(offset + nbytes, file.size)) for file, offset, nbytes in ranges]
        if self._disk is None:
            return self._read_ranges([(file.path, begin, end) for file, begin, end in spans])
        blocks = {
            (file, at): self._disk.get(_block_key(file, at)) for file, *span in spans for at in _block_offsets(*span)
        }
        missing_blocks = [block for block, data in blocks.items() if data is None]
        missing_ranges = [(file.path, at, min(at + BLOCK_BYTES, file.size)) for file, at in missing_blocks]
        for block, data in zip(missing_blocks, self._read_ranges(missing_ranges), strict=True):
            blocks[block] = data
            self._disk.put(_block_key(*block), data)
        contents = []
        for file, begin, end in spans:
            data = b"".join([blocks[file, at] or b"" for at in _block_offsets(begin, end)])
            at = begin % BLOCK_BYTES
            contents.append(data[at : at + end - begin])
        return contents

    def read_files(self, urls: Sequence[str]) -> list[bytes]:
        """Return the contents of image files whose sizes are not known, or in the context `files.read_starts` their
        starts, which are not put into the disk cache. Their keys in the disk cache contain no
        version, only the URL and the options. To keep out error pages, the cache stores only files that begin and end
        like an image.

        Raises:
            OSError: a file cannot be read.
            DecodeError: a file is larger than the limit, or larger than 16 MiB and does not begin like an image.
        """
        images: list[bytes | None] = [None if self._disk is None else self._disk.get(url) for url in urls]
        missing_indices = [index for index, data in enumerate(images) if data is None]
        start_bytes = files.start_bytes()
        starts = self._send(
            [
                self._make_range_request(urls[n], 0, start_bytes or files.LARGE_BYTES, exact=False)
                for n in missing_indices
            ]
        )
        for index, data in zip(missing_indices, starts, strict=True):
            url = urls[index]
            if start_bytes is None and len(data) == files.LARGE_BYTES:
                (file,) = self.stat([url])
                files.check_large(file.size, data, display_url(url))
                data += self._read_ranges([(url, files.LARGE_BYTES, file.size)])[0]
            files.check_size(len(data), display_url(url))
            images[index] = data
            if self._disk is not None and start_bytes is None and files.is_complete(data):
                self._disk.put(url, data)
        return [data or b"" for data in images]

    def forget(self, url: str) -> list[str]:
        """Drop a file from the cache that `read_files` uses. Return the cache's name in a list; or an empty list if the
        file was not cached."""
        disk = self._disk
        return [f"the cache of URLs in {disk.folder!r}"] if disk is not None and disk.drop(url) else []

    def stat(self, urls: Sequence[str]) -> list[RemoteFile]:
        """Query the sizes and versions of files.

        Raises:
            OSError: a file is missing or is a folder, or the server does not state the size of a file.
        """
        remote_files = []
        for url, info in zip(urls, self._send([self._make_request(url, "info") for url in urls]), strict=True):
            if info.get("type") == "directory":
                raise IsADirectoryError(21, "it is a folder; expected the URL of a file", display_url(url))
            if info.get("size") is None:
                raise OSError(
                    5,
                    "the server does not state the file's size, so the file cannot be read in parts; copy it first",
                    display_url(url),
                )
            version = next((str(info[name]) for name in VERSION_KEYS if info.get(name)), "")
            digest = hashlib.blake2b(version.encode(), digest_size=8).digest()
            version_hash = int.from_bytes(digest, "little") >> 1 if version else 0
            mtime = next((info[name] for name in TIME_KEYS if info.get(name)), None)
            remote_files.append(RemoteFile(self, url, int(info["size"]), version_hash, _timestamp_s(mtime)))
        return remote_files

    def list_files(self, root: str) -> list[tuple[str, str]]:
        """Return all files below a folder: each file's URL relative to the folder, and its name (``%20`` decoded)."""
        (infos,) = self._send([self._make_request(root, "find", detail=True)])
        prefix = self._file_system(root)[1].rstrip("/") + "/"
        names = [name[len(prefix) :] for name, info in infos.items() if info.get("type") != "directory"]
        is_quoted = root.startswith(("http://", "https://"))
        return [(name, unquote(name) if is_quoted else name) for name in names if name and not name.endswith("/")]

    def glob(self, pattern: str) -> list[str]:
        """Return the URLs of the files that match a pattern, sorted."""
        (infos,) = self._send([self._make_request(pattern, "glob", detail=True)])
        system = self._file_system(pattern)[0]
        return sorted(system.unstrip_protocol(name) for name, info in infos.items() if info.get("type") != "directory")

    def _read_ranges(self, spans: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return ranges of files. Ranges with small gaps share a request; a long range takes several requests."""
        runs: list[tuple[str, int, int]] = []
        run_of = {}
        for url, begin, end in sorted(set(spans)):
            if runs and url == runs[-1][0] and begin <= runs[-1][2] + self.gap_bytes:
                runs[-1] = url, runs[-1][1], max(runs[-1][2], end)
            else:
                runs.append((url, begin, end))
            run_of[url, begin, end] = len(runs) - 1
        requests = [
            [self._make_range_request(url, at, min(at + PIECE_BYTES, end)) for at in range(begin, end, PIECE_BYTES)]
            for url, begin, end in runs
        ]
        responses = iter(self._send(list(itertools.chain.from_iterable(requests))))
        contents = [b"".join(itertools.islice(responses, len(pieces))) for pieces in requests]
        slices = [(run_of[span], span[1] - runs[run_of[span]][1], span[2] - span[1]) for span in spans]
        return [contents[run][offset : offset + nbytes] for run, offset, nbytes in slices]

    def _make_range_request(self, url: str, begin: int, end: int, *, exact: bool = True) -> Request:
        """Return a request for a range of a file. With `exact`, a response of another length is an error."""
        limit_s = self.timeout_s + (end - begin) / BYTES_PER_S
        check = partial(check_length, begin, end) if exact else None
        return self._make_request(url, "cat_file", limit_s, check, start=begin, end=end)

    def _make_request(
        self, url: str, method: str, limit_s: float | None = None, check: Any = None, **options: object
    ) -> Request:
        """Return a request: a function that calls a method of a URL's file system, with retries. `check` returns the
        response, or raises an error if it does not match the request."""
        system, path = self._file_system(url)  # some constructors wait for fsspec's thread, so they cannot run on it
        if method != "cat_file":
            system.invalidate_cache()  # cached listings may be out of date
        call = partial(getattr(system, f"_{method}" if system.async_impl else method), path, **options)
        if not system.async_impl:
            call = partial(self._run_in_thread, call)
        return partial(self._call_with_retries, call, url, limit_s or self.timeout_s, check or (lambda data: data))

    async def _run_in_thread(self, call: Callable[[], object]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _call_with_retries(self, call: Request, url: str, limit_s: float, check: Callable[[Any], object]) -> Any:
        for attempt in itertools.count(1):
            try:
                async with self._gate:
                    return check(await asyncio.wait_for(call(), limit_s))
            except DecodeError:
                raise
            except Exception as error:
                failure = failure_of(error, url, limit_s)
                if not failure.is_transient or attempt > self.retries:
                    raise failure.make_error(url, attempt) from error
            await asyncio.sleep(failure.wait_s(attempt))

    def _send(self, requests: Sequence[Request]) -> list[Any]:
        """Send requests concurrently, and return all responses."""
        if not requests:
            return []
        from fsspec.asyn import get_loop, sync

        async def request_all() -> list[Any]:
            return await asyncio.gather(*[request() for request in requests], return_exceptions=True)

        self.requests += len(requests)
        responses: Any = sync(get_loop(), request_all)
        for error in filter(lambda response: isinstance(response, BaseException), responses):
            raise error
        return responses

    def _file_system(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL (opened on first use) and the path of the file in it."""
        scheme, _, location = url.partition("://")
        host = f"{scheme}://{location.partition('/')[0]}"
        with _lock:
            if host not in self._systems:
                self._systems[host] = _open_file_system(url, self._options)
        return self._systems[host], self._systems[host]._strip_protocol(url)


def _block_offsets(begin: int, end: int) -> range:
    """Return the offsets of the blocks that contain these bytes."""
    return range(begin // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES)


def _block_key(file: RemoteFile, at: int) -> str:
    """Return the key of a block in the disk cache."""
    return f"{file.path}\0{file.mtime_ns}\0{file.size}\0{at}"


def _open_file_system(url: str, options: dict[str, Any]) -> Any:
    scheme = url.partition("://")[0]
    fsspec = import_optional("fsspec.core", f"datasets at {scheme}://…", "remote")
    try:
        default = None if "::" in scheme else fsspec.get_filesystem_class(scheme)  # users may register other classes
        if default is not None and (name := f"{default.__module__}.{default.__qualname__}") in CHECKED_SYSTEMS:
            system = CHECKED_SYSTEMS[name]()
            return system(**{**system._get_kwargs_from_urls(url), **options})
        return fsspec.url_to_fs(url, **options)[0]
    except (ImportError, ValueError, TypeError) as error:
        remedy = f"pip install 'gpuload[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "install the missing package"
        raise type(error)(
            f"{display_url(url)!r} cannot be opened: {visible(str(error))}"
            + (f"; {remedy}" if isinstance(error, ImportError) else "; check the URL and storage_options")
        ) from error


def _timestamp_s(value: Any) -> float:
    """Convert a file system's time (a datetime, a number or a header) to seconds; return 0.0 for any other value."""
    with contextlib.suppress(TypeError, ValueError):
        value = parsedate_to_datetime(value) if isinstance(value, str) else value
        return float(value.timestamp() if hasattr(value, "timestamp") else value)
    return 0.0


# -- files and folders ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class RemoteFile:
    """A file at a URL, with the interface of `OpenFile`.

    Attributes:
        client, path: the client that reads the file, and its URL.
        size: the size in bytes.
        mtime_ns: a hash of the file's ETag, or else of its modification time; 0 if the server states neither.
        modified_s: the modification time in seconds, if the server states it; otherwise 0.
    """

    client: Client
    path: str
    size: int
    mtime_ns: int
    modified_s: float

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes of a range; fewer only at the end of the file."""
        return self.client.read([(self, offset, nbytes)])[0]


class RemoteIO(io.RawIOBase):
    """A file object that needs few requests for reads that are close together.

    Each request reads a window. If a read continues after the last window, the next window is twice as long, up to 32
    MiB; otherwise it has 64 KiB. So scanning the headers of an archive of small members costs about as much as reading
    the entire archive, and large members cost one request each. Only one window longer than 64 KiB is cached.
    """

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self.file, self.name, self.size = file, file.path, file.size
        self._loaded_ranges: list[tuple[int, bytes]] = []
        self._windows: list[tuple[int, bytes]] = []
        self._next_offset, self._window_bytes, self._position = 0, MIN_WINDOW_BYTES // 2, 0

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these ranges (begin, end) together, and cache them in place of the ranges of the last call."""
        file_ranges = [(self.file, begin, end - begin) for begin, end in ranges]
        data = self.file.client.read(file_ranges)
        self._loaded_ranges = [(begin, content) for (_, begin, _), content in zip(file_ranges, data, strict=True)]

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes of a range; fewer only at the end of the file."""
        nbytes = min(nbytes, max(0, self.file.size - offset))
        for begin, data in reversed(self._windows + self._loaded_ranges):
            if begin <= offset and offset + nbytes <= begin + len(data):
                return data[offset - begin : offset - begin + nbytes]
        is_sequential = self._next_offset - nbytes <= offset <= self._next_offset + self._window_bytes
        self._window_bytes = min(2 * self._window_bytes, MAX_WINDOW_BYTES) if is_sequential else MIN_WINDOW_BYTES
        data = self.file.read_at(offset, max(nbytes, self._window_bytes))
        is_long = len(data) > MIN_WINDOW_BYTES
        short_windows = [window for window in self._windows if not (is_long and len(window[1]) > MIN_WINDOW_BYTES)]
        self._windows = [*short_windows[1 - CACHED_WINDOWS :], (offset, data)]
        self._next_offset = offset + len(data)
        return data[:nbytes]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self.size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read_at(self._position, len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


class RemoteScanner:
    """A listing of the image files below a URL, in the order of a `Scanner`.

    Attributes:
        skipped_files: the files of other programs, which are not images of the dataset.
    """

    def __init__(self, client: Client, root: str, *, extensions: Iterable[str]) -> None:
        self.root, suffixes = root, tuple(extensions)
        self.skipped_files = SkippedFiles()
        self._folders: set[bytes] = set()
        self._images: list[tuple[bytes, bytes, bytes]] = []  # folder, name, and URL relative to the root
        for url, path in client.list_files(root):
            name, is_image = os.fsencode(path), path.lower().endswith(suffixes)
            folder, _, base_name = name.rpartition(b"/")
            if not is_litter(name):
                self._folders.add(folder.partition(b"/")[0])
                if is_image:
                    self._images.append((folder, base_name, os.fsencode(url)))
            elif is_image:
                self.skipped_files.add(name)
        self._images.sort()

    def find_folders(self) -> list[bytes]:
        """Return the names of the folders directly in the root, sorted."""
        return sorted(filter(None, self._folders))

    def find_images(self, start: bytes = b"") -> Paths:
        """Return the images at any depth below `start`."""
        prefix = start + b"/"
        urls = [url for folder, _, url in self._images if not start or (folder + b"/").startswith(prefix)]
        return Paths.pack_relative(self.root, urls)
