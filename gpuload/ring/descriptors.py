"""File descriptors that keep away from the standard streams. Runs in the main process; holds nothing.

A program may start with descriptors 0, 1 or 2 closed (cron, daemons), and the system gives out the lowest free number:
the ring would become descriptor 1, and what a worker prints would be written into pixels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["is_inherited", "standard_streams_taken"]


@contextlib.contextmanager
def standard_streams_taken() -> Iterator[None]:
    """A context in which no new descriptor is 0, 1 or 2; afterwards those that were closed are closed again."""
    taken: list[int] = []
    try:
        while not all(map(_is_open, range(3))):
            taken.append(os.open(os.devnull, os.O_RDWR))
        yield
    finally:
        for fd in taken:
            os.close(fd)


def is_inherited(fd: int) -> bool:
    """Whether a program that this process starts gets this descriptor."""
    return _is_open(fd) and os.get_inheritable(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
