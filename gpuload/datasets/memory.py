"""Files in memory, which have no name and which several processes can map: what all of gpuload's shared memory is."""

from __future__ import annotations

import errno
import os
import resource

from gpuload.errors import LimitError

__all__ = ["memory_file"]


def memory_file(purpose: str, nbytes: int = 0) -> int:
    """Make a file in memory; returns its descriptor, which programs that this process starts do not inherit.

    Args:
        purpose: what it is for, its name in /proc.
        nbytes: its size.

    Raises:
        LimitError: the kernel or a sandbox does not allow it, or not of this size.
    """
    try:
        descriptor = os.memfd_create(f"gpuload-{purpose}", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise  # too many open files, say
        raise LimitError(
            f"memory that processes share cannot be made ({error}): gpuload needs the system call memfd_create, of "
            "Linux 3.17 and newer and of a Python built for it; allow it in the seccomp profile of the container or "
            "sandbox"
        ) from error
    try:
        if nbytes:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EFBIG:
            raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        fits = limit >> 20 << 20  # a ring has a whole number of pages
        raise LimitError(
            f"shared memory of {nbytes:,} bytes ({purpose}) is more than the {limit:,} bytes that a file may have "
            "here; raise the limit (`ulimit -f unlimited`, or resource.RLIMIT_FSIZE in the program)"
            + (f", or pass Loader(ring_bytes={fits})" if purpose == "ring" and fits else "")
        ) from error
    return descriptor
