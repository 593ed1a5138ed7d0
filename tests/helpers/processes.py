"""Functions that wait for processes and look at their state."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LIMIT_S", "exit_code_in_fork", "is_alive", "stop_processes", "wait_until"]

LIMIT_S = 120.0


def wait_until(condition, what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not after {limit_s} s: {what}"
        time.sleep(0.002)


def state_of(pid: int) -> str:
    """Return the state of a process as in /proc, such as "T" (stopped) or "Z" (zombie); "X" if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second if the process exits after the file is opened
        return "X"


def is_alive(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def stop_processes(*pids: int) -> None:
    """Send SIGSTOP to processes, and wait until they have stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: state_of(pid) == "T", "a process has stopped")


def exit_code_in_fork(function: Callable[[], object]) -> int:
    """Call a function in a forked child, and return its exit code: 0 if the result is true, 1 if it is false, 9 if the
    function raises, and minus the number of a signal that kills it."""
    if not (child := os.fork()):
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
