"""Limits of CPUs, open files, processes and memory, read from simulated control groups; and workers near their GPU.

tests/faults/test_limits.py tests the limits of a real system.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.cpu_device import Device
from loader.affinity_samples import AffinitySamples

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader import limits
from gpuload.loader.limits import (
    Placement,
    check_descriptors,
    check_memory,
    check_processes,
    check_workers,
    default_workers,
    descriptors_left,
    find_placement,
    format_cpu_list,
    lockable_bytes,
    memory_left_bytes,
    parse_cpu_list,
    processes_left,
    usable_cpus,
)
from gpuload.stage import device as devices
from gpuload.stage.transfer import CudaTransfer
from gpuload.workers import fork_server

MB = 1_000_000
# Lines of /proc/self/mountinfo for the versions 2 and 1 of control groups.
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def write_files(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def make_machine(tmp_path: Path):
    """Return a function that writes files of /proc and /sys/fs/cgroup, and returns their root."""

    def make(membership: str | None, mounts: str | None, files: dict[str, str]) -> str:
        write_files(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
        if membership is not None:
            write_files(tmp_path, {"proc/self/cgroup": membership})
        if mounts is not None:
            write_files(tmp_path, {"proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts})
        return str(tmp_path)

    return make


def memory_v2(folder: str, limit: object, use: int, stat: str = "") -> dict[str, str]:
    prefix = f"{folder}/" if folder else ""
    return {
        f"{prefix}memory.max": f"{limit}\n",
        f"{prefix}memory.current": f"{use}\n",
        f"{prefix}memory.stat": stat,
    }


def memory_v1(folder: str, limit: int, use: int, stat: str = "") -> dict[str, str]:
    prefix = f"memory/{folder}/" if folder else "memory/"
    return {
        f"{prefix}memory.limit_in_bytes": f"{limit}\n",
        f"{prefix}memory.usage_in_bytes": f"{use}\n",
        f"{prefix}memory.stat": stat,
    }


FILE_PAGES = (  # of which 20 + 10 + 5 MB are reclaimable
    "anon 1\nfile 90000000\nshmem 60000000\nfile_mapped 7\n"
    "inactive_anon 3\nactive_anon 5\ninactive_file 20000000\nactive_file 10000000\nslab_reclaimable 5000000\n"
)
TOTALS_OF_V1 = "inactive_file 1\ntotal_shmem 50000000\ntotal_inactive_file 20000000\ntotal_active_file 10000000\n"
DOCKER_MOUNT = "35 31 0:32 /docker/3f2 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
POD_MOUNT = V2.replace(" / /sys", " /pod /sys")
SPACE_IN_MOUNT = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/of\\040mine")
UNLIMITED_V1 = 9223372036854771712  # the kernel's text for "no limit": 2⁶³ − 1, rounded down to pages
# The text of /proc/self/cgroup, the mounts, the files of the control groups, and the megabytes that are left.
MEMORY_LEFT = {
    "limit less usage": ("0::/job\n", V2, memory_v2("job", 500 * MB, 200 * MB), 300),
    "file pages, but not shared memory": ("0::/job\n", V2, memory_v2("job", 500 * MB, 200 * MB, FILE_PAGES), 335),
    "parent with the least left": ("0::/a/b/c\n", V2, memory_v2("a/b/c", "max", 10)
        | memory_v2("a/b", 500 * MB, 200 * MB) | memory_v2("a", 900 * MB, 800 * MB), 100),
    "container": ("0::/\n", V2, memory_v2("", 500 * MB, 200 * MB), 300),
    "version 1, totals of child groups": ("9:name=systemd:/\n4:memory:/job\n1:cpu:/elsewhere\n0::/\n", V1,
        memory_v1("job", 500 * MB, 200 * MB, TOTALS_OF_V1) | memory_v1("", UNLIMITED_V1, 10**9), 330),
    "version 1, container": ("4:memory:/docker/3f2\n", DOCKER_MOUNT, memory_v1("", 500 * MB, 200 * MB), 300),
    "version 1, within a container": ("4:memory:/docker/3f2/in\n", DOCKER_MOUNT,
        memory_v1("", 500 * MB, 200 * MB) | memory_v1("in", 300 * MB, 200 * MB), 100),
    "parent of the mount": ("0::/../other\n", POD_MOUNT, memory_v2("", 500 * MB, 200 * MB), 300),
    "group outside the mount": ("0::/elsewhere\n", POD_MOUNT, memory_v2("", 500 * MB, 200 * MB), 300),
    "space in the mount point": ("0::/job\n", SPACE_IN_MOUNT, memory_v2("of mine/job", 500 * MB, 200 * MB), 300),
    "no mountinfo": ("0::/job\n", None, memory_v2("job", 500 * MB, 200 * MB), 300),
    "version 1, no mountinfo": ("4:memory:/job\n", None, memory_v1("job", 400 * MB, 200 * MB), 200),
    "malformed lines of memory.stat": ("0::/job\n", V2,
        memory_v2("job", 500 * MB, 200 * MB, "inactive_file\nactive_file x\n\nslab_reclaimable 5000000\n"), 305),
    "usage above the limit": ("0::/job\n", V2, memory_v2("job", 500 * MB, 600 * MB), 0),
}  # fmt: skip


@pytest.mark.parametrize(("membership", "mounts", "files", "left_mb"), MEMORY_LEFT.values(), ids=MEMORY_LEFT)
def test_memory_left_is_that_of_the_control_group(make_machine, membership, mounts, files, left_mb):
    assert memory_left_bytes(make_machine(membership, mounts, files)) == left_mb * MB


@pytest.mark.parametrize(("membership", "mounts", "files"), [
    ("0::/job\n", V2, memory_v2("job", "max", 200 * MB)),
    ("4:memory:/job\n", V1, memory_v1("job", UNLIMITED_V1, 200 * MB)),
    ("0::/job\n", V2, {}),
    ("0::/job\n", V2, {"job/memory.max": "500\n"}),
    ("0::/job\n", V2, memory_v2("job", "many", 200 * MB)),
    ("0::/job\n", V2, memory_v2("job", "", 200 * MB)),
    ("0::/job\n", V2, memory_v2("job", 500, 0) | {"job/memory.current": "\x00"}),
    (None, V2, memory_v2("", 500, 0)),
    ("", V2, memory_v2("", 500, 0)),
    ("nonsense\n\n::\n3:cpu:/\n", "- cgroup2\n1 2 - cgroup2\n", memory_v2("", 500, 0)),
])  # fmt: skip
def test_memory_left_of_missing_or_malformed_files_is_none(make_machine, membership, mounts, files):
    assert memory_left_bytes(make_machine(membership, mounts, files)) is None


def test_check_memory_error_names_the_need_the_group_and_the_remedies(make_machine):
    root = make_machine("0::/job\n", V2, memory_v2("job", 500 * MB, 200 * MB))
    with pytest.raises(gl.LimitError) as refusal:
        check_memory(workers=4, output_bytes=121 * MB, root=root)
    assert str(refusal.value) == (
        "at least 301 MB of memory is needed (4 workers of about 45 MB, 121 MB for an output batch), but the control "
        f"group {root}/sys/fs/cgroup/job has 300 MB left of its limit of 500 MB. Use fewer workers or a smaller "
        "batch_size, or raise the limit of the container or job"
    )
    check_memory(workers=4, output_bytes=120 * MB, root=root)
    check_memory(workers=4000, output_bytes=0, root="/nowhere")


# -- open files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def limit_open_files(monkeypatch):
    """Return a function that pretends that this many more files may be opened."""

    def set_limit(more: int, hard: int = 4096) -> int:
        listed = os.listdir("/proc/self/fd")
        open_descriptors = [int(fd) for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")]  # all but listdir's own
        soft = more
        while soft - sum(fd < soft for fd in open_descriptors) < more:
            soft += 1
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        return soft

    gc.collect()  # so that no file of an earlier test is closed during this one
    gc.disable()
    yield set_limit
    gc.enable()


def test_descriptors_left_is_the_limit_less_the_open_descriptors(limit_open_files):
    limit_open_files(1000)
    before = descriptors_left() or 0
    file = os.open("/dev/null", os.O_RDONLY)
    assert descriptors_left() == before - 1
    os.close(file)
    assert before == 1000


def test_descriptors_left_ignores_a_descriptor_above_the_limit(monkeypatch):
    next_descriptor = os.dup(0)  # the number that os.open() will use
    os.close(next_descriptor)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 50
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    before = descriptors_left() or 0
    high = os.dup2(os.open("/dev/null", os.O_RDONLY), limit + 100)
    assert descriptors_left() == before - 1  # the descriptor of /dev/null, not its duplicate
    os.close(high)
    os.close(next_descriptor)


def test_descriptors_left_without_a_limit_is_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert descriptors_left() is None
    check_descriptors(100_000)


def test_check_descriptors_error_names_the_need_and_the_remedies(limit_open_files, monkeypatch):
    monkeypatch.setattr(fork_server, "is_running", lambda: False)
    needed = limits.POOL_DESCRIPTORS + 5 * limits.WORKER_DESCRIPTORS + limits.START_DESCRIPTORS
    needed += limits.SPARE_DESCRIPTORS + limits.SERVER_DESCRIPTORS
    limit_open_files(needed)
    check_descriptors(5)
    soft = limit_open_files(needed - 1)
    with pytest.raises(gl.LimitError) as refusal:
        check_descriptors(5)
    assert str(refusal.value) == (
        f"num_workers=5 needs {needed} file descriptors in this process (5 per worker and {needed - 25} others), but "
        f"only {needed - 1} of the {soft} that it may have open are left. Use fewer workers, close files, or raise the "
        "limit: `ulimit -n` in the shell, or resource.setrlimit(resource.RLIMIT_NOFILE, …) in the program "
        "(hard limit: 4,096)"
    )


@pytest.mark.parametrize("workers", [10_000, 100])
def test_loader_with_more_workers_than_open_files_allow_raises(limit_open_files, workers):
    soft = limit_open_files(300)
    with pytest.raises(gl.LimitError, match=rf"num_workers={workers} needs .* but only 300 of the {soft} that"):
        gl.Loader([1, 2], num_workers=workers)


@pytest.mark.processes
def test_check_workers_counts_workers_of_other_loaders_as_releasable(monkeypatch):
    with gl.Loader(list(range(8)), num_workers=3, device="cpu") as other:
        list(other)
        needed = limits.POOL_DESCRIPTORS + 3 * limits.WORKER_DESCRIPTORS + limits.START_DESCRIPTORS
        left = needed + limits.SPARE_DESCRIPTORS - limits.POOL_DESCRIPTORS - 3 * limits.WORKER_DESCRIPTORS
        monkeypatch.setattr(limits, "descriptors_left", lambda: left)
        monkeypatch.setattr(limits, "processes_left", lambda root: (0, "a limit"))
        check_workers(3)
        with pytest.raises(gl.LimitError, match="num_workers=3 needs"):
            check_descriptors(3)
        with pytest.raises(gl.LimitError, match="num_workers=4 needs"):
            check_workers(4)


# -- processes --------------------------------------------------------------------------------------------------------

PIDS_V1 = "36 31 0:33 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"


def limit_processes(monkeypatch, limit: int, user: int = 1000) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getuid", lambda: os.stat("/proc/self").st_uid)


PROCESSES_LEFT = {
    "parent with the fewest left": ("0::/a/b\n", V2, {
        "a/pids.max": "60\n", "a/pids.current": "50\n", "a/b/pids.max": "900\n", "a/b/pids.current": "5\n"}, 10),
    "version 1": ("8:pids:/job\n4:memory:/job\n0::/\n", PIDS_V1 + V1,
        {"pids/job/pids.max": "100\n", "pids/job/pids.current": "30\n", "memory/job/pids.max": "1\n"}, 70),
    "no limit": ("0::/job\n", V2, {"job/pids.max": "max\n", "job/pids.current": "30\n"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("membership", "mounts", "files", "left"), PROCESSES_LEFT.values(), ids=PROCESSES_LEFT)
def test_processes_left_is_that_of_the_control_group(make_machine, monkeypatch, membership, mounts, files, left):
    limit_processes(monkeypatch, resource.RLIM_INFINITY)
    processes = processes_left(make_machine(membership, mounts, files))
    assert (processes and processes[0]) == left


def test_processes_left_counts_the_users_threads_except_for_root(monkeypatch):
    limit_processes(monkeypatch, 90_000)
    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), stop.wait()))
    threads = len(os.listdir("/proc/self/task"))
    count, limit = processes_left() or (0, "")
    assert 0 < count <= 90_000 - threads
    assert "90,000 that this user may have (RLIMIT_NPROC, `ulimit -u`)" in limit
    scandir = os.scandir  # so that only this process is counted
    monkeypatch.setattr(
        limits.os, "scandir", lambda path: [entry for entry in scandir(path) if entry.name == str(os.getpid())]
    )
    count, _ = processes_left() or (0, "")
    thread.start()
    started.wait()
    assert processes_left() == (count - 1, limit)
    stop.set()
    thread.join()
    monkeypatch.setattr(limits, "_count_tasks", lambda user, root: 1 / 0)  # must not be called
    limit_processes(monkeypatch, 90_000, user=0)
    assert "RLIMIT_NPROC" not in str(processes_left())


def test_check_processes_error_names_the_limit_and_the_remedies(make_machine, monkeypatch):
    limit_processes(monkeypatch, resource.RLIM_INFINITY)
    monkeypatch.setattr(fork_server, "is_running", lambda: False)
    root = make_machine("0::/job\n", V2, {"job/pids.max": "100\n", "job/pids.current": "90\n"})
    check_processes(8, root=root)  # 10 with the template and the fork server
    check_processes(10, releasable=2, root=root)
    with pytest.raises(gl.LimitError) as refusal:
        check_processes(10, root=root)
    assert str(refusal.value) == (
        f"num_workers=10 needs 12 processes, but only 10 are left of the 100 that the control group "
        f"{root}/sys/fs/cgroup/job may have (pids.max). Use fewer workers, end other programs, or raise the limit"
    )


# -- CPUs -------------------------------------------------------------------------------------------------------------

CPU_COUNT = len(os.sched_getaffinity(0))


def test_lockable_bytes_is_the_soft_limit_or_none_without_a_limit(monkeypatch):
    for soft, expected in ((64 << 10, 64 << 10), (0, 0), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, resource.RLIM_INFINITY))
        assert lockable_bytes() == expected


CPU_V1 = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
CPU_V1_FILES = {"cpu/job/cpu.cfs_quota_us": "90000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
CPU_V1_UNLIMITED = {"cpu/job/cpu.cfs_quota_us": "-1\n"}
USABLE_CPUS = {
    "no quota": ("0::/job\n", V2, {"job/cpu.max": "max 100000\n"}, CPU_COUNT),
    "half a CPU": ("0::/job\n", V2, {"job/cpu.max": "50000 100000\n"}, 1),
    "parent": ("0::/pod/job\n", V2, {"pod/job/cpu.max": "max 100000\n", "pod/cpu.max": "100000 100000\n"}, 1),
    "version 1": ("4:cpu,cpuacct:/job\n", CPU_V1, CPU_V1_FILES, 1),
    "version 1, no quota": ("4:cpu,cpuacct:/job\n", CPU_V1, CPU_V1_FILES | CPU_V1_UNLIMITED, CPU_COUNT),
    "version 1, no mountinfo": ("4:cpu,cpuacct:/job\n", None, CPU_V1_FILES, 1),
    "no control group": (None, None, {}, CPU_COUNT),
}


@pytest.mark.parametrize(("membership", "mounts", "files", "cpus"), USABLE_CPUS.values(), ids=USABLE_CPUS)
def test_usable_cpus_is_the_affinity_mask_or_the_quota(make_machine, membership, mounts, files, cpus):
    assert usable_cpus(make_machine(membership, mounts, files)) == cpus


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers"), [(2, 1, 1), (1, 1, 1), (16, 1, 15), (64, 8, 7), (8, 8, 1), (10, 4, 1)]
)
def test_default_workers_divides_the_cpus_among_ranks(cpus, ranks, workers):
    assert default_workers(cpus, ranks) == workers


# -- near the GPU -----------------------------------------------------------------------------------------------------

NVIDIA, ASPEED = "0x10de", "0x1a03"
# By version of control groups: the line of /proc/self/cgroup, the mount point, its type, and the file with the CPUs.
CPUSETS = {
    1: ("3:cpuset:/job", "/sys/fs/cgroup/cpuset", "cgroup cgroup rw,cpuset", "cpuset.effective_cpus"),
    2: ("0::/job", "/sys/fs/cgroup", "cgroup2 cgroup2 rw", "cpuset.cpus.effective"),
}


class NumaMachine:
    """A simulated machine with the CPUs of each node, and GPUs by node; ``0000:1n:00.0`` is the n-th GPU."""

    def __init__(self, root: Path, nodes: list[str], gpus: list[int], *, cpuset: str = "", version: int = 2) -> None:
        self.root = root
        self.cpus = frozenset().union(*map(parse_cpu_list, nodes))
        self.write("sys/devices/system/node/online", f"0-{len(nodes) - 1}" if len(nodes) > 1 else "0")
        self.write("sys/devices/system/cpu/online", format_cpu_list(self.cpus))
        devices = [*((f"0000:1{number}:00.0", node, NVIDIA, "0x030200") for number, node in enumerate(gpus))]
        # Neither of the following devices is a GPU.
        devices += [("0000:00:01.0", 0, ASPEED, "0x030000"), ("0000:00:02.0", 0, NVIDIA, "0x068000")]
        for address, node, vendor, kind in devices:
            folder = f"sys/bus/pci/devices/{address}"
            self.write(f"{folder}/numa_node", str(node))
            self.write(f"{folder}/local_cpulist", nodes[node] if node >= 0 else format_cpu_list(self.cpus))
            self.write(f"{folder}/vendor", vendor)
            self.write(f"{folder}/class", kind)
        if cpuset:
            membership, point, mount, name = CPUSETS[version]
            self.write("proc/self/cgroup", membership)
            self.write("proc/self/mountinfo", f"31 23 0:28 / {point} rw - {mount}")
            self.write(f"{point[1:]}/job/{name}", cpuset)

    def write(self, name: str, text: str) -> None:
        write_files(self.root, {name: f"{text}\n"})

    def place(self, gpu: int = 0, *, ranks: int = 1, allowed: str = "") -> Placement:
        cpus = parse_cpu_list(allowed) if allowed else self.cpus
        return find_placement(f"0000:1{gpu}:00.0", device=f"cuda:{gpu}", ranks=ranks, allowed=cpus, root=str(self.root))


TWO_NODES = ["0-15,32-47", "16-31,48-63"]  # the CPUs of each node
EIGHT_GPUS = [0, 0, 0, 0, 1, 1, 1, 1]  # the node of each GPU


def test_placement_puts_workers_on_the_numa_node_of_their_gpu(tmp_path):
    machine = NumaMachine(tmp_path, TWO_NODES, EIGHT_GPUS)
    placement = machine.place(5)
    assert placement.cpus_for(32) == parse_cpu_list(TWO_NODES[1])
    assert placement.describe(12) == "workers on CPUs 16-31,48-63, ring in the memory of NUMA node 1, near cuda:5"
    assert placement.describe(0) == "ring in the memory of NUMA node 1, near cuda:5"
    assert machine.place(0).cpus_for(1) == parse_cpu_list(TWO_NODES[0])


def test_placement_of_more_workers_than_the_node_has_cpus_uses_all_cpus(tmp_path):
    placement = NumaMachine(tmp_path, TWO_NODES, EIGHT_GPUS).place(0)
    assert placement.cpus_for(33) == frozenset()
    assert placement.describe(33) == (
        "ring in the memory of NUMA node 0, near cuda:0; 33 workers run on all CPUs, since that node has only 32"
    )


@pytest.mark.parametrize(("gpus", "ranks", "max_workers"), [
    (EIGHT_GPUS, 8, 8),  # four ranks share a node's 32 CPUs
    ([0] * 8, 8, 4),  # all eight ranks share it, and none uses the other node
    (EIGHT_GPUS, 2, 16),  # both may use this node
    (EIGHT_GPUS, 16, 4),  # two ranks for each GPU
    ([0, 1], 1, 32),
    ([0, 1], 2, 32),
])  # fmt: skip
def test_placement_divides_a_node_among_ranks_whose_gpus_are_near_it(tmp_path, gpus, ranks, max_workers):
    placement = NumaMachine(tmp_path, TWO_NODES, gpus).place(0, ranks=ranks)
    assert placement.max_workers == max_workers
    assert placement.cpus_for(max_workers) == parse_cpu_list(TWO_NODES[0])
    assert not placement.cpus_for(max_workers + 1)
    if max_workers < 32:
        expected = f"since that node has only 32, of which {max_workers} are for this rank"
        assert f"{max_workers + 1} workers run on all CPUs, {expected}" in placement.describe(max_workers + 1)


@pytest.mark.parametrize(("nodes", "gpus", "allowed", "why"), [
    (["0-63"], [0], "", "one NUMA node: nothing to place"),
    (TWO_NODES, [-1], "", r"the NUMA node of cuda:0 \(0000:10:00.0\) is unknown: nothing is placed"),
    (TWO_NODES, [], "", r"the NUMA node of cuda:0 \(0000:10:00.0\) is unknown: nothing is placed"),
    (TWO_NODES, [0], "0-15",
     "this process is restricted to 16 of 64 CPUs, and so are its workers; cuda:0 is near NUMA node 0"),
    (TWO_NODES, [0], "0-62", "this process is restricted to 63 of 64 CPUs, .*"),
    (["0-63", ""], [1], "", "this process may use no CPU near cuda:0, on NUMA node 1: nothing is placed"),
    (["", "0-63"], [1], "", "all CPUs that this process may use are near cuda:0, on NUMA node 1"),
], ids=["one node", "unknown", "not on the bus", "pinned", "one less", "memory only", "all near"])  # fmt: skip
def test_placement_without_a_choice_of_nodes_says_why(tmp_path, nodes, gpus, allowed, why):
    placement = NumaMachine(tmp_path, nodes, gpus).place(allowed=allowed)
    assert not placement.cpus
    assert not placement.cpus_for(1)
    assert re.fullmatch(why, placement.describe(4))


@pytest.mark.parametrize("version", [1, 2])
def test_placement_in_a_container_uses_its_cpus_near_the_gpu(tmp_path, version):
    machine = NumaMachine(tmp_path, TWO_NODES, EIGHT_GPUS, cpuset="0-3,16-31", version=version)
    assert machine.place(0, allowed="0-3,16-31").describe(4).startswith("workers on CPUs 0-3, ring in the memory")
    expected = "5 workers run on all CPUs, since that node has only 4"
    assert machine.place(0, allowed="0-3,16-31").describe(5).endswith(expected)
    assert machine.place(0, allowed="0-3").describe(4).startswith("this process is restricted to 4 of 20 CPUs")


def test_pci_address_is_that_of_the_cuda_properties_and_none_without_them(monkeypatch):
    properties = type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert devices.pci_address(torch.device("cuda", 0)) == "0000:3b:00.0"
    assert devices.pci_address(torch.device("cpu")) is None
    assert devices.pci_address(torch.device("xpu", 0)) is None
    monkeypatch.delattr(properties, "pci_domain_id")
    assert devices.pci_address(torch.device("cuda", 0)) is None


# -- workers of this machine, whose GPU seems to be near its last CPU ------------------------------------------------

ALLOWED_CPUS = frozenset(os.sched_getaffinity(0))
LAST_CPU = max(ALLOWED_CPUS)
OTHER_CPUS = format_cpu_list(ALLOWED_CPUS - {LAST_CPU})
needs_two_cpus = lacking.mark_missing("two CPUs", len(ALLOWED_CPUS) < 2)


@pytest.fixture
def gpu_near_last_cpu(tmp_path, monkeypatch):
    machine = NumaMachine(tmp_path, [OTHER_CPUS, str(LAST_CPU)], [1])
    monkeypatch.setattr(devices, "pci_address", lambda device: "0000:10:00.0")
    monkeypatch.setattr("gpuload.loader.options.find_placement", partial(find_placement, root=str(machine.root)))


def cpu_masks(loader) -> set[int]:
    return {int(mask) for _, masks, _ in loader for mask in masks}


@needs_two_cpus
@pytest.mark.fresh
@pytest.mark.processes
def test_worker_and_its_replacement_run_on_the_cpus_near_the_gpu(gpu_near_last_cpu, tmp_path, caplog):
    caplog.set_level(logging.INFO, "gpuload.loader")
    placement = f"workers on CPUs {LAST_CPU}, ring in the memory of NUMA node 1, near cpu"
    samples = AffinitySamples(str(tmp_path / "died"))
    with gl.Loader(samples, 2, num_workers=1, device="cpu", transforms=[T.CenterCrop(2)]) as loader:
        assert str(loader.plan()).splitlines()[-1] == f"placement: {placement}"
        assert f"placement: {placement}" in loader.plan()._repr_html_()
        assert cpu_masks(loader) == {1 << LAST_CPU}
        stats = loader.stats()
        assert stats.faults.restarts == 1
        assert stats.cpu.placement == placement
        assert f"placed    {placement}" in str(stats)
        assert os.sched_getaffinity(0) == ALLOWED_CPUS
        assert loader._session.ring._near == {LAST_CPU}
    assert f"placement: {placement}" in [record.getMessage() for record in caplog.records]


@needs_two_cpus
@pytest.mark.fresh
@pytest.mark.processes
def test_resize_beyond_the_cpus_of_a_node_unbinds_workers_and_resize_back_binds_them(gpu_near_last_cpu):
    with gl.Loader(AffinitySamples(), 2, num_workers="auto", device="cpu") as loader:
        assert loader.num_workers == 1
        assert cpu_masks(loader) == {1 << LAST_CPU}
        pool = loader._session.engine
        pool.resize(2)
        assert os.sched_getaffinity(pool.pids[0]) == ALLOWED_CPUS
        while not pool.is_steady:
            pool.collect_events(0.1)
        assert [os.sched_getaffinity(pid) for pid in pool.pids] == [ALLOWED_CPUS, ALLOWED_CPUS]
        pool.resize(1)
        assert {frozenset(os.sched_getaffinity(pid)) for pid in pool.pids} == {frozenset({LAST_CPU})}


@needs_two_cpus
@pytest.mark.fresh
@pytest.mark.processes
@pytest.mark.parametrize("options", [{"affinity": "none", "num_workers": 1}, {"num_workers": 2}])
def test_workers_without_affinity_or_too_many_for_the_node_run_on_all_cpus(gpu_near_last_cpu, options):
    with gl.Loader(AffinitySamples(), 2, device="cpu", **options) as loader:
        assert cpu_masks(loader) == {sum(1 << cpu for cpu in ALLOWED_CPUS)}
        placement = loader.stats().cpu.placement
    assert placement == (
        "affinity='none': nothing is placed"
        if "affinity" in options
        else "ring in the memory of NUMA node 1, near cpu; 2 workers run on all CPUs, since that node has only 1"
    )


@needs_two_cpus
def test_ring_slots_are_page_locked_on_the_cpus_near_the_gpu(gpu_near_last_cpu, monkeypatch):
    """Page-locking touches memory for the first time, which decides its node."""
    device = Device()
    affinities, lock = set(), device.lock

    def record_and_lock(*arguments):
        affinities.add(frozenset(os.sched_getaffinity(0)))
        return lock(*arguments)

    monkeypatch.setattr(device, "lock", record_and_lock)
    monkeypatch.setattr(devices, "Accelerator", lambda requested: device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("gpuload.loader.session.make_transfer", CudaTransfer)
    with gl.Loader(AffinitySamples(), 2, num_workers=0, device="cpu", transforms=[T.CenterCrop(2)]) as loader:
        assert cpu_masks(loader) == {sum(1 << cpu for cpu in ALLOWED_CPUS)}
        assert loader.stats().cpu.placement == "ring in the memory of NUMA node 1, near cpu"
    assert affinities == {frozenset({LAST_CPU})}


def test_loader_on_the_cpu_has_no_placement():
    with gl.Loader([np.zeros((4, 4, 3), np.uint8)] * 2, 2, num_workers=0, device="cpu") as loader:
        list(loader)
        assert loader.stats().cpu.placement == ""
        assert loader.plan().placement is None
        assert "place" not in str(loader.plan()) + str(loader.stats())


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5-6,9-10", {5, 6, 9, 10})]
)
def test_cpu_lists_are_parsed_and_formatted_as_the_kernel_writes_them(text, cpus):
    assert parse_cpu_list(f"{text}\n") == cpus
    assert format_cpu_list(cpus) == text
