"""Pickling of a job for the workers on this machine, and of a `Parcel` for workers on other machines.

How memory is sent:

- An `np.memmap` is sent as its path and offset; its file is not read. The same holds for a memory-mapped table of
  Hugging Face's `datasets`. If the file is no longer at its path, its contents are sent like any other array or table.
- Memory that the user's processes share on purpose is sent as the shared memory itself, never as a copy. This includes
  tensors after ``share_memory_()``, objects that `multiprocessing` shares (``Value``, ``Array``, ``Manager`` proxies,
  ``SharedMemory``, and locks and queues of the "spawn" and "forkserver" contexts), arrays in such memory, and the
  memory of a `Cached` dataset. Shared memory cannot be sent to workers on other machines.
- All other arrays are sent out of band, in the job's memfd, which workers map. A CPU tensor is sent as an array, and a
  large list of `bytes` as a single array.

Lambdas, and classes and functions that are defined in `__main__` or in a notebook, are sent by value (cloudpickle).

This module runs in the main process before workers start, and in a worker that unpickles a job with shared memory.
`multiprocessing` asks the code that starts a process to duplicate descriptors for the process (`Inheritance`). The
duplicates belong to the pool, which passes the same ones to every worker, including workers that are started later.
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

from gpuload.datasets.file_id import FileId, FileMappings, MemoryMapping, check_replaced_size
from gpuload.datasets.tree import is_tensor
from gpuload.ring.packing import has_palette, reduce_with_palette
from gpuload.workers.inherited import LibrarySettings, import_path, pickle_by_value
from gpuload.workers.job import Job, make_tensor, open_memmap, pickle_size, write_job
from gpuload.workers.signals import signals_enabled

__all__ = ["Parcel", "copy_warning", "find_lists", "pack", "ship"]

MAX_COPIED_BYTES: Final = 1_000_000_000  # there is a warning if all workers' copies together are larger
MIN_LIST_BYTES: Final = 1 << 20  # smaller lists of bytes are pickled, not shared
MAX_DEPTH: Final = 3  # the depth to which containers in the attributes of an object are searched
MAX_ENTRIES: Final = 1_000  # only this many entries of a container are searched
CANNOT_SHARE: Final = "workers on other machines cannot access it"
# The reducers of `multiprocessing` and torch that send shared memory. Their other reducers are for methods, sockets and
# tensors.
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
    """An object to send to other machines: its pickle and out-of-band buffers, as uint8 arrays, and the import path and
    command-line arguments of the program that sends it."""

    pickled: np.ndarray
    buffers: list[np.ndarray]
    path: list[str]
    argv: list[str]

    def import_path(self, path: list[str]) -> list[str]:
        """Return the import path for workers on this machine: the folders of the sender's path that exist here, then
        this process's `path`."""
        return list(dict.fromkeys([*filter(os.path.exists, self.path), *path]))


def pack(obj: Any) -> Parcel:
    """Pickle `obj` for workers on other machines.

    Raises:
        TypeError: a part of `obj` cannot be sent; the message names it.
    """
    pickled, buffers = _dump(obj, is_remote=True)
    parts = [np.frombuffer(part, np.uint8) for part in (pickled, *buffers)]
    path = [os.path.abspath(entry) for entry in import_path()]
    return Parcel(parts[0], parts[1:], path, [str(word) for word in sys.argv])


def ship(obj: Any, settings: dict[str, Any]) -> list[int]:
    """Write `obj`, or the contents of a `Parcel`, and the bootstrap's settings to a new memfd. Return its descriptor,
    followed by the descriptors of shared memory that `obj` refers to. Workers inherit all of these descriptors, and the
    caller closes them. If the caller defers signals, a ctrl-C can interrupt only the pickling, which may be slow, and
    leaves no descriptor open.

    Raises:
        TypeError: a part of `obj` cannot be sent; the message names it.
    """
    if isinstance(obj, Parcel):
        overrides = {"path": obj.import_path(settings["path"]), "argv": obj.argv}
        return [write_job(settings | overrides, obj.pickled.data, [part.data for part in obj.buffers])]

    with Inheritance() as inheritance:
        with signals_enabled():
            pickled, buffers = _dump(obj, inheritance.tracker_calls())
        fd = write_job(settings, pickled, buffers)
    return [fd, *inheritance.descriptors]


