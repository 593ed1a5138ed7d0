"""``gpuload doctor``: each check, on machines that lack something (some limits are really set), and the report."""

from __future__ import annotations

import io
import json
import os
import resource
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
from gpuload.cli.doctor import Finding, as_dict, exit_status, summary
from gpuload.loader import limits
from gpuload.loader.limits import usable_cpus
from gpuload.stage.decode.nvimagecodec import GPU

MB = 1_000_000
OK = {"ok": True, "why": ""}
BAD = {"ok": False, "why": "ImportError: libnvjpeg.so.12"}
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


def test_exit_status_is_1_only_for_broken_findings() -> None:
    assert [exit_status(findings) for findings in ([], [FINE, NO_GPU], [SLOW], [SLOW, BROKEN])] == [0, 0, 0, 1]


def test_as_dict_has_summary_exit_status_and_findings() -> None:
    assert as_dict([FINE, BROKEN]) == {
        "summary": summary([FINE, BROKEN]),
        "exit_status": 1,
        "findings": [
            {"name": "CPUs", "state": "works", "details": "8 CPUs for this process", "fix": ""},
            {"name": "workers", "state": "broken", "details": "no process can be started", "fix": "num_workers=0"},
        ],
    }


# -- the command -------------------------------------------------------------------------------------------------------


FINDINGS = [
    FINE,
    Finding("nvImageCodec", "improve", "not installed. It decodes a crop alone", "pip install 'gpuload[cu13]' [now]"),
    NO_GPU,
]


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 0), ([*FINDINGS, BROKEN], 1)])
def test_doctor_json_prints_the_findings_and_exits_with_their_status(
    monkeypatch: pytest.MonkeyPatch, findings: list[Finding], status: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda update_progress: findings)
    result = CliRunner().invoke(app, ["doctor", "--json", "-"])
    assert result.exit_code == status
    assert json.loads(result.stdout) == doctor.as_dict(findings)


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


def test_check_cpus_names_affinity_mask_and_quota() -> None:
    assert doctor.check_cpus(usable=8, affinity=8, online=8).details == "8 CPUs for this process"
    details = "2 CPUs for this process; the affinity mask allows 4 of 8; the cgroup CPU quota allows 2"
    assert doctor.check_cpus(usable=2, affinity=4, online=8) == Finding("CPUs", "works", details)


def test_check_cpus_suggests_more_than_one_cpu() -> None:
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    try:
        finding = doctor.check_cpus(usable=usable_cpus(), affinity=len(os.sched_getaffinity(0)), online=8)
    finally:
        os.sched_setaffinity(0, affinity)
    assert finding.state == "improve"
    assert "For more throughput, start with CPUs: 1 CPU for this process" in summary([finding])
    assert "the affinity mask allows 1 of 8" in finding.details
    assert "taskset -c" in finding.fix


def make_cgroup(root: Path, limit: int, use: int) -> str:
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
        (9000, 7, "works", "8.5 GB free within the cgroup limit"),
        (1500, 7, "improve", "1 GB free within the cgroup limit, which leaves little for batches and"),
        (700, 7, "broken", "200 MB free within the cgroup limit, but the default of 7 workers uses"),
        (700, 1, "improve", "the default of 1 worker uses about 45 MB"),
    ],
)
def test_check_memory_in_a_small_cgroup_suggests_more(
    tmp_path: Path, limit: int, workers: int, state: str, text: str
) -> None:
    finding = doctor.check_memory(workers, root=make_cgroup(tmp_path, limit * MB, 500 * MB))
    assert finding.state == state
    assert text in finding.details
    assert ("docker run --memory" in finding.fix) == (state != "works")


def test_check_memory_of_a_full_machine_is_broken(tmp_path: Path) -> None:
    root = make_cgroup(tmp_path, 9000 * MB, 500 * MB)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 100000 kB\n")
    finding = doctor.check_memory(7, root=root)
    assert (finding.state, finding.details[:26]) == ("broken", "102 MB free on the machine")
    assert doctor.check_memory(7, root=str(tmp_path / "none")).details == "no known limit"


def test_check_open_files_close_to_the_limit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.fork_server, "is_running", lambda: True)  # its descriptors are not needed again
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = limits.descriptors_left()
    assert left is not None
    soft = limit - left + 30
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


def test_check_processes_close_to_the_limit_is_broken() -> None:
    assert doctor.check_processes(8, None).state == "works"
    assert doctor.check_processes(8, 500).state == "works"
    finding = doctor.check_processes(8, 20)
    assert (finding.state, finding.fix) == ("broken", "raise the limit: ulimit -u, docker run --pids-limit")


