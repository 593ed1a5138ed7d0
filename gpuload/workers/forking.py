"""How a process forks others when its parent asks for them. This module runs only in the fork server
(`gpuload.workers.fork_server`), in templates (`gpuload.workers.template`) and in their forks.

A request has the descriptors of the new process: the pipe for its exit status, its end of the socket, its lifeline and
its stack file, files that the parent has replaced since this process started, and whatever else the process needs.
Before anything else, the new process sends its process ID and a pidfd through its own socket. So the parent waits for
no fork. If all copies of that end of the socket are closed and nothing was sent, there is no process, or it has ended
without having touched anything.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Final, NoReturn

from gpuload.workers.main import exit_process
from gpuload.workers.protocol import FORKED, arm_lifeline, receive_request

__all__ = ["flush_streams", "serve_forks"]

FIRST_DESCRIPTORS: Final = 4  # a request begins with the status pipe, the socket, the lifeline and the stack file
RunChild = Callable[[Any, list[int]], None]


def serve_forks(
    control: socket.socket,
    run_child: RunChild,
    prepare: Callable[[Any], None] = lambda details: None,
    idle_limit_s: float | None = None,
) -> None:
    """Fork a child for each request that comes through `control`. Return when the parent has closed the other end and
    all children have ended, or when there has been no child for `idle_limit_s` seconds.

    Args:
        run_child: called in the child, with the details of the request and the child's descriptors: its end of the
            socket, its lifeline and stack file, and those that follow the replaced files.
        prepare: called in this process before it forks, with the details of the request; a request without descriptors
            asks for nothing more.
    """
    # If SIGCHLD were ignored, exit statuses would be lost.
    inherited_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children: dict[int, tuple[int, int]] = {}  # the process ID of each child and its status pipe, keyed by pidfd
    poll = select.poll()
    poll.register(control, select.POLLIN)
    is_open = True
    while is_open or children:
        ready = poll.poll(None if children or idle_limit_s is None else 1000 * idle_limit_s)
        if not ready:
            return
        for fd, _ in ready:
            if fd in children:
                poll.unregister(fd)
                _report_end(fd, *children.pop(fd))
            elif (request := receive_request(control)) is None:
                is_open = False
                poll.unregister(control)
            else:
                (details, changes), fds = request
                prepare(details)
                if (pid := _fork(changes, fds)) is None:
                    continue
                if pid == 0:
                    signal.signal(signal.SIGCHLD, inherited_handler)
                    control.close()
                    for pidfd, (_, pipe) in children.items():
                        os.close(pidfd)
                        os.close(pipe)
                    _run_child(run_child, details, changes, fds)
                pidfd = os.pidfd_open(pid)  # the PID is not reused before waitpid() is called
                children[pidfd] = pid, fds[0]
                poll.register(pidfd, select.POLLIN)


def _fork(changes: dict[str, Any], fds: list[int]) -> int | None:
    """Fork a child for a request. Return its process ID, 0 in the child; None if the request has no descriptors or the
    child could not be forked, which the parent is told. Close all descriptors here but the status pipe."""
    if not fds:
        return None
    try:
        if len(fds) < FIRST_DESCRIPTORS + len(changes["files"]):
            raise OSError("too many open files in the process that forks")
        pid = os.fork()
    except OSError as error:  # too many processes, or no memory
        if len(fds) > 1:
            _answer(fds[1], str(error).encode())
        for descriptor in fds:
            os.close(descriptor)
        return None
    if pid:
        with contextlib.suppress(OSError):  # the child may have ended
            arm_lifeline(fds[2], pid)  # it may be stopped before it does this itself
        for descriptor in fds[1:]:
            os.close(descriptor)
    return pid


def flush_streams() -> None:
    """Write the buffered text of the output streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _answer(reply_fd: int, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
    replies = socket.socket(fileno=reply_fd)
    try:
        replies.setblocking(True)  # the user's default timeout applies to new sockets
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has closed its end
            socket.send_fds(replies, [message], descriptors)
    finally:
        replies.detach()


def _report_end(pidfd: int, pid: int, status_fd: int) -> None:
    """Write the exit status of an ended child to its pipe. The status is negative for a signal, as in
    `subprocess`."""
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    with contextlib.suppress(OSError):  # the reader has closed its end
        os.write(status_fd, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    os.close(status_fd)


def _run_child(run_child: RunChild, details: object, changes: dict[str, Any], fds: list[int]) -> NoReturn:
    """Announce this child to the parent, run it, and exit."""
    try:
        status_fd, reply_fd, lifeline_fd, stacks_fd, *others = fds
        os.close(status_fd)
        pidfd = os.pidfd_open(os.getpid())
        _answer(reply_fd, FORKED + os.getpid().to_bytes(4, "little"), (pidfd,))
        os.close(pidfd)
        changed_fds, others = others[: len(changes["files"])], others[len(changes["files"]) :]
        _apply_changes(changes, changed_fds)
        _clear_exit_handlers()
        run_child(details, [reply_fd, lifeline_fd, stacks_fd, *others])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    exit_process()


def _apply_changes(changes: dict[str, Any], fds: list[int]) -> None:
    """Apply the parent's changes since this process started, so that the child is like a new child of the parent.
    `fds` are the new files for the targets in ``changes["files"]``."""
    import resource

    os.environ.update(changes["set"])
    for name in changes["removed"]:
        os.environ.pop(name, None)
    for number, limit in changes["limits"]:
        with contextlib.suppress(ValueError, OSError):  # the parent has raised a hard limit, which a child may not do
            resource.setrlimit(number, limit)
    if changes["cpus"]:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, changes["cpus"])
    if changes["blocked"] is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, changes["blocked"])
    for target, fd in zip(changes["files"], fds, strict=True):
        if target == ".":
            os.fchdir(fd)
        else:
            os.dup2(fd, target)
        os.close(fd)


def _clear_exit_handlers() -> None:
    """Clear the exit handlers that were registered before the fork. Otherwise, the first child to exit could remove a
    temporary folder that all children use. Handlers that a child registers itself still run when this child exits."""
    atexit._clear()
    # The standard library registers the following handlers only once per process, so register them again.
    atexit.register(_run_finalizers, from_index=next(weakref.finalize._index_iter))  # type: ignore[attr-defined]
    if "logging" in sys.modules:
        atexit.register(sys.modules["logging"].shutdown)
    if "multiprocessing.util" in sys.modules:
        util = sys.modules["multiprocessing.util"]
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)


def _run_finalizers(from_index: int) -> None:
    """Run the `weakref.finalize` callbacks that were registered from this index on. Earlier callbacks are disabled only
    now, at the child's end, because disabling them writes to memory that the child has shared until now."""
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        if info.index < from_index:
            info.atexit = False
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
