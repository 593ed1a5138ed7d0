"""The number of threads that pyarrow starts. This module does not import torch, since a worker would import it too."""

from __future__ import annotations

import os
import subprocess
import sys


def threads_of_arrow(code: str) -> int:
    """Return how many threads pyarrow starts between the two calls of ``print(threads())`` in this code. It may use
    eight CPUs, and one more thread to read files."""
    program = f"""
import os
import pyarrow
def threads(): return len(os.listdir("/proc/self/task"))
pyarrow.set_cpu_count(8)
pyarrow.set_io_thread_count(1)
{code}
"""
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    threads_before, threads_after = map(int, result.stdout.split())
    return threads_after - threads_before
