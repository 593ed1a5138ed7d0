"""The memory of processes, of which some is shared."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import lacking

from benchmarks.memory import proportional_mb, shared_mb
from gpuload.cli.processes import tree

pytestmark = lacking.mark_missing("Linux", sys.platform != "linux")


@pytest.mark.processes
def test_memory_shared_by_two_processes_counts_half() -> None:
    megabytes = 64
    holder = (
        "import mmap, os, sys\n"
        f"shared = mmap.mmap(-1, {megabytes} << 20)\n"
        f"shared.write(b'x' * ({megabytes} << 20))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    shared.seek(0); shared.read()\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read(); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert megabytes / 2 <= proportional_mb(process.pid) <= megabytes / 2 + 16  # of the interpreter
        assert shared_mb(process.pid) == pytest.approx(megabytes / 2, abs=1)
        assert sum(map(proportional_mb, tree(process.pid))) >= megabytes
        process.communicate(b"")


def test_memory_of_an_ended_process_is_zero() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (proportional_mb(process.pid), shared_mb(process.pid)) == (0, 0)
