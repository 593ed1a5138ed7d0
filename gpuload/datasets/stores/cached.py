"""Indices that take long to build, kept in files: arrays of numbers and nothing else.

One file for each source, in ``$GPULOAD_CACHE``, else ``$XDG_CACHE_HOME/gpuload``, else ``~/.cache/gpuload``; without a
home in ``gpuload-UID`` in the temporary folder, if only this user can write to it. A source that has changed gets a new
file in place of the old one. A file is a zip, whose members have a CRC-32 each: what the source was, as JSON,
and arrays as ``.npy``. It is written under another name and then renamed, so nobody reads half of one. A damaged file
is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any, Final

import numpy as np

__all__ = ["cache_folder", "cached"]

LEAST_BYTES: Final = 1 << 20  # a smaller index is built as quickly as it is read
IDENTITY: Final = "identity.json"
NOWHERE: Final = os.path.join(os.devnull, "gpuload")  # nothing can be written there, so nothing is kept

Arrays = dict[str, np.ndarray]


def cache_folder() -> str:
    """Return where indices are kept."""
    if folder := os.environ.get("GPULOAD_CACHE"):
        return folder
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        return os.path.join(base, "gpuload")
    # Without HOME and an entry in the table of users, as containers run programs, `~` stays as it is: a folder of that
    # name wherever the program is started.
    return _temporary_folder() or NOWHERE


def _temporary_folder() -> str | None:
    """Return a folder for temporary files that is this user's alone: others may have made one of its name."""
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
    """Return the index of a source: from its file if that is of the same source, else built, and kept for next time.

    Args:
        path: the source's, which names the file.
        identity: all that the index depends on, such as size and time of the source and what was asked for; JSON.
        build: makes the arrays.
        is_fresh: whether arrays from a file are still true, where `identity` does not say it.
        is_kept: whether the arrays that were built may be kept.
        least_bytes: a smaller index is not kept; default `LEAST_BYTES`.
    """
    file = os.path.join(cache_folder(), hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest() + ".index")
    described = json.dumps([path, identity]).encode()
    arrays: Arrays | None = None
    with contextlib.suppress(Exception):  # whatever zipfile and NumPy raise for a file that is damaged
        arrays = _read(file, described)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of arrays that are not what `build` makes
        if arrays is not None and is_fresh(arrays):
            return arrays
    arrays = build()
    minimum = LEAST_BYTES if least_bytes is None else least_bytes
    if sum(array.nbytes for array in arrays.values()) >= minimum and is_kept(arrays):
        with contextlib.suppress(OSError, ValueError):  # a zip takes no time before 1980, which a clock may show
            _write(file, described, arrays)
    return arrays


def _read(path: str, identity: bytes) -> Arrays | None:
    """Return the arrays in a file; None if they are of another source."""
    with zipfile.ZipFile(path) as file:
        # A damaged directory, or head of an array, takes no memory beyond its file.
        if sum(entry.file_size for entry in file.infolist()) > os.path.getsize(path) or file.read(IDENTITY) != identity:
            return None
        arrays: Arrays = {}
        for entry in file.infolist()[1:]:
            with file.open(entry) as member:
                np.lib.format.read_magic(member)
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                return None
            with file.open(entry) as member:
                arrays[entry.filename] = np.load(member, allow_pickle=False)
        return arrays


def _write(path: str, identity: bytes, arrays: Arrays) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".part")
    try:
        with open(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(IDENTITY, identity)
            for name, array in arrays.items():
                with archive.open(name, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
