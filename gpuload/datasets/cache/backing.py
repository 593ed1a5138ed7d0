"""Where a cache's file lies: in a memfd that workers inherit, or in a folder on disk. Each process opens it for itself.

A lock of ``flock`` belongs to an open file, and ends with its last descriptor, so with a process that is killed. A
descriptor that was inherited is the same open file: so each process opens the memfd anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from typing import Any, Final

from gpuload.datasets.cache.layout import Shape
from gpuload.datasets.memory import memory_file

__all__ = ["Folder", "Memory", "give_back"]

NAME: Final = "samples.gpuload-cache"
IN_USE: Final = "in-use"
PUNCH_HOLE: Final = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Memory:
    """A memfd. Workers of a loader get it itself (`gpuload.workers.shipping`); any other copy is new and empty.

    Args:
        shape: of the cache.
        fd: of a memfd that this process inherited.
    """

    def __init__(self, shape: Shape, fd: int | None = None) -> None:
        self.shape = shape
        if fd is None:
            made = memory_file("cache", shape.data_at)
            fd = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)  # not in the place of a standard stream
            os.close(made)
        else:
            os.set_inheritable(fd, False)
        self.fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)

    def open(self) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self.shape,)


class Folder:
    """A file in a folder of its own, which is in use as long as a process holds this.

    Args:
        path: the folder, as an absolute path.
        shape: of the cache.
        held: this process says that the folder is in use; copies in workers leave that to it.

    Attributes:
        is_new: no other process uses it, so it may be made anew.
    """

    def __init__(self, path: str, shape: Shape, *, held: bool = True) -> None:
        self.path, self.shape, self.is_new, self._held = path, shape, False, -1
        if held:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self._held = os.open(os.path.join(path, IN_USE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._finalizer = weakref.finalize(self, os.close, self._held)
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_new = True
            except BlockingIOError:
                fcntl.flock(self._held, fcntl.LOCK_SH)  # waits for one that is making it

    def ready(self) -> None:
        """From here on others may use it too."""
        if self._held >= 0:
            fcntl.flock(self._held, fcntl.LOCK_SH)
        self.is_new = False

    def open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(os.path.join(self.path, NAME), flags, 0o600)

    def __reduce__(self) -> tuple[Any, ...]:
        return _folder, (self.path, self.shape)


def _folder(path: str, shape: Shape) -> Folder:
    return Folder(path, shape, held=False)


def give_back(fd: int, offset: int, nbytes: int) -> None:
    """Make a hole in a file: these bytes take no more memory or disk.

    Raises:
        OSError: the file system has no holes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot give back parts of a file: {os.strerror(code)}")
