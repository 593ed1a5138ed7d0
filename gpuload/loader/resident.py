"""Reading a `DeviceCached`: every sample once, by the loader's workers, before the first batch.

Why before the first batch and not while the first epoch trains: files are read in their order, which disks and shards
like; what does not fit is refused before training begins, with figures projected from samples all over the data set,
and not in the middle of an epoch; and an epoch may begin anywhere, on any rank, with any sampler, since each batch is
made in the same way. The price is that the loop waits for one pass of decoding.

Runs in the main process, at the first `iter()` whose samples are not kept yet. Ring and workers of the pass end with
it. What was read belongs to the `DeviceCached`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from gpuload.datasets.kinds import draws_nothing
from gpuload.datasets.resident import DeviceCached, find_resident
from gpuload.errors import LimitError
from gpuload.loader import session_setup
from gpuload.loader.limits import available_bytes, memory_left_bytes
from gpuload.loader.options import Options
from gpuload.loader.session_setup import check_limits, engine_for, job_for, placement_for, resolve_device
from gpuload.order.spec import BatchSpec
from gpuload.ring.packing import ALIGN
from gpuload.ring.ring import Ring, align
from gpuload.stage import Plan, accelerator
from gpuload.stage.resident import PixelMemory
from gpuload.workers.batch import Batch
from gpuload.workers.box_fields import read_differently
from gpuload.workers.device_cache import CachedSamples
from gpuload.workers.faults import Faults
from gpuload.workers.feed import Feed
from gpuload.workers.job import Job
from gpuload.workers.signals import deferred_signals

__all__ = ["keep", "plan_for"]

logger = logging.getLogger("gpuload.loader")

PROBES = 64  # samples from which the size is projected; they are read twice
ROOM = 1.03  # more than the projection, for images of different sizes
CHUNK, CHUNKS_EACH, AHEAD = 16, 2, 2
PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a `DeviceCached` may take.

    Attributes:
        device: where its pixels go.
        limit: the `bytes_limit` that was given, or None.
        device_free, host_free: bytes that are free now; None: not known, which is no limit.
        samples: of the dataset.
    """

    device: torch.device
    limit: int | None
    device_free: int | None
    host_free: int | None
    samples: int

    @classmethod
    def of(cls, cached: DeviceCached, device: torch.device) -> Budget:
        host = available_bytes()
        free = host if device.type == "cpu" else accelerator.accelerator(device).free_bytes()
        return cls(device, cached.bytes_limit, free, host, len(cached))

    @property
    def pixels(self) -> int | None:
        """The most bytes of pixels."""
        if self.limit is None:
            return None if self.device_free is None else self.device_free // 2
        return self.limit if self.device_free is None else min(self.limit, self.device_free)

    def check(self, pixels: int, others: int, found: str) -> None:
        """Refuse what is too much: bytes on the device, and of all that is not pixels. `found` says how they were
        found."""
        cpu, limit = self.device.type == "cpu", self.limit
        if limit is not None and pixels + others > limit:
            self._refuse(pixels, others, found, f"bytes_limit={limit} allows {_mb(limit)}", "raise bytes_limit")
        share, whose = (1, "all") if limit is not None else (2, "half")
        for need, free, where in (
            (pixels + others if cpu else pixels, self.device_free, str(self.device)),
            (0 if cpu else others, self.host_free, "cpu"),
        ):
            if free is not None and need > free // share:
                left = f"{_mb(free)} are free on {where}" + (
                    "" if limit is not None else ", of which it takes at most half"
                )
                self._refuse(
                    pixels, others, found, left, "free some" if whose == "all" else "give bytes_limit for more"
                )

    def _refuse(self, pixels: int, others: int, found: str, left: str, do: str) -> None:
        raise LimitError(
            f"to keep the {self.samples:,} samples of a DeviceCached takes {_mb(pixels)} of pixels on {self.device} "
            f"and {_mb(others)} of other values on cpu ({found}), but {left}. If more can be had, {do}; else keep a "
            "part of the dataset, or smaller images (gpuload.pack resizes them), or use gpuload.Cached, which keeps "
            "files as they are and lets go of some"
        )


