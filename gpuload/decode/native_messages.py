"""Capturing the output of C decoders on standard error.

libjpeg (inside nvImageCodec) and libtiff (inside Pillow) report damage only through ``fprintf(stderr, …)``: the call
succeeds and returns grey pixels. So the messages are part of the result, and must not reach the terminal.

While a decoder runs, the C library's variable ``stderr`` points to a ``FILE`` over a memfd. File descriptor 2 is
unchanged: ``sys.stderr``, child processes of other threads and crash handlers print as usual, and only C code that
prints through ``stderr`` is captured. A lock prevents two decoding threads from reading each other's messages.
Capturing costs 4 µs per call; decoding a photograph takes 1,000 µs.

This works only with glibc, because elsewhere the variable can be read-only. Without glibc, `native_messages` returns
None, and decoders that need it are not used. Each process has one ``FILE`` and one descriptor for its lifetime; a
forked child creates its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from gpuload.datasets.memory import memory_file
from gpuload.errors import one_line

__all__ = ["native_messages", "run_and_capture", "run_and_describe"]

T = TypeVar("T")
UNBUFFERED = 2
MAX_TEXT_BYTES = 4096


class NativeMessages:
    """A capture of the C library's ``stderr`` during a call."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
        self._stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        self._original = self._stderr.value
        self._fd = memory_file("native-messages")
        if self._fd < 3:  # a standard stream was closed; output to its descriptor must not mix with decoder messages
            standard_fd, self._fd = self._fd, fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(standard_fd)
        self._file = libc.fdopen(self._fd, b"a")
        if not self._file:
            raise OSError("fdopen failed for the file that captures decoder messages")
        libc.setvbuf(self._file, None, UNBUFFERED, 0)
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Make the C library print to standard error again."""
        self._stderr.value = self._original

    def run_and_capture(self, call: Callable[..., T], *args: object) -> tuple[T | None, str]:
        """Run `call(*args)`. Return its result (None if it raised) and, as one line, its output and its exception."""
        message = ""
        with self._lock:
            self._stderr.value = self._file
            try:
                result = call(*args)
            except Exception as error:
                result, message = None, f"{type(error).__name__}: {error}"
            finally:
                self.restore()
            if os.lseek(self._fd, 0, os.SEEK_END):
                output = os.pread(self._fd, MAX_TEXT_BYTES, 0).decode("utf-8", "replace")
                os.ftruncate(self._fd, 0)
                message = f"{output}\n{message}"
        return result, one_line(message) if message else ""


def run_and_capture(call: Callable[..., T], *args: object) -> tuple[T | None, str]:
    """Call `NativeMessages.run_and_capture` on this process's instance. If output cannot be captured, return only the
    exception's text."""
    messages = native_messages()
    return run_and_describe(call, *args) if messages is None else messages.run_and_capture(call, *args)


def run_and_describe(call: Callable[..., T], *args: object) -> tuple[T | None, str]:
    """Run `call(*args)`. Return its result and "", or None and the text of its exception, as one line."""
    try:
        return call(*args), ""
    except Exception as error:
        return None, one_line(f"{type(error).__name__}: {error}")


@functools.cache
def native_messages() -> NativeMessages | None:
    """Return this process's `NativeMessages`; None if the C library is not glibc."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
        return NativeMessages()
    except (AttributeError, OSError, ValueError):
        return None


def _after_fork_in_child() -> None:
    """End a capture that another thread of the parent had begun, and forget the lock that this thread holds."""
    if native_messages.cache_info().currsize and (messages := native_messages()) is not None:
        messages.restore()
    native_messages.cache_clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
