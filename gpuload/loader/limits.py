"""The machine's limits for a loader (CPUs, open files, processes, memory), and the CPUs near its GPU.

Reaching a limit in the middle of an epoch causes an `OSError` in some library, or kills a process without a message.
Therefore the limits are checked first, and a `LimitError` says, with figures, which limit would be exceeded.

On a machine with several NUMA nodes, workers are placed on the CPUs of the GPU's node, and the ring in the memory of
that node. docs/tuning.md lists the exceptions.

This module runs in the main process. It caches nothing, since limits and usage change with every file and every batch.
A missing or implausible figure counts as no limit: a guess must never stop a program that would have run. Where a
function takes `root`, it is the folder used as ``/``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuload.errors import LimitError
from gpuload.workers import fork_server
from gpuload.workers.pool import count_pools_and_workers

__all__ = [
    "SPARE_DESCRIPTORS",
    "START_DESCRIPTORS",
    "WORKER_BYTES",
    "WORKER_DESCRIPTORS",
    "Placement",
    "available_bytes",
    "check_descriptors",
    "check_memory",
    "check_processes",
    "check_workers",
    "control_groups",
    "count_numa_nodes",
    "default_workers",
    "descriptors_left",
    "find_numa_node",
    "find_placement",
    "lockable_bytes",
    "memory_left_bytes",
    "processes_left",
    "usable_cpus",
]

# A `WorkerPool` needs a queue (2), an epoll, the job, the board and the ring (2 each, since Python's mmap duplicates
# the descriptor), and the template's socket, lifeline, pidfd, stack file and status pipe.
POOL_DESCRIPTORS = 13
# The fork server, which all pools share, needs a socket, a lifeline, a pidfd and a stack file.
SERVER_DESCRIPTORS = 4
# Each worker needs its reply socket, its lifeline, its pidfd, the file for its stacks, and the pipe for its status.
WORKER_DESCRIPTORS = 5
# While a worker starts, before it has a pidfd, it needs its ends of the socket and the lifeline, /dev/null, and the
# pipe for a failed exec (2).
START_DESCRIPTORS = 4
SPARE_DESCRIPTORS = 8  # for files that are open briefly, such as imported modules and libraries

# A worker with the JPEG decoder and without torch has 47 to 51 MB resident: 19 MB of private memory, plus shared pages
# of libraries. With large images or other decoders, private memory soon grows to this size.
WORKER_BYTES = 45 * 1000 * 1000

# The files of a control group with its limit and usage, and the kinds of memory that can be reclaimed, by version.
PROCESS_FILES = {"cgroup2": ("pids.max", "pids.current"), "cgroup": ("pids.max", "pids.current")}
MEMORY_FILES = {
    "cgroup2": ("memory.max", "memory.current"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
RECLAIMABLE = {
    "cgroup2": ("inactive_file", "active_file", "slab_reclaimable"),
    "cgroup": ("total_inactive_file", "total_active_file"),
}
_UNLIMITED = 1 << 60  # version 1 represents "no limit" by the largest multiple of the page size below 2**63

DEVICES = "sys/bus/pci/devices"
DISPLAY, ACCELERATOR = "0x03", "0x12"  # PCI device classes of GPUs


# -- CPUs -------------------------------------------------------------------------------------------------------------


def usable_cpus(root: str = "/") -> int:
    """Return the number of CPUs that the affinity mask and the control groups' quotas allow, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_cpu_quota(folder, version) for folder, version in control_groups(root, "cpu")]
    return max(1, min([affinity, *filter(None, quotas)]))


def _cpu_quota(folder: str, version: str) -> int | None:
    if version == "cgroup2":
        quota, _, period = _read(f"{folder}/cpu.max").partition(" ")
    else:
        quota, period = _read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us")
    quota_us, period_us = _parse_number(quota), _parse_number(period)  # "max" or -1 means no quota
    return math.ceil(quota_us / period_us) if quota_us and period_us else None


