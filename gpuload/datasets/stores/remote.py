"""Files at URLs, read through fsspec: ranges joined, several requests in flight, a time limit for each, retries.

`Remote` says how, a plain value that travels to workers. What it opens belongs to one process, the one that reads: file
systems hold threads and connections, so a `Client` opens them, in a child after a fork anew, and is never pickled.
Requests run on fsspec's own thread; methods of file systems that are not asynchronous on threads of the client's.

fsspec's `cat_ranges` is not used: it has no time limit for a request, and asks a file system that is not asynchronous
for one range after the other. Nor is `merge_offset_ranges`, which loses the end of a range with another one in it
(fsspec 2025.3, which is supported). Over HTTP fsspec makes no request again.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import pickle
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import numpy as np

from gpuload.datasets import files
from gpuload.datasets.litter import LeftOut, is_litter
from gpuload.datasets.scan import Paths
from gpuload.datasets.stores.cached import cache_folder
from gpuload.datasets.stores.remote_cache import Disk
from gpuload.datasets.stores.remote_failures import check_whole, failure_of, http_system, s3_system, shown
from gpuload.errors import DecodeError, import_optional, visible

__all__ = [
    "Client",
    "Remote",
    "RemoteFile",
    "RemoteIO",
    "RemoteScanner",
    "StorageOptions",
    "Windows",
    "client_of",
    "digest_of",
]

GAP_BYTES: Final = 256 << 10
BLOCK_BYTES: Final = 128 << 10  # of the cache
PIECE_BYTES: Final = 8 << 20  # a longer range is asked for in several requests
LEAST_WINDOW: Final = 64 << 10
MOST_WINDOW: Final = 32 << 20
WINDOWS: Final = 8
BYTES_PER_S: Final = 1 << 20  # an answer may take a second more for so many
# What says that a file is the same, the surest first, as file systems call it; times are the last resort.
TIMES: Final = ("LastModified", "Last-Modified", "last_modified", "mtime", "modified", "updated", "created")
VERSIONS: Final = ("ETag", "etag", "md5Hash", "generation", "blob_id", "sha256", *TIMES)
# By these, too, libraries behind fsspec find another store or account under the same URL.
ENVIRONMENT: Final = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING", "HF_ENDPOINT", "STORAGE_EMULATOR_HOST",
)  # fmt: skip
CHECKED: Final = {"fsspec.implementations.http.HTTPFileSystem": http_system, "s3fs.core.S3FileSystem": s3_system}
EXTRAS: Final = {"http": "remote", "https": "remote", "s3": "s3", "gs": "gs", "hf": "hf"}


# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Remote:
    """How a dataset reads URLs: ``storage_options=gl.Remote({"anon": True}, cache_bytes=50 << 30)``.

    Args:
        options: what fsspec's file system takes, as ``storage_options`` of pandas: keys, tokens, endpoints. They travel
            to the workers, and are shown nowhere.
        gap_bytes: two ranges of one file that are asked for together become one request if no more than this lies
            between them.
        in_flight: the most requests that a process has under way.
        retries: how often a request is made again that timed out, lost its connection, was cut short, or was answered
            429 or 5xx. Between two lies 0.25 s, then twice as long each time, up to 10 s, or what the server asks for.
        timeout_s: how long an answer may take, and one second more for each MiB of it.
        cache_bytes: how much of what was read is kept on this machine's disk, for all processes together, the least
            recently used going first; 0 keeps nothing.
        cache_folder: where; default: ``remote`` in the cache folder (``$GPULOAD_CACHE``, else ``~/.cache/gpuload``).

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    gap_bytes: int = GAP_BYTES
    in_flight: int = 16
    retries: int = 5
    timeout_s: float = 60.0
    cache_bytes: int = 0
    cache_folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise TypeError(
                "storage_options must be a dict of what fsspec's file system takes, such as {'anon': True}, or a "
                f"gpuload.Remote, got {type(self.options).__name__}"
            )
        for name, least in (("gap_bytes", 0), ("in_flight", 1), ("retries", 0), ("cache_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"Remote({name}=…) must be a whole number, {least} or more, got {value!r}")
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ValueError(f"Remote(timeout_s=…) must be a number of seconds above 0, got {self.timeout_s!r}")

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.options)) or "none"
        return f"<Remote, with the options {names}>"


