"""The fork server's own process: it imports libraries, and forks the templates of sessions. This module runs only in
the fork server and its forks; `gpuload.workers.fork_server` is the parent's side.

A library is left out if it would keep this process from being forked, or if importing it imports a module of the user,
which may change before the next session begins. The process then ends, and the parent starts another one without this
library. It ends by itself when it has had no template for a while.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import socket
import sys
import time
from functools import partial
from typing import Any

from gpuload.workers import template
from gpuload.workers.forking import flush_streams, serve_forks
from gpuload.workers.inherited import LibrarySettings, is_users_module, module_origins
from gpuload.workers.job import read_settings
from gpuload.workers.main import set_up_child
from gpuload.workers.protocol import MAX_INLINE_BYTES, SERVER_IMPORTS, SERVER_LEAVES_OUT, SERVER_READY, TEMPLATE_MISFIT
from gpuload.workers.start import Stopwatch

__all__ = ["serve"]


def serve(settings: dict[str, Any], descriptors: list[int]) -> None:
    """Import libraries and fork templates, as the parent requests."""
    *server_fds, settings_fd = descriptors
    control_fd, lifeline_fd, stacks_fd = server_fds
    set_up_child(lifeline_fd, stacks_fd, server_fds)
    os.close(settings_fd)
    # A BrokenPipeError or ConnectionResetError means that the parent has closed its end of the socket.
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        libraries = _Libraries(control)
        run_child = partial(_become_template, [lifeline_fd, stacks_fd], libraries)
        serve_forks(control, run_child, libraries.add, settings["idle_limit_s"])


class _Libraries:
    """The libraries that this process has imported, and how long that took."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._tried: set[str] = set()
        self._imports: list[tuple[float, Stopwatch]] = []  # with the end of each import, in monotonic seconds

    def add(self, details: dict[str, Any]) -> None:
        """Import the modules in `details`, unless another one would be imported here than in the main process."""
        LibrarySettings([], details["filters"]).apply(imported=False)
        for name, origin in details["libraries"].items():
            if name not in sys.modules and name not in self._tried and _find_origin(name) == origin:
                self._tried.add(name)
                self._import(name)
        flush_streams()  # otherwise every fork would print the buffered text again
        gc.collect()
        gc.freeze()  # otherwise a garbage collection in a fork would write to, and so copy, the pages of all objects
        self._control.send(SERVER_READY)

    def _import(self, name: str) -> None:
        self._control.send(SERVER_IMPORTS + name.encode())
        stopwatch, loaded, fds = Stopwatch(), set(sys.modules), list(map(int, os.listdir("/proc/self/fd")))
        with stopwatch.measure(), contextlib.suppress(Exception):  # the dataset's import will raise it again
            importlib.import_module(name)
        self._imports.append((time.monotonic(), stopwatch))
        users_modules = [other for other in set(sys.modules) - loaded if is_users_module(sys.modules[other])]
        reason = f"it imports {users_modules[0]}" if users_modules else template.unfit_reason(fds)
        if reason:
            self._control.send(SERVER_LEAVES_OUT + reason.encode(errors="replace")[:MAX_INLINE_BYTES])
            os._exit(0)

    def stopwatch_since(self, began_at: float) -> Stopwatch:
        """Return a stopwatch that has measured the imports since a time in monotonic seconds."""
        stopwatch = Stopwatch()
        for ended_at, other in self._imports:
            if ended_at > began_at:
                stopwatch.add(other, ended_at, began_at)
        return stopwatch


def _find_origin(name: str) -> str | None:
    with contextlib.suppress(Exception):  # raised by a third-party finder
        if (spec := importlib.util.find_spec(name.partition(".")[0])) is not None:
            return spec.origin
    return None


def _become_template(server_fds: list[int], libraries: _Libraries, details: dict[str, Any], fds: list[int]) -> None:
    """Run the template of a session in the forked child."""
    for fd in server_fds:
        os.close(fd)
    if reason := _misfit_reason(details, fds):
        with socket.socket(fileno=fds[0]) as control:
            control.send(TEMPLATE_MISFIT + reason.encode())
        return
    fds = _move_descriptors(fds, [None, None, None, *details["numbers"]])
    settings = read_settings(fds[3])
    sys.argv[:] = settings["argv"]
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # otherwise unseeded numbers would be the same in each session
    template.serve(settings, fds, libraries.stopwatch_since(details["requested_at"]))


def _misfit_reason(details: dict[str, Any], fds: list[int]) -> str:
    """Return the reason why this process cannot become the template that `details` describe; "" if it can."""
    origins = module_origins()
    for name, origin in details["origins"].items():
        if origins.get(name, origin) != origin:
            return f"it has imported another {name}"
    for number in details["numbers"]:
        with contextlib.suppress(OSError):  # it is free
            if number not in fds:
                os.fstat(number)
                return f"a library uses descriptor {number}"
    return ""


def _move_descriptors(fds: list[int], numbers: list[int | None]) -> list[int]:
    """Give each descriptor the number that it has in the main process, where the pickle refers to it; None means that
    it may have any other number. Return the new numbers."""
    current = list(fds)
    for index, number in enumerate(numbers):
        if number is None or current[index] == number:
            continue
        if number in current:
            current[current.index(number)] = os.dup(number)
        os.dup2(current[index], number, inheritable=False)
        os.close(current[index])
        current[index] = number
    return current
