"""The facts that `gpuload doctor` looks at, and all checks of them in the order of their weight.

Reads /proc and limits in this process, and starts the trials; imports no torch here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gpuload import __version__
from gpuload.cli.doctor import gpu, machine, packages
from gpuload.cli.doctor.finding import Finding
from gpuload.cli.doctor.trial import LOCKED_BYTES, STEPS, begin, sample_jpeg
from gpuload.loader.limits import default_workers, near, numa_nodes, usable_cpus
from gpuload.workers.process import check_platform

__all__ = ["examine", "processes_left"]

NVIMGCODEC: Final = {"cu12": "nvidia-nvimgcodec-cu12", "cu13": "nvidia-nvimgcodec-cu13"}
DALI: Final = {"cu12": "nvidia-dali-cuda120", "cu13": "nvidia-dali-cuda130"}
OPTIONAL: Final = {  # what is tried only if it is installed, by distribution
    "Triton": ("triton",),
    "kornia": ("kornia",),
    "torchvision": ("torchvision",),
    "DALI": tuple(DALI.values()),
    "nvImageCodec": tuple(NVIMGCODEC.values()),
    "regions": tuple(NVIMGCODEC.values()),
}
Results = Mapping[str, dict[str, Any]]


def examine(progress: Callable[[int, int], None] = lambda done, total: None) -> list[Finding]:
    """Look at everything. `progress` is told how many steps are done, and of how many. Takes some seconds."""
    try:
        jpeg = sample_jpeg()
    except Exception:  # Pillow is broken: its own trial says how
        jpeg = b""
    wanted = [step for step in STEPS if step not in OPTIONAL or any(map(_version, OPTIONAL[step]))]
    trials = begin(jpeg, wanted)
    tried: dict[str, dict[str, Any]] = {}
    progress(0, len(wanted))
    for trial in trials:
        tried |= trial.results()
        progress(len(tried), len(wanted))
    return _on_machine(tried) + _on_gpu(tried) + _on_packages(tried)


def _on_machine(tried: Results) -> list[Finding]:
    usable = usable_cpus()
    workers = default_workers(usable, 1)
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    started = tried["workers"]
    found = f"one started and gave its batch in {started['seconds']:.1f} s" if started["ok"] else started["said"]
    return [
        machine.cpus(usable=usable, affinity=len(os.sched_getaffinity(0)), online=os.cpu_count() or 1),
        machine.memory(workers=workers, available_bytes=_available_bytes()),
        machine.open_files(workers=workers, soft=soft, hard=hard),
        machine.processes(left=processes_left(), workers=workers),
        Finding(
            "workers",
            "works" if started["ok"] else "broken",
            found,
            "" if started["ok"] else f"until this is fixed: num_workers=0. The default here is {workers}",
        ),
    ]


def _on_gpu(tried: Results) -> list[Finding]:
    version, cuda = _driver()
    torch = tried["torch"]
    devices = len(torch.get("devices", []))
    return [
        gpu.torch_build(torch, driver_cuda=cuda),
        gpu.driver(version=version, cuda=cuda),
        gpu.gpus(torch, driver_cuda=cuda),
        gpu.placement(
            [(f"GPU {number}", *near(device.get("address"))) for number, device in enumerate(torch.get("devices", []))],
            nodes=numa_nodes(),
        ),
        gpu.page_locking(
            limit_bytes=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
            locked_bytes=LOCKED_BYTES,
            code=tried["page-locked memory"].get("code"),
        ),
        gpu.compiler(
            path=os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None),
            devices=devices,
        ),
        gpu.triton(version=_version("triton"), tried=tried.get("Triton"), devices=devices),
    ]


def _on_packages(tried: Results) -> list[Finding]:
    cuda = tried["torch"].get("cuda")
    codec = {extra: version for extra, name in NVIMGCODEC.items() if (version := _version(name))}
    dali = {extra: version for extra, name in DALI.items() if (version := _version(name))}
    decodes = bool(codec) and tried["nvImageCodec"]["ok"]
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return [
        packages.nvimagecodec(installed=codec, tried=tried.get("nvImageCodec"), torch_cuda=cuda, others=list(dali)),
        *([packages.regions(tried=tried["regions"])] if "regions" in tried else []),
        packages.simplejpeg(version=_version("simplejpeg"), tried=tried["simplejpeg"], first=not decodes),
        packages.pillow(version=_version("pillow"), tried=tried["Pillow"]),
        packages.dali(installed=dali, tried=tried.get("DALI"), torch_cuda=cuda, others=list(codec)),
        packages.optional(
            "kornia",
            version=_version("kornia"),
            tried=tried.get("kornia"),
            use="for the backend 'kornia'",
            install="pip install 'gpuload[kornia]'",
        ),
        packages.optional(
            "torchvision",
            version=_version("torchvision"),
            tried=tried.get("torchvision"),
            use="for transforms that are taken over from it",
            install="pip install torchvision, of the release that goes with torch",
        ),
        packages.jpegtran(path=shutil.which("jpegtran")),
        packages.extras({name: all(map(_is_there, modules)) for name, modules in packages.EXTRAS.items()}),
        machine.shared_memory(total_bytes=shm.f_frsize * shm.f_blocks if shm else None),
        machine.system(
            version=__version__,
            kernel=platform.release(),
            page_bytes=resource.getpagesize(),
            python=platform.python_version(),
            problem=_no_workers(),
        ),
    ]


def _no_workers() -> str:
    try:
        check_platform()
    except RuntimeError as error:
        return str(error)
    return ""


def processes_left(root: str = "/", *, uid: int | None = None) -> int | None:
    """How many more processes and threads may be started: by the control group, and by the user's own limit (which the
    superuser does not have). None for no limit. `root` is the folder used as ``/``; `uid` is this process's."""
    left = []
    for line in _lines(Path(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            top = Path(root, "sys/fs/cgroup", controllers)
            folder = top / path.lstrip("/")
            for place in (folder, *(above for above in folder.parents if above.is_relative_to(top))):
                most, now = _lines(place / "pids.max"), _lines(place / "pids.current")
                if most and now and most[0].isdigit():
                    left.append(max(0, int(most[0]) - int(now[0])))
    uid = os.geteuid() if uid is None else uid
    limit = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if uid and limit is not None:
        left.append(max(0, limit - _threads_of(uid, root)))
    return min(left, default=None)


def _threads_of(uid: int, root: str) -> int:
    count = 0
    for entry in Path(root, "proc").iterdir():
        if entry.name.isdigit():
            try:
                count += len(os.listdir(entry / "task")) if entry.stat().st_uid == uid else 0
            except OSError:  # it has ended
                continue
    return count


def _driver() -> tuple[str | None, str | None]:
    """The version of NVIDIA's driver, and the newest CUDA that it runs; None for what is not there."""
    found = re.search(r"Kernel Module\D*([\d.]+)", "\n".join(_lines(Path("/proc/driver/nvidia/version"))))
    try:
        number = ctypes.c_int()
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        status = -1
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}" if status == 0 and number.value else None
    return found[1] if found else None, cuda


def _available_bytes() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    return find_spec(module) is not None