def default_workers(cpus: int, local_ranks: int) -> int:
    """Return the default `num_workers`: this rank's share of the CPUs that the ranks themselves do not need, at least
    1."""
    return max(1, (cpus - local_ranks) // local_ranks)


# -- open files and processes -----------------------------------------------------------------------------------------


def descriptors_left() -> int | None:
    """Return how many more files this process may open (the soft limit minus open files); None if unknown."""
    limit = _limits_of("RLIMIT_NOFILE")[0]
    if limit is None:
        return None
    try:
        # The limit bounds the descriptors' numbers, not their count. Descriptors with larger numbers, which stay open
        # if the limit is lowered later, do not count.
        in_use = sum(int(name) < limit for name in os.listdir("/proc/self/fd"))
    except (OSError, ValueError):
        return None
    return max(0, limit - in_use + 1)  # listdir itself had one descriptor open


def check_workers(workers: int) -> None:
    """Raise a LimitError if this many worker processes can never start here, because they need more descriptors or
    processes than would be left if all Loaders of this process were closed. `check_descriptors` checks again when
    workers start."""
    if workers:
        pool_count, worker_count = count_pools_and_workers()
        check_descriptors(workers, releasable=POOL_DESCRIPTORS * pool_count + WORKER_DESCRIPTORS * worker_count)
        check_processes(workers, releasable=pool_count + worker_count)


def check_descriptors(workers: int, *, releasable: int = 0) -> None:
    """Raise a LimitError, with figures and advice, if there are too few free file descriptors for worker processes.
    `releasable` descriptors are in use but count as free."""
    others = POOL_DESCRIPTORS + START_DESCRIPTORS + SPARE_DESCRIPTORS
    others += 0 if fork_server.is_running() else SERVER_DESCRIPTORS
    required = others + WORKER_DESCRIPTORS * workers
    free = descriptors_left()
    if free is None or required <= free + releasable:
        return
    soft, hard = _limits_of("RLIMIT_NOFILE")
    maximum = "no limit" if hard is None else f"{hard:,}"
    raise LimitError(
        f"num_workers={workers} needs {required:,} file descriptors in this process ({WORKER_DESCRIPTORS} per worker "
        f"and {others} others), but only {free:,} of the {soft:,} that it may have "
        "open are left. Use fewer workers, close files, or raise the limit: `ulimit -n` in the shell, or "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, …) in the program (hard limit: {maximum})"
    )


def processes_left(root: str = "/") -> tuple[int, str] | None:
    """Return how many more processes and threads may be started, and what limits them; None means no limit.

    The limit is the smaller of RLIMIT_NPROC minus the user's tasks (which does not apply to root), and the number
    that the control groups (pids, versions 2 and 1) still allow.
    """
    remaining = []
    limit = _limits_of("RLIMIT_NPROC")[0]
    if limit is not None and os.geteuid() != 0:
        with contextlib.suppress(OSError):
            name = f"the {limit:,} that this user may have (RLIMIT_NPROC, `ulimit -u`)"
            remaining.append((max(0, limit - _count_tasks(os.getuid(), root)), name))
    for limit, usage, folder, _ in _limited_groups(root, "pids", PROCESS_FILES):
        remaining.append((max(0, limit - usage), f"the {limit:,} that the control group {folder} may have (pids.max)"))
    return min(remaining, default=None)


def _count_tasks(user: int, root: str) -> int:
    """Count the threads of all of a user's processes."""
    count = 0
    for entry in os.scandir(os.path.join(root, "proc")):
        with contextlib.suppress(OSError):  # the process has ended
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += os.stat(f"{entry.path}/task").st_nlink - 2
    return count


def check_processes(workers: int, *, releasable: int = 0, root: str = "/") -> None:
    """Raise a LimitError if this many workers, their template and, if there is none yet, the fork server may not be
    started. `releasable` processes are running but count as ended."""
    remaining, required = processes_left(root), workers + 1 + (not fork_server.is_running())
    if remaining is not None and required > remaining[0] + releasable:
        raise LimitError(
            f"num_workers={workers} needs {required} processes, but only {remaining[0]:,} are left of "
            f"{remaining[1]}. Use fewer workers, end other programs, or raise the limit"
        )


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_left_bytes(root: str = "/") -> int | None:
    """Return how much more memory this process may use before a control group (version 2 or 1) reaches its limit.

    This is the minimum of limit − usage + reclaimable memory over its group and all ancestors; None means no limit.
    File pages are reclaimable, both in the kernel's inactive list and in its active list, which holds files that were
    read twice (after the first epoch, the dataset). Shared memory, such as the ring, is in neither list, since no file
    backs it. Memory that could be swapped out does not count.
    """
    tightest_group = _tightest_group(root)
    return None if tightest_group is None else tightest_group[0]


