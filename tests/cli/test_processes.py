"""`tree` and `cpu_seconds` of processes whose CPU time is known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import lacking

from gpuload.cli.processes import cpu_seconds, tree

pytestmark = lacking.mark_missing("Linux", sys.platform != "linux")

BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


@pytest.mark.processes
def test_tree_and_cpu_seconds_include_a_live_and_an_ended_grandchild() -> None:
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
        assert cpu_seconds(process.pid) >= 0.28  # of the 0.3 s that the grandchild used, which clock ticks may shorten
        assert cpu_seconds(os.getpid()) - before >= 0.28
        process.communicate(b"")
    assert process.pid not in tree(os.getpid())
    assert cpu_seconds(os.getpid()) - before >= 0.28  # the time of an ended child stays counted


def test_cpu_seconds_of_an_ended_process_are_zero() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_seconds(process.pid) == 0
