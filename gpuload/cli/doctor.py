"""``gpuload doctor``: reports which parts of this machine and installation work, which do not, and how to fix them.

Each check is a function that takes facts and returns a `Finding`. The facts are gathered in this process, which does
not import torch; trials that can crash, hang or take seconds run in separate processes (`gpuload.cli.trial`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuload import __version__
from gpuload.cli.console import echo, format_count, make_console, progress, write_json
from gpuload.cli.trial import ISOLATED, LOCKED_BYTES, STEPS, sample_jpeg, try_in_process
from gpuload.errors import LimitError
from gpuload.loader import limits
from gpuload.workers.process import check_platform

__all__ = ["Finding", "as_dict", "examine", "exit_status", "print_report", "run", "summary"]

State = Literal["works", "improve", "broken", "not needed"]
Trial = Mapping[str, Any]
COLOURS: Final = {"works": "green", "improve": "yellow", "broken": "red", "not needed": "dim"}

SPARE_BYTES: Final = 1_000_000_000  # for batches and decoded images in flight, in addition to the workers' memory
THREADS: Final = 32  # maximum number of threads that the libraries of a worker and of this process start, in total
MIN_TORCH: Final = (2, 8)

# NVIDIA publishes a separate package for each CUDA version. These are the distributions, keyed by gpuload's extra.
NVIDIA: Final = {
    "nvImageCodec": {"cu12": "nvidia-nvimgcodec-cu12", "cu13": "nvidia-nvimgcodec-cu13"},
    "DALI": {"cu12": "nvidia-dali-cuda120", "cu13": "nvidia-dali-cuda130"},
}
OPTIONAL: Final = {  # steps that run only if one of these distributions is installed
    "Triton": ("triton",),
    "DALI": tuple(NVIDIA["DALI"].values()),
    "nvImageCodec": tuple(NVIDIA["nvImageCodec"].values()),
    "regions": tuple(NVIDIA["nvImageCodec"].values()),
}
EXTRAS: Final = {  # the modules that each extra installs
    "demo": ("skimage",), "hdf5": ("h5py",), "lmdb": ("lmdb",), "metrics": ("prometheus_client",),
    "parquet": ("pyarrow",), "ray": ("ray",), "remote": ("fsspec", "aiohttp"), "s3": ("s3fs",), "gs": ("gcsfs",),
    "hf": ("huggingface_hub",), "kornia": ("kornia",),
}  # fmt: skip


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        name: the subject of the check.
        state: ``"works"``; ``"improve"``: works, but limits throughput; ``"broken"``: required or installed, but does
            not work; ``"not needed"``.
        details: the result, with figures.
        fix: the remedy, if possible a command; "" if there is nothing to do.
    """

    name: str
    state: State
    details: str
    fix: str = ""


def run(as_json: str | None = None, console: Console | None = None) -> int:
    """Examine this machine, print the report, and write it as JSON if `as_json` is a path; "-" prints only JSON. Return
    the exit status."""
    with progress(make_console(stderr=True), "checks") as update_progress:
        findings = examine(update_progress)
    if as_json is not None:
        write_json(as_json, as_dict(findings))
    if as_json != "-":
        print_report(findings, console or make_console())
    return exit_status(findings)


def summary(findings: Sequence[Finding]) -> str:
    """Summarise the first of the worst findings in a sentence; `findings` are in order of importance."""
    broken, improve = ([finding for finding in findings if finding.state == state] for state in ("broken", "improve"))
    if broken:
        subject = "1 part is" if len(broken) == 1 else f"{len(broken)} parts are"
        return f"{subject} broken; start with {broken[0].name}: {broken[0].details}"
    if improve:
        return f"Everything required works. For more throughput, start with {improve[0].name}: {improve[0].details}"
    return "Everything required works, and nothing limits throughput."


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if something is broken, else 0."""
    return int(any(finding.state == "broken" for finding in findings))


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the report as a dict for JSON."""
    status = exit_status(findings)
    return {"summary": summary(findings), "exit_status": status, "findings": [row._asdict() for row in findings]}


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as a table, then the remedies and the summary."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = COLOURS[finding.state]
        table.add_row(Text(finding.state, style), finding.name, Text(finding.details, "dim" * (style == "dim")))
    console.print(table)
    to_fix = [finding for finding in findings if finding.fix]
    if to_fix:
        echo(console, "What to do:\n", "bold")
        for finding in to_fix:
            echo(console, f"  {finding.name}: {finding.fix}", to_copy=True)
        console.print()
    echo(console, summary(findings), "bold red" if exit_status(findings) else "bold")


