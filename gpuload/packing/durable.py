"""Files that are whole or not there: written under another name, synced, renamed, and the folder synced."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

__all__ = ["WORK", "HashName", "Hashed", "draft", "hash_of", "new_hash", "read_json", "write_json", "write_whole"]

WORK: Final = ".gpuload-pack"  # the folder of what is not finished, within the packed set
PIECE: Final = 4 << 20
AHEAD: Final = 8 << 20  # after so many bytes the disk is let begin, so that little is left for the sync at the end

TOGETHER: Final = 1 << 20
MOST_PARTS: Final = 1024  # what one call takes

HashName = Literal["sha256", "blake2b"]


@contextlib.contextmanager
def draft(path: str, work: str, *, lasting: bool = True) -> Iterator[str]:
    """A name in the folder of unfinished work; what is written there takes its place at `path` when the block ends.

    What is in it outlives a loss of power, unless ``lasting=False``; that it has its name lasts from the next
    `write_whole` to its folder on.
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
    """A file with these bytes. It outlives a loss of power, as do all names that its folder has, unless
    ``lasting=False``."""
    with draft(path, work, lasting=lasting) as name, open(name, "xb") as file:
        file.write(data)
    if lasting:
        _sync(os.path.dirname(path))


def write_json(path: str, value: Any, work: str, *, lasting: bool = True) -> None:
    """A file with this value as JSON, the same bytes for the same value."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n", work, lasting=lasting)


def read_json(path: str) -> Any:
    """The value in a file; None if there is none, or no JSON."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def new_hash(name: HashName, data: bytes = b"") -> Any:
    """What ``sha256sum`` or ``b2sum -l 256`` computes. (SHA-256 takes 0.4 times as long as BLAKE2b on processors with
    instructions for it, 1.7 times on others: Intel's servers before 2021.)"""
    return hashlib.sha256(data) if name == "sha256" else hashlib.blake2b(data, digest_size=32)


def _sync(path: str) -> None:
    """Make what is in a file, or the names in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_of(path: str, name: HashName, start: int = 0, nbytes: int | None = None) -> str:
    """The hash of a file, or of a span of it, in hexadecimal digits."""
    digest, left = new_hash(name), os.path.getsize(path) - start if nbytes is None else nbytes
    buffer = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (got := file.readinto(buffer[: min(left, PIECE)])):
            digest.update(buffer[:got])
            left -= got
    return digest.hexdigest()


class Hashed:
    """A file that is written from beginning to end, with the hash of its bytes."""

    def __init__(self, path: str, name: HashName) -> None:
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115
        self._digest = new_hash(name)
        self._waiting: list[bytes] = []  # what is written together
        self._held = 0  # bytes of these
        self._begun = 0  # so many bytes are on their way to the disk
        self.nbytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._write_waiting()
        self._digest.update(data)
        written = self._file.write(data)
        self.nbytes += written
        self._begin()
        return written

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """Write these one after the other, without copying them to a buffer. They may be held until more has come: by
        1 MB at a time the kernel keeps a file in larger pieces of memory, and writes and reads it in less time."""
        for part in parts:
            self._digest.update(part)
            self._held += len(part)
            self.nbytes += len(part)
        self._waiting += parts
        if self._held >= TOGETHER or len(self._waiting) >= MOST_PARTS:
            self._write_waiting()
            self._begin()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        parts, total = self._waiting, self._held
        self._waiting, self._held = [], 0
        self._file.flush()
        written = os.writev(self._file.fileno(), parts[:MOST_PARTS])
        while written < total:  # there were more parts, or more than 2 GiB; on a full disk what fits
            rest = memoryview(b"".join(parts))[written:]
            written += os.write(self._file.fileno(), rest)

    def _begin(self) -> None:
        if self.nbytes - self._begun >= AHEAD:
            # Starts writing; what the disk does not have yet stays in the page cache.
            os.posix_fadvise(self._file.fileno(), self._begun, self.nbytes - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self.nbytes

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        self._write_waiting()
        self._file.flush()

    def close(self) -> None:
        try:
            self._write_waiting()
        finally:
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

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self._waiting.clear()  # it goes anyway
        self.close()
