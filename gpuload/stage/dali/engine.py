"""DALI as a stage uses it: one evaluation context, made at the first call, with as many threads as torch has.

The context holds DALI's operators and its pool of threads, and ends with the `Engine`. Operators are cached by their
constant arguments, so what changes from batch to batch is always given as a batch, never as a number.

**On the CPU** operators run while they are called, and are done with their inputs when they return.

**On CUDA** they are issued on torch's current stream. If that is the legacy default stream, which DLPack cannot name
for certain, they are issued on a side stream of the engine, and each of the two waits for the other. DALI frees its
memory in the order of that stream, so nothing waits on the host. This part was written without a GPU at hand and has
not been run on one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from nvidia.dali import types as dali_types
from nvidia.dali.experimental import dynamic as ndd

__all__ = ["Engine", "evaluated", "ndd", "samples", "types"]

types: Any = dali_types  # made at run time, so that no type checker knows them


class Engine:
    """DALI on a device; used by one thread of the stage's process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self._device_and_context: tuple[ndd.Device, ndd.EvalContext] | None = None
        self._made_for: tuple[int, int] | None = None
        self._side: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run DALI's operators within this on the device, on torch's current stream there."""
        with self._stream() as stream:
            device, context = self._context(torch.get_num_threads(), stream)
            with device, context, ndd.EvalMode.sync_cpu:
                yield

    def _context(self, threads: int, stream: torch.cuda.Stream | None) -> tuple[ndd.Device, ndd.EvalContext]:
        made_for = (threads, 0 if stream is None else stream.cuda_stream)
        if self._device_and_context is None or self._made_for != made_for:
            if self.on_cpu:
                device = ndd.Device("cpu")
            else:
                number = self.device.index
                device = ndd.Device("gpu", torch.cuda.current_device() if number is None else number)
            with device:  # else DALI would make a context for the GPU if there is one
                context = ndd.EvalContext(num_threads=threads, device_id=device.device_id, cuda_stream=stream)
            self._device_and_context, self._made_for = (device, context), made_for
        return self._device_and_context

    @contextlib.contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        """The stream for DALI, which is torch's current one within this; None on the CPU."""
        if self.on_cpu:
            yield None
            return
        current = torch.cuda.current_stream(self.device)
        if current.cuda_stream != 0:
            yield current
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                yield self._side
        finally:
            # The inputs were allocated on the current stream, which may reuse their memory after this.
            current.wait_stream(self._side)


def evaluated(batch: ndd.Batch) -> ndd.Batch:
    """A batch that does not hold what it was made from.

    In DALI 2.4 a result holds the call that made it, which holds its inputs, and so on back to the stage's: the memory
    of a whole chain would be held up to its end.
    """
    return ndd.Batch(batch.evaluate()._storage)


def samples(batch: ndd.Batch) -> list[ndd.Tensor]:
    """The images of a batch one by one. Those of `Batch.tensors` and the batch would hold each other, and their memory
    would wait for the garbage collector."""
    storage = batch.evaluate()._storage
    return [ndd.Tensor(storage[row]) for row in range(len(storage))]