def examine(update_progress: Callable[[int, int], None] = lambda completed, total: None) -> list[Finding]:
    """Run all checks, which takes a few seconds. `update_progress` is called with the number of completed steps and the
    total."""
    try:
        jpeg = sample_jpeg()
    except Exception:  # Pillow is broken: its own trial reports the error
        jpeg = b""
    steps = [step for step in STEPS if step not in OPTIONAL or any(map(_version, OPTIONAL[step]))]
    shared_steps = [step for step in steps if step not in ISOLATED]
    results: dict[str, Trial] = {}
    update_progress(0, len(steps))
    with ThreadPoolExecutor() as threads:
        groups = [*([step] for step in steps if step in ISOLATED), shared_steps]
        for trial in as_completed([threads.submit(try_in_process, group, jpeg) for group in groups]):
            results |= trial.result()
            update_progress(len(results), len(steps))
    return build_findings(results)


def build_findings(results: Mapping[str, Trial]) -> list[Finding]:
    """Return all findings in three groups (the machine, GPUs, packages), each in order of importance."""
    usable = limits.usable_cpus()
    workers, processes_left = limits.default_workers(usable, 1), limits.processes_left()
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    driver, driver_cuda = _driver_versions()
    torch = results["torch"]
    cuda, devices = torch.get("cuda"), len(torch.get("devices", []))
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    versions = {
        name: {extra: version for extra, package in packages.items() if (version := _version(package))}
        for name, packages in NVIDIA.items()
    }
    has_codec = bool(versions["nvImageCodec"]) and results["nvImageCodec"]["ok"]
    jpeg_role = "decodes entire JPEGs, and JPEGs that nvImageCodec refuses" if has_codec else "decodes all JPEGs here"
    pillow_role = "decodes PNG, WebP and other formats, and damaged JPEGs"
    extras = {extra: all(find_spec(module) is not None for module in modules) for extra, modules in EXTRAS.items()}
    return [
        check_cpus(usable=usable, affinity=len(os.sched_getaffinity(0)), online=os.cpu_count() or 1),
        check_memory(workers),
        check_open_files(workers, soft=soft, hard=hard),
        check_processes(workers, processes_left and processes_left[0]),
        check_workers(workers, results["workers"]),
        check_torch(torch, driver_cuda=driver_cuda),
        check_gpus(torch, driver=driver, cuda=driver_cuda),
        check_page_locking(limits.lockable_bytes(), results["page-locked memory"].get("code")),
        check_triton(_version("triton"), results.get("Triton"), compiler=compiler, devices=devices),
        check_nvidia("nvImageCodec", versions, results.get("nvImageCodec"), torch_cuda=cuda),
        *([check_regions(results["regions"])] if "regions" in results else []),
        check_decoder("simplejpeg", _version("simplejpeg"), results["simplejpeg"], jpeg_role),
        check_decoder("Pillow", _version("pillow"), results["Pillow"], pillow_role),
        check_nvidia("DALI", versions, results.get("DALI"), torch_cuda=cuda),
        check_extras(extras, jpegtran=shutil.which("jpegtran") is not None),
        check_system(platform.release(), resource.getpagesize(), platform.python_version(), _platform_problem()),
    ]


# -- what the machine, container or job allows ------------------------------------------------------------------------


def check_cpus(*, usable: int, affinity: int, online: int) -> Finding:
    """Check the number of CPUs: how many are `online`, how many the `affinity` mask allows, and how many are `usable`
    within the CPU quota."""
    bounds = [f"the affinity mask allows {affinity} of {online}"] if affinity < online else []
    bounds += [f"the cgroup CPU quota allows {usable}"] if usable < affinity else []
    details = "; ".join([f"{format_count(usable, 'CPU')} for this process", *bounds])
    if usable > 1:
        return Finding("CPUs", "works", details)
    details += ". Workers read and decode on the CPU, and must share it with the training loop"
    fix = "give the process more CPUs: taskset -c, docker run --cpus, Kubernetes limits.cpu, Slurm --cpus-per-task"
    return Finding("CPUs", "improve", details, fix)


