"""Collecting the counters of a session, and computing `Stats` from them. This module runs in the main process.

The workers' counters are read from shared memory, all others from objects of the main process. Reading takes no lock
and never blocks: any thread can read, even while another is in ``next()``. Related numbers can then differ by a chunk
or a batch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import KW_ONLY, dataclass, replace
from time import perf_counter
from typing import Any, Final, Literal

import numpy as np

from gpuload.batches.assemble import Assembly
from gpuload.datasets.cached import Cached
from gpuload.datasets.joined import walk_datasets
from gpuload.datasets.stores.store import Store
from gpuload.decode.decoder import DECODERS
from gpuload.loader.advice import advice
from gpuload.loader.limits import Placement, usable_cpus
from gpuload.loader.options import Options
from gpuload.loader.stats import Counters, Part, Stats, WorkerStats
from gpuload.stage import Stage
from gpuload.stage.decode import ImageDecoder
from gpuload.workers.counters import FIELDS, field_indices
from gpuload.workers.faults import ErrorLog
from gpuload.workers.feed import Feed

__all__ = ["Meter", "Span"]

# The parts of the work: name, location, the counter of its time, the counter of its runs, and a counter that must not
# be 0 for the part to be listed ("" means that it is always listed).
PARTS: Final[tuple[tuple[str, Literal["workers", "main", "device"], str, str, str], ...]] = (
    ("start", "workers", "start_ns", "started", "start_ns"),
    ("read", "workers", "read_ns", "samples", ""),
    ("header", "workers", "header_ns", "samples", "header_ns"),
    ("decode", "workers", "decode_ns", "samples", ""),
    ("pack", "workers", "pack_ns", "samples", "pack_ns"),
    ("collate", "workers", "collate_ns", "collated", "collate_ns"),
    ("plan", "workers", "plan_ns", "plans", "plan_ns"),
    ("idle", "workers", "idle_ns", "chunks", "idle_ns"),
    ("wait", "main", "waited_s", "batches", ""),
    ("hold", "main", "held_s", "batches", "held_s"),
    ("slot wait", "main", "full_s", "refused", "refused"),
    ("device decode", "main", "device_decode_s", "device_images", "device_images"),
    ("copy", "main", "copy_s", "batches", ""),
    ("stage", "main", "stage_s", "batches", ""),
    ("collate", "main", "collate_s", "batches", ""),
    ("rest", "main", "rest_s", "batches", ""),
    ("step", "main", "step_s", "batches", ""),
    ("copy", "device", "device_copy_s", "batches", "timed"),
    ("stage", "device", "device_stage_s", "batches", "timed"),
)
WAITS: Final = ("wait", "idle")  # parts that do not exist if one process does all the work
# Counters that `Stats` contains unchanged.
COUNTS: Final = (
    "batches", "images", "errors", "cache_hits", "cache_misses", "ring_grown", "ring_spilled", "bytes_read",
    "bytes_decoded", "restarts",
)  # fmt: skip

_sessions = itertools.count()


@dataclass(frozen=True, slots=True)
class Span:
    """A copy of a session's counters up to now. It does not refer to the session, and outlives it.

    Attributes:
        epoch_start, now: the counters when the last epoch began, and now.
        gauges: current values, keyed by their names in `Stats`.
    """

    epoch_start: Counters
    now: Counters
    gauges: dict[str, Any]

    def stats(self, since: Stats | None, epoch: int) -> Stats:
        """Return the statistics since the epoch began, or since an earlier snapshot; after a snapshot of another
        session, count from the beginning of this session."""
        counters, earlier = self.now, self.epoch_start if since is None else since.totals
        if earlier is not None and earlier.session == counters.session:
            counters -= earlier
        in_process, seconds = not self.gauges["num_workers"], float(counters.main["time_s"])
        rows = _limit_to_epochs(counters.workers, int(1e9 * seconds))
        numbers = Counter({**counters.main, **dict(zip(FIELDS, rows.sum(axis=0).tolist(), strict=True))})
        numbers["started"] = int(np.count_nonzero(rows[:, field_indices["start_ns"]]))
        workers_cpu_s = numbers["cpu_ns"] / 1e9
        stats = Stats(
            epoch=epoch,
            seconds=seconds,
            images_per_s=numbers["images"] / seconds if seconds else 0.0,
            waiting=min(1.0, numbers["waited_s"] / seconds) if seconds else 0.0,
            next_ms=1e3 * numbers["next_s"] / numbers["batches"] if numbers["batches"] else 0.0,
            first_s=float(numbers["first_s"]),
            parts=tuple(_parts(numbers, in_process=in_process)),
            workers=() if in_process else tuple(_workers(rows, seconds, self.gauges["num_workers"])),
            decoders=dict(counters.decoded + Counter({name: numbers[name] for name in DECODERS})),
            device_refused=dict(counters.refused),
            decoded_whole=numbers["whole"],
            cpus=usable_cpus(),
            cpu_s=numbers["cpu_s"] + (0.0 if self.gauges["elsewhere"] else workers_cpu_s),
            workers_cpu_s=workers_cpu_s,
            workers_queued_s=numbers["queued_ns"] / 1e9,
            totals=self.now,
            **{name: numbers[name] for name in COUNTS},
            **self.gauges,
        )
        return replace(stats, advice=advice(stats))


@dataclass(eq=False)
class Meter:
    """The counters of a session, and a context manager that measures ``next()`` in the thread that iterates.

    Attributes:
        options: the loader's options; the other fields are parts of the session, which count their own work.
        launched_batches: the batches whose stages have been launched.
        counts: the batches and images yielded, and seconds within ``next()``: `waited_s` waiting for workers (with
            ``num_workers=0``, doing their work), which includes `first_s` before the first batch of an epoch; `held_s`
            waiting for a device that is behind; and `next_s` for everything else.
        last_waited_s: seconds that the last ``next()`` waited for workers.
    """

    options: Options
    _: KW_ONLY
    feed: Feed
    assembly: Assembly
    transfer: Any
    decoder: ImageDecoder | None
    errors: ErrorLog
    stage: Stage
    placement: Placement
    launched_batches: Sized

    def __post_init__(self) -> None:
        names = ("waited_s", "first_s", "held_s", "next_s", "batches", "images")
        self.counts: dict[str, float] = dict.fromkeys(names, 0)
        self.last_waited_s = 0.0
        self._caches = [part for part in walk_datasets(self.options.order.dataset) if isinstance(part, Cached)]
        self._untried = _find_untried(self.options)
        self._epochs_s, self._epoch_began_s = 0.0, 0.0  # time in past epochs; start of the current epoch, or 0.0
        self._awaits_first_batch = False
        self._values_at_enter = (0.0, 0.0, 0.0)
        self._baseline = self._epoch_start = Counters(next(_sessions))
        self._baseline = self._read_counters()  # counts of caches and of this process before the session

    @property
    def time_s(self) -> float:
        """Return the seconds within epochs, up to now."""
        began_s = self._epoch_began_s
        return self._epochs_s + (perf_counter() - began_s if began_s else 0.0)

    def begin(self) -> None:
        """Begin an epoch."""
        self.end()
        self._epoch_start = self._read_counters()
        self._epoch_began_s, self._awaits_first_batch = perf_counter(), True

    def end(self) -> None:
        """End the epoch; the time until the next epoch does not count. Idempotent."""
        if self._epoch_began_s:
            self._epochs_s, self._epoch_began_s = self.time_s, 0.0

    def count_batch(self, images: int) -> None:
        """Count a batch that is yielded to the loop."""
        self.counts["batches"] += 1
        self.counts["images"] += images
        self._awaits_first_batch = False

    def __enter__(self) -> None:
        self._values_at_enter = perf_counter(), self.feed.engine.waited_s, self.transfer.host_wait_s

    def __exit__(self, *exc_info: object) -> None:
        start, waited_s, held_s = self._values_at_enter
        waited_s, held_s = self.feed.engine.waited_s - waited_s, self.transfer.host_wait_s - held_s
        self.counts["waited_s"] += waited_s
        self.counts["held_s"] += held_s
        self.counts["next_s"] += perf_counter() - start - waited_s - held_s
        if self._awaits_first_batch:
            self.counts["first_s"] += waited_s
        self.last_waited_s = waited_s

    def span(self) -> Span:
        """Return the session's counters up to now."""
        return Span(self._epoch_start, self._read_counters(), self._gauges())

    def _read_counters(self) -> Counters:
        """Read all counters since the beginning of the session."""
        engine, ring, assembly, times = self.feed.engine, self.feed.ring, self.assembly, self.transfer.times
        decoder, caches = self.decoder, [cache.statistics() for cache in self._caches]
        main: dict[str, Any] = {
            **self.counts,
            "copy_s": assembly.copy_s,
            "stage_s": assembly.stage_s,
            "collate_s": assembly.collate_s,
            "time_s": self.time_s,
            "full_s": ring.full_s,
            "refused": ring.refusals,
            "ring_grown": ring.slots_created,
            "ring_spilled": ring.slots_moved_out,
            "cpu_s": time.process_time(),
            "errors": self.errors.total,
            "cache_hits": sum(cache.hits for cache in caches) + getattr(engine, "hits", 0),
            "cache_misses": sum(cache.misses for cache in caches),
        }
        if times is not None:
            main |= {"timed": times.batches, "device_copy_s": times.copy_s, "device_stage_s": times.stage_s}
        decoded, refused = Counter[str](), Counter[str]()
        if decoder is not None:
            main |= {"device_decode_s": decoder.seconds + self.feed.decoding_s, "device_images": decoder.image_count}
            decoded, refused = Counter(decoder.counts), Counter(decoder.refusals)
        return (
            Counters(self._baseline.session, Counter(main), decoded, refused, engine.read_counters()) - self._baseline
        )

    def _gauges(self) -> dict[str, Any]:
        feed, ring, transfer, options = self.feed, self.feed.ring, self.transfer, self.options
        return {
            "chunks_ready": sum(batch.done_part_count for batch in feed.batches),
            "batches_ready": sum(not batch.open_part_count for batch in feed.batches) + len(self.launched_batches),
            "ring_used_bytes": ring.used_bytes,
            "ring_bytes": ring.slot_bytes,
            "ring_limit_bytes": ring.ring_bytes,
            "ring_segments": ring.slots,
            "pinned_bytes": transfer.pinned_bytes,
            "pinning_refused": transfer.pinning_refused,
            "start": feed.engine.start,
            "device": str(self.stage.device),
            "placement": self.placement.describe(feed.workers),
            "num_workers": feed.workers,
            "chunk_size": feed.chunk_size,
            "prefetch_factor": options.workers.prefetch if options.order.iterable else feed.ahead,
            "decode_peak_bytes": 0 if self.decoder is None else self.decoder.peak_bytes,
            "elsewhere": options.workers.ray_workers is not None,
            "untried": self._untried,
        }


