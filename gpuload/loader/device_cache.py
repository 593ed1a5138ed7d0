"""Filling a `DeviceCached`: the loader's workers read every sample once, before the first batch.

Samples are read before the first batch, not during the first epoch, for three reasons. Files are read in order, which
is faster on disks and in shards. A dataset that does not fit is rejected before training begins, based on probes from
the entire dataset, instead of in the middle of an epoch. And an epoch can begin anywhere, on any rank, with any
sampler, since all batches are made in the same way. The price is that the loop waits for one decoding pass.

This module runs in the main process, at the first `iter()` whose samples are not cached yet. The pass has its own ring
and workers, which end with it. The cached samples belong to the `DeviceCached`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from gpuload.datasets.kinds import is_deterministic
from gpuload.datasets.resident import DeviceCached
from gpuload.errors import LimitError
from gpuload.loader import log
from gpuload.loader.limits import available_bytes, memory_left_bytes
from gpuload.loader.options import Options
from gpuload.loader.session import engine_for, job_for
from gpuload.order.spec import BatchSpec
from gpuload.ring.ring import Ring
from gpuload.stage import device as devices
from gpuload.stage.device_cache import PixelMemory
from gpuload.workers.batch import Batch
from gpuload.workers.box_fields import flattening_key
from gpuload.workers.device_cache import CachedSamples
from gpuload.workers.faults import Faults
from gpuload.workers.feed import Feed
from gpuload.workers.signals import deferred_signals

__all__ = ["describe_cache", "load_cached_samples"]

PROBES = 64  # samples used to estimate the total size; they are read twice
HEADROOM = 1.03  # allocate more than the estimate if image sizes differ
CHUNK, CHUNKS_PER_WORKER, AHEAD = 16, 2, 2
PROGRESS_S = 10.0
DEFAULT_LIMIT_TEXTS = ", of which it uses at most half", "set bytes_limit to use more"


def load_cached_samples(options: Options) -> CachedSamples | None:
    """Return all samples of the loader's `DeviceCached`, reading them if necessary; None if the
    dataset has no `DeviceCached`.

    Raises:
        LimitError: the samples do not fit into memory.
        WorkerError: workers died too often.
    """
    if (device_cached := options.device_cached) is None:
        return None
    device = options.resolve_device()
    key = _cache_key(options, device_cached, device)
    if key not in device_cached.cached_data:
        device_cached.cached_data[key] = _read_samples(options, device_cached, device)
    return device_cached.cached_data[key]


def describe_cache(options: Options) -> str | None:
    """Describe where the samples of the loader's `DeviceCached` are; None if the dataset has no `DeviceCached`."""
    if (device_cached := options.device_cached) is None:
        return None
    device = options.resolve_device()
    samples = device_cached.cached_data.get(_cache_key(options, device_cached, device))
    if samples is None:
        return f"{len(device_cached):,} will be cached on {device} at the first iter()"
    on_cpu = f", {_mb(samples.host_bytes)} on cpu" if samples.host_bytes else ""
    return f"{len(device_cached):,} are cached on {device}: {_mb(samples.memory.nbytes)}{on_cpu}"


def _cache_key(options: Options, device_cached: DeviceCached, device: torch.device) -> tuple[object, ...]:
    """Return a key for how the loader reads samples; loaders with the same key share the cache."""
    chain = options.chain
    seed = None if is_deterministic(device_cached.dataset) else options.order.seed
    collates = options.batches.collate_fn is not None
    settings = options.is_plain, chain.moves_pixels, collates, options.workers.decode, seed
    return str(device), len(device_cached), *settings, *flattening_key(chain)


class Budget:
    """The memory that a `DeviceCached` may use: at most `bytes_limit`, or half of the initially free memory.

    Args:
        device_cached: the dataset.
        device: the device for pixels; all other values are stored on the CPU.
    """

    def __init__(self, device_cached: DeviceCached, device: torch.device) -> None:
        limit, self.samples, self.device = device_cached.bytes_limit, len(device_cached), device
        # Bytes, whether the limit applies to pixels, whether it applies to other values, the reason, and a remedy.
        self._limits: list[tuple[int, bool, bool, str, str]] = []
        if limit is not None:
            self._limits.append((limit, True, True, f"bytes_limit={limit} allows {_mb(limit)}", "raise bytes_limit"))
        usage_note, remedy = DEFAULT_LIMIT_TEXTS if limit is None else ("", "free some memory")
        free_bytes = {"cpu": available_bytes()}
        if device.type != "cpu":
            free_bytes[str(device)] = devices.Accelerator(device).free_bytes()
        for device_name, nbytes in free_bytes.items():
            if nbytes is not None:  # None means unknown, so there is no limit
                allowed_bytes, reason = (
                    nbytes // 2 if usage_note else nbytes,
                    f"{_mb(nbytes)} are free on {device_name}{usage_note}",
                )
                self._limits.append((allowed_bytes, device_name == str(device), device_name == "cpu", reason, remedy))

    def add_headroom(self, pixel_bytes: int) -> int:
        """Return the estimated bytes of pixels plus some headroom, up to the limits."""
        return min(
            [
                int(pixel_bytes * HEADROOM),
                *(allowed_bytes for allowed_bytes, limits_pixels, *_ in self._limits if limits_pixels),
            ]
        )

    def check(self, pixel_bytes: int, other_bytes: int, basis: str) -> None:
        """Raise a LimitError if this many bytes of pixels and of other values exceed a limit. `basis` says, in the
        message, how the two figures were obtained."""
        for allowed_bytes, limits_pixels, limits_others, reason, remedy in self._limits:
            if pixel_bytes * limits_pixels + other_bytes * limits_others > allowed_bytes:
                raise LimitError(
                    f"caching the {self.samples:,} samples of a DeviceCached takes {_mb(pixel_bytes)} of pixels on "
                    f"{self.device} and {_mb(other_bytes)} of other values on cpu ({basis}), but {reason}. If "
                    f"possible, {remedy}; otherwise cache a part of the dataset, or smaller images (gpuload.pack "
                    "resizes them), or use gpuload.Cached, which stores encoded files and evicts some when it is full"
                )