def check_memory(workers: int, *, root: str = "/") -> Finding:
    """Check the free memory within the cgroup limit, or on the machine. `root` is the folder used as ``/``."""
    free, cgroup_bytes = limits.available_bytes(root), limits.memory_left_bytes(root)
    if free is None:
        return Finding("memory", "works", "no known limit")
    details = f"{format_size(free)} free {'within the cgroup limit' if free == cgroup_bytes else 'on the machine'}"
    worker_bytes = workers * limits.WORKER_BYTES
    if free >= worker_bytes + SPARE_BYTES:
        return Finding("memory", "works", details)
    details += ", but" if free < worker_bytes else ", which leaves little for batches and decoded images;"
    details += f" the default of {format_count(workers, 'worker')} uses about {format_size(worker_bytes)}"
    fix = "raise the memory limit (docker run --memory, Kubernetes limits.memory, Slurm --mem), or use fewer workers"
    return Finding("memory", "broken" if free < worker_bytes else "improve", details, fix)


def check_open_files(workers: int, *, soft: int | None, hard: int | None) -> Finding:
    """Check how many file descriptors this process can still open; `soft` and `hard` are the limits, or None."""
    descriptors_left = limits.descriptors_left()
    if descriptors_left is None or soft is None:
        return Finding("open files", "works", "no limit")
    details = f"{descriptors_left:,} of {soft:,} are still available (ulimit -n)"
    try:
        limits.check_descriptors(workers)
    except LimitError:
        can_raise = hard is None or hard > soft
        fix = f"ulimit -n {hard or 'unlimited'}" if can_raise else "ask the administrator to raise the hard limit"
        return Finding("open files", "broken", f"{details}: too few for {format_count(workers, 'worker')}", fix)
    return Finding("open files", "works", details)


def check_processes(workers: int, processes_left: int | None) -> Finding:
    """Check how many more processes and threads can be started; `processes_left` is None if there is no limit."""
    if processes_left is None:
        return Finding("processes", "works", "no limit")
    details = f"{processes_left:,} more processes and threads can be started"
    if processes_left < workers + THREADS:
        details += f": too few for {format_count(workers, 'worker')} and their libraries"
        return Finding("processes", "broken", details, "raise the limit: ulimit -u, docker run --pids-limit")
    return Finding("processes", "works", details)


def check_workers(workers: int, trial: Trial) -> Finding:
    """Check that a worker process starts; `workers` is the default number on this machine."""
    if trial["ok"]:
        return Finding("workers", "works", f"a worker started and delivered a batch in {trial['seconds']:.1f} s")
    fix = f"until this is fixed, use num_workers=0; the default here is {workers}"
    return Finding("workers", "broken", trial["why"], fix)


# -- torch and the GPUs -----------------------------------------------------------------------------------------------


def _driver_versions() -> tuple[str | None, str | None]:
    """Return the version of NVIDIA's driver, and the newest CUDA version that it supports; None if unknown."""
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module\D*([\d.]+)", path.read_text() if path.is_file() else "")
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        status = -1
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 and version.value else None
    return match[1] if match else None, cuda


def check_torch(trial: Trial, *, driver_cuda: str | None) -> Finding:
    """Check torch's version and CUDA version; `driver_cuda` is the newest CUDA version that the driver supports."""
    if not trial["ok"]:
        return Finding("torch", "broken", f"cannot be imported: {trial['why']}", "pip install --force-reinstall torch")
    version, cuda, other_backend = trial["version"], trial["cuda"], trial["other"]
    details = f"{version}, built for {f'CUDA {cuda}' if cuda else other_backend or 'the CPU'}"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < MIN_TORCH:
        return Finding("torch", "broken", f"{details}; gpuload needs 2.8 or newer", "pip install --upgrade torch")
    if driver_cuda is None or other_backend:
        return Finding("torch", "works", details)
    major = int(driver_cuda.partition(".")[0])
    fix = "pip install --force-reinstall torch"
    fix += "" if major >= 13 else " --index-url https://download.pytorch.org/whl/cu126"
    if cuda is None:
        return Finding("torch", "broken", f"{details}, although there is an NVIDIA driver: the GPU is unused", fix)
    if int(cuda.partition(".")[0]) > major:
        details += f", but the driver supports CUDA up to {driver_cuda}"
        return Finding("torch", "broken", details, f"install a newer driver, or {fix}")
    return Finding("torch", "works", details)


