"""The `Job` that every worker gets when it starts, in a memfd that the parent writes once and every worker maps.

Memory layout:

- the size of the header, u64;
- the header, marshalled: the settings that the bootstrap needs before it can import anything, and an (offset, size)
  pair for each part;
- the parts, from the next page on: the pickle, then each out-of-band buffer, aligned to 64 bytes. The offsets of the
  parts count from the start of this page;
- later changes to the dataset, one after another (`gpuload.workers.dataset_changes`).

Buffers are mapped private and writable, so workers share each page until one of them writes to it, and torch does not
warn about read-only arrays. `gpuload.workers.shipping` writes the pickle; this module has the functions that unpickling
calls in a worker.

The main process writes the memfd, and workers read it. Workers import this module, so it imports only the modules that
they need.
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

from gpuload.datasets.file_id import FileId
from gpuload.datasets.memory import memory_file
from gpuload.ring.ring import align

if TYPE_CHECKING:  # not needed in a worker: few workers plan batches, and workers that pack have no transforms
    from gpuload.decode import Decode
    from gpuload.order.spec import BatchSpec
    from gpuload.transforms import Chain
    from gpuload.transforms.program.fusing.plan import Fusing
    from gpuload.workers.protocol import Request

__all__ = [
    "Job",
    "SharedBytes",
    "append_changes",
    "make_tensor",
    "open_memmap",
    "pickle_size",
    "read_changes",
    "read_settings",
    "receive",
    "write_job",
]

_ALIGN = 64
# Methods of list that `SharedBytes` overrides, or that work without loading the contents.
LAZY_METHODS: Final = """
__class__ __class_getitem__ __delattr__ __dir__ __doc__ __getattribute__ __getitem__ __getstate__ __hash__ __init__
__init_subclass__ __iter__ __len__ __new__ __reduce__ __setattr__ __sizeof__ __subclasshook__
"""


@dataclass(frozen=True)
class Job:
    """The data and options that each worker gets when it starts.

    `is_unbatched` means batch_size=None: `collate_fn` gets single samples. `plain` means that nothing is applied to
    images, not even a module at the end of the chain, which is not sent to workers. `moves_pixels` means that the
    transforms move pixels. `epoch` is the number of the first epoch. `group` is the backend, rank and number of ranks
    of `torch.distributed` in the main process; None means that there is no process group. `fusing` makes the plans of
    batches; None means that workers make no plans. `device_share` is the share of the samples whose images are sent
    encoded, for a device to decode. `module_values` and `library_values` are described in `gpuload.workers.inherited`.
    """

    dataset: Any
    chain: Chain
    decode: Decode
    seed: int
    collate_fn: Callable[[Any], Any] | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    is_unbatched: bool = False
    plain: bool = False
    moves_pixels: bool = False
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    group: tuple[str, int, int] | None = None
    fusing: Fusing | None = None
    device_share: float = 0.0
    module_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    library_values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def chain_of(self, batch: Request | BatchSpec) -> Chain:
        """Return the chain with its arguments for a batch."""
        return self.chain.at(batch.epoch, batch.step, batch.size_hw, seed=self.seed)


def write_job(settings: dict[str, Any], pickled: memoryview, buffers: list[memoryview]) -> int:
    """Write a job to a new memfd. Return its descriptor, which the caller closes."""
    parts, spans, end = (pickled, *buffers), [], 0
    for part in parts:
        spans.append((end, len(part)))
        end = align(end + len(part), _ALIGN)
    header = marshal.dumps((settings, spans))
    start = align(8 + len(header), mmap.PAGESIZE)
    fd = memory_file("job", start + end)
    try:
        _write(fd, len(header).to_bytes(8, "little") + header, 0)
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


def read_settings(fd: int) -> dict[str, Any]:
    """Return the settings in a job's memfd."""
    return _read_header(fd)[0]


def _read_header(fd: int) -> tuple[dict[str, Any], list[tuple[int, int]], int]:
    """Return the settings, the span of each part, and the offset of the first part."""
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    settings, spans = marshal.loads(os.pread(fd, header_bytes, 8))  # the parent wrote this
    return settings, spans, align(8 + header_bytes, mmap.PAGESIZE)


def _spans(fd: int) -> list[tuple[int, int]]:
    """Return the offset and size of each part in a job's memfd; the first part is the pickle."""
    _, spans, start = _read_header(fd)
    return [(start + offset, nbytes) for offset, nbytes in spans]


