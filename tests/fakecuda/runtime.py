"""Controls of the fake CUDA runtime for tests: policies, limits, refused locks, and counts of calls.

They need a process that fakecuda/build.py started.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

__all__ = ["GARBAGE", "POLICIES", "Runtime", "runtime"]

# Which streams run as soon as they can; the others run when the host waits for them.
POLICIES: Final = {
    "eager": "all",
    "lazy": "none",
    "side first": "streams of high priority, such as gpuload's",
    "consumer first": "all other streams",
    "random": "a random stream at a time",
    "never": "none, and the host never waits, to measure the host's time",
}
GARBAGE: Final = 0xA5
ILLEGAL_ADDRESS: Final = 700
ASSERT: Final = 710

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NAMED = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
WATCH = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)


class Runtime:
    """The library that replaces CUDA's runtime."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcudart.so.13")
        library.fake_enqueue.argtypes = [ctypes.c_void_p, WORK, ctypes.c_void_p]
        library.fake_reachable.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.fake_device_at.argtypes = [ctypes.c_void_p]
        library.fake_reachable.restype = ctypes.c_void_p
        library.fake_set_policy.argtypes = [ctypes.c_char_p, ctypes.c_uint]
        library.fake_set_memory.argtypes = [ctypes.c_size_t]
        library.fake_refuse_locks_after.argtypes = [ctypes.c_long]
        library.fake_count.argtypes = [ctypes.c_char_p]
        library.fake_count.restype = library.fake_locked_ranges.restype = ctypes.c_long
        library.fake_counts.restype = library.fake_violations.restype = ctypes.c_char_p
        library.cudaMemsetAsync.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
        self._watch: Any = None  # kept alive: the driver calls it
        self._watch_waits: Any = None

    def set_policy(self, name: str, seed: int = 1) -> None:
        self._library.fake_set_policy(name.encode(), seed)

    @contextlib.contextmanager
    def policy(self, name: str, seed: int = 1) -> Iterator[None]:
        """Use a policy within a context, and ``eager`` afterwards."""
        self.set_policy(name, seed)
        try:
            yield
        finally:
            self.set_policy("eager")

    def enqueue(self, stream: int, work: Any) -> int:
        """Queue a `WORK`, which must live until it has run, on a stream of the current device; return 0 or an error."""
        return self._library.fake_enqueue(stream, work, None)

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        """Fill memory with garbage, in the order of a stream of the current device."""
        self._library.cudaMemsetAsync(address, GARBAGE, nbytes, stream)

    def reachable(self, address: int, nbytes: int) -> int | None:
        """Return where queued work reaches the bytes at an address; None unless all are in one allocation."""
        return self._library.fake_reachable(address, nbytes)

    def device_at(self, address: int) -> int:
        """Return the device of the allocation at an address; -1 if there is none."""
        return self._library.fake_device_at(address)

    def break_device(self, index: int, error: int) -> None:
        """Let all later calls for a device fail until `mend`."""
        self._library.fake_break(index, error)

    def mend(self) -> None:
        self._library.fake_mend()

    def last_error(self) -> int:
        """Return and clear the last error of this thread."""
        return self._library.cudaGetLastError()

    @contextlib.contextmanager
    def memory_bytes(self, nbytes: int) -> Iterator[None]:
        """Limit the memory of each device within a context."""
        self._library.fake_set_memory(nbytes)
        try:
            yield
        finally:
            self._library.fake_set_memory(80 << 30)

    @contextlib.contextmanager
    def most_locks(self, count: int) -> Iterator[None]:
        """Limit how many more ranges can be page-locked within a context."""
        self._library.fake_refuse_locks_after(count)
        try:
            yield
        finally:
            self._library.fake_refuse_locks_after(-1)

    def count(self, name: str) -> int:
        """Return how often a function was called, or a kernel launched."""
        return self._library.fake_count(name.encode())

    def counts(self) -> dict[str, int]:
        lines = self._library.fake_counts().decode().splitlines()
        return {name: int(number) for name, number in (line.split("\t") for line in lines)}

    def forget_counts(self) -> None:
        self._library.fake_forget_counts()

    def violations(self) -> list[str]:
        """Return and clear the texts of misuse."""
        return self._library.fake_violations().decode().splitlines()

    def locked_ranges(self) -> int:
        return self._library.fake_locked_ranges()

    def has_context(self, index: int) -> bool:
        return bool(self._library.fake_has_context(index))

    def watch_waits(self, watch: Callable[[str], None] | None) -> None:
        """Call a function with the kind of each wait of the host, for an event, a stream or a copy."""
        self._watch_waits = NAMED(lambda what: watch(what.decode())) if watch else NAMED()
        self._library.fake_watch_waits(self._watch_waits)

    def watch_launches(self, watch: Callable[[str, tuple[int, int, int], Any], None]) -> None:
        """Call a function with the name, grid and arguments of each launch of a compiled kernel."""

        def report(name: bytes, x: int, y: int, z: int, threads: int, arguments: Any) -> None:
            watch(name.decode(), (x, y, z), arguments)

        self._watch = WATCH(report)
        ctypes.CDLL("libcuda.so.1").fake_watch_launches(self._watch)


@cache
def runtime() -> Runtime:
    """Return the runtime of this process."""
    return Runtime()
