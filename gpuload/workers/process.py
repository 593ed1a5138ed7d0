"""The parent's view of worker processes and their template: starting, watching and killing them.

A `Process` owns a process and the parent's ends of the connections to it: the reply socket, the *lifeline* (a pipe that
nobody writes to; when the parent dies, the write end closes, and the kernel kills the worker), a pidfd, and the *stack
file*. The process has the other ends of the socket and the pipe, and the stack file, as anonymous descriptors.

The stack file is a memfd to which the worker's faulthandler writes: after a crash, and when the parent sends a signal
to request the stacks of all threads, which works even while the worker hangs in C code.

A worker is either a `LaunchedProcess`, a separate interpreter, or a `ForkedProcess`, forked from the session's
`Template`. The process that forks another one, a `Forker`, is its parent process, so it reaps it, and reports its exit
status through a pipe. A forked process gets the settings of this process that have changed since its forker started
(`_InheritedSettings`).

Nobody waits for a fork. A forked process is *pending* until it has sent its process ID and pidfd through its socket
(`Process.accept`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
    TEMPLATE_MISFIT,
    TEMPLATE_READY,
    TEMPLATE_UNFIT,
    Note,
    Queue,
    arm_lifeline,
    send_request,
    socket_pair,
)
from gpuload.workers.start import Start

__all__ = [
    "FORK_LIMIT_S",
    "ForkedProcess",
    "Forker",
    "ForkerLost",
    "LaunchedProcess",
    "Process",
    "Template",
    "WorkerProcess",
    "check_platform",
    "describe_exit",
    "interpreter_command",
    "worker_environment",
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
GLIBC_TUNABLES = {
    # Keep freed memory in the worker. Otherwise, glibc returns some of this memory to the system, and allocates it
    # again for the next images. This causes up to 10 page faults per image and takes 1% of the CPU time, or a fifth of
    # it while `gpuload pack` makes JPEGs cuttable. By default, glibc would raise its limit to 64 MB only after a single
    # block of 32 MB was freed.
    "glibc.malloc.mmap_threshold": 32 << 20,
    "glibc.malloc.trim_threshold": 64 << 20,
    # Pixels that are copied to a slot are next read by another core, so make `memcpy` bypass the caches (non-temporal
    # stores). This saves 16 of 35 µs per image, and leaves the cache to the file that is decoded next.
    "glibc.cpu.x86_non_temporal_threshold": 96 << 10,
}
# Without this, pyarrow's allocator starts a thread, and a process with threads cannot be forked.
FORK_SETTINGS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# These waits are limited, because a process that is stuck in the kernel (on a dead network mount, say) ignores all
# signals until the kernel releases it.
STACK_WAIT_S = 0.5
KILL_WAIT_S = 2.0
MAX_STACK_BYTES = 8192
FORK_LIMIT_S = 30.0  # a process that takes longer to fork another one is killed
STATUS_WAIT_S = 0.5  # a running forker reaps immediately
REPLACEABLE_FILES = (1, 2, ".")  # the output streams and the working directory, which the program may replace
CPU_CLOCK = 2  # the low 3 bits of a CPU-time clock's ID, below the inverted process ID; see clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a process: the cause as text, whether another process killed it (SIGKILL), its stack if it is known,
    and its exit status as in `subprocess`, None if it is unknown. The status is only a hint: it is always 0 if the
    program ignores SIGCHLD."""

    cause: str
    killed_externally: bool
    stack: str
    status: int | None