def check_gpus(trial: Trial, *, driver: str | None, cuda: str | None) -> Finding:
    """Check the devices that torch finds; `driver` is the version of NVIDIA's driver, and `cuda` the newest CUDA
    version that the driver supports."""
    if devices := trial.get("devices", []):
        names = [f"{device['name']} with {format_size(device['bytes'])}" for device in devices]
        are_equal = len(set(names)) == 1 and len(names) > 1
        details = f"{len(names)} × {names[0]}" if are_equal else "; ".join(names)
        return Finding("GPUs", "works", details + (f"; driver {driver or '?'}, for CUDA up to {cuda}" if cuda else ""))
    if (driver is None and cuda is None) or not trial["ok"]:
        return Finding("GPUs", "not needed", "none, and no NVIDIA driver: everything runs on the CPU")
    if cuda is None:
        details = f"NVIDIA's driver {driver} is installed, but its library libcuda.so.1 is missing"
        fix = "install the driver's libraries; in a container, docker run --gpus all with the NVIDIA container toolkit"
        return Finding("GPUs", "broken", details, fix)
    details = f"torch finds none, although there is a driver{': ' + trial['why'] if trial.get('why') else ''}"
    fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, docker run --gpus all"
    return Finding("GPUs", "broken", details, fix)


def check_page_locking(limit_bytes: int | None, code: int | None, locked_bytes: int = LOCKED_BYTES) -> Finding:
    """Check page-locked memory, which allows asynchronous copies to a GPU.

    `limit_bytes` is None if there is no limit. `code` is the result of locking `locked_bytes`: 0 for success, the
    runtime's error code, or None without a GPU.
    """
    name = "page-locked memory"
    limit = "the limit (ulimit -l) is " + ("unlimited" if limit_bytes is None else format_size(limit_bytes))
    if code is None:
        return Finding(name, "not needed", f"{limit}; not used without a GPU")
    if code == 0:
        return Finding(name, "works", f"{format_size(locked_bytes)} were locked as a test; {limit}")
    details = (
        f"{format_size(locked_bytes)} could not be locked (error {code}); {limit}. Copies to the GPU take longer, "
    )
    fix = "ulimit -l unlimited in the shell, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in systemd"
    return Finding(name, "broken", f"{details}and the training loop waits for them", fix)


def check_triton(version: str | None, trial: Trial | None, *, compiler: str | None, devices: int) -> Finding:
    """Check Triton, which the backend ``"fused"`` needs, and its C compiler; `trial` is the result of running a kernel
    on the GPU."""
    if not devices:
        return Finding("Triton", "not needed", "runs on GPUs only" + (f"; {version} is installed" if version else ""))
    consequence = "transforms run in torch, several times slower than fused"
    if version is None:
        return Finding("Triton", "improve", f"not installed: {consequence}", "pip install 'gpuload[fused]'")
    if compiler is None:
        fix = "apt-get install gcc, or set CC to the path of a C compiler"
        return Finding(
            "Triton", "broken", f"{version}, but the C compiler that it needs is missing: {consequence}", fix
        )
    if trial is not None and not trial["ok"]:
        fix = f"check that {compiler} works (CC selects another compiler); pip install --force-reinstall triton"
        return Finding("Triton", "broken", f"{version} cannot be used: {trial['why']}", fix)
    return Finding("Triton", "works", f"{version} with {compiler}: the backend 'fused' can be used")


# -- decoders and optional packages -----------------------------------------------------------------------------------


def cuda_extra(torch_cuda: str | None, others: Sequence[str] = ()) -> str:
    """Return the extra with NVIDIA's packages for this torch: ``"cu12"`` or ``"cu13"``. If torch has no CUDA, both
    work: return the first of `others`, the extras of NVIDIA's installed packages, or else the newest extra."""
    if torch_cuda is not None:
        return "cu13" if torch_cuda.startswith("13") else "cu12"
    return others[0] if others else "cu13"