StorageOptions = Mapping[str, Any] | Remote | None


def digest_of(remote: Remote) -> str:
    """Return a digest of what, next to the URL, says which store is read and as whom: the options, fsspec's
    configuration, and variables of the environment. Whatever is kept under one is not found under another. Empty if
    there are none."""
    configured = import_optional("fsspec.config", "datasets at URLs", "remote").conf
    environment = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    scope = [dict(remote.options), configured, environment]
    text = json.dumps(scope, sort_keys=True, default=_digest_of_object)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if any(scope) else ""


def _digest_of_object(value: Any) -> list[str]:
    """Return what stands in JSON for an object: its type, and the digest of its pickle."""
    try:
        packed = pickle.dumps(value)
    except Exception:  # whatever its class raises: then nothing that others keep is found
        packed = os.urandom(16)
    return [f"{type(value).__module__}.{type(value).__qualname__}", hashlib.blake2b(packed, digest_size=16).hexdigest()]


# -- requests ---------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of a method of a URL's file system; `check` raises if the answer is not what was asked for."""

    url: str
    method: str
    options: dict[str, Any]
    limit_s: float
    check: Callable[[Any], Any] = lambda answer: answer


_clients: WeakKeyDictionary[Remote, tuple[int, Client]] = WeakKeyDictionary()
_lock = threading.Lock()


def client_of(remote: Remote) -> Client:
    """Return the client of these options, in this process."""
    with _lock:
        pid, client = _clients.get(remote, (0, None))
        if client is None or pid != os.getpid():
            client = Client(remote)
            _clients[remote] = os.getpid(), client
        return client


os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # pyright: ignore[reportAttributeAccessIssue]


