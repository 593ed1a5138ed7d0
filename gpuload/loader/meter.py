"""What a session counts, in all of its parts, and what that comes to: `Stats`. Runs in the main process.

Workers' counters come from their shared memory, all others from the main process's own objects. Nothing is locked and
nobody waits: any thread may ask, also while another is in ``next()``. Numbers that belong together may then differ by a
chunk or a batch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final

from gpuload.batches.assemble import Assembly
from gpuload.datasets.cache.dataset import Cached
from gpuload.datasets.resident import DeviceCached
from gpuload.datasets.stores.store import Store
from gpuload.decode.decoder import DECODERS
from gpuload.loader.advice import advice
from gpuload.loader.limits import Placement, usable_cpus
from gpuload.loader.options import Options
from gpuload.loader.stats import Counters, Part, Stats, WorkerStats
from gpuload.stage import Stage
from gpuload.stage.decode import ImageDecoder
from gpuload.workers.counters import FIELDS
from gpuload.workers.faults import ErrorLog
from gpuload.workers.feed import Feed

__all__ = ["Meter", "Span"]

# What workers do: name, and the counter of how often; "" counts the workers that did it.
WORK: Final = (
    ("start", ""),
    ("read", "samples"),
    ("header", "samples"),
    ("decode", "samples"),
    ("pack", "samples"),
    ("collate", "collated"),
    ("plan", "plans"),
    ("idle", "chunks"),
)
# Counters of the main process and of workers that `Stats` has as they are.
MAIN_COUNTS: Final = ("batches", "images", "errors", "cache_hits", "cache_misses", "ring_grown", "ring_spilled")
COUNTS: Final = ("bytes_read", "bytes_decoded", "restarts")

DEPTH: Final = 8  # how deep a `Cached` is looked for in datasets of datasets

_sessions = itertools.count()


@dataclass(frozen=True, slots=True)
class Span:
    """What a session did so far; it refers to nothing of the session, and outlives it.

    Attributes:
        begun, now: the counters as the last epoch began, and now.
        gauges: what is at this moment, by the names of `Stats`.
    """

    begun: Counters
    now: Counters
    gauges: dict[str, Any]

    def stats(self, since: Stats | None, epoch: int) -> Stats:
        """Return what the session did since its epoch began, or since an earlier snapshot; one of another session
        counts as the session's begin."""
        earlier = self.begun if since is None else since.totals
        if earlier is None or earlier.session != self.now.session:
            earlier = Counters(self.now.session)
        return _stats(self, self.now - earlier, epoch)


