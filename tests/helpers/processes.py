"""Functions that wait for processes and look at their state."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["LIMIT_S", "is_alive", "stop_processes", "wait_until"]

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
    """Stop processes, and wait until they can take no more messages."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: state_of(pid) == "T", "a process has stopped")
