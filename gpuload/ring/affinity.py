"""On which CPUs threads run. In the main process: for a moment, so that new memory or a new process is near a device.

Memory lies on the NUMA node of the CPU that first touches it, and page-locking touches it. A process begins on the CPUs
of the thread that starts it. So both need no right of their own, which `mbind` does: containers refuse that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

__all__ = ["cpu_list", "cpus_in", "move", "running_on"]


def cpus_in(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: ``"0-3,8"``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpu_list(cpus: Iterable[int]) -> str:
    """Return the list of these CPUs as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


@contextlib.contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """A context in which the calling thread runs on these CPUs; afterwards it runs where it did before. With no CPUs,
    or ones that the system refuses, it stays where it is. A process or thread that it starts in the context keeps
    them."""
    before: set[int] = set()
    if cpus:
        with contextlib.suppress(OSError):
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if before:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)


def move(pids: Iterable[int], cpus: frozenset[int]) -> None:
    """Let all threads of these processes run on these CPUs; none: on those of the calling thread."""
    there = cpus or os.sched_getaffinity(0)
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), there)
