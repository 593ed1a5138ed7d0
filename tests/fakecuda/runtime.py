"""The fake CUDA runtime, asked and told by tests: policies, limits, refusals, and what was called.

Only in a process that was started with it (fakecuda/build.py).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["GARBAGE", "POLICIES", "Runtime", "runtime"]

# Which streams go ahead as soon as they can; the others run when the host waits for them.
POLICIES: Final = {
    "eager": "all",
    "lazy": "none",
    "side first": "those of high priority, as gpuload's own",
    "consumer first": "all but these",
    "random": "now one, now another",
    "never": "none, and nothing is waited for: the time of the host alone",
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
    """The library that stands in for CUDA's runtime."""

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
        """A policy within this; ``eager`` afterwards."""
        self.set_policy(name, seed)
        try:
            yield
        finally:
            self.set_policy("eager")

    def enqueue(self, stream: int, work: Any) -> int:
        """Queue a `WORK`, which must live until it has run, on a stream of the current device; 0, or an error."""
        return self._library.fake_enqueue(stream, work, None)

    def fill(self, address: int, nbytes: int, stream: int) -> None:
        """Fill memory with garbage, in the order of a stream of the current device."""
        self._library.cudaMemsetAsync(address, GARBAGE, nbytes, stream)

    def reachable(self, address: int, nbytes: int) -> int | None:
        """Where queued work reaches the bytes at an address; None unless all of them are in one allocation."""
        return self._library.fake_reachable(address, nbytes)

    def device_at(self, address: int) -> int:
        """The device that has an allocation at an address; -1: none."""
        return self._library.fake_device_at(address)

    def break_device(self, index: int, error: int) -> None:
        """Let each later call for a device fail, until `mend`."""
        self._library.fake_break(index, error)

    def mend(self) -> None:
        self._library.fake_mend()

    def last_error(self) -> int:
        """The last error of this thread, which is forgotten then."""
        return self._library.cudaGetLastError()

    @contextlib.contextmanager
    def memory_bytes(self, nbytes: int) -> Iterator[None]:
        """A device has so many bytes within this."""
        self._library.fake_set_memory(nbytes)
        try:
            yield
        finally:
            self._library.fake_set_memory(80 << 30)

    @contextlib.contextmanager
    def most_locks(self, count: int) -> Iterator[None]:
        """So many further ranges can be page-locked within this."""
        self._library.fake_refuse_locks_after(count)
        try:
            yield
        finally:
            self._library.fake_refuse_locks_after(-1)

    def count(self, name: str) -> int:
        """How often a function was called, or a kernel launched."""
        return self._library.fake_count(name.encode())

    def counts(self) -> dict[str, int]:
        lines = self._library.fake_counts().decode().splitlines()
        return {name: int(number) for name, number in (line.split("\t") for line in lines)}

    def forget_counts(self) -> None:
        self._library.fake_forget_counts()

    def violations(self) -> list[str]:
        """What was done that a program must not do; forgotten then."""
        return self._library.fake_violations().decode().splitlines()

    def locked_ranges(self) -> int:
        """How many ranges of memory are page-locked in place."""
        return self._library.fake_locked_ranges()

    def has_context(self, index: int) -> bool:
        return bool(self._library.fake_has_context(index))

    def watch_waits(self, watch: Callable[[str], None] | None) -> None:
        """Call a function, with what is waited for, each time that the host has to wait for an event, a stream or a
        copy of pageable memory."""
        self._watch_waits = NAMED(lambda what: watch(what.decode())) if watch else NAMED()
        self._library.fake_watch_waits(self._watch_waits)

    def watch_launches(self, watch: Callable[[str, tuple[int, int, int], Any], None]) -> None:
        """Tell a function of each launch of a kernel that Triton compiled: the name, the grid, the arguments'
        addresses."""

        def report(name: bytes, x: int, y: int, z: int, threads: int, arguments: Any) -> None:
            watch(name.decode(), (x, y, z), arguments)

        self._watch = WATCH(report)
        ctypes.CDLL("libcuda.so.1").fake_watch_launches(self._watch)


_runtimes: list[Runtime] = []


def runtime() -> Runtime:
    """The runtime of this process."""
    if not _runtimes:
        _runtimes.append(Runtime())
    return _runtimes[0]