def test_check_system_names_versions_and_rejects_unsupported_systems() -> None:
    fine = doctor.check_system("6.1", 65536, "3.13.0")
    assert (fine.state, fine.details) == ("works", f"gpuload {__version__}, kernel 6.1, 64 KB pages, Python 3.13.0")
    assert doctor.check_system("6.1", 4096, "3.13", "no Linux").state == "broken"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (65536, "64 KB"), (8 << 20, "8 MB"), (1_500_000_000, "1.5 GB"),
     (34_359_738_368, "32 GB"), (2_000_000, "2 MB"), (25_270_000_000, "25 GB")],
)  # fmt: skip
def test_format_size_rounds_to_binary_or_decimal_units(nbytes: int, text: str) -> None:
    assert doctor.format_size(nbytes) == text


# -- torch and GPUs ----------------------------------------------------------------------------------------------------


H100 = {"name": "NVIDIA H100", "bytes": 80_000_000_000}


def torch_trial(cuda: str | None = None, *, version: str = "2.9.1", **others: Any) -> dict[str, Any]:
    return {"ok": True, "why": "", "version": version, "cuda": cuda, "other": "", "devices": [], **others}


def test_machine_without_a_gpu_needs_no_fix() -> None:
    findings = [
        doctor.check_torch(torch_trial(), driver_cuda=None),
        doctor.check_gpus(torch_trial(), driver=None, cuda=None),
        doctor.check_page_locking(65536, None),
        doctor.check_triton(None, None, compiler=None, devices=0),
    ]
    assert {finding.state for finding in findings} == {"works", "not needed"}
    assert "64 KB; not used without a GPU" in findings[2].details


def test_machine_with_gpus_needs_no_fix() -> None:
    trial = torch_trial("13.0", devices=[H100, H100])
    findings = [
        doctor.check_torch(trial, driver_cuda="13.0"),
        doctor.check_gpus(trial, driver="580.65", cuda="13.0"),
        doctor.check_page_locking(65536, 0),
        doctor.check_triton("3.6.0", OK, compiler="/usr/bin/gcc", devices=2),
    ]
    assert {finding.state for finding in findings} == {"works"}
    assert findings[1].details == "2 × NVIDIA H100 with 80 GB; driver 580.65, for CUDA up to 13.0"
    assert findings[2].details == "64 MB were locked as a test; the limit (ulimit -l) is 64 KB"


@pytest.mark.parametrize(
    ("build", "driver_cuda", "text", "fix"),
    [
        (torch_trial(None), "13.0", "built for the CPU, although there is an NVIDIA driver: the GPU is unused",
         "pip install --force-reinstall torch"),
        (torch_trial(None), "12.4", "the GPU is unused",
         "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
        (torch_trial("13.0"), "12.4", "built for CUDA 13.0, but the driver supports CUDA up to 12.4",
         "install a newer driver, or"),
        (torch_trial("12.6", version="2.7.1"), "12.6", "gpuload needs 2.8 or newer", "pip install --upgrade torch"),
        ({"ok": False, "why": "ImportError: libc10.so"}, None, "cannot be imported: ImportError: libc10.so", "pip"),
    ],
)  # fmt: skip
def test_check_torch_that_does_not_fit_the_driver_is_broken(
    build: dict[str, Any], driver_cuda: str, text: str, fix: str
) -> None:
    finding = doctor.check_torch(build, driver_cuda=driver_cuda)
    assert finding.state == "broken"
    assert text in finding.details
    assert finding.fix.startswith(fix)


def test_check_torch_accepts_other_minor_versions_of_cuda_and_rocm() -> None:
    assert doctor.check_torch(torch_trial("12.8"), driver_cuda="12.4").state == "works"
    assert doctor.check_torch(torch_trial("12.8", version="2.10.0"), driver_cuda="13.0").state == "works"
    rocm = torch_trial(None, other="ROCm 7.0")
    assert doctor.check_torch(rocm, driver_cuda=None).details == "2.9.1, built for ROCm 7.0"


def test_check_gpus_with_a_driver_but_no_library_or_gpus_is_broken() -> None:
    hidden = torch_trial("12.6", why="No CUDA GPUs are available")
    for trial, cuda, details, fix in (
        (torch_trial(), None, "NVIDIA's driver 550.1 is installed, but its library libcuda.so.1 is missing", "--gpus"),
        (hidden, "12.6", f"torch finds none, although there is a driver: {hidden['why']}", "CUDA_VISIBLE_DEVICES"),
    ):
        finding = doctor.check_gpus(trial, driver="550.1", cuda=cuda)
        assert (finding.state, finding.details) == ("broken", details)
        assert fix in finding.fix
    assert doctor.check_gpus(torch_trial(devices=[H100]), driver=None, cuda=None).details == "NVIDIA H100 with 80 GB"


def test_check_triton_names_the_missing_package_compiler_or_error() -> None:
    for version, compiler, state, details, fix in (
        (None, None, "improve", "not installed", "pip install 'gpuload[fused]'"),
        ("3.6.0", None, "broken", "3.6.0, but the C compiler that it needs is missing: transforms run in torch",
         "apt-get install gcc, or set CC to the path of a C compiler"),
        ("3.6.0", "/usr/bin/gcc", "broken", f"3.6.0 cannot be used: {BAD['why']}", "check that /usr/bin/gcc works"),
    ):  # fmt: skip
        finding = doctor.check_triton(version, version and BAD, compiler=compiler, devices=1)
        assert finding.state == state
        assert finding.details.startswith(details)
        assert finding.fix.startswith(fix)


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
    ("cuda", "others", "extra"),
    [("12.6", [], "cu12"), ("13.0", [], "cu13"), ("13.0", ["cu12"], "cu13"), (None, [], "cu13"),
     (None, ["cu12"], "cu12")],
)  # fmt: skip
def test_cuda_extra_follows_torchs_cuda_then_installed_packages(cuda, others, extra) -> None:
    assert doctor.cuda_extra(cuda, others) == extra


