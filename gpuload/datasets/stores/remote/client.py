"""Reading URLs through fsspec: ranges joined, several requests in flight, retries, a cache on disk.

One `Client` for a `Remote` in a process: file systems hold threads and connections, so they are opened by the process
that reads, and never pickled. Asynchronous file systems run on fsspec's own thread, the others on a few of ours.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from gpuload.datasets.files import LARGE_BYTES, check_size, no_image, sniff
from gpuload.datasets.stores.cached import cache_folder
from gpuload.datasets.stores.remote.disk import Disk
from gpuload.datasets.stores.remote.failures import Failure, Short, failure_of, shown
from gpuload.datasets.stores.remote.options import Remote, digest_of
from gpuload.errors import DecodeError, import_optional, visible

__all__ = ["Client", "Part", "client_of"]

BLOCK_BYTES: Final = 128 << 10  # of the cache
PIECE_BYTES: Final = 8 << 20  # a longer range is asked for in several requests
BYTES_PER_S: Final = 1 << 20  # an answer may take a second more for so many
FIRST_WAIT_S: Final = 0.25
LONGEST_WAIT_S: Final = 10.0
# What says that a file is the same, the surest first, as file systems call it.
VERSIONS: Final = (
    "ETag", "etag", "md5Hash", "generation", "blob_id", "sha256", "LastModified", "Last-Modified", "last_modified",
    "mtime", "modified", "updated", "created",
)  # fmt: skip


class Part(NamedTuple):
    """Bytes of a file. `size` and `version` are the file's, as it was looked at."""

    url: str
    begin: int
    end: int
    size: int
    version: int


class Found(NamedTuple):
    """A file as it was looked at.

    Attributes:
        size: its bytes.
        version: a number of its own for each ETag, or time, that the server names; 0 if it names none.
        time: when it was last written, as text that sorts, if the server says so.
    """

    size: int
    version: int
    time: str


_clients: WeakKeyDictionary[Remote, tuple[int, Client]] = WeakKeyDictionary()
_lock = threading.Lock()


def client_of(remote: Remote) -> Client:
    """The client of these options, in this process."""
    with _lock:
        found = _clients.get(remote)
        if found is None or found[0] != os.getpid():
            found = _clients[remote] = os.getpid(), Client(remote)
        return found[1]


os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # pyright: ignore[reportAttributeAccessIssue]


