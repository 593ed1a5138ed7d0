"""What all tests share: where the real photographs are, a folder of JPEGs made on the spot, and the `cuda` marker."""

from __future__ import annotations

import os
import signal
import warnings
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from pictures import smooth_image

# A shell's background jobs are started with ctrl-C ignored, and hand that on; programs that tests start must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, and no limit of time on a busy machine.
settings.register_profile("gpuload", deadline=None, derandomize=True)
settings.load_profile("gpuload")

# Triton's kernels run in its interpreter where there is no GPU; it is asked for before a kernel is declared.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SHARED = Path(os.environ.get("GPULOAD_SHARED", Path(__file__).parent.parent.parent / "shared"))


@cache
def why_no_cuda() -> str | None:
    """Why no CUDA device can be used here, or None where one can."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # a driver too old for torch is told by a warning
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return "; ".join(str(warning.message) for warning in caught) or "torch finds no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `cuda` where there is no CUDA device; fail it where GPULOAD_REQUIRE_CUDA=1."""
    if item.get_closest_marker("cuda") and (reason := why_no_cuda()):
        if os.environ.get("GPULOAD_REQUIRE_CUDA") == "1":
            pytest.fail(f"GPULOAD_REQUIRE_CUDA=1, but {reason}", pytrace=False)
        pytest.skip(f"needs a CUDA device: {reason}")


@pytest.fixture(scope="session")
def photos() -> list[Path]:
    """The paths of real photographs, sorted; the test is skipped where there are none."""
    found = sorted((SHARED / "photos").glob("*.jpg"))
    if not found:
        pytest.skip(f"no photographs in {SHARED / 'photos'}; set GPULOAD_SHARED to the folder that holds photos/")
    return found


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of odd and damaged files; the test is skipped where it is absent."""
    folder = SHARED / "corpus"
    if not (folder / "SOURCES.tsv").exists():
        pytest.skip(f"no corpus in {folder}; set GPULOAD_SHARED to the folder that holds corpus/")
    return folder


@pytest.fixture(scope="session")
def jpeg_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder root/class/*.jpg of 3 classes and 48 made images of 15 sizes."""
    import simplejpeg

    root = tmp_path_factory.mktemp("jpegs")
    for number in range(48):
        folder = root / ("ant", "bee", "cat")[number % 3]
        folder.mkdir(exist_ok=True)
        image = smooth_image(90 + 17 * (number % 5), 120 + 13 * (number % 3), number)
        (folder / f"{number:03d}.jpg").write_bytes(simplejpeg.encode_jpeg(image, quality=90, colorsubsampling="420"))
    return root
