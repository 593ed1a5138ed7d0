"""The driver, torch, the GPUs, page-locked memory, and what compiles kernels. Functions of facts; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from gpuload.cli.console import count_of
from gpuload.cli.doctor.finding import Finding
from gpuload.cli.doctor.machine import size_of

__all__ = ["compiler", "driver", "gpus", "page_locking", "placement", "torch_build", "triton"]

OLDEST: Final = (2, 8)
LOCK_MEND: Final = "ulimit -l unlimited in the shell, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in systemd"


def driver(*, version: str | None, cuda: str | None) -> Finding:
    """NVIDIA's driver: its version, and the newest CUDA that it runs."""
    if version is None and cuda is None:
        return Finding("NVIDIA driver", "not needed", "there is none: everything runs on the CPU")
    found = f"{version or 'of unknown version'}, runs CUDA up to {cuda or 'unknown'}"
    if cuda is None:
        return Finding(
            "NVIDIA driver",
            "broken",
            f"{found}: the driver is there, its library libcuda.so.1 is not",
            "install the driver's libraries; in a container, docker run --gpus all with the NVIDIA container toolkit",
        )
    return Finding("NVIDIA driver", "works", found)


def torch_build(tried: dict[str, Any], *, driver_cuda: str | None) -> Finding:
    """torch: its version, and the CUDA that it was built for; `driver_cuda` is what the driver runs, None without."""
    if not tried["ok"]:
        return Finding("torch", "broken", f"cannot be imported: {tried['said']}", "pip install --force-reinstall torch")
    version, cuda, other = tried["version"], tried["cuda"], tried["other"]
    found = f"{version}, built for {f'CUDA {cuda}' if cuda else other or 'the CPU'}"
    if _numbers(version) < OLDEST:
        return Finding("torch", "broken", f"{found}; gpuload needs 2.8 or newer", "pip install --upgrade torch")
    if driver_cuda is None or other:
        return Finding("torch", "works", found)
    major = int(driver_cuda.partition(".")[0])
    fitting = "" if major >= 13 else " --index-url https://download.pytorch.org/whl/cu126"
    mend = f"pip install --force-reinstall torch{fitting}"
    if cuda is None:
        return Finding("torch", "broken", f"{found}, but there is an NVIDIA driver: the GPU lies idle", mend)
    if int(cuda.partition(".")[0]) > major:
        return Finding(
            "torch",
            "broken",
            f"{found}, but the driver runs CUDA up to {driver_cuda}",
            f"a newer driver, or {mend}",
        )
    return Finding("torch", "works", found)


def gpus(tried: dict[str, Any], *, driver_cuda: str | None) -> Finding:
    """The devices that torch finds."""
    devices = tried.get("devices", [])
    if devices:
        names = [f"{device['name']} with {size_of(device['bytes'])}" for device in devices]
        same = len(set(names)) == 1 and len(names) > 1
        return Finding("GPUs", "works", f"{len(names)} × {names[0]}" if same else "; ".join(names))
    if driver_cuda is None or not tried["ok"]:
        return Finding("GPUs", "not needed", "none: batches are made on the CPU")
    return Finding(
        "GPUs",
        "broken",
        f"torch finds none, although there is a driver{': ' + tried['said'] if tried.get('said') else ''}",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, docker run --gpus all",
    )


def placement(places: Sequence[tuple[str, int, str]], *, nodes: int) -> Finding:
    """The NUMA nodes of the devices.

    Args:
        places: of each device its name, its node (-1: not known), and the CPUs of that node, as a list.
        nodes: how many the machine has.
    """
    name = "NUMA"
    if not places:
        return Finding(name, "not needed", f"{count_of(nodes, 'node')}; without a GPU nothing is near one")
    if nodes < 2:
        return Finding(name, "works", "one node: all CPUs are near the GPU")
    found = "; ".join(
        f"{device} is near node {node}, CPUs {cpus}" if node >= 0 else f"the node of {device} is not known"
        for device, node, cpus in places
    )
    if all(node >= 0 for _, node, _ in places):
        return Finding(name, "works", f"{nodes} nodes: {found}. Workers go there if it has enough CPUs")
    return Finding(
        name,
        "improve",
        f"{nodes} nodes: {found}. Workers and decoded pixels may be far from the GPU",
        "let the machine, or its hypervisor, say numa_node in /sys/bus/pci/devices; or numactl --cpunodebind",
    )


def page_locking(*, limit_bytes: int | None, locked_bytes: int, code: int | None) -> Finding:
    """Page-locked memory, from which copies to a GPU run on their own.

    Args:
        limit_bytes: of memory that a process may lock (``ulimit -l``); None: no limit.
        locked_bytes: what was locked on trial.
        code: 0, or the runtime's error; None: there is no GPU to lock memory for.
    """
    limit = "no limit" if limit_bytes is None else size_of(limit_bytes)
    name = "page-locked memory"
    if code is None:
        return Finding(name, "not needed", f"the limit (ulimit -l) is {limit}; without a GPU nothing is locked")
    if code == 0:
        return Finding(name, "works", f"{size_of(locked_bytes)} were locked on trial; the limit (ulimit -l) is {limit}")
    return Finding(
        name,
        "broken",
        f"{size_of(locked_bytes)} could not be locked (error {code}); the limit (ulimit -l) is {limit}. Copies to the "
        "GPU are slower, and the training loop waits for them",
        LOCK_MEND,
    )


def triton(*, version: str | None, tried: dict[str, Any] | None, devices: int) -> Finding:
    """Triton, which the backend ``"fused"`` is made with; `tried`: a kernel compiled on the GPU."""
    if not devices:
        return Finding("Triton", "not needed", "runs on GPUs only" + (f"; {version} is installed" if version else ""))
    if version is None:
        return Finding(
            "Triton",
            "improve",
            "not installed: transforms run in torch, several times slower than fused",
            "pip install 'gpuload[fused]'",
        )
    if tried is not None and not tried["ok"]:
        return Finding("Triton", "broken", f"{version}, cannot be used: {tried['said']}", "see the line C compiler")
    return Finding("Triton", "works", f"{version}: the backend 'fused' can be used")


def compiler(*, path: str | None, devices: int) -> Finding:
    """A C compiler, with which Triton makes its launchers."""
    if path is not None:
        return Finding("C compiler", "works" if devices else "not needed", f"{path} (for Triton, on a GPU)")
    if not devices:
        return Finding("C compiler", "not needed", "none; Triton takes one, on a GPU")
    return Finding(
        "C compiler",
        "broken",
        f"none, but Triton needs one: without it the transforms of {count_of(devices, 'GPU')} run in torch, slower",
        "apt-get install gcc, or set CC to the path of one",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
