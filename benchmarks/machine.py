"""What was measured on, and with: the processor, the CUDA device, versions of all that takes part, and what is absent.

python -m benchmarks.machine     prints it
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "gpuload",
    "torch",
    "triton",
    "torchvision",
    "timm",
    "kornia",
    "simplejpeg",
    "numpy",
    "Pillow",
    "turboloader",
)
NVIDIA = ("nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13")
DECODERS = ("simplejpeg", "nvidia.nvimgcodec", "nvidia.dali")
# What is left out of tests and measurements where a package is absent.
LEFT_OUT = {
    "hypothesis": "tests with made-up examples",
    "kornia": "the backend kornia, Kornia's own rows, tests of both, parity tests",
    "nvidia.dali": "the backend dali, DALI's own rows, tests of both",
    "nvidia.nvimgcodec": "decoding of regions; simplejpeg or Pillow decode whole images in its place",
    "pytest_timeout": "limits of single tests",
    "scipy": "tests of distributions",
    "simplejpeg": "decoding whole JPEGs by it; Pillow does it, at half the rate",
    "skimage": "real photographs, where PHOTOS names none; images are made up",
    "timm": "timm's rows and tests against it",
    "torchvision": "torchvision's, timm's and Kornia's own rows, the ResNets, the benchmark of augmenting",
    "triton": "the backend fused and its tests",
    "turboloader": "TurboLoader's row of the benchmark of loading, and its tests",
    "typer": "tests of the command line",
    "xdist": "nothing; tests run one after the other",
}


def absent() -> dict[str, str]:
    """The packages that are not installed, and what is left out because of that."""
    return {package: left_out for package, left_out in LEFT_OUT.items() if not _is_there(package)}


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the namespace it is in
        return False


def cpu_model() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Of those that are installed."""
    import torch

    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *NVIDIA):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)  # with the build, such as +cpu
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    return found


def cuda_device() -> str:
    """The current CUDA device, in words."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {properties.multi_processor_count} SMs"


def main() -> int:
    """Print all of it. Returns 1 where a decoder is installed and cannot be imported."""
    print(f"processor: {cpu_model()}, {len(os.sched_getaffinity(0))} CPUs; kernel {platform.release()}")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(f"/dev/shm: {shutil.disk_usage('/dev/shm').total / 1e9:.1f} GB; open files: {files} at most")
    print("versions: " + ", ".join(f"{name} {number}" for name, number in versions().items()))
    for package, left_out in absent().items():
        print(f"{package} is not installed; left out: {left_out}")
    broken = 0
    for module in filter(_is_there, DECODERS):
        try:
            importlib.import_module(module)
            print(f"{module}: imported")
        except Exception as error:
            broken = 1
            print(f"{module}: installed, and cannot be imported: {type(error).__name__}: {error}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
