"""``gpuload doctor``: its checks, on machines that lack something (some limits are really set), and its report."""

from __future__ import annotations

import io
import json
import resource
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers.programs import run_python
from rich.console import Console
from typer.testing import CliRunner

from gpuload import __version__
from gpuload.cli import doctor
from gpuload.cli.app import app
from gpuload.cli.doctor import Finding, summary
from gpuload.loader import limits
from gpuload.stage.decode.nvimagecodec import GPU

MB = 1_000_000
WORKING = {"ok": True, "why": ""}
FAILED = {"ok": False, "why": "ImportError: libnvjpeg.so.12"}
REGIONS = {"version": "0.9.0", "device": "cuda:0", "ok": True, "why": ""}
FINE = Finding("CPUs", "works", "8 CPUs for this process")
NO_GPU = Finding("GPUs", "not needed", "none: batches are made on the CPU")
SLOW = Finding("nvImageCodec", "improve", "not installed", "pip install 'gpuload[cu13]'")
SLOWER = Finding("Triton", "improve", "not installed", "pip install 'gpuload[fused]'")
BROKEN = Finding("workers", "broken", "no process can be started", "num_workers=0")


def test_summary_names_the_worst_finding_first() -> None:
    assert summary([FINE, NO_GPU]) == "Everything required works, and nothing limits throughput."
    assert summary([FINE, SLOW, SLOWER]) == (
        "Everything required works. For more throughput, start with nvImageCodec: not installed"
    )
    assert summary([SLOW, BROKEN]) == ("1 part is broken; start with workers: no process can be started")
    assert summary([BROKEN, SLOW, BROKEN]).startswith("2 parts are broken")


# -- the command -------------------------------------------------------------------------------------------------------


FINDINGS = [
    FINE,
    Finding("nvImageCodec", "improve", "not installed. It decodes a crop alone", "pip install 'gpuload[cu13]' [now]"),
    NO_GPU,
]


@pytest.mark.parametrize(("findings", "status"), [([], 0), ([FINE, NO_GPU], 0), ([SLOW], 0), ([FINE, SLOW, BROKEN], 1)])
def test_doctor_json_prints_the_findings_and_exits_with_1_if_one_is_broken(
    monkeypatch: pytest.MonkeyPatch, findings: list[Finding], status: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda update_progress: findings)
    result = CliRunner().invoke(app, ["doctor", "--json", "-"])
    assert result.exit_code == status
    assert json.loads(result.stdout) == {
        "summary": summary(findings),
        "exit_status": status,
        "findings": [finding._asdict() for finding in findings],
    }


def test_doctor_prints_lines_with_fixes_and_progress_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda update_progress: update_progress(3, 3) or FINDINGS)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "3 of 3 checks" in result.stderr
    assert "3 of 3 checks" not in result.stdout
    assert "  nvImageCodec: pip install 'gpuload[cu13]' [now]\n" in result.stdout
    assert "For more throughput, start with nvImageCodec" in result.stdout


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("colored", [False, True])
def test_print_report_fits_the_terminal(width: int, colored: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system="standard" if colored else None)
    doctor.print_report([*FINDINGS, BROKEN], console)
    text = file.getvalue()
    assert ("\x1b[" in text) == colored
    if not colored:
        assert max(map(len, text.splitlines())) <= width


# -- the machine -------------------------------------------------------------------------------------------------------


def check_finding(finding: Finding, state: str, details: str, fix: str = "") -> None:
    """Check a finding; `details` is a part of its details, and `fix` the beginning of its fix, or empty for no fix."""
    assert finding.state == state
    assert details in finding.details
    assert finding.fix.startswith(fix)
    assert bool(finding.fix) == bool(fix)


MORE_MEMORY = "raise the memory limit (docker run --memory"


def make_cgroup(root: Path, *, limit: int, use: int, available: int) -> str:
    files = {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n",
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
    ("limit_mb", "available_mb", "workers", "state", "details", "fix"),
    [
        (9000, 9000, 7, "works", "8.5 GB free within the cgroup limit", ""),
        (
            1500,
            9000,
            7,
            "improve",
            "1 GB free within the cgroup limit, which leaves little for batches and",
            MORE_MEMORY,
        ),
        (700, 9000, 7, "broken", "200 MB free within the cgroup limit, but the default of 7 workers uses", MORE_MEMORY),
        (700, 9000, 1, "improve", "the default of 1 worker uses about 45 MB", MORE_MEMORY),
        (9000, 100, 7, "broken", "100 MB free on the machine", MORE_MEMORY),
    ],
)
def test_check_memory_names_the_scarcer_of_cgroup_and_machine(
    tmp_path: Path, limit_mb: int, available_mb: int, workers: int, state: str, details: str, fix: str
) -> None:
    root = make_cgroup(tmp_path, limit=limit_mb * MB, use=500 * MB, available=available_mb * MB)
    check_finding(doctor.check_memory(workers, root=root), state, details, fix)
    assert doctor.check_memory(workers, root=str(tmp_path / "none")).details == "no known limit"


