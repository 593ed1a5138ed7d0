"""The indexes of many shards. They are loaded if up to date, otherwise built in parallel and saved next to the shards.

This module runs in the main process. Headers are parsed in Python, so threads would wait for the GIL. Instead, the
indexes are built by new interpreters, which get a list of paths and report finished shards as lines of JSON.

Indexes of archives at URLs are built by threads, which wait for the network, and saved only in the cache folder.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpuload.datasets.drafts import replace_when_done
from gpuload.datasets.scan import full_path
from gpuload.datasets.stores.opening import display_path, is_url, open_file, scope_of, without_query
from gpuload.datasets.stores.store import Patterns, as_list, match_pattern, stamp
from gpuload.datasets.stores.tar import index as index_file
from gpuload.datasets.stores.tar.headers import Damage
from gpuload.datasets.stores.tar.index import Shard, UnusableIndex
from gpuload.errors import list_some

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from gpuload.datasets.stores.remote import Remote

__all__ = [
    "SUFFIX",
    "build_in_this_process",
    "expand",
    "find_shards",
    "open_shards",
]

RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
MAX_SHARDS: Final = 10_000_000

SUFFIX: Final = ".gpuload-index"
THREADS: Final = 8  # per process; threads wait for the disk or the network
MAX_PROCESSES: Final = 16
MIN_PROCESS_BYTES: Final = 256 << 20  # archive bytes that justify starting a process
MAX_LISTED: Final = 3

PROGRAM: Final = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from gpuload.datasets.stores.tar.shards import build_in_this_process
build_in_this_process(job["shards"])
"""


def open_shards(
    paths: Sequence[str],
    *,
    workers: int | None = None,
    rebuild: bool = False,
    progress: Callable[[str, bool], None] = lambda path, is_new: None,
    remote: Remote | None = None,
) -> list[Shard]:
    """Return the shards with their indexes.

    Args:
        paths: the paths of the archives, which may repeat.
        workers: the number of processes that build indexes; None means one per CPU that this process may use, up to 16.
        rebuild: build all indexes, even those that are up to date.
        progress: called with the path of each shard that is ready, and whether its index was built.
        remote: the options for reading URLs.

    Raises:
        OSError: a shard cannot be read.
        ValueError: shards are damaged; the message states their number and names the first few.
    """
    unique_paths = list(dict.fromkeys(paths))
    shards: dict[str, Shard] = {}
    with _thread_pool() as pool:
        for path, (shard, messages) in zip(
            unique_paths, pool.map(partial(_load_index, remote=remote), unique_paths), strict=True
        ):
            _warn(messages)
            if shard is not None and not rebuild:
                shards[path] = shard
                progress(path, False)
    missing_paths = [path for path in unique_paths if path not in shards]
    errors: dict[str, Exception] = {}
    for path, result, messages in _build_missing(missing_paths, workers, remote):
        _warn(messages)
        if isinstance(result, Exception):
            errors[path] = result
        else:
            shards[path] = result
            progress(path, True)
    if errors:
        raise _combine_errors([errors[path] for path in missing_paths if path in errors], len(unique_paths))
    return [shards[path] for path in paths]


