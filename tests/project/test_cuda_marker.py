"""A test marked `cuda` is skipped without a device, and fails instead where the environment says it must not be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import lacking

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("require", "exit_status", "message"),
    [("0", 0, "1 skipped"), ("1", 1, "GPULOAD_REQUIRE_CUDA=1, but torch finds no CUDA device")],
)
def test_cuda_marker_without_a_device_skips_or_fails_if_required(
    tmp_path: Path, require: str, exit_status: int, message: str
) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.cuda\ndef test_it():\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(TESTS.parent / "pyproject.toml"),
    ]
    result = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")],
        env={**os.environ, "GPULOAD_REQUIRE_CUDA": require, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == exit_status, result.stdout + result.stderr
    assert message in result.stdout


def test_process_with_a_broken_cuda_context_is_replaced(tmp_path: Path) -> None:
    lacking.require("xdist")
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import torch\n\nBROKEN = []\ntorch.cuda.is_initialized = lambda: True\n\n"
        "def synchronize():\n    if BROKEN:\n        raise RuntimeError('illegal access')\n\n"
        "torch.cuda.synchronize = synchronize\n\n"
        "def test_first():\n    BROKEN.append(1)\n    raise AssertionError('told')\n\n"
        "def test_second():\n    torch.cuda.synchronize()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1"]
    options = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")]
    result = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "AssertionError: told" in result.stdout, result.stdout + result.stderr
    assert "1 passed" in result.stdout