def copy_warning(job_fd: int, job: Any, workers: int) -> str:
    """Return a warning if the workers' copies of data that is not shared exceed a gigabyte in total; else ""."""
    copied_bytes = pickle_size(job_fd)
    if copied_bytes * workers <= MAX_COPIED_BYTES:
        return ""
    sizes = {}
    for name, value in getattr(getattr(job, "dataset", None), "__dict__", {}).items():
        with contextlib.suppress(TypeError):
            sizes[name] = len(_dump(value)[0]), type(value).__name__
    largest = max(sizes, key=lambda name: sizes[name][0], default=None)
    largest_text = (
        ""
        if largest is None
        else f", of which dataset.{largest} (a {sizes[largest][1]}) has {sizes[largest][0] / 1e6:,.0f} MB"
    )
    return (
        f"the pickled dataset has {copied_bytes / 1e6:,.0f} MB{largest_text}, and each of {workers} workers may end up "
        "with a copy. Store large data in NumPy arrays, tensors or lists of bytes, which all workers share, or read it "
        "from files in __getitem__; or use fewer workers"
    )


# -- pickling ---------------------------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """A pickler that sends memory as a part of a file, as shared memory, or out of band.

    Args:
        file: the file to which the pickle is written.
        on_buffer: called with each out-of-band buffer.
        is_remote: whether to pickle for workers on other machines. Shared memory is then refused, and a cache in memory
            is sent empty.
    """

    def __init__(self, file: Any, on_buffer: Callable[[pickle.PickleBuffer], Any], *, is_remote: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=on_buffer)
        self._is_remote = is_remote
        reducers: dict[type, Any] = ForkingPickler._extra_reducers  # pyright: ignore[reportAttributeAccessIssue]
        self._sharing: dict[type, Callable[[Any], Any]] = {
            cls: reducer for cls, reducer in reducers.items() if getattr(reducer, "__name__", "") in SHARING_REDUCERS
        }
        self._sharing[AuthenticationString] = _reduce_authkey
        if is_remote:
            self._sharing = dict.fromkeys(self._sharing, _refuse)
        elif (cache_file := sys.modules.get("gpuload.datasets.cache_file")) is not None:
            self._sharing[cache_file.CacheLocation] = _reduce_cache
        if (table := sys.modules.get("datasets.table")) is not None:
            self._sharing[table.MemoryMappedTable] = self._reduce_table

    def reducer_override(self, obj: Any) -> Any:
        reduced, torch = None, sys.modules.get("torch")
        if isinstance(obj, np.ndarray):
            reduced = self._reduce_memmap(obj) or self._reduce_array(obj)
        elif torch is not None and type(obj) is torch.Tensor and str(obj.device) == "cpu":
            reduced = self._reduce_tensor(torch, obj)
        elif (reducer := self._sharing.get(type(obj))) is not None and _is_shared(obj):
            reduced = reducer(obj)
        elif has_palette(obj):
            reduced = reduce_with_palette(obj)
        return super().reducer_override(obj) if reduced is None else reduced

    def _reduce_table(self, table: Any) -> Reduced:
        from gpuload.datasets import arrow_rows  # imports pyarrow

        return arrow_rows.reduce_mapped_table(table, self._mappings)

    def _reduce_memmap(self, array: np.ndarray) -> Reduced | None:
        """Reduce a memmap, or a view of a memmap, to (path, identity, offset, dtype, shape, strides), or to an array in
        memory if the file has been replaced or deleted. Return None for any other array.

        Raises:
            ValueError: the file has been replaced or deleted, and the array is too large to be sent instead.
        """
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
        path = str(file.filename)
        if (file_id := self._mappings.identify(path, _address(base))) is None:
            check_replaced_size(path, array.nbytes)
            return np.asarray(array, order="C").__reduce_ex__(5)  # pyright: ignore[reportReturnType]
        # The mapping begins at the allocation boundary before the memmap's offset; the view may begin anywhere in it.
        mapped_from = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY
        offset = array.__array_interface__["data"][0] - _address(base) + mapped_from
        return open_memmap, (path, file_id, offset, array.dtype.str, array.shape, array.strides)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Reduced | None:
        """Reduce a tensor to an array, which is contiguous unless it is in shared memory. Return None for tensors that
        torch pickles itself."""
        if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized or tensor.is_shared():
            return None
        bits, dtype = tensor, None
        if tensor.dtype == torch.bfloat16:
            bits, dtype = tensor.view(torch.int16), "bfloat16"
        with contextlib.suppress(TypeError, RuntimeError):
            bits = bits.resolve_conj().resolve_neg()
            bits = bits if self._find_shared(bits.data_ptr()) else bits.contiguous()
            return make_tensor, (bits.numpy(), dtype)
        return None

    def _reduce_array(self, array: np.ndarray) -> Reduced | None:
        """Reduce an array in shared memory to this memory and the array's offset in it; return None for other arrays.
        If a worker cannot map a tensor's memory, views of the tensor are copied: it may be part of a batch in the ring
        that the user still holds.

        Raises:
            TypeError: the array is in shared memory that a worker cannot map.
        """
        base: Any = array
        while isinstance(base, np.ndarray):
            if isinstance(base, np.memmap):
                return None  # `_reduce_memmap` has refused it
            base = base.base
        if isinstance(base, memoryview):
            base = base.obj
        owner, start, address = None, 0, array.__array_interface__["data"][0]
        if hasattr(base, "_wrapper"):  # a ctypes object that `multiprocessing` created
            owner, start = base, _address(base)
        elif (isinstance(base, mmap.mmap) or is_tensor(base)) and array.size:
            mapping = self._find_shared(address)
            if mapping is None:
                return None
            path, start = mapping.path, mapping.file_start
            if os.path.isfile(path):  # not a device: page-locked memory may be mapped from one
                owner = path, FileId.of(path)
            elif (arena := _find_arena(address)) is not None:
                owner, start = arena
            elif not is_tensor(base):
                raise TypeError(
                    f"this array is in a mapping that only forks share ({path or 'without a name'}), so a worker "
                    "cannot map it. Use an np.memmap, a multiprocessing.Array or a tensor after share_memory_()"
                )
        if owner is None:
            return None
        return (
            _refuse(array)
            if self._is_remote
            else (_make_view, (owner, address - start, array.dtype, array.shape, array.strides))
        )

    def _find_shared(self, address: int) -> MemoryMapping | None:
        """Return the shared, writable mapping that contains an address."""
        mapping = self._mappings.find(address)
        return mapping if mapping is not None and mapping.permissions.startswith("rw-s") else None

    @cached_property
    def _mappings(self) -> FileMappings:
        return FileMappings()


class _PicklerWithIds(_Pickler):
    """A pickler that replaces the objects in `ids`, which is keyed by `id`, with persistent ids. It is slower than
    `_Pickler`, since it calls a function for each object."""

    def __init__(self, ids: Mapping[int, Any], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ids = ids

    def persistent_id(self, obj: Any) -> Any:
        return self._ids.get(id(obj))


class _NullFile(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _dump(
    obj: Any, calls: Sequence[partial[Any]] = (), *, is_remote: bool = False
) -> tuple[memoryview, list[memoryview]]:
    """Pickle the settings of libraries, preceded by `calls`, and `obj`. Return the pickle and its out-of-band
    buffers."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    try:
        with pickle_by_value():
            settings = LibrarySettings.collect(lambda part: _pickling_error(part, {}, is_remote) is None)
            settings.calls[:0] = calls
            lists = find_lists(obj)
            pickler = partial(_PicklerWithIds, lists) if lists else _Pickler
            pickler(pickled, buffers.append, is_remote=is_remote).dump((settings, obj))
        return pickled.getbuffer(), [buffer.raw() for buffer in buffers]
    except Exception as error:
        raise TypeError(_refusal_message(obj, error, is_remote)) from error


