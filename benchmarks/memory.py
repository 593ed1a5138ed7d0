"""The memory of a process, with shared pages in proportion, from Linux's /proc."""

from __future__ import annotations

from pathlib import Path

__all__ = ["proportional_mb", "shared_mb"]


def proportional_mb(pid: int) -> float:
    """Return PSS: the process's own pages, and its share of those that several processes map. 0 if it is gone."""
    return _kilobytes(pid, "Pss:") / 1024


def shared_mb(pid: int) -> float:
    """Return the part of `proportional_mb` that is shared memory: rings, and batches on their way. 0 if it is gone."""
    return _kilobytes(pid, "Pss_Shmem:") / 1024


def _kilobytes(pid: int, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
