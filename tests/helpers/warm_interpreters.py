"""Python interpreters with torch already imported, forked where tests would start fresh ones.

Importing torch and shutting it down costs a process two CPU seconds, and most programs that tests start need torch but
test something else. Here a server process that has imported torch, and done nothing with it, forks one child for each
command. The child becomes a direct child process of the test. It has the descriptors, environment, working directory,
arguments and import path of a fresh interpreter, runs its script as `__main__`, and ends with the `atexit` functions.
Only `sys.modules` and the seed of `hash` differ.

Tests opt in with the fixture `warm`. The workers of tests in the folders of `FORKED` in conftest.py are forked from a
process that has imported only what every worker imports. Tests of the start itself, or of imports, use fresh
interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import marshal
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

__all__ = ["WARM_CHILDREN_VARIABLE", "WarmPopen", "warm_interpreters"]

MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 250
SUPPORTED_FLAGS = {"-B", "-P", "-u"}
WARM_CHILDREN_VARIABLE = "GPULOAD_TEST_WARM_CHILDREN"  # set for programs whose child interpreters should be warm too
CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl
# Variables that an interpreter reads when it starts. LD_LIBRARY_PATH is not among them, since importing OpenCV sets it.
SETTINGS = ("PYTHON", "LD_PRELOAD", "MALLOC")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


# -- in the tests' process --------------------------------------------------------------------------------------------


class Server:
    """The process that forks interpreters. It ends with this process.

    Args:
        imports: the code that it runs first, usually imports.
        forked: whether to fork the server from this process, which has only imported so far, or to start a fresh one.
    """

    def __init__(self, imports: str = "", *, forked: bool = False) -> None:
        self._channel, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.settings = settings_of(os.environ)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._lock = threading.Lock()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the requesting process only
        try:
            if forked:
                self._process = None
                if os.fork() == 0:
                    self._channel.close()
                    serve(server_end)
                    os._exit(0)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(server_end.fileno()), imports],
                    env={**os.environ, **dict.fromkeys(THREADS, "1")},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[server_end.fileno()],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            server_end.close()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Fork an interpreter that runs the request. Returns its pid; it is a child of this process."""
        with self._lock:
            # The server forks a process that forks the interpreter and ends immediately. The orphaned interpreter is
            # then adopted by its nearest subreaper ancestor, which is this process during the request.
            self._prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._channel, [marshal.dumps(request)], descriptors)
                answer = self._channel.recv(64)
            finally:
                self._prctl(CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the process that has torch imported has ended")
        return int(answer)

    def close(self) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.wait()


def settings_of(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(SETTINGS)}


class WarmPopen(subprocess.Popen):
    """A `subprocess.Popen` that lets the server fork if the command runs this Python, without unsupported options."""

    server: Server
    only: str = ""  # the one script to run in a forked interpreter; "" means any

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *more: Any) -> None:  # fmt: skip
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid, umask, session, group = more
        environment = dict(os.environ if env is None else env)
        is_supported = not (shell or executable or preexec_fn or gid or gids or uid) and (umask, group) == (-1, -1)
        script = parse(args) if is_supported and not isinstance(args, str | bytes | os.PathLike) else None
        if script is None or self.only not in ("", script[2]) or settings_of(environment) != self.server.settings:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *more
            )
        request = {
            "script": script,
            "environment": environment,
            "folder": os.path.abspath(cwd or os.getcwd()),
            "session": bool(session),
            "processors": sorted(os.sched_getaffinity(0)),
            "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            "descriptors": [0, 1, 2, *sorted(map(int, pass_fds))],
        }
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = self.server.fork(request, [*standard, *request["descriptors"][3:]])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # pyright: ignore


