"""What was read from URLs, kept on this machine's disk, within a limit, for all of its processes.

One file for each block, named by a sum of what it is of, in 256 folders: 8 bytes that say what it is, how many bytes
follow, and the sum of their words. A file is written under another name and then renamed, so nobody reads half of one;
one that a power failure has damaged has another sum, and counts as absent. How many bytes there are is written in
``used``, under a lock. Whoever finds the limit passed looks through all files and removes those that were not used for
longest, a tenth of them, and what crashed writers left.

(fsspec's caches have no limit but an age, and write the list of all they hold anew for each file.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

__all__ = ["Disk"]

MAGIC: Final = b"glblock1"
HEAD: Final = struct.Struct("<8sQQ")
LEFT: Final = 0.9  # of the limit, when room was made
TOUCHED_S: Final = 60.0  # a file's time is set anew when it is older
CRASHED_S: Final = 3600.0  # what is being written for longer than this was left by a crash
DRAFT: Final = ".part"


class Disk:
    """The files in a folder.

    Args:
        folder: where; made if it is not there.
        limit_bytes: the most that they may have together.
        scope: what is put under a key is found again only under the same scope.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str, limit_bytes: int, scope: str = "") -> None:
        self.folder, self.limit_bytes, self.scope = folder, limit_bytes, scope
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._used = os.path.join(folder, "used")
        os.close(os.open(self._used, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def get(self, key: str) -> bytes | None:
        """What was kept under a key; None if it is not there, or damaged."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                data = file.read(status.st_size)
        except OSError:
            return None
        if len(data) < HEAD.size or HEAD.unpack_from(data) != _head(body := data[HEAD.size :]):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        if time.time() - status.st_mtime > TOUCHED_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return body

    def put(self, key: str, data: bytes) -> None:
        """Keep data under a key, if the disk lets it."""
        path = self._path(key)
        draft = f"{path}.{os.urandom(6).hex()}{DRAFT}"
        with contextlib.suppress(OSError):
            try:
                self._count(HEAD.size + len(data))
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with open(draft, "xb", buffering=0) as file:
                    file.write(HEAD.pack(*_head(data)))
                    file.write(data)
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
                raise

    def _path(self, key: str) -> str:
        full = f"{key}\0\0{self.scope}" if self.scope else key
        name = hashlib.blake2b(full.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        return os.path.join(self.folder, name[:2], name[2:])

    def _count(self, nbytes: int) -> None:
        """Note that so many bytes are about to be written; make room for them if there is none."""
        with open(self._used, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            said = file.read(8)
            used = int.from_bytes(said, "little") if len(said) == 8 else self.limit_bytes  # unknown: look
            used += nbytes
            if used > self.limit_bytes:
                used = self._make_room(nbytes) + nbytes
            file.seek(0)
            file.write(used.to_bytes(8, "little"))

    def _make_room(self, nbytes: int) -> int:
        """Remove what was not used for longest; returns how many bytes are left."""
        found = sorted(self._files())
        used = sum(size for _, size, _ in found)
        target, now = max(0, min(int(self.limit_bytes * LEFT), self.limit_bytes - nbytes)), time.time()
        for modified, size, path in found:
            crashed = path.endswith(DRAFT) and now - modified > CRASHED_S
            if not crashed and (used <= target or path.endswith(DRAFT)):
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Time, bytes and path of each."""
        for number in range(256):
            try:
                with os.scandir(os.path.join(self.folder, f"{number:02x}")) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime, status.st_size, entry.path
            except FileNotFoundError:
                continue


def _head(data: bytes) -> tuple[bytes, int, int]:
    words = np.frombuffer(data, "<u8", len(data) // 8)
    rest = int.from_bytes(data[len(data) & ~7 :], "little")
    return MAGIC, len(data), (int(words.sum(dtype=np.uint64)) + rest) % (1 << 64)
