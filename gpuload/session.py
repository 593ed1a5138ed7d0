"""A session: everything of a `Loader` that lasts from its first `iter()` to `close()`.

It owns the ring, the engine (worker processes, or the main process itself), the transfer and the compiled stage, and
makes batches of what the feed gathers. Runs in the main process, in the thread that iterates; it starts no thread.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from gpuload import rng
from gpuload.backends import RaggedImages, compile_stage
from gpuload.batch import ImageColumn
from gpuload.collate import collate, common_structure
from gpuload.decode import Decode
from gpuload.errors import ErrorRecord, SampleError
from gpuload.ring import Ring
from gpuload.transfer import make_transfer
from gpuload.transforms import Chain
from gpuload.transforms.base import DrawError
from gpuload.workers.feed import Batch, Feed
from gpuload.workers.home import HomeEngine
from gpuload.workers.pool import WorkerPool
from gpuload.workers.runner import Job

__all__ = ["BatchInfo", "Options", "Session", "compile_for"]


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Where a batch stands, given beside it with ``info=True``.

    Attributes:
        epoch: the epoch's number.
        step: the batch's number in the epoch, from 0.
        positions: int64 (N,), the place of each sample in the epoch's order.
        indices: int64 (N,), its index in the dataset.
        valid: bool (N,), False for rows that only fill up a batch.
    """

    epoch: int
    step: int
    positions: torch.Tensor
    indices: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a session is built from, checked."""

    dataset: Any
    chain: Chain
    batch_size: int
    num_workers: int
    cpu_threads: int
    prefetch_factor: int
    device: Any
    dtype: str | None
    memory_format: str
    ragged: str
    seed: int
    decode: Decode
    timeout_s: float
    backend: str
    chunk_size: int
    ring_bytes: int


@dataclass(slots=True)
class _Launched:
    """A batch whose stage was issued: the value to give, or the error to raise instead."""

    value: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    ticket: Any = None
    error: Exception | None = None


class Session:
    """Everything that lasts from the first `iter()` to `close()`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        device = _resolve_device(options.device)
        self.stage = compile_for(options, device)
        self.launched: deque[_Launched] = deque()
        job = Job(options.dataset, options.chain, options.decode, options.seed)
        self.ring = Ring(options.ring_bytes)
        try:
            self.transfer = make_transfer(self.ring, device)
            self.engine = (
                WorkerPool(job, options.num_workers, self.ring, timeout_s=options.timeout_s)
                if options.num_workers
                else HomeEngine(job, self.ring)
            )
        except BaseException:
            self.ring.close()
            raise
        self.feed = Feed(
            self.engine,
            self.ring,
            chunk_size=min(options.chunk_size, options.batch_size),
            ahead=options.prefetch_factor if options.num_workers else 1,
            reclaim=self.transfer.reclaim,
        )
        self._pid = os.getpid()
        self._closed = False

    def next_batch(self, info: bool) -> tuple[Any] | None:
        """The next batch in a 1-tuple, or None at the end of the epoch."""
        self.check_process()
        if not self.launched:
            batch = self.feed.take()
            if batch is None:
                return None
            self.launched.append(self._launch(batch, info))
        if self.transfer.asynchronous and len(self.launched) == 1 and (coming := self.feed.take_if_ready()) is not None:
            # Its copies and its stage run while the consumer works on the current batch.
            self.launched.append(self._launch(coming, info))
        current = self.launched.popleft()
        if current.error is not None:
            raise current.error
        self.transfer.hand_over(current.ticket, current.tensors)
        return (current.value,)

    def check_process(self) -> None:
        """Refuse to go on in a child that was forked: ring and workers are its parent's."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this Loader was started in the process that this one was forked from, which its shared memory and "
                "workers belong to; make a new Loader in the child"
            )

    def drop_epoch(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            self.launched.clear()
            self.feed.abandon()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.launched.clear()
        with contextlib.ExitStack() as stack:  # the last first: nobody writes, nothing is copied, the memory goes
            stack.callback(self.ring.close)
            if os.getpid() == self._pid:
                stack.callback(self.transfer.close)
                stack.callback(self.engine.close)

    def _launch(self, batch: Batch, info: bool) -> _Launched:
        try:
            return self._issue(batch, info)
        except BaseException as error:
            self.transfer.finish()  # gives the slots back, once what was issued has ended
            if not batch.loaded:
                self.feed.release(batch)
            if not isinstance(error, Exception):
                raise
            return _Launched(error=error)  # raised when this batch is due, which may be after the current one

    def _issue(self, batch: Batch, info: bool) -> _Launched:
        contents = [part.content for part in batch.parts if part.content is not None]
        failed = [record for content in contents for _, record in content.errors]
        if failed:
            raise SampleError(min(failed, key=lambda record: record.position))
        indices = batch.indices
        sources = [source for content in contents for source in content.sources]

        def name(row: int) -> str:
            return f"sample {indices[row]}" + (f" ({sources[row]})" if sources[row] else "")

        structure, places = common_structure(
            [s for content in contents for s in _per_row(content.structures, content.rows)],
            [p for content in contents for p in _per_row(content.image_places, content.rows)],
            name,
        )
        values = [row for content in contents for row in content.values]
        tensors: list[torch.Tensor] = []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            tensor = self.transfer.place(tensor)
            tensors.append(tensor)
            return tensor

        def release() -> None:
            self.feed.release(batch)

        module = self.options.chain.module is not None  # its parameters may still be on their way
        with torch.inference_mode(False), self.transfer.stream(after_consumer=module):
            images = []
            if places:
                pixels, starts = self.transfer.load(batch, release)
                for number in range(len(places)):
                    columns = [content.images[number] for content in contents]
                    images.append(self._stage_images(batch, columns, pixels, starts, sources, name))
            else:
                release()  # all that was in the slots has been copied
            with torch.device("cpu"):  # whatever torch's default device is
                value = collate(structure, places, images, values, place, name)
                if info:
                    value = (value, self._info(batch, place))
            ticket = self.transfer.finish()
        tensors += [leaf for leaf in tree_leaves(images) if isinstance(leaf, torch.Tensor)]
        return _Launched(value, tensors, ticket)

    def _stage_images(
        self,
        batch: Batch,
        columns: list[ImageColumn],
        pixels: torch.Tensor,
        starts: list[int],
        sources: list[str | None],
        name: Callable[[int], str],
    ) -> Any:
        images = RaggedImages(
            pixels=pixels,
            offsets=np.concatenate([c.offsets + start for c, start in zip(columns, starts, strict=True)]),
            shapes=np.concatenate([c.shapes for c in columns]),
            sizes_hw=np.concatenate([c.sizes_hw for c in columns]),
            regions_tlhw=np.concatenate([c.regions_tlhw for c in columns]),
            labels=_Names(name, len(batch.positions)),
        )
        key = rng.epoch_key(self.options.seed, batch.epoch)
        try:
            draws = self.options.chain.draw(key, batch.positions, images.sizes_hw)
        except DrawError as error:  # of a transform that no worker looked at: it stands behind one of the whole image
            raise SampleError(
                ErrorRecord(
                    position=int(batch.positions[error.row]),
                    index=int(batch.indices[error.row]),  # pyright: ignore[reportArgumentType]
                    source=sources[error.row],
                    cause=f"{type(error).__name__}: {error}",
                    traceback="",
                )
            ) from None
        return self.stage(images, draws)

    def _info(self, batch: Batch, place: Any) -> BatchInfo:
        return BatchInfo(
            batch.epoch,
            batch.step,
            place(torch.from_numpy(batch.positions.copy())),
            place(torch.from_numpy(np.array(batch.indices, np.int64))),
            place(torch.ones(len(batch.positions), dtype=torch.bool)),
        )


class _Names(Sequence[str]):
    """How to name each image of a batch in an error, made up when one is asked for."""

    def __init__(self, name: Any, count: int) -> None:
        self._name = name
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        return self._name(row)


def _per_row(items: list[Any], rows: list[int]) -> list[Any]:
    """One entry a row, where a chunk's description has one for all."""
    return items * len(rows) if len(items) == 1 else items


def compile_for(options: Options, device: torch.device) -> Any:
    return compile_stage(
        options.chain,
        device=device,
        backend=options.backend,
        dtype=options.dtype,
        memory_format=options.memory_format,
        ragged=options.ragged,
        cpu_threads=options.cpu_threads,
    )


def _resolve_device(device: torch.device | None) -> torch.device:
    """None: CUDA's current device, by LOCAL_RANK where none was chosen, or the CPU. An index is always filled in."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device()
        local_rank = os.environ.get("LOCAL_RANK")
        if index == 0 and local_rank is not None:
            index = int(local_rank) % torch.cuda.device_count()
        device = torch.device("cuda", index)
    return device
