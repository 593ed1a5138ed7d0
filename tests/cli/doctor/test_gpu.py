"""Driver, torch, GPUs and page-locked memory, in set-ups that do not go together."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gpuload.cli.doctor import gpu
from gpuload.cli.doctor.finding import Finding

H100 = {"name": "NVIDIA H100", "bytes": 80_000_000_000}


def tried(cuda: str | None = None, *, version: str = "2.9.1", **others: Any) -> dict[str, Any]:
    return {"ok": True, "said": "", "version": version, "cuda": cuda, "other": "", "devices": [], **others}


def test_no_gpu_is_nothing_to_mend() -> None:
    findings = [
        gpu.driver(version=None, cuda=None),
        gpu.torch_build(tried(), driver_cuda=None),
        gpu.gpus(tried(), driver_cuda=None),
        gpu.page_locking(limit_bytes=65536, locked_bytes=1 << 26, code=None),
        gpu.compiler(path=None, devices=0),
        gpu.triton(version=None, tried=None, devices=0),
    ]
    assert {finding.state for finding in findings} == {"works", "not needed"}
    assert "64 KB; without a GPU nothing is locked" in findings[3].found


def test_all_is_well_with_a_gpu() -> None:
    there = tried("13.0", devices=[H100, H100])
    findings = [
        gpu.driver(version="580.65", cuda="13.0"),
        gpu.torch_build(there, driver_cuda="13.0"),
        gpu.gpus(there, driver_cuda="13.0"),
        gpu.page_locking(limit_bytes=65536, locked_bytes=64 << 20, code=0),
        gpu.compiler(path="/usr/bin/gcc", devices=2),
        gpu.triton(version="3.6.0", tried={"ok": True, "said": ""}, devices=2),
    ]
    assert {finding.state for finding in findings} == {"works"}
    assert findings[2].found == "2 × NVIDIA H100 with 80 GB"
    assert findings[3].found == "64 MB were locked on trial; the limit (ulimit -l) is 64 KB"


@pytest.mark.parametrize(
    ("build", "driver_cuda", "text", "mend"),
    [
        (tried(None), "13.0", "built for the CPU, but there is an NVIDIA driver: the GPU lies idle",
         "pip install --force-reinstall torch"),
        (tried(None), "12.4", "the GPU lies idle",
         "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
        (tried("13.0"), "12.4", "built for CUDA 13.0, but the driver runs CUDA up to 12.4", "a newer driver, or pip"),
        (tried("12.6", version="2.7.1"), "12.6", "gpuload needs 2.8 or newer", "pip install --upgrade torch"),
        ({"ok": False, "said": "ImportError: libc10.so"}, None, "cannot be imported: ImportError: libc10.so", "pip"),
    ],
)  # fmt: skip
def test_a_torch_that_does_not_fit(build: dict[str, Any], driver_cuda: str, text: str, mend: str) -> None:
    found = gpu.torch_build(build, driver_cuda=driver_cuda)
    assert found.state == "broken"
    assert text in found.found
    assert found.mend.startswith(mend)


def test_newer_minor_versions_of_cuda_run_too() -> None:
    assert gpu.torch_build(tried("12.8"), driver_cuda="12.4").state == "works"
    assert gpu.torch_build(tried("12.8", version="2.10.0"), driver_cuda="13.0").state == "works"
    assert gpu.torch_build(tried(None, other="ROCm 7.0"), driver_cuda=None).found == "2.9.1, built for ROCm 7.0"


def test_a_driver_without_its_library_or_its_gpus() -> None:
    assert gpu.driver(version="550.1", cuda=None).state == "broken"
    hidden = gpu.gpus(tried("12.6", said="No CUDA GPUs are available"), driver_cuda="12.6")
    assert hidden.state == "broken"
    assert hidden.found == "torch finds none, although there is a driver: No CUDA GPUs are available"
    assert "CUDA_VISIBLE_DEVICES" in hidden.mend


def test_what_triton_lacks() -> None:
    assert gpu.compiler(path=None, devices=1).mend.startswith("apt-get install gcc")
    assert gpu.triton(version=None, tried=None, devices=1).mend == "pip install 'gpuload[fused]'"
    broken = gpu.triton(version="3.6.0", tried={"ok": False, "said": "no assembler"}, devices=1)
    assert (broken.state, broken.found) == ("broken", "3.6.0, cannot be used: no assembler")


MEMLOCK = """
import ctypes, json, mmap, os, resource
from gpuload.cli.doctor.finding import summary
from gpuload.cli.doctor.gpu import page_locking
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
    finding = page_locking(limit_bytes=limit, locked_bytes=nbytes, code=code)
    findings.append([finding.state, finding.found, finding.mend, summary([finding])])
print(json.dumps(findings))
"""


@pytest.mark.processes
def test_a_limit_of_64_kb_that_is_really_set_and_really_refuses() -> None:
    done = subprocess.run([sys.executable, "-c", MEMLOCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    little, much = json.loads(done.stdout)
    assert little[:2] == ["works", "16 KB were locked on trial; the limit (ulimit -l) is 64 KB"]
    assert much[0] == "broken"
    assert (
        "first of all page-locked memory: 64 MB could not be locked (error 12); the limit (ulimit -l) is 64 KB"
        in much[3]
    )
    assert "ulimit -l unlimited" in much[2]


def test_findings_are_values() -> None:
    assert gpu.driver(version=None, cuda=None) == Finding(
        "NVIDIA driver", "not needed", "there is none: everything runs on the CPU"
    )


@pytest.mark.parametrize(
    ("places", "nodes", "state", "found"),
    [
        ([], 1, "not needed", "1 node; without a GPU nothing is near one"),
        ([("GPU 0", -1, "0-7")], 1, "works", "one node: all CPUs are near the GPU"),
        (
            [("GPU 0", 0, "0-15"), ("GPU 1", 1, "16-31")],
            2,
            "works",
            "2 nodes: GPU 0 is near node 0, CPUs 0-15; GPU 1 is near node 1, CPUs 16-31. Workers go there if it has "
            "enough CPUs",
        ),
        (
            [("GPU 0", -1, "0-31")],
            2,
            "improve",
            "2 nodes: the node of GPU 0 is not known. Workers and decoded pixels may be far from the GPU",
        ),
    ],
)
def test_which_cpus_are_near_a_gpu(places, nodes: int, state: str, found: str) -> None:
    finding = gpu.placement(places, nodes=nodes)
    assert (finding.state, finding.found) == (state, found)
    assert ("numactl" in finding.mend) == (state == "improve")
