"""How a process recognises a file that another process has opened, and that it opens again by path.

A file that is replaced (as by `os.replace`) or deleted stays readable for a process that has mapped it, but its path
then leads to another file, or to none. So the main process sends a `FileId` with a path, and a worker checks it. With
`FileMappings`, the main process finds out that a file it has mapped is no longer at its path; it then sends the bytes.
"""

from __future__ import annotations

import bisect
import functools
import mmap
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gpuload.datasets.files import decode_error_at

__all__ = ["FileId", "FileMappings", "MemoryMapping", "check_replaced_size"]

MAX_REPLACED_BYTES: Final = 1_000_000_000  # more memory of a file that is no longer at its path is not sent


@dataclass(frozen=True)
class FileId:
    """The properties by which a file is recognised. The modification time is not one of them: a file that is mapped or
    a database may be written to. On another machine, or in a container with other file systems, every file passes."""

    machine: tuple[str, str]
    device: int
    inode: int
    nbytes: int

    @classmethod
    def of(cls, path: str) -> FileId:
        """Return the identity of the file that is now at `path`; raise OSError if there is none."""
        status = os.stat(path)
        return cls(_machine(), status.st_dev, status.st_ino, status.st_size)

    def check(self, path: str) -> None:
        """Raise a `DecodeError` if another file is now at `path`, or if the file is smaller than it was."""
        current = FileId.of(path)
        if current.machine != self.machine:
            return
        if (current.device, current.inode) != (self.device, self.inode):
            problem = "it was replaced by another file after the dataset was created"
        elif current.nbytes < self.nbytes:
            problem = f"it was cut from {self.nbytes:,} to {current.nbytes:,} bytes after the dataset was created"
        else:
            return
        raise decode_error_at(path, f"{problem}; create the dataset again when the file is complete")


@functools.cache
def _machine() -> tuple[str, str]:
    """Return what identifies this machine until it is restarted, and the file systems that this process sees."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/mnt")


class MemoryMapping(NamedTuple):
    """A mapping of this process: its first address, the address after the last, and the file's first address."""

    start: int
    end: int
    file_start: int
    permissions: str
    inode: int
    path: str


class FileMappings:
    """The mappings of this process at the time when this object is created, which takes a few milliseconds."""

    def __init__(self) -> None:
        self._mappings: list[MemoryMapping] = []  # in the order of their addresses
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps:
                span, permissions, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
                start, end = (int(word, 16) for word in span.split("-"))
                file_start = start - int(offset, 16)
                name = path[0] if path else ""
                self._mappings.append(MemoryMapping(start, end, file_start, permissions, int(inode), name))

    def find(self, address: int) -> MemoryMapping | None:
        """Return the mapping that contains an address."""
        index = bisect.bisect_right(self._mappings, address, key=lambda mapping: mapping.start) - 1
        return self._mappings[index] if index >= 0 and address < self._mappings[index].end else None

    def identify(self, path: str, address: int) -> FileId | None:
        """Return the identity of the file at `path`, which the memory at `address` maps; None if the file has been
        replaced or deleted since it was mapped."""
        try:
            file_id = FileId.of(path)
            mapping = self.find(address)
            if mapping is None or not mapping.inode or mapping.inode == file_id.inode:
                return file_id
            # Some file systems (overlayfs, btrfs) have other numbers in the list of mappings than in `stat`. So map the
            # file that is at the path now, and compare the numbers in the list.
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ) as probe:
                again = FileMappings().find(np.frombuffer(probe, np.uint8).__array_interface__["data"][0])
        except (OSError, ValueError):  # no such file, or an empty one
            return None
        return file_id if again is not None and again.inode == mapping.inode else None


def check_replaced_size(path: str, nbytes: int) -> None:
    """Check the size of memory that is sent to workers because its file is no longer at its path.

    Raises:
        ValueError: there are too many bytes.
    """
    if nbytes > MAX_REPLACED_BYTES:
        raise ValueError(
            f"{path!r} was replaced or deleted after it was mapped, so workers cannot open it, and its {nbytes:,} "
            f"bytes are more than the {MAX_REPLACED_BYTES:,} that are sent instead"
        )
