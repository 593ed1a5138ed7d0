"""Interpreters that are forked are to their parent, and to what they run, what fresh ones are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

TELLS = """
import json, os, signal, sys
blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
descriptors = sorted(int(name) for name in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{name}'))
print(json.dumps([
    __name__, sys.argv, sys.path, os.getcwd(), sorted(os.environ.items()), os.getppid(), descriptors, blocked,
    sorted(os.sched_getaffinity(0)), os.getpgid(0) == os.getpid(), sys.stdin.read(),
]))
"""


def told(popen, command, **options):
    process = popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    out, error = process.communicate(b"read")
    return process.returncode, out, error


@pytest.mark.parametrize("kind", ["-c", "-m", "script", "-P script"])
def test_what_a_program_finds_is_what_a_fresh_one_finds(warm_popen, tmp_path, kind):
    (tmp_path / "told.py").write_text(TELLS)
    command = {"-c": ["-c", TELLS], "-m": ["-m", "told"]}.get(kind, [*kind.split()[:-1], "./told.py"])
    reading, writing = os.pipe()
    try:
        options = {
            "cwd": tmp_path,
            "env": {**os.environ, "TOLD": "yes"},
            "pass_fds": [reading],
            "start_new_session": kind == "-m",
        }
        fresh, forked = (told(popen, [*command, "one", "-x"], **options) for popen in (subprocess.Popen, warm_popen))
    finally:
        os.close(reading)
        os.close(writing)
    assert fresh == forked
    assert fresh[0] == 0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('why')",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os._exit(7)",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('later'))).start()",
        "def f():\n    raise ValueError('wrong')\nf()",
    ],
)
def test_it_ends_as_a_fresh_one_does(warm_popen, program):
    fresh, forked = (told(popen, ["-c", program]) for popen in (subprocess.Popen, warm_popen))
    assert forked[:2] == fresh[:2]
    assert forked[2].splitlines()[-1:] == fresh[2].splitlines()[-1:]


def test_torch_is_there_and_random_numbers_are_not_the_same(warm_popen):
    program = "import sys, random; print('torch' in sys.modules, random.random())"
    one, other = (told(warm_popen, ["-c", program])[1].split() for _ in range(2))
    assert one[0] == other[0] == b"True"
    assert one[1] != other[1]


def test_signals_and_waiting_are_those_of_a_child(warm_popen):
    process = warm_popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_what_asks_for_more_is_started_afresh(warm_popen):
    program = "import sys; print('torch' in sys.modules)"
    for flags, options in ((["-S"], {}), ([], {"env": {**os.environ, "PYTHONHASHSEED": "5"}})):
        assert told(warm_popen, [*flags, "-c", program], **options)[:2] == (0, b"False\n")
    assert told(warm_popen, ["-c", program])[:2] == (0, b"True\n")
