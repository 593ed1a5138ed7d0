"""Processors, memory, files and processes, in set-ups that lack them; some of the limits are really set."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuload.cli.doctor import machine
from gpuload.cli.doctor.finding import summary
from gpuload.loader.limits import descriptors_left, usable_cpus

MB = 1_000_000


def test_cpus_by_mask_and_by_quota() -> None:
    assert machine.cpus(usable=8, affinity=8, online=8).found == "8 CPUs for this process"
    found = machine.cpus(usable=2, affinity=4, online=8)
    assert found.state == "works"
    assert found.found == (
        "2 CPUs for this process; the affinity mask allows 4 of 8; the CPU quota of the control group allows 2"
    )


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_one_core_is_named(one_core: None) -> None:
    found = machine.cpus(usable=usable_cpus(), affinity=len(os.sched_getaffinity(0)), online=8)
    assert found.state == "improve"
    assert "What holds it back most is CPUs: 1 CPU for this process" in summary([found])
    assert "the affinity mask allows 1 of 8" in found.found
    assert "taskset -c" in found.mend


def container(root: Path, limit: int, use: int) -> str:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/memory.max": f"{limit}\n",
        "sys/fs/cgroup/job/memory.current": f"{use}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("limit", "workers", "state", "text"),
    [
        (9000, 7, "works", "8.5 GB free before the limit of the control group"),
        (1500, 7, "improve", "1 GB free before the limit of the control group, little for batches and decoded images"),
        (700, 7, "broken", "200 MB free before the limit of the control group, but 7 workers (the default here) take"),
        (700, 1, "improve", "1 worker (the default here) take about 45 MB"),
    ],
)
def test_a_small_control_group(tmp_path: Path, limit: int, workers: int, state: str, text: str) -> None:
    root = container(tmp_path, limit * MB, 500 * MB)
    found = machine.memory(workers=workers, available_bytes=64_000 * MB, root=root)
    assert found.state == state
    assert text in found.found
    assert ("docker run --memory" in found.mend) == (state != "works")


def test_a_machine_that_is_full(tmp_path: Path) -> None:
    root = container(tmp_path, 9000 * MB, 500 * MB)
    found = machine.memory(workers=7, available_bytes=100 * MB, root=root)
    assert (found.state, found.found[:26]) == ("broken", "100 MB free on the machine")
    assert machine.memory(workers=7, available_bytes=None, root=str(tmp_path / "none")).found == "no limit is known"


@pytest.fixture
def few_files() -> Iterator[int]:
    """About 30 descriptors are left: how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = descriptors_left()
    assert left is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - left + 30, hard))
    now = descriptors_left()
    assert now is not None
    yield now
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_open_files_are_named(few_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert machine.open_files(workers=1, soft=soft, hard=hard).state == "works"
    found = machine.open_files(workers=7, soft=soft, hard=hard)
    assert found.state == "broken"
    assert found.found == f"{few_files} more may be opened, of {soft:,} (ulimit -n): too few for 7 workers"
    assert found.mend == f"ulimit -n {hard}"
    assert "administrator" in machine.open_files(workers=7, soft=soft, hard=soft).mend
    assert machine.open_files(workers=7, soft=None, hard=None).found == "no limit"


def test_few_processes() -> None:
    assert machine.processes(left=None, workers=8).state == "works"
    assert machine.processes(left=500, workers=8).state == "works"
    found = machine.processes(left=20, workers=8)
    assert (found.state, found.mend) == ("broken", "a higher limit: ulimit -u, docker run --pids-limit")


def test_shared_memory_is_never_needed() -> None:
    small, large = machine.shared_memory(total_bytes=64 << 20), machine.shared_memory(total_bytes=8 << 30)
    assert small.found == "64 MB; gpuload does not use it. It is small for torch's DataLoader, which does"
    assert large.found == "8 GB; gpuload does not use it"
    assert {small.state, large.state, machine.shared_memory(total_bytes=None).state} == {"not needed"}


def test_the_system() -> None:
    fine = machine.system(version="0.1.0", kernel="6.1", page_bytes=65536, python="3.13.0")
    assert (fine.state, fine.found) == ("works", "gpuload 0.1.0, kernel 6.1, pages of 64 KB, Python 3.13.0")
    assert (
        machine.system(version="0.1.0", kernel="6.1", page_bytes=4096, python="3.13", problem="no Linux").state
        == "broken"
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (65536, "64 KB"), (8 << 20, "8 MB"), (1_500_000_000, "1.5 GB"),
     (34_359_738_368, "32 GB"), (2_000_000, "2 MB"), (25_270_000_000, "25 GB")],
)  # fmt: skip
def test_sizes_read_as_people_write_them(nbytes: int, text: str) -> None:
    assert machine.size_of(nbytes) == text
