"""Builds the fake CUDA runtime and runs a program on it.

    python tests/fakecuda/build.py -m pytest -m cuda tests

runs this interpreter with these arguments, with the fake runtime in place of CUDA's. It needs g++, a torch built for
CUDA 13, and CUDA's headers from the wheels nvidia-cuda-runtime and nvidia-cuda-crt. Environment variables:

- ``FAKECUDA_POLICY``: how far streams run ahead, a key of `fakecuda.runtime.POLICIES`. Default: ``eager``.
- ``FAKECUDA_DEVICES``: the number of devices. Default: 2.
- ``TRITON_INTERPRET=0``: Triton's kernels are compiled to Triton's first intermediate representation, launched and
  counted, but not run. By default, they run in the interpreter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["build", "environment"]

SOURCES = Path(__file__).parent / "runtime"
BUILT = Path(__file__).parent.parent.parent / "build"
RUNTIME, DRIVER = "libcudart.so.13", "libcuda.so.1"
FLAGS = ("-O2", "-Wall", "-Wextra", "-fPIC")


def headers() -> Path:
    """Return the folder of CUDA's headers.

    Raises:
        FileNotFoundError: the headers are not installed.
    """
    include = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"
    for name, package in (
        ("cuda_runtime_api.h", "nvidia-cuda-runtime"),
        ("crt/host_defines.h", "nvidia-cuda-crt==13.0.*"),
    ):
        if not (include / name).exists():
            raise FileNotFoundError(f"{include / name} does not exist: pip install {package}")
    return include


def build() -> Path:
    """Build the two libraries if the sources have changed, and return their folder."""
    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    folder = BUILT / f"fakecuda-{digest}"
    if folder.exists():
        return folder
    include = f"-I{headers()}"
    BUILT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        for library, sources, defined in (
            (RUNTIME, ["machine.cpp", "runtime.cpp"], "-DRUNTIME"),
            (DRIVER, ["driver.cpp"], ""),
        ):
            missing = built / f"{library}.o"
            compile_c = ["gcc", *FLAGS, *filter(None, [defined]), "-c", str(SOURCES / "missing.c"), "-o", str(missing)]
            subprocess.run(compile_c, check=True)
            paths = [str(SOURCES / name) for name in sources]
            link = ["-shared", str(missing), f"-Wl,-soname,{library}", "-ldl", "-o", str(built / library)]
            subprocess.run(["g++", "-std=c++17", *FLAGS, include, *paths, *link], check=True)
        for path in built.glob("*.o"):
            path.unlink()
        try:
            built.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def environment() -> dict[str, str]:
    """Return the environment variables that make the fake runtime a program's CUDA."""
    folder = build()
    preloaded = [str(folder / RUNTIME), str(folder / DRIVER), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {
        "FAKECUDA": "1",
        "FAKECUDA_DEVICES": os.environ.get("FAKECUDA_DEVICES", "2"),
        "LD_PRELOAD": ":".join(preloaded),
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1"),
        "TRITON_LIBCUDA_PATH": str(folder),
    }


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        sys.exit("torch is not installed: a build for CUDA 13 is needed")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment())


if __name__ == "__main__":
    main()