def test_check_open_files_is_broken_if_too_few_are_left_for_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.fork_server, "is_running", lambda: True)  # its descriptors are not needed again
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = limits.descriptors_left()
    assert left is not None
    soft = limit - left + 30  # leaves 30 descriptors, enough for one worker but not for seven
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        left = limits.descriptors_left()
        assert doctor.check_open_files(1, soft=soft, hard=hard).state == "works"
        details = f"{left} of {soft:,} are still available (ulimit -n): too few for 7 workers"
        assert doctor.check_open_files(7, soft=soft, hard=hard) == Finding(
            "open files", "broken", details, f"ulimit -n {hard}"
        )
        assert "administrator" in doctor.check_open_files(7, soft=soft, hard=soft).fix
        assert doctor.check_open_files(7, soft=None, hard=None).details == "no limit"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (65536, "64 KB"), (8 << 20, "8 MB"), (1_500_000_000, "1.5 GB"),
     (34_359_738_368, "32 GB"), (2_000_000, "2 MB"), (25_270_000_000, "25 GB")],
)  # fmt: skip
def test_format_size_rounds_to_binary_or_decimal_units(nbytes: int, text: str) -> None:
    assert doctor.format_size(nbytes) == text


# -- torch and GPUs ----------------------------------------------------------------------------------------------------


H100 = {"name": "NVIDIA H100", "bytes": 80_000_000_000}


def torch_trial(cuda: str | None = None, *, version: str = "2.9.1", **fields: Any) -> dict[str, Any]:
    return {"ok": True, "why": "", "version": version, "cuda": cuda, "other": "", "devices": [], **fields}


