"""Where workers go, by a made-up ``/sys`` of a machine with several NUMA nodes."""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path

import lacking
import numpy as np
import pytest
import torch
from devices import Device

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader import placement
from gpuload.loader.placement import Placement, find_placement
from gpuload.stage import accelerator
from gpuload.stage.transfer import CudaTransfer

pytestmark = pytest.mark.fresh

NVIDIA, ASPEED = "0x10de", "0x1a03"


class Machine:
    """A made-up machine: CPUs of each node, and GPUs by node, ``0000:1n:00.0`` the n-th."""

    def __init__(self, root: Path, nodes: list[str], gpus: list[int], *, cpuset: str = "", version: int = 2) -> None:
        self.root = root
        self.cpus = frozenset().union(*map(placement.cpus_in, nodes))
        self.write("sys/devices/system/node/online", f"0-{len(nodes) - 1}" if len(nodes) > 1 else "0")
        self.write("sys/devices/system/cpu/online", placement.cpu_list(self.cpus))
        devices = [*((f"0000:1{number}:00.0", node, NVIDIA, "0x030200") for number, node in enumerate(gpus))]
        devices += [("0000:00:01.0", 0, ASPEED, "0x030000"), ("0000:00:02.0", 0, NVIDIA, "0x068000")]  # no GPUs
        for address, node, vendor, kind in devices:
            folder = f"sys/bus/pci/devices/{address}"
            self.write(f"{folder}/numa_node", str(node))
            self.write(f"{folder}/local_cpulist", nodes[node] if node >= 0 else placement.cpu_list(self.cpus))
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
        cpus = placement.cpus_in(allowed) if allowed else self.cpus
        return find_placement(f"0000:1{gpu}:00.0", device=f"cuda:{gpu}", ranks=ranks, allowed=cpus, root=str(self.root))


TWO = ["0-15,32-47", "16-31,48-63"]
EIGHT = [0, 0, 0, 0, 1, 1, 1, 1]


def test_workers_go_to_the_node_of_their_gpu(tmp_path):
    machine = Machine(tmp_path, TWO, EIGHT)
    found = machine.place(5)
    assert found.cpus_for(32) == placement.cpus_in(TWO[1])
    assert found.told(12) == "workers on CPUs 16-31,48-63, ring in the memory of NUMA node 1, near cuda:5"
    assert found.told(0) == "ring in the memory of NUMA node 1, near cuda:5"
    assert machine.place(0).cpus_for(1) == placement.cpus_in(TWO[0])


