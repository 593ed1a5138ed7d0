"""Writing files so that each is either complete or absent.

A file is written under a temporary name, synced, and renamed; then its folder is synced. A full disk is not the fault
of a sample or of the program, so `explain_full_disk` replaces the various errors that libraries raise with one message.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

import numpy as np

from gpuload.datasets.drafts import replace_when_done
from gpuload.errors import GpuloadError, one_line

__all__ = [
    "WORK_FOLDER", "encode_json", "encode_npy", "explain_full_disk", "hash_of", "open_draft", "read_json",
    "size_and_hash", "sync_names", "write_file",
]  # fmt: skip

WORK_FOLDER: Final = ".gpuload-pack"  # the folder for unfinished files inside the packed set
BUFFER_BYTES: Final = 1 << 20  # bytes to hash and write per call
FREE_SPACE: Final = "free some space"
REMEDIES: Final = {  # keyed by the error numbers that mean there is no room for a file
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f unlimited`)",
}


class _HashedFile(io.FileIO):
    def __init__(self, path: str) -> None:
        super().__init__(path, "xb")
        self.sha256, self.nbytes = sha256(), 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.sha256.update(memoryview(data)[:written])
        self.nbytes += written
        return written


@contextlib.contextmanager
def open_draft(path: str, work_folder: str, *, sync: bool = True) -> Iterator[io.BufferedWriter]:
    """Yield a new file in the folder for unfinished files, and move it to `path` when the block ends.

    The content then survives a power failure, unless ``sync=False``; the name survives it only after `sync_names`.
    """
    with replace_when_done(path, work_folder) as draft:
        raw: Any = _HashedFile(draft)
        with io.BufferedWriter(raw, BUFFER_BYTES) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())


def sync_names(folder: str) -> None:
    """Wait until the names of a folder's files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_and_hash(file: io.BufferedWriter) -> dict[str, Any]:
    """Return the size and SHA-256 of a closed draft (see `open_draft`) that was written sequentially."""
    raw: Any = file.raw
    return {"bytes": raw.nbytes, "sha256": raw.sha256.hexdigest()}


def write_file(path: str, data: bytes | memoryview, work_folder: str, *, sync: bool = True) -> None:
    """Write a file with this content, through a draft (see `open_draft`)."""
    with open_draft(path, work_folder, sync=sync) as file:
        file.write(data)


def encode_json(value: object) -> bytes:
    """Encode a value as JSON. Equal values give equal bytes."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def encode_npy(array: np.ndarray) -> bytes:
    """Encode an array in NumPy's format. Equal arrays give equal bytes."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)
    return file.getvalue()


def read_json(path: str) -> Any:
    """Parse a JSON file. Return None if the file does not exist or is not valid JSON."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def hash_of(path: str, start: int = 0, nbytes: int | None = None) -> str:
    """Return the SHA-256 of a file, or of a range of its bytes, as hexadecimal digits."""
    digest, remaining = sha256(), os.path.getsize(path) if nbytes is None else nbytes
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while data := file.read(min(remaining, BUFFER_BYTES)):
            digest.update(data)
            remaining -= len(data)
    return digest.hexdigest()


@contextlib.contextmanager
def explain_full_disk(folder: str) -> Iterator[None]:
    """Replace an error that means there is no room for a file with a GpuloadError, whichever library raised it.

    There is no room if the disk is full, a quota is used up, or a file would exceed the limit on the size of files.
    """
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        error_number, text = getattr(error, "errno", None), str(error)
        if error_number not in REMEDIES:  # an LMDB error contains the system's message, but no errno
            error_number = next((room_error for room_error in REMEDIES if os.strerror(room_error) in text), None)
        if error_number is None:
            raise
        raise GpuloadError(
            f"there is no room for the set in {folder!r} ({one_line(text)}); {REMEDIES[error_number]}, and run the "
            "same command again (finished parts are kept)"
        ) from error
