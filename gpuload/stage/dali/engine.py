"""DALI's evaluation context for a stage, created at the first call with as many threads as torch uses.

The context owns DALI's operators and its thread pool, and lives as long as the `DaliEngine`. DALI caches operators by
their constant arguments, so values that change from batch to batch are always passed as batches, never as constants.

**On the CPU**, operators run synchronously: when they return, their inputs are no longer needed.

**On CUDA**, operators are issued on torch's current stream. If that is the legacy default stream, which DLPack cannot
name unambiguously, they are issued on a side stream of the engine, and each of the two streams waits for the other.
DALI frees its memory in stream order, so the host never waits. The code for CUDA was written without access to a GPU,
and has not been run on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import types as dali_types
from nvidia.dali.experimental import dynamic as ndd

__all__ = ["DaliEngine", "apply_to", "evaluate", "ndd", "types"]

types: Any = dali_types  # the module's members are created at run time, so type checkers do not know them


class DaliEngine:
    """DALI's state for one device. Only one thread of the stage's process may use it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on_cpu = device.type == "cpu"
        self._device_and_context: tuple[ndd.Device, ndd.EvalContext] | None = None
        self._context_key: tuple[int, int] | None = None
        self._side_stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Make DALI run the operators in the ``with`` block on this device, on torch's current stream for it."""
        with self._use_stream() as stream:
            device, context = self._get_context(torch.get_num_threads(), stream)
            with device, context, ndd.EvalMode.sync_cpu:
                yield

    def _get_context(self, threads: int, stream: torch.cuda.Stream | None) -> tuple[ndd.Device, ndd.EvalContext]:
        context_key = (threads, 0 if stream is None else stream.cuda_stream)
        if self._device_and_context is None or self._context_key != context_key:
            if self.is_on_cpu:
                device = ndd.Device("cpu")
            else:
                index = self.device.index
                device = ndd.Device("gpu", torch.cuda.current_device() if index is None else index)
            with device:  # otherwise DALI would create a context for a GPU if the machine has one
                context = ndd.EvalContext(num_threads=threads, device_id=device.device_id, cuda_stream=stream)
            self._device_and_context, self._context_key = (device, context), context_key
        return self._device_and_context

    @contextlib.contextmanager
    def _use_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Yield the stream for DALI, which is torch's current stream within the ``with`` block; None on the CPU."""
        if self.is_on_cpu:
            yield None
            return
        current = torch.cuda.current_stream(self.device)
        if current.cuda_stream != 0:
            yield current
            return
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self.device)
        self._side_stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._side_stream):
                yield self._side_stream
        finally:
            # The inputs were allocated on the current stream, which can reuse their memory from here on.
            current.wait_stream(self._side_stream)


def evaluate(batch: ndd.Batch) -> ndd.Batch:
    """Evaluate a batch, and return it without references to its inputs.

    In DALI 2.4, a result references the call that produced it, and the call references its own inputs, and so on back
    to the stage's inputs. So the memory of all intermediate results would be kept until the end of the chain.
    """
    return ndd.Batch(batch.evaluate()._storage)


def apply_to(
    batch: ndd.Batch, rows: np.ndarray, where: np.ndarray, operator: Callable[..., ndd.Batch], *arrays: np.ndarray
) -> ndd.Batch:
    """Return a batch in which an operator has been applied to the images at ``rows[where]``, and all other images keep
    their memory. The operator gets a batch of these images, and their entries of `arrays`, which are (n, …), as `rows`
    and `where`. `rows` are ascending."""
    rows, parameters = rows[where], [array[where] for array in arrays]
    if not len(rows):
        return batch
    if len(rows) == batch.batch_size:
        return evaluate(operator(batch, *parameters))
    storage = batch.evaluate()._storage
    images, options = [storage[row] for row in range(len(storage))], {"layout": storage.layout(), "contiguous": False}
    chosen = ndd.Batch(type(storage)([images[row] for row in rows.tolist()], **options))
    results = evaluate(operator(chosen, *parameters))._storage
    for index, row in enumerate(rows.tolist()):
        images[row] = results[index]
    return ndd.Batch(type(storage)(images, **options))
