"""The number of threads that pyarrow starts. This module does not import torch, since a worker would import it too."""

from __future__ import annotations

import os
import subprocess
import sys


def threads_of_arrow(code: str) -> int:
    """Return how many threads pyarrow starts in a program that runs this code, between its two calls of
    ``print(threads())``. It may use eight CPUs, and one more thread to read files."""
    program = f"""
import os
import pyarrow
def threads(): return len(os.listdir("/proc/self/task"))
pyarrow.set_cpu_count(8)
pyarrow.set_io_thread_count(1)
{code}
"""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=True, timeout=120)
    begun, ended = map(int, done.stdout.split())
    return ended - begun
