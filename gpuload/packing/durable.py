"""Files that are whole or not there: written under another name, synced, renamed, and the folder synced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal

__all__ = ["WORK", "HashName", "Hashed", "draft", "hash_of", "new_hash", "read_json", "write_json", "write_whole"]

WORK: Final = ".gpuload-pack"  # the folder of what is not finished, within the packed set
PIECE: Final = 4 << 20  # that is read or written at once
WRITTEN: Final = 3  # pieces at most, while one more is filled: a disk takes them at an uneven pace

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
    except (FileNotFoundError, ValueError, RecursionError):
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


_pieces: list[memoryview] = []  # kept for the next file: memory that is new costs as much as writing it


def _piece() -> memoryview:
    """Aligned to pages, large ones where the system has them: the disk gets it in fewer spans then."""
    try:
        return _pieces.pop()
    except IndexError:
        piece = mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            piece.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(piece)


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
    """A file that is written from beginning to end, with the hash of its bytes. A thread writes each piece when it is
    full, past the page cache where the filesystem allows it: so the disk has nearly all of it when the end is synced,
    and the kernel copies nothing.

    Args:
        name: which hash.
        read_soon: it goes through the page cache, since it is read again.
    """

    def __init__(self, path: str, name: HashName, *, read_soon: bool = False) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if not read_soon:
            self._set_flags(os.O_DIRECT)
        self._digest = new_hash(name)
        self._piece = _piece()  # that is filled; others are written
        self._held = 0  # bytes that the first one has
        self._thread = ThreadPoolExecutor(1, "gpuload-pack")
        self._writing: deque[tuple[memoryview, Future[None]]] = deque()
        self.nbytes = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        nbytes = len(data)
        self.nbytes += nbytes
        while (end := self._held + len(data)) >= PIECE:
            fits = PIECE - self._held
            self._piece[self._held :] = data[:fits]
            data = memoryview(data)[fits:]
            self._wait(WRITTEN - 1)
            self._writing.append((self._piece, self._thread.submit(self._hash_and_put, self._piece)))
            self._piece, self._held = _piece(), 0
        self._piece[self._held : end] = data
        self._held = end
        return nbytes

    def _hash_and_put(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._put(piece)

    def _put(self, piece: memoryview) -> None:
        while piece:
            try:
                piece = piece[os.write(self._descriptor, piece) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_flags(0):
                    raise
                # Past the page cache it takes only whole blocks, or nothing.

    def _set_flags(self, flags: int) -> bool:
        """Whether that changed them."""
        before = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        with contextlib.suppress(OSError):  # some filesystems know no other way than through the page cache
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        return fcntl.fcntl(self._descriptor, fcntl.F_GETFL) != before

    def _wait(self, most: int = 0) -> None:
        """Until at most so many pieces are still to be written."""
        while len(self._writing) > most or (self._writing and self._writing[0][1].done()):
            piece, writing = self._writing.popleft()
            writing.result()
            _pieces.append(piece)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        """Nothing: `close` writes the rest."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            self._wait()
            self._digest.update(self._piece[: self._held])
            self._put(self._piece[: self._held])
        finally:
            self._thread.shutdown()
            os.close(self._descriptor)
            _pieces.extend((self._piece, *(piece for piece, _ in self._writing)))

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    @property
    def digest(self) -> str:
        """Of all of it, once it is closed."""
        return self._digest.hexdigest()

    def __enter__(self) -> Hashed:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self._held = 0  # it goes anyway
        self.close()
