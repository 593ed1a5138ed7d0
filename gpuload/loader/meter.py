"""Collecting the counters of a session, and computing `Stats` from them. This module runs in the main process.

The workers' counters are read from shared memory, all others from objects of the main process. Reading takes no lock
and never blocks: any thread can read, even while another is in ``next()``. Related numbers can then differ by a chunk
or a batch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gpuload.datasets.cached import Cached
from gpuload.datasets.joined import walk_datasets
from gpuload.datasets.stores.store import Store
from gpuload.decode.decoder import DECODERS
from gpuload.loader.advice import advice
from gpuload.loader.limits import usable_cpus
from gpuload.loader.options import Options
from gpuload.loader.stats import Counters, Part, Stats, WorkerStats, replace_figures
from gpuload.workers.counters import FIELDS, field_indices

if TYPE_CHECKING:
    from gpuload.loader.session import Session

__all__ = ["Meter", "Span"]

# The parts of the work, by location, and the counters of their runs. The counters of their times are called "read_ns",
# for workers, or "main copy", in seconds.
PARTS: Final[dict[Literal["workers", "main", "device"], dict[str, str]]] = {
    "workers": {"start": "started", "read": "samples", "header": "samples", "decode": "samples", "pack": "samples",
                "collate": "collated", "plan": "plans", "idle": "chunks"},
    "main": {"wait": "batches", "hold": "batches", "slot wait": "refused", "device decode": "device_images",
             "copy": "batches", "stage": "batches", "collate": "batches", "rest": "batches", "step": "batches"},
    "device": {"copy": "batches", "stage": "batches"},
}  # fmt: skip
ALWAYS_LISTED: Final = {
    "workers read", "workers decode", "main wait", "main copy", "main stage", "main collate", "main rest", "main step",
}  # fmt: skip
WAITS: Final = ("wait", "idle")  # parts that do not exist if one process does all the work

_sessions = itertools.count()


@dataclass(frozen=True, slots=True)
class Span:
    """A copy of a session's counters up to now. It does not refer to the session, and outlives it.

    Attributes:
        epoch_start, now: the counters when the last epoch began, and now.
        gauges: current values, keyed by their paths in `Stats`.
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
        main, workers = counters.main, self.gauges["num_workers"]
        seconds = float(main["time_s"])
        rows = _limit_to_epochs(counters.workers, int(1e9 * seconds))
        sums = dict(zip(FIELDS, rows.sum(axis=0).tolist(), strict=True))
        workers_s = sums["cpu_ns"] / 1e9
        stats = replace_figures(
            Stats(),
            self.gauges
            | {path: count for path, count in main.items() if "." in path}
            | {
                "epoch": epoch,
                "seconds": seconds,
                "batches": main["batches"],
                "images": main["images"],
                "images_per_s": main["images"] / seconds if seconds else 0.0,
                "waiting": min(1.0, main["main wait"] / seconds) if seconds else 0.0,
                "next_ms": 1e3 * main["next_s"] / main["batches"] if main["batches"] else 0.0,
                "first_s": float(main["first_s"]),
                "parts": tuple(_parts(main, rows, in_process=not workers)),
                "workers": tuple(_workers(rows, seconds, workers)) if workers else (),
                "cpu.seconds": main["process_s"] + (0.0 if self.gauges["elsewhere"] else workers_s),
                "cpu.workers_s": workers_s,
                "cpu.queued_s": sums["queued_ns"] / 1e9,
                "decode.read_bytes": sums["bytes_read"],
                "decode.bytes": sums["bytes_decoded"],
                "decode.counts": dict(counters.decoded + Counter({name: sums[name] for name in DECODERS})),
                "decode.refused": dict(counters.refused),
                "decode.whole": sums["whole"],
                "faults.restarts": sums["restarts"],
                "totals": self.now,
            },
        )
        return replace(stats, advice=advice(stats))