def _find_untried(options: Options) -> tuple[str, ...]:
    """Return the options that this loader could use but does not, for the advice: see `Stats.untried`."""
    order, dataset, untried = options.order, options.order.dataset, []
    parts = list(walk_datasets(dataset))
    # Neighbouring samples are read together if a file contains several samples, or if the dataset has `blocks()`.
    has_blocks = hasattr(type(dataset), "blocks") and not type(dataset).__module__.startswith("gpuload.")
    if order.is_planned and order.shuffle is True and (has_blocks or any(isinstance(part, Store) for part in parts)):
        untried.append("block")
    is_cached = any(isinstance(part, Cached) for part in parts)  # `Cached` rejects set_epoch()
    if not order.iterable and not is_cached and not callable(getattr(dataset, "set_epoch", None)):
        untried.append("cache")
    if not options.workers.persistent_workers:
        untried.append("persistent")
    return tuple(untried)


def _limit_to_epochs(workers: np.ndarray, time_ns: int) -> np.ndarray:
    """Return the workers' counters without the time between epochs, when workers may also start or be idle."""
    rows = workers.copy()
    busy_ns, start_ns, idle_ns = (rows[:, field_indices[name]] for name in ("busy_ns", "start_ns", "idle_ns"))
    remaining_ns = np.maximum(0, time_ns - busy_ns)
    start_ns[:] = np.minimum(start_ns, remaining_ns)
    idle_ns[:] = np.minimum(idle_ns, remaining_ns - start_ns)
    return rows


