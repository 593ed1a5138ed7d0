"""Worker processes, and the template they are forked from, as their parent sees them: started, watched, killed.

It owns the process and the parent's ends of what connects them: the reply socket, the *lifeline* (a pipe that nobody
writes to: when its write end closes with the parent, the kernel kills the worker), a pidfd, and the *stack file*. All
are inherited descriptors without a name.

The stack file is a memfd that the worker's faulthandler writes to: the stacks of its threads when the parent asks for
them by signal (which works even while the worker hangs in C code), and the stack of a crash.

A worker is either `Launched`, an interpreter of its own, or `Forked` from the session's `Template`, which is started
as a worker is. The template is the parent of those, so it reaps them, and tells their exit status by a pipe of each.
What this process has changed of its surroundings since the template started (`_Surroundings`) is sent to the worker.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from gpuload.datasets.memory import memory_file
from gpuload.errors import WorkerError
from gpuload.ring.ring import is_inherited
from gpuload.workers.protocol import (
    FORKED,
    MESSAGE_BYTES,
    STACK_SIGNAL,
    TEMPLATE_READY,
    TEMPLATE_UNFIT,
    Note,
    Queue,
    arm_lifeline,
    socket_pair,
)
from gpuload.workers.start import Start

__all__ = [
    "KEEP_MEMORY",
    "Ending",
    "Process",
    "Template",
    "TemplateLost",
    "WorkerProcess",
    "check_platform",
    "environment_of",
]

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "TBB_NUM_THREADS",
)
# Settings of glibc. Memory that is freed stays with a worker: else some of it goes back to the system, and the next
# images ask for it again (up to 10 page faults for each, 1% of the CPU time; where pack makes JPEGs cuttable, a fifth).
# glibc comes to 64 MB by itself, where half of it is freed at once.
KEEP_MEMORY = {"glibc.malloc.mmap_threshold": 32 << 20, "glibc.malloc.trim_threshold": 64 << 20}
# Pixels are copied into a slot that another core reads next: bypassing the caches (`memcpy` with non-temporal stores)
# saves 16 of 35 µs an image, and leaves the file that is decoded next in the cache.
STREAM_COPIES = {"glibc.cpu.x86_non_temporal_threshold": 96 << 10}
# pyarrow's allocator has a thread of its own otherwise, and a process with threads cannot be forked.
FOR_FORKS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# A process stuck in the kernel (a dead network mount) answers no signal, and ends only when the kernel lets go of it.
STACK_WAIT_S = 0.5
KILL_WAIT_S = 2.0
MAX_STACK_BYTES = 8192
FORK_WAIT_S = 30.0
STATUS_WAIT_S = 0.5  # a template that lives reaps at once
FILES = (1, 2, ".")  # that a program may change while it runs: its output, and its working directory
CPU_CLOCK = 2  # Linux's number of a process's processor time, below its number's complement: clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: why, in words; whether by SIGKILL from outside; its stack, if that is known; and its exit
    status, as in `subprocess`, which is only a hint: if the program ignores SIGCHLD, its children's is always 0."""

    cause: str
    outside: bool
    stack: str
    status: int