def find_lists(obj: Any) -> dict[int, tuple[int, np.ndarray, np.ndarray]]:
    """Find the large lists of bytes in an object's attributes, and in nested containers and objects. Return, for each
    list, a new index and the arguments of its `SharedBytes`, keyed by the list's `id`."""
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


# -- shared memory ----------------------------------------------------------------------------------------------------


class Descriptor:
    """A descriptor with the same number in a worker as in this process. `multiprocessing` pickles it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        """Return the descriptor, which the caller owns from then on."""
        os.set_inheritable(self.fd, False)
        return self.fd


class Inheritance:
    """A context in which `multiprocessing` can pickle its shared objects. It collects the descriptors that workers have
    to inherit.

    Attributes:
        descriptors: the duplicates, which the caller closes; the context closes them if it ends with an error.
    """

    DupFd = Descriptor  # `multiprocessing` looks for this name

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(os.dup(fd))
        return self.descriptors[-1]

    def __enter__(self) -> Inheritance:
        self._previous_popen = get_spawning_popen()
        set_spawning_popen(self)  # pyright: ignore[reportArgumentType]
        return self

    def __exit__(self, error_type: type[BaseException] | None, *exc_info: object) -> None:
        set_spawning_popen(self._previous_popen)
        if error_type is not None:
            self.close()

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def tracker_calls(self) -> list[partial[Any]]:
        """Return the calls that make a worker use this process's resource tracker; empty if no tracker is running.

        The tracker is a process that unlinks shared memory once all processes that use this tracker have ended. If a
        worker had a separate tracker, the end of the worker would unlink memory that other processes still use.
        """
        module = sys.modules.get("multiprocessing.resource_tracker")
        fd = None if module is None else module._resource_tracker._fd
        return [] if fd is None else [partial(_adopt_tracker, self.duplicate_for_child(fd))]


def _refuse(obj: Any) -> NoReturn:
    name = type(obj).__name__
    raise TypeError(f"this {name} is, or refers to, memory that processes on this machine share; {CANNOT_SHARE}")


def _is_shared(obj: Any) -> bool:
    """Return whether an object, whose type has a reducer in `SHARING_REDUCERS`, is in shared memory."""
    if isinstance(obj, ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return hasattr(obj, "_wrapper")  # without a wrapper, its memory is private
    storage = getattr(obj, "_untyped_storage", obj)
    return type(storage).__name__ != "UntypedStorage" or (storage.device.type == "cpu" and storage.is_shared())


def _reduce_authkey(key: AuthenticationString) -> Reduced:
    return _set_authkey, (bytes(key),)


def _reduce_cache(location: Any) -> Reduced | None:
    """Reduce the `CacheLocation` of an in-memory cache to a descriptor; None for a cache in a folder."""
    if location.folder:
        return None
    fd = get_spawning_popen().duplicate_for_child(location.fd)  # pyright: ignore
    return type(location), (location.samples, location.limit_bytes, location.key, "", fd)


def _address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def _find_arena(address: int) -> tuple[Any, int] | None:
    """Return the `multiprocessing` arena that contains an address, such as the arena of an ``Array``, and the arena's
    first address; None if there is no such arena."""
    heap: Any = sys.modules.get("multiprocessing.heap")
    for arena in () if heap is None else heap.BufferWrapper._heap._arenas:
        start = _address(arena.buffer)
        if start <= address < start + arena.size:
            return arena, start
    return None


def _make_view(
    owner: Any, offset: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Return an array in shared memory. Runs in a worker."""
    if isinstance(owner, tuple):
        path, file_id = owner
        file_id.check(path)
        with open(path, "r+b") as file:
            owner = mmap.mmap(file.fileno(), 0)
    owner = getattr(owner, "buffer", owner)  # an arena has a buffer
    return np.ndarray(shape, dtype, owner, offset, strides)


