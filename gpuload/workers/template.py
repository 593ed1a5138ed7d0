"""The template of a session's workers: a process that is forked for each of them. Runs only in that process.

It is a fresh interpreter, started as a worker would be, that imports what the dataset needs and unpickles it once. Then
it waits for its parent to ask for a worker, forks itself, and reports the child's exit status when that has ended. It
does nothing else, so its memory stays as it was, and workers share with it what they do not write to.

A process with several threads must not be forked, and what holds a position or a lock in the kernel must not be shared:
`unfit` finds threads, sockets, pipes, open files that are not mapped, and databases. If there is any, the template says
so and leaves, and each worker is an interpreter of its own.

Lifetime: the kernel kills it with its parent, as a worker (`gpuload.workers.main`); it leaves when the parent closes
the control socket. It holds no write end of a worker's lifeline, and a worker holds nothing of the template's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import marshal
import os
import select
import signal
import socket
import stat
import sys
import traceback
import weakref
from typing import Any, Final

from gpuload.errors import one_line
from gpuload.workers.job import Job, receive
from gpuload.workers.main import be_a_child, end, run
from gpuload.workers.protocol import FORKED, MAX_INLINE_BYTES, TEMPLATE_READY, TEMPLATE_UNFIT
from gpuload.workers.start import Stopwatch

__all__ = ["serve", "unfit"]

MAX_REQUEST_BYTES: Final = 1 << 20
MAX_DESCRIPTORS: Final = 16
DATABASES: Final = {  # how their files begin: offset and bytes
    "an SQLite database": (0, b"SQLite format 3\0"),
    "an HDF5 file": (0, b"\x89HDF\r\n\x1a\n"),
    "an LMDB environment": (16, b"\xde\xc0\xef\xbe"),
}


def serve(settings: dict[str, Any], descriptors: list[int]) -> None:
    """Import and unpickle what workers need, then fork one whenever the parent asks, until it closes the socket."""
    stopwatch = Stopwatch()
    control_fd, lifeline_fd, stacks_fd, job_fd, ring_fd, board_fd, *_ = descriptors
    be_a_child(lifeline_fd, stacks_fd, descriptors)
    of_programs = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else a child's status would be lost
    # An error: the parent has closed its end.
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            with stopwatch.running():
                job: Job = receive(job_fd)
                _finish_imports()
            os.close(job_fd)
            why = unfit(descriptors)
        except BaseException as error:  # a worker of its own will tell it, with its traceback
            why = f"the dataset cannot be unpickled in it ({one_line(f'{type(error).__name__}: {error}')})"
        if why:
            control.send(TEMPLATE_UNFIT + why.encode(errors="replace")[:MAX_INLINE_BYTES])
            return
        for stream in (sys.stdout, sys.stderr):  # else each worker would print again what waits there
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        gc.collect()
        gc.freeze()  # a collection in a worker would write to each object's head
        control.send(TEMPLATE_READY + stopwatch.pack())
        children: dict[int, tuple[int, int]] = {}  # by pidfd: the process, and the pipe for its status
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd in children:
                    poll.unregister(fd)
                    _report_end(fd, *children.pop(fd))
                    continue
                message, ends, _, _ = socket.recv_fds(
                    control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    return
                status_fd = ends.pop(0)
                try:
                    pid = os.fork()
                except OSError as error:  # too many processes, or no memory
                    for descriptor in (status_fd, *ends):
                        os.close(descriptor)
                    control.send(str(error).encode())
                    continue
                if pid == 0:
                    signal.signal(signal.SIGCHLD, of_programs)
                    for pidfd, (_, pipe) in children.items():
                        os.close(pidfd)
                        os.close(pipe)
                    os.close(status_fd)
                    _be_a_worker(control, (lifeline_fd, stacks_fd), settings, job, (ring_fd, board_fd), message, ends)
                pidfd = os.pidfd_open(pid)  # before it may be waited for
                for descriptor in ends:
                    os.close(descriptor)
                children[pidfd] = pid, status_fd
                poll.register(pidfd, select.POLLIN)
                socket.send_fds(control, [FORKED + pid.to_bytes(4, "little")], [pidfd])


def _finish_imports() -> None:
    """Import what Pillow would import with its first image: in each worker that takes 3 MB."""
    if "PIL.Image" in sys.modules:
        with contextlib.suppress(Exception):  # told where an image is opened
            sys.modules["PIL.Image"].preinit()


def unfit(known: list[int]) -> str:
    """Why this process must not be forked; "" if it may be. `known` are descriptors that gpuload made."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "a library started threads when it was imported, or the dataset when it was unpickled"
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) > 2 and fd not in known and (what := _not_to_be_shared(fd)):
            return f"the dataset, or a library, holds {what}"
    return ""


