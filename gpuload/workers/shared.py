"""What the user's processes share on purpose: sent to workers as the shared memory itself, never as a copy of it.

That is tensors after ``share_memory_()``; what the package `multiprocessing` shares: ``Value``, ``Array``, ``Manager``
proxies, ``SharedMemory``, and locks and queues of the "spawn" and "forkserver" contexts; arrays over any of it; and the
memory of a `Cached` dataset.

Runs in the main process while a job is pickled, and in workers, only if there is such a thing, while it is unpickled.
`multiprocessing` asks whoever starts a process to duplicate descriptors for it (`Inheritance`): the duplicates belong
to the pool, which hands the same ones to each worker, also to one that is started later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from functools import cached_property
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.process import AuthenticationString, current_process  # pyright: ignore[reportAttributeAccessIssue]
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np

__all__ = ["Inheritance", "Reduced", "Sharing", "remedy_for"]

APART = "workers on other machines cannot have it"
# Of `multiprocessing` and torch, those that send the memory itself; the others are for methods, sockets and tensors.
SHARING_REDUCERS = {"reduce_arena", "reduce_connection", "reduce_ctype", "reduce_storage", "reduce_typed_storage"}
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Descriptor:
    """A descriptor in a worker, under the number that it has here."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        """Return the descriptor, which belongs to the caller from now on."""
        os.set_inheritable(self.fd, False)
        return self.fd


class Tracker(Descriptor):
    """A descriptor of the process that unlinks shared memory when nobody tracks it any more; unpickling it makes that
    process the worker's tracker. With one of its own a worker would unlink at its end what others still use."""

    def __reduce__(self) -> Reduced:
        return _adopt, (self.fd,)


class Inheritance:
    """A context in which `multiprocessing` pickles what it shares; collects what workers have to inherit.

    Attributes:
        descriptors: the duplicates, for the caller to close.
    """

    DupFd = Descriptor  # the name that `multiprocessing` looks for

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(os.dup(fd))
        return self.descriptors[-1]

    def __enter__(self) -> Inheritance:
        self._before = get_spawning_popen()
        set_spawning_popen(self)  # pyright: ignore[reportArgumentType]
        return self

    def __exit__(self, *exc_info: object) -> None:
        set_spawning_popen(self._before)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def tracker(self) -> Tracker | None:
        """Return this process's tracker of shared memory, if it runs."""
        module = sys.modules.get("multiprocessing.resource_tracker")
        fd = None if module is None else module._resource_tracker._fd
        return None if fd is None else Tracker(self.duplicate_for_child(fd))


