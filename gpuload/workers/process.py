"""One worker process as its parent sees it: started, watched, asked for its stack, killed.

It owns the process and the parent's ends of what connects them: the reply socket, the *lifeline* (a pipe that nobody
writes to: when its write end closes with the parent, the kernel kills the worker), a pidfd, and the *stack file*. All
are inherited descriptors without a name.

The stack file is a memfd that the worker's faulthandler writes to: the stacks of its threads when the parent asks for
them by signal (which works even while the worker hangs in C code), and the stack of a crash.

How a worker is started is known to `_launch` alone, and how it ended to `WorkerProcess.wait`: all else needs the
process's number, `pid`, and what `_launch` returns to be waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuload.datasets.memory import memory_file
from gpuload.errors import WorkerError
from gpuload.ring.ring import is_inherited
from gpuload.workers.protocol import STACK_SIGNAL, Note, Queue, arm_lifeline, socket_pair

__all__ = ["KEEP_MEMORY", "Ending", "WorkerProcess", "check_platform", "environment_of"]

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
# images ask for it anew (up to 10 page faults for each, 1% of the CPU time; where pack makes JPEGs cuttable, a fifth).
# glibc comes to 64 MB by itself, where half of it is freed at once.
KEEP_MEMORY = {"glibc.malloc.mmap_threshold": 32 << 20, "glibc.malloc.trim_threshold": 64 << 20}
# Pixels are copied into a slot that another core reads next: bypassing the caches (`memcpy` with non-temporal stores)
# saves 16 of 35 µs an image, and leaves the file that is decoded next in the cache.
STREAM_COPIES = {"glibc.cpu.x86_non_temporal_threshold": 96 << 10}
# A process stuck in the kernel (a dead network mount) answers no signal, and ends only when the kernel lets go of it.
STACK_WAIT_S = 0.5
KILL_WAIT_S = 2.0
MAX_STACK_BYTES = 8192
CPU_CLOCK = 2  # Linux's number of a process's processor time, below its number's complement: clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ended: why, in words; whether by SIGKILL from outside; its stack, if that is known; and its exit
    status, as in `subprocess`, which is only a hint: if the program ignores SIGCHLD, it is always 0."""

    cause: str
    outside: bool
    stack: str
    status: int


class WorkerProcess:
    """A running worker.

    Args:
        number: the worker's number.
        shared: descriptors that it inherits behind its own.

    Attributes:
        replies: the socket that it replies on, not blocking.
        pidfd: readable when it has ended.
        ready: it has said hello.
        added: by `WorkerPool.resize`: the others work without it until it is ready; refusal: why it will never be.
        leaving: it was asked to.
        queue: which it reads.
        warned_at: the note at which it was warned of last, or False.

    Raises:
        WorkerError: it could not be started.
    """

    def __init__(self, number: int, shared: Sequence[int]) -> None:
        self.number = number
        self.ready = self.added = self.leaving = False
        self.refusal = ""
        self.queue: Queue
        self.started_at = time.monotonic()
        self.warned_at: Note | bool = False
        self._killed: Ending | None = None
        with contextlib.ExitStack() as undo:
            self.replies, theirs = socket_pair()
            undo.callback(self.replies.close)
            lifeline_theirs, lifeline = os.pipe()
            undo.callback(os.close, lifeline)
            self._stacks = memory_file("stacks")
            undo.callback(os.close, self._stacks)
            descriptors = (theirs.fileno(), lifeline_theirs, self._stacks, *shared)
            try:
                self._process = _launch(number, descriptors)
                arm_lifeline(lifeline_theirs, self._process.pid)  # it may be stopped before it does this itself
            except OSError as error:
                raise WorkerError(f"worker {number} could not be started with {sys.executable}: {error}") from error
            finally:
                theirs.close()
                os.close(lifeline_theirs)
            try:
                self.pidfd = os.pidfd_open(self._process.pid)
            except OSError as error:
                self._process.kill()
                self._process.wait()
                raise WorkerError(
                    f"worker {number} cannot be watched ({error}): pidfd_open needs Linux 5.3 and a free descriptor; "
                    "num_workers=0 does the same work in this process"
                ) from error
            undo.callback(os.close, self.pidfd)
            self.replies.setblocking(False)
            self._resources = undo.pop_all()
        self.pid = self._process.pid

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
            self._process.returncode = -signal.SIGKILL  # what it will be
        self.forget()

    def forget(self) -> None:
        """Free the parent's descriptors; without the lifeline the kernel kills the worker, if it still runs."""
        self._resources.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close the copies, so that the worker still dies with its parent."""
        self._process.returncode = 0  # not ours to wait for
        self.forget()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self.pidfd, number)

    def _state(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return "gone"


def _launch(number: int, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        "-P",
        str(Path(__file__).with_name("bootstrap.py")),
        str(number),
        ",".join(map(str, descriptors)),
    ]
    environment = environment_of({**KEEP_MEMORY, **STREAM_COPIES})
    # Else the next file that the worker opens would be its standard output.
    out, err = (None if is_inherited(number) else subprocess.DEVNULL for number in (1, 2))
    # A ctrl-C between the child's start and its first line must not kill it with a traceback, nor our own signal.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, STACK_SIGNAL})
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=descriptors, env=environment
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def environment_of(tunables: Mapping[str, int]) -> dict[str, str]:
    """A worker's variables: no GPU, a single thread, and these settings of glibc, beside the user's own, which win."""
    given = os.environ.get("GLIBC_TUNABLES", "")
    ours = [f"{name}={value}" for name, value in tunables.items() if name not in given]
    settings = {"CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": ":".join(filter(None, (given, *ours)))}
    return {**os.environ, **settings, **dict.fromkeys(THREAD_VARIABLES, "1")}


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
