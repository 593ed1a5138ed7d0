"""The template process of a session, from which the session's workers are forked. This module runs only in the template
process and its forks.

The template is a fresh interpreter, started like a worker. It imports the modules that the dataset needs and unpickles
the dataset once. Then it waits for requests from its parent. For each request, it forks a worker; when the worker ends,
it reports the worker's exit status. It does nothing else, so its memory does not change, and workers share the pages
that they do not write to.

A process with several threads must not be forked, and forks must not share a file position: when workers shared the
position of a file, one sample in a hundred had the data of another sample. So each forked worker opens every file and
directory of the template again. `unfit_reason` looks for what cannot be opened again: threads, sockets, pipes, files
that are open for writing or locked, and databases. If it finds any, the template reports the reason and exits, and each
worker is started as a separate interpreter.

Lifetime: when its parent dies, the kernel kills the template in the same way as a worker (`gpuload.workers.main`). The
template exits when its parent closes the control socket. It never holds the write end of a worker's lifeline, which
would keep the worker alive after the parent's death. A worker closes its copies of the template's descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import stat
import sys
from functools import partial
from typing import Any, Final

from gpuload.errors import one_line
from gpuload.workers.forking import flush_streams, serve_forks
from gpuload.workers.job import Job, receive
from gpuload.workers.main import run_worker, set_up_child
from gpuload.workers.protocol import MAX_INLINE_BYTES, TEMPLATE_READY, TEMPLATE_UNFIT
from gpuload.workers.start import Stopwatch

__all__ = ["serve", "unfit_reason"]

DATABASES: Final = {  # the offset and bytes of each file format's signature
    "an SQLite database": (0, b"SQLite format 3\0"),
    "an HDF5 file": (0, b"\x89HDF\r\n\x1a\n"),
    "an LMDB environment": (16, b"\xde\xc0\xef\xbe"),
}
# The flags of `open` that would create, empty or refuse a file that exists. O_TMPFILE includes O_DIRECTORY.
CREATION_FLAGS: Final = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOFOLLOW | os.O_TMPFILE


def serve(settings: dict[str, Any], descriptors: list[int], stopwatch: Stopwatch | None = None) -> None:
    """Unpickle the job, then fork a worker for each request of the parent, until the parent closes the socket. The
    stopwatch has measured what the fork server did for this session."""
    stopwatch = stopwatch or Stopwatch()
    control_fd, lifeline_fd, stacks_fd, job_fd, *_ = descriptors
    set_up_child(lifeline_fd, stacks_fd, descriptors)
    # A BrokenPipeError or ConnectionResetError means that the parent has closed its end of the socket.
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            with stopwatch.measure():
                job: Job = receive(job_fd)
                _finish_imports()
            reason = unfit_reason(descriptors)
            files = [] if reason else _list_open_files(descriptors)
        except BaseException as error:  # a separate interpreter will report the error again, with a traceback
            reason = f"the dataset cannot be unpickled in the template ({one_line(f'{type(error).__name__}: {error}')})"
        if reason:
            control.send(TEMPLATE_UNFIT + reason.encode(errors="replace")[:MAX_INLINE_BYTES])
            return
        flush_streams()  # otherwise every worker would print the buffered text again
        gc.collect()
        gc.freeze()  # otherwise a garbage collection in a worker would write to, and so copy, the pages of all objects
        control.send(TEMPLATE_READY + stopwatch.pack())
        serve_forks(control, partial(_run_worker, settings, job, descriptors, files))  # pyright: ignore[reportPossiblyUnboundVariable]


def _finish_imports() -> None:
    """Import the plugins that Pillow would otherwise import when a worker opens its first image. They would then take
    3 MB in each worker."""
    if "PIL.Image" in sys.modules:
        with contextlib.suppress(Exception):  # raised again when an image is opened
            sys.modules["PIL.Image"].preinit()


def unfit_reason(gpuload_fds: list[int]) -> str:
    """Return the reason why this process must not be forked; "" if it can be forked. `gpuload_fds` are the descriptors
    that gpuload itself has opened."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "a library started threads when it was imported, or the dataset did when it was unpickled"
    mapped_paths = _mapped_paths()
    for fd in _foreign_descriptors(gpuload_fds):
        if description := _describe_unshareable(fd, mapped_paths):
            return f"the dataset, or a library, holds {description}"
    return ""


