"""Pickling what workers get: the job of this machine's workers, and a `Parcel` for workers on other machines.

What becomes of memory:

- An `np.memmap` is sent as path and offset, never read.
- What the user's processes share on purpose is sent as the shared memory itself, never as a copy: tensors after
  ``share_memory_()``; what the package `multiprocessing` shares (``Value``, ``Array``, ``Manager`` proxies,
  ``SharedMemory``, and locks and queues of the "spawn" and "forkserver" contexts); arrays over any of it; the memory of
  a `Cached` dataset. Workers on other machines cannot have it.
- All other arrays go out of band, to the job's memfd, which workers map: a CPU tensor as an array, a large list of
  `bytes` as one array.

Lambdas, and classes and functions of `__main__` or a notebook's cells, are sent by value (cloudpickle).

Runs in the main process, before workers start; and in a worker while a job is unpickled, if that has shared memory.
`multiprocessing` asks whoever starts a process to duplicate descriptors for it (`Inheritance`): the duplicates belong
to the pool, which hands the same ones to each worker, also to one that is started later.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.process import AuthenticationString, current_process  # pyright: ignore[reportAttributeAccessIssue]
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NoReturn

import cloudpickle
import numpy as np

from gpuload.datasets.tree import is_tensor
from gpuload.workers.inherited import LibrarySettings, import_path, pickled_by_value
from gpuload.workers.job import Job, make_tensor, open_memmap, pickled_bytes, write_job

__all__ = ["Parcel", "find_lists", "pack", "ship", "warning_of_copies"]

MAX_COPIED_BYTES: Final = 1_000_000_000  # by all workers, without a warning
MIN_LIST_BYTES: Final = 1 << 20  # of a list of bytes that is shared
MAX_DEPTH: Final = 3  # of containers in the attributes of an object
MAX_ENTRIES: Final = 1_000  # of a container that is searched
APART: Final = "workers on other machines cannot have it"
# Of `multiprocessing` and torch, those that send the memory itself; the others are for methods, sockets and tensors.
SHARING_REDUCERS: Final = {
    "reduce_arena",
    "reduce_connection",
    "reduce_ctype",
    "reduce_storage",
    "reduce_typed_storage",
}
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Parcel:
    """An object that is sent to other machines: its pickle and its out-of-band buffers, uint8 arrays; and its program's
    import path and arguments."""

    pickled: np.ndarray
    buffers: list[np.ndarray]
    path: list[str]
    argv: list[str]

    def import_path(self, path: list[str]) -> list[str]:
        """Return where workers here find modules: in the folders of the program that are on this machine too, and in
        this process's `path`."""
        return list(dict.fromkeys([*filter(os.path.exists, self.path), *path]))


def pack(obj: Any) -> Parcel:
    """Pickle `obj` for workers on other machines.

    Raises:
        TypeError: a part of `obj` cannot be sent; the message names it.
    """
    pickled, buffers = _dump(obj, apart=True)
    parts = [np.frombuffer(part, np.uint8) for part in (pickled, *buffers)]
    path = [os.path.abspath(entry) for entry in import_path()]
    return Parcel(parts[0], parts[1:], path, [str(word) for word in sys.argv])


def ship(obj: Any, settings: dict[str, Any]) -> list[int]:
    """Write `obj`, or what is in a `Parcel`, and the bootstrap's settings to a new memfd. Returns its descriptor, and
    those of shared memory that `obj` refers to: workers inherit all of them, and the caller closes them.

    Raises:
        TypeError: a part of `obj` cannot be sent; the message names it.
    """
    if isinstance(obj, Parcel):
        theirs = {"path": obj.import_path(settings["path"]), "argv": obj.argv}
        return [write_job(settings | theirs, obj.pickled.data, [part.data for part in obj.buffers])]

    with Inheritance() as inheritance:
        pickled, buffers = _dump(obj, inheritance.tracking())
        fd = write_job(settings, pickled, buffers)
    return [fd, *inheritance.descriptors]


