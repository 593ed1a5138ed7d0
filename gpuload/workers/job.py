"""The `Job` that every worker gets when it starts, in a memfd that the parent writes once and every worker maps.

Memory layout:

- the length of the header, u64;
- the header, marshalled: the settings that the bootstrap needs before it can import anything, and an (offset, size)
  pair for each part;
- the parts, from the next page on: the pickle, then each out-of-band buffer, aligned to 64 bytes. Their offsets count
  from the start of that page.

Buffers are mapped private and writable: workers share each page until one of them writes to it, and torch does not warn
about read-only arrays. `gpuload.workers.shipping` writes the pickle; the functions that unpickling calls in a worker
are here.

The main process writes the memfd, and workers read it. Workers import this module, so it imports only what they need.
"""

from __future__ import annotations

import functools
import io
import marshal
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.datasets.memory import memory_file
from gpuload.ring.ring import align

if TYPE_CHECKING:  # not needed in a worker: few workers plan batches, and workers that pack have no transforms
    from gpuload.decode import Decode
    from gpuload.transforms import Chain
    from gpuload.transforms.program.fusing.plan import Fusing

__all__ = ["Job", "SharedBytes", "make_tensor", "open_memmap", "pickled_bytes", "receive", "write_job"]

_ALIGN = 64
# Methods of list that work without loading the contents, or that the class overrides.
LAZY_METHODS: Final = """
__class__ __class_getitem__ __delattr__ __dir__ __doc__ __getattribute__ __getitem__ __getstate__ __hash__ __init__
__init_subclass__ __iter__ __len__ __new__ __reduce__ __setattr__ __sizeof__ __subclasshook__
"""


@dataclass(frozen=True)
class Job:
    """The data and options that each worker gets when it starts.

    `single` means batch_size=None: `collate_fn` gets single samples. `plain` means that nothing is applied to images,
    not even a module (modules are not sent). `moves` means that the transforms move pixels. `epoch` is the number of
    the first epoch. `group` is the backend, rank and number of ranks of `torch.distributed` in the main process, or
    None. `fusing` makes the plans of batches; None means that workers make no plans. `whole` fills a cache: images are
    decoded completely, even if the chain crops them, and nothing is collated. `device_share` is the share of the
    samples whose images are sent encoded, for a device to decode. `module_values` is described in
    `gpuload.workers.inherited`.
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


def write_job(settings: dict[str, Any], pickled: memoryview, buffers: list[memoryview]) -> int:
    """Write a job to a new memfd, and return its descriptor, which the caller closes."""
    parts, spans, end = (pickled, *buffers), [], 0
    for part in parts:
        spans.append((end, len(part)))
        end = align(end + len(part), _ALIGN)
    head = marshal.dumps((settings, spans))
    start = align(8 + len(head), mmap.PAGESIZE)
    fd = memory_file("job", start + end)
    try:
        _write(fd, len(head).to_bytes(8, "little") + head, 0)
        for (offset, _), part in zip(spans, parts, strict=True):
            _write(fd, part, start + offset)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    remaining = memoryview(data).cast("B")
    while remaining:
        written = os.pwrite(fd, remaining[: 1 << 30], offset)
        remaining, offset = remaining[written:], offset + written


def _spans(fd: int) -> list[tuple[int, int]]:
    """Return the offset and size of each part in a job's memfd; the first part is the pickle."""
    head_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    start = align(8 + head_bytes, mmap.PAGESIZE)
    _, spans = marshal.loads(os.pread(fd, head_bytes, 8))  # the parent wrote this
    return [(start + offset, nbytes) for offset, nbytes in spans]


def pickled_bytes(job_fd: int) -> int:
    """Return the size of the pickle in a job's memfd, which each worker copies."""
    return _spans(job_fd)[0][1]


def receive(fd: int) -> Any:
    """Return the object in a job's memfd; its large arrays are views of a private mapping of the memfd."""
    pickled, *buffers = _spans(fd)
    view = memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    file = io.BufferedReader(_Pickled(fd, *pickled))
    # The parent wrote this: the user's own dataset object, never the contents of a data file.
    settings, obj = _Unpickler(file, buffers=[view[start : start + nbytes] for start, nbytes in buffers]).load()
    settings.apply()
    return obj


class _Pickled(io.RawIOBase):
    """The pickle in a job's memfd. It is not mapped, since it is read only once and would count as the worker's memory.
    Workers share the descriptor and its file position, so the pickle is read at explicit offsets."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._at, self._end = fd, start, start + nbytes

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


def open_memmap(path: str, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Map the part of a file behind an `np.memmap` or a view of a memmap."""
    kind = np.dtype(dtype)
    extent = kind.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if extent == 0:
        return np.empty(shape, kind)
    flat = np.memmap(path, np.uint8, "c", offset, (extent,))
    return np.ndarray(shape, kind, flat, 0, strides)


def make_tensor(array: np.ndarray, dtype: str | None) -> Any:
    """Return a tensor that shares an array's memory; `dtype` is the tensor's dtype if NumPy lacks it."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


class SharedBytes(list):
    """A list of bytes whose contents are in memory that all workers share.

    If a list of encoded images were pickled like any other object, each worker would have a copy. So its contents go
    into the job's memfd as one array, and a worker gets this list, which copies an item out of the mapping when code
    reads it. Any operation other than reading items first turns it into an ordinary list, with a copy of all contents.

    Args:
        data: uint8, all items one after another.
        ends: int64, the end of each item.
    """

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        # C code that bypasses these methods finds a list of the right length, but no bytes in it, and raises an error.
        super().__init__([None] * len(ends))
        self._data: np.ndarray | None = data
        self._ends = ends

    def __getitem__(self, index: Any) -> Any:
        if self._data is None:
            return super().__getitem__(index)
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self._ends))[index]
        start = int(self._ends[number - 1]) if number else 0
        return self._data[start : int(self._ends[number])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def __radd__(self, other: list) -> list:
        return other + list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)

    def _load(self) -> SharedBytes:
        if self._data is not None:
            super().__setitem__(slice(None), list(self))
            self._data = None
        return self


def _load_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SharedBytes, *args: Any, **options: Any) -> Any:
        args = tuple(value._load() if isinstance(value, SharedBytes) else value for value in args)
        return method(self._load(), *args, **options)

    return call


for _name in dir(list):
    if _name not in LAZY_METHODS.split() and _name not in vars(SharedBytes):
        setattr(SharedBytes, _name, _load_first(getattr(list, _name)))
