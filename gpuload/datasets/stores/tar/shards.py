"""The indexes of many shards: read where they are fresh, else made by several processes, and kept beside the shards.

Indexes of archives at URLs are made by threads, which wait for the network, and kept in the cache folder alone.

Runs in the main process. Parsing headers is Python's work, so threads would take turns; processes are fresh
interpreters that are given paths and say in lines of JSON which of them are done. An index file is written under
another name and then renamed, so nobody ever reads half of one, also if several processes make the same.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from gpuload.datasets.litter import without_litter
from gpuload.datasets.scan import full_path
from gpuload.datasets.stores.opening import client, is_url, open_file, scope_of
from gpuload.datasets.stores.store import stamp
from gpuload.datasets.stores.tar import index as index_file
from gpuload.datasets.stores.tar.headers import Damage
from gpuload.datasets.stores.tar.index import Shard, Unusable

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from gpuload.datasets.stores.remote import Remote

__all__ = ["SUFFIX", "Patterns", "as_list", "expand", "find_shards", "keep", "make_here", "open_shards"]

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
MOST: Final = 10_000_000

SUFFIX: Final = ".gpuload-index"
THREADS: Final = 8  # of each process: what they wait for is the medium
MOST_PROCESSES: Final = 16
FEW_BYTES: Final = 256 << 20  # of archives, for each process: fewer are indexed here while one would start
SHOWN: Final = 3
PIECE: Final = 1000  # characters; a line of twice as many, in quotes, is less than the 4096 bytes that stay whole

PROGRAM: Final = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from gpuload.datasets.stores.tar.shards import make_here
make_here(given["shards"])
"""


def open_shards(
    paths: Sequence[str],
    *,
    workers: int | None = None,
    again: bool = False,
    progress: Callable[[str, bool], None] = lambda path, is_new: None,
    remote: Remote | None = None,
) -> list[Shard]:
    """Return the shards with their indexes.

    Args:
        paths: of the archives; one may come several times.
        workers: processes that make indexes; None means the CPUs that this process may use, up to 16.
        again: make all indexes, also those that are fresh.
        progress: called with each shard that is ready, and whether its index was made.
        remote: how URLs are read.

    Raises:
        OSError: a shard cannot be read.
        ValueError: shards are damaged; the message names the first of them, and says how many there are.
    """
    unique = list(dict.fromkeys(paths))
    shards: dict[str, Shard] = {}
    with _threads() as pool:
        for path, (shard, remarks) in zip(unique, pool.map(partial(_from_cache, remote=remote), unique), strict=True):
            _warn(remarks, 5)  # where the user makes a `TarShards`
            if shard is not None and not again:
                shards[path] = shard
                progress(path, False)
    missing = [path for path in unique if path not in shards]
    errors: dict[str, Exception] = {}
    for path, result, remarks in _index_missing(missing, workers, remote):
        _warn(remarks, 5)
        if isinstance(result, Exception):
            errors[path] = result
        else:
            shards[path] = result
            progress(path, True)
    if errors:
        raise _joined([errors[path] for path in missing if path in errors], len(unique))
    return [shards[path] for path in paths]


def _index_missing(
    paths: list[str], workers: int | None, remote: Remote | None
) -> Iterator[tuple[str, Shard | Exception, list[str]]]:
    """Make the indexes of these shards. Yields each with its remarks, or with what went wrong."""
    if remote is not None:
        with _threads() as pool:
            yield from pool.map(partial(_make, remote=remote), paths)
        return
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0))) if workers is None else workers
    nbytes = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
    count = min(count, len(paths), nbytes // FEW_BYTES)
    remaining = dict.fromkeys(paths)
    if count > 1 and sys.executable:
        for path, remarks in _made_by_processes(paths, count):
            if (shard := _from_cache(path)[0]) is not None:
                del remaining[path]
                yield path, shard, remarks
    yield from map(_make, remaining)  # with its error, if it has one


def _made_by_processes(paths: list[str], count: int) -> Iterator[tuple[str, list[str]]]:
    """Make indexes in other processes, all of which write to one pipe, see `make_here`. Yields each path with its
    remarks. The pipe ends with the last process."""
    processes: list[subprocess.Popen[bytes]] = []
    numbered = list(enumerate(paths))
    reading, writing = os.pipe()
    try:
        with open(reading, "rb") as lines:
            with open(writing, "wb") as pipe:
                for number in range(count):
                    command = [sys.executable, "-P", "-c", PROGRAM]
                    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=pipe)
                    processes.append(process)
                    assert process.stdin is not None
                    with process.stdin:
                        process.stdin.write(json.dumps({"path": sys.path, "shards": numbered[number::count]}).encode())
            pieces = defaultdict(str)
            for number, piece, is_last in map(json.loads, lines):
                pieces[number] += piece
                if is_last:
                    yield paths[number], json.loads(pieces.pop(number))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _threads() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and those who write shards need none

    return ThreadPoolExecutor(THREADS)


