"""A description of the machine: the processor, the CUDA device, package versions, and the packages that are missing.

python -m benchmarks.machine     prints the description
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
NVIDIA = (
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "nvidia-nvimgcodec-cu12",
    "nvidia-nvimgcodec-cu13",
    "cvcuda-cu12",
    "cvcuda-cu13",
)
DECODERS = ("simplejpeg", "nvidia.nvimgcodec", "nvidia.dali")
# The tests and measurements that are skipped where a package is absent.
SKIPPED_WITHOUT = {
    "cvcuda": "CV-CUDA's row",
    "hypothesis": "property-based tests",
    "kornia": "the kornia backend, Kornia's own rows, tests of both, parity tests",
    "nvidia.dali": "the dali backend, DALI's own rows, tests of both",
    "nvidia.nvimgcodec": "region decoding; simplejpeg or Pillow decodes entire images instead",
    "pytest_timeout": "time limits of single tests",
    "scipy": "tests of distributions",
    "simplejpeg": "decoding entire JPEGs with simplejpeg; Pillow does it at half the rate",
    "skimage": "real photographs, unless PHOTOS names a folder; images are synthetic instead",
    "timm": "timm's rows and tests against it",
    "torchvision": "torchvision's, timm's and Kornia's own rows, the ResNets, the augmentation benchmark",
    "triton": "the fused backend and its tests",
    "turboloader": "TurboLoader's row in the loading benchmark, and tests of TurboLoader",
    "typer": "tests of the command line",
    "xdist": "nothing; tests run one after another",
}


def missing_packages() -> dict[str, str]:
    """Return the packages that are not installed, each with the tests and measurements that are skipped."""
    return {package: skipped for package, skipped in SKIPPED_WITHOUT.items() if not _is_installed(package)}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def cpu_model() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    import torch

    installed = {"python": platform.python_version()}
    for package in (*PACKAGES, *NVIDIA):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    installed["torch"] = str(torch.__version__)  # with the build, such as +cpu
    if torch.version.cuda is not None:
        installed["CUDA"] = torch.version.cuda
    return installed


def cuda_device() -> str:
    """Describe the current CUDA device in words."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {properties.multi_processor_count} SMs"


def main() -> int:
    """Print the description. Return 1 if a decoder is installed but cannot be imported, else 0."""
    print(f"processor: {cpu_model()}, {len(os.sched_getaffinity(0))} CPUs; kernel {platform.release()}")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(f"/dev/shm: {shutil.disk_usage('/dev/shm').total / 1e9:.1f} GB; at most {files} open files")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    for package, skipped in missing_packages().items():
        print(f"{package} is not installed; skipped: {skipped}")
    status = 0
    for module in filter(_is_installed, DECODERS):
        try:
            importlib.import_module(module)
            print(f"{module}: imported")
        except Exception as error:
            status = 1
            print(f"{module}: installed, but cannot be imported: {type(error).__name__}: {error}")
    return status


if __name__ == "__main__":
    sys.exit(main())
