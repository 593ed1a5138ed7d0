"""Sending one object to all workers: a memfd that the parent writes once and every worker maps.

Memory layout: u64 length and marshalled settings (what the bootstrap needs before it can import anything); then, page
aligned, u64 count of spans, their (offset, bytes) as u64 pairs; the pickle, and each out-of-band buffer aligned to 64
bytes. Buffers are mapped privately and writable: workers share each page until one of them writes to it, and torch does
not warn of read-only arrays.

An `np.memmap` is sent as path and offset, never read; a CPU tensor as an array, out of band; what is in shared memory
as that memory (`shared`). Lambdas, and classes and functions of `__main__` or a notebook's cells, are sent by value
(cloudpickle).

Workers on other machines get the same, as a `Parcel`; but they cannot map what is in shared memory here.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.datasets.memory import memory_file
from gpuload.ring.ring import align
from gpuload.workers.bytes_list import SharedBytes, find_lists
from gpuload.workers.inherited import LibrarySettings, import_path, pickled_by_value

if TYPE_CHECKING:  # not imported: few workers plan batches, and those that pack have no transforms
    from gpuload.decode import Decode
    from gpuload.transforms import Chain
    from gpuload.transforms.program.fusing.plan import Fusing

__all__ = ["Job", "Parcel", "pack", "receive", "ship", "warning_of_copies"]

_ALIGN = 64
MAX_COPIED_BYTES = 1_000_000_000  # by all workers, without a warning


@dataclass(frozen=True)
class Job:
    """What each worker gets at its start.

    `single` is for batch_size=None: `collate_fn` gets single samples. `plain`: nothing is applied to images, not even a
    module, which is not sent. `moves`: what is applied moves pixels. `epoch` is the number of the first one, `group`
    what `torch.distributed` says in the main process: backend, rank and number of ranks, or None. `fusing` plans
    batches, if workers do that. `whole`: images are decoded whole, whatever the chain crops, and nothing is collated:
    they are to be kept. `device_share` of the samples' images are sent as they are, for a device to decode.
    `module_values`: see `gpuload.workers.inherited`.
    """

    dataset: Any
    chain: Chain
    decode: Decode
    seed: int
    collate_fn: Callable[[Any], Any] | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    single: bool = False
    plain: bool = False
    moves: bool = False
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    group: tuple[str, int, int] | None = None
    fusing: Fusing | None = None
    whole: bool = False
    device_share: float = 0.0
    module_values: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parcel:
    """An object that is sent to other machines: its pickle and its out-of-band buffers, uint8 arrays; and its program's
    import path and arguments."""

    pickled: np.ndarray
    buffers: list[np.ndarray]
    path: list[str]
    argv: list[str]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.pickled, *self.buffers))

    def import_path(self, own: list[str]) -> list[str]:
        """Where workers here find modules: the folders of the program that are on this machine too, and this process's
        `own`."""
        return list(dict.fromkeys([*filter(os.path.exists, self.path), *own]))


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
    from gpuload.workers.shared import Inheritance  # workers rarely need it

    if isinstance(obj, Parcel):
        theirs = {"path": obj.import_path(settings["path"]), "argv": obj.argv}
        return [_written(settings | theirs, obj.pickled.data, [part.data for part in obj.buffers])]

    with contextlib.ExitStack() as undo:
        inheritance = Inheritance()
        undo.callback(inheritance.close)
        with inheritance:
            pickled, buffers = _dump(obj, inheritance.tracker())
        fd = _written(settings, pickled, buffers)
        undo.pop_all()
    return [fd, *inheritance.descriptors]


def warning_of_copies(job_fd: int, job: Any, workers: int) -> str:
    """Return a warning if so many workers have more than a gigabyte of copies of what is not shared; else ""."""
    head_bytes = int.from_bytes(os.pread(job_fd, 8, 0), "little")
    pickled_bytes = int.from_bytes(os.pread(job_fd, 8, align(8 + head_bytes, mmap.PAGESIZE) + 16), "little")
    if pickled_bytes * workers <= MAX_COPIED_BYTES:
        return ""
    sizes = {}
    for name, value in getattr(getattr(job, "dataset", None), "__dict__", {}).items():
        with contextlib.suppress(TypeError):
            sizes[name] = len(_dump(value)[0]), type(value).__name__
    most = max(sizes, key=lambda name: sizes[name][0], default=None)
    which = "" if most is None else f", {sizes[most][0] / 1e6:,.0f} MB of it dataset.{most} (a {sizes[most][1]})"
    return (
        f"the pickled dataset has {pickled_bytes / 1e6:,.0f} MB{which}, and each of {workers} workers unpickles a "
        "copy. NumPy arrays, tensors and lists of bytes are shared by all workers: keep large data in these, or in "
        "files that are read in __getitem__; or use fewer workers"
    )


def _written(settings: dict[str, Any], pickled: memoryview, buffers: list[memoryview]) -> int:
    head = marshal.dumps(settings)
    start = align(8 + len(head), mmap.PAGESIZE)
    spans = []
    at = align(start + 8 + 16 * (1 + len(buffers)), _ALIGN)
    for part in (pickled, *buffers):
        spans.append((at, len(part)))
        at = align(at + len(part), _ALIGN)
    fd = memory_file("job", max(at, 1))
    try:
        _write(fd, len(head).to_bytes(8, "little") + head, 0)
        table = np.asarray([len(spans), *(number for span in spans for number in span)], np.uint64)
        _write(fd, table.tobytes(), start)
        for (offset, _), part in zip(spans, (pickled, *buffers), strict=True):
            _write(fd, part, offset)
    except BaseException:
        os.close(fd)
        raise
    return fd


def receive(fd: int) -> Any:
    """The object in a shipment; its large arrays are views of a private mapping of it."""
    head_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    start = align(8 + head_bytes, mmap.PAGESIZE)
    whole = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(whole)
    count = int.from_bytes(view[start : start + 8], "little")
    table = np.frombuffer(whole, np.uint64, 2 * count, start + 8).reshape(-1, 2).tolist()
    pickled, *buffers = ((offset, offset + length) for offset, length in table)
    file = io.BufferedReader(_Pickled(fd, *pickled))
    # The parent wrote this: the user's own dataset object, never anything that a data file holds.
    _, settings, obj = _Unpickler(file, buffers=[view[start:end] for start, end in buffers]).load()
    settings.apply()
    return obj


class _Pickled(io.RawIOBase):
    """The pickle in a job's memfd, which is not mapped: it is read once, and would be counted as the worker's memory.
    Workers share the descriptor, so it is read at offsets."""

    def __init__(self, fd: int, start: int, end: int) -> None:
        self._fd, self._at, self._end = fd, start, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        nbytes = os.preadv(self._fd, [memoryview(buffer)[: self._end - self._at]], self._at)
        self._at += nbytes
        return nbytes


class _Unpickler(pickle.Unpickler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lists: dict[int, SharedBytes] = {}

    def persistent_load(self, pid: tuple[int, np.ndarray, np.ndarray]) -> SharedBytes:
        number, data, ends = pid
        if number not in self._lists:
            self._lists[number] = SharedBytes(data, ends)
        return self._lists[number]


def _dump(obj: Any, tracker: Any = None, *, apart: bool = False) -> tuple[memoryview, list[memoryview]]:
    """Pickle what is needed first, and `obj`."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    pickler_class = _pickler_class(apart)

    def can_pickle(part: Any) -> bool:
        with contextlib.suppress(Exception):
            pickler_class(io.BytesIO(), protocol=5).dump(part)
            return True
        return False

    try:
        with pickled_by_value():
            first = tracker, LibrarySettings.here(can_pickle)
            if lists := find_lists(obj):
                pickler_class = _with_lists(pickler_class, lists)
            pickler_class(pickled, protocol=5, buffer_callback=buffers.append).dump((*first, obj))
        return pickled.getbuffer(), [buffer.raw() for buffer in buffers]
    except Exception as error:
        raise TypeError(_refusal(obj, error, apart)) from error


