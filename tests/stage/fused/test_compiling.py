"""All kernels compile for CUDA without a GPU; the interpreter accepts code that the compiler does not.

The test runs in a separate process, because Triton has no compiler in a process that interprets kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import lacking

lacking.require("triton")


@pytest.mark.timeout(330)
def test_compile_all_compiles_each_kernel_for_cuda(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, Path(__file__).with_name("compile_all.py")]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    # The script prints the names of 26 kernels, and "variants" if launches compile no further kernel.
    assert len(completed.stdout.split()) == 27, "count the kernels that tests/stage/fused/compile_all.py compiles"