def test_more_workers_than_the_node_has_cpus_run_on_all(tmp_path):
    found = Machine(tmp_path, TWO, EIGHT).place(0)
    assert found.cpus_for(33) == frozenset()
    assert found.told(33) == (
        "ring in the memory of NUMA node 0, near cuda:0; 33 workers run on all CPUs, as that node has 32"
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
    found = Machine(tmp_path, TWO, gpus).place(0, ranks=ranks)
    assert found.most == most
    assert found.cpus_for(most) == placement.cpus_in(TWO[0])
    assert not found.cpus_for(most + 1)
    if most < 32:
        assert f"{most + 1} workers run on all CPUs, as that node has 32, {most} for this rank" in found.told(most + 1)


@pytest.mark.parametrize(
    ("nodes", "gpus", "allowed", "why"),
    [
        (["0-63"], [0], "", "one NUMA node: nothing to place"),
        (TWO, [-1], "", r"the NUMA node of cuda:0 \(0000:10:00.0\) is not known: nothing is placed"),
        (
            TWO,
            [0],
            "0-15",
            "this process was put on 16 of 64 CPUs, and its workers stay there: cuda:0 is near NUMA node 0",
        ),
        (TWO, [0], "0-62", "this process was put on 63 of 64 CPUs, .*"),
        (["0-63", ""], [1], "", "no CPU near cuda:0, on NUMA node 1, may be used: nothing is placed"),
        (["", "0-63"], [1], "", "all CPUs that may be used are near cuda:0, on NUMA node 1"),
    ],
    ids=["one node", "unknown", "pinned", "one less", "memory only", "all near"],
)
def test_nothing_is_done(tmp_path, nodes, gpus, allowed, why):
    found = Machine(tmp_path, nodes, gpus).place(allowed=allowed)
    assert not found.cpus
    assert not found.cpus_for(1)
    assert re.fullmatch(why, found.told(4))


@pytest.mark.parametrize("version", [1, 2])
def test_the_cpus_of_a_container_are_no_choice_of_the_user(tmp_path, version):
    machine = Machine(tmp_path, TWO, EIGHT, cpuset="0-3,16-31", version=version)
    assert machine.place(0, allowed="0-3,16-31").told(4).startswith("workers on CPUs 0-3, ring in the memory")
    assert machine.place(0, allowed="0-3,16-31").told(5).endswith("5 workers run on all CPUs, as that node has 4")
    assert machine.place(0, allowed="0-3").told(4).startswith("this process was put on 4 of 20 CPUs")


def test_a_gpu_that_is_not_on_the_bus(tmp_path):
    assert "is not known" in Machine(tmp_path, TWO, [0]).place(7).told(1)


def test_a_device_on_the_pci_bus(monkeypatch):
    told = type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert accelerator.pci_address(torch.device("cuda", 0)) == "0000:3b:00.0"
    assert accelerator.pci_address(torch.device("cpu")) is None
    assert accelerator.pci_address(torch.device("xpu", 0)) is None
    monkeypatch.delattr(told, "pci_domain_id")
    assert accelerator.pci_address(torch.device("cuda", 0)) is None


def test_affinity_is_checked():
    with pytest.raises(ValueError, match=r"affinity must be 'auto' \(workers near the GPU.*\) or 'none', got 'numa'"):
        gl.Loader([0], affinity="numa", num_workers=0)  # pyright: ignore[reportArgumentType]


# -- for real: workers of this machine, which is told that its GPU is near its last CPU -----------------------------

OWN = frozenset(os.sched_getaffinity(0))
LAST = max(OWN)
OTHERS = placement.cpu_list(OWN - {LAST})
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
    machine = Machine(tmp_path, [OTHERS, str(LAST)], [1])
    monkeypatch.setattr(accelerator, "pci_address", lambda device: "0000:10:00.0")
    found = find_placement
    monkeypatch.setattr(
        "gpuload.loader.prepare.find_placement", lambda *args, **named: found(*args, **named, root=str(machine.root))
    )


def masks(loader) -> set[int]:
    return {int(mask) for _, masks, _ in loader for mask in masks}


@several
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
        assert stats.restarts == 1
        assert stats.placement == told
        assert f"placed    {told}" in str(stats)
        assert os.sched_getaffinity(0) == OWN
        assert loader._session.ring._near == {LAST}
    assert f"placement: {told}" in [record.getMessage() for record in caplog.records]


@several
@pytest.mark.processes
def test_workers_are_set_free_when_there_are_more_of_them_than_cpus_and_come_back(near_the_last):
    with gl.Loader(Where(), 2, num_workers="auto", device="cpu") as loader:
        assert loader.num_workers == 1
        assert masks(loader) == {1 << LAST}
        pool = loader._session.engine
        pool.resize(2)
        assert os.sched_getaffinity(pool.pids[0]) == OWN
        while not pool.is_steady:
            pool.gather(0.1)
        assert [os.sched_getaffinity(pid) for pid in pool.pids] == [OWN, OWN]
        pool.resize(1)
        assert {frozenset(os.sched_getaffinity(pid)) for pid in pool.pids} == {frozenset({LAST})}


@several
@pytest.mark.processes
@pytest.mark.parametrize("options", [{"affinity": "none", "num_workers": 1}, {"num_workers": 2}])
def test_workers_run_anywhere(near_the_last, options):
    with gl.Loader(Where(), 2, device="cpu", **options) as loader:
        assert masks(loader) == {sum(1 << cpu for cpu in OWN)}
        told = loader.stats().placement
    assert told == (
        "affinity='none': nothing is placed"
        if "affinity" in options
        else "ring in the memory of NUMA node 1, near cpu; 2 workers run on all CPUs, as that node has 1"
    )


@several
def test_slots_are_page_locked_near_the_gpu(near_the_last, monkeypatch):
    """Page-locking touches memory for the first time, and so decides on which node it lies."""
    device = Device()
    seen, lock = [], device.lock
    monkeypatch.setattr(device, "lock", lambda *at: (seen.append(os.sched_getaffinity(0)), lock(*at))[1])
    monkeypatch.setattr(accelerator, "accelerator", lambda asked: device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("gpuload.loader.session.make_transfer", CudaTransfer)
    with gl.Loader(Where(), 2, num_workers=0, device="cpu", transforms=[T.CenterCrop(2)]) as loader:
        assert masks(loader) == {sum(1 << cpu for cpu in OWN)}
        assert loader.stats().placement == "ring in the memory of NUMA node 1, near cpu"
    assert seen
    assert all(cpus == {LAST} for cpus in seen)


def test_a_loader_on_the_cpu_has_nothing_to_place():
    with gl.Loader([np.zeros((4, 4, 3), np.uint8)] * 2, 2, num_workers=0, device="cpu") as loader:
        list(loader)
        assert loader.stats().placement == ""
        assert loader.plan().placement is None
        assert "place" not in str(loader.plan()) + str(loader.stats())
