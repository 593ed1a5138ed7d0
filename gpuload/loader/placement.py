"""Near which CPUs a GPU is, and whether workers go there: read from ``/sys``, decided without starting anything.

A GPU belongs to one NUMA node of a machine with several. Pixels that workers of another node write, or that lie in its
memory, cross the link between the nodes on their way. So workers go to the CPUs of the GPU's node, and the ring to its
memory; but not where that would leave workers fewer CPUs than there are of them, nor where somebody has already chosen
CPUs for this process. Runs in the main process; keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from gpuload.loader.limits import control_groups
from gpuload.ring.affinity import cpu_list, cpus_in

__all__ = ["Placement", "find_placement", "near", "numa_nodes"]

DEVICES = "sys/bus/pci/devices"
DISPLAY, ACCELERATOR = "0x03", "0x12"  # of PCI's classes, those of GPUs


@dataclass(frozen=True)
class Placement:
    """Where workers and ring of a loader go.

    Attributes:
        device: the GPU, and node: its NUMA node, if the ring goes there.
        cpus: those of that node that this process may use; empty: nothing is done.
        most: so many workers may be there: each has a CPU, also if every rank near that node has as many.
        why: why nothing is done.
    """

    device: str = ""
    node: int = -1
    cpus: frozenset[int] = frozenset()
    most: int = 0
    why: str = ""

    def cpus_for(self, workers: int) -> frozenset[int]:
        """Where so many workers run; empty: wherever this process may."""
        return self.cpus if workers <= self.most else frozenset()

    def told(self, workers: int) -> str:
        """What is done, in words; "" where there is nothing to place."""
        if not self.cpus:
            return self.why
        node, count = f"NUMA node {self.node}, near {self.device}", len(self.cpus)
        ring = f"ring in the memory of {node}"
        if not workers:
            return ring
        if self.cpus_for(workers):
            return f"workers on CPUs {cpu_list(self.cpus)}, {ring}"
        shared = "" if self.most == count else f", {self.most} for this rank"
        return f"{ring}; {workers} workers run on all CPUs, as that node has {count}{shared}"


def find_placement(
    address: str, *, device: str, ranks: int, allowed: Set[int] | None = None, root: str = "/"
) -> Placement:
    """Where the workers of a GPU go.

    Args:
        address: the GPU's, on the PCI bus: ``"0000:3b:00.0"``.
        device: its name, for messages.
        ranks: how many training processes this machine has.
        allowed: the CPUs that this process may use; None: as its affinity says.
        root: the folder used as ``/``.
    """
    if numa_nodes(root) < 2:
        return Placement(why="one NUMA node: nothing to place")
    node, cpus = near(address, root)
    if node < 0:
        return Placement(why=f"the NUMA node of {device} ({address}) is not known: nothing is placed")
    given, allowed = _given(root), os.sched_getaffinity(0) if allowed is None else allowed
    if given - allowed:
        return Placement(
            why=f"this process was put on {len(allowed)} of {len(given)} CPUs, and its workers stay there: {device} is "
            f"near NUMA node {node}"
        )
    there = cpus_in(cpus) & allowed
    if not there:
        return Placement(why=f"no CPU near {device}, on NUMA node {node}, may be used: nothing is placed")
    if there == allowed:
        return Placement(why=f"all CPUs that may be used are near {device}, on NUMA node {node}")
    return Placement(device, node, there, len(there) // _ranks_near(root, address, node, ranks))


def near(address: str | None, root: str = "/") -> tuple[int, str]:
    """The NUMA node of a device on the PCI bus, -1 if that is not known, and the list of the node's CPUs."""
    folder = f"{DEVICES}/{address}"
    text = _read(root, f"{folder}/numa_node")
    return int(text) if text.isdigit() else -1, _read(root, f"{folder}/local_cpulist")


def numa_nodes(root: str = "/") -> int:
    """How many NUMA nodes the machine has, at least 1."""
    return max(1, len(cpus_in(_read(root, "sys/devices/system/node/online"))))


def _given(root: str) -> frozenset[int]:
    """The CPUs that this process has if nobody chose some of them for it: those of its control group."""
    for folder, version in control_groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective",) if version == "cgroup2" else ("cpuset.effective_cpus", "cpuset.cpus"):
            if found := cpus_in(_read(folder, name)):
                return found
    return cpus_in(_read(root, "sys/devices/system/cpu/online"))


def _ranks_near(root: str, address: str, node: int, ranks: int) -> int:
    """How many of this machine's ranks have their GPU near a node, at most: one for each GPU there, or several if there
    are more ranks than GPUs."""
    vendor = _read(root, f"{DEVICES}/{address}/vendor")
    nodes = []
    for other in os.listdir(Path(root, DEVICES)):
        kind = _read(root, f"{DEVICES}/{other}/class")
        if kind.startswith((DISPLAY, ACCELERATOR)) and _read(root, f"{DEVICES}/{other}/vendor") == vendor:
            nodes.append(near(other, root)[0])
    return max(1, min(ranks, nodes.count(node) * -(-ranks // max(1, len(nodes)))))


def _read(root: str, path: str) -> str:
    try:
        return Path(root, path).read_text().strip()
    except OSError:
        return ""