def warning_of_copies(job_fd: int, job: Any, workers: int) -> str:
    """Return a warning if this many workers have more than a gigabyte of copies of what is not shared; else ""."""
    copied_bytes = pickled_bytes(job_fd)
    if copied_bytes * workers <= MAX_COPIED_BYTES:
        return ""
    sizes = {}
    for name, value in getattr(getattr(job, "dataset", None), "__dict__", {}).items():
        with contextlib.suppress(TypeError):
            sizes[name] = len(_dump(value)[0]), type(value).__name__
    most = max(sizes, key=lambda name: sizes[name][0], default=None)
    which = "" if most is None else f", {sizes[most][0] / 1e6:,.0f} MB of it dataset.{most} (a {sizes[most][1]})"
    return (
        f"the pickled dataset has {copied_bytes / 1e6:,.0f} MB{which}, and each of {workers} workers may come to have "
        "a copy. NumPy arrays, tensors and lists of bytes are shared by all workers: keep large data in these, or in "
        "files that are read in __getitem__; or use fewer workers"
    )


# -- pickling ---------------------------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """Sends memory as what it is: part of a file, shared, or out of band.

    Args:
        file: what the pickle is written to.
        on_buffer: takes what goes out of band.
        apart: for workers on other machines: refuse what is in shared memory. A cache's memory begins empty there.
    """

    def __init__(self, file: Any, on_buffer: Callable[[pickle.PickleBuffer], Any] | None, *, apart: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=on_buffer)
        self._apart = apart
        known: dict[type, Any] = ForkingPickler._extra_reducers  # pyright: ignore[reportAttributeAccessIssue]
        self._sharing = {
            kind: reducer for kind, reducer in known.items() if getattr(reducer, "__name__", "") in SHARING_REDUCERS
        }
        self._sharing[AuthenticationString] = _reduce_authkey
        if apart:
            self._sharing = dict.fromkeys(self._sharing, _refuse)
        elif (cache_file := sys.modules.get("gpuload.datasets.cache_file")) is not None:
            self._sharing[cache_file.CachePlace] = _reduce_cache

    def reducer_override(self, obj: Any) -> Any:
        reduced, torch = None, sys.modules.get("torch")
        if isinstance(obj, np.ndarray):
            reduced = _reduce_memmap(obj) or self._reduce_array(obj)
        elif torch is not None and type(obj) is torch.Tensor and str(obj.device) == "cpu":
            reduced = self._reduce_tensor(torch, obj)
        elif (reducer := self._sharing.get(type(obj))) is not None and _is_shared(obj):
            reduced = reducer(obj)
        return super().reducer_override(obj) if reduced is None else reduced

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Reduced | None:
        """Return a tensor as an array, contiguous unless it lies in shared memory."""
        if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized or tensor.is_shared():
            return None
        bits, dtype = tensor, None
        if tensor.dtype == torch.bfloat16:
            bits, dtype = tensor.view(torch.int16), "bfloat16"
        with contextlib.suppress(TypeError, RuntimeError):
            bits = bits.resolve_conj().resolve_neg()
            bits = bits if self._mapping_at(bits.data_ptr()) else bits.contiguous()
            return make_tensor, (bits.numpy(), dtype)
        return None

    def _reduce_array(self, array: np.ndarray) -> Reduced | None:
        """Return an array over shared memory as that memory and its place there; None for other arrays. One that views
        a tensor is copied if a worker cannot map its memory: it may be a batch that was kept, which lies in a ring.

        Raises:
            TypeError: it lies in shared memory that a worker cannot map.
        """
        base: Any = array
        while isinstance(base, np.ndarray):
            if isinstance(base, np.memmap):
                return None  # it was refused as a place in its file
            base = base.base
        if isinstance(base, memoryview):
            base = base.obj
        owner, at = None, array.__array_interface__["data"][0]
        if hasattr(base, "_wrapper"):  # of ctypes, made by `multiprocessing`
            owner, start = base, _address(base)
        elif (isinstance(base, mmap.mmap) or is_tensor(base)) and array.size:
            mapping = self._mapping_at(at)
            if mapping is None:
                return None
            path, start = mapping
            if os.path.isfile(path):  # no device: page-locked memory may be a mapping of one
                owner = path
            elif (arena := _arena_at(at)) is not None:
                owner, start = arena
            elif not is_tensor(base):
                raise TypeError(
                    f"this array lies in a mapping that its forks share, {path or 'without a name'}: a worker cannot "
                    "map it. Use an np.memmap, a multiprocessing.Array or a tensor after share_memory_()"
                )
        if owner is None:
            return None
        return _refuse(array) if self._apart else (_view, (owner, at - start, array.dtype, array.shape, array.strides))

    def _mapping_at(self, address: int) -> tuple[str, int] | None:
        """Return the file that is mapped, shared and writable, at an address, and the address at which it begins."""
        for start, end, path, begin in self._mappings:
            if start <= address < end:
                return path, begin
        return None

    @cached_property
    def _mappings(self) -> list[tuple[int, int, str, int]]:
        mappings = []
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, kind, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                if kind.startswith("rw-s"):
                    start, end = (int(word, 16) for word in span.split("-"))
                    mappings.append((start, end, path[0] if path else "", start - int(offset, 16)))
        return mappings


class _PicklerWithIds(_Pickler):
    """Sends some objects as persistent ids, by their `id`. It calls a function for each object, which takes time."""

    def __init__(self, ids: Mapping[int, Any], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ids = ids

    def persistent_id(self, obj: Any) -> Any:
        return self._ids.get(id(obj))


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _dump(obj: Any, calls: Sequence[partial[Any]] = (), *, apart: bool = False) -> tuple[memoryview, list[memoryview]]:
    """Pickle the settings of libraries, with more `calls` before them, and `obj`."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()

    def can_pickle(part: Any) -> bool:
        with contextlib.suppress(Exception):
            _Pickler(_Nowhere(), None, apart=apart).dump(part)
            return True
        return False

    try:
        with pickled_by_value():
            settings = LibrarySettings.here(can_pickle)
            settings.calls[:0] = calls
            lists = find_lists(obj)
            pickler = partial(_PicklerWithIds, lists) if lists else _Pickler
            pickler(pickled, buffers.append, apart=apart).dump((settings, obj))
        return pickled.getbuffer(), [buffer.raw() for buffer in buffers]
    except Exception as error:
        raise TypeError(_refusal(obj, error, apart)) from error