def make_here(shards: Sequence[tuple[int, str]]) -> None:
    """Make the indexes of shards, given as (number, path), in this process, and write the number of each with its
    remarks: JSON, in pieces, a line for each. Others write to the same pipe, which keeps only short lines whole."""
    with _threads() as pool:
        results = pool.map(_make, [path for _, path in shards])
        for (number, _), (_, _, remarks) in zip(shards, results, strict=True):
            text = json.dumps(remarks)
            for begin in range(0, len(text), PIECE):
                line = json.dumps([number, text[begin : begin + PIECE], begin + PIECE >= len(text)])
                os.write(1, line.encode() + b"\n")


def _make(path: str, remote: Remote | None = None) -> tuple[str, Shard | Exception, list[str]]:
    remarks: list[str] = []
    try:
        shard = index_file.build(path, remarks.append, remote)
    except (Damage, OSError) as error:
        return path, error, remarks
    return path, shard, remarks + _keep(shard, remote)


def _from_cache(path: str, remote: Remote | None = None) -> tuple[Shard | None, list[str]]:
    """Return the shard with an index from a file, or None; and what is wrong with index files that are there."""
    remarks = []
    try:
        known = stamp(path, remote)
    except OSError:
        return None, []  # told when it is read
    for place in _places(path, remote):
        try:
            shard = _at_url(path, place, known, remote) if is_url(place) else index_file.read(path, place, known)
            if shard is not None:
                return shard, []
        except (Unusable, OSError) as error:
            remarks.append(f"the index file {place!r} cannot be used, and is made again: {error}")
    return None, remarks


def _at_url(path: str, place: str, known: tuple[int, int], remote: Remote | None) -> Shard | None:
    """The shard with the index that lies beside it: made somewhere else, so it has another time of the archive's. It is
    taken if the archive's size is right, and it was not written before the archive."""
    try:
        index, archive = open_file(place, remote), open_file(path, remote)
    except (FileNotFoundError, PermissionError):
        return None  # some servers refuse what they do not have
    head = index.read_at(0, index_file.HEAD.size)
    if index.time < archive.time or len(head) < index_file.HEAD.size:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    size, mtime_ns = index_file.HEAD.unpack_from(head)[1:3]
    shard = index_file.read(path, place, (size, mtime_ns), remote) if size == known[0] else None
    if shard is not None:
        shard = index_file.with_mtime(shard, known[1])
        _keep(shard, remote)
    return shard


def keep(shard: Shard) -> None:
    """Write the index of a shard beside it, or to the cache; a warning where neither can be done."""
    _warn(_keep(shard), 3)  # where it is called


def _keep(shard: Shard, remote: Remote | None = None) -> list[str]:
    """Write an index to the first place where that is possible; returns a remark if there is none."""
    problem = None
    for place in _places(shard.path, remote):
        if is_url(place):
            continue
        draft = f"{place}.{os.urandom(8).hex()}"  # other machines may write there too
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(draft, "xb") as file:
                file.write(shard.table.data)
            os.replace(draft, place)
            return []
        except OSError as error:
            problem = error
            with contextlib.suppress(OSError):
                os.unlink(draft)
    return [
        f"the index of {shard.path!r} can be kept neither beside it nor in {_cache()!r} ({problem}), so it is made "
        "again each time; set GPULOAD_CACHE to a folder that can be written"
    ]