@pytest.mark.parametrize(
    ("check", "state", "details", "fix"),
    [
        (partial(doctor.check_cpus, usable=8, affinity=8, online=8), "works", "8 CPUs for this process", ""),
        (partial(doctor.check_cpus, usable=2, affinity=4, online=8), "works",
         "2 CPUs for this process; the affinity mask allows 4 of 8; the cgroup CPU quota allows 2", ""),
        (partial(doctor.check_cpus, usable=1, affinity=1, online=8), "improve",
         "1 CPU for this process; the affinity mask allows 1 of 8", "give the process more CPUs: taskset -c"),
        (partial(doctor.check_processes, 8, None), "works", "no limit", ""),
        (partial(doctor.check_processes, 8, 500), "works", "500 more processes and threads can be started", ""),
        (partial(doctor.check_processes, 8, 20), "broken", "too few for 8 workers",
         "raise the limit: ulimit -u, docker run --pids-limit"),
        (partial(doctor.check_system, "6.1", 65536, "3.13.0"), "works",
         f"gpuload {__version__}, kernel 6.1, 64 KB pages, Python 3.13.0", ""),
        (partial(doctor.check_system, "6.1", 4096, "3.13", "no Linux"), "broken", "; no Linux", "use num_workers=0"),
        (partial(doctor.check_torch, torch_trial(), driver_cuda=None), "works", "2.9.1, built for the CPU", ""),
        (partial(doctor.check_torch, torch_trial("13.0"), driver_cuda="13.0"), "works", "built for CUDA 13.0", ""),
        (partial(doctor.check_torch, torch_trial("12.8"), driver_cuda="12.4"), "works", "built for CUDA 12.8", ""),
        (partial(doctor.check_torch, torch_trial("12.8", version="2.10.0"), driver_cuda="13.0"), "works", "2.10.0", ""),
        (partial(doctor.check_torch, torch_trial(None, other="ROCm 7.0"), driver_cuda=None), "works",
         "2.9.1, built for ROCm 7.0", ""),
        (partial(doctor.check_torch, torch_trial(None), driver_cuda="13.0"), "broken",
         "built for the CPU, although there is an NVIDIA driver: the GPU is unused",
         "pip install --force-reinstall torch"),
        (partial(doctor.check_torch, torch_trial(None), driver_cuda="12.4"), "broken", "the GPU is unused",
         "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
        (partial(doctor.check_torch, torch_trial("13.0"), driver_cuda="12.4"), "broken",
         "built for CUDA 13.0, but the driver supports CUDA up to 12.4", "install a newer driver, or"),
        (partial(doctor.check_torch, torch_trial("12.6", version="2.7.1"), driver_cuda="12.6"), "broken",
         "gpuload needs 2.8 or newer", "pip install --upgrade torch"),
        (partial(doctor.check_torch, {"ok": False, "why": "ImportError: libc10.so"}, driver_cuda=None), "broken",
         "cannot be imported: ImportError: libc10.so", "pip"),
        (partial(doctor.check_gpus, torch_trial(), driver=None, cuda=None), "not needed", "none", ""),
        (partial(doctor.check_gpus, torch_trial("13.0", devices=[H100, H100]), driver="580.65", cuda="13.0"), "works",
         "2 × NVIDIA H100 with 80 GB; driver 580.65, for CUDA up to 13.0", ""),
        (partial(doctor.check_gpus, torch_trial(devices=[H100]), driver=None, cuda=None), "works",
         "NVIDIA H100 with 80 GB", ""),
        (partial(doctor.check_gpus, torch_trial(), driver="550.1", cuda=None), "broken",
         "NVIDIA's driver 550.1 is installed, but its library libcuda.so.1 is missing",
         "install the driver's libraries; in a container, docker run --gpus"),
        (partial(doctor.check_gpus, torch_trial("12.6", why="No CUDA GPUs are available"), driver="550.1", cuda="12.6"),
         "broken", "torch finds none, although there is a driver: No CUDA GPUs are available",
         "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (partial(doctor.check_page_locking, 65536, None), "not needed", "64 KB; not used without a GPU", ""),
        (partial(doctor.check_page_locking, 65536, 0), "works",
         "64 MB were locked as a test; the limit (ulimit -l) is 64 KB", ""),
        (partial(doctor.check_triton, None, None, compiler=None, devices=0), "not needed", "runs on GPUs only", ""),
        (partial(doctor.check_triton, "3.6.0", WORKING, compiler="/usr/bin/gcc", devices=2), "works",
         "3.6.0 with /usr/bin/gcc", ""),
        (partial(doctor.check_triton, None, None, compiler=None, devices=1), "improve", "not installed",
         "pip install 'gpuload[fused]'"),
        (partial(doctor.check_triton, "3.6.0", FAILED, compiler=None, devices=1), "broken",
         "3.6.0, but the C compiler that it needs is missing: transforms run in torch",
         "apt-get install gcc, or set CC to the path of a C compiler"),
        (partial(doctor.check_triton, "3.6.0", FAILED, compiler="/usr/bin/gcc", devices=1), "broken",
         f"3.6.0 cannot be used: {FAILED['why']}", "check that /usr/bin/gcc works"),
    ],
)  # fmt: skip
def test_check_of_the_machine_or_gpu_names_its_state_and_fix(check, state, details, fix) -> None:
    check_finding(check(), state, details, fix)


MEMLOCK = """
import ctypes, json, mmap, os, resource
from gpuload.cli.doctor import check_page_locking, summary
libc = ctypes.CDLL(None, use_errno=True)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:  # the limit does not hold for the superuser
    os.setgid(65534)
    os.setuid(65534)
findings = []
for nbytes in (16 << 10, 64 << 20):
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    code = 0 if libc.mlock(address, ctypes.c_size_t(nbytes)) == 0 else ctypes.get_errno()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    finding = check_page_locking(limit, code, nbytes)
    findings.append([finding.state, finding.details, finding.fix, summary([finding])])
print(json.dumps(findings))
"""


@pytest.mark.processes
def test_check_page_locking_under_a_real_limit_of_64_kb_is_broken() -> None:
    (small_state, small_details, *_), (state, details, fix, text) = json.loads(run_python(MEMLOCK)[0])
    assert (small_state, small_details) == ("works", "16 KB were locked as a test; the limit (ulimit -l) is 64 KB")
    assert state == "broken"
    assert details.startswith("64 MB could not be locked (error 12); the limit (ulimit -l) is 64 KB")
    assert f"start with page-locked memory: {details}" in text
    assert "ulimit -l unlimited" in fix


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "installed", "extra"),
    [("12.6", [], "cu12"), ("13.0", [], "cu13"), ("13.0", ["cu12"], "cu13"), (None, [], "cu13"),
     (None, ["cu12"], "cu12")],
)  # fmt: skip
def test_cuda_extra_follows_torchs_cuda_then_installed_packages(cuda, installed, extra) -> None:
    assert doctor.cuda_extra(cuda, installed) == extra


