"""Indices that take long to build, kept in files: arrays of numbers and nothing else.

One file for each source, in ``$GPULOAD_CACHE``, else ``$XDG_CACHE_HOME/gpuload``, else ``~/.cache/gpuload``; without a
home in ``gpuload-UID`` in the temporary folder, if that is this user's alone. A source that has changed gets a new one
in its place. Layout: 16 bytes that say what it is, the length of a JSON header as u64, the header (what the source was;
dtype, length, offset and CRC-32 of each array), the arrays, each aligned to 64 bytes. A file is written under another
name and then renamed, so a half-written one is never read. A damaged one is built anew, as is what cannot be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

__all__ = ["cache_folder", "cached"]

MAGIC: Final = b"gpuload index 2\n"
LEAST_BYTES: Final = 1 << 20  # a smaller index is built as quickly as it is read
ALIGN: Final = 64
PART_BYTES: Final = 32 << 20  # of an array, read by one call
THREADS: Final = 4
NOWHERE: Final = os.path.join(os.devnull, "gpuload")  # nothing can be written there, so nothing is kept

Arrays = dict[str, np.ndarray]


def cache_folder() -> str:
    """Where indices are kept."""
    if own := os.environ.get("GPULOAD_CACHE"):
        return own
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if os.path.isabs(base):
        return os.path.join(base, "gpuload")
    # Without HOME and an entry in the table of users, as containers run programs, `~` stays as it is: a folder of that
    # name wherever the program is started.
    return _temporary_folder() or NOWHERE


def _temporary_folder() -> str | None:
    """A folder for temporary files of this user's alone: others may have made one of its name."""
    try:
        path = os.path.join(tempfile.gettempdir(), f"gpuload-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return path if ours else None


def cached(
    path: str,
    identity: Any,
    build: Callable[[], Arrays],
    *,
    is_fresh: Callable[[Arrays], bool] = lambda arrays: True,
    is_kept: Callable[[Arrays], bool] = lambda arrays: True,
    least_bytes: int | None = None,
) -> Arrays:
    """The index of a source: from its file if that is of the same source, else built, and kept for the next time.

    Args:
        path: the source's, which names the file.
        identity: all that the index depends on, such as size and time of the source and what was asked for; JSON.
        build: makes the arrays.
        is_fresh: whether arrays from a file are still true, where `identity` does not say it.
        is_kept: whether those that were built may be kept.
        least_bytes: what is smaller is not kept; default `LEAST_BYTES`.
    """
    name = hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest() + ".index"
    file = os.path.join(cache_folder(), name)
    identity = json.loads(json.dumps([path, identity]))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if is_fresh(arrays := _read(file, identity)):
            return arrays
    arrays = build()
    least = LEAST_BYTES if least_bytes is None else least_bytes
    if sum(array.nbytes for array in arrays.values()) >= least and is_kept(arrays):
        with contextlib.suppress(OSError):
            _write(file, identity, arrays)
    return arrays


def _read(path: str, identity: Any) -> Arrays:
    """The arrays in a file.

    Raises:
        OSError, ValueError, KeyError, TypeError: there is none, or it is damaged, or of another source.
    """
    with open(path, "rb") as file:
        start = file.read(len(MAGIC) + 8)
        length = int.from_bytes(start[len(MAGIC) :], "little")
        size = os.fstat(file.fileno()).st_size
        if not start.startswith(MAGIC) or length > size:
            raise ValueError(path)
        header = json.loads(file.read(length))
        if header["identity"] != identity or header["size"] != size:
            raise ValueError(path)
        arrays: Arrays = {}
        parts: list[tuple[np.ndarray, int]] = []
        for name, (dtype, count, offset, _) in header["arrays"].items():
            if offset + count * np.dtype(dtype).itemsize > size:  # no memory for what a damaged header says
                raise ValueError(path)
            arrays[name] = np.empty(count, np.dtype(dtype))
            own = arrays[name].view(np.uint8)
            parts += [(own[at : at + PART_BYTES], offset + at) for at in range(0, len(own), PART_BYTES)]
        if size < PART_BYTES:
            filled = [_fill(file.fileno(), *part) for part in parts]
        else:  # a gigabyte takes one thread half a second
            with ThreadPoolExecutor(THREADS) as pool:
                filled = list(pool.map(lambda part: _fill(file.fileno(), *part), parts))
        if not all(filled) or any(_sum(arrays[name]) != entry[3] for name, entry in header["arrays"].items()):
            raise ValueError(path)
        return arrays


def _fill(descriptor: int, part: np.ndarray, offset: int) -> bool:
    """Read a part of an array; whether all of it was there."""
    return os.preadv(descriptor, [part.data], offset) == len(part)


def _sum(array: np.ndarray) -> int:
    return zlib.crc32(array.view(np.uint8).data)


def _write(path: str, identity: Any, arrays: Arrays) -> None:
    header: dict[str, Any] = {"identity": identity, "size": 0, "arrays": {}}
    # The header's own length moves the offsets: room is left for it.
    at = _aligned(len(MAGIC) + 8 + len(json.dumps(header)) + 128 * (1 + len(arrays)))
    for name, array in arrays.items():
        header["arrays"][name] = [array.dtype.str, len(array), at, _sum(array)]
        at = _aligned(at + array.nbytes)
    header["size"] = at
    text = json.dumps(header).encode()
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    descriptor, other = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with open(descriptor, "wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text)
            for name, array in arrays.items():
                file.seek(header["arrays"][name][2])
                array.tofile(file)
            file.truncate(at)
        os.replace(other, path)
    except BaseException:
        os.unlink(other)
        raise


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