def find_lists(obj: Any) -> dict[int, tuple[int, np.ndarray, np.ndarray]]:
    """Return the large lists of bytes in an object's attributes, and in containers and objects there: by `id`, their
    number, and the arguments of a `SharedBytes`."""
    lists: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}

    def search(value: Any, depth: int) -> None:
        if type(value) is list and value and type(value[0]) is bytes:
            if id(value) not in lists and all(type(item) is bytes for item in value):
                ends = np.cumsum(np.fromiter(map(len, value), np.int64, len(value)))
                if ends[-1] >= MIN_LIST_BYTES:
                    lists[id(value)] = len(lists), np.frombuffer(b"".join(value), np.uint8), ends
        elif depth and type(value) in (list, tuple, dict):
            entries = list(value.values()) if type(value) is dict else value
            for entry in entries[:MAX_ENTRIES]:
                search(entry, depth - 1)
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            for entry in list(vars(value).values()):
                search(entry, depth - 1)

    search(obj, 1 + MAX_DEPTH)
    return lists


def _reduce_memmap(array: np.ndarray) -> Reduced | None:
    """Return a memmap, or a view of one, as (path, offset, dtype, shape, strides); None for any other array."""
    file: np.memmap | None = None
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.filename is not None:
            file = base
        base = base.base
    if file is None or not isinstance(base, mmap.mmap):
        return None
    if any(stride < 0 for stride in array.strides) or array.dtype.hasobject:
        return None
        # The mapping begins at the granule below the memmap's offset; the view may begin anywhere in it.
    mapped_from = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY
    offset = array.__array_interface__["data"][0] - _address(base) + mapped_from
    return open_memmap, (str(file.filename), offset, array.dtype.str, array.shape, array.strides)


# -- shared memory ----------------------------------------------------------------------------------------------------


class Descriptor:
    """A descriptor in a worker, under the number that it has here."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        """Return the descriptor, which belongs to the caller from now on."""
        os.set_inheritable(self.fd, False)
        return self.fd


class Inheritance:
    """A context in which `multiprocessing` pickles what it shares; collects what workers have to inherit.

    Attributes:
        descriptors: the duplicates, for the caller to close; closed if an error leaves the context.
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

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        set_spawning_popen(self._before)
        if kind is not None:
            self.close()

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def tracking(self) -> list[partial[Any]]:
        """Return the call that makes this process's tracker of shared memory a worker's; none if it does not run.

        It is a process that unlinks shared memory when nobody tracks it any more. With one of its own a worker would
        unlink at its end what others still use.
        """
        module = sys.modules.get("multiprocessing.resource_tracker")
        fd = None if module is None else module._resource_tracker._fd
        return [] if fd is None else [partial(_adopt, self.duplicate_for_child(fd))]


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