def _places(path: str, remote: Remote | None) -> Iterator[str]:
    """Yield where the index of an archive may be: beside it and in the cache, of a URL first in the cache."""
    if not is_url(path):
        yield path + SUFFIX
    import hashlib  # slow to import, and seldom needed

    real = "\0".join([path, *scope_of(remote)]) if is_url(path) else os.path.realpath(path)
    yield os.path.join(_cache(), hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest() + SUFFIX)
    if is_url(path):
        yield path + SUFFIX


def _cache() -> str:
    from gpuload.datasets.stores.cached import cache_folder  # likewise

    return os.path.join(cache_folder(), "tar")


def _warn(remarks: list[str], stacklevel: int) -> None:
    for remark in remarks:
        warnings.warn(remark, stacklevel=stacklevel)


def _joined(errors: list[Exception], count: int) -> Exception:
    """Return one error for all of them."""
    if len(errors) == 1:
        return errors[0]
    shown = "".join(f"\n  {error}" for error in errors[:SHOWN])
    more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
    kind = OSError if all(isinstance(error, OSError) for error in errors) else ValueError
    return kind(f"{len(errors)} of {count} shards cannot be indexed:{shown}{more}")


def find_shards(patterns: Patterns, remote: Remote | None = None) -> list[str]:
    """The absolute paths, in the order of the patterns; those of a wildcard sorted. URLs are looked at when they are
    opened.

    Raises:
        FileNotFoundError: a pattern finds nothing, or a file that it names is missing.
        TypeError, ValueError: it is no path; a range in it is too long.
    """
    listed = as_list(patterns)
    paths, missing = [], []
    for pattern in listed:
        if not isinstance(pattern, str | os.PathLike):
            raise TypeError(f"shards are given as paths, got {pattern!r} ({type(pattern).__name__})")
        for name in expand(os.fsdecode(pattern)):
            if is_url(name):
                paths += _listed(name, remote)
                continue
            path = full_path(name)
            if os.path.lexists(path):
                paths.append(path)
            elif glob.has_magic(path):
                matches = without_litter(sorted(glob.glob(path, recursive=True)), path)
                if not matches:
                    raise FileNotFoundError(f"no shard is found for {name!r} (looked for {path!r})")
                paths += matches
            else:
                missing.append(path)
    if missing:
        shown = ", ".join(map(repr, missing[:SHOWN])) + (", …" if len(missing) > SHOWN else "")
        count = len(missing) + len(paths)
        raise FileNotFoundError(f"{len(missing)} of {count} shards {'is' if count == 1 else 'are'} missing: {shown}")
    if not paths:
        raise FileNotFoundError(f"no shard is found for {listed!r}: an empty list of paths")
    return paths


def as_list(patterns: Patterns) -> list[str | os.PathLike[str]]:
    """The patterns, if it is one or several."""
    return [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)


def _listed(name: str, remote: Remote | None) -> list[str]:
    if "*" not in name:  # what else is a wildcard elsewhere may stand in a URL
        return [name]
    if not (matches := without_litter(client(remote).glob(name), name)):
        raise FileNotFoundError(f"no shard is found for {name!r}")
    return matches


def expand(pattern: str) -> Iterator[str]:
    """``a{1..3}`` and ``a{1,2,3}`` as a shell expands them: ``{000..099}`` keeps its zeros.

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
        if depth:  # it is not closed
            continue
        if (span := RANGE.fullmatch(pattern, start + 1, cuts[-1])) is not None:
            choices: Iterable[str] = _range(pattern, *span.groups())
        elif len(cuts) > 2:
            choices = (name for low, high in itertools.pairwise(cuts) for name in expand(pattern[low + 1 : high]))
        else:
            continue
        after = list(expand(pattern[cuts[-1] + 1 :]))
        return (pattern[:start] + choice + ending for choice in choices for ending in after)
    return iter((pattern,))


def _range(pattern: str, first: str, last: str, step: str | None) -> Iterator[str]:
    start, stop, by = int(first), int(last), abs(int(step or 1)) or 1
    if abs(stop - start) // by >= MOST:
        raise ValueError(f"{pattern!r} stands for more than {MOST:,} shards")
    padded = any(len(number.lstrip("-")) > 1 and number.lstrip("-")[0] == "0" for number in (first, last))
    width = max(len(first), len(last)) if padded else 0
    way = 1 if stop >= start else -1
    return (f"{number:0{width}d}" for number in range(start, stop + way, by * way))
