"""The page cache: emptied of a benchmark's files before a cold epoch; and how much came from the disk after all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from gpuload.cli.processes import tree

__all__ = ["Drop", "best_drop", "bytes_from_disk", "drop"]

Drop = Literal["kernel", "files"]
DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")


def best_drop() -> Drop:
    """The surest way that is allowed: the kernel's own, for root, which empties the whole machine's page cache; else
    one file after the other."""
    return "kernel" if os.access(DROP_CACHES, os.W_OK) else "files"


def drop(base: Path, how: Drop) -> None:
    """Take all files below a folder out of the page cache. Pages that somebody has mapped stay."""
    os.sync()
    if how == "kernel":
        DROP_CACHES.write_text("1")
        return
    for folder, _, names in os.walk(base):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def bytes_from_disk() -> int:
    """What this process and its living descendants have had read from disks so far."""
    total = 0
    for pid in tree(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return total