class Meter:
    """Counts what a session does; a context for the time within ``next()``.

    It is entered once for each ``next()``, and adds up in the thread that iterates.

    Args:
        options: the loader's.
        feed, assembly, transfer, decoder, errors: parts of the session, which count what they do.
        stage, placement: where batches go, and where workers and ring are.
        launched: the batches whose stages were launched.
        resident_bytes: what a `DeviceCached` keeps on the device; None if there is none.

    Attributes:
        waited_s: seconds that ``next()`` waited for workers (with ``num_workers=0``: that it did their work).
        held_s: seconds that it waited for the device, which is behind.
        next_s: the other seconds within ``next()``.
        first_s: of `waited_s`, those before the first batch of an epoch.
        batches, images: that the loop was given.
    """

    def __init__(
        self,
        options: Options,
        *,
        feed: Feed,
        assembly: Assembly,
        transfer: Any,
        decoder: ImageDecoder | None,
        errors: ErrorLog,
        stage: Stage,
        placement: Placement,
        launched: Sized,
        resident_bytes: int | None,
    ) -> None:
        self._options, self._stage, self._placement, self._errors = options, stage, placement, errors
        self._feed, self._assembly, self._transfer, self._decoder = feed, assembly, transfer, decoder
        self._launched, self._resident_bytes = launched, resident_bytes
        self._caches = [part for part in _datasets_in(options.order.dataset) if isinstance(part, Cached)]
        self._untried = _untried(options)
        self.waited_s = self.held_s = self.next_s = self.first_s = 0.0
        self.batches = self.images = 0
        self._epochs_s, self._begun_s = 0.0, 0.0  # of epochs that ended; when the present one began, 0.0: none has
        self._first = False
        self._entered = (0.0, 0.0, 0.0)
        self._session = next(_sessions)
        self._before = self._begun = Counters(self._session)
        self._before = self._now()  # what caches and this process counted before the session

    @property
    def time_s(self) -> float:
        """Seconds within epochs, up to now."""
        begun_s = self._begun_s
        return self._epochs_s + (perf_counter() - begun_s if begun_s else 0.0)

    def begin(self) -> None:
        """Begin an epoch."""
        self.end()
        self._begun = self._now()
        self._begun_s, self._first = perf_counter(), True

    def end(self) -> None:
        """End the epoch: what follows does not count. Idempotent."""
        if self._begun_s:
            self._epochs_s, self._begun_s = self.time_s, 0.0

    def given(self, images: int) -> None:
        """Count a batch that the loop gets."""
        self.batches += 1
        self.images += images
        self._first = False

    def __enter__(self) -> None:
        self._entered = perf_counter(), self._feed.engine.waited_s, self._transfer.held_s

    def __exit__(self, *exc_info: object) -> None:
        start, waited_s, held_s = self._entered
        waited_s, held_s = self._feed.engine.waited_s - waited_s, self._transfer.held_s - held_s
        self.waited_s += waited_s
        self.held_s += held_s
        self.next_s += perf_counter() - start - waited_s - held_s
        if self._first:
            self.first_s += waited_s

    def span(self) -> Span:
        """Return what the session did so far."""
        return Span(self._begun, self._now(), self._gauges())

    def _now(self) -> Counters:
        """Read all counters, from the begin of the session on."""
        engine, ring, assembly, times = self._feed.engine, self._feed.ring, self._assembly, self._transfer.times
        decoder, caches = self._decoder, [cache.statistics() for cache in self._caches]
        main = {
            "time_s": self.time_s,
            "waited_s": self.waited_s,
            "held_s": self.held_s,
            "next_s": self.next_s,
            "first_s": self.first_s,
            "batches": self.batches,
            "images": self.images,
            "copy_s": assembly.copy_s,
            "stage_s": assembly.stage_s,
            "collate_s": assembly.collate_s,
            "full_s": ring.full_s,
            "refused": ring.refused,
            "ring_grown": ring.made,
            "ring_spilled": ring.moved_out,
            "cpu_s": time.process_time(),
            "errors": self._errors.total,
            "cache_hits": sum(cache.hits for cache in caches) + getattr(engine, "hits", 0),
            "cache_misses": sum(cache.misses for cache in caches),
        }
        if times is not None:
            main |= {"timed": times.batches, "device_copy_s": times.copy_s, "device_stage_s": times.stage_s}
        if decoder is not None:
            main |= {"device_decode_s": decoder.seconds, "device_images": decoder.images}
        return (
            Counters(
                self._session,
                Counter(main),  # pyright: ignore[reportArgumentType]
                Counter({} if decoder is None else dict(decoder.counts)),
                Counter({} if decoder is None else dict(decoder.refused)),
                tuple(Counter(dict(zip(FIELDS, row, strict=True))) for row in engine.counted().tolist()),
            )
            - self._before
        )

    def _gauges(self) -> dict[str, Any]:
        feed, ring, transfer, options = self._feed, self._feed.ring, self._transfer, self._options
        batches, workers = feed.batches, feed.workers
        return {
            "chunks_ready": sum(batch.done_parts for batch in batches),
            "batches_ready": sum(not batch.open_parts for batch in batches) + len(self._launched),
            "ring_used_bytes": ring.used_bytes,
            "ring_bytes": ring.slot_bytes,
            "ring_limit_bytes": ring.ring_bytes,
            "ring_segments": ring.slots,
            "pinned_bytes": transfer.pinned_bytes,
            "pinning_refused": transfer.pinning_refused,
            "device": str(self._stage.device),
            "placement": self._placement.describe(workers),
            "num_workers": workers,
            "chunk_size": feed.chunk_size,
            "prefetch_factor": options.workers.prefetch if options.order.iterable else feed.ahead,
            "resident_bytes": self._resident_bytes or 0,
            "decode_peak_bytes": 0 if self._decoder is None else self._decoder.peak_bytes,
            "elsewhere": options.workers.workers is not None and self._resident_bytes is None,
            "untried": self._untried,
        }


def _datasets_in(dataset: Any, depth: int = DEPTH) -> Iterator[Any]:
    """Yield a dataset, and the datasets that it is made of."""
    yield dataset
    inner = vars(dataset) if depth and hasattr(dataset, "__dict__") else {}
    several = inner.get("datasets")
    for part in (inner.get("dataset"), *(several if isinstance(several, list | tuple) else ())):
        if part is not None:
            yield from _datasets_in(part, depth - 1)


def _untried(options: Options) -> tuple[str, ...]:
    """Return what the advice may name, as this loader could have it and has not: see `Stats.untried`."""
    order, dataset, untried = options.order, options.order.dataset, []
    parts = list(_datasets_in(dataset))
    # Samples that lie next to each other are read together where several are in a file, or the dataset says so.
    has_blocks = hasattr(type(dataset), "blocks") and not type(dataset).__module__.startswith("gpuload.")
    if order.planned and order.shuffle is True and (has_blocks or any(isinstance(part, Store) for part in parts)):
        untried.append("block")
    is_cached = any(isinstance(part, Cached | DeviceCached) for part in parts)
    if not order.iterable and not is_cached and not callable(getattr(dataset, "set_epoch", None)):  # as `Cached` allows
        untried.append("cache")
    if not options.workers.persistent_workers:
        untried.append("persistent")
    return tuple(untried)