def _foreign_descriptors(gpuload_fds: list[int]) -> list[int]:
    """Return the descriptors of this process, except the standard streams, those of gpuload, and those that have no
    position: devices and paths (O_PATH)."""
    fds = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed: it was the descriptor that `listdir` used
            has_position = not (stat.S_ISCHR(os.fstat(fd).st_mode) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH)
            if fd > 2 and fd not in gpuload_fds and has_position and not _path(fd).startswith("/memfd:gpuload"):
                fds.append(fd)
    return fds


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _describe_unshareable(fd: int, mapped_paths: set[str]) -> str:
    """Return a description of a descriptor if forks would interfere with each other, even if each opened the file
    again; else ""."""
    path, mode, flags = _path(fd), os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return f"an open {path.removeprefix('anon_inode:').split(':')[0].strip('[]')}"
    for kind, (offset, signature) in DATABASES.items():
        with contextlib.suppress(OSError):  # a directory, or the file cannot be read
            if os.pread(fd, len(signature), offset) == signature:
                return f"{kind}, {path}"
    if flags & os.O_ACCMODE != os.O_RDONLY and path not in mapped_paths:
        return f"{path} open for writing"
    with open(f"/proc/self/fdinfo/{fd}") as file:
        if any(line.startswith("lock:") for line in file):
            return f"a lock of {path}"
    try:
        os.close(_open_again(fd))
    except OSError as error:
        return f"{path} open, which cannot be opened again ({error.strerror})"
    return ""


def _mapped_paths() -> set[str]:
    """Return the paths of the files that are mapped. One that is also open for writing is not unfit: `np.memmap` keeps
    a descriptor but writes to the memory, which workers share in any case."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        entries = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return {entry[5] for entry in entries if len(entry) > 5}


def _list_open_files(gpuload_fds: list[int]) -> list[list[int]]:
    """Return the descriptors of the files and directories that workers have to open again. Duplicates of a descriptor
    (``os.dup``) share its position, in a worker too, so they are in the same list."""
    files: dict[tuple[int, int], list[list[int]]] = {}  # keyed by device and inode
    for fd in _foreign_descriptors(gpuload_fds):
        info = os.fstat(fd)
        same_file = files.setdefault((info.st_dev, info.st_ino), [])
        duplicates = next((fds for fds in same_file if _share_position(fd, fds[0])), None)
        if duplicates is None:
            same_file.append([fd])
        else:
            duplicates.append(fd)
    return [fds for same_file in files.values() for fds in same_file]


def _share_position(fd: int, other: int) -> bool:
    """Return whether the position of one descriptor of a file moves with that of the other."""
    position = os.lseek(fd, 0, os.SEEK_CUR)
    if stat.S_ISDIR(os.fstat(fd).st_mode) or os.lseek(other, 0, os.SEEK_CUR) != position:
        return False
    os.lseek(fd, position + 1, os.SEEK_SET)
    try:
        return os.lseek(other, 0, os.SEEK_CUR) == position + 1
    finally:
        os.lseek(fd, position, os.SEEK_SET)


def _open_again(fd: int) -> int:
    """Open the file of a descriptor a second time, at the same position, even if the file is deleted."""
    new_fd = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) & ~CREATION_FLAGS)
    try:
        os.lseek(new_fd, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    except OSError:
        os.close(new_fd)
        raise
    return new_fd


def _replace_files(files: list[list[int]]) -> None:
    """Open the template's files again, under the same descriptors, so that this worker's positions are its own."""
    for fds in files:
        new_fd = _open_again(fds[0])
        for fd in fds:
            os.dup2(new_fd, fd, os.get_inheritable(fd))
        os.close(new_fd)


def _run_worker(
    settings: dict[str, Any],
    job: Job,
    template_fds: list[int],
    template_files: list[list[int]],
    number: int,
    received_fds: list[int],
) -> None:
    """Run a worker in the forked child. This closes the template's own descriptors, and opens its files again."""
    _, lifeline_fd, stacks_fd, *shared_fds = template_fds
    for fd in (lifeline_fd, stacks_fd):
        os.close(fd)
    _replace_files(template_files)
    *ends, queue_fd = received_fds
    run_worker(number, settings, [*ends, *shared_fds[:3], queue_fd], job)