def _set_authkey(key: bytes) -> bytes:
    """Set the authentication key of a manager, and return it. A worker needs the key for further proxies that it gets
    from the manager."""
    current_process().authkey = key
    return current_process().authkey


def _adopt_tracker(fd: int) -> None:
    from multiprocessing import resource_tracker

    tracker: Any = resource_tracker._resource_tracker  # pyright: ignore[reportAttributeAccessIssue]
    if tracker._fd is None:
        tracker._fd = Descriptor(fd).detach()


# -- the message for an object that cannot be sent --------------------------------------------------------------------


def _refusal_message(obj: Any, error: Exception, is_remote: bool) -> str:
    """Return the message for an object that cannot be sent: the part that fails, the reason, and the remedy."""
    path, culprit, error = _find_culprit(obj, error, is_remote)
    cls = type(culprit)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    description = f"{'an' if name.lstrip('_')[0] in 'aeiouAEIOU' else 'a'} {name}"
    remedy = _remedy_for(error) or (
        "Create locks, and open files and connections, in the worker when they are first used, not before"
    )
    return (
        f"{f'{path} ({description})' if path else description} cannot be sent to the worker processes: "
        f"{type(error).__name__}: {error}{'' if str(error).endswith('.') else '.'} {remedy}; or use num_workers=0"
    )


