"""``gpuload doctor``: each check, in set-ups that lack something (some limits are really set), and the report."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gpuload import __version__
from gpuload.cli import doctor
from gpuload.cli.app import app
from gpuload.cli.doctor import Finding, as_dict, exit_status, summary
from gpuload.loader.limits import descriptors_left, usable_cpus
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


# -- as people and scripts see it --------------------------------------------------------------------------------------


FINDINGS = [
    Finding("CPUs", "works", "8 CPUs for this process"),
    Finding("nvImageCodec", "improve", "not installed. It decodes a crop alone", "pip install 'gpuload[cu13]' [now]"),
    Finding("GPUs", "not needed", "none: batches are made on the CPU"),
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
@pytest.mark.parametrize("colour", [False, True])
def test_print_report_fits_the_terminal(width: int, colour: bool) -> None:
    file = io.StringIO()
    doctor.print_report(
        [*FINDINGS, BROKEN],
        Console(file=file, width=width, force_terminal=True, color_system="standard" if colour else None),
    )
    text = file.getvalue()
    assert ("\x1b[" in text) == colour
    if not colour:
        assert max(map(len, text.splitlines())) <= width


# -- the machine -------------------------------------------------------------------------------------------------------


def test_check_cpus_names_affinity_mask_and_quota() -> None:
    assert doctor.check_cpus(usable=8, affinity=8, online=8).details == "8 CPUs for this process"
    finding = doctor.check_cpus(usable=2, affinity=4, online=8)
    assert finding.state == "works"
    assert finding.details == (
        "2 CPUs for this process; the affinity mask allows 4 of 8; the cgroup CPU quota allows 2"
    )


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_check_cpus_suggests_more_than_one_cpu(one_core: None) -> None:
    finding = doctor.check_cpus(usable=usable_cpus(), affinity=len(os.sched_getaffinity(0)), online=8)
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


@pytest.fixture
def open_files_left() -> Iterator[int]:
    """About 30 descriptors are left: how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remaining = descriptors_left()
    assert remaining is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - remaining + 30, hard))
    available = descriptors_left()
    assert available is not None
    yield available
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_check_open_files_close_to_the_limit_is_broken(open_files_left: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert doctor.check_open_files(1, soft=soft, hard=hard).state == "works"
    finding = doctor.check_open_files(7, soft=soft, hard=hard)
    assert finding.state == "broken"
    assert finding.details == f"{open_files_left} of {soft:,} are still available (ulimit -n): too few for 7 workers"
    assert finding.fix == f"ulimit -n {hard}"
    assert "administrator" in doctor.check_open_files(7, soft=soft, hard=soft).fix
    assert doctor.check_open_files(7, soft=None, hard=None).details == "no limit"


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
    assert (
        doctor.check_torch(torch_trial(None, other="ROCm 7.0"), driver_cuda=None).details == "2.9.1, built for ROCm 7.0"
    )


def test_check_gpus_with_a_driver_but_no_library_or_gpus_is_broken() -> None:
    without_library = doctor.check_gpus(torch_trial(), driver="550.1", cuda=None)
    assert (without_library.state, without_library.details) == (
        "broken", "NVIDIA's driver 550.1 is installed, but its library libcuda.so.1 is missing"
    )  # fmt: skip
    assert "docker run --gpus all" in without_library.fix
    without_gpus = doctor.check_gpus(torch_trial("12.6", why="No CUDA GPUs are available"), driver="550.1", cuda="12.6")
    assert without_gpus.state == "broken"
    assert without_gpus.details == "torch finds none, although there is a driver: No CUDA GPUs are available"
    assert "CUDA_VISIBLE_DEVICES" in without_gpus.fix
    assert doctor.check_gpus(torch_trial(devices=[H100]), driver=None, cuda=None).details == "NVIDIA H100 with 80 GB"


def test_check_triton_names_the_missing_package_compiler_or_error() -> None:
    absent = doctor.check_triton(None, None, compiler=None, devices=1)
    assert (absent.state, absent.fix) == ("improve", "pip install 'gpuload[fused]'")
    without_compiler = doctor.check_triton("3.6.0", BAD, compiler=None, devices=1)
    assert (without_compiler.state, without_compiler.fix) == (
        "broken",
        "apt-get install gcc, or set CC to the path of a C compiler",
    )
    assert without_compiler.details.startswith(
        "3.6.0, but the C compiler that it needs is missing: transforms run in torch"
    )
    broken = doctor.check_triton("3.6.0", BAD, compiler="/usr/bin/gcc", devices=1)
    assert (broken.state, broken.details) == ("broken", f"3.6.0 cannot be used: {BAD['why']}")
    assert broken.fix.startswith("check that /usr/bin/gcc works")


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
    result = subprocess.run([sys.executable, "-c", MEMLOCK], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    little, much = json.loads(result.stdout)
    assert little[:2] == ["works", "16 KB were locked as a test; the limit (ulimit -l) is 64 KB"]
    assert much[0] == "broken"
    assert (
        "start with page-locked memory: 64 MB could not be locked (error 12); the limit (ulimit -l) is 64 KB" in much[3]
    )
    assert "ulimit -l unlimited" in much[2]


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "others", "extra"),
    [
        ("12.6", [], "cu12"),
        ("13.0", [], "cu13"),
        ("13.0", ["cu12"], "cu13"),
        (None, [], "cu13"),
        (None, ["cu12"], "cu12"),
    ],
)
def test_cuda_extra_follows_torchs_cuda_then_installed_packages(
    cuda: str | None, others: list[str], extra: str
) -> None:
    assert doctor.cuda_extra(cuda, others) == extra


