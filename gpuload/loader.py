"""`Loader`: the face of gpuload. Checks its arguments, wires the parts together, iterates.

Runs in the main process, in the thread that iterates; it starts no thread. The first `iter()` makes a *session*: the
ring, the worker processes, the transfer and the compiled stage, which last until `close()`, the Loader's garbage
collection or the interpreter's exit, whichever is first. An epoch's iterator holds no resources of its own.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from gpuload import rng
from gpuload.cpus import default_workers, usable_cpus
from gpuload.decode import Decode
from gpuload.order import Sequential, Shuffle
from gpuload.session import BatchInfo, Options, Session, compile_for
from gpuload.transforms import Chain
from gpuload.workers.feed import Batch
from gpuload.workers.pool import check_platform

__all__ = ["BatchInfo", "Loader"]

DEFAULT_RING_BYTES = 2 << 30
# Chunks of 32 cost 2% less CPU than chunks of 16, and 8% less than chunks of 8 (2 workers); a first batch comes sooner
# when each worker has a part of it.
LEAST_CHUNK, MOST_CHUNK = 8, 32
FIRST_ORDER_BLOCK = 4096
ORDER_BLOCK = 65536  # the shuffle is cheapest in large blocks


class Loader:
    """Iterate over a dataset in augmented batches that are on the device.

    Args:
        dataset: a map-style dataset: ``dataset[i]`` gives a sample, ``len(dataset)`` their number. A sample is a nested
            tuple, list or dict; its images may be `Encoded` (the fast way), `Image`, PIL images, or uint8 arrays.
        batch_size: samples in a batch.
        shuffle: a new order each epoch, a function of `seed` and the epoch's number.
        drop_last: leave out the last batch if it is smaller than `batch_size`.
        transforms: `gpuload.transforms`, in order; a `torch.nn.Module` may stand last and gets the whole batch.
        num_workers: processes that read and decode; 0: the same work in this process. Default: the CPUs that this
            process may use, less one for each rank of this machine, at least 1.
        prefetch_factor: batches in work beyond the one that is in use.
        device: where the batches shall be; default: CUDA's current device, or the CPU where there is none.
        dtype: of float images, ``"float32"``, ``"float16"`` or ``"bfloat16"``, or a torch dtype; default: what a
            `ToDtype` says, else float32. Without `Normalize` and `ToDtype` images stay uint8.
        memory_format: of image batches, ``"contiguous_format"`` or ``"channels_last"``, or torch's.
        ragged: what to do where the images of a batch end with different sizes: ``"error"``, ``"list"`` of tensors, or
            ``"pad"`` with zeros at the bottom and right, giving ``(images, sizes)`` with int64 (N, 2) heights and
            widths.
        seed: 0 ≤ seed < 2**64; the order and every random draw are a function of it.
        decode: a `Decode` with options of decoding.
        timeout: seconds after which a worker that is still at one sample is killed and restarted; 0: never.
        backend: what runs the transforms: ``"auto"`` or ``"torch"``.
        info: give ``(batch, BatchInfo)``.
        chunk_size: samples that a worker does at a time, at most; default: a worker's share of the batch, from 8 to 32.
            The batches do not depend on it.
        ring_bytes: the most shared memory for decoded pixels on their way; default 2 GiB.

    Raises:
        ValueError, TypeError: an argument is wrong; the message says what was expected.
        RuntimeError: worker processes cannot be started on this platform.

    While iterating: `SampleError` names a sample that could not be loaded, `CollateError` two samples that do not go
    into one batch, `WorkerError` says that workers cannot start or died too often.

    Example:
        >>> import numpy as np
        >>> from gpuload import transforms as T
        >>> pictures = [(np.full((40, 60, 3), i, np.uint8), i) for i in range(10)]
        >>> loader = Loader(pictures, batch_size=4, transforms=[T.CenterCrop(32)], num_workers=0, device="cpu")
        >>> [tuple(images.shape) for images, labels in loader]
        [(4, 3, 32, 32), (4, 3, 32, 32), (2, 3, 32, 32)]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        drop_last: bool = False,
        transforms: Sequence[Any] = (),
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        memory_format: str | torch.memory_format = "contiguous_format",
        ragged: Literal["error", "list", "pad"] = "error",
        seed: int = 0,
        decode: Decode | None = None,
        timeout: float = 0,
        backend: str = "auto",
        info: bool = False,
        chunk_size: int | None = None,
        ring_bytes: int = DEFAULT_RING_BYTES,
    ) -> None:
        for name in ("__getitem__", "__len__"):
            if not hasattr(dataset, name):
                raise TypeError(
                    f"the dataset must have {name} (a map-style dataset), got {type(dataset).__name__}; "
                    "iterable datasets are not supported"
                )
        batch_size = _integer("batch_size", batch_size, 1)
        prefetch_factor = _integer("prefetch_factor", prefetch_factor, 1)
        ring_bytes = _integer("ring_bytes", ring_bytes, 1)
        seed = _integer("seed", seed, 0, 2**64 - 1)
        cpus = usable_cpus()
        if num_workers is None:
            local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            num_workers = default_workers(cpus, local_ranks) if sys.platform == "linux" else 0
        num_workers = _integer("num_workers", num_workers, 0)
        if chunk_size is None:
            chunk_size = min(max(-(-batch_size // max(1, num_workers)), LEAST_CHUNK), MOST_CHUNK)
        chunk_size = _integer("chunk_size", chunk_size, 1, 4096)  # a request has to fit the socket
        if num_workers:
            check_platform()
        if not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
            raise ValueError(f"timeout must be seconds, 0 for none, got {timeout!r}")
        if decode is not None and not isinstance(decode, Decode):
            raise TypeError(f"decode must be a gpuload.Decode, got {type(decode).__name__}: {decode!r}")
        if device is not None:
            device = torch.device(device)
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
        self._options = Options(
            dataset=dataset,
            chain=transforms if isinstance(transforms, Chain) else Chain(transforms),
            batch_size=batch_size,
            num_workers=num_workers,
            cpu_threads=max(1, cpus - num_workers),
            prefetch_factor=prefetch_factor,
            device=device,
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            memory_format=str(memory_format).removeprefix("torch."),
            ragged=ragged,
            seed=seed,
            decode=decode or Decode(),
            timeout_s=float(timeout),
            backend=backend,
            chunk_size=chunk_size,
            ring_bytes=ring_bytes,
        )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.num_workers = num_workers
        self.info = bool(info)
        self._next_epoch = 0
        self._epoch = 0
        self._session: Session | None = None
        self._iterator: weakref.ref[_Epoch] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        # Compiled once more when the session starts; here only so that what is wrong is said now.
        compile_for(self._options, torch.device("cpu"))
        if len(self) == 0:
            length = len(dataset)
            raise ValueError(
                "the dataset is empty: len(dataset) is 0"
                if length == 0
                else f"drop_last=True leaves no batch: the dataset has {length} samples, batch_size is {batch_size}"
            )

    def __len__(self) -> int:
        """Batches in an epoch."""
        samples = len(self.dataset)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the last `iter()` began; before the first one, the number it will have."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Fix the number of the epoch that the next `iter()` begins.

        Raises:
            ValueError: `epoch` is negative.
        """
        epoch = self._next_epoch = _integer("epoch", epoch, 0, 2**63 - 1)
        if self._session is None:
            self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. An iterator of an earlier one that was not exhausted is over."""
        if self._session is not None:
            self._session.check_process()
            if self._session.engine.broken is not None:
                self.close()  # the last epoch ended with a WorkerError
        if self._session is None:
            self._session = Session(self._options)
            self._finalizer = weakref.finalize(self, self._session.close)
        previous = self._iterator() if self._iterator is not None else None
        if previous is not None:
            previous.end("a newer iter() of its Loader was started")
        self._epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        iterator = _Epoch(self, self._session, self._epoch, len(self))
        self._iterator = weakref.ref(iterator)
        return iterator

    def close(self) -> None:
        """End the worker processes and free the shared memory. The next `iter()` starts anew. Idempotent."""
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.end("its Loader was closed")
        self._iterator = None
        if self._finalizer is not None:
            self._finalizer()  # closes the session
        self._session = self._finalizer = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        options = self._options
        return (
            f"Loader({self.dataset!r}, batch_size={self.batch_size}, shuffle={self.shuffle}, "
            f"transforms={list(options.chain.transforms)!r}, num_workers={self.num_workers}, seed={options.seed})"
        )


class _Epoch(Iterator[Any]):
    """One pass over the dataset."""

    def __init__(self, loader: Loader, session: Session, epoch: int, steps: int) -> None:
        self._loader = loader  # keeps it, and with it the session, alive while the loop runs
        self._session = session
        self._ended: str | None = None
        self._left = steps
        session.feed.begin(_batches(loader, epoch))
        session.launched.clear()

    def __len__(self) -> int:
        """Batches that are still to come."""
        return self._left

    def __next__(self) -> Any:
        if self._ended is not None:
            if self._ended == "":
                raise StopIteration
            raise RuntimeError(f"this iterator is over: {self._ended}")
        result = self._session.next_batch(self._loader.info)
        if result is None:
            self._ended = ""
            raise StopIteration
        self._left -= 1
        return result[0]

    def end(self, reason: str) -> None:
        """Over, before its end; what is in work is dropped."""
        if self._ended is None:
            self._ended = reason
            self._session.drop_epoch()

    def __del__(self) -> None:
        if getattr(self, "_ended", "") is None:
            self._session.drop_epoch()


def _batches(loader: Loader, epoch: int) -> Iterator[Batch]:
    """The batches of an epoch: positions in order, and the indices that stand there."""
    samples = len(loader.dataset)
    total = len(loader) * loader.batch_size if loader.drop_last else samples
    order = Shuffle(samples, rng.epoch_key(loader._options.seed, epoch)) if loader.shuffle else Sequential(samples)
    block_start, block = 0, np.empty(0, np.int64)
    size = loader.batch_size
    for step, start in enumerate(range(0, total, size)):
        end = min(start + size, total)
        if end > block_start + len(block):
            wanted = max(size, FIRST_ORDER_BLOCK if step == 0 else ORDER_BLOCK)
            block_start, block = start, order(np.arange(start, min(start + wanted, total), dtype=np.int64))
        positions = np.arange(start, end, dtype=np.int64)
        yield Batch(step, epoch, positions, block[start - block_start : end - block_start])


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)