class Launched:
    """A process with an interpreter of its own: its number, its pidfd, and its exit status.

    Args:
        who: the number of a worker, or "template".
        descriptors: that it inherits.
    """

    def __init__(self, who: int | str, descriptors: Sequence[int]) -> None:
        self._process = _launch(who, descriptors)
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            self._process.kill()
            self._process.wait()
            raise WorkerError(
                f"{_name(who)} cannot be watched ({error}): pidfd_open needs Linux 5.3 and a free descriptor; "
                "num_workers=0 does the same work in this process"
            ) from error

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end. Returns its exit status as in `subprocess`, None if nobody knows it.

        Raises:
            subprocess.TimeoutExpired: it has not ended after this many seconds.
        """
        return self._process.wait(timeout_s)

    def leave_alone(self) -> None:
        """Stop waiting for it: it belongs to another process, or the kernel does not release it."""
        self._process.returncode = -signal.SIGKILL

    def close(self) -> None:
        """Free the descriptors."""
        os.close(self.pidfd)


class Forked(Launched):
    """A process that the template was forked for. The template is its parent, and writes its status to a pipe."""

    def __init__(self, pid: int, pidfd: int, pipe: int) -> None:
        self.pid, self.pidfd, self._pipe = pid, pidfd, pipe

    def wait(self, timeout_s: float | None = None) -> int | None:
        if not _readable(self.pidfd, timeout_s):
            raise subprocess.TimeoutExpired("a worker", timeout_s or 0.0)
        status = os.read(self._pipe, 4) if _readable(self._pipe, STATUS_WAIT_S) else b""
        return int.from_bytes(status, "little", signed=True) if status else self._reaped()

    def _reaped(self) -> int | None:
        """Its status where the template is gone, if it has become a child of this process, the first of a container."""
        deadline = time.monotonic() + STATUS_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
                if info is not None:
                    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            if os.getpid() != 1:
                return None
            time.sleep(0.001)  # the kernel closes the template's pipes a moment before it hands on its children
        return None

    def leave_alone(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._pipe)
        super().close()


class Process:
    """A process of a session, as its parent sees it.

    Args:
        name: what messages call it.
        start: starts it, with its ends of the socket and the lifeline, and the stack file.

    Attributes:
        replies: the parent's end of the socket, not blocking.
        pidfd: readable when it has ended.
        ready: it has said hello.
        warned_at: the note at which it was warned of last, or whether it was for its slow start.

    Raises:
        WorkerError: it could not be started.
    """

    def __init__(self, name: str, start: Callable[[int, int, int], Launched]) -> None:
        self.name = name
        self.ready = False
        self.started_at = time.monotonic()
        self.warned_at: Note | bool = False
        self._killed: Ending | None = None
        with contextlib.ExitStack() as undo:
            self.replies, theirs = socket_pair()
            undo.callback(self.replies.close)
            lifeline_theirs, lifeline_fd = os.pipe()
            lifeline = undo.enter_context(FileIO(lifeline_fd, "w"))
            self._stacks = memory_file("stacks")
            undo.callback(os.close, self._stacks)
            try:
                self._process = start(theirs.fileno(), lifeline_theirs, self._stacks)
                undo.callback(self._process.close)
                with contextlib.suppress(ProcessLookupError):  # it has died, of which its pidfd tells
                    arm_lifeline(lifeline_theirs, self._process.pid)  # it may be stopped before it does this itself
            except (OSError, TemplateLost) as error:
                theirs.close()
                lifeline.close()
                _await_end(self.replies)  # it may have been forked all the same
                if isinstance(error, TemplateLost):
                    raise
                raise WorkerError(f"{name} could not be started with {sys.executable}: {error}") from error
            finally:
                theirs.close()
                os.close(lifeline_theirs)
            self.replies.setblocking(False)
            self._resources = undo.pop_all()
        self.pid, self.pidfd = self._process.pid, self._process.pidfd

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors for epoll to watch."""
        return self.replies.fileno(), self.pidfd

    @property
    def was_killed(self) -> bool:
        return self._killed is not None

    def kill(self, reason: str, stack: str) -> None:
        """End it now; `wait` will return this reason and stack."""
        self._killed = Ending(reason, False, stack, -signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def stack(self) -> str:
        """The Python stacks of its threads, the innermost call first; or why there are none."""
        size = before = os.fstat(self._stacks).st_size
        self._signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.005)
            last, size = size, os.fstat(self._stacks).st_size
            if size > before and size == last:
                return _tidy(os.pread(self._stacks, MAX_STACK_BYTES, before))
        if not self.ready and before == 0 and self._state() != "D":
            return "(it has not started far enough to tell where it is)"
        return f"(it does not answer: state {self._state()!r}; 'D' is waiting in the kernel, for a disk or a mount)"

    def wait(self) -> Ending:
        """Wait for its end."""
        status = self._process.wait()
        if self._killed is not None:
            return self._killed
        if status is None:
            return Ending("ended after its template, so that nobody knows how", True, "", -signal.SIGKILL)
        text = os.pread(self._stacks, MAX_STACK_BYTES, max(0, os.fstat(self._stacks).st_size - MAX_STACK_BYTES))
        crash = text.rfind(b"Fatal Python error")
        stack = _tidy(text[crash:]) if crash >= 0 else ""
        return Ending(_describe_exit(status), status == -signal.SIGKILL, stack, status)

    def wanted_cpu_s(self) -> float:
        """The processor time of all its threads so far, and the time for which its first thread was runnable while
        others had the processors; 0 if neither is known."""
        wanted_s = 0.0
        with contextlib.suppress(OSError):
            wanted_s += time.clock_gettime(~self.pid << 3 | CPU_CLOCK)
        with contextlib.suppress(OSError, IndexError, ValueError):
            wanted_s += int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return wanted_s

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds) for it to end, then kill it; free all descriptors."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.leave_alone()
        self.forget()

    def forget(self) -> None:
        """Free the parent's descriptors; without the lifeline the kernel kills the worker, if it still runs."""
        self._resources.close()

    def leave_to_parent(self) -> None:
        """Close the copies in a forked child, so that the worker still dies with its parent."""
        self._process.leave_alone()
        self.forget()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self.pidfd, number)

    def _state(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return "gone"


def _await_end(replies: socket.socket) -> None:
    """Wait until no process has the other end of a socket any more."""
    deadline = time.monotonic() + KILL_WAIT_S
    with contextlib.suppress(OSError):
        while _readable(replies.fileno(), max(0.0, deadline - time.monotonic())) and replies.recv(MESSAGE_BYTES):
            pass


def _name(who: int | str) -> str:
    return "the template of workers" if who == "template" else f"worker {who}"


class WorkerProcess(Process):
    """A running worker.

    Args:
        number: the worker's number.
        shared: descriptors that it inherits behind its own: the job, ring, board and queue, and those of the job's.
        template: the process that is forked for it; none: it has an interpreter of its own.

    Attributes:
        added: by `WorkerPool.resize`: the others work without it until it is ready; refusal: why it will never be.
        leaving: it was asked to.
        queue: which it reads.
    """

    def __init__(self, number: int, shared: Sequence[int], template: Template | None) -> None:
        self.number = number
        self.added = self.leaving = False
        self.refusal = ""
        self.queue: Queue
        if template is None:
            super().__init__(_name(number), lambda *ends: Launched(number, (*ends, *shared)))
        else:
            super().__init__(_name(number), lambda *ends: template.fork(number, (*ends, shared[3])))


class Template(Process):
    """The process that is forked for workers (`gpuload.workers.template`).

    Args:
        shared: descriptors that workers inherit behind their own: the job, ring and board, and those of the job's.

    Attributes:
        unfit: why workers cannot be forked from it, once `hear` was called.
        was_ready: they could be.
        start: what it took until then.
    """

    def __init__(self, shared: Sequence[int]) -> None:
        self.unfit, self.was_ready, self.start = "", False, Start()
        self._surroundings = _Surroundings()
        super().__init__(_name("template"), lambda *ends: Launched("template", (*ends, *shared)))

    def hear(self) -> bool:
        """Take its first message; False if it has ended instead."""
        message = self.replies.recv(MESSAGE_BYTES)
        self.ready = self.was_ready = message.startswith(TEMPLATE_READY)
        if self.ready:
            self.start = Start.unpack(message.removeprefix(TEMPLATE_READY), self.started_at)
            return True
        self.unfit = message.removeprefix(TEMPLATE_UNFIT).decode(errors="replace")
        return bool(message)

    def fork(self, number: int, ends: Sequence[int]) -> Forked:
        """Have it forked for a worker; `ends` are descriptors of the worker's own.

        Raises:
            TemplateLost: it has ended.
            OSError: it could not be forked.
        """
        changes, files = self._surroundings.changes()
        with contextlib.ExitStack() as undo:
            for file in files:
                undo.callback(os.close, file)
            pipe, theirs = os.pipe()
            undo.callback(os.close, theirs)
            failed = undo.enter_context(contextlib.ExitStack())
            failed.callback(os.close, pipe)
            answer, descriptors = b"", []
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self.replies, [marshal.dumps((number, changes))], [theirs, *ends, *files])
                if _readable(self.replies.fileno(), FORK_WAIT_S):
                    answer, descriptors, _, _ = socket.recv_fds(self.replies, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if descriptors:
                failed.pop_all()
                return Forked(int.from_bytes(answer[1:], "little"), descriptors[0], pipe)
        if answer[:1] == FORKED:  # its pidfd found no room here; without its lifeline it ends
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if answer:
            raise OSError(answer.decode(errors="replace"))
        self.ready = False
        self._signal(signal.SIGKILL)  # it has ended, or is stuck
        raise TemplateLost(number)


class TemplateLost(Exception):
    """The template ended before it was forked for a worker."""


class _Surroundings:
    """The settings that a process inherits of its parent, beside descriptors, as they are when this is made."""

    def __init__(self) -> None:
        self.environment, self.limits, self.cpus = _environment(), _limits(), os.sched_getaffinity(0)
        self.blocked = set(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        self.files = {what: file for what in FILES if (file := _identity(what)) is not None}

    def changes(self) -> tuple[dict[str, Any], list[int]]:
        """Return what has changed since, for a worker that is forked now; and new descriptors of the files in it."""
        now = _Surroundings()
        files = [what for what, file in now.files.items() if file != self.files.get(what)]
        changes = {
            "set": dict(now.environment.items() - self.environment.items()),
            "removed": sorted(self.environment.keys() - now.environment.keys()),
            "limits": [limit for limit in now.limits if limit not in self.limits],
            "cpus": now.cpus if now.cpus != self.cpus else None,
            "blocked": now.blocked if now.blocked != self.blocked else None,
            "files": files,
        }
        return changes, [os.open(".", os.O_RDONLY) if isinstance(what, str) else os.dup(what) for what in files]


def _limits() -> list[tuple[int, tuple[int, int]]]:
    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return [(number, resource.getrlimit(number)) for number in sorted(numbers)]


def _identity(what: Any) -> tuple[int, int] | None:
    """Return which file a standard stream is, or the working directory; None if a new process gets none."""
    if what != "." and not is_inherited(what):
        return None
    with contextlib.suppress(OSError):
        stat = os.stat(what)
        return stat.st_dev, stat.st_ino
    return None


def _readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def _launch(who: int | str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        "-P",
        str(Path(__file__).with_name("bootstrap.py")),
        str(who),
        ",".join(map(str, descriptors)),
    ]
    # Else the next file that the worker opens would be its standard output.
    out, err = (None if is_inherited(number) else subprocess.DEVNULL for number in (1, 2))
    # A ctrl-C between the child's start and its first line must not kill it with a traceback, nor our own signal.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, STACK_SIGNAL})
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=descriptors, env=_environment()
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _environment() -> dict[str, str]:
    return environment_of({**KEEP_MEMORY, **STREAM_COPIES})


def environment_of(tunables: Mapping[str, int]) -> dict[str, str]:
    """A worker's variables: no GPU, a single thread, and these settings of glibc, beside the user's own, which win."""
    inherited = os.environ.get("GLIBC_TUNABLES", "")
    ours = [f"{name}={value}" for name, value in tunables.items() if name not in inherited]
    settings = {"CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": ":".join(filter(None, (inherited, *ours)))}
    return {**FOR_FORKS, **os.environ, **settings, **dict.fromkeys(THREAD_VARIABLES, "1")}


def _tidy(stack: bytes) -> str:
    """faulthandler's text, without its list of extension modules."""
    return stack.decode(errors="replace").split("\nExtension modules:")[0].strip()


def _describe_exit(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"exited with status {status}"


def check_platform() -> None:
    """Raise an error that names the remedy if workers cannot be started.

    Raises:
        RuntimeError: not Linux, a frozen application, or an interpreter without an executable.
    """
    remedy = "use num_workers=0, which does the same work in this process"
    if sys.platform != "linux":
        raise RuntimeError(f"worker processes need Linux, this is {sys.platform}: {remedy}")
    if getattr(sys, "frozen", False):
        raise RuntimeError(f"a frozen application has no Python interpreter to start workers with: {remedy}")
    if not sys.executable:
        raise RuntimeError(f"sys.executable is empty, so there is no interpreter to start workers with: {remedy}")