def _find_culprit(obj: Any, error: Exception, is_remote: bool) -> tuple[str, Any, Exception]:
    """Return the part of an object that cannot be sent: its path, such as ``dataset.reader``, the part, and its error.

    The pickler's error names a type ("cannot pickle '_thread.lock' object") but not the object's location. So each part
    of a job is pickled separately, and then each attribute of the first part that fails. References to the job or to
    this part are skipped, since they would make every attribute fail.
    """
    path, culprit, owners = "", obj, {}
    for _ in range(2):
        owners[id(culprit)] = "skipped"
        for name, value in _pickled_attributes(culprit).items():
            if (failure := _pickling_error(value, owners, is_remote)) is not None:
                path, culprit, error = f"{path}.{name}" if path else name, value, failure
                break
        else:
            break
    return path, culprit, error


def _pickling_error(obj: Any, skipped: Mapping[int, Any], is_remote: bool) -> Exception | None:
    """Return the error from pickling an object, or None; objects whose ids are in `skipped` are not pickled."""
    inheritance = Inheritance()
    try:
        with contextlib.nullcontext() if is_remote else inheritance:
            _PicklerWithIds(skipped, _NullFile(), lambda buffer: None, is_remote=is_remote).dump(obj)
    except Exception as error:
        return error
    finally:
        inheritance.close()
    return None


def _pickled_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object that are pickled; empty if the object is not pickled by its attributes."""
    try:
        _, _, state, *_ = obj.__reduce_ex__(5)
    except Exception:  # it has no such attributes, or cannot be pickled itself
        return {}
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # the class has __slots__
        state = {**(state[0] or {}), **state[1]}
    transforms = obj.chain.transforms if isinstance(obj, Job) else ()
    transform_attributes = {f"transforms[{index}]": transform for index, transform in enumerate(transforms)}
    return transform_attributes | state if isinstance(state, dict) else {}


def _remedy_for(error: BaseException) -> str | None:
    """Return the remedy if `multiprocessing` or `_refuse` refused to share an object; None for other errors."""
    if CANNOT_SHARE in str(error):
        return "Copy it to ordinary memory before you create the Loader"
    if "was replaced or deleted" in str(error):  # the error of `check_replaced_size`
        return "Open the file that is there now, before you create the Loader"
    if "through inheritance" in str(error):  # the error of `multiprocessing` for its locks and values
        return f"Processes on this machine share it; {CANNOT_SHARE}"
    if "fork context" in str(error):
        return (
            'A lock of multiprocessing\'s "fork" context exists only in forks of this process, and workers are not '
            'forks. Create the Value, Array, Lock, Event or Queue with multiprocessing.get_context("spawn"), '
            "or create a Value or Array with lock=False"
        )
    return None
