"""How much the machine still allows: open files, processes, and memory before the limit of a control group.

A limit that is reached in the middle of an epoch is an `OSError` in some library, or a process that is killed without a
message. So it is checked first, and what does not fit is a `LimitError` with the figures.

Runs in the main process. Nothing is cached, since both change with every file and every batch. A figure that is missing
or makes no sense counts as no limit: a guess must never stop a program that would have run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from gpuload.errors import LimitError
from gpuload.workers.pool import running_workers

__all__ = [
    "WORKER_BYTES",
    "WORKER_DESCRIPTORS",
    "available_bytes",
    "check_descriptors",
    "check_memory",
    "check_processes",
    "check_workers",
    "control_groups",
    "descriptors_left",
    "memory_left_bytes",
    "processes_left",
]

# A `WorkerPool`'s: a queue (2), an epoll, the job, and twice (Python's mmap has its own) the board and the ring.
POOL_DESCRIPTORS = 8
# Each worker: the socket of its replies, its lifeline, its pidfd, the file for its stacks.
WORKER_DESCRIPTORS = 4
# While one is started: its ends of socket and lifeline, /dev/null, the pipe for a failed exec (2), before the pidfd.
START_DESCRIPTORS = 4
SPARE_DESCRIPTORS = 8  # opened for a moment: imported modules, libraries' files

# A worker with the JPEG decoder and no torch has 47 to 51 MB resident: 19 MB of its own, and libraries' pages; large
# images and other decoders soon take the difference.
WORKER_BYTES = 45 * 1000 * 1000

_UNLIMITED = 1 << 60  # version 1 says "none" with the largest multiple of a page below 2**63


def descriptors_left() -> int | None:
    """How many more files this process may open: the soft limit less open files; None if not known."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        # The limit is on numbers, not on how many: a number above it (it was lowered later) does not count.
        taken = sum(int(name) < limit for name in os.listdir("/proc/self/fd"))
    except (ImportError, OSError, ValueError):
        return None
    return max(0, limit - taken + 1)  # one was listdir's own


def check_workers(workers: int) -> None:
    """Raise a LimitError if so many worker processes can never be started here: more descriptors or processes than are
    left, even if all Loaders of this process were closed. When workers start, `check_descriptors` looks again."""
    if workers:
        pools, running = running_workers()
        check_descriptors(workers, spared=POOL_DESCRIPTORS * pools + WORKER_DESCRIPTORS * running)
        check_processes(workers, spared=running)


def check_descriptors(workers: int, *, spared: int = 0) -> None:
    """Raise a LimitError, with figures and advice, if there are too few free file descriptors for worker processes.
    `spared` that are taken count as free."""
    needed = POOL_DESCRIPTORS + WORKER_DESCRIPTORS * workers + START_DESCRIPTORS + SPARE_DESCRIPTORS
    left = descriptors_left()
    if left is None or needed <= left + spared:
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    raise LimitError(
        f"num_workers={workers} takes {needed:,} file descriptors in this process ({WORKER_DESCRIPTORS} for each "
        f"worker, {needed - WORKER_DESCRIPTORS * workers} besides), but {left:,} are left of the {soft:,} that it may "
        "have open. Use fewer workers, close files, or raise the limit: `ulimit -n` in the shell, or "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, …) in the program (hard limit: {most})"
    )


def processes_left(root: str = "/") -> tuple[int, str] | None:
    """How many more processes and threads may be started, and what limits them; None if nothing does.

    The least of RLIMIT_NPROC less the user's own (it does not bind root), and the limits of the control groups (pids,
    version 2 and 1). `root` is the folder used as ``/``.
    """
    found = []
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
            name = f"the {limit:,} that this user may have (RLIMIT_NPROC, `ulimit -u`)"
            found.append((max(0, limit - _tasks_of(os.getuid(), root)), name))
    for folder, _ in control_groups(root, "pids"):
        limit, use = (_number(_read(f"{folder}/pids.{name}")) for name in ("max", "current"))
        if limit is not None and use is not None:
            found.append((max(0, limit - use), f"the {limit:,} that the control group {folder} may have (pids.max)"))
    return min(found, default=None)


def _tasks_of(user: int, root: str) -> int:
    """How many threads all processes of a user have."""
    count = 0
    for entry in os.scandir(os.path.join(root, "proc")):
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += os.stat(f"{entry.path}/task").st_nlink - 2
    return count


def check_processes(workers: int, *, spared: int = 0, root: str = "/") -> None:
    """Raise a LimitError if so many processes may not be started. `spared` that run count as ended."""
    left = processes_left(root)
    if left is not None and workers > left[0] + spared:
        raise LimitError(
            f"num_workers={workers} takes as many processes, but {left[0]:,} more are left of {left[1]}. Use fewer "
            "workers, end other programs, or raise the limit"
        )


def memory_left_bytes(root: str = "/") -> int | None:
    """How much more memory this process may take before a control group (version 2 or 1) is at its limit.

    The least of limit − use + reclaimable memory, over its group and all ancestors; None if there is no limit. Pages of
    files are reclaimable, in both of the kernel's lists: the active one holds files that were read twice, after an
    epoch the dataset. Shared memory, such as the ring, is in neither: it has no file to go back to. Memory that could
    be swapped out does not count. `root` is the folder used as ``/``.
    """
    memory = _tightest(root)
    return None if memory is None else memory.left_bytes


