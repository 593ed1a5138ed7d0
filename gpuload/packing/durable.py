"""Files that are whole or not there: written under another name, synced, renamed, and the folder synced."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["WORK", "Hashed", "draft", "hash_of", "new_hash", "read_json", "write_json", "write_whole"]

WORK: Final = ".gpuload-pack"  # the folder of what is not finished, within the packed set
PIECE: Final = 4 << 20


@contextlib.contextmanager
def draft(path: str, work: str, *, lasting: bool = True) -> Iterator[str]:
    """A name in the folder of unfinished work; what is written there takes its place at `path` when the block ends.

    With ``lasting=False`` it is not made to outlive a loss of power, which costs as much as writing to the disk.
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
    if lasting:
        _sync(os.path.dirname(path))


def write_whole(path: str, data: bytes, work: str) -> None:
    """A file with these bytes."""
    with draft(path, work) as name, open(name, "xb") as file:
        file.write(data)


def write_json(path: str, value: Any, work: str) -> None:
    """A file with this value as JSON, the same bytes for the same value."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n", work)


def read_json(path: str) -> Any:
    """The value in a file; None if there is none, or no JSON."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def new_hash(data: bytes = b"") -> Any:
    """What ``b2sum -l 256`` computes. (Without instructions for SHA-256, that took 1.7 times as long, and half the
    CPU time of packing files as they are.)"""
    return hashlib.blake2b(data, digest_size=32)


def _sync(path: str) -> None:
    """Make what is in a file, or the names in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_of(path: str, start: int = 0, nbytes: int | None = None) -> str:
    """The BLAKE2b hash of a file, or of a span of it, in hexadecimal digits."""
    digest, left = new_hash(), os.path.getsize(path) - start if nbytes is None else nbytes
    buffer = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (got := file.readinto(buffer[: min(left, PIECE)])):
            digest.update(buffer[:got])
            left -= got
    return digest.hexdigest()


class Hashed:
    """A file that is written from beginning to end, with the BLAKE2b hash of its bytes."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115
        self._digest = new_hash()
        self.nbytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self.nbytes += written
        return written

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def __enter__(self) -> Hashed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