class Client:
    """Reads URLs with the options of a `Remote`.

    Raises:
        OSError: the folder of the cache cannot be written.
    """

    def __init__(self, remote: Remote) -> None:
        # Not the `Remote` itself: it is kept only as long as somebody reads with it.
        self.gap_bytes, self.in_flight, self.retries = remote.gap_bytes, remote.in_flight, remote.retries
        self.timeout_s, self._options = remote.timeout_s, dict(remote.options)
        self._systems: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._threads: ThreadPoolExecutor | None = None
        self.requests = 0  # made so far
        self._disk: Disk | None = None
        if remote.cache_bytes:
            folder = os.fspath(remote.cache_folder or os.path.join(cache_folder(), "remote"))
            self._disk = Disk(folder, remote.cache_bytes, digest_of(remote))

    def read(self, parts: Sequence[Part]) -> list[bytes]:
        """The bytes of these parts.

        Raises:
            OSError: one of them cannot be read; the first of them is told.
        """
        if self._disk is None:
            return self._ranges(parts)
        disk, wanted = self._disk, {}
        for part in parts:
            for number in _blocks(part):
                key = f"{part.url}\0{part.version}\0{part.size}\0{number}"
                if key not in wanted:
                    begin = number * BLOCK_BYTES
                    wanted[key] = part._replace(begin=begin, end=min(begin + BLOCK_BYTES, part.size))
        blocks = {key: disk.get(key) for key in wanted}
        missing = [key for key, data in blocks.items() if data is None]
        for key, data in zip(missing, self._ranges([wanted[key] for key in missing]), strict=True):
            blocks[key] = data
            disk.put(key, data)
        found = []
        for part in parts:
            keys = (f"{part.url}\0{part.version}\0{part.size}\0{number}" for number in _blocks(part))
            begin = part.begin % BLOCK_BYTES
            found.append(b"".join(blocks[key] or b"" for key in keys)[begin : begin + part.end - part.begin])
        return found

    def whole(self, urls: Sequence[str]) -> list[bytes]:
        """Whole files, of sizes not known before. What is on the disk is found by the URL and the options
        alone.

        Raises:
            OSError: one cannot be read.
            DecodeError: one is larger than is allowed, or larger than 16 MiB and does not begin as an image.
        """
        kept: list[bytes | None] = [None if self._disk is None else self._disk.get(url) for url in urls]
        missing = [number for number, data in enumerate(kept) if data is None]
        starts = self._fetch([(urls[number], 0, LARGE_BYTES) for number in missing], self._start)
        for number, data in zip(missing, starts, strict=True):
            url = urls[number]
            if len(data) >= LARGE_BYTES:
                size, version, _ = self.look([url])[0]
                check_size(size, shown(url))
                if sniff(data) is None:
                    raise DecodeError(f"{shown(url)!r}: {no_image(data, size)}")
                data = data[:LARGE_BYTES] + self._ranges([Part(url, LARGE_BYTES, size, size, version)])[0]
            check_size(len(data), shown(url))
            kept[number] = data
            if self._disk is not None:
                self._disk.put(url, data)
        return [data or b"" for data in kept]

    def look(self, urls: Sequence[str]) -> list[Found]:
        """Sizes and versions of files.

        Raises:
            OSError: one is missing, is a folder, or its size is not said.
        """
        for system in {id(system): system for system, _ in map(self._place, urls)}.values():
            system.invalidate_cache()  # what it remembers of folders may be old
        found = []
        for url, info in zip(urls, self._all(urls, "info", {}), strict=True):
            if info.get("type") == "directory":
                raise IsADirectoryError(21, "it is a folder; expected a file", shown(url))
            if info.get("size") is None:
                raise OSError(
                    5, "the server does not say how many bytes it has, so no part of it can be asked for", shown(url)
                )
            known = [str(info[name]) for name in VERSIONS if info.get(name)]
            version = zlib.crc32(known[0].encode()) << 31 | zlib.adler32(known[0].encode()) >> 1 if known else 0
            written = next((info[name] for name in VERSIONS[6:] if info.get(name)), "")
            found.append(Found(int(info["size"]), version, _sortable(written)))
        return found

    def exists(self, url: str) -> bool:
        """Whether there is a file."""
        try:
            self.look([url])
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def files(self, root: str) -> list[tuple[str, str]]:
        """All files at any depth below a folder: the rest of their URLs, and the same as a name (without ``%20``)."""
        system, path = self._place(root)
        system.invalidate_cache()
        (listed,) = self._all([root], "find", {"detail": True})
        before = path.rstrip("/") + "/"
        names = [name[len(before) :] for name, info in listed.items() if info.get("type") != "directory"]
        quoted = root.startswith(("http://", "https://"))
        return [(name, unquote(name) if quoted else name) for name in names if name and not name.endswith("/")]

    def glob(self, pattern: str) -> list[str]:
        """The URLs of the files that a pattern stands for, sorted."""
        system, _ = self._place(pattern)
        system.invalidate_cache()
        (listed,) = self._all([pattern], "glob", {"detail": True})
        return sorted(system.unstrip_protocol(name) for name, info in listed.items() if info.get("type") != "directory")

    def _ranges(self, parts: Sequence[Part]) -> list[bytes]:
        """Parts, those that lie near each other by one request, long ones by several."""
        order = sorted(range(len(parts)), key=lambda number: parts[number])
        runs: list[tuple[int, int, list[int]]] = []  # begin, end, numbers of the parts
        for number in order:
            part = parts[number]
            if runs and part.url == parts[runs[-1][2][0]].url and part.begin <= runs[-1][1] + self.gap_bytes:
                begin, end, numbers = runs[-1]
                runs[-1] = begin, max(end, part.end), [*numbers, number]
            else:
                runs.append((part.begin, part.end, [number]))
        pieces = [
            (parts[numbers[0]].url, at, min(at + PIECE_BYTES, end))
            for begin, end, numbers in runs
            for at in range(begin, end, PIECE_BYTES)
        ]
        answers = iter(self._fetch(pieces, _whole_range))
        found: list[bytes] = [b""] * len(parts)
        for begin, end, numbers in runs:
            own = [next(answers) for _ in range(begin, end, PIECE_BYTES)]
            data = own[0] if len(own) == 1 else b"".join(own)
            for number in numbers:
                part = parts[number]
                found[number] = data[part.begin - begin : part.end - begin]
        return found

    def _fetch(
        self, pieces: Iterable[tuple[str, int, int]], check: Callable[[bytes, str, int, int], bytes]
    ) -> list[bytes]:
        """One request for each, which are under way together."""

        def call(piece: tuple[str, int, int]) -> tuple[str, str, dict[str, int], float, Callable[[bytes], bytes]]:
            url, begin, end = piece
            limit = self.timeout_s + (end - begin) / BYTES_PER_S
            return url, "cat_file", {"start": begin, "end": end}, limit, lambda data: check(data, url, begin, end)

        return self._calls([call(piece) for piece in pieces])

    def _all(self, urls: Sequence[str], method: str, options: dict[str, Any]) -> list[Any]:
        """A method of the file system, called for each."""
        return self._calls([(url, method, options, self.timeout_s, lambda found: found) for url in urls])

    def _calls(self, calls: Sequence[tuple[str, str, dict[str, Any], float, Callable[[Any], Any]]]) -> list[Any]:
        """Calls of file systems' methods: all of them under way together, each made again while that may help."""
        if not calls:
            return []
        places = [self._place(call[0]) for call in calls]
        self.requests += len(calls)
        if all(system.async_impl for system, _ in places):
            from fsspec.asyn import sync

            results: Any = sync(places[0][0].loop, self._gather, places, calls)
        elif len(calls) == 1:
            results = [self._in_thread(places[0], calls[0])]
        else:
            with self._lock:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(self.in_flight, "gpuload-remote")
            results = list(self._threads.map(self._in_thread, places, calls))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _gather(self, places: Sequence[tuple[Any, str]], calls: Sequence[Any]) -> list[Any]:
        gate = asyncio.Semaphore(self.in_flight)

        async def one(place: tuple[Any, str], call: Any) -> Any:
            (system, path), (url, method, options, limit, check) = place, call
            attempt = 0
            while True:
                try:
                    async with gate:
                        found = await asyncio.wait_for(getattr(system, f"_{method}")(path, **options), limit)
                    return check(found)
                except Exception as error:
                    attempt += 1
                    wait = self._wait(failure_of(error, url, limit), url, attempt, error)
                await asyncio.sleep(wait)

        return await asyncio.gather(*map(one, places, calls), return_exceptions=True)

    def _in_thread(self, place: tuple[Any, str], call: Any) -> Any:
        (system, path), (url, method, options, limit, check) = place, call
        attempt = 0
        while True:
            try:
                return check(getattr(system, method)(path, **options))
            except Exception as error:
                attempt += 1
                try:
                    wait = self._wait(failure_of(error, url, limit), url, attempt, error)
                except Exception as final:
                    return final
            time.sleep(wait)

    def _wait(self, failure: Failure, url: str, attempt: int, error: Exception) -> float:
        """How long to wait before the next attempt, in seconds; raises if there is none."""
        if isinstance(error, DecodeError):
            raise error
        if not failure.again or attempt > self.retries:
            raise failure.error(url, attempt) from error
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) if failure.after_s is None else failure.after_s
        # Not all at once again: half of it is drawn, from no generator that anybody seeds.
        return min(LONGEST_WAIT_S, wait) * (0.5 + os.urandom(1)[0] / 512)

    def _start(self, data: bytes, url: str, begin: int, end: int) -> bytes:
        """The start of a file: whole if it is shorter than what was asked for, also from a server without ranges."""
        if len(data) > end - begin:
            check_size(len(data), shown(url))
        return data

    def _place(self, url: str) -> tuple[Any, str]:
        """The file system of a URL, opened if it is not, and what it calls the file."""
        after = url.index("://") + 3
        host = url[:end] if (end := url.find("/", after)) > 0 else url
        with self._lock:
            if host not in self._systems:
                self._systems[host] = _opened(url, self._options)
        system = self._systems[host]
        return system, system._strip_protocol(url)