def _parts(numbers: Mapping[str, float], *, in_process: bool) -> Iterator[Part]:
    """Yield the parts of the work of workers, main process and device. With `in_process`, the workers' parts are listed
    for the main process."""
    batches, timed = numbers["batches"], numbers["timed"] or 1
    issuing_s = numbers["copy_s"] + numbers["stage_s"] + numbers["collate_s"]
    step_s = numbers["time_s"] - numbers["waited_s"] - numbers["held_s"] - numbers["next_s"]
    derived = {
        "rest_s": max(0.0, numbers["next_s"] - numbers["device_decode_s"] - issuing_s),
        "step_s": max(0.0, step_s),
        "device_copy_s": numbers["device_copy_s"] / timed * batches,
        "device_stage_s": numbers["device_stage_s"] / timed * batches,
    }
    for name, where, time_key, count_key, condition in PARTS:
        if (not condition or numbers[condition]) and not (in_process and name in WAITS):
            seconds = numbers[time_key] / 1e9 if where == "workers" else float(derived.get(time_key, numbers[time_key]))
            yield Part(name, "main" if in_process and where == "workers" else where, seconds, int(numbers[count_key]))


def _workers(rows: np.ndarray, seconds: float, count: int) -> Iterator[WorkerStats]:
    """Yield the statistics of current and past workers."""
    columns = [field_indices[name] for name in ("busy_ns", "idle_ns", "start_ns", "samples", "restarts")]
    for index, (busy_ns, idle_ns, start_ns, samples, restarts) in enumerate(rows[:, columns].tolist()):
        if index < count or busy_ns or idle_ns or start_ns or restarts:
            ready_ns = max(1e9 * seconds - start_ns, 1)
            yield WorkerStats(index, min(1.0, busy_ns / ready_ns), samples, restarts)