def _not_to_be_shared(fd: int) -> str:
    """Return what a descriptor is, if its copies in several processes would disturb each other; else ""."""
    try:
        path, mode = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_mode
        with open(f"/proc/self/fdinfo/{fd}") as file:
            info = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return ""  # that of the folder's own listing
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode)):
        return f"an open {path.removeprefix('anon_inode:').split(':')[0].strip('[]')}"
    if not stat.S_ISREG(mode) or path.startswith("/memfd:gpuload"):
        return ""
    for what, (offset, head) in DATABASES.items():
        with contextlib.suppress(OSError):  # it cannot be read
            if os.pread(fd, len(head), offset) == head:
                return f"{what}, {path}"
    if path in _mapped_paths():
        return ""
    if int(info["flags"], 8) & os.O_ACCMODE != os.O_RDONLY:
        return f"{path} open for writing"
    # At byte 0, too: a dataset may open its file in __setstate__, then seek and read for each sample. Two workers that
    # share the position did so: one sample in a hundred was another one's.
    return f"{path} open, at byte {int(info['pos'])}"


def _mapped_paths() -> set[str]:
    """Return the paths of the files that are mapped. A mapping keeps a descriptor, by which nobody reads."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        columns = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return {each[5] for each in columns if len(each) > 5}


def _report_end(pidfd: int, pid: int, status_fd: int) -> None:
    """Write a dead worker's status to its pipe: as `subprocess` has it, negative for a signal."""
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(status_fd, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    os.close(status_fd)


def _be_a_worker(
    control: socket.socket,
    inherited: tuple[int, int],
    settings: dict[str, Any],
    job: Job,
    shared: tuple[int, int],
    message: bytes,
    ends: list[int],
) -> None:
    """Do a worker's work in the child, and end. `ends` are the descriptors that came with the message."""
    try:
        control.close()
        for fd in inherited:
            os.close(fd)
        number, changes = marshal.loads(message)  # written by the parent
        reply_fd, lifeline_fd, stacks_fd, queue_fd, *others = ends
        _take_over(changes, others)
        _forget_ends_of_the_template()
        run(number, settings, [reply_fd, lifeline_fd, stacks_fd, -1, *shared, queue_fd], job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    end()


def _take_over(changes: dict[str, Any], files: list[int]) -> None:
    """Take over what has changed in the parent since the template started; a new process would inherit it."""
    import resource

    os.environ.update(changes["set"])
    for name in changes["removed"]:
        os.environ.pop(name, None)
    for number, limit in changes["limits"]:
        with contextlib.suppress(ValueError, OSError):  # a hard limit that was raised since
            resource.setrlimit(number, limit)
    if changes["cpus"]:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, changes["cpus"])
    if changes["blocked"] is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, changes["blocked"])
    for what, fd in zip(changes["files"], files, strict=True):
        if what == ".":
            os.fchdir(fd)
        else:
            os.dup2(fd, what)
        os.close(fd)


def _forget_ends_of_the_template() -> None:
    """Leave to the template what was to be done at its end: the first worker that leaves would remove a temporary
    folder that all use. What a worker registers itself is done at its own end."""
    atexit._clear()
    # The standard library registers these once in a process, for all that comes later.
    atexit.register(_run_finalizers, from_index=next(weakref.finalize._index_iter))  # type: ignore[attr-defined]
    if "logging" in sys.modules:
        atexit.register(sys.modules["logging"].shutdown)
    if "multiprocessing.util" in sys.modules:
        util = sys.modules["multiprocessing.util"]
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)


def _run_finalizers(from_index: int) -> None:
    """Run what was registered with `weakref.finalize` from a number on. Only at the worker's end others are marked to
    be left alone: it writes to memory that the worker shared until then."""
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        if info.index < from_index:
            info.atexit = False
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