class LaunchedProcess:
    """A process with a separate interpreter: its process ID, pidfd, and exit status.

    Args:
        role: the worker's number, "template" or "server".
        descriptors: the descriptors that the process inherits.
    """

    pid: int | None
    pidfd: int | None
    forker: Forker | None = None  # the process that forks it

    def __init__(self, role: int | str, descriptors: Sequence[int]) -> None:
        self._process = _launch(role, descriptors)
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._process.kill()
            self._process.wait()
            raise WorkerError(
                f"{_describe_role(role)} cannot be monitored ({error}): pidfd_open needs Linux 5.3 and a free "
                "descriptor; use num_workers=0 to load in this process"
            ) from error

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the process to end. Return its exit status as in `subprocess`; None if the status is unknown.

        Raises:
            subprocess.TimeoutExpired: the process is still running after `timeout_s` seconds.
        """
        return self._process.wait(timeout_s)

    def abandon(self) -> None:
        """Give up waiting for the process, which is another process's child or stuck in the kernel. This sets a return
        code, since `Popen` would otherwise warn that the process is still running, and try to reap it later."""
        self._process.returncode = -signal.SIGKILL

    def close(self) -> None:
        """Close the descriptors."""
        if self.pidfd is not None:
            os.close(self.pidfd)


class ForkedProcess(LaunchedProcess):
    """A process that was requested from a forker, which is its parent process and writes its exit status to a pipe.

    Attributes:
        pid, pidfd: None until `set_ids` is called.
    """

    def __init__(self, forker: Forker, pipe: int) -> None:
        self.pid = self.pidfd = None
        self.forker, self._pipe = forker, pipe

    def set_ids(self, pid: int, pidfile: FileIO) -> None:
        self.pid, self._pidfile, self.pidfd = pid, pidfile, pidfile.fileno()

    def wait(self, timeout_s: float | None = None) -> int | None:
        if self.pidfd is None:  # it was never forked, or has ended
            return self.read_status()
        if not _wait_readable(self.pidfd, timeout_s):
            raise subprocess.TimeoutExpired("a worker", timeout_s or 0.0)
        status = self.read_status()
        return self._reap_orphan(self.pidfd) if status is None else status

    def read_status(self) -> int | None:
        """Return the exit status that the forker has reported; None if it has reported none."""
        status = os.read(self._pipe, 4) if _wait_readable(self._pipe, STATUS_WAIT_S) else b""
        return int.from_bytes(status, "little", signed=True) if status else None

    def _reap_orphan(self, pidfd: int) -> int | None:
        """Return the exit status after the forker has died. It is known only if this process is PID 1, and so has
        become the parent of the worker."""
        deadline = time.monotonic() + STATUS_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
                if info is not None:
                    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            if os.getpid() != 1:
                return None
            time.sleep(0.001)  # the kernel closes a dead forker's pipes a moment before it reparents the workers
        return None

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._pipe)
        if self.pidfd is not None:
            self._pidfile.close()


class Process:
    """A process of a session, as seen by the parent.

    Args:
        name: the name of the process in messages.
        start: starts the process; called with three descriptors for it: its ends of the socket and the lifeline, and
            the stack file.

    Attributes:
        replies: the parent's end of the socket, non-blocking.
        ready: whether the process has sent its first message, and can take requests.
        warned_note: the worker's note at the last warning that it is slow; None if there was no warning.
        warned_of_start: whether there was a warning that the process starts slowly.

    Raises:
        WorkerError: the process could not be started.
    """

    def __init__(self, name: str, start: Callable[[int, int, int], LaunchedProcess]) -> None:
        self.name = name
        self.ready = False
        self.started_at = time.monotonic()
        self.warned_note: Note | None = None
        self.warned_of_start = False
        self._killed: Ending | None = None
        with contextlib.ExitStack() as undo:
            self.replies, child_end = socket_pair()
            undo.callback(self.replies.close)
            child_lifeline, lifeline_fd = os.pipe()
            self._lifeline = undo.enter_context(FileIO(lifeline_fd, "w"))
            self._stacks = memory_file("stacks")
            undo.callback(os.close, self._stacks)
            try:
                self._process = start(child_end.fileno(), child_lifeline, self._stacks)
                undo.callback(self._process.close)
                if self.pid is not None:
                    # It may be stopped before it arms its lifeline itself. If it has died, its pidfd reports that.
                    with contextlib.suppress(ProcessLookupError):
                        arm_lifeline(child_lifeline, self.pid)
            except OSError as error:
                raise WorkerError(
                    f"{name} could not be started with {sys.executable}: {error}; "
                    "use num_workers=0 to load in this process"
                ) from error
            finally:
                child_end.close()
                os.close(child_lifeline)
            self.replies.setblocking(False)
            self._resources = undo.pop_all()

    @property
    def pid(self) -> int | None:
        """The process ID; None while the process is pending."""
        return self._process.pid

    @property
    def pidfd(self) -> int | None:
        """A descriptor that is readable once the process has ended; None while the process is pending."""
        return self._process.pidfd

    @property
    def title(self) -> str:
        """The name and process ID, for messages."""
        return f"{self.name} ({'not forked yet' if self.pid is None else f'process {self.pid}'})"

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the pool watches with epoll."""
        return [self.replies.fileno(), *([] if self.pidfd is None else [self.pidfd])]

    def accept(self, message: memoryview, pidfile: FileIO | None) -> str:
        """Process the first message of a pending process, and the file that was sent with it: if it was forked, the
        process is no longer pending. Return the error if it was not; else ""."""
        if message[: len(FORKED)] != FORKED:
            return str(message, errors="replace")
        if pidfile is None:  # the process cannot be watched
            return os.strerror(errno.EMFILE)
        assert isinstance(self._process, ForkedProcess)
        self._process.set_ids(int.from_bytes(message[len(FORKED) :], "little"), pidfile)
        return ""

    def forker_status(self) -> int | None:
        """Return the exit status of this process's forker, which has ended."""
        return None if self._process.forker is None else self._process.forker._process.wait()

    def stuck_forker(self, limit_s: float) -> Forker | None:
        """Return the forker of this process if the process has been pending for more than `limit_s` seconds in which
        the forker could have forked it."""
        forker = self._process.forker
        if self.pidfd is not None or forker is None or (idle_since := forker.idle_since()) is None:
            return None
        return forker if time.monotonic() - max(idle_since, self.started_at) > limit_s else None

    @property
    def has_ended(self) -> bool:
        return self.pidfd is not None and _wait_readable(self.pidfd, 0.0)

    @property
    def was_killed(self) -> bool:
        return self._killed is not None

    def kill(self, reason: str, stack: str) -> None:
        """Kill the process; `wait` will return this reason and stack."""
        self._killed = Ending(reason, False, stack, -signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def stack(self) -> str:
        """Return the Python stacks of the process's threads, the innermost call first, or else a text that says why
        they are not available. For a pending process, return the stacks of its forker."""
        if self.pid is None and self._process.forker is not None:
            return self._process.forker.stack()
        size = old_size = os.fstat(self._stacks).st_size
        self._signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.005)
            last_size, size = size, os.fstat(self._stacks).st_size
            if size > old_size and size == last_size:
                return _tidy_stack(os.pread(self._stacks, MAX_STACK_BYTES, old_size))
        if not self.ready and old_size == 0 and self._kernel_state() != "D":
            return "(not available: the process is still starting, and cannot report its stack yet)"
        return (
            f"(not available: the process does not answer, and is in state {self._kernel_state()!r}; 'D' means that it "
            "waits in the kernel for a disk or a network mount)"
        )

    def wait(self) -> Ending:
        """Wait for the process to end, and return its cause of death, stack and exit status."""
        status = self._process.wait()
        if self._killed is not None:
            return self._killed
        if status is None and self.pid is None:
            return Ending("not forked", False, "", None)
        if status is None:
            return Ending("ended after its template, so its exit status is unknown", True, "", None)
        text = os.pread(self._stacks, MAX_STACK_BYTES, max(0, os.fstat(self._stacks).st_size - MAX_STACK_BYTES))
        crash = text.rfind(b"Fatal Python error")
        stack = _tidy_stack(text[crash:]) if crash >= 0 else ""
        return Ending(describe_exit(status), status == -signal.SIGKILL, stack, status)

    def wanted_cpu_s(self) -> float:
        """Return the CPU time of all threads of the process so far, plus the time that its first thread was runnable
        while other threads had the CPUs; 0 if neither is known."""
        wanted_s = 0.0
        if self.pid is None:
            return wanted_s
        with contextlib.suppress(OSError):
            wanted_s += time.clock_gettime(~self.pid << 3 | CPU_CLOCK)
        with contextlib.suppress(OSError, IndexError, ValueError):
            wanted_s += int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return wanted_s

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds) for the process to end; then kill it, and close all descriptors. A
        pending process ends as soon as it is forked, since its lifeline is closed, and this waits for that."""
        if self.pidfd is None:
            self._lifeline.close()
            _await_end(self.replies)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.abandon()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the parent's descriptors. If the process is still running, the kernel kills it: the lifeline closes."""
        self._resources.close()

    def leave_to_parent(self) -> None:
        """Close the descriptors in a forked child of the parent, so that the process still dies with its parent."""
        self._process.abandon()
        self.close_descriptors()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)

    def _kernel_state(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return "ended"


def _await_end(replies: socket.socket) -> None:
    """Wait until no process has the other end of the socket open."""
    deadline = time.monotonic() + KILL_WAIT_S
    with contextlib.suppress(OSError):
        while _wait_readable(replies.fileno(), max(0.0, deadline - time.monotonic())) and replies.recv(MESSAGE_BYTES):
            pass


def _describe_role(role: int | str) -> str:
    return {"template": "the workers' template", "server": "the fork server"}.get(str(role), f"worker {role}")


class WorkerProcess(Process):
    """A running worker.

    Args:
        number: the worker's number.
        shared: the shared descriptors that it inherits: those of the job, ring, board and queue, and of memory that the
            job shares.
        template: the process from which the worker is forked; None means that it is a separate interpreter.

    Attributes:
        added: whether `WorkerPool.resize` added the worker; the pool does not wait until an added worker is ready.
        failure_reason: the reason why an added worker could not start.
        leaving: whether the worker was asked to leave.
        queue: the queue from which the worker reads.
    """

    def __init__(self, number: int, shared: Sequence[int], template: Template | None) -> None:
        self.number = number
        self.added = self.leaving = False
        self.failure_reason = ""
        self.queue: Queue
        if template is None:
            super().__init__(_describe_role(number), lambda *ends: LaunchedProcess(number, (*ends, *shared)))
        else:
            super().__init__(_describe_role(number), lambda *ends: template.fork(number, ends, [shared[3]]))


class Forker(Process):
    """A process that forks others on request."""

    def __init__(self, name: str, start: Callable[[int, int, int], LaunchedProcess]) -> None:
        self._settings_at_start = _InheritedSettings()
        super().__init__(name, start)

    def idle_since(self) -> float | None:
        """Return since when this process has had nothing else to do than to fork others, in monotonic seconds; None if
        it is starting or importing."""
        raise NotImplementedError

    def end(self, deadline: float) -> None:
        if self.pid is None:  # it ends as soon as it is forked
            self.close_descriptors()
        else:
            super().end(deadline)

    def finish(self) -> None:
        """Make this process end as soon as all that it has forked have ended."""
        with contextlib.suppress(OSError):  # it has ended
            self.replies.shutdown(socket.SHUT_WR)

    def fork(self, details: object, ends: Sequence[int], others: Sequence[int]) -> ForkedProcess:
        """Request a fork. `ends` are the three descriptors with which every process is started, `others` are further
        descriptors to pass to the new process.

        Raises:
            ForkerLost: this process has ended.
            OSError: the request could not be sent.
        """
        changes, files = self._settings_at_start.changes()
        with contextlib.ExitStack() as undo:
            for file in files:
                undo.callback(os.close, file)
            pipe, write_end = os.pipe()
            undo.callback(os.close, write_end)
            try:
                send_request(self.replies, (details, changes), [write_end, *ends, *files, *others])
            except BaseException as error:
                os.close(pipe)
                if not isinstance(error, BrokenPipeError | ConnectionResetError):
                    raise
                self.ready = False
                self._signal(signal.SIGKILL)  # if it has not ended, it has got a part of the request
                raise ForkerLost(self.name) from error
            return ForkedProcess(self, pipe)


class ForkerLost(Exception):
    """The process that was to fork another one has ended."""


class Template(Forker):
    """The process from which workers are forked (`gpuload.workers.template`).

    Args:
        start: starts it, as in `Process`, with the descriptors of the job, ring and board, and of memory that the job
            shares.

    Attributes:
        unfit_reason: the reason why workers cannot be forked from it; set by `read_readiness`.
        misfit_reason: the reason why it cannot be forked from the fork server; set by `read_readiness`.
        was_ready: whether the template has ever been ready; `ready` becomes False when the template is lost.
        start: the durations of the phases of the template's start.
    """

    def __init__(self, start: Callable[[int, int, int], LaunchedProcess]) -> None:
        self.unfit_reason, self.misfit_reason, self.was_ready, self.start = "", "", False, Start()
        self._ready_at: float | None = None
        super().__init__(_describe_role("template"), start)

    def read_readiness(self, message: memoryview) -> None:
        """Process the first message of the template itself."""
        text = bytes(message)
        self.ready = self.was_ready = text.startswith(TEMPLATE_READY)
        if self.ready:
            self._ready_at = time.monotonic()
            self.start = Start.unpack(text.removeprefix(TEMPLATE_READY), self.started_at)
        elif text.startswith(TEMPLATE_MISFIT):
            self.misfit_reason = text.removeprefix(TEMPLATE_MISFIT).decode(errors="replace")
        else:
            self.unfit_reason = text.removeprefix(TEMPLATE_UNFIT).decode(errors="replace")

    def idle_since(self) -> float | None:
        return self._ready_at


class _InheritedSettings:
    """A snapshot of the settings that a process inherits from its parent, other than descriptors."""

    def __init__(self) -> None:
        self.environment, self.limits, self.cpus = worker_environment(), _resource_limits(), os.sched_getaffinity(0)
        self.blocked = set(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        self.files = {target: file for target in REPLACEABLE_FILES if (file := _identify_file(target)) is not None}

    def changes(self) -> tuple[dict[str, Any], list[int]]:
        """Return the changes since this snapshot, to send to a new worker, and duplicates of the changed files, which
        the caller closes."""
        current = _InheritedSettings()
        targets = [target for target, file in current.files.items() if file != self.files.get(target)]
        changes = {
            "set": dict(current.environment.items() - self.environment.items()),
            "removed": sorted(self.environment.keys() - current.environment.keys()),
            "limits": [limit for limit in current.limits if limit not in self.limits],
            "cpus": current.cpus if current.cpus != self.cpus else None,
            "blocked": current.blocked if current.blocked != self.blocked else None,
            "files": targets,
        }
        return changes, [os.open(".", os.O_RDONLY) if isinstance(target, str) else os.dup(target) for target in targets]


def _resource_limits() -> list[tuple[int, tuple[int, int]]]:
    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return [(number, resource.getrlimit(number)) for number in sorted(numbers)]


def _identify_file(target: Any) -> tuple[int, int] | None:
    """Return the device and inode of a standard stream or the working directory. Return None if the target does not
    exist, or if a new process would not inherit it."""
    if target != "." and not is_inherited(target):
        return None
    with contextlib.suppress(OSError):
        stat = os.stat(target)
        return stat.st_dev, stat.st_ino
    return None


def _wait_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def interpreter_command() -> list[str]:
    """Return the command that starts an interpreter with the options of this one."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-P"]  # type: ignore[attr-defined]


def _launch(role: int | str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    command = [
        *interpreter_command(),
        str(Path(__file__).with_name("bootstrap.py")),
        str(role),
        ",".join(map(str, descriptors)),
    ]
    # Replace a closed stream by /dev/null, or the next file that the worker opens would become its standard output.
    out, err = (None if is_inherited(fd) else subprocess.DEVNULL for fd in (1, 2))
    # The child inherits the mask, so neither ctrl-C nor the stack signal can kill it before it has set its handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, STACK_SIGNAL})
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=descriptors, env=worker_environment()
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def worker_environment() -> dict[str, str]:
    """Return the environment in which workers, templates and the fork server start: this process's environment with no
    GPU, one thread, and `GLIBC_TUNABLES` unless the user has set them."""
    inherited = os.environ.get("GLIBC_TUNABLES", "")
    added = [f"{name}={value}" for name, value in GLIBC_TUNABLES.items() if name not in inherited]
    settings = {"CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": ":".join(filter(None, (inherited, *added)))}
    return {**FORK_SETTINGS, **os.environ, **settings, **dict.fromkeys(THREAD_VARIABLES, "1")}


def _tidy_stack(stack: bytes) -> str:
    """Return faulthandler's text without its list of extension modules."""
    return stack.decode(errors="replace").split("\nExtension modules:")[0].strip()


def describe_exit(status: int) -> str:
    """Return an exit status, as in `subprocess`, as text."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"exited with status {status}"


def check_platform() -> None:
    """Check that workers can be started on this platform.

    Raises:
        RuntimeError: the platform is not Linux, the application is frozen, or the interpreter has no executable.
    """
    remedy = "use num_workers=0 to load in this process"
    if sys.platform != "linux":
        raise RuntimeError(f"worker processes need Linux, got {sys.platform}; {remedy}")
    if getattr(sys, "frozen", False):
        raise RuntimeError(f"workers need a Python interpreter, which a frozen application does not have; {remedy}")
    if not sys.executable:
        raise RuntimeError(f"sys.executable is empty, so there is no interpreter to start workers with; {remedy}")
