"""Anonymous files in memory, which several processes can map. All of gpuload's shared memory consists of them."""

from __future__ import annotations

import errno
import os
import resource

from gpuload.errors import LimitError

__all__ = ["memory_file"]


def memory_file(purpose: str, nbytes: int = 0) -> int:
    """Create a file in memory and return its descriptor, which child programs do not inherit.

    Args:
        purpose: a word for the file's name in /proc and for error messages, such as "ring".
        nbytes: the size in bytes.

    Raises:
        LimitError: the kernel or a sandbox does not allow such a file, or a file of this size.
    """
    try:
        descriptor = os.memfd_create(f"gpuload-{purpose}", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise  # for example, too many open files
        raise LimitError(
            f"shared memory cannot be created ({error}): gpuload needs the system call memfd_create, which requires "
            "Linux 3.17 or newer and a Python built with support for it; allow it in the seccomp profile of the "
            "container or sandbox"
        ) from error
    try:
        if nbytes:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EFBIG:
            raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        max_ring_bytes = limit >> 20 << 20  # rounded down to MiB: a ring consists of complete pages
        raise LimitError(
            f"shared memory of {nbytes:,} bytes ({purpose}) exceeds this process's file size limit of {limit:,} "
            "bytes; raise the limit (`ulimit -f unlimited`, or resource.RLIMIT_FSIZE in the program)"
            + (f", or pass Loader(ring_bytes={max_ring_bytes})" if purpose == "ring" and max_ring_bytes else "")
        ) from error
    return descriptor
