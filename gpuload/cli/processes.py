"""The CPU time of a tree of processes, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_seconds", "tree"]

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (the state) on, or None if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the name, in parentheses, can contain spaces and parentheses


def tree(root_pid: int) -> list[int]:
    """Return the ids of a process and all its living descendants; `root_pid` comes first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    pids = [root_pid]
    for pid in pids:
        pids.extend(children.get(pid, []))
    return pids


def cpu_seconds(root_pid: int) -> float:
    """Return the user and system time of the process and its descendants so far, including children that have ended
    and were waited for."""
    ticks = 0
    for pid in tree(root_pid):
        if fields := _stat_fields(pid):
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks * TICK_S