def _reduce_cache(place: Any) -> Reduced | None:
    """Return the place of a cache in memory with that memory; None for one in a folder, which needs nothing."""
    if place.folder:
        return None
    fd = get_spawning_popen().duplicate_for_child(place.fd)  # pyright: ignore
    return type(place), (place.samples, place.limit_bytes, place.key, "", fd)


def _address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def _arena_at(address: int) -> tuple[Any, int] | None:
    """Return the memory of `multiprocessing` (of an ``Array``, say) at an address, and where it begins."""
    heap: Any = sys.modules.get("multiprocessing.heap")
    for arena in () if heap is None else heap.BufferWrapper._heap._arenas:
        start = _address(arena.buffer)
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


# -- the message for what cannot be sent ------------------------------------------------------------------------------


def _refusal(obj: Any, error: Exception, apart: bool) -> str:
    """Return the message for an object that cannot be sent: which part of it, why, and what to do."""
    path, culprit, error = _culprit(obj, error, apart)
    kind = type(culprit)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    thing = f"{'an' if name.lstrip('_')[0] in 'aeiouAEIOU' else 'a'} {name}"
    remedy = _remedy_for(error) or (
        "Open files, locks, connections and the like when they are first used in the worker, not before"
    )
    return (
        f"{f'{path} ({thing})' if path else thing} cannot be sent to the worker processes: {type(error).__name__}: "
        f"{error}{'' if str(error).endswith('.') else '.'} {remedy}; or use num_workers=0"
    )


def _culprit(obj: Any, error: Exception, apart: bool) -> tuple[str, Any, Exception]:
    """Return the part of an object that cannot be pickled by itself, by name, and its error: ``dataset.reader``.

    The pickler's own error names a type ("cannot pickle '_thread.lock' object") but not where it is. So the parts of a
    job are tried, and the attributes of the first one that fails. References back to the job or to that part are left
    out: they would make every attribute fail.
    """
    path, culprit, owners = "", obj, {}
    for _ in range(2):
        owners[id(culprit)] = "left out"
        for name, value in _attributes(culprit).items():
            if (failure := _failure(value, owners, apart)) is not None:
                path, culprit, error = f"{path}.{name}" if path else name, value, failure
                break
        else:
            break
    return path, culprit, error


def _failure(obj: Any, left_out: Mapping[int, Any], apart: bool) -> Exception | None:
    """Return the error of pickling an object, or None; those with the ids in `left_out` are not pickled."""
    inheritance = Inheritance()
    try:
        with contextlib.nullcontext() if apart else inheritance:
            _PicklerWithIds(left_out, _Nowhere(), lambda buffer: None, apart=apart).dump(obj)
    except Exception as error:
        return error
    finally:
        inheritance.close()
    return None


def _attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object that are pickled; none, if it is pickled in a form of its own."""
    try:
        _, _, state, *_ = obj.__reduce_ex__(5)
    except Exception:  # no such attributes, or it is the culprit itself
        return {}
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # with __slots__
        state = {**(state[0] or {}), **state[1]}
    transforms = obj.chain.transforms if isinstance(obj, Job) else ()
    named = {f"transforms[{number}]": transform for number, transform in enumerate(transforms)}
    return named | state if isinstance(state, dict) else {}


def _remedy_for(error: BaseException) -> str | None:
    """Return what to do where `multiprocessing` refuses to share something; None for other errors."""
    if APART in str(error):
        return "Give workers a copy of it, made before the Loader is"
    if "through inheritance" in str(error):  # what `multiprocessing` says of its locks and values
        return f"These {APART}"
    if "fork context" in str(error):
        return (
            'A lock of multiprocessing\'s "fork" context exists only in forks of this process, which workers '
            'are not: make it (the Value, Array, Lock, Event or Queue) with multiprocessing.get_context("spawn"), '
            "or a Value or Array with lock=False"
        )
    return None
