"""A disk cache for data read from URLs, with a size limit, shared by all processes of this machine.

Each key has one file, named after a digest of the key, in one of 256 folders. It contains a header (8 bytes of magic,
the length of the data, and a CRC-32), then the data, and is written as a draft (`gpuload.datasets.drafts`). A file
damaged by a power failure counts as absent. The file ``used`` holds the total size, and is updated under a lock. A
process that would exceed the limit evicts the least recently used files, down to 90% of the limit, and removes old
drafts.

(fsspec's caches have no limit on size, only on age, and rewrite a list of all entries for each new file.)
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

from gpuload.datasets.drafts import DRAFT, replace_when_done

__all__ = ["DiskCache"]

MAGIC: Final = b"glblock2"
HEADER: Final = struct.Struct("<8sQI")
FILL_AFTER_EVICTION: Final = 0.9  # fraction of the limit
TOUCH_AFTER_S: Final = 60.0  # on a cache hit, a modification time older than this is updated
STALE_DRAFT_S: Final = 3600.0  # if a draft is older than this, its writer has crashed


class DiskCache:
    """A mapping from keys to bytes, stored in the files of a folder.

    Args:
        folder: the folder of the cache, created if it does not exist.
        limit_bytes: the maximum total size of the files, unless a single file is larger.
        scope: a namespace: data stored in one scope is not visible in another.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str, limit_bytes: int, scope: str = "") -> None:
        self.folder, self.limit_bytes, self.scope = folder, limit_bytes, scope
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._used_path = os.path.join(folder, "used")
        os.close(os.open(self._used_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def get(self, key: str) -> bytes | None:
        """Return the data of a key; None if it is absent or damaged."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                header, data = file.read(HEADER.size), file.read(status.st_size)
        except OSError:
            return None
        if header != _header(data):
            self.drop(key)
            return None
        if time.time() - status.st_mtime > TOUCH_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store data under a key. Do nothing if the data cannot be written."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            self._reserve(HEADER.size + len(data))
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with replace_when_done(path) as draft, open(draft, "xb") as file:
                file.writelines((_header(data), data))

    def drop(self, key: str) -> bool:
        """Remove the data of a key. Return whether the key had data."""
        try:
            os.unlink(self._path(key))
        except OSError:
            return False
        return True

    def _path(self, key: str) -> str:
        scoped_key = f"{key}\0\0{self.scope}" if self.scope else key
        name = hashlib.blake2b(scoped_key.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        return os.path.join(self.folder, name[:2], name[2:])

    def _reserve(self, nbytes: int) -> None:
        """Reserve space for new data: add its size to the recorded total, and evict files if the total would exceed the
        limit."""
        with open(self._used_path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            recorded_size = file.read(8)
            # If the total is unknown, evict files, which counts all sizes.
            used_bytes = int.from_bytes(recorded_size, "little") if len(recorded_size) == 8 else self.limit_bytes
            if used_bytes + nbytes > self.limit_bytes:
                used_bytes = self._evict(min(int(self.limit_bytes * FILL_AFTER_EVICTION), self.limit_bytes - nbytes))
            file.seek(0)
            file.write((used_bytes + nbytes).to_bytes(8, "little"))

    def _evict(self, target_bytes: int) -> int:
        """Evict the least recently used files. Return the remaining total size, at most `target` bytes."""
        files, now = sorted(self._files()), time.time()
        used_bytes = sum(size for _, size, _ in files)
        for mtime_s, size, path in files:
            if now - mtime_s > STALE_DRAFT_S if path.endswith(DRAFT) else used_bytes > target_bytes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                used_bytes -= size
        return used_bytes

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield the modification time, size and path of each file."""
        for prefix in range(256):
            with contextlib.suppress(FileNotFoundError), os.scandir(f"{self.folder}/{prefix:02x}") as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, entry.path


def _header(data: bytes) -> bytes:
    return HEADER.pack(MAGIC, len(data), zlib.crc32(data))