class Sharing:
    """Reduces what is in shared memory to that memory, by the reducers of `multiprocessing` and torch; arrays over such
    memory to their places in it. The pickler does the rest.

    Args:
        apart: refuse all of it, for workers on other machines. A cache's memory begins empty there.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        known: dict[type, Any] = ForkingPickler._extra_reducers  # pyright: ignore[reportAttributeAccessIssue]
        self._reducers = {
            kind: reducer for kind, reducer in known.items() if getattr(reducer, "__name__", "") in SHARING_REDUCERS
        }
        self._reducers[AuthenticationString] = _reduce_authkey
        if apart:
            self._reducers = dict.fromkeys(self._reducers, _refuse)
        elif (backing := sys.modules.get("gpuload.datasets.cache.backing")) is not None:
            self._reducers[backing.Memory] = _reduce_memory

    def reduce(self, obj: Any) -> Reduced | None:
        """Return how to send an object that is in shared memory; None for other objects.

        Raises:
            TypeError: workers cannot have it.
        """
        if isinstance(obj, np.ndarray):
            reduced = self._reduce_array(obj)
            return _refuse(obj) if reduced is not None and self._apart else reduced
        reducer = self._reducers.get(type(obj))
        return None if reducer is None or not _is_shared(obj) else reducer(obj)

    def _reduce_array(self, array: np.ndarray) -> Reduced | None:
        """Return an array over shared memory as that memory and its place there; None for other arrays. One that views
        a tensor is copied if a worker cannot map its memory: it may be a batch that was kept, which lies in a ring.

        Raises:
            TypeError: it lies in shared memory that a worker cannot map.
        """
        base: Any = array
        while isinstance(base, np.ndarray):
            if isinstance(base, np.memmap):
                return None  # sent as its place in the file
            base = base.base
        if isinstance(base, memoryview):
            base = base.obj
        owner, at = None, array.__array_interface__["data"][0]
        if hasattr(base, "_wrapper"):  # of ctypes, made by `multiprocessing`
            owner, start = base, np.frombuffer(base, np.uint8).__array_interface__["data"][0]
        elif (isinstance(base, mmap.mmap) or _is_tensor(base)) and array.size:
            mapping = self.mapping_at(at)
            if mapping is None:
                return None
            path, start = mapping
            if os.path.isfile(path):  # no device: page-locked memory may be a mapping of one
                owner = path
            elif (arena := _arena_at(at)) is not None:
                owner, start = arena
            elif not _is_tensor(base):
                raise TypeError(
                    f"this array lies in a mapping that its forks share, {path or 'without a name'}: a worker cannot "
                    "map it. Use an np.memmap, a multiprocessing.Array or a tensor after share_memory_()"
                )
        if owner is None:
            return None
        return _view, (owner, at - start, array.dtype, array.shape, array.strides)

    def mapping_at(self, address: int) -> tuple[str, int] | None:
        """Return the file that is mapped, shared and writable, at an address, and the address at which it begins."""
        for start, end, path, begin in self._mappings:
            if start <= address < end:
                return path, begin
        return None

    @cached_property
    def _mappings(self) -> list[tuple[int, int, str, int]]:
        found = []
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, kind, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                if kind.startswith("rw-s"):
                    start, end = (int(word, 16) for word in span.split("-"))
                    found.append((start, end, path[0] if path else "", start - int(offset, 16)))
        return found


def _refuse(obj: Any) -> NoReturn:
    name = type(obj).__name__
    raise TypeError(f"this {name} is, or refers to, memory that processes of one machine share; {APART}")


def _is_shared(obj: Any) -> bool:
    """Return whether an object of a type that has a reducer is in shared memory."""
    if isinstance(obj, ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return hasattr(obj, "_wrapper")  # else it is in memory of its own
    storage = getattr(obj, "_untyped_storage", obj)
    return type(storage).__name__ != "UntypedStorage" or (storage.device.type == "cpu" and storage.is_shared())


def _reduce_authkey(key: AuthenticationString) -> Reduced:
    return _take_authkey, (bytes(key),)


def _reduce_memory(memory: Any) -> Reduced:
    return type(memory), (memory.shape, get_spawning_popen().duplicate_for_child(memory.fd))  # pyright: ignore


def _is_tensor(base: Any) -> bool:
    return (torch := sys.modules.get("torch")) is not None and isinstance(base, torch.Tensor)


def _arena_at(address: int) -> tuple[Any, int] | None:
    """Return the memory of `multiprocessing` (of an ``Array``, say) at an address, and where it begins."""
    heap: Any = sys.modules.get("multiprocessing.heap")
    for arena in () if heap is None else heap.BufferWrapper._heap._arenas:
        start = np.frombuffer(arena.buffer, np.uint8).__array_interface__["data"][0]
        if start <= address < start + arena.size:
            return arena, start
    return None


def _view(owner: Any, offset: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Make an array over shared memory, in a worker."""
    if isinstance(owner, str):
        with open(owner, "r+b") as file:
            owner = mmap.mmap(file.fileno(), 0)
    owner = getattr(owner, "buffer", owner)  # of an arena
    return np.ndarray(shape, dtype, owner, offset, strides)


def _take_authkey(key: bytes) -> bytes:
    """Set the password of a manager in a worker: other proxies that it gets from the manager need it too."""
    current_process().authkey = key
    return current_process().authkey


def _adopt(fd: int) -> None:
    from multiprocessing import resource_tracker

    mine: Any = resource_tracker._resource_tracker  # pyright: ignore[reportAttributeAccessIssue]
    if mine._fd is None:
        mine._fd = Descriptor(fd).detach()


def remedy_for(error: BaseException) -> str | None:
    """Return what to do where `multiprocessing` refuses to share something; None for other errors."""
    if APART in str(error):
        return "Give workers a copy of it, made before the Loader is"
    if "through inheritance" in str(error):  # what `multiprocessing` says of its locks and values
        return f"These {APART}"
    if "fork context" in str(error):
        return (
            'A lock of multiprocessing\'s "fork" context exists only in forks of this process, and workers are fresh '
            'interpreters: make it (the Value, Array, Lock, Event or Queue) with multiprocessing.get_context("spawn"), '
            "or a Value or Array with lock=False"
        )
    return None
