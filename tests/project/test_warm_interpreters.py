"""helpers/warm_interpreters.py: to its parent and its program, a forked interpreter behaves like a fresh one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PRINT_STATE = """
import json, os, signal, sys
blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
descriptors = sorted(int(name) for name in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{name}'))
print(json.dumps([
    __name__, sys.argv, sys.path, os.getcwd(), sorted(os.environ.items()), os.getppid(), descriptors, blocked,
    sorted(os.sched_getaffinity(0)), os.getpgid(0) == os.getpid(), sys.stdin.read(),
]))
"""


def run_python(popen, command, **options):
    process = popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    out, error = process.communicate(b"read")
    return process.returncode, out, error


@pytest.mark.parametrize("kind", ["-c", "-m", "script", "-P script"])
def test_warm_program_has_the_state_of_a_fresh_one(warm_popen, tmp_path, kind):
    (tmp_path / "print_state.py").write_text(PRINT_STATE)
    command = {"-c": ["-c", PRINT_STATE], "-m": ["-m", "print_state"]}.get(
        kind, [*kind.split()[:-1], "./print_state.py"]
    )
    reader, writer = os.pipe()
    try:
        options = {
            "cwd": tmp_path,
            "env": {**os.environ, "EXAMPLE": "yes"},
            "pass_fds": [reader],
            "start_new_session": kind == "-m",
        }
        fresh, forked = (
            run_python(popen, [*command, "one", "-x"], **options) for popen in (subprocess.Popen, warm_popen)
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert fresh == forked
    status, *_ = fresh
    assert status == 0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('why')",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os._exit(7)",
        "import atexit; atexit.register(print, 'at the end'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('later'))).start()",
        "def f():\n    raise ValueError('wrong')\nf()",
    ],
)
def test_warm_program_ends_like_a_fresh_one(warm_popen, program):
    fresh, forked = (run_python(popen, ["-c", program]) for popen in (subprocess.Popen, warm_popen))
    (*fresh_result, fresh_errors), (*forked_result, forked_errors) = fresh, forked
    assert forked_result == fresh_result
    assert forked_errors.splitlines()[-1:] == fresh_errors.splitlines()[-1:]


def test_warm_programs_have_torch_and_differing_random_numbers(warm_popen):
    program = "import sys, random; print('torch' in sys.modules, random.random())"
    outputs = [output.split() for _, output, _ in (run_python(warm_popen, ["-c", program]) for _ in range(2))]
    [(has_torch, random_number), (second_has_torch, second_random_number)] = outputs
    assert has_torch == second_has_torch == b"True"
    assert random_number != second_random_number


def test_warm_process_can_be_waited_for_and_signaled(warm_popen):
    process = warm_popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_program_with_unsupported_flags_or_a_hash_seed_is_started_fresh(warm_popen):
    program = "import sys; print('torch' in sys.modules)"
    for flags, options in ((["-S"], {}), ([], {"env": {**os.environ, "PYTHONHASHSEED": "5"}})):
        assert run_python(warm_popen, [*flags, "-c", program], **options)[:2] == (0, b"False\n")
    assert run_python(warm_popen, ["-c", program])[:2] == (0, b"True\n")
