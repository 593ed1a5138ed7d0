"""A program that imports everything once and forks one child for each script that it is told to run.

A script is a program of its own: it leads its process group and session, as a shell's job does, runs as `__main__`,
writes to files of its own, and ends as an interpreter ends. The forking process has used neither torch's threads nor
gpuload's workers, so nothing of it is in the child's way; importing torch alone would take each script a second.

Reads lines ``script-file output-file error-file mark``; answers each with the child's pid, and with its exit code when
it has ended.
"""

# ruff: noqa: F401  (what a script finds imported)

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
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.workers import fork_server, pool, process

LIMIT_S = 120.0
tmp = ""  # each script sets it
gl.Loader  # noqa: B018  the package's face imports lazily
process.KILL_WAIT_S = LIMIT_S  # on a loaded machine a process may be there for more than two seconds after its SIGKILL


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not after {LIMIT_S} s: {what}"
        time.sleep(0.002)


def say(*words):
    """Tell the test, at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def hang():
    """Hang until a signal comes.

    In short steps: Python looks for signals before it calls `sleep`, so one that comes between that and the sleep's
    beginning is noticed when the sleep is over.
    """
    while True:
        time.sleep(0.1)


def ctrl_c():
    """As a terminal does it: to all processes of the group."""
    os.killpg(0, signal.SIGINT)


def jpeg_loader(folder, **options):
    """A Loader over the folder of JPEGs."""
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
    """For `number_loader`: hang with the interpreter's lock held, so that no Python code can end it."""
    import ctypes

    if index >= 8:
        Path(f"{tmp}/hangs").touch()
        ctypes.PyDLL(None).sleep(1000)


def log_of_workers():
    """A list of what `gpuload.workers` logs from now on; nothing else is done with it."""
    logged = []

    class Handler(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    logger = logging.getLogger("gpuload.workers")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logged


def when_waiting_for_workers(condition, act):
    """Call `act` once, when the main process waits for its workers, in next(), and this is true."""
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
    """Whether two epochs with ``info=True`` are the same, to the last bit."""
    batches, expected = list(batches), list(expected)
    return len(batches) == len(expected) and all(
        torch.equal(images, images_) and torch.equal(labels, labels_) and torch.equal(info.indices, info_.indices)
        for ((images, labels), info), ((images_, labels_), info_) in zip(batches, expected, strict=True)
    )


def children(pid="self"):
    """The child processes of one."""
    with contextlib.suppress(OSError):  # it has ended
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def started_as(role):
    """The child processes that were started as this."""
    pids = []
    for pid in children():
        with contextlib.suppress(OSError):  # it has ended
            if role in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                pids.append(pid)
    return pids


def servers():
    """The fork servers among the child processes."""
    return started_as("server")


def templates():
    """The processes that workers are forked from: children of a fork server, or of this process."""
    return started_as("template") + [pid for server in servers() for pid in children(server)]


def workers():
    """The processes of workers, which are children of a template, or of this one."""
    template_pids = templates()
    return [pid for pid in children() if pid not in [*template_pids, *servers()]] + [
        pid for template in template_pids for pid in children(template)
    ]


def held_resources():
    """What this process holds: descriptors by what they are, child processes, mappings of gpuload's memory. The fork
    server, which outlives sessions, is ended first."""
    gc.collect()
    fork_server.close()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    kinds = sorted(link.split(":[")[0] for link in links if not link.startswith("/proc/"))
    return kinds, len(children()) + len(workers()), Path("/proc/self/maps").read_text().count("memfd:gpuload")


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
    warnings.simplefilter("always")  # what a ResourceWarning says is wrong too
    # A ctrl-C between the opening of such a file and its `with`: Python closes it, and mentions that.
    warnings.filterwarnings("ignore", "unclosed file <_io.FileIO name='/(proc|sys)/", ResourceWarning)
    os.environ["GPULOAD_TEST_MARK"] = mark
    exec(compile(Path(script).read_text(), script, "exec"))
