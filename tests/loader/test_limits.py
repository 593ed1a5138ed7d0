"""CPUs, open files, processes and memory, read from a made-up tree of control groups; and workers near their GPU.

For real: tests/faults/test_limits.py.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import signal
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.cpu_device import Device

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
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


@pytest.fixture
def machine(tmp_path: Path):
    """A function that makes a machine of a membership, mounts and files under /sys/fs/cgroup; returns its root."""

    def make(membership: str | None, mounts: str | None, files: dict[str, str]) -> str:
        texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        if membership is not None:
            texts["proc/self/cgroup"] = membership
        if mounts is not None:
            texts["proc/self/mountinfo"] = "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return str(tmp_path)

    return make


def v2(folder: str, limit: object, use: int, stat: str = "") -> dict[str, str]:
    prefix = f"{folder}/" if folder else ""
    return {
        f"{prefix}memory.max": f"{limit}\n",
        f"{prefix}memory.current": f"{use}\n",
        f"{prefix}memory.stat": stat,
    }


def v1(folder: str, limit: int, use: int, stat: str = "") -> dict[str, str]:
    prefix = f"memory/{folder}/" if folder else "memory/"
    return {
        f"{prefix}memory.limit_in_bytes": f"{limit}\n",
        f"{prefix}memory.usage_in_bytes": f"{use}\n",
        f"{prefix}memory.stat": stat,
    }


def test_what_is_left_is_the_limit_less_the_use(machine):
    assert memory_left_bytes(machine("0::/job\n", V2, v2("job", 500 * MB, 200 * MB))) == 300 * MB


def test_pages_of_files_can_be_reclaimed_and_shared_memory_cannot(machine):
    stat = (
        "anon 1\nfile 90000000\nshmem 60000000\nfile_mapped 7\n"
        "inactive_anon 3\nactive_anon 5\ninactive_file 20000000\nactive_file 10000000\nslab_reclaimable 5000000\n"
    )
    assert memory_left_bytes(machine("0::/job\n", V2, v2("job", 500 * MB, 200 * MB, stat))) == 335 * MB


def test_the_ancestor_with_the_least_left_binds(machine):
    files = v2("a/b/c", "max", 10) | v2("a/b", 500 * MB, 200 * MB) | v2("a", 900 * MB, 800 * MB)
    assert memory_left_bytes(machine("0::/a/b/c\n", V2, files)) == 100 * MB


def test_a_container_sees_its_own_group_as_the_root(machine):
    assert memory_left_bytes(machine("0::/\n", V2, v2("", 500 * MB, 200 * MB))) == 300 * MB


def test_version_1_with_its_totals_over_the_groups_below(machine):
    stat = "inactive_file 1\ntotal_shmem 50000000\ntotal_inactive_file 20000000\ntotal_active_file 10000000\n"
    membership = "9:name=systemd:/\n4:memory:/job\n1:cpu:/elsewhere\n0::/\n"
    files = v1("job", 500 * MB, 200 * MB, stat) | v1("", 9223372036854771712, 10**9)
    assert memory_left_bytes(machine(membership, V1, files)) == 330 * MB


def test_version_1_in_a_container_that_sees_its_group_mounted_as_the_root(machine):
    mount = "35 31 0:32 /docker/3f2 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert memory_left_bytes(machine("4:memory:/docker/3f2\n", mount, v1("", 500 * MB, 200 * MB))) == 300 * MB
    assert memory_left_bytes(machine("4:memory:/docker/3f2/in\n", mount, v1("in", 300 * MB, 200 * MB))) == 100 * MB


def test_a_group_outside_of_what_is_mounted_counts_as_what_is(machine):
    for membership in ("0::/../other\n", "0::/elsewhere\n"):
        mount = V2.replace(" / /sys", " /pod /sys")
        assert memory_left_bytes(machine(membership, mount, v2("", 500 * MB, 200 * MB))) == 300 * MB


def test_a_mount_in_an_unusual_place_with_a_space_in_its_name(machine):
    mount = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/of\\040mine")
    assert memory_left_bytes(machine("0::/job\n", mount, v2("of mine/job", 500 * MB, 200 * MB))) == 300 * MB


def test_without_a_list_of_mounts_the_usual_place_is_looked_at(machine):
    assert memory_left_bytes(machine("0::/job\n", None, v2("job", 500 * MB, 200 * MB))) == 300 * MB
    assert memory_left_bytes(machine("4:memory:/job\n", None, v1("job", 400 * MB, 200 * MB))) == 200 * MB


def test_more_in_use_than_the_limit_is_nothing_left(machine):
    assert memory_left_bytes(machine("0::/job\n", V2, v2("job", 500 * MB, 600 * MB))) == 0


@pytest.mark.parametrize(
    ("membership", "mounts", "files"),
    [
        ("0::/job\n", V2, v2("job", "max", 200 * MB)),
        ("4:memory:/job\n", V1, v1("job", 9223372036854771712, 200 * MB)),
        ("0::/job\n", V2, {}),
        ("0::/job\n", V2, {"job/memory.max": "500\n"}),
        ("0::/job\n", V2, v2("job", "many", 200 * MB)),
        ("0::/job\n", V2, v2("job", "", 200 * MB)),
        ("0::/job\n", V2, v2("job", 500, 0) | {"job/memory.current": "\x00"}),
        (None, V2, v2("", 500, 0)),
        ("", V2, v2("", 500, 0)),
        ("nonsense\n\n::\n3:cpu:/\n", "- cgroup2\n1 2 - cgroup2\n", v2("", 500, 0)),
    ],
)
def test_what_is_missing_or_makes_no_sense_is_no_limit(machine, membership, mounts, files):
    assert memory_left_bytes(machine(membership, mounts, files)) is None


def test_a_broken_stat_file_only_leaves_out_what_could_be_reclaimed(machine):
    files = v2("job", 500 * MB, 200 * MB, "inactive_file\nactive_file x\n\nslab_reclaimable 5\n")
    assert memory_left_bytes(machine("0::/job\n", V2, files)) == 300 * MB + 5


def test_the_refusal_says_what_is_needed_for_what_and_what_is_left_of_which_limit(machine):
    root = machine("0::/job\n", V2, v2("job", 500 * MB, 200 * MB))
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
def allow(monkeypatch):
    """Pretend that so many files may be open beyond those that are."""

    def make(more: int, hard: int = 4096) -> int:
        listed = os.listdir("/proc/self/fd")
        taken = [int(fd) for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")]  # all but listdir's own
        soft = more
        while soft - sum(fd < soft for fd in taken) < more:
            soft += 1
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        return soft

    gc.collect()  # what earlier tests left open is not closed meanwhile
    gc.disable()
    yield make
    gc.enable()


def test_the_descriptors_left_are_the_limit_less_the_open_ones(allow):
    allow(1000)
    before = descriptors_left() or 0
    file = os.open("/dev/null", os.O_RDONLY)
    assert descriptors_left() == before - 1
    os.close(file)
    assert before == 1000


def test_a_descriptor_above_the_limit_takes_no_place_below_it(monkeypatch):
    lowest = os.dup(0)
    os.close(lowest)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 50
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    before = descriptors_left() or 0
    high = os.dup2(os.open("/dev/null", os.O_RDONLY), limit + 100)
    assert descriptors_left() == before - 1  # of the two, the one below
    os.close(high)
    os.close(lowest)


def test_no_limit_or_no_list_of_open_files_is_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert descriptors_left() is None
    check_descriptors(100_000)


def test_too_few_descriptors_are_refused_with_the_remedies(allow, monkeypatch):
    monkeypatch.setattr(fork_server, "is_running", lambda: False)
    needed = limits.POOL_DESCRIPTORS + 5 * limits.WORKER_DESCRIPTORS + limits.START_DESCRIPTORS
    needed += limits.SPARE_DESCRIPTORS + limits.SERVER_DESCRIPTORS
    allow(needed)
    check_descriptors(5)
    soft = allow(needed - 1)
    with pytest.raises(gl.LimitError) as refusal:
        check_descriptors(5)
    assert str(refusal.value) == (
        f"num_workers=5 needs {needed} file descriptors in this process (5 per worker and {needed - 25} others), but "
        f"only {needed - 1} of the {soft} that it may have open are left. Use fewer workers, close files, or raise the "
        "limit: `ulimit -n` in the shell, or resource.setrlimit(resource.RLIMIT_NOFILE, …) in the program "
        "(hard limit: 4,096)"
    )


@pytest.mark.parametrize("workers", [10_000, 100])
def test_more_workers_than_open_files_allow_are_refused_when_the_loader_is_made(allow, workers, recwarn):
    soft = allow(300)
    with pytest.raises(gl.LimitError, match=rf"num_workers={workers} needs .* but only 300 of the {soft} that"):
        gl.Loader([1, 2], num_workers=workers)


@pytest.mark.processes
def test_what_workers_of_other_loaders_take_does_not_count_before_the_first_iter(monkeypatch):
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


def nproc(monkeypatch, limit: int, user: int = 1000) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getuid", lambda: os.stat("/proc/self").st_uid)


def test_the_group_with_the_fewest_processes_left_binds(machine, monkeypatch):
    nproc(monkeypatch, resource.RLIM_INFINITY)
    files = {f"{group}/pids.{name}": f"{n}\n" for group, pair in {"a": (60, 50), "a/b": (900, 5)}.items()
             for name, n in zip(("max", "current"), pair, strict=True)}  # fmt: skip
    root = machine("0::/a/b\n", V2, files)
    assert processes_left(root) == (10, f"the 60 that the control group {root}/sys/fs/cgroup/a may have (pids.max)")


def test_version_1_has_a_controller_for_processes(machine, monkeypatch):
    nproc(monkeypatch, resource.RLIM_INFINITY)
    files = {"pids/job/pids.max": "100\n", "pids/job/pids.current": "30\n", "memory/job/pids.max": "1\n"}
    root = machine("8:pids:/job\n4:memory:/job\n0::/\n", PIDS_V1 + V1, files)
    left = processes_left(root)
    assert left is not None
    assert left[0] == 70


def test_a_group_without_a_limit_on_processes_is_none(machine, monkeypatch):
    nproc(monkeypatch, resource.RLIM_INFINITY)
    files = {"job/pids.max": "max\n", "job/pids.current": "30\n"}
    assert processes_left(machine("0::/job\n", V2, files)) is None


def test_the_users_limit_counts_threads_of_all_of_his_processes_and_does_not_bind_root(monkeypatch):
    def left() -> int:
        found = processes_left()
        return 0 if found is None else found[0]

    nproc(monkeypatch, 90_000)
    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), stop.wait()))
    threads = len(os.listdir("/proc/self/task"))
    before = left()
    assert 0 < before <= 90_000 - threads
    assert "90,000 that this user may have (RLIMIT_NPROC, `ulimit -u`)" in str(processes_left())
    monkeypatch.setattr(limits.os, "scandir", only_this_process(os.scandir))
    before = left()
    thread.start()
    started.wait()
    assert left() == before - 1
    stop.set()
    thread.join()
    monkeypatch.setattr(limits, "_count_tasks", lambda user, root: 1 / 0)  # not asked
    nproc(monkeypatch, 90_000, user=0)
    assert "RLIMIT_NPROC" not in str(processes_left())


def only_this_process(scandir):
    return lambda path: [entry for entry in scandir(path) if entry.name == str(os.getpid())]


def test_too_few_processes_are_refused_with_the_limit_and_the_remedies(machine, monkeypatch):
    nproc(monkeypatch, resource.RLIM_INFINITY)
    monkeypatch.setattr(fork_server, "is_running", lambda: False)
    root = machine("0::/job\n", V2, {"job/pids.max": "100\n", "job/pids.current": "90\n"})
    check_processes(8, root=root)  # and the template and the fork server
    check_processes(10, releasable=2, root=root)
    with pytest.raises(gl.LimitError) as refusal:
        check_processes(10, root=root)
    assert str(refusal.value) == (
        f"num_workers=10 needs 12 processes, but only 10 are left of the 100 that the control group "
        f"{root}/sys/fs/cgroup/job may have (pids.max). Use fewer workers, end other programs, or raise the limit"
    )


# -- CPUs -------------------------------------------------------------------------------------------------------------

AFFINITY = len(os.sched_getaffinity(0))


def test_this_machine():
    assert usable_cpus() >= 1
    assert (lockable_bytes() or 0) >= 0


def test_without_a_quota_the_affinity_mask_counts(machine):
    assert usable_cpus(machine("0::/job\n", V2, {"job/cpu.max": "max 100000\n"})) == AFFINITY
    assert usable_cpus("/nowhere") == AFFINITY


def test_a_quota_of_half_a_cpu_is_one_cpu(machine):
    assert usable_cpus(machine("0::/job\n", V2, {"job/cpu.max": "50000 100000\n"})) == 1


def test_the_quota_of_an_ancestor_binds(machine):
    files = {"pod/job/cpu.max": "max 100000\n", "pod/cpu.max": "100000 100000\n"}
    assert usable_cpus(machine("0::/pod/job\n", V2, files)) == 1


@pytest.mark.parametrize("mounts", [None, "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"])
def test_version_1_quotas_count(machine, mounts):
    files = {"cpu/job/cpu.cfs_quota_us": "90000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    assert usable_cpus(machine("4:cpu,cpuacct:/job\n", mounts, files)) == 1
    files["cpu/job/cpu.cfs_quota_us"] = "-1\n"
    assert usable_cpus(machine("4:cpu,cpuacct:/job\n", mounts, files)) == AFFINITY


@pytest.mark.parametrize(
    ("cpus", "ranks", "workers"), [(2, 1, 1), (1, 1, 1), (16, 1, 15), (64, 8, 7), (8, 8, 1), (10, 4, 1)]
)
def test_ranks_share_the_cpus_that_they_leave(cpus, ranks, workers):
    assert default_workers(cpus, ranks) == workers


# -- near the GPU -----------------------------------------------------------------------------------------------------

NVIDIA, ASPEED = "0x10de", "0x1a03"


class NumaMachine:
    """A made-up machine: CPUs of each node, and GPUs by node, ``0000:1n:00.0`` the n-th."""

    def __init__(self, root: Path, nodes: list[str], gpus: list[int], *, cpuset: str = "", version: int = 2) -> None:
        self.root = root
        self.cpus = frozenset().union(*map(parse_cpu_list, nodes))
        self.write("sys/devices/system/node/online", f"0-{len(nodes) - 1}" if len(nodes) > 1 else "0")
        self.write("sys/devices/system/cpu/online", format_cpu_list(self.cpus))
        devices = [*((f"0000:1{number}:00.0", node, NVIDIA, "0x030200") for number, node in enumerate(gpus))]
        devices += [("0000:00:01.0", 0, ASPEED, "0x030000"), ("0000:00:02.0", 0, NVIDIA, "0x068000")]  # no GPUs
        for address, node, vendor, kind in devices:
            folder = f"sys/bus/pci/devices/{address}"
            self.write(f"{folder}/numa_node", str(node))
            self.write(f"{folder}/local_cpulist", nodes[node] if node >= 0 else format_cpu_list(self.cpus))
            self.write(f"{folder}/vendor", vendor)
            self.write(f"{folder}/class", kind)
        if cpuset:
            self.write("proc/self/cgroup", "0::/job" if version == 2 else "3:cpuset:/job")
            mount = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,cpuset"
            point = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/cpuset"
            self.write("proc/self/mountinfo", f"31 23 0:28 / {point} rw - {mount}")
            name = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
            self.write(f"{point[1:]}/job/{name}", cpuset)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def place(self, gpu: int = 0, *, ranks: int = 1, allowed: str = "") -> Placement:
        cpus = parse_cpu_list(allowed) if allowed else self.cpus
        return find_placement(f"0000:1{gpu}:00.0", device=f"cuda:{gpu}", ranks=ranks, allowed=cpus, root=str(self.root))


TWO = ["0-15,32-47", "16-31,48-63"]
EIGHT = [0, 0, 0, 0, 1, 1, 1, 1]


def test_workers_go_to_the_node_of_their_gpu(tmp_path):
    machine = NumaMachine(tmp_path, TWO, EIGHT)
    found = machine.place(5)
    assert found.cpus_for(32) == parse_cpu_list(TWO[1])
    assert found.describe(12) == "workers on CPUs 16-31,48-63, ring in the memory of NUMA node 1, near cuda:5"
    assert found.describe(0) == "ring in the memory of NUMA node 1, near cuda:5"
    assert machine.place(0).cpus_for(1) == parse_cpu_list(TWO[0])


def test_more_workers_than_the_node_has_cpus_run_on_all(tmp_path):
    found = NumaMachine(tmp_path, TWO, EIGHT).place(0)
    assert found.cpus_for(33) == frozenset()
    assert found.describe(33) == (
        "ring in the memory of NUMA node 0, near cuda:0; 33 workers run on all CPUs, since that node has only 32"
    )


@pytest.mark.parametrize(
    ("gpus", "ranks", "most"),
    [
        (EIGHT, 8, 8),  # four ranks share a node's 32 CPUs
        ([0] * 8, 8, 4),  # all eight do, and the other node is nobody's
        (EIGHT, 2, 16),  # both may be here
        (EIGHT, 16, 4),  # two for each GPU
        ([0, 1], 1, 32),
        ([0, 1], 2, 32),
    ],
)
def test_ranks_whose_gpus_are_near_the_same_node_share_its_cpus(tmp_path, gpus, ranks, most):
    found = NumaMachine(tmp_path, TWO, gpus).place(0, ranks=ranks)
    assert found.max_workers == most
    assert found.cpus_for(most) == parse_cpu_list(TWO[0])
    assert not found.cpus_for(most + 1)
    if most < 32:
        assert (
            f"{most + 1} workers run on all CPUs, since that node has only 32, of which {most} are for this rank"
            in found.describe(most + 1)
        )


@pytest.mark.parametrize(
    ("nodes", "gpus", "allowed", "why"),
    [
        (["0-63"], [0], "", "one NUMA node: nothing to place"),
        (TWO, [-1], "", r"the NUMA node of cuda:0 \(0000:10:00.0\) is unknown: nothing is placed"),
        (
            TWO,
            [0],
            "0-15",
            "this process is restricted to 16 of 64 CPUs, and so are its workers; cuda:0 is near NUMA node 0",
        ),
        (TWO, [0], "0-62", "this process is restricted to 63 of 64 CPUs, .*"),
        (["0-63", ""], [1], "", "this process may use no CPU near cuda:0, on NUMA node 1: nothing is placed"),
        (["", "0-63"], [1], "", "all CPUs that this process may use are near cuda:0, on NUMA node 1"),
    ],
    ids=["one node", "unknown", "pinned", "one less", "memory only", "all near"],
)
def test_nothing_is_done(tmp_path, nodes, gpus, allowed, why):
    found = NumaMachine(tmp_path, nodes, gpus).place(allowed=allowed)
    assert not found.cpus
    assert not found.cpus_for(1)
    assert re.fullmatch(why, found.describe(4))


@pytest.mark.parametrize("version", [1, 2])
def test_the_cpus_of_a_container_are_no_choice_of_the_user(tmp_path, version):
    machine = NumaMachine(tmp_path, TWO, EIGHT, cpuset="0-3,16-31", version=version)
    assert machine.place(0, allowed="0-3,16-31").describe(4).startswith("workers on CPUs 0-3, ring in the memory")
    assert (
        machine.place(0, allowed="0-3,16-31")
        .describe(5)
        .endswith("5 workers run on all CPUs, since that node has only 4")
    )
    assert machine.place(0, allowed="0-3").describe(4).startswith("this process is restricted to 4 of 20 CPUs")


def test_a_gpu_that_is_not_on_the_bus(tmp_path):
    assert "is unknown" in NumaMachine(tmp_path, TWO, [0]).place(7).describe(1)


def test_a_device_on_the_pci_bus(monkeypatch):
    told = type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert devices.pci_address(torch.device("cuda", 0)) == "0000:3b:00.0"
    assert devices.pci_address(torch.device("cpu")) is None
    assert devices.pci_address(torch.device("xpu", 0)) is None
    monkeypatch.delattr(told, "pci_domain_id")
    assert devices.pci_address(torch.device("cuda", 0)) is None


# -- for real: workers of this machine, which is told that its GPU is near its last CPU -----------------------------

OWN = frozenset(os.sched_getaffinity(0))
LAST = max(OWN)
OTHERS = format_cpu_list(OWN - {LAST})
several = lacking.mark("two CPUs", len(OWN) < 2)


class Where:
    """Samples that say where they are read; reading number 3 for the first time kills the worker, if asked to."""

    def __init__(self, marker: str = "") -> None:
        self.marker = marker

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        if index == 3 and self.marker and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros((4, 4, 3), np.uint8), sum(1 << cpu for cpu in os.sched_getaffinity(0)), os.getpid()


@pytest.fixture
def near_the_last(tmp_path, monkeypatch):
    machine = NumaMachine(tmp_path, [OTHERS, str(LAST)], [1])
    monkeypatch.setattr(devices, "pci_address", lambda device: "0000:10:00.0")
    here = partial(find_placement, root=str(machine.root))
    monkeypatch.setattr("gpuload.loader.options.find_placement", here)


def masks(loader) -> set[int]:
    return {int(mask) for _, masks, _ in loader for mask in masks}


@several
@pytest.mark.fresh
@pytest.mark.processes
def test_a_worker_and_the_one_in_its_place_run_near_the_gpu(near_the_last, tmp_path, caplog):
    caplog.set_level(logging.INFO, "gpuload.loader")
    told = f"workers on CPUs {LAST}, ring in the memory of NUMA node 1, near cpu"
    with gl.Loader(
        Where(str(tmp_path / "died")), 2, num_workers=1, device="cpu", transforms=[T.CenterCrop(2)]
    ) as loader:
        assert str(loader.plan()).splitlines()[-1] == f"placement: {told}"
        assert f"placement: {told}" in loader.plan()._repr_html_()
        assert masks(loader) == {1 << LAST}
        stats = loader.stats()
        assert stats.faults.restarts == 1
        assert stats.cpu.placement == told
        assert f"placed    {told}" in str(stats)
        assert os.sched_getaffinity(0) == OWN
        assert loader._session.ring._near == {LAST}
    assert f"placement: {told}" in [record.getMessage() for record in caplog.records]


@several
@pytest.mark.fresh
@pytest.mark.processes
def test_workers_are_set_free_when_there_are_more_of_them_than_cpus_and_come_back(near_the_last):
    with gl.Loader(Where(), 2, num_workers="auto", device="cpu") as loader:
        assert loader.num_workers == 1
        assert masks(loader) == {1 << LAST}
        pool = loader._session.engine
        pool.resize(2)
        assert os.sched_getaffinity(pool.pids[0]) == OWN
        while not pool.is_steady:
            pool.collect_events(0.1)
        assert [os.sched_getaffinity(pid) for pid in pool.pids] == [OWN, OWN]
        pool.resize(1)
        assert {frozenset(os.sched_getaffinity(pid)) for pid in pool.pids} == {frozenset({LAST})}


@several
@pytest.mark.fresh
@pytest.mark.processes
@pytest.mark.parametrize("options", [{"affinity": "none", "num_workers": 1}, {"num_workers": 2}])
def test_workers_run_anywhere(near_the_last, options):
    with gl.Loader(Where(), 2, device="cpu", **options) as loader:
        assert masks(loader) == {sum(1 << cpu for cpu in OWN)}
        told = loader.stats().cpu.placement
    assert told == (
        "affinity='none': nothing is placed"
        if "affinity" in options
        else "ring in the memory of NUMA node 1, near cpu; 2 workers run on all CPUs, since that node has only 1"
    )


@several
def test_slots_are_page_locked_near_the_gpu(near_the_last, monkeypatch):
    """Page-locking touches memory for the first time, and so decides on which node it lies."""
    device = Device()
    seen, lock = [], device.lock
    monkeypatch.setattr(device, "lock", lambda *at: (seen.append(os.sched_getaffinity(0)), lock(*at))[1])
    monkeypatch.setattr(devices, "Accelerator", lambda asked: device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("gpuload.loader.session.make_transfer", CudaTransfer)
    with gl.Loader(Where(), 2, num_workers=0, device="cpu", transforms=[T.CenterCrop(2)]) as loader:
        assert masks(loader) == {sum(1 << cpu for cpu in OWN)}
        assert loader.stats().cpu.placement == "ring in the memory of NUMA node 1, near cpu"
    assert seen
    assert all(cpus == {LAST} for cpus in seen)


def test_a_loader_on_the_cpu_has_nothing_to_place():
    with gl.Loader([np.zeros((4, 4, 3), np.uint8)] * 2, 2, num_workers=0, device="cpu") as loader:
        list(loader)
        assert loader.stats().cpu.placement == ""
        assert loader.plan().placement is None
        assert "place" not in str(loader.plan()) + str(loader.stats())


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5-6,9-10", {5, 6, 9, 10})]
)
def test_lists_of_cpus_as_the_kernel_writes_them(text, cpus):
    assert parse_cpu_list(f"{text}\n") == cpus
    assert format_cpu_list(cpus) == text