def _opened(url: str, options: dict[str, Any]) -> Any:
    fsspec = import_optional("fsspec.core", f"datasets at {url.partition('://')[0]}://…", "remote")
    try:
        return fsspec.url_to_fs(url, **options)[0]
    except (ImportError, ValueError, TypeError) as error:
        scheme = url.partition("://")[0]
        extra = {"http": "remote", "https": "remote"}.get(scheme, scheme)
        remedy = f"pip install 'gpuload[{extra}]'" if extra in ("remote", "s3", "gs", "hf") else "install what it names"
        raise type(error)(
            f"{shown(url)!r} cannot be opened: {visible(str(error))}"
            + (f"; {remedy}" if isinstance(error, ImportError) else "; look at the URL and storage_options")
        ) from error


def _whole_range(data: bytes, url: str, begin: int, end: int) -> bytes:
    if len(data) < end - begin:
        raise Short(f"{len(data):,} bytes from {begin:,} on, where {end - begin:,} were asked for")
    if len(data) > end - begin:
        raise OSError(
            f"it answered {len(data):,} bytes where {end - begin:,} were asked for: it does not serve ranges, which "
            "all but whole images take; copy the file, or serve it otherwise"
        )
    return data


def _blocks(part: Part) -> range:
    return range(part.begin // BLOCK_BYTES, -(-part.end // BLOCK_BYTES) if part.end > part.begin else 0)


def _sortable(moment: Any) -> str:
    """A time as text that sorts, or empty: file systems give datetimes, numbers, and headers."""
    if hasattr(moment, "timestamp"):
        return f"{moment.timestamp():020.6f}"
    if isinstance(moment, int | float):
        return f"{moment:020.6f}"
    try:
        from email.utils import parsedate_to_datetime

        return f"{parsedate_to_datetime(moment).timestamp():020.6f}"
    except (TypeError, ValueError):
        return ""
