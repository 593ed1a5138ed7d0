"""Sending one object to all workers, once: a memfd that the parent writes and every worker maps.

Memory layout: u64 length and marshalled settings (what the bootstrap needs before it can import anything); then, page
aligned, u64 count of spans, their (offset, bytes) as u64 pairs; the pickle, and each out-of-band buffer aligned to 64
bytes. Buffers are mapped privately and writable: pages are shared between all workers until one is written to, and
torch does not warn of read-only arrays.

An `np.memmap` is sent as its path and place in the file, never read; a CPU tensor as an array, out of band. Classes and
functions of `__main__`, of a notebook's cells or written as lambdas are sent by value (cloudpickle).
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
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.decode import Decode
from gpuload.ring.ring import align
from gpuload.transforms import Chain

__all__ = ["Job", "receive", "ship"]

_ALIGN = 64


@dataclass(frozen=True)
class Job:
    """What a worker needs to know, once: sent to each at its start.

    `single` is for a batch_size of None: samples one by one, `collate_fn` gets one of them.
    """

    dataset: Any
    chain: Chain
    decode: Decode
    seed: int
    collate_fn: Callable[[Any], Any] | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    single: bool = False


def ship(obj: Any, settings: dict[str, Any]) -> int:
    """Write `obj` and the bootstrap's settings to a new memfd; returns its descriptor, which the caller closes.

    Raises:
        TypeError: something in `obj` cannot be sent; the message names what.
    """
    stream, buffers = _dump(obj)
    head = marshal.dumps(settings)
    start = align(8 + len(head), mmap.PAGESIZE)
    spans = []
    at = align(start + 8 + 16 * (1 + len(buffers)), _ALIGN)
    for part in (stream, *buffers):
        spans.append((at, len(part)))
        at = align(at + len(part), _ALIGN)
    fd = os.memfd_create("gpuload-job", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(at, 1))
        _write(fd, len(head).to_bytes(8, "little") + head, 0)
        table = np.asarray([len(spans), *(number for span in spans for number in span)], np.uint64)
        _write(fd, table.tobytes(), start)
        for (offset, _), part in zip(spans, (stream, *buffers), strict=True):
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
    parts = [view[offset : offset + length] for offset, length in table]
    # The parent wrote this: the user's own dataset object, never anything that a data file holds.
    return pickle.loads(parts[0], buffers=parts[1:])


def _dump(obj: Any) -> tuple[memoryview, list[memoryview]]:
    buffers: list[memoryview] = []

    def lay_aside(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    stream = io.BytesIO()
    try:
        _pickler_class()(stream, protocol=5, buffer_callback=lay_aside).dump(obj)
    except Exception as error:
        raise TypeError(_refusal(obj, error)) from error
    return stream.getbuffer(), buffers


def _pickler_class() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, np.ndarray):
                reduced = _reduce_memmap(obj)
                if reduced is not None:
                    return reduced
            torch: Any = sys.modules.get("torch")
            if torch is not None and type(obj) is torch.Tensor and str(obj.device) == "cpu":
                reduced = _reduce_tensor(torch, obj)
                if reduced is not None:
                    return reduced
            return super().reducer_override(obj)

    return Pickler


def _refusal(obj: Any, error: Exception) -> str:
    """What to say of an object that could not be sent: which part of it, why, and what to do."""
    from gpuload.workers.unpicklable import find_culprit  # workers never need it

    base = _pickler_class()

    class Nowhere(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    def attempt(part: Any, without: Set[int]) -> Exception | None:
        class Pickler(base):
            def persistent_id(self, obj: Any) -> Any:
                return id(obj) if id(obj) in without else None

        try:
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
    return (
        f"{f'{path} ({thing})' if path else thing} cannot be sent to the worker processes: {type(error).__name__}: "
        f"{error}. Open files, locks, connections and the like when they are first used in the worker, not before; "
        "or use num_workers=0"
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
    # The mapping begins at the granule below the memmap's own offset; the view may begin anywhere in it.
    mapped_from = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY
    place = array.__array_interface__["data"][0] - first + mapped_from
    return _open_memmap, (str(file.filename), place, array.dtype.str, array.shape, array.strides)


def _open_memmap(path: str, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    kind = np.dtype(dtype)
    extent = kind.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if extent == 0:
        return np.empty(shape, kind)
    flat = np.memmap(path, np.uint8, "c", offset, (extent,))
    return np.ndarray(shape, kind, flat, 0, strides)


def _reduce_tensor(torch: Any, tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized:
        return None
    bits, dtype = tensor, None
    if tensor.dtype == torch.bfloat16:
        bits, dtype = tensor.view(torch.int16), "bfloat16"
    with contextlib.suppress(TypeError, RuntimeError):
        return _make_tensor, (bits.resolve_conj().resolve_neg().contiguous().numpy(), dtype)
    return None


def _make_tensor(array: np.ndarray, dtype: str | None) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))