def check_nvidia(
    name: str, versions: Mapping[str, Mapping[str, str]], trial: Trial | None, *, torch_cuda: str | None
) -> Finding:
    """Check nvImageCodec or DALI.

    Args:
        versions: the installed versions of both, keyed by extra: ``{"nvImageCodec": {"cu12": "0.9.0"}, "DALI": {}}``.
        trial: the result of decoding a region, or of creating the backend; None if there was no trial.
        torch_cuda: the CUDA version that torch was built for; None for a CPU build.
    """
    is_codec, installed = name == "nvImageCodec", versions[name]
    other_extras = [extra for other, details in versions.items() if other != name for extra in details]
    extra = cuda_extra(torch_cuda, other_extras)
    install = f"pip install 'gpuload[{'' if is_codec else 'dali-'}{extra}]'"
    use = "decodes a crop without decoding the entire image" if is_codec else "the backend 'dali' can be used"
    if not installed and is_codec:
        details = f"not installed. It {use}; without it, entire images are decoded, at about half the rate"
        return Finding(name, "improve", details, install)
    if not installed:
        return Finding(name, "not needed", f"not installed; the backend 'dali' is optional: {install}")
    details = " and ".join(f"{version} for CUDA {key[2:]}" for key, version in installed.items())
    reinstall = f"pip uninstall -y {' '.join(NVIDIA[name][key] for key in installed)} && {install}"
    if len(installed) > 1:
        return Finding(name, "broken", f"{details} are both installed, and overwrite each other's files", reinstall)
    if trial is not None and not trial["ok"]:
        fallback = ". Entire images are decoded instead" if is_codec else ""
        return Finding(name, "broken", f"{details}: {trial['why']}{fallback}", reinstall)
    if torch_cuda is not None and extra not in installed:
        details += f", but torch is built for CUDA {torch_cuda}"
        details += f". It {use} on the CPU; on the GPU, it needs the same CUDA version as torch" if is_codec else ""
        return Finding(name, "improve", details, reinstall)
    if not is_codec and other_extras and not installed.keys() & set(other_extras):
        details += f", but nvImageCodec is for {' and '.join(f'CUDA {key[2:]}' for key in other_extras)}"
        return Finding(name, "improve", f"{details}; both need the same CUDA version", reinstall)
    return Finding(name, "works", f"{details}: {use}")


def check_regions(trial: Trial) -> Finding:
    """Check whether nvImageCodec decodes regions correctly on the device, for ``Decode(where="device")``. `trial` is
    the result of `gpuload.cli.trial.try_regions`, or says why there is no result."""
    fallback = "Decode(where='device') decodes entire images"
    if not trial["ok"]:
        return Finding("regions", "not needed", f"{trial['why']}. On a GPU, {fallback}")
    faults, used_decoders = trial["faults"], trial["used"]
    details = f"nvImageCodec {trial['version']} on {trial['device']}; " + "; ".join(
        f"{name}: {fault or 'regions match full decoding bit for bit'}" for name, fault in faults.items()
    )
    if any(faults[name] for name in used_decoders):
        fix = "use Decode(where='cpu'), and report this version and GPU in a gpuload issue"
        return Finding("regions", "broken", details, fix)
    if len(used_decoders) < len(faults):
        details += f". {fallback}, because this version has not been verified"
    return Finding("regions", "works", details)


def check_decoder(name: str, version: str | None, trial: Trial, role: str) -> Finding:
    """Check simplejpeg or Pillow, which gpuload requires."""
    if version is not None and trial["ok"]:
        return Finding(name, "works", f"{version}: {role}")
    details = "not installed, although gpuload depends on it" if version is None else f"{version}: {trial['why']}"
    return Finding(name, "broken", details, f"pip install --force-reinstall {name.lower()}")


def check_extras(installed: Mapping[str, bool], *, jpegtran: bool) -> Finding:
    """List the extras whose packages are all installed and the other extras, and check for jpegtran."""
    present_names, absent_names = (
        [name for name, ok in installed.items() if ok is expected] for expected in (True, False)
    )
    details = f"installed: {', '.join(present_names) or 'none'}"
    if absent_names:
        details += f"; not installed: {', '.join(absent_names)}; install one with pip install 'gpuload[NAME]'"
    if not jpegtran:
        details += "; to use pack --cuttable on progressive JPEGs: apt-get install libjpeg-turbo-progs"
    return Finding("extras", "works" if present_names else "not needed", details)


def check_system(kernel: str, page_bytes: int, python: str, problem: str = "") -> Finding:
    """Check the kernel, page size and interpreter; `problem` says why workers cannot be processes here, or is ""."""
    details = f"gpuload {__version__}, kernel {kernel}, {format_size(page_bytes)} pages, Python {python}"
    if problem:
        return Finding("system", "broken", f"{details}; {problem}", "use num_workers=0, or Linux with glibc")
    return Finding("system", "works", details)


def _platform_problem() -> str:
    try:
        check_platform()
    except RuntimeError as error:
        return str(error)
    return ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def format_size(nbytes: float) -> str:
    """Format a number of bytes: ``64 KB``, ``1.5 GB``. Units are powers of 1000, as for disks and in docker, or powers
    of 1024 if the number is an exact multiple of such a power."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= factor:
            exact = nbytes / (1 << factor.bit_length() // 10 * 10)
            number = exact if exact == int(exact) else nbytes / factor
            return f"{number:,.0f} {unit}" if number >= 10 or number == int(number) else f"{number:.1f} {unit}"
    return f"{nbytes:,.0f} bytes"