def available_bytes(root: str = "/") -> int | None:
    """Return how much more memory this process may use: the machine's free memory or the memory that the control group
    has left, whichever is less; None if unknown."""
    lines = _read(os.path.join(root, "proc/meminfo")).splitlines()
    machine_bytes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group_bytes = memory_left_bytes(root)
    return min([*machine_bytes, *([] if group_bytes is None else [group_bytes])], default=None)


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock (``ulimit -l``); None means no limit or unknown."""
    return _limits_of("RLIMIT_MEMLOCK")[0]


def check_memory(*, workers: int, output_bytes: int, root: str = "/") -> None:
    """Raise a LimitError, with figures and advice, if the control group has too little memory left to begin.

    The size of decoded images is still unknown, so the ring checks again as it grows.

    Args:
        workers: the number of processes to start.
        output_bytes: the memory, outside the ring, of one batch as it is yielded.
    """
    tightest_group = _tightest_group(root)
    required_bytes = workers * WORKER_BYTES + output_bytes
    if tightest_group is None or required_bytes <= tightest_group[0]:
        return
    left_bytes, limit_bytes, folder = tightest_group
    raise LimitError(
        f"at least {_mb(required_bytes)} of memory is needed ({workers} workers of about {_mb(WORKER_BYTES)}, "
        f"{_mb(output_bytes)} for an output batch), but the control group {folder} has {_mb(left_bytes)} left of its "
        f"limit of {_mb(limit_bytes)}. Use fewer workers or a smaller batch_size, or raise the limit of the container "
        "or job"
    )


def _tightest_group(root: str) -> tuple[int, int, str] | None:
    """Return the remaining bytes, the limit and the folder of the control group with the least memory left; None if no
    group has a limit."""
    groups = []
    for limit, usage, folder, version in _limited_groups(root, "memory", MEMORY_FILES):
        entries = (line.partition(" ") for line in _read(f"{folder}/memory.stat").splitlines())
        reclaimable = sum(_parse_number(value) or 0 for name, _, value in entries if name in RECLAIMABLE[version])
        groups.append((max(0, limit - usage + reclaimable), limit, folder))
    return min(groups, default=None)


# -- placement near the GPU -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The placement of a loader's workers and ring.

    Attributes:
        device: the GPU; node: its NUMA node, if the ring is placed there.
        cpus: the CPUs of that node that this process may use; empty if nothing is placed.
        max_workers: the maximum number of workers to place there, so that each has a CPU even if every rank near that
            node has this many workers.
        reason: why nothing is placed.
    """

    device: str = ""
    node: int = -1
    cpus: frozenset[int] = frozenset()
    max_workers: int = 0
    reason: str = ""

    def cpus_for(self, workers: int) -> frozenset[int]:
        """Return the CPUs to run this many workers on; empty means all CPUs that this process may use."""
        return self.cpus if workers <= self.max_workers else frozenset()

    def describe(self, workers: int) -> str:
        """Describe the placement; "" if there is nothing to place."""
        if not self.cpus:
            return self.reason
        node, count = f"NUMA node {self.node}, near {self.device}", len(self.cpus)
        ring_text = f"ring in the memory of {node}"
        if not workers:
            return ring_text
        if self.cpus_for(workers):
            return f"workers on CPUs {format_cpu_list(self.cpus)}, {ring_text}"
        share_note = "" if self.max_workers == count else f", of which {self.max_workers} are for this rank"
        return f"{ring_text}; {workers} workers run on all CPUs, since that node has only {count}{share_note}"