NVIMGCODEC_CU12 = {"nvImageCodec": {"cu12": "0.9.0"}, "DALI": {}}
NVIMGCODEC_BOTH = {"nvImageCodec": {"cu12": "0.9.0", "cu13": "0.9.1"}, "DALI": {}}
DALI_CU12 = {"nvImageCodec": {}, "DALI": {"cu12": "2.4"}}
NEITHER = {"nvImageCodec": {}, "DALI": {}}


@pytest.mark.parametrize(
    ("versions", "trial", "cuda", "state", "details", "fix"),
    [
        (NEITHER, None, "13.0", "improve", "not installed. It decodes a crop without", "pip install 'gpuload[cu13]'"),
        (NVIMGCODEC_CU12, OK, "12.6", "works", "0.9.0 for CUDA 12: decodes", ""),
        (NVIMGCODEC_CU12, OK, None, "works", "0.9.0 for CUDA 12: decodes", ""),
        (NVIMGCODEC_CU12, OK, "13.0", "improve", "0.9.0 for CUDA 12, but torch is built for CUDA 13.0",
         "pip uninstall -y nvidia-nvimgcodec-cu12 && pip install 'gpuload[cu13]'"),
        (NVIMGCODEC_BOTH, OK, "12.6", "broken",
         "0.9.0 for CUDA 12 and 0.9.1 for CUDA 13 are both installed, and overwrite each other's files",
         "pip uninstall -y nvidia-nvimgcodec-cu12 nvidia-nvimgcodec-cu13 && pip install 'gpuload[cu12]'"),
        (NVIMGCODEC_CU12, BAD, "12.6", "broken", f"0.9.0 for CUDA 12: {BAD['why']}. Entire images are decoded instead",
         "pip uninstall -y nvidia-nvimgcodec-cu12 && pip install 'gpuload[cu12]'"),
    ],
)  # fmt: skip
def test_check_nvidia_of_nvimagecodec(versions, trial, cuda, state, details, fix) -> None:
    finding = doctor.check_nvidia("nvImageCodec", versions, trial, torch_cuda=cuda)
    assert (finding.state, finding.fix) == (state, fix)
    assert finding.details.startswith(details)


@pytest.mark.parametrize(
    ("versions", "trial", "cuda", "state", "details", "fix"),
    [
        (NEITHER, None, "13.0", "not needed", "pip install 'gpuload[dali-cu13]'", ""),
        (NEITHER, None, "12.6", "not needed", "pip install 'gpuload[dali-cu12]'", ""),
        (NVIMGCODEC_CU12, None, None, "not needed", "pip install 'gpuload[dali-cu12]'", ""),
        (DALI_CU12, OK, "12.6", "works", "2.4 for CUDA 12: the backend 'dali' can be used", ""),
        (DALI_CU12 | {"nvImageCodec": {"cu12": "0.9"}}, OK, None, "works", "the backend 'dali' can be used", ""),
        (DALI_CU12, OK, "13.0", "improve", "2.4 for CUDA 12, but torch is built for CUDA 13.0",
         "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'"),
        (DALI_CU12 | {"nvImageCodec": {"cu13": "0.9"}}, OK, None, "improve",
         "2.4 for CUDA 12, but nvImageCodec is for CUDA 13; both need the same CUDA version",
         "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'"),
        (DALI_CU12, BAD, "12.6", "broken", f"2.4 for CUDA 12: {BAD['why']}",
         "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu12]'"),
        (NEITHER | {"DALI": {"cu12": "2", "cu13": "2"}}, OK, "12.6", "broken", "are both installed",
         "pip uninstall -y nvidia-dali-cuda120 nvidia-dali-cuda130 && pip install 'gpuload[dali-cu12]'"),
    ],
)  # fmt: skip
def test_check_nvidia_of_dali(versions, trial, cuda, state, details, fix) -> None:
    finding = doctor.check_nvidia("DALI", versions, trial, torch_cuda=cuda)
    assert (finding.state, finding.fix) == (state, fix)
    assert details in finding.details


