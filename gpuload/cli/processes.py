"""The cost of a tree of processes, from Linux's /proc: CPU seconds, and memory with shared pages in proportion."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_seconds", "proportional_mb", "shared_mb", "tree"]

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (the state) on, or None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the name, in parentheses, may hold blanks and parentheses


def tree(root_pid: int) -> list[int]:
    """Return the process and all its living descendants, itself first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    pids = [root_pid]
    for pid in pids:
        pids.extend(children.get(pid, []))
    return pids


def cpu_seconds(root_pid: int) -> float:
    """Return the user and system time of the whole tree so far, including children that were waited for."""
    ticks = 0
    for pid in tree(root_pid):
        if fields := _stat_fields(pid):
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks * TICK_S


def proportional_mb(pid: int) -> float:
    """Return PSS: the process's own pages, and its share of those that several processes map. 0 if it is gone."""
    return _kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:") / 1024


def shared_mb(pid: int) -> float:
    """Return the part of `proportional_mb` that is shared memory: rings, and batches on their way. 0 if it is gone."""
    return _kilobytes(f"/proc/{pid}/smaps_rollup", "Pss_Shmem:") / 1024


def _kilobytes(path: str, key: str) -> int:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0