def parse(command: Sequence[Any]) -> list[Any] | None:
    """Parse a command that runs this Python: whether ``-P`` is given, "-c", "-m" or "script", and the arguments. None
    for any other command."""
    words = [os.fspath(word) for word in command]
    if not words or words[0] != sys.executable:
        return None
    is_safe_path, index = False, 1
    while index < len(words) and words[index] in SUPPORTED_FLAGS:
        is_safe_path |= words[index] == "-P"
        index += 1
    if index == len(words):
        return None
    if words[index] in ("-c", "-m"):
        return [is_safe_path, *words[index:]]
    return None if words[index].startswith("-") else [is_safe_path, "script", *words[index:]]


@contextlib.contextmanager
def warm_interpreters(imports: str = "import torch", only: str = "") -> Iterator[type[WarmPopen]]:
    """Yield a Popen class whose server runs for the duration of the block."""
    server = Server(imports)
    try:
        yield popen_of(server, only)
    finally:
        server.close()


def popen_of(server: Server, only: str = "") -> type[WarmPopen]:
    return type("WarmPopen", (WarmPopen,), {"server": server, "only": only})


# -- in the server ----------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    """Fork one child for each request, until the other end of the channel is closed."""
    path = sys.path[:]
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return
        pid_pipe, pid_writer = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            intermediate = os.getpid()
            child = os.fork()
            if child == 0:
                # Wait until adopted: the program must not see its parent end, nor be killed by that (PDEATHSIG).
                while os.getppid() == intermediate:
                    time.sleep(0.0002)
                become(marshal.loads(message), descriptors, path)
            os.write(pid_writer, str(child).encode())
            os._exit(0)
        os.waitpid(intermediate, 0)
        channel.send(os.read(pid_pipe, 64))
        for number in (pid_pipe, pid_writer, *descriptors):
            os.close(number)


def become(request: dict[str, Any], descriptors: Sequence[int], path: list[str]) -> None:
    """Turn this process into the interpreter that the request describes; does not return."""
    code = 1
    try:
        set_up_process(request, descriptors)
        if WARM_CHILDREN_VARIABLE in os.environ:
            subprocess.Popen = popen_of(Server(forked=True))
        code = run(request["script"], path)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def set_up_process(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Set up descriptors, session, CPUs, working directory, environment and signals as requested."""
    import fcntl

    import numpy as np

    first_unused = max([*request["descriptors"], *map(int, os.listdir("/proc/self/fd"))]) + 1
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, first_unused) for number in descriptors]
    os.closerange(0, first_unused)
    for number, target in zip(copies, request["descriptors"], strict=True):
        os.dup2(number, target)
        os.close(number)
    if request["session"]:
        os.setsid()
    os.sched_setaffinity(0, request["processors"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    random.seed()
    np.random.seed()


def run(script: list[Any], path: list[str]) -> int:
    """Run the script as `python` does, including `atexit` functions. Returns the exit status."""
    is_safe_path, kind, program, *arguments = script
    import_folder = "" if kind == "-c" else os.getcwd() if kind == "-m" else os.path.dirname(os.path.realpath(program))
    sys.path[:] = path if is_safe_path else [import_folder, *path]
    sys.argv[:] = ["-c" if kind == "-c" else program, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.stdout.reconfigure(write_through=True)  # pyright: ignore  like `-u`
    code = 0
    try:
        if kind == "-m":
            import runpy

            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(program, "<string>", "exec"), vars(main))
        else:
            main.__file__ = program
            with open(program, "rb") as file:
                text = file.read()
            exec(compile(text, program, "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore
        code = 1
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    return code


def run_module(imports: str, module: str, arguments: Sequence[str]) -> None:
    """Run a module like `python -m`; its Python child processes are forked from a server that ran `imports`."""
    subprocess.Popen = popen_of(Server(imports))  # pyright: ignore
    sys.exit(run([False, "-m", module, *arguments], sys.path[:]))


if __name__ == "__main__":
    if sys.argv[1] == "-m":
        run_module(sys.argv[2], sys.argv[3], sys.argv[4:])
    path = sys.path[:]
    exec(sys.argv[2], {})
    sys.path[:] = path
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