def test_check_decoder_of_required_decoders() -> None:
    assert doctor.check_decoder("Pillow", "13.0", OK, "decodes PNG") == Finding("Pillow", "works", "13.0: decodes PNG")
    broken = doctor.check_decoder("simplejpeg", "1.9.0", BAD, "decodes")
    assert (broken.state, broken.details) == ("broken", "1.9.0: ImportError: libnvjpeg.so.12")
    absent = doctor.check_decoder("simplejpeg", None, BAD, "decodes")
    assert absent.details == "not installed, although gpuload depends on it"
    assert absent.fix == "pip install --force-reinstall simplejpeg"


def test_check_extras_lists_installed_and_missing_extras() -> None:
    assert doctor.check_extras({"lmdb": True, "ray": False}, jpegtran=True).details == (
        "installed: lmdb; not installed: ray; install one with pip install 'gpuload[NAME]'"
    )
    assert doctor.check_extras({"lmdb": True}, jpegtran=False).details == (
        "installed: lmdb; to use pack --cuttable on progressive JPEGs: apt-get install libjpeg-turbo-progs"
    )
    none = doctor.check_extras({"lmdb": False}, jpegtran=True)
    assert (none.state, none.details[:17]) == ("not needed", "installed: none; ")


@pytest.mark.parametrize(
    ("trial", "state", "text"),
    [
        ({"ok": False, "why": "the process crashed (SIGSEGV)"}, "not needed", "(SIGSEGV). On a GPU, Decode(where="),
        ({**REGIONS, "faults": {GPU: ""}, "used": [GPU]}, "works", f"{GPU}: regions match full decoding bit for bit"),
        ({**REGIONS, "faults": {GPU: ""}, "used": []}, "works", "bit for bit. Decode(where='device') decodes"),
        ({**REGIONS, "faults": {GPU: "it refuses"}, "used": []}, "works", f"0.9.0 on cuda:0; {GPU}: it refuses."),
        ({**REGIONS, "faults": {GPU: "it refuses"}, "used": [GPU]}, "broken", f"{GPU}: it refuses"),
    ],
)
def test_check_regions_reports_faults_by_whether_they_are_in_use(trial, state, text):
    finding = doctor.check_regions(trial)
    assert finding.state == state
    assert text in finding.details
    assert bool(finding.fix) == (state == "broken")


def test_check_workers_that_do_not_start_suggests_none() -> None:
    finding = doctor.check_workers(7, BAD)
    assert (finding.state, finding.details) == ("broken", BAD["why"])
    assert finding.fix == "until this is fixed, use num_workers=0; the default here is 7"


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
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1]
    assert by_name["workers"].state == "works", by_name["workers"]
    assert by_name["workers"].details.startswith("a worker started and delivered a batch in ")
    assert by_name["torch"].details.startswith(metadata.version("torch"))
    assert {by_name[name].state for name in ("simplejpeg", "Pillow")} == {"works"}


def make_trials(**others: Any) -> dict[str, Any]:
    working = dict.fromkeys(("simplejpeg", "Pillow", "page-locked memory"), OK)
    return {"torch": torch_trial("13.0"), "workers": {**OK, "seconds": 0.5}, **working, **others}


def test_build_findings_without_nvimagecodec_suggests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (*doctor.NVIDIA["nvImageCodec"].values(), *SLOW_PACKAGES)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in absent else "1.0")
    findings = doctor.build_findings(make_trials())[9:]
    text = "Everything required works. For more throughput, start with nvImageCodec: not installed"
    assert summary(findings).startswith(text)
    assert findings[0].fix == "pip install 'gpuload[cu13]'"
    assert findings[1].details == "1.0: decodes all JPEGs here"


def test_build_findings_with_nvimagecodec_for_another_cuda_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.9" if name.endswith("-cu12") else None)
    findings = doctor.build_findings(make_trials(nvImageCodec=OK))[9:]
    assert findings[0].details.startswith("0.9 for CUDA 12, but torch is built for CUDA 13.0")
