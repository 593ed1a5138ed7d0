"""DALI as a stage uses it: one evaluation context, made at the first call, with as many threads as torch has.

The context holds DALI's operators and its pool of threads; both go with the `Engine`. Operators are kept by their
constant arguments, so what changes from batch to batch is always given as a batch, never as a number.

**On the CPU** operators run while they are called, and are done with their inputs when they return.

**On CUDA** they are issued on torch's current stream, or, where that is the legacy default stream, which DLPack cannot
name for certain, on a stream of the engine's own that the current one waits for, and that waited for it. DALI frees its
memory in the order of that stream, so nothing waits on the host. This part was written without a GPU at hand and has
not been run on one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import types as dali_types
from nvidia.dali.experimental import dynamic as ndd

__all__ = ["Engine", "ndd", "numbers", "own", "samples", "types"]

types: Any = dali_types  # constants of operators; made at run time, so that no type checker knows them


class Engine:
    """DALI on a device; used by one thread of the stage's process.

    Args:
        device: a CPU or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._place: ndd.Device | None = None
        self._context: ndd.EvalContext | None = None
        self._made_for: tuple[int, int] | None = None
        self._side: torch.cuda.Stream | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether images are on the CPU."""
        return self.device.type == "cpu"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What is called within runs on the device, on torch's current stream there."""
        with self._stream() as stream:
            place, context = self._of(torch.get_num_threads(), stream)
            with place, context, ndd.EvalMode.sync_cpu:
                yield

    def _of(self, threads: int, stream: torch.cuda.Stream | None) -> tuple[ndd.Device, ndd.EvalContext]:
        made_for = (threads, 0 if stream is None else stream.cuda_stream)
        if self._place is None or self._context is None or self._made_for != made_for:
            if self.on_cpu:
                place = ndd.Device("cpu")
            else:
                place = ndd.Device(
                    "gpu", torch.cuda.current_device() if self.device.index is None else self.device.index
                )
            with place:  # on a machine with a GPU, DALI would make a context for that
                context = ndd.EvalContext(num_threads=threads, device_id=place.device_id, cuda_stream=stream)
            self._place, self._context, self._made_for = place, context, made_for
        return self._place, self._context

    @contextlib.contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        """The stream that DALI is to work on, torch's current one within; None on the CPU."""
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
            # All that was given was allocated on the current stream, which gets it back behind this.
            current.wait_stream(self._side)


def own(batch: ndd.Batch) -> ndd.Batch:
    """A batch without what it was made from.

    In DALI 2.4 a result holds the call that made it, which holds its inputs, and so on back to the stage's: the memory
    of a whole chain would be taken up to its end, and ColorJitter took twice the time and more, in page faults.
    """
    return ndd.Batch(batch.evaluate()._storage)


def samples(batch: ndd.Batch) -> list[ndd.Tensor]:
    """The images of a batch, each by itself; with `Batch.tensors` they and the batch would hold each other, and their
    memory would wait for the garbage collector."""
    storage = batch.evaluate()._storage
    return [ndd.Tensor(storage[row]) for row in range(len(storage))]


def numbers(values: np.ndarray, like: ndd.Batch) -> ndd.Batch:
    """One number, or array, for each image, on the device of a batch: for DALI's arithmetic."""
    made = ndd.as_batch(np.ascontiguousarray(values))
    return made if like.device.device_type == "cpu" else made.to_device(like.device)
