"""The open file descriptors of a process, for tests that descriptors are closed.

Their number alone says nothing: garbage of other tests can be collected meanwhile, and a connection pool closes idle
connections in its own thread.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["descriptors", "open_below", "open_of"]


def descriptors(pid: int | str = "self") -> set[tuple[int, str]]:
    """Return all descriptors with their link targets. Those only in a later set were opened since, and not closed."""
    links_by_number = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of listdir itself
            links_by_number.add((int(number), os.readlink(f"/proc/{pid}/fd/{number}")))
    return links_by_number


def open_below(folder: Path) -> int:
    """Count the descriptors of files in a folder."""
    return sum(link.startswith(f"{folder.resolve()}/") for _, link in descriptors())


def open_of(file: os.stat_result) -> int:
    """Count the descriptors of this file, which need not have a name."""
    matches = []
    for number, _ in descriptors():
        with contextlib.suppress(OSError):
            matches.append(os.path.samestat(os.fstat(number), file))
    return sum(matches)
