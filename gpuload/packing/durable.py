"""Writing files that are either complete or absent: write under a temporary name, sync, rename, and sync the folder.

A full disk is not the fault of a sample or of the program: `explain_full_disk` replaces the various errors that
libraries raise in this case with one message.
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

from gpuload.errors import GpuloadError, one_line

__all__ = [
    "WORK", "as_json", "draft", "explain_full_disk", "hash_of", "read_json", "record_of", "sync_names", "write_file",
]  # fmt: skip

WORK: Final = ".gpuload-pack"  # the folder for unfinished files inside the packed set
BUFFER: Final = 1 << 20  # bytes to hash and write per call
FREE_SPACE: Final = "free some space"
REMEDIES: Final = {  # for each error that means there is no room for a file
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
def draft(path: str, work_folder: str, *, sync: bool = True) -> Iterator[io.BufferedWriter]:
    """Yield a new file in the folder for unfinished files, and move it to `path` when the block ends.

    The content then survives a power failure, unless ``sync=False``; the name survives it only after `sync_names`.
    """
    name = os.path.join(work_folder, f"{os.path.basename(path)}.{os.urandom(6).hex()}.part")
    try:
        raw: Any = _HashedFile(name)
        with io.BufferedWriter(raw, BUFFER) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def sync_names(folder: str) -> None:
    """Wait until the names of a folder's files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_of(file: io.BufferedWriter) -> dict[str, Any]:
    """Return the size and SHA-256 of a `draft` that was written sequentially and is closed."""
    raw: Any = file.raw
    return {"bytes": raw.nbytes, "sha256": raw.sha256.hexdigest()}


def write_file(path: str, data: bytes, work_folder: str, *, sync: bool = True) -> None:
    """Write a file with this content, through a `draft`."""
    with draft(path, work_folder, sync=sync) as file:
        file.write(data)


def as_json(value: Any) -> bytes:
    """Encode a value as JSON. Equal values give equal bytes."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


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
        while data := file.read(min(remaining, BUFFER)):
            digest.update(data)
            remaining -= len(data)
    return digest.hexdigest()


@contextlib.contextmanager
def explain_full_disk(folder: str) -> Iterator[None]:
    """Raise a GpuloadError if there is no room for a file (the disk is full, or a quota or a limit on the size of files
    is exceeded), whichever library raised the original error."""
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        number, text = getattr(error, "errno", None), str(error)
        if number not in REMEDIES:  # LMDB's errors have the system's text, but no errno
            number = next((full for full in REMEDIES if os.strerror(full) in text), None)
        if number is None:
            raise
        raise GpuloadError(
            f"there is no room for the set in {folder!r} ({one_line(text)}); {REMEDIES[number]}, and run the same "
            "command again (finished parts are kept)"
        ) from error
