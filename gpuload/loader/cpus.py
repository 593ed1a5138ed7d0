"""How many CPUs this process may use, and how much memory it may lock. Nothing is cached."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "cpus_of_rank", "default_workers", "usable_cpus"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a process may use.

    Attributes:
        cpus: CPUs, by its affinity and its control group.
        memlock_bytes: memory that it may lock (``ulimit -l``); None: no limit, or not known.
    """

    cpus: int
    memlock_bytes: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """Ask the system what this process may use."""
        try:
            import resource

            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            memlock = None if limit == resource.RLIM_INFINITY else limit
        except (ImportError, OSError, ValueError):
            memlock = None
        return cls(usable_cpus(), memlock)


def usable_cpus(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """CPUs by the affinity mask and by the CPU quota of the control groups (version 2 and 1), at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [affinity]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            folder = cgroup_root / relative
            while True:  # any ancestor's quota counts
                quotas.append(_quota_v2(folder / "cpu.max"))
                if folder == cgroup_root or cgroup_root not in folder.parents:
                    break
                folder = folder.parent
        elif "cpu" in controllers.split(","):
            quotas.extend(_quota_v1(cgroup_root / "cpu" / folder) for folder in (relative, ""))
    return max(1, min(quota for quota in quotas if quota))


def default_workers(cpus: int, local_ranks: int) -> int:
    """`num_workers=None`: the CPUs that this machine's ranks leave, shared between them, at least 1."""
    return max(1, (cpus - local_ranks) // local_ranks)


def cpus_of_rank(cpus: int, local_ranks: int) -> int:
    """A rank's share of the CPUs, at least 1."""
    return max(1, cpus // local_ranks)


def _quota_v2(file: Path) -> int:
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return 0
    return 0 if quota == "max" else math.ceil(int(quota) / int(period))


def _quota_v1(folder: Path) -> int:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return 0
    return math.ceil(quota / period) if quota > 0 and period > 0 else 0
