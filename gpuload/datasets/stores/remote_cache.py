"""What was read from URLs, kept on this machine's disk, within a limit, for all of its processes.

One file for each key, named by a digest of it, in 256 folders: a head (8 bytes of magic, the number of bytes that
follow, their CRC-32), then the bytes. A file is written as a draft and then renamed, so nobody reads half of one. One
that a power failure has damaged counts as absent. How many bytes there are is written in ``used``, under a lock. The
process that exceeds the limit removes the least recently used files, a tenth of the limit, and old drafts.

(fsspec's caches have no limit but an age, and write the list of all that they hold again for each file.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Final

__all__ = ["Disk"]

MAGIC: Final = b"glblock2"
HEAD: Final = struct.Struct("<8sQI")
LEFT: Final = 0.9  # of the limit, when room was made
TOUCHED_S: Final = 60.0  # a file's time is set again when it is older
CRASHED_S: Final = 3600.0  # the writer of an older draft was killed
DRAFT: Final = ".part"


class Disk:
    """Bytes by keys, in the files of a folder.

    Args:
        folder: made if it is not there.
        limit_bytes: the most that the files may have together.
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
        """Return what was kept under a key; None if it is not there, or damaged."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                head, data = file.read(HEAD.size), file.read(status.st_size)
        except OSError:
            return None
        if head != _head(data):
            self.drop(key)
            return None
        if time.time() - status.st_mtime > TOUCHED_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep data under a key, if the disk lets it."""
        path = self._path(key)
        draft = f"{path}.{os.urandom(6).hex()}{DRAFT}"
        with contextlib.suppress(OSError):
            try:
                self._make_room(HEAD.size + len(data))
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with open(draft, "xb") as file:
                    file.writelines((_head(data), data))
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
                raise

    def drop(self, key: str) -> bool:
        """Remove what is kept under a key; returns whether there was anything."""
        try:
            os.unlink(self._path(key))
        except OSError:
            return False
        return True

    def _path(self, key: str) -> str:
        full = f"{key}\0\0{self.scope}" if self.scope else key
        name = hashlib.blake2b(full.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        return os.path.join(self.folder, name[:2], name[2:])

    def _make_room(self, nbytes: int) -> None:
        """Count bytes that are about to be written, and remove files if they would exceed the limit."""
        with open(self._used, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            count = file.read(8)
            used = int.from_bytes(count, "little") if len(count) == 8 else self.limit_bytes  # not known: look
            if used + nbytes > self.limit_bytes:
                used = self._remove(min(int(self.limit_bytes * LEFT), self.limit_bytes - nbytes))
            file.seek(0)
            file.write((used + nbytes).to_bytes(8, "little"))

    def _remove(self, target: int) -> int:
        """Remove the least recently used files; return how many bytes are left, `target` at most."""
        files, now = sorted(self._files()), time.time()
        used = sum(size for _, size, _ in files)
        for modified, size, path in files:
            if now - modified > CRASHED_S if path.endswith(DRAFT) else used > target:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                used -= size
        return used

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time, bytes and path of each file."""
        for number in range(256):
            with contextlib.suppress(FileNotFoundError), os.scandir(f"{self.folder}/{number:02x}") as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, entry.path


def _head(data: bytes) -> bytes:
    return HEAD.pack(MAGIC, len(data), zlib.crc32(data))