def _pickler_class(apart: bool) -> Any:
    """`apart`: for workers that share no memory with this process."""
    import cloudpickle

    from gpuload.workers.shared import Mappings, reduce_array, reducers, refusals, refuse

    shared, mappings = refusals() if apart else reducers(), Mappings()

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced, torch = None, sys.modules.get("torch")
            if isinstance(obj, np.ndarray):
                reduced = _reduce_memmap(obj)
                if reduced is None and (reduced := reduce_array(obj, mappings)) and apart:
                    refuse(obj)
            elif torch is not None and type(obj) is torch.Tensor and str(obj.device) == "cpu":
                reduced = _reduce_tensor(torch, obj, mappings)
            elif (reducer := shared.get(type(obj))) is not None:
                reduced = reducer(obj)
            return super().reducer_override(obj) if reduced is None else reduced

    return Pickler


def _with_lists(base: Any, lists: dict[int, tuple[int, np.ndarray, np.ndarray]]) -> Any:
    """Return a pickler that puts these lists of bytes out of band; it calls a function for each object."""

    class Pickler(base):
        def persistent_id(self, obj: Any) -> Any:
            return lists.get(id(obj)) if type(obj) is list else None

    return Pickler


def _refusal(obj: Any, error: Exception, apart: bool) -> str:
    """The message for an object that cannot be sent: which part of it, why, and what to do."""
    from gpuload.workers.shared import Inheritance, remedy_for  # workers never need them
    from gpuload.workers.unpicklable import find_culprit

    base = _pickler_class(apart)

    class Nowhere(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    def attempt(part: Any, without: Set[int]) -> Exception | None:
        class Pickler(base):
            def persistent_id(self, obj: Any) -> Any:
                return id(obj) if id(obj) in without else None

        try:
            with contextlib.nullcontext() if apart else Inheritance(trial=True):
                Pickler(Nowhere(), protocol=5, buffer_callback=lambda buffer: None).dump(part)
        except Exception as error:
            return error
        return None

    path, culprit, its_error = find_culprit(obj, attempt)
    error = its_error or error
    kind = type(culprit)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    thing = f"{'an' if name.lstrip('_')[0] in 'aeiouAEIOU' else 'a'} {name}"
    # A `Job` keeps the transforms in its chain.
    path = path.removeprefix(".").removeprefix("chain.")
    remedy = remedy_for(error) or (
        "Open files, locks, connections and the like when they are first used in the worker, not before"
    )
    return (
        f"{f'{path} ({thing})' if path else thing} cannot be sent to the worker processes: {type(error).__name__}: "
        f"{error}{'' if str(error).endswith('.') else '.'} {remedy}; or use num_workers=0"
    )


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        done = os.pwrite(fd, rest[: 1 << 30], offset)
        rest, offset = rest[done:], offset + done


def _reduce_memmap(array: np.ndarray) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A memmap, or a view of one, as (path, offset, dtype, shape, strides); None for any other array."""
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
    first = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    # The mapping begins at the granule below the memmap's offset; the view may begin anywhere in it.
    mapped_from = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY
    offset = array.__array_interface__["data"][0] - first + mapped_from
    return _open_memmap, (str(file.filename), offset, array.dtype.str, array.shape, array.strides)


def _open_memmap(path: str, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    kind = np.dtype(dtype)
    extent = kind.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if extent == 0:
        return np.empty(shape, kind)
    flat = np.memmap(path, np.uint8, "c", offset, (extent,))
    return np.ndarray(shape, kind, flat, 0, strides)


def _reduce_tensor(torch: Any, tensor: Any, mappings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A tensor as an array, contiguous unless it lies in shared memory."""
    if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized or tensor.is_shared():
        return None
    bits, dtype = tensor, None
    if tensor.dtype == torch.bfloat16:
        bits, dtype = tensor.view(torch.int16), "bfloat16"
    with contextlib.suppress(TypeError, RuntimeError):
        bits = bits.resolve_conj().resolve_neg()
        bits = bits if mappings.at(bits.data_ptr()) else bits.contiguous()
        return _make_tensor, (bits.numpy(), dtype)
    return None


def _make_tensor(array: np.ndarray, dtype: str | None) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))
