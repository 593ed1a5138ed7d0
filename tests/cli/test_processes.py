"""What a tree of processes costs, on trees whose cost is known."""

from __future__ import annotations

import os
import subprocess
import sys

import lacking
import pytest

from gpuload.cli.processes import cpu_seconds, proportional_mb, shared_mb, tree

pytestmark = lacking.mark("Linux", sys.platform != "linux")

BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


@pytest.mark.processes
def test_tree_and_cpu_of_a_living_grandchild_and_of_one_that_ended() -> None:
    before = cpu_seconds(os.getpid())
    grandchild = f"import sys\n{BUSY}\nprint('busy', flush=True); sys.stdin.read()"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pids = tree(os.getpid())
        assert pids[0] == os.getpid()
        assert process.pid in pids
        assert len(tree(process.pid)) == 2
        assert cpu_seconds(process.pid) >= 0.28
        assert cpu_seconds(os.getpid()) - before >= 0.28
        process.communicate(b"")
    assert tree(os.getpid()).count(process.pid) == 0
    assert cpu_seconds(os.getpid()) - before >= 0.28  # waited for, so it stays counted


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
        assert megabytes / 2 <= proportional_mb(process.pid) <= megabytes / 2 + 16
        assert shared_mb(process.pid) == pytest.approx(megabytes / 2, abs=1)
        assert sum(map(proportional_mb, tree(process.pid))) >= megabytes
        process.communicate(b"")


def test_a_process_that_is_gone_costs_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_seconds(process.pid) == 0
    assert proportional_mb(process.pid) == 0
    assert shared_mb(process.pid) == 0
