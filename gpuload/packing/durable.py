"""Files that are complete or absent: written under another name, synced, renamed, and the folder synced.

A full disk is no fault of a sample or of the program: `telling_of_a_full_disk` turns what a library makes of it into
one message.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any, Final

from gpuload.errors import GpuloadError, one_line

__all__ = [
    "WORK", "Hashed", "draft", "hash_of", "read_json", "sha256", "telling_of_a_full_disk", "write_json", "write_whole",
]  # fmt: skip

WORK: Final = ".gpuload-pack"  # the folder of unfinished files, within the packed set
BUFFER: Final = 1 << 20  # bytes that are hashed and written at once
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
sha256: Final = hashlib.sha256


@contextlib.contextmanager
def draft(path: str, work: str, *, lasting: bool = True) -> Iterator[str]:
    """Yield a name in the folder of unfinished files; what is written there is moved to `path` when the block ends.

    The content survives a loss of power, unless ``lasting=False``; the file's name does so from the next `write_whole`
    to its folder on.
    """
    name = os.path.join(work, f"{os.path.basename(path)}.{os.urandom(6).hex()}.part")
    try:
        yield name
        if lasting:
            _sync(name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_whole(path: str, data: bytes, work: str, *, lasting: bool = True) -> None:
    """Write a file with these bytes. It survives a loss of power, as do all names in its folder, unless
    ``lasting=False``."""
    with draft(path, work, lasting=lasting) as name, open(name, "xb") as file:
        file.write(data)
    if lasting:
        _sync(os.path.dirname(path))


def write_json(path: str, value: Any, work: str, *, lasting: bool = True) -> None:
    """Write a value as JSON, the same bytes for the same value."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n", work, lasting=lasting)


def read_json(path: str) -> Any:
    """Return the value in a file; None if there is no file, or no JSON in it."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _sync(path: str) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_of(path: str, start: int = 0, nbytes: int | None = None) -> str:
    """Return the SHA-256 of a file, or of a span of it, in hexadecimal digits."""
    digest, left = sha256(), os.path.getsize(path) - start if nbytes is None else nbytes
    buffer = memoryview(bytearray(BUFFER))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (read := file.readinto(buffer[: min(left, BUFFER)])):
            digest.update(buffer[:read])
            left -= read
    return digest.hexdigest()


class _Raw(io.FileIO):
    def __init__(self, path: str) -> None:
        super().__init__(path, "xb")
        self.sha256, self.nbytes = sha256(), 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.sha256.update(memoryview(data)[:written])
        self.nbytes += written
        return written


class Hashed(io.BufferedWriter):
    """A new file, written from its beginning to its end, with the SHA-256 of its bytes."""

    def __init__(self, path: str) -> None:
        self._file = _Raw(path)
        super().__init__(self._file, BUFFER)

    def record(self) -> dict[str, Any]:
        """Return what is noted of the file, once it is closed."""
        return {"bytes": self._file.nbytes, "sha256": self._file.sha256.hexdigest()}


@contextlib.contextmanager
def telling_of_a_full_disk(folder: str) -> Iterator[None]:
    """Raise a GpuloadError for a disk that is full, or a quota that is used up, whichever library found out."""
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        number, text = getattr(error, "errno", None), str(error)  # LMDB's errors have no number, but the system's words
        if number not in FULL and not any(os.strerror(full) in text for full in FULL):
            raise
        raise GpuloadError(
            f"there is no room for the set in {folder!r} ({one_line(text)}). What is done is kept: make room, and run "
            "the same again"
        ) from error
