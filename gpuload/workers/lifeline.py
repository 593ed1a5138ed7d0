"""A worker dies with its parent: the kernel kills it when the parent's end of a pipe closes."""

from __future__ import annotations

import os
import signal

__all__ = ["arm_lifeline"]


def arm_lifeline(fd: int, pid: int) -> None:
    """Make the kernel kill a process when the other end of a pipe closes, also one that is stopped or hangs."""
    import fcntl  # Windows has none

    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