def _build_missing(
    paths: list[str], workers: int | None, remote: Remote | None
) -> Iterator[tuple[str, Shard | Exception, list[str]]]:
    """Build the indexes of these shards. Yield each path, its shard or the error, and its warnings."""
    if remote is not None:
        with _thread_pool() as pool:
            yield from pool.map(partial(_build_index, remote=remote), paths)
        return
    process_count = min(MAX_PROCESSES, len(os.sched_getaffinity(0))) if workers is None else workers
    nbytes = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
    process_count = min(process_count, len(paths), nbytes // MIN_PROCESS_BYTES)
    remaining_paths = dict.fromkeys(paths)
    if process_count > 1 and sys.executable:
        for path, messages in _build_in_processes(paths, process_count):
            if (shard := _load_index(path)[0]) is not None:
                del remaining_paths[path]
                yield path, shard, messages
    yield from map(_build_index, remaining_paths)  # also the shards for which a process failed, to get the errors


def _build_in_processes(paths: list[str], count: int) -> Iterator[tuple[str, list[str]]]:
    """Build indexes in other processes (see `build_in_this_process`), to which the paths are dealt out in turn. Yield
    each path with its warnings."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for start in range(count):
            command = [sys.executable, "-P", "-c", PROGRAM]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            processes.append(process)
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps({"path": sys.path, "shards": paths[start::count]}).encode())
        outputs: list[Any] = [process.stdout for process in processes]
        lines = itertools.chain.from_iterable(itertools.zip_longest(*outputs))
        for path, line in zip(paths, lines, strict=False):
            if line is not None and line.endswith(b"\n"):  # otherwise the process has failed
                yield path, json.loads(line)
    finally:
        for process in processes:
            with process:
                process.kill()


def _thread_pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and not needed for writing shards

    return ThreadPoolExecutor(THREADS)


def build_in_this_process(paths: Sequence[str]) -> None:
    """Build the indexes of shards in this process. Write each shard's warnings to standard output, as a line of
    JSON."""
    with _thread_pool() as pool:
        for _, _, messages in pool.map(_build_index, paths):
            print(json.dumps(messages), flush=True)


def _build_index(path: str, remote: Remote | None = None) -> tuple[str, Shard | Exception, list[str]]:
    messages: list[str] = []
    try:
        shard = index_file.build(path, messages.append, remote)
    except (Damage, OSError) as error:
        return path, error, messages
    return path, shard, messages + _save_index(shard, remote)


def _load_index(path: str, remote: Remote | None = None) -> tuple[Shard | None, list[str]]:
    """Return the shard with its saved index (None without a valid index), and warnings about unusable index files."""
    messages = []
    try:
        current = stamp(path, remote)
    except OSError:
        return None, []  # building the index will raise the error
    for file in _index_paths(path, remote):
        try:
            shard = _load_remote(path, file, current, remote) if is_url(file) else index_file.read(path, file, current)
            if shard is not None:
                return shard, []
        except (UnusableIndex, OSError) as error:
            messages.append(f"the index file {file!r} cannot be used and is rebuilt: {error}")
    return None, messages


def _load_remote(path: str, index_url: str, current_stamp: tuple[int, int], remote: Remote | None) -> Shard | None:
    """Return the shard with the index that is stored next to the archive. Such an index was built elsewhere, so it has
    another modification time. It is valid if the size of the archive matches, and it is not older than the archive."""
    try:
        index, archive = open_file(index_url, remote), open_file(path, remote)
    except (FileNotFoundError, PermissionError):
        return None  # some servers answer "forbidden" for missing files
    header = index.read_at(0, index_file.HEAD.size)
    if index.modified_s < archive.modified_s or len(header) < index_file.HEAD.size:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    size, mtime_ns = index_file.HEAD.unpack_from(header)[1:3]
    shard = index_file.read(path, index_url, (size, mtime_ns), remote) if size == current_stamp[0] else None
    if shard is not None:
        shard = index_file.with_mtime(shard, current_stamp[1])
        _save_index(shard, remote)
    return shard


def _save_index(shard: Shard, remote: Remote | None = None) -> list[str]:
    """Save an index at the first writable path. If no path is writable, return a list of one warning, else an empty
    list."""
    problem = None
    for file_path in _index_paths(shard.path, remote):
        if is_url(file_path):
            continue
        try:
            os.makedirs(os.path.dirname(file_path), exist_ok=True)
            with replace_when_done(file_path) as draft, open(draft, "xb") as file:
                file.write(shard.table.data)
            return []
        except OSError as error:
            problem = error
    return [
        f"the index of {shard.path!r} can be saved neither next to it nor in {_cache_folder()!r} ({problem}), so it is "
        "rebuilt each time; set GPULOAD_CACHE to a writable folder"
    ]


def _index_paths(path: str, remote: Remote | None) -> Iterator[str]:
    """Yield the possible paths of an archive's index: next to it, then in the cache; for a URL, in reverse order."""
    if not is_url(path):
        yield path + SUFFIX
    import hashlib  # slow to import, and rarely needed

    location = "\0".join([path, *scope_of(remote)]) if is_url(path) else os.path.realpath(path)
    yield os.path.join(_cache_folder(), hashlib.blake2b(os.fsencode(location), digest_size=16).hexdigest() + SUFFIX)
    if is_url(path):
        yield path + SUFFIX


def _cache_folder() -> str:
    from gpuload.datasets.stores.cached import cache_folder  # slow to import

    return os.path.join(cache_folder(), "tar")


def _warn(messages: list[str]) -> None:
    for message in messages:
        warnings.warn(message, stacklevel=5)  # the line of the user's program that creates a `TarShards`


def _combine_errors(errors: list[Exception], count: int) -> Exception:
    if len(errors) == 1:
        return errors[0]
    error_type = OSError if all(isinstance(error, OSError) for error in errors) else ValueError
    listed = list_some(errors, MAX_LISTED, "\n  ", "\n  and ")
    return error_type(f"{len(errors)} of {count} shards cannot be indexed:\n  {listed}")


def find_shards(patterns: Patterns, remote: Remote | None = None) -> list[str]:
    """Return the absolute paths of shards, in the order of the patterns; the matches of a wildcard are sorted.
    URLs are not checked until they are opened.

    Raises:
        FileNotFoundError: a wildcard matches nothing, or a file is missing.
        TypeError, ValueError: a pattern is not a path, or has a range that is too long.
    """
    pattern_list = as_list(patterns)
    paths, missing_paths = [], []
    for pattern in pattern_list:
        if not isinstance(pattern, str | os.PathLike):
            raise TypeError(f"shards must be paths, got {pattern!r} ({type(pattern).__name__})")
        for name in expand(os.fsdecode(pattern)):
            if is_url(name):
                paths += _expand_url(name, remote)
                continue
            path = full_path(name)
            if os.path.lexists(path):
                paths.append(path)
            elif glob.has_magic(path):
                matches = match_pattern(path)
                if not matches:
                    raise FileNotFoundError(f"no shards match {name!r} (searched for {path!r})")
                paths += matches
            else:
                missing_paths.append(path)
    if missing_paths:
        shown = ", ".join(map(repr, missing_paths[:MAX_LISTED])) + (", …" if len(missing_paths) > MAX_LISTED else "")
        count = len(missing_paths) + len(paths)
        raise FileNotFoundError(
            f"{len(missing_paths)} of {count} shards {'is' if count == 1 else 'are'} missing: {shown}"
        )
    if not paths:
        raise FileNotFoundError(f"the list of shards is empty, got {pattern_list!r}; pass at least one path")
    return paths


def _expand_url(name: str, remote: Remote | None) -> list[str]:
    if "*" not in without_query(name):  # ? and [ are not wildcards in a URL
        return [name]
    if not (matches := match_pattern(name, remote)):
        raise FileNotFoundError(f"no shards match {display_path(name)!r}")
    return matches


def expand(pattern: str) -> Iterator[str]:
    """Expand ``a{1..3}`` and ``a{1,2,3}`` as a shell does; ``{000..099}`` keeps its leading zeros.

    Example:
        >>> list(expand("s-{08..10}.{tar,zip}"))
        ['s-08.tar', 's-08.zip', 's-09.tar', 's-09.zip', 's-10.tar', 's-10.zip']
    """
    for start in [match.start() for match in re.finditer("{", pattern)]:
        depth, cuts = 0, [start]
        for end in range(start, len(pattern)):
            depth += {"{": 1, "}": -1}.get(pattern[end], 0)
            if depth == 0 or (depth == 1 and pattern[end] == ","):
                cuts.append(end)
            if depth == 0:
                break
        if depth:  # unbalanced braces
            continue
        if (span := RANGE.fullmatch(pattern, start + 1, cuts[-1])) is not None:
            choices: Iterable[str] = _expand_range(pattern, *span.groups())
        elif len(cuts) > 2:
            choices = (name for low, high in itertools.pairwise(cuts) for name in expand(pattern[low + 1 : high]))
        else:
            continue
        suffixes = list(expand(pattern[cuts[-1] + 1 :]))
        return (pattern[:start] + choice + suffix for choice in choices for suffix in suffixes)
    return iter((pattern,))


def _expand_range(pattern: str, first: str, last: str, step: str | None) -> Iterator[str]:
    start, stop, stride = int(first), int(last), abs(int(step or 1)) or 1
    if abs(stop - start) // stride >= MAX_SHARDS:
        raise ValueError(f"{pattern!r} expands to more than {MAX_SHARDS:,} shards; check its range")
    is_padded = any(len(number.lstrip("-")) > 1 and number.lstrip("-")[0] == "0" for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    direction = 1 if stop >= start else -1
    return (f"{number:0{width}d}" for number in range(start, stop + direction, stride * direction))
