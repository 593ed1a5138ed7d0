"""What this process has open, for tests of what is closed. Their number alone says nothing: garbage of other tests may
be collected meanwhile, and a pool of connections closes those that were idle for a while, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["descriptors", "open_below", "open_of"]


def descriptors() -> set[tuple[int, str]]:
    """All descriptors, with what each is: what is in a later set alone was opened since, and not closed."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir's own
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def open_below(folder: Path) -> int:
    """How many are of files in a folder."""
    return sum(link.startswith(f"{folder.resolve()}/") for _, link in descriptors())


def open_of(file: os.stat_result) -> int:
    """How many are of this file, which may have no name."""
    found = []
    for number, _ in descriptors():
        with contextlib.suppress(OSError):
            found.append(os.path.samestat(os.fstat(number), file))
    return sum(found)