class Client:
    """Reads URLs with the options of a `Remote`.

    Attributes:
        requests: how many were made so far.

    Raises:
        OSError: the folder of the cache cannot be written.
    """

    def __init__(self, remote: Remote) -> None:
        # Not the `Remote` itself: it is kept only as long as somebody reads with it.
        self.gap_bytes, self.retries, self.timeout_s = remote.gap_bytes, remote.retries, remote.timeout_s
        self.requests = 0
        self._options = dict(remote.options)
        self._systems: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._gate = asyncio.Semaphore(remote.in_flight)
        self._threads = ThreadPoolExecutor(remote.in_flight, "gpuload-remote")
        self._disk: Disk | None = None
        if remote.cache_bytes:
            folder = os.fspath(remote.cache_folder or os.path.join(cache_folder(), "remote"))
            self._disk = Disk(folder, remote.cache_bytes, digest_of(remote))

    def read(self, places: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
        """Return bytes of files: from an offset on, so many; fewer only where a file ends.

        Raises:
            OSError: some of them cannot be read; the first of these is raised.
        """
        spans = [(file, min(offset, file.size), min(offset + nbytes, file.size)) for file, offset, nbytes in places]
        if self._disk is None:
            return self._ranges([(file.path, begin, end) for file, begin, end in spans])
        blocks: dict[tuple[RemoteFile, int], bytes | None] = {}
        for file, begin, end in spans:
            for at in range(begin // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES):
                blocks[file, at] = self._disk.get(_block(file, at))
        missing = [key for key, data in blocks.items() if data is None]
        wanted = [(file.path, at, min(at + BLOCK_BYTES, file.size)) for file, at in missing]
        for key, data in zip(missing, self._ranges(wanted), strict=True):
            blocks[key] = data
            self._disk.put(_block(*key), data)
        found = []
        for file, begin, end in spans:
            first = begin // BLOCK_BYTES * BLOCK_BYTES
            data = b"".join([blocks[file, at] or b"" for at in range(first, end, BLOCK_BYTES)])
            found.append(data[begin - first : end - first])
        return found

    def whole(self, urls: Sequence[str]) -> list[bytes]:
        """Return whole image files, of sizes not known before. What is on the disk is found by the URL and the options
        alone, so only what begins and ends as an image is put there.

        Raises:
            OSError: one cannot be read.
            DecodeError: one is larger than is allowed, or larger than 16 MiB and does not begin as an image.
        """
        images: list[bytes | None] = [None if self._disk is None else self._disk.get(url) for url in urls]
        missing = [number for number, data in enumerate(images) if data is None]
        starts = self._all([self._cat(urls[number], 0, files.LARGE_BYTES, exact=False) for number in missing])
        for number, data in zip(missing, starts, strict=True):
            url = urls[number]
            if len(data) == files.LARGE_BYTES:
                (file,) = self.look([url])
                files.check_large(file.size, data, shown(url))
                data += self._ranges([(url, files.LARGE_BYTES, file.size)])[0]
            files.check_size(len(data), shown(url))
            images[number] = data
            if self._disk is not None and files.is_complete(data):
                self._disk.put(url, data)
        return [data or b"" for data in images]

    def forget(self, url: str) -> list[str]:
        """Drop a whole file from the cache; returns the cache's name if the file was there."""
        disk = self._disk
        return [f"the cache of URLs in {disk.folder!r}"] if disk is not None and disk.drop(url) else []

    def look(self, urls: Sequence[str]) -> list[RemoteFile]:
        """Look at files: at their sizes and versions.

        Raises:
            OSError: one is missing, is a folder, or its size is not said.
        """
        self._invalidate(urls)
        looked = []
        for url, info in zip(urls, self._all([self._call(url, "info") for url in urls]), strict=True):
            if info.get("type") == "directory":
                raise IsADirectoryError(21, "it is a folder; expected a file", shown(url))
            if info.get("size") is None:
                raise OSError(
                    5, "the server does not say how many bytes it has, so no part of it can be asked for", shown(url)
                )
            known = next((str(info[name]) for name in VERSIONS if info.get(name)), None)
            digest = hashlib.blake2b((known or "").encode(), digest_size=8).digest()
            version = int.from_bytes(digest, "little") >> 1 if known else 0
            written = next((info[name] for name in TIMES if info.get(name)), None)
            looked.append(RemoteFile(self, url, int(info["size"]), version, _seconds(written)))
        return looked

    def files(self, root: str) -> list[tuple[str, str]]:
        """Return all files at any depth below a folder: the rest of their URLs, and the same as a name (without
        ``%20``)."""
        self._invalidate([root])
        (listed,) = self._all([self._call(root, "find", detail=True)])
        before = self._place(root)[1].rstrip("/") + "/"
        names = [name[len(before) :] for name, info in listed.items() if info.get("type") != "directory"]
        quoted = root.startswith(("http://", "https://"))
        return [(name, unquote(name) if quoted else name) for name in names if name and not name.endswith("/")]

    def glob(self, pattern: str) -> list[str]:
        """Return the URLs of the files that a pattern stands for, sorted."""
        self._invalidate([pattern])
        (listed,) = self._all([self._call(pattern, "glob", detail=True)])
        system = self._place(pattern)[0]
        return sorted(system.unstrip_protocol(name) for name, info in listed.items() if info.get("type") != "directory")

    def _ranges(self, spans: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return bytes of files, those near each other by one request, long ones by several."""
        runs: list[tuple[str, int, int]] = []
        for url, begin, end in sorted(set(spans)):
            if runs and url == runs[-1][0] and begin <= runs[-1][2] + self.gap_bytes:
                runs[-1] = url, runs[-1][1], max(runs[-1][2], end)
            else:
                runs.append((url, begin, end))
        pieces = [
            [self._cat(url, at, min(at + PIECE_BYTES, end)) for at in range(begin, end, PIECE_BYTES)]
            for url, begin, end in runs
        ]
        answers = iter(self._all([piece for own in pieces for piece in own]))
        data = [b"".join([next(answers) for _ in own]) for own in pieces]
        found = []
        for url, begin, end in spans:
            number = bisect_right(runs, (url, begin), key=lambda run: run[:2]) - 1
            at = begin - runs[number][1]
            found.append(data[number][at : at + end - begin])
        return found

    def _cat(self, url: str, begin: int, end: int, *, exact: bool = True) -> _Call:
        """Return the request for bytes of a file; `exact`: more and fewer are an error."""
        call = self._call(url, "cat_file", start=begin, end=end)
        limit_s = self.timeout_s + (end - begin) / BYTES_PER_S
        return call._replace(limit_s=limit_s, check=partial(check_whole, begin, end) if exact else call.check)

    def _call(self, url: str, method: str, **options: Any) -> _Call:
        return _Call(url, method, options, self.timeout_s)

    def _all(self, calls: Sequence[_Call]) -> list[Any]:
        """Make calls, all of them under way together, each again while that may help."""
        if not calls:
            return []
        from fsspec.asyn import get_loop, sync

        self.requests += len(calls)
        results: Any = sync(get_loop(), self._gather, [self._place(call.url) for call in calls], calls)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _gather(self, places: Sequence[tuple[Any, str]], calls: Sequence[_Call]) -> list[Any]:
        return await asyncio.gather(*map(self._attempts, places, calls), return_exceptions=True)

    async def _attempts(self, place: tuple[Any, str], call: _Call) -> Any:
        (system, path), attempt = place, 0
        while True:
            attempt += 1
            try:
                async with self._gate:
                    if system.async_impl:
                        answer = getattr(system, f"_{call.method}")(path, **call.options)
                    else:
                        method = partial(getattr(system, call.method), path, **call.options)
                        answer = asyncio.get_running_loop().run_in_executor(self._threads, method)
                    return call.check(await asyncio.wait_for(answer, call.limit_s))
            except DecodeError:
                raise
            except Exception as error:
                failure = failure_of(error, call.url, call.limit_s)
                if not failure.again or attempt > self.retries:
                    raise failure.error(call.url, attempt) from error
            await asyncio.sleep(failure.wait_s(attempt))

    def _invalidate(self, urls: Iterable[str]) -> None:
        """Forget what file systems remember of folders, which may be old."""
        for system in {id(system): system for system, _ in map(self._place, urls)}.values():
            system.invalidate_cache()

    def _place(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, opened if it is not, and what it calls the file."""
        after = url.index("://") + 3
        host = url[:end] if (end := url.find("/", after)) > 0 else url
        with self._lock:
            if host not in self._systems:
                self._systems[host] = _opened(url, self._options)
        system = self._systems[host]
        return system, system._strip_protocol(url)


def _block(file: RemoteFile, at: int) -> str:
    """Return the cache's key of a block."""
    return f"{file.path}\0{file.mtime_ns}\0{file.size}\0{at}"


def _opened(url: str, options: dict[str, Any]) -> Any:
    scheme = url.partition("://")[0]
    fsspec = import_optional("fsspec.core", f"datasets at {scheme}://…", "remote")
    try:
        usual = None if "::" in scheme else fsspec.get_filesystem_class(scheme)  # or one that the user has registered
        if usual is not None and (name := f"{usual.__module__}.{usual.__qualname__}") in CHECKED:
            system = CHECKED[name]()
            return system(**{**system._get_kwargs_from_urls(url), **options})
        return fsspec.url_to_fs(url, **options)[0]
    except (ImportError, ValueError, TypeError) as error:
        remedy = f"pip install 'gpuload[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "install what it names"
        raise type(error)(
            f"{shown(url)!r} cannot be opened: {visible(str(error))}"
            + (f"; {remedy}" if isinstance(error, ImportError) else "; look at the URL and storage_options")
        ) from error


def _seconds(moment: Any) -> float:
    """Return a time as a number, 0.0 if it is none: file systems give datetimes, numbers, and headers."""
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(moment) if isinstance(moment, str) else moment
        return float(moment.timestamp() if hasattr(moment, "timestamp") else moment)
    except (TypeError, ValueError):
        return 0.0


# -- files and folders ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class RemoteFile:
    """A file at a URL; see `OpenFile`, whose place it takes.

    Attributes:
        client, path: what reads it, and its URL.
        size: bytes.
        mtime_ns: no time, but a number of its own for each ETag, or time, that the server names; 0 if it names none.
        time: when it was last written, in seconds, if the server says so; else 0.
    """

    client: Client
    path: str
    size: int
    mtime_ns: int
    time: float

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return these bytes; fewer only where the file ends."""
        return self.client.read([(self, offset, nbytes)])[0]

    def read_into(self, array: np.ndarray, offset: int) -> int:
        """Fill an array of uint8 with the bytes from an offset on. Returns how many there were."""
        data = self.read_at(offset, len(array))
        array[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def read_randomly(self) -> None:
        """Do nothing: what was not asked for is never read."""


class Windows:
    """Reads that lie near each other, by few requests.

    What is asked for next often lies just behind: then each window is twice as long as the last, up to 32 MiB, else
    64 KiB. So the headers of an archive of small members cost about what reading it through does, and those of large
    members one request each. Of windows that are longer than 64 KiB, one is kept.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._windows: list[tuple[int, bytes]] = []
        self._end, self._length = 0, LEAST_WINDOW // 2

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return these bytes; fewer only where the file ends."""
        nbytes = min(nbytes, max(0, self._file.size - offset))
        for begin, data in reversed(self._windows):
            if begin <= offset and offset + nbytes <= begin + len(data):
                return data[offset - begin : offset - begin + nbytes]
        follows = self._end - nbytes <= offset <= self._end + self._length
        self._length = min(2 * self._length, MOST_WINDOW) if follows else LEAST_WINDOW
        data = self._file.read_at(offset, max(nbytes, self._length))
        is_long = len(data) > LEAST_WINDOW
        short = [window for window in self._windows if not (is_long and len(window[1]) > LEAST_WINDOW)]
        self._windows = [*short[1 - WINDOWS :], (offset, data)]
        self._end = offset + len(data)
        return data[:nbytes]


class RemoteIO(io.RawIOBase):
    """A file object that can be sought in.

    Attributes:
        size: bytes.
    """

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self.file, self.size, self.name = file, file.size, file.path
        self._windows = Windows(file)
        self._loaded: list[tuple[int, bytes]] = []
        self._at = 0

    def load(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these ranges (begin, end) together, in place of those that were loaded before."""
        places = [(self.file, begin, end - begin) for begin, end in ranges]
        data = self.file.client.read(places)
        self._loaded = [(begin, own) for (_, begin, _), own in zip(places, data, strict=True)]

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
        view, at = memoryview(buffer).cast("B"), self._at
        end = min(at + len(view), max(at, self.size))
        for begin, own in self._loaded:
            if begin <= at and end <= begin + len(own):
                data = own[at - begin : end - begin]
                break
        else:
            data = self._windows.read_at(at, end - at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class RemoteScanner:
    """Lists the image files below a URL once, in the order that `Scanner` has them in on a disk.

    Args:
        client, root: where.
        extensions: the endings of image files' names, lower case, with the dot.

    Attributes:
        left_out: what other programs keep there.
    """

    def __init__(self, client: Client, root: str, *, extensions: Iterable[str]) -> None:
        self.root, endings = root, tuple(extensions)
        self._folders: set[bytes] = set()
        self.left_out = LeftOut()
        images: list[tuple[bytes, bytes, bytes]] = []  # folder, name, and the rest of the URL
        for url, path in client.files(root):
            name, is_image = os.fsencode(path), path.lower().endswith(endings)
            folder, _, own = name.rpartition(b"/")
            if is_litter(name):
                if is_image:
                    self.left_out.add(name)
                continue
            if folder:
                self._folders.add(folder.partition(b"/")[0])
            if is_image:
                images.append((folder, own, os.fsencode(url)))
        self._images = sorted(images)

    def folders(self) -> list[bytes]:
        """Return the names of the folders directly in the root, sorted."""
        return sorted(self._folders)

    def images(self, start: bytes = b"") -> Paths:
        """Return the images at any depth below `start`."""
        below = start + b"/"
        urls = [url for folder, _, url in self._images if not start or (folder + b"/").startswith(below)]
        return Paths.of(self.root, urls)