def _read_samples(options: Options, device_cached: DeviceCached, device: torch.device) -> CachedSamples:
    """Read a few samples to estimate the total size, then all samples in order."""
    count, began_s = len(device_cached), perf_counter()
    budget = Budget(device_cached, device)
    samples = CachedSamples(count, memory := PixelMemory(device))
    with _open_feed(options, device_cached, device) as feed:
        if count:
            memory.reserve(_estimate_pixel_bytes(feed, budget))
        logged_s = perf_counter()
        size = feed.chunk_size * CHUNKS_PER_WORKER * max(1, feed.workers)
        for batch in _read_batches(feed, np.arange(count), size):
            read_count = batch.spec.step * size
            budget.check(memory.used_bytes, samples.host_bytes, f"for only the first {read_count:,} samples")
            _cache_batch(batch, samples)
            samples.errors |= {error.index: error for error in batch.errors}
            feed.release(batch)
            if perf_counter() - logged_s > PROGRESS_S:
                logged_s = perf_counter()
                log.report_cache_progress(read_count, count)
        del batch  # its arrays are views of the ring
    samples.finish()
    if device.type != "cpu":
        runtime = devices.Accelerator(device)
        runtime.synchronize(runtime.current_stream())  # the transfer uses a different stream
    log.report_filled_cache(samples, device, perf_counter() - began_s)
    return samples


def _estimate_pixel_bytes(feed: Feed, budget: Budget) -> int:
    """Estimate the bytes to reserve for all pixels from a few samples; raise a LimitError if the samples do not fit."""
    indices = np.unique(np.linspace(0, budget.samples - 1, PROBES).astype(np.int64))
    probes = CachedSamples(budget.samples, memory := PixelMemory(torch.device("meta")))  # counts bytes, stores none
    ends = [0]
    for batch in _read_batches(feed, indices, 1):  # one at a time, to measure each sample's size
        _cache_batch(batch, probes)
        ends.append(memory.used_bytes)
        feed.release(batch)
    pixel_bytes, other_bytes = (nbytes * budget.samples // len(indices) for nbytes in (ends[-1], probes.host_bytes))
    budget.check(pixel_bytes, other_bytes, f"estimated from {len(indices)} samples")
    log.report_cache_start(budget.samples, pixel_bytes, other_bytes, budget.device)
    if len(set(np.diff(ends))) == 1:
        return pixel_bytes
    return budget.add_headroom(pixel_bytes)


@contextlib.contextmanager
def _open_feed(options: Options, device_cached: DeviceCached, device: torch.device) -> Iterator[Feed]:
    """Yield a feed with its own workers, which end at the end of the context."""
    job = replace(job_for(options, 0, decodes_full_images=True), dataset=device_cached.dataset)
    workers, placement = options.workers, options.find_placement(device)
    options.check_limits(device, workers.count, 0)
    stack = contextlib.ExitStack()
    try:
        with deferred_signals():  # a signal in between would leak the ring or the workers
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
            # Failed samples are cached as failures, and raise or warn in the batches that contain them.
            faults=Faults(on_error="skip", max_error_rate=1.0, max_restarts=workers.faults.max_restarts),
        )
        stack.callback(feed.abandon)  # the feed's views would keep the ring's memory alive
        yield feed
    finally:
        with deferred_signals():
            stack.close()


def _read_batches(feed: Feed, indices: np.ndarray, size: int) -> Iterator[Batch]:
    """Read the samples with these indices, and yield them in batches of `size`."""
    parts = (indices[start : start + size] for start in range(0, len(indices), size))
    feed.begin(BatchSpec(step, 0, part, part, may_be_dropped=True) for step, part in enumerate(parts))
    feed.await_engine()
    while (batch := feed.take()) is not None:
        yield batch


def _cache_batch(batch: Batch, samples: CachedSamples) -> None:
    """Cache the samples of a batch that were read successfully."""
    for part in batch.parts:
        if part.content is not None and part.content.rows and part.data is not None:
            samples.add(part.content, part.indices, part.data)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
