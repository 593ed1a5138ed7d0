"""The memory usage of a process, with shared pages counted proportionally, from Linux's /proc."""

from __future__ import annotations

from pathlib import Path

__all__ = ["proportional_mb", "shared_mb"]


def proportional_mb(pid: int) -> float:
    """Return the PSS in MB (private pages plus a proportional share of the shared pages); 0 if the process has
    ended."""
    return _kilobytes(pid, "Pss:") / 1024


def shared_mb(pid: int) -> float:
    """Return the part of `proportional_mb` in shared memory: rings, batches in flight. 0 if the process has ended."""
    return _kilobytes(pid, "Pss_Shmem:") / 1024


def _kilobytes(pid: int, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