def _changes_start(fd: int) -> int:
    offset, nbytes = _spans(fd)[-1]
    return align(offset + nbytes, _ALIGN)


def append_changes(fd: int, packed: bytes, start: int) -> None:
    """Append packed changes to a job's memfd, after `start` bytes of earlier changes."""
    _write(fd, packed, _changes_start(fd) + start)


def read_changes(fd: int, start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end` of the packed changes in a job's memfd."""
    return os.pread(fd, end - start, _changes_start(fd) + start)


def pickle_size(job_fd: int) -> int:
    """Return the size of the pickle in a job's memfd, which each worker copies."""
    return _spans(job_fd)[0][1]


def receive(fd: int) -> Any:
    """Return the object in a job's memfd; its large arrays are views of a private mapping of the memfd."""
    pickled, *buffers = _spans(fd)
    view = memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    file = io.BufferedReader(_PickleFile(fd, *pickled))
    # The parent wrote this: the user's own dataset object, never the contents of a data file.
    settings, obj = _Unpickler(file, buffers=[view[start : start + nbytes] for start, nbytes in buffers]).load()
    settings.apply()
    return obj


class _PickleFile(io.RawIOBase):
    """The pickle in a job's memfd, as a file. The pickle is not mapped, since it is read only once and would then count
    as the worker's memory. Workers share the descriptor and its file position, so reads use explicit offsets."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._offset, self._end = fd, start, start + nbytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        nbytes = os.preadv(self._fd, [memoryview(buffer)[: self._end - self._offset]], self._offset)
        self._offset += nbytes
        return nbytes


class _Unpickler(pickle.Unpickler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lists: dict[int, SharedBytes] = {}

    def persistent_load(self, pid: tuple[int, np.ndarray, np.ndarray]) -> SharedBytes:
        list_index, data, ends = pid
        if list_index not in self._lists:
            self._lists[list_index] = SharedBytes(data, ends)
        return self._lists[list_index]


def open_memmap(
    path: str, file_id: FileId, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Return an array that maps the part of a file to which an `np.memmap`, or a view of a memmap, refers.

    Raises:
        DecodeError: another file is at `path` now, or the file is smaller than it was.
    """
    file_id.check(path)
    numpy_dtype = np.dtype(dtype)
    extent = (
        numpy_dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    )
    if extent == 0:
        return np.empty(shape, numpy_dtype)
    flat = np.memmap(path, np.uint8, "c", offset, (extent,))
    return np.ndarray(shape, numpy_dtype, flat, 0, strides)


def make_tensor(array: np.ndarray, dtype: str | None) -> Any:
    """Return a tensor that shares an array's memory. If NumPy lacks the tensor's dtype, `dtype` is its name."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


class SharedBytes(list):
    """A list of bytes objects whose contents are in memory that all workers share.

    If a list of encoded images were pickled like any other object, each worker would have a copy. So the contents of
    the list go into the job's memfd as one array, and a worker gets this list, which copies an item out of the mapping
    when the item is read. Any operation other than reading items first turns this list into an ordinary list, with a
    copy of all contents.

    Args:
        data: uint8, the contents of all items, one after another.
        ends: int64, the end of each item in `data`.
    """

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        # C code that bypasses these methods raises an error: it finds a list of the right length, but of None.
        super().__init__([None] * len(ends))
        self._data: np.ndarray | None = data
        self._ends = ends

    def __getitem__(self, index: Any) -> Any:
        if self._data is None:
            return super().__getitem__(index)
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self._ends))[index]
        start = int(self._ends[i - 1]) if i else 0
        return self._data[start : int(self._ends[i])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def __radd__(self, other: list) -> list:
        return other + list(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        return list, (list(self),)

    def _load_contents(self) -> SharedBytes:
        if self._data is not None:
            super().__setitem__(slice(None), list(self))
            self._data = None
        return self


def _load_first(method: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SharedBytes, *args: Any, **options: Any) -> Any:
        args = tuple(value._load_contents() if isinstance(value, SharedBytes) else value for value in args)
        return method(self._load_contents(), *args, **options)

    return call


for _name in dir(list):
    if _name not in LAZY_METHODS.split() and _name not in vars(SharedBytes):
        setattr(SharedBytes, _name, _load_first(getattr(list, _name)))