def available_bytes(root: str = "/") -> int | None:
    """How much more memory this process may take: what the machine has free, or the control group leaves; None: not
    known."""
    lines = (_read(os.path.join(root, "proc/meminfo")) or b"").splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith(b"MemAvailable:")]
    left = memory_left_bytes(root)
    return min([*free, *([] if left is None else [left])], default=None)


def check_memory(*, workers: int, output_bytes: int, root: str = "/") -> None:
    """Raise a LimitError, with figures and advice, if the control group has too little memory left to begin.

    The size of decoded images is not known yet; the ring checks again as it grows.

    Args:
        workers: processes that will be started.
        output_bytes: ordinary memory of one finished batch.
        root: the folder used as ``/``.
    """
    memory = _tightest(root)
    needed = workers * WORKER_BYTES + output_bytes
    if memory is None or needed <= memory.left_bytes:
        return
    raise LimitError(
        f"at least {_mb(needed)} of memory are needed ({workers} workers of about {_mb(WORKER_BYTES)}, "
        f"{_mb(output_bytes)} for a finished batch), "
        f"but the control group {memory.folder} has {_mb(memory.left_bytes)} left of its limit of "
        f"{_mb(memory.limit_bytes)}. Use fewer workers or a smaller batch_size, or raise "
        "the limit of the container or job"
    )


class _Memory(NamedTuple):
    left_bytes: int
    limit_bytes: int
    folder: str


class _Files(NamedTuple):
    """The file names of a version of control groups, for memory."""

    limit: str
    use: str
    reclaimable: tuple[bytes, ...]


_VERSIONS = {
    "cgroup2": _Files("memory.max", "memory.current", (b"inactive_file", b"active_file", b"slab_reclaimable")),
    "cgroup": _Files(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        (b"total_inactive_file", b"total_active_file"),
    ),
}


def _tightest(root: str) -> _Memory | None:
    """The group with the least memory left, among those with a limit."""
    found = []
    for folder, version in control_groups(root, "memory"):
        files = _VERSIONS[version]
        limit = _number(_read(f"{folder}/{files.limit}"))
        if limit is None or limit >= _UNLIMITED:
            continue
        use = _number(_read(f"{folder}/{files.use}"))
        if use is not None:
            left = limit - use + _reclaimable(_read(f"{folder}/memory.stat"), files)
            found.append(_Memory(max(0, left), limit, folder))
    return min(found, default=None)


def control_groups(root: str, controller: str) -> Iterator[tuple[str, str]]:
    """The folders of this process's groups for a controller, from its own upwards as far as they are visible; and
    "cgroup2", or "cgroup" for version 1."""
    mounts = _mounts(root, controller)
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or b"").splitlines():
        _, _, rest = os.fsdecode(line).partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/") or (controllers and controller not in controllers.split(",")):
            continue
        version = "cgroup" if controllers else "cgroup2"
        mounted = mounts.get(version) or [("/", f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup")]
        # In a container the group may be outside of the mounted ones: then the mounted one is the container's.
        point, below = next(
            ((point, below) for base, point in mounted if (below := _below(path, base)) is not None),
            (mounted[0][1], ""),
        )
        top = os.path.join(root, point)
        folder = os.path.join(top, below) if below else top
        while True:  # any ancestor's limit counts
            yield folder, version
            if len(folder) <= len(top):
                break
            folder = os.path.dirname(folder)


def _mounts(root: str, controller: str) -> dict[str, list[tuple[str, str]]]:
    """For each version, the mounts: (group, folder relative to the root)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (_read(os.path.join(root, "proc/self/mountinfo")) or b"").splitlines():
        if b" - cgroup" not in line:
            continue
        before, _, after = os.fsdecode(line).partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5 or (kinds[0] == "cgroup" and controller not in kinds[-1].split(",")):
            continue
        base, point = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields[3:5])
        found.setdefault(kinds[0], []).append((base, point.lstrip("/")))
    return found


def _below(path: str, base: str) -> str | None:
    """`path` relative to `base`, or None if it is not in it."""
    inner = path.strip("/").split("/") if path.strip("/") else []
    outer = base.strip("/").split("/") if base.strip("/") else []
    if ".." in inner or inner[: len(outer)] != outer:
        return None
    return "/".join(inner[len(outer) :])


def _reclaimable(stat: bytes | None, files: _Files) -> int:
    total = 0
    for line in (stat or b"").splitlines():
        name, _, value = line.partition(b" ")
        if name in files.reclaimable:
            total += _number(value) or 0
    return total


def _read(path: str) -> bytes | None:
    # Most of them do not exist. Checked first: a ctrl-C while an error is handled would show that error too.
    if not os.access(path, os.R_OK):
        return None
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.read()
    return None


def _number(text: bytes | None) -> int | None:
    text = (text or b"").strip()
    return int(text) if text.isdigit() else None


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