def find_placement(
    address: str, *, device: str, ranks: int, allowed: Set[int] | None = None, root: str = "/"
) -> Placement:
    """Decide where to place the workers of a GPU, based on ``/sys`` and without starting anything.

    Args:
        address: the GPU's PCI address, such as ``"0000:3b:00.0"``.
        device: the GPU's name, for messages.
        ranks: the number of training processes on this machine.
        allowed: the CPUs that this process may use; default: its affinity mask.
    """
    if count_numa_nodes(root) < 2:
        return Placement(reason="one NUMA node: nothing to place")
    node, cpus = find_numa_node(address, root)
    if node < 0:
        return Placement(reason=f"the NUMA node of {device} ({address}) is unknown: nothing is placed")
    default_cpus, allowed = _default_cpus(root), os.sched_getaffinity(0) if allowed is None else allowed
    if default_cpus - allowed:
        return Placement(
            reason=f"this process is restricted to {len(allowed)} of {len(default_cpus)} CPUs, and so are its workers; "
            f"{device} is near NUMA node {node}"
        )
    near_cpus = parse_cpu_list(cpus) & allowed
    if not near_cpus:
        return Placement(reason=f"this process may use no CPU near {device}, on NUMA node {node}: nothing is placed")
    if near_cpus == allowed:
        return Placement(reason=f"all CPUs that this process may use are near {device}, on NUMA node {node}")
    return Placement(device, node, near_cpus, len(near_cpus) // _max_ranks_near(root, address, node, ranks))


def find_numa_node(address: str | None, root: str = "/") -> tuple[int, str]:
    """Return the NUMA node of a PCI device, -1 if unknown, and the node's CPUs in the kernel's format."""
    folder = os.path.join(root, DEVICES, str(address))
    node = _parse_number(_read(f"{folder}/numa_node"))
    return -1 if node is None else node, _read(f"{folder}/local_cpulist")


def count_numa_nodes(root: str = "/") -> int:
    """Return how many NUMA nodes the machine has, at least 1."""
    return max(1, len(parse_cpu_list(_read(os.path.join(root, "sys/devices/system/node/online")))))


def _default_cpus(root: str) -> frozenset[int]:
    """Return the CPUs that this process has by default, without an affinity mask: the CPUs of its control group."""
    for folder, version in control_groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective",) if version == "cgroup2" else ("cpuset.effective_cpus", "cpuset.cpus"):
            if cpus := parse_cpu_list(_read(f"{folder}/{name}")):
                return cpus
    return parse_cpu_list(_read(os.path.join(root, "sys/devices/system/cpu/online")))


def _max_ranks_near(root: str, address: str, node: int, ranks: int) -> int:
    """Return the maximum number of ranks on this machine whose GPU is near a node: one per GPU there, or more if there
    are more ranks than GPUs."""
    devices = os.path.join(root, DEVICES)
    vendor = _read(f"{devices}/{address}/vendor")
    nodes = []
    for other_address in os.listdir(devices):
        is_gpu = _read(f"{devices}/{other_address}/class").startswith((DISPLAY, ACCELERATOR))
        if is_gpu and _read(f"{devices}/{other_address}/vendor") == vendor:
            nodes.append(find_numa_node(other_address, root)[0])
    return max(1, min(ranks, nodes.count(node) * -(-ranks // max(1, len(nodes)))))


# -- control groups and files -----------------------------------------------------------------------------------------


def control_groups(root: str, controller: str) -> Iterator[tuple[str, str]]:
    """Yield the folder and version ("cgroup2", or "cgroup" for version 1) of this process's groups for a controller,
    from its own group up to the topmost visible one."""
    mounts = list(_mounts(root, controller))
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/") or (controllers and controller not in controllers.split(",")):
            continue
        version, group = "cgroup" if controllers else "cgroup2", PurePosixPath(path)
        controller_mounts = [(base, point) for mount_version, base, point in mounts if mount_version == version]
        controller_mounts = controller_mounts or [
            ("/", f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup")
        ]
        # In a container, the group may be outside the mounts; the mount itself is then the container's group.
        point, subfolders = controller_mounts[0][1], ()
        if ".." not in group.parts:
            candidates = (
                (point, group.relative_to(base).parts)
                for base, point in controller_mounts
                if group.is_relative_to(base)
            )
            point, subfolders = next(candidates, (point, subfolders))
        for depth in range(len(subfolders), -1, -1):  # the limits of all ancestors apply
            yield os.path.join(root, point, *subfolders[:depth]), version


def _mounts(root: str, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield the version, group and folder (relative to the root) of each mount that has a controller."""
    for line in _read(os.path.join(root, "proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        fields, type_fields = before.split(" "), after.split(" ")
        if type_fields[0] in ("cgroup", "cgroup2") and len(fields) >= 5:
            base, point = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields[3:5])
            if type_fields[0] == "cgroup2" or controller in type_fields[-1].split(","):
                yield type_fields[0], base, point.lstrip("/")


def _limited_groups(
    root: str, controller: str, names: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[int, int, str, str]]:
    """Yield the limit, usage, folder and version of each group that has a limit. `names` maps each version to the names
    of the two files."""
    for folder, version in control_groups(root, controller):
        limit, usage = (_parse_number(_read(f"{folder}/{name}")) for name in names[version])
        if limit is not None and limit < _UNLIMITED and usage is not None:
            yield limit, usage, folder, version


def _read(path: str) -> str:
    """Return a file's text without surrounding white space; "" if the file cannot be read."""
    # Most of these files do not exist. Check first instead of handling the error, since the traceback of a Ctrl-C
    # during error handling would also show the handled error.
    if not os.access(path, os.R_OK):
        return ""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return os.fsdecode(file.read()).strip()
    return ""


def _parse_number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _limits_of(name: str) -> tuple[int | None, int | None]:
    """Return the soft and hard limits of this process for a resource; None means no limit or unknown."""
    try:
        soft, hard = resource.getrlimit(getattr(resource, name))
    except (OSError, ValueError):
        return None, None
    infinity = resource.RLIM_INFINITY
    return None if soft == infinity else soft, None if hard == infinity else hard


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list in the kernel's format, such as ``"0-3,8"``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format CPUs as a list in the kernel's format."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