class Sizes:
    """Counts the pixels of samples, and keeps none."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, data: np.ndarray) -> int:
        self.nbytes += align(len(data), ALIGN)
        return 0


def find_kept(options: Options) -> tuple[DeviceCached, tuple[object, ...], CachedSamples | None] | None:
    """The `DeviceCached` of a loader, the key of how this loader reads it, and what is kept under that key, if it has
    been read; None if there is no `DeviceCached`."""
    cached = find_resident(options.order.dataset)
    if cached is None:
        return None
    job, device = job_for(options, 0), resolve_device(options.stage.device)
    seed = None if draws_nothing(cached.dataset) else job.seed
    kinds = job.plain, job.moves, job.collate_fn is None, job.decode, seed
    key = str(device), len(cached), *kinds, *read_differently(job.chain)
    return cached, key, cached.kept.get(key)


def keep(options: Options) -> CachedSamples | None:
    """All samples of the loader's `DeviceCached`, read if need be; None if it has none.

    Raises:
        LimitError: they do not fit.
        WorkerError: workers died too often.
    """
    found = find_kept(options)
    if found is None:
        return None
    cached, key, kept = found
    if kept is None:
        device = resolve_device(options.stage.device)
        kept = cached.kept[key] = _read(options, cached, device)
    return kept


def plan_for(options: Options) -> Plan:
    """Which backend runs which transform, and where samples come from."""
    plan, device, found = session_setup.plan_for(options), resolve_device(options.stage.device), find_kept(options)
    if found is None:
        return plan
    cached, _, kept = found
    if kept is None:
        return replace(plan, samples=f"{len(cached):,} will be kept on {device}, read at the first iter()")
    others = f", {_mb(kept.host_bytes)} on cpu" if kept.host_bytes else ""
    return replace(plan, samples=f"{len(cached):,} are kept on {device}: {_mb(kept.memory.nbytes)}{others}")


def _read(options: Options, cached: DeviceCached, device: torch.device) -> CachedSamples:
    """Read all samples: first some, for the size of all; then each, in order."""
    count, began = len(cached), perf_counter()
    budget = Budget.of(cached, device)
    kept = CachedSamples(count, memory := PixelMemory(device))
    with _feed(options, replace(job_for(options, 0, whole=True), dataset=cached.dataset), device) as feed:
        if count:
            probes = np.unique(np.linspace(0, count - 1, PROBES).astype(np.int64))
            sizes, different = CachedSamples(len(probes), Sizes()), set()
            for batch in _batches(feed, probes, 1):  # one by one, for the size of each
                before = sizes.memory.nbytes
                _take(batch, sizes, first=batch.spec.step)
                different.add(sizes.memory.nbytes - before)
                feed.release(batch)
            pixels, others = (nbytes * count // len(probes) for nbytes in (sizes.memory.nbytes, sizes.host_bytes))
            budget.check(pixels, others, f"by {len(probes)} of them")
            logger.info(
                "keeping %d samples: about %.1f MB on %s, %.1f MB besides", count, pixels / 1e6, device, others / 1e6
            )
            if len(different) == 1:
                memory.reserve(pixels)
            elif pixels:
                most = budget.pixels
                memory.reserve(int(pixels * ROOM) if most is None else min(int(pixels * ROOM), most))
        told = perf_counter()
        size = feed.chunk_size * CHUNKS_EACH * max(1, feed.workers)
        for batch in _batches(feed, np.arange(count), size):
            done = batch.spec.step * size
            budget.check(memory.used_bytes, kept.host_bytes, f"the first {done:,} of them alone")
            _take(batch, kept)
            feed.release(batch)
            if perf_counter() - told > PROGRESS_S:
                told = perf_counter()
                logger.info("keeping samples: %d of %d were read", done, count)
        del batch  # it views the ring
    kept.end()
    if device.type != "cpu":
        runtime = accelerator.accelerator(device)
        runtime.synchronize(runtime.current_stream())  # the transfer has another stream
    pixels_mb, failed = kept.memory.nbytes / 1e6, len(kept.errors)
    first = f"; {failed} failed, the first with {next(iter(kept.errors.values())).describe()}" if failed else ""
    seconds = perf_counter() - began
    logger.info("kept %d samples, %.1f MB on %s, in %.1f s%s", kept.count - failed, pixels_mb, device, seconds, first)
    return kept


@contextlib.contextmanager
def _feed(options: Options, job: Job, device: torch.device) -> Iterator[Feed]:
    """A feed with workers of its own, which end with it."""
    workers, placement = options.workers, placement_for(options, device)
    check_limits(options, device, workers.count)
    stack = contextlib.ExitStack()
    try:
        with deferred_signals():  # nothing is started and then forgotten
            ring = Ring(workers.ring_bytes, memory_left=memory_left_bytes, near=placement.cpus)
            stack.callback(ring.close)
            engine = engine_for(job, options, ring, workers.count, placement)
            stack.callback(engine.close)
        feed = Feed(
            engine,
            ring,
            chunk_size=CHUNK,
            ahead=AHEAD,
            workers=workers.count,
            # Samples that fail are kept as such, and are errors of the batches that have them.
            faults=Faults(on_error="skip", max_error_rate=1.0, max_restarts=workers.faults.max_restarts),
        )
        stack.callback(feed.abandon)  # its views of the ring would keep the memory
        yield feed
    finally:
        with deferred_signals():
            stack.close()


def _batches(feed: Feed, numbers: np.ndarray, size: int) -> Iterator[Batch]:
    """The batches of these samples."""
    starts = range(0, len(numbers), size)
    own = (numbers[start : start + size] for start in starts)
    feed.begin(BatchSpec(step, 0, part, part, may_be_dropped=True) for step, part in enumerate(own))
    feed.await_engine()
    while (batch := feed.take()) is not None:
        yield batch


def _take(batch: Batch, kept: CachedSamples, first: int | None = None) -> None:
    """Keep the samples of a batch, under their own numbers or from `first` on."""
    for part in batch.parts:
        if part.content is not None and part.content.rows and part.data is not None:
            numbers = part.indices if first is None else range(first, first + len(part.indices))
            kept.add(part.content, numbers, part.data)  # pyright: ignore[reportArgumentType]
    if first is None:
        for error in batch.errors:
            number: Any = error.index
            kept.errors[number] = error


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
