"""What the machine, container or job allows: processors, memory, open files, processes. Imports no torch."""

from __future__ import annotations

from typing import Final

from gpuload.cli.console import count_of
from gpuload.cli.doctor.finding import Finding
from gpuload.errors import LimitError
from gpuload.loader.limits import WORKER_BYTES, check_descriptors, check_memory, descriptors_left, memory_left_bytes

__all__ = ["cpus", "memory", "open_files", "processes", "shared_memory", "size_of", "system"]

LITTLE_BYTES: Final = 1_000_000_000  # beside the workers: decoded pixels on their way, and batches
SMALL_SHM_BYTES: Final = 1 << 30
THREADS: Final = 32  # of a worker and this process together, while their libraries start


def cpus(*, usable: int, affinity: int, online: int) -> Finding:
    """The processors: `usable` by affinity mask and CPU quota, of those `affinity` allows, of those `online`."""
    limits = [f"the affinity mask allows {affinity} of {online}"] if affinity < online else []
    limits += [f"the CPU quota of the control group allows {usable}"] if usable < affinity else []
    found = "; ".join([f"{count_of(usable, 'CPU')} for this process", *limits])
    if usable > 1:
        return Finding("CPUs", "works", found)
    return Finding(
        "CPUs",
        "improve",
        f"{found}. Workers read and decode on the CPU, and have to share it with the training loop",
        "more CPUs for the process: taskset -c, docker run --cpus, Kubernetes limits.cpu, Slurm --cpus-per-task",
    )


def memory(*, workers: int, available_bytes: int | None, root: str = "/") -> Finding:
    """Memory: what the control group leaves, and what the machine has free. `root` is the folder used as ``/``."""
    mend = "a higher memory limit (docker run --memory, Kubernetes limits.memory, Slurm --mem), or fewer workers"
    left = memory_left_bytes(root)
    known = [nbytes for nbytes in (left, available_bytes) if nbytes is not None]
    if not known:
        return Finding("memory", "works", "no limit is known")
    least = min(known)
    where = "before the limit of the control group" if least == left else "on the machine"
    found = f"{size_of(least)} free {where}"
    try:
        check_memory(workers=workers, output_bytes=0, root=root)
        enough = least >= workers * WORKER_BYTES
    except LimitError:
        enough = False
    needs = f"{count_of(workers, 'worker')} (the default here) take about {size_of(workers * WORKER_BYTES)}"
    if not enough:
        return Finding("memory", "broken", f"{found}, but {needs}", mend)
    if least < workers * WORKER_BYTES + LITTLE_BYTES:
        return Finding("memory", "improve", f"{found}, little for batches and decoded images; {needs}", mend)
    return Finding("memory", "works", found)


def open_files(*, workers: int, soft: int | None, hard: int | None) -> Finding:
    """Descriptors: what this process may still open; `soft` and `hard` limits, None for none."""
    left = descriptors_left()
    if left is None or soft is None:
        return Finding("open files", "works", "no limit")
    found = f"{left:,} more may be opened, of {soft:,} (ulimit -n)"
    try:
        check_descriptors(workers)
    except LimitError:
        most = "unlimited" if hard is None else str(hard)
        raised = f"ulimit -n {most}" if hard is None or hard > soft else "a higher hard limit, by the administrator"
        return Finding("open files", "broken", f"{found}: too few for {count_of(workers, 'worker')}", raised)
    return Finding("open files", "works", found)


def processes(*, left: int | None, workers: int) -> Finding:
    """Processes and threads: how many more may be started; None for no limit."""
    if left is None:
        return Finding("processes", "works", "no limit")
    found = f"{left:,} more processes and threads may be started"
    if left < workers + THREADS:
        return Finding(
            "processes",
            "broken",
            f"{found}: too few for {count_of(workers, 'worker')} and their libraries",
            "a higher limit: ulimit -u, docker run --pids-limit",
        )
    return Finding("processes", "works", found)


def shared_memory(*, total_bytes: int | None) -> Finding:
    """``/dev/shm``, which gpuload does not use and torch's DataLoader does."""
    if total_bytes is None:
        return Finding("/dev/shm", "not needed", "there is none; gpuload does not use it, torch's DataLoader does")
    found = f"{size_of(total_bytes)}; gpuload does not use it"
    if total_bytes < SMALL_SHM_BYTES:
        found += ". It is small for torch's DataLoader, which does"
    return Finding("/dev/shm", "not needed", found)


def system(*, version: str, kernel: str, page_bytes: int, python: str, problem: str = "") -> Finding:
    """Kernel, page size and interpreter; `problem`: why workers cannot be processes here."""
    found = f"gpuload {version}, kernel {kernel}, pages of {size_of(page_bytes)}, Python {python}"
    if problem:
        return Finding("system", "broken", f"{found}; {problem}", "use num_workers=0, or Linux with glibc")
    return Finding("system", "works", found)


def size_of(nbytes: float) -> str:
    """``64 KB``, ``1.5 GB``: thousands, as disks and docker count; powers of two where they are exact."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= factor:
            binary = factor.bit_length() // 10 * 10
            exact = nbytes / (1 << binary)
            number = exact if exact == int(exact) else nbytes / factor
            return f"{number:,.0f} {unit}" if number >= 10 or number == int(number) else f"{number:.1f} {unit}"
    return f"{nbytes:,.0f} bytes"