def _stats(span: Span, counted: Counters, epoch: int) -> Stats:
    """Make the view of what was counted."""
    main, in_process = counted.main, not span.gauges["num_workers"]
    seconds = float(main["time_s"])
    rows = [_within_epochs(row, int(1e9 * seconds)) for row in counted.workers]
    sums = sum(rows, Counter())
    cpu_s = sums["cpu_ns"] / 1e9
    counts: dict[str, Any] = {name: int(main[name]) for name in MAIN_COUNTS} | {name: sums[name] for name in COUNTS}
    stats = Stats(
        epoch=epoch,
        seconds=seconds,
        images_per_s=main["images"] / seconds if seconds else 0.0,
        waiting=min(1.0, main["waited_s"] / seconds) if seconds else 0.0,
        next_ms=1e3 * main["next_s"] / main["batches"] if main["batches"] else 0.0,
        first_s=float(main["first_s"]),
        parts=(*_worker_parts(rows, sums, in_process=in_process), *_main_parts(main, in_process=in_process)),
        workers=() if in_process else tuple(_workers(rows, seconds, span.gauges["num_workers"])),
        decoders=dict(counted.decoded + Counter({name: sums[name] for name in DECODERS})),
        device_refused=dict(counted.refused),
        decoded_whole=sums["whole"],
        cpus=usable_cpus(),
        cpu_s=main["cpu_s"] + (0.0 if span.gauges["elsewhere"] else cpu_s),
        workers_cpu_s=cpu_s,
        workers_queued_s=sums["queued_ns"] / 1e9,
        totals=span.now,
        **counts,
        **span.gauges,
    )
    return replace(stats, advice=advice(stats))


def _within_epochs(row: Counter[str], time_ns: int) -> Counter[str]:
    """Return a worker's numbers without the time between epochs, in which workers start and are idle too."""
    left_ns = max(0, time_ns - row["busy_ns"])
    start_ns = min(row["start_ns"], left_ns)
    return Counter({**row, "start_ns": start_ns, "idle_ns": min(row["idle_ns"], left_ns - start_ns)})


def _worker_parts(rows: list[Counter[str]], sums: Counter[str], *, in_process: bool) -> Iterator[Part]:
    """Yield what workers, or the main process in their place, spent their time on."""
    for name, counter in WORK:
        time_ns = sums[f"{name}_ns"]
        if (time_ns or name in ("read", "decode")) and not (in_process and name == "idle"):
            count = sums[counter] if counter else sum(row["start_ns"] > 0 for row in rows)
            yield Part(name, "main" if in_process else "workers", time_ns / 1e9, count)


def _main_parts(main: Counter[str], *, in_process: bool) -> Iterator[Part]:
    """Yield what the main process and the device spent their time on."""
    batches, next_s = int(main["batches"]), main["next_s"]
    issued = {name: float(main[f"{name}_s"]) for name in ("copy", "stage", "collate")}
    decode_s = main["device_decode_s"]
    if not in_process:
        yield Part("wait", "main", float(main["waited_s"]), batches)
    if main["held_s"]:
        yield Part("hold", "main", main["held_s"], batches)
    if main["refused"]:
        yield Part("slot wait", "main", float(main["full_s"]), int(main["refused"]))
    if main["device_images"]:
        yield Part("device decode", "main", decode_s, int(main["device_images"]))
    for name, issuing_s in issued.items():
        yield Part(name, "main", issuing_s, batches)
    yield Part("rest", "main", max(0.0, next_s - decode_s - sum(issued.values())), batches)
    step_s = main["time_s"] - main["waited_s"] - main["held_s"] - next_s
    yield Part("step", "main", max(0.0, step_s), batches)
    if main["timed"]:
        for name in ("copy", "stage"):
            yield Part(name, "device", main[f"device_{name}_s"] / main["timed"] * batches, batches)


def _workers(rows: list[Counter[str]], seconds: float, count: int) -> Iterator[WorkerStats]:
    """Yield the workers that there are, and those that there were."""
    for number, row in enumerate(rows):
        if number < count or any(row[name] for name in ("busy_ns", "idle_ns", "start_ns", "restarts")):
            ready_ns = max(1e9 * seconds - row["start_ns"], 1)
            yield WorkerStats(number, min(1.0, row["busy_ns"] / ready_ns), row["samples"], row["restarts"])