TWO_EXTRAS = {"lmdb": True, "ray": False}
CODEC_CU12 = {"nvImageCodec": {"cu12": "0.9.0"}, "DALI": {}}
CODECS = {"nvImageCodec": {"cu12": "0.9.0", "cu13": "0.9.1"}, "DALI": {}}
DALI_CU12 = {"nvImageCodec": {}, "DALI": {"cu12": "2.4"}}
DALIS = {"nvImageCodec": {}, "DALI": {"cu12": "2", "cu13": "2"}}
NEITHER = {"nvImageCodec": {}, "DALI": {}}
check_codec, check_dali = partial(doctor.check_nvidia, "nvImageCodec"), partial(doctor.check_nvidia, "DALI")


@pytest.mark.parametrize(
    ("check", "state", "details", "fix"),
    [
        (partial(check_codec, NEITHER, None, torch_cuda="13.0"), "improve", "not installed. It decodes a crop without",
         "pip install 'gpuload[cu13]'"),
        (partial(check_codec, CODEC_CU12, WORKING, torch_cuda="12.6"), "works", "0.9.0 for CUDA 12: decodes", ""),
        (partial(check_codec, CODEC_CU12, WORKING, torch_cuda=None), "works", "0.9.0 for CUDA 12: decodes", ""),
        (partial(check_codec, CODEC_CU12, WORKING, torch_cuda="13.0"), "improve",
         "0.9.0 for CUDA 12, but torch is built for CUDA 13.0",
         "pip uninstall -y nvidia-nvimgcodec-cu12 && pip install 'gpuload[cu13]'"),
        (partial(check_codec, CODECS, WORKING, torch_cuda="12.6"), "broken",
         "0.9.0 for CUDA 12 and 0.9.1 for CUDA 13 are both installed, and overwrite each other's files",
         "pip uninstall -y nvidia-nvimgcodec-cu12 nvidia-nvimgcodec-cu13 && pip install 'gpuload[cu12]'"),
        (partial(check_codec, CODEC_CU12, FAILED, torch_cuda="12.6"), "broken",
         f"0.9.0 for CUDA 12: {FAILED['why']}. Entire images are decoded instead",
         "pip uninstall -y nvidia-nvimgcodec-cu12 && pip install 'gpuload[cu12]'"),
        (partial(check_dali, NEITHER, None, torch_cuda="13.0"), "not needed", "pip install 'gpuload[dali-cu13]'", ""),
        (partial(check_dali, NEITHER, None, torch_cuda="12.6"), "not needed", "pip install 'gpuload[dali-cu12]'", ""),
        (partial(check_dali, CODEC_CU12, None, torch_cuda=None), "not needed", "pip install 'gpuload[dali-cu12]'", ""),
        (partial(check_dali, DALI_CU12, WORKING, torch_cuda="12.6"), "works",
         "2.4 for CUDA 12: the backend 'dali' can be used", ""),
        (partial(check_dali, DALI_CU12 | {"nvImageCodec": {"cu12": "0.9"}}, WORKING, torch_cuda=None), "works",
         "the backend 'dali' can be used", ""),
        (partial(check_dali, DALI_CU12, WORKING, torch_cuda="13.0"), "improve",
         "2.4 for CUDA 12, but torch is built for CUDA 13.0",
         "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'"),
        (partial(check_dali, DALI_CU12 | {"nvImageCodec": {"cu13": "0.9"}}, WORKING, torch_cuda=None), "improve",
         "2.4 for CUDA 12, but nvImageCodec is for CUDA 13; both need the same CUDA version",
         "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'"),
        (partial(check_dali, DALI_CU12, FAILED, torch_cuda="12.6"), "broken", f"2.4 for CUDA 12: {FAILED['why']}",
         "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu12]'"),
        (partial(check_dali, DALIS, WORKING, torch_cuda="12.6"), "broken", "are both installed",
         "pip uninstall -y nvidia-dali-cuda120 nvidia-dali-cuda130 && pip install 'gpuload[dali-cu12]'"),
        (partial(doctor.check_decoder, "Pillow", "13.0", WORKING, "decodes PNG"), "works", "13.0: decodes PNG", ""),
        (partial(doctor.check_decoder, "simplejpeg", "1.9.0", FAILED, "decodes"), "broken", f"1.9.0: {FAILED['why']}",
         "pip install --force-reinstall simplejpeg"),
        (partial(doctor.check_decoder, "simplejpeg", None, FAILED, "decodes"), "broken",
         "not installed, although gpuload depends on it", "pip install --force-reinstall simplejpeg"),
        (partial(doctor.check_extras, TWO_EXTRAS, jpegtran=True), "works",
         "installed: lmdb; not installed: ray; install one with pip install 'gpuload[NAME]'", ""),
        (partial(doctor.check_extras, {"lmdb": True}, jpegtran=False), "works",
         "installed: lmdb; to use pack --cuttable on progressive JPEGs: apt-get install libjpeg-turbo-progs", ""),
        (partial(doctor.check_extras, {"lmdb": False}, jpegtran=True), "not needed", "installed: none; ", ""),
        (partial(doctor.check_workers, 7, FAILED), "broken", FAILED["why"],
         "until this is fixed, use num_workers=0; the default here is 7"),
        (partial(doctor.check_regions, {"ok": False, "why": "the process crashed (SIGSEGV)"}), "not needed",
         "(SIGSEGV). On a GPU, Decode(where=", ""),
        (partial(doctor.check_regions, {**REGIONS, "faults": {GPU: ""}, "used": [GPU]}), "works",
         f"{GPU}: regions match full decoding bit for bit", ""),
        (partial(doctor.check_regions, {**REGIONS, "faults": {GPU: ""}, "used": []}), "works",
         "bit for bit. Decode(where='device') decodes", ""),
        (partial(doctor.check_regions, {**REGIONS, "faults": {GPU: "it refuses"}, "used": []}), "works",
         f"0.9.0 on cuda:0; {GPU}: it refuses.", ""),
        (partial(doctor.check_regions, {**REGIONS, "faults": {GPU: "it refuses"}, "used": [GPU]}), "broken",
         f"{GPU}: it refuses", "use Decode(where='cpu')"),
    ],
)  # fmt: skip
def test_check_of_a_package_or_worker_names_its_state_and_fix(check, state, details, fix) -> None:
    check_finding(check(), state, details, fix)


