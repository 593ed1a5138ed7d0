"""All kernels compile for CUDA, without a GPU: the interpreter takes much that the compiler does not.

A process of its own, since where Triton interprets it has no compiler.
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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    completed = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_all.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert len(completed.stdout.split()) == 27  # 26 kernels, and that launches ask for no others
