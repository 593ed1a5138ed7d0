"""The fork server of this process: it imports the libraries that datasets need, once, and each session's template is
forked from it. `gpuload.workers.server` is its own side.

It is started when the first Loader with workers is created, so that it imports libraries while the program builds its
model; or at `iter()`, if the dataset needs no library. It has what cannot be changed in a running process: the
executable, the import path, the environment, the user, and so on. If these have changed, another server is started. It
ends with this process, or once it has had no session for a while. Sessions do not depend on it after their templates
have been forked.

If there can be no fork server, the template is a separate interpreter: within a worker, while `multiprocessing` imports
the main module of a spawned process, if the server has failed, and if it has imported another module than this process
or uses a descriptor that the session needs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Final

from gpuload.datasets.worker import THIS_PROCESS
from gpuload.errors import WorkerError
from gpuload.ring.ring import reserve_standard_streams
from gpuload.workers.inherited import import_path, module_origins, warning_filters
from gpuload.workers.job import write_job
from gpuload.workers.process import (
    ForkedProcess,
    Forker,
    ForkerLost,
    LaunchedProcess,
    Template,
    interpreter_command,
    worker_environment,
)
from gpuload.workers.protocol import (
    MESSAGE_BYTES,
    SERVER_IMPORTS,
    SERVER_LEAVES_OUT,
    SERVER_READY,
    send_request,
)
from gpuload.workers.signals import deferred_signals

__all__ = ["close", "is_running", "launch_template", "make_template", "start_imports"]

IDLE_LIMIT_S = 60.0  # a server ends after this time without a session
END_WAIT_S: Final = 1.0
logger = getLogger("gpuload.workers")


class ForkServer(Forker):
    """A running fork server.

    Args:
        key: what the server cannot change later.
        path: the import path.
    """

    def __init__(self, key: object, path: list[str]) -> None:
        self.key = key
        self._answered_at: float | None = None
        self._importing = ""
        settings = {"path": path, "argv": sys.argv[:1], "idle_limit_s": IDLE_LIMIT_S}
        settings_fd = write_job(settings, memoryview(b""), [])
        try:
            super().__init__("the fork server", lambda *ends: LaunchedProcess("server", (*ends, settings_fd)))
        finally:
            os.close(settings_fd)

    def request_imports(self, libraries: dict[str, str]) -> None:
        send_request(self.replies, ({"libraries": libraries, "filters": warning_filters()}, None), [])

    def fork_template(self, shared: Sequence[int], libraries: dict[str, str], *ends: int) -> ForkedProcess:
        """Request a template; the arguments are those of `make_template`, and the descriptors of each process."""
        details = {
            "libraries": libraries,
            "filters": warning_filters(),
            "origins": module_origins(),
            "numbers": list(shared),
            "requested_at": time.monotonic(),
        }
        return self.fork(details, ends, shared)

    def idle_since(self) -> float | None:
        self.read_messages()
        return None if self._importing else self._answered_at

    def read_messages(self) -> None:
        """Read what the server has said since the last call."""
        with _lock:
            while message := self._next_message():
                if message.startswith(SERVER_IMPORTS):
                    self._importing = message.removeprefix(SERVER_IMPORTS).decode()
                elif message.startswith(SERVER_LEAVES_OUT):
                    self._leave_out(message.removeprefix(SERVER_LEAVES_OUT).decode(errors="replace"))
                elif message == SERVER_READY:
                    self._importing, self._answered_at = "", time.monotonic()

    def _next_message(self) -> bytes:
        with contextlib.suppress(OSError):  # there is none
            try:
                return self.replies.recv(MESSAGE_BYTES)
            except ConnectionResetError:  # raised once if the server has ended before it had read all requests
                return self.replies.recv(MESSAGE_BYTES)
        return b""

    def reap(self) -> None:
        """Close the descriptors of a server that has ended, and find out why."""
        self.read_messages()
        ending = self.wait()
        self.close_descriptors()
        if self._importing:
            if not ending.killed_externally:
                self._leave_out(ending.cause)
        elif self._answered_at is None and ending.status and not ending.killed_externally:
            _failed_keys.add(self.key)
            logger.info("there is no fork server, since it %s", ending.cause)

    def _leave_out(self, reason: str) -> None:
        if self._importing:
            _left_out.add(self._importing)
            logger.info("the fork server does not import %s: %s", self._importing, reason)
        self._importing = ""


_lock = threading.RLock()
_server: ForkServer | None = None
_retired: list[ForkServer] = []  # they end when their last session has ended
_left_out: set[str] = set()  # modules that no fork server imports
_failed_keys: set[object] = set()


def start_imports(libraries: Mapping[str, str]) -> None:
    """Make the fork server import the modules in `libraries`, each with the file of its package. This does nothing if
    there are none, and leaves an error to `make_template`."""
    wanted = _without_left_out(libraries)
    if wanted:
        with contextlib.suppress(WorkerError, OSError), deferred_signals(), reserve_standard_streams(), _lock:
            if (server := _current_server(import_path())) is not None:
                server.request_imports(wanted)


def make_template(shared: Sequence[int], path: list[str], libraries: Mapping[str, str]) -> Template:
    """Return a new template, forked from the fork server if possible.

    Args:
        shared: the descriptors of `Template`.
        path: the import path.
        libraries: the modules that the fork server imports first, each with the file of its package.

    Raises:
        WorkerError: the process could not be started.
    """
    with _lock:
        while (server := _current_server(path)) is not None:
            fork = partial(server.fork_template, shared, _without_left_out(libraries))
            with contextlib.suppress(ForkerLost):
                return Template(fork)
    return launch_template(shared)


def launch_template(shared: Sequence[int]) -> Template:
    """Return a new template that is a separate interpreter."""
    return Template(lambda *ends: LaunchedProcess("template", (*ends, *shared)))


def is_running() -> bool:
    """Return whether this process has a fork server."""
    return _server is not None


def close() -> None:
    """End the fork servers. Running sessions continue."""
    global _server
    with _lock:
        servers = [*_retired, *filter(None, [_server])]
        _server = None
        _retired.clear()
        for server in servers:
            is_idle = server.idle_since() is not None
            server.finish()
            server.end(time.monotonic() + END_WAIT_S * is_idle)


def _without_left_out(libraries: Mapping[str, str]) -> dict[str, str]:
    return {name: file for name, file in libraries.items() if _left_out.isdisjoint((name, name.partition(".")[0]))}


def _current_server(path: list[str]) -> ForkServer | None:
    """Return the running server for this process's present state; start one if there is none. None means that there can
    be no server."""
    global _server
    for server in [*_retired, *filter(None, [_server])]:
        server.read_messages()
        if server.has_ended:
            server.reap()
            if server is _server:
                _server = None
            else:
                _retired.remove(server)
    key = _make_key(path)
    if THIS_PROCESS.is_worker or _is_importing_main() or key in _failed_keys:
        return None
    if _server is not None and _server.key != key:
        _server.finish()
        _retired.append(_server)
        _server = None
    if _server is None:
        _server = ForkServer(key, path)
    return _server


def _make_key(path: list[str]) -> object:
    """Return what a process has from its start, and cannot be changed later by a fork of the server."""
    status = Path("/proc/self/status").read_text().splitlines()
    lines = [line for line in status if line.split(":")[0] in ("Umask", "Uid", "Gid", "Groups", "SigIgn")]
    cgroup = ""
    with contextlib.suppress(OSError):
        cgroup = Path("/proc/self/cgroup").read_text()
    return (
        tuple(interpreter_command()),
        tuple(path),
        tuple(sorted(worker_environment().items())),
        tuple(lines),
        cgroup,
        os.getpgid(0),
        os.getsid(0),
        os.getpriority(os.PRIO_PROCESS, 0),
    )


def _is_importing_main() -> bool:
    """Return whether `multiprocessing` is importing the main module of a spawned process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


def _after_fork_in_child() -> None:
    global _lock, _server
    _lock = threading.RLock()
    for server in [*_retired, *filter(None, [_server])]:
        server.leave_to_parent()
    _server = None
    _retired.clear()


# At the program's end, the finalizers of Loaders, which are newer, run before this one.
weakref.finalize(ForkServer, close)
os.register_at_fork(after_in_child=_after_fork_in_child)
