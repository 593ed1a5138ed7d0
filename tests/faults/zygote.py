"""A program that imports everything once and forks one child for each script that it is asked to run.

A script behaves like a separate program: it leads its process group and session, as a shell's job does, runs as
`__main__`, writes to its own output files, and exits as an interpreter does. The forking process has used neither
torch's threads nor gpuload's workers, so it leaves nothing in the child that could disturb it. Importing torch in each
script would take a second.

The program reads lines ``script-file output-file error-file mark``. It answers each line with the child's pid and, when
the child has exited, with its exit code.
"""

# ruff: noqa: F401  (scripts use these imports)

import contextlib
import gc
import logging
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.workers import fork_server, pool, process

LIMIT_S = 120.0
tmp = ""  # set by each script
gl.Loader  # noqa: B018  the package imports its public names lazily
process.KILL_WAIT_S = LIMIT_S  # on a loaded machine a process can exist for more than two seconds after its SIGKILL


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not after {LIMIT_S} s: {what}"
        time.sleep(0.002)


def say(*words):
    """Print to the test without buffering."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def hang():
    """Hang until a signal arrives.

    Sleep in short steps: Python checks for signals before it calls `sleep`, so a signal that arrives between the check
    and the call is noticed only after the sleep.
    """
    while True:
        time.sleep(0.1)


def ctrl_c():
    """Send SIGINT to all processes of the group, as a terminal does."""
    os.killpg(0, signal.SIGINT)


def jpeg_loader(folder, **options):
    options = {"num_workers": 2, "device": "cpu", "info": True, "shuffle": True, "batch_size": 4, **options}
    return gl.Loader(gl.ImageFolder(folder), transforms=[T.RandomResizedCrop(32)], **options)


class Numbers:
    """A dataset of the numbers up to `length`; `function(index)` is called for each, in the worker."""

    def __init__(self, function=int, length=40):
        self.function, self.length = function, length

    def __getitem__(self, index):
        self.function(index)
        return index

    def __len__(self):
        return self.length


def number_loader(function=int, length=40, **options):
    options = {"batch_size": 4, "num_workers": 2, "chunk_size": 2, "device": "cpu", **options}
    return gl.Loader(Numbers(function, length), **options)


def hang_from_8(index):
    """Hang with the interpreter's lock held, so that no Python code can end the process."""
    import ctypes

    if index >= 8:
        Path(f"{tmp}/hangs").touch()
        ctypes.PyDLL(None).sleep(1000)


def happens_first(name):
    """Return True in the first process that asks for this name, else False."""
    try:
        Path(f"{tmp}/{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die_once_at(*indices):
    """Return a function for `number_loader` that kills the worker at each of these indices, once."""

    def die(index):
        if index in indices and happens_first(str(index)):
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def check_epoch(loader, length=40):
    """Check that an epoch of `number_loader` has all numbers in order."""
    assert torch.cat(list(loader)).tolist() == list(range(length))


def record_worker_log():
    """Return a list that will receive the messages that `gpuload.workers` logs from now on."""
    logged = []

    class Handler(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    logger = logging.getLogger("gpuload.workers")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logged


def call_when_waiting_for_workers(condition, act):
    """Call `act` once, when the main process waits for its workers in next() and the condition holds."""
    collect_events = pool.WorkerPool.collect_events

    def act_first(self, timeout_s):
        if condition():
            pool.WorkerPool.collect_events = collect_events
            act()
        return collect_events(self, timeout_s)

    pool.WorkerPool.collect_events = act_first


def wait_for_the_hang():
    wait_until(Path(f"{tmp}/hangs").exists, "a worker hangs")


def equal_epochs(batches, expected):
    """Return whether two epochs with ``info=True`` are equal to the last bit."""
    batches, expected = list(batches), list(expected)
    return len(batches) == len(expected) and all(
        all(map(torch.equal, (*tensors, info.indices), (*expected_tensors, expected_info.indices)))
        for (tensors, info), (expected_tensors, expected_info) in zip(batches, expected, strict=True)
    )


def child_pids(pid="self"):
    with contextlib.suppress(OSError):  # the process has exited
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def process_state(pid):
    """Return the state of a process as in /proc, such as "S", "T" (stopped) or "Z" (zombie); "gone" if it is reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "gone"


def is_dead(pid):
    return process_state(pid) in ("gone", "Z")


def pids_started_as(role):
    """Return the child processes with this role in their command line."""
    pids = []
    for pid in child_pids():
        with contextlib.suppress(OSError):  # the process has exited
            if role in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                pids.append(pid)
    return pids


def server_pids():
    return pids_started_as("server")


def template_pids():
    """Return the processes that workers are forked from, which are children of a fork server or of this process."""
    return pids_started_as("template") + [pid for server in server_pids() for pid in child_pids(server)]


def worker_pids():
    """Return the workers, which are children of a template or of this process."""
    pids_of_templates = template_pids()
    return [pid for pid in child_pids() if pid not in [*pids_of_templates, *server_pids()]] + [
        pid for template in pids_of_templates for pid in child_pids(template)
    ]


def held_resources():
    """Return the kinds of this process's open descriptors, the numbers of its child processes and of its mappings of
    gpuload's memory. Closes the fork server first, which outlives sessions."""
    gc.collect()
    fork_server.close()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    kinds = sorted(link.split(":[")[0] for link in links if not link.startswith("/proc/"))
    return kinds, len(child_pids()) + len(worker_pids()), Path("/proc/self/maps").read_text().count("memfd:gpuload")


if __name__ == "__main__":
    requests, answers = os.dup(0), os.dup(1)
    with open(requests, closefd=False) as lines:
        for line in iter(lines.readline, ""):
            script, output, error, mark = line.split()
            pid = os.fork()
            if pid == 0:
                break
            os.write(answers, f"{pid}\n".encode())
            os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        else:
            sys.exit()
    os.close(requests)
    os.close(answers)
    os.setsid()
    for path, number in ((os.devnull, 0), (output, 1), (error, 2)):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    warnings.simplefilter("always")  # a ResourceWarning is a failure too
    # If a ctrl-C arrives between the opening of such a file and its `with`, Python closes the file and warns.
    warnings.filterwarnings("ignore", "unclosed file <_io.FileIO name='/(proc|sys)/", ResourceWarning)
    os.environ["GPULOAD_TEST_MARK"] = mark
    exec(compile(Path(script).read_text(), script, "exec"))