# -- this machine ------------------------------------------------------------------------------------------------------


SLOW_PACKAGES = tuple(doctor.NVIDIA["DALI"].values())  # importing these takes seconds


@pytest.mark.slow
@pytest.mark.processes
def test_examine_checks_this_machine_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in SLOW_PACKAGES else version(name))
    progress: list[tuple[int, int]] = []
    findings = doctor.examine(lambda done, total: progress.append((done, total)))
    by_name = {finding.name: finding for finding in findings}
    assert len(by_name) == len(findings) == 16
    (first_done, _), *_, (last_done, total) = progress
    assert first_done == 0
    assert last_done == total
    assert by_name["workers"].state == "works", by_name["workers"]
    assert by_name["workers"].details.startswith("a worker started and delivered a batch in ")
    assert by_name["torch"].details.startswith(metadata.version("torch"))
    assert {by_name[name].state for name in ("simplejpeg", "Pillow")} == {"works"}


def make_trials(**trials: Any) -> dict[str, Any]:
    working = dict.fromkeys(("simplejpeg", "Pillow", "page-locked memory"), WORKING)
    return {"torch": torch_trial("13.0"), "workers": {**WORKING, "seconds": 0.5}, **working, **trials}


def test_build_findings_without_nvimagecodec_suggests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (*doctor.NVIDIA["nvImageCodec"].values(), *SLOW_PACKAGES)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in absent else "1.0")
    findings = doctor.build_findings(make_trials())[9:]  # without the nine of the machine and its GPUs
    text = "Everything required works. For more throughput, start with nvImageCodec: not installed"
    assert summary(findings).startswith(text)
    codec, simplejpeg, *_ = findings
    assert codec.fix == "pip install 'gpuload[cu13]'"
    assert simplejpeg.details == "1.0: decodes all JPEGs here"


def test_build_findings_with_nvimagecodec_for_another_cuda_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.9" if name.endswith("-cu12") else None)
    by_name = {finding.name: finding for finding in doctor.build_findings(make_trials(nvImageCodec=WORKING))}
    assert by_name["nvImageCodec"].details.startswith("0.9 for CUDA 12, but torch is built for CUDA 13.0")
