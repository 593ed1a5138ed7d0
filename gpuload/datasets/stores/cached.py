"""A cache on disk for indexes that take long to build. Its files contain only arrays of numbers.

Each source has one file, in ``$GPULOAD_CACHE``, else ``$XDG_CACHE_HOME/gpuload``, else ``~/.cache/gpuload``; without a
home folder, in ``gpuload-UID`` in the temporary folder, if only this user can write to it. When a source has changed, a
new file replaces the old one. A file is a zip archive, which has a CRC-32 for each member: the identity of the source
as JSON, and arrays as ``.npy``. It is written as a draft (`gpuload.datasets.drafts`). A damaged file is rebuilt.
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
from typing import Final

import numpy as np

from gpuload.datasets.drafts import replace_when_done

__all__ = ["cache_folder", "load_or_build"]

LEAST_BYTES: Final = 1 << 20  # building a smaller index takes no longer than loading it
IDENTITY: Final = "identity.json"
NOWHERE: Final = os.path.join(os.devnull, "gpuload")  # not writable, so nothing is cached

Arrays = dict[str, np.ndarray]


def cache_folder() -> str:
    """Return the folder for cached indexes."""
    if folder := os.environ.get("GPULOAD_CACHE"):
        return folder
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        return os.path.join(base, "gpuload")
    # In a container without HOME and without an entry in the user database, `~` is not expanded, and would be a folder
    # named `~` in the working directory.
    return _temporary_folder() or NOWHERE


def _temporary_folder() -> str | None:
    """Return a temporary folder that only this user can write to; None if another user has created the folder."""
    try:
        path = os.path.join(tempfile.gettempdir(), f"gpuload-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return path if is_private else None


def load_or_build(
    path: str,
    identity: object,
    build: Callable[[], Arrays],
    *,
    is_fresh: Callable[[Arrays], bool] = lambda arrays: True,
    is_cacheable: Callable[[Arrays], bool] = lambda arrays: True,
    min_bytes: int | None = None,
) -> Arrays:
    """Return the index of a source: from the cache if the cached identity matches; otherwise build it, and cache it.

    Args:
        path: the path of the source, which determines the name of the cache file.
        identity: everything that the index depends on, such as the source's size and modification time, and the
            arguments, as values that JSON can represent.
        build: a function that builds the arrays.
        is_fresh: a function that returns whether cached arrays are still valid, if `identity` cannot tell.
        is_cacheable: a function that returns whether newly built arrays may be cached.
        min_bytes: smaller indexes are not cached. Default: `LEAST_BYTES`.
    """
    cache_path = os.path.join(cache_folder(), hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest() + ".index")
    encoded_identity = json.dumps([path, identity]).encode()
    arrays: Arrays | None = None
    with contextlib.suppress(Exception):  # zipfile and NumPy raise many types of errors for a damaged file
        arrays = _read(cache_path, encoded_identity)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the arrays may not be what `is_fresh` expects
        if arrays is not None and is_fresh(arrays):
            return arrays
    arrays = build()
    minimum = LEAST_BYTES if min_bytes is None else min_bytes
    if sum(array.nbytes for array in arrays.values()) >= minimum and is_cacheable(arrays):
        with contextlib.suppress(OSError, ValueError):  # zip cannot store times before 1980, as from a wrong clock
            _write(cache_path, encoded_identity, arrays)
    return arrays


def _read(path: str, identity: bytes) -> Arrays | None:
    """Return the arrays in a file; None if the file has another identity, or its sizes are inconsistent."""
    with zipfile.ZipFile(path) as file:
        # A damaged zip directory or array header must not allocate more memory than the file has bytes.
        if sum(entry.file_size for entry in file.infolist()) > os.path.getsize(path) or file.read(IDENTITY) != identity:
            return None
        arrays: Arrays = {}
        for entry in file.infolist()[1:]:
            with file.open(entry) as member:
                np.lib.format.read_magic(member)
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                return None
            with file.open(entry) as member:  # np.load reads in pieces, so that there is never a second copy
                arrays[entry.filename] = np.load(member, allow_pickle=False)
        return arrays


def _write(path: str, identity: bytes, arrays: Arrays) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with replace_when_done(path) as draft, zipfile.ZipFile(draft, "x") as archive:
        archive.writestr(IDENTITY, identity)
        for name, array in arrays.items():
            with archive.open(name, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