def nvidia(name: str, trial=OK, *, cuda: str | None, codec=None, dali=None) -> Finding:
    versions = {"nvImageCodec": codec or {}, "DALI": dali or {}}
    return doctor.check_nvidia(name, versions, trial, torch_cuda=cuda)


def test_missing_nvimagecodec_is_an_improvement() -> None:
    finding = nvidia("nvImageCodec", None, cuda="13.0")
    assert (finding.state, finding.fix) == ("improve", "pip install 'gpuload[cu13]'")
    assert "For more throughput, start with nvImageCodec: not installed" in summary([finding])


def test_working_nvimagecodec_needs_no_fix() -> None:
    for cuda in ("12.6", None):
        finding = nvidia("nvImageCodec", cuda=cuda, codec={"cu12": "0.9.0"})
        assert (finding.state, finding.fix) == ("works", "")


def test_nvimagecodec_for_another_cuda_is_replaced() -> None:
    finding = nvidia("nvImageCodec", cuda="13.0", codec={"cu12": "0.9.0"})
    assert finding.state == "improve"
    assert "0.9.0 for CUDA 12, but torch is built for CUDA 13.0" in finding.details
    assert finding.fix == "pip uninstall -y nvidia-nvimgcodec-cu12 && pip install 'gpuload[cu13]'"


def test_nvimagecodec_installed_twice_or_failing_is_broken() -> None:
    both = nvidia("nvImageCodec", cuda="12.6", codec={"cu12": "0.9.0", "cu13": "0.9.1"})
    assert (both.state, both.details) == (
        "broken", "0.9.0 for CUDA 12 and 0.9.1 for CUDA 13 are both installed, and overwrite each other's files"
    )  # fmt: skip
    assert both.fix == ("pip uninstall -y nvidia-nvimgcodec-cu12 nvidia-nvimgcodec-cu13 && pip install 'gpuload[cu12]'")
    broken = nvidia("nvImageCodec", BAD, cuda="12.6", codec={"cu12": "0.9.0"})
    assert broken.state == "broken"
    assert "libnvjpeg.so.12. Entire images are decoded instead" in broken.details


def test_check_decoder_of_required_decoders() -> None:
    assert doctor.check_decoder("Pillow", "13.0", OK, "decodes PNG") == Finding("Pillow", "works", "13.0: decodes PNG")
    broken = doctor.check_decoder("simplejpeg", "1.9.0", BAD, "decodes")
    assert (broken.state, broken.details) == ("broken", "1.9.0: ImportError: libnvjpeg.so.12")
    absent = doctor.check_decoder("simplejpeg", None, BAD, "decodes")
    assert absent.details == "not installed, although gpuload depends on it"
    assert absent.fix == "pip install --force-reinstall simplejpeg"


def test_check_nvidia_of_dali() -> None:
    assert nvidia("DALI", None, cuda="13.0").details.endswith("pip install 'gpuload[dali-cu13]'")
    assert nvidia("DALI", None, cuda="12.6").details.endswith("pip install 'gpuload[dali-cu12]'")
    assert nvidia("DALI", cuda="12.6", dali={"cu12": "2.4"}).state == "works"
    other_cuda = nvidia("DALI", cuda="13.0", dali={"cu12": "2.4"})
    assert (other_cuda.state, other_cuda.fix) == (
        "improve", "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'"
    )  # fmt: skip
    assert (
        nvidia("DALI", BAD, cuda=None, dali={"cu12": "2.4"}).details == "2.4 for CUDA 12: ImportError: libnvjpeg.so.12"
    )
    assert nvidia("DALI", cuda=None, dali={"cu12": "2", "cu13": "2"}).state == "broken"


def test_dali_for_another_cuda_than_nvimagecodec_is_replaced() -> None:
    mixed = nvidia("DALI", cuda=None, dali={"cu12": "2.4"}, codec={"cu13": "0.9"})
    assert (mixed.state, mixed.details, mixed.fix) == (
        "improve",
        "2.4 for CUDA 12, but nvImageCodec is for CUDA 13; both need the same CUDA version",
        "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'",
    )
    assert nvidia("DALI", cuda=None, dali={"cu12": "2.4"}, codec={"cu12": "0.9"}).state == "works"
    assert nvidia("DALI", None, cuda=None, codec={"cu12": "0.9"}).details.endswith("[dali-cu12]'")


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


LONG = tuple(doctor.NVIDIA["DALI"].values())  # these take seconds to import


@pytest.mark.slow
@pytest.mark.processes
def test_examine_checks_this_machine_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in LONG else _version(name))
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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def trials(**others: Any) -> dict[str, Any]:
    ok = {"ok": True, "why": ""}
    torch = {**ok, "version": "2.9.1", "cuda": "13.0", "other": "", "devices": []}
    working = dict.fromkeys(("simplejpeg", "Pillow", "page-locked memory"), ok)
    return {"torch": torch, "workers": {**ok, "seconds": 0.5}, **working, **others}


def test_build_findings_without_nvimagecodec_suggests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (*doctor.NVIDIA["nvImageCodec"].values(), *LONG)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in absent else "1.0")
    findings = doctor.build_findings(trials())[9:]
    expected = "Everything required works. For more throughput, start with nvImageCodec: not installed"
    assert summary(findings).startswith(expected)
    assert findings[0].fix == "pip install 'gpuload[cu13]'"
    assert findings[1].details == "1.0: decodes all JPEGs here"


def test_build_findings_with_nvimagecodec_for_another_cuda_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.9" if name.endswith("-cu12") else None)
    findings = doctor.build_findings(trials(nvImageCodec={"ok": True, "why": ""}))[9:]
    assert findings[0].details.startswith("0.9 for CUDA 12, but torch is built for CUDA 13.0")