class Meter:
    """The counters of a session, and a context manager that measures ``next()`` in the thread that iterates.

    Args:
        session: the session, whose parts count their own work.

    Attributes:
        counts: the batches and images yielded, and seconds within ``next()``: waiting for workers ("main wait"; with
            ``num_workers=0``, doing their work), which includes `first_s` before the first batch of an epoch; waiting
            for a device that is behind ("main hold"); and `next_s` for everything else.
        last_waited_s: seconds that the last ``next()`` waited for workers.
    """

    def __init__(self, session: Session) -> None:
        # The parts, not the session itself: a cycle would delay the end of a session that nothing uses any more.
        self._options, self._feed, self._assembly = session.options, session.feed, session.assembly
        self._transfer, self._decoder, self._errors = session.transfer, session.decoder, session.errors
        self._device, self._placement = str(session.stage.device), session.placement
        self._launched_batches = session.launched_batches
        names = ("main wait", "first_s", "main hold", "next_s", "batches", "images")
        self.counts: dict[str, float] = dict.fromkeys(names, 0)
        self.last_waited_s = 0.0
        self._caches = [part for part in walk_datasets(self._options.order.dataset) if isinstance(part, Cached)]
        self._untried = _find_untried(self._options)
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
        self._values_at_enter = perf_counter(), self._feed.engine.waited_s, self._transfer.host_wait_s

    def __exit__(self, *exc_info: object) -> None:
        start, waited_s, held_s = self._values_at_enter
        waited_s, held_s = self._feed.engine.waited_s - waited_s, self._transfer.host_wait_s - held_s
        self.counts["main wait"] += waited_s
        self.counts["main hold"] += held_s
        self.counts["next_s"] += perf_counter() - start - waited_s - held_s
        if self._awaits_first_batch:
            self.counts["first_s"] += waited_s
        self.last_waited_s = waited_s

    def span(self) -> Span:
        """Return the session's counters up to now."""
        return Span(self._epoch_start, self._read_counters(), self._read_gauges())

    def _read_counters(self) -> Counters:
        """Read all counters since the beginning of the session."""
        engine, ring, times, decoder = self._feed.engine, self._feed.ring, self._transfer.times, self._decoder
        caches = [cache.statistics() for cache in self._caches]
        main: dict[str, Any] = {
            **self.counts,
            "main copy": self._assembly.copy_s,
            "main stage": self._assembly.stage_s,
            "main collate": self._assembly.collate_s,
            "main slot wait": ring.full_s,
            "refused": ring.refusals,
            "time_s": self.time_s,
            "process_s": time.process_time(),
            "ring.grown": ring.slots_created,
            "ring.spilled": ring.slots_moved_out,
            "faults.errors": self._errors.total,
            "cache.hits": sum(cache.hits for cache in caches),
            "cache.misses": sum(cache.misses for cache in caches),
        }
        if times is not None:
            main |= {"timed": times.batches, "device copy": times.copy_s, "device stage": times.stage_s}
        decoded, refused = Counter[str](), Counter[str]()
        if decoder is not None:
            main["main device decode"] = decoder.seconds + self._feed.decoding_s
            main["device_images"] = decoder.image_count
            decoded, refused = Counter(decoder.counts), Counter(decoder.refusals)
        return (
            Counters(self._baseline.session, Counter(main), decoded, refused, engine.read_counters()) - self._baseline
        )

    def _read_gauges(self) -> dict[str, Any]:
        feed, ring, transfer, options = self._feed, self._feed.ring, self._transfer, self._options
        return {
            "chunks_ready": sum(batch.done_part_count for batch in feed.batches),
            "batches_ready": sum(not batch.open_part_count for batch in feed.batches) + len(self._launched_batches),
            "num_workers": feed.workers,
            "elsewhere": options.workers.ray_workers is not None,
            "chunk_size": feed.chunk_size,
            "prefetch_factor": options.workers.prefetch if options.order.iterable else feed.ahead,
            "untried": self._untried,
            "start": feed.engine.start,
            "cpu.count": usable_cpus(),
            "cpu.placement": self._placement.describe(feed.workers),
            "ring.used_bytes": ring.used_bytes,
            "ring.bytes": ring.slot_bytes,
            "ring.limit_bytes": ring.ring_bytes,
            "ring.slots": ring.slots,
            "stage.device": self._device,
            "stage.pinned_bytes": transfer.pinned_bytes,
            "stage.pinning_refused": transfer.pinning_refused,
            "decode.peak_bytes": 0 if self._decoder is None else self._decoder.peak_bytes,
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


def _parts(main: Mapping[str, float], rows: np.ndarray, *, in_process: bool) -> Iterator[Part]:
    """Yield the parts of the work of workers, main process and device. With `in_process`, the workers' parts are listed
    for the main process."""
    numbers = defaultdict[str, float](float, {**main, **dict(zip(FIELDS, rows.sum(axis=0).tolist(), strict=True))})
    numbers["started"] = int(np.count_nonzero(rows[:, field_indices["start_ns"]]))
    issuing_s = numbers["main copy"] + numbers["main stage"] + numbers["main collate"]
    step_s = numbers["time_s"] - numbers["main wait"] - numbers["main hold"] - numbers["next_s"]
    numbers["main rest"] = max(0.0, numbers["next_s"] - numbers["main device decode"] - issuing_s)
    numbers["main step"] = max(0.0, step_s)
    for name in ("device copy", "device stage"):
        numbers[name] *= numbers["batches"] / (numbers["timed"] or 1)
    for where, runs in PARTS.items():
        for name, count_key in runs.items():
            path, count = f"{where} {name}", int(numbers[count_key])
            seconds = numbers[f"{name}_ns"] / 1e9 if where == "workers" else float(numbers[path])
            ran = seconds or (count_key not in ("batches", "samples") and count)
            if (ran or path in ALWAYS_LISTED) and not (in_process and name in WAITS):
                yield Part(name, "main" if in_process and where == "workers" else where, seconds, count)


def _workers(rows: np.ndarray, seconds: float, count: int) -> Iterator[WorkerStats]:
    """Yield the statistics of current and past workers."""
    columns = [field_indices[name] for name in ("busy_ns", "idle_ns", "start_ns", "samples", "restarts")]
    for index, (busy_ns, idle_ns, start_ns, samples, restarts) in enumerate(rows[:, columns].tolist()):
        if index < count or busy_ns or idle_ns or start_ns or restarts:
            ready_ns = max(1e9 * seconds - start_ns, 1)
            yield WorkerStats(index, min(1.0, busy_ns / ready_ns), samples, restarts)
