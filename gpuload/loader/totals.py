"""All counters of a session at one moment, and what lies between two such moments: `Stats`.

Workers' counters come from their shared memory, the rest from the main process's own objects. Nothing is locked and
nobody waits: any thread may ask, also while another is in ``next()``. Numbers that belong together may then differ by a
chunk or a batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuload.datasets.cache.dataset import Cached
from gpuload.datasets.resident import DeviceCached
from gpuload.datasets.stores.store import Store
from gpuload.decode.decoder import DECODERS
from gpuload.loader.advice import advice
from gpuload.loader.limits import Machine
from gpuload.loader.stats import Part, Stats, WorkerStats
from gpuload.workers.counters import FIELDS, place_of

if TYPE_CHECKING:
    from gpuload.loader.options import Options
    from gpuload.loader.session import Session

__all__ = ["Span", "Totals", "found_in", "stats_of", "untried_of"]

DECODED, REFUSED = "decoded by ", "refused: "
DEPTH: Final = 8  # how deep a `Cached` is looked for in datasets of datasets
# What workers do: name, field, and the field that counts it; "" counts the workers that did it.
WORK: Final = (
    ("start", "start_ns", ""),
    ("read", "read_ns", "samples"),
    ("header", "header_ns", "samples"),
    ("decode", "decode_ns", "samples"),
    ("pack", "pack_ns", "samples"),
    ("collate", "collate_ns", "collated"),
    ("plan", "plan_ns", "plans"),
    ("idle", "idle_ns", "chunks"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """A session, as `Loader.stats` needs it, also after its end.

    Attributes:
        born, begun, now: its counters as it began, as its last epoch began, and now.
    """

    born: Totals
    begun: Totals
    now: Totals

    def stats(self, since: Stats | None, epoch: int) -> Stats:
        """What it did since its epoch began, or since an earlier snapshot; one that is of another session counts as its
        begin."""
        base = self.begun if since is None else since.totals
        if base is None or base.session != self.now.session:
            base = self.born
        return stats_of(self.now, base, epoch, Machine.here())


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since a session began.

    Attributes:
        session: its number in this process.
        main: counters of the main process, by name; of images for the device, by `DECODED` or `REFUSED` and a name.
        rows: those of workers, int64 (workers, `FIELDS`).
        gauges: what is at this moment, by the names of `Stats`.
    """

    session: int
    main: dict[str, float]
    rows: np.ndarray
    gauges: dict[str, Any]

    @classmethod
    def of(cls, session: Session) -> Totals:
        """Those of a session, now."""
        meter, ring, assembly, transfer = session.meter, session.ring, session.assembly, session.transfer
        times, caches = transfer.times, [cache.statistics() for cache in session.caches]
        main = {
            "time_s": meter.time_s,
            "waited_s": meter.waited_s,
            "held_s": meter.held_s,
            "next_s": meter.next_s,
            "first_s": meter.first_s,
            "batches": meter.batches,
            "images": meter.images,
            "copy_s": assembly.copy_s,
            "stage_s": assembly.stage_s,
            "collate_s": assembly.collate_s,
            "full_s": ring.full_s,
            "refused": ring.refused,
            "made": ring.made,
            "moved_out": ring.moved_out,
            "cpu_s": time.process_time(),
            "errors": session.errors.total,
            "hits": sum(cache.hits for cache in caches) + getattr(session.engine, "hits", 0),
            "misses": sum(cache.misses for cache in caches),
            "timed": 0 if times is None else times.batches,
            "device_copy_s": 0.0 if times is None else times.copy_s,
            "device_stage_s": 0.0 if times is None else times.stage_s,
        }
        decoder = session.decoder
        if decoder is not None:
            main |= {"device_decode_s": decoder.seconds, "device_images": decoder.images}
            main |= {DECODED + name: count for name, count in decoder.counts.items()}
            main |= {REFUSED + why: count for why, count in list(decoder.refused.items())}
        batches, workers, options = session.feed.batches, session.feed.workers, session.options.workers
        gauges = {
            "chunks_ready": sum(batch.done_parts for batch in batches),
            "batches_ready": sum(not batch.open_parts for batch in batches) + len(session.launched),
            "ring_used_bytes": ring.used_bytes,
            "ring_bytes": ring.slot_bytes,
            "ring_limit_bytes": ring.ring_bytes,
            "ring_segments": ring.slots,
            "pinned_bytes": transfer.pinned_bytes,
            "pinning_refused": transfer.pinning_refused,
            "device": str(session.stage.device),
            "placement": session.placement.told(workers),
            "num_workers": workers,
            "chunk_size": session.feed.chunk_size,
            "prefetch_factor": options.prefetch if session.options.order.iterable else session.feed.ahead,
            "resident_bytes": session.resident_bytes or 0,
            "decode_peak_bytes": 0 if decoder is None else decoder.peak_bytes,
            "elsewhere": options.workers is not None and session.resident_bytes is None,
            "untried": session.untried,
        }
        return cls(session.number, main, session.engine.counted(), gauges)

    def since(self, base: Totals) -> Totals:
        """What came after `base`. Workers that it does not know began after it."""
        rows = self.rows.copy()
        known = min(len(rows), len(base.rows))
        rows[:known] = np.maximum(rows[:known] - base.rows[:known], 0)
        main = {name: max(0, number - base.main.get(name, 0)) for name, number in self.main.items()}
        # Workers start and are idle between epochs too, which is no part of the time.
        left = np.maximum(int(1e9 * main["time_s"]) - rows[:, place_of["busy_ns"]], 0)
        for place in (place_of["start_ns"], place_of["idle_ns"]):
            rows[:, place] = np.minimum(rows[:, place], left)
            left -= rows[:, place]
        return Totals(self.session, main, rows, self.gauges)


def found_in(dataset: Any, kinds: Any, depth: int = DEPTH) -> Iterator[Any]:
    """A dataset, and those that it is made of, as far as they are of these classes."""
    if isinstance(dataset, kinds):
        yield dataset
    if not depth:
        return
    inner = vars(dataset) if hasattr(dataset, "__dict__") else {}
    for one in (inner.get("dataset"), *_listed(inner.get("datasets"))):
        if one is not None:
            yield from found_in(one, kinds, depth - 1)


def untried_of(options: Options) -> tuple[str, ...]:
    """What the advice may name, as this loader could have it and has not: see `Stats.untried`."""
    order, dataset, untried = options.order, options.order.dataset, []
    # Samples that lie next to each other are read together where several are in a file, or the dataset says so.
    own = hasattr(type(dataset), "blocks") and not type(dataset).__module__.startswith("gpuload.")
    if order.planned and order.shuffle is True and (own or next(found_in(dataset, Store), None) is not None):
        untried.append("block")
    cached = next(found_in(dataset, (Cached, DeviceCached)), None) is not None
    if not order.iterable and not cached and not callable(getattr(dataset, "set_epoch", None)):  # as `Cached` allows
        untried.append("cache")
    if not options.workers.persistent_workers:
        untried.append("persistent")
    return tuple(untried)


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else []


def stats_of(now: Totals, base: Totals, epoch: int, machine: Machine) -> Stats:
    """What was done between two moments of a session."""
    done = now.since(base)
    main, at_home = done.main, not now.gauges["num_workers"]
    sums = dict(zip(FIELDS, done.rows.sum(axis=0).tolist(), strict=True))
    seconds, batches, images = main["time_s"], int(main["batches"]), int(main["images"])
    stats = Stats(
        epoch=epoch,
        seconds=seconds,
        batches=batches,
        images=images,
        images_per_s=images / seconds if seconds else 0.0,
        waiting=min(1.0, main["waited_s"] / seconds) if seconds else 0.0,
        next_ms=1e3 * main["next_s"] / batches if batches else 0.0,
        first_s=main["first_s"],
        parts=tuple(_parts(main, sums, started=int((done.rows[:, place_of["start_ns"]] > 0).sum()), at_home=at_home)),
        workers=() if at_home else tuple(_workers(done.rows, seconds, now.gauges["num_workers"])),
        ring_grown=int(main["made"]),
        ring_spilled=int(main["moved_out"]),
        bytes_read=sums["bytes_read"],
        bytes_decoded=sums["bytes_decoded"],
        decoders=_decoders(main, sums),
        device_refused={why: count for why, count in _counted(main, REFUSED).items() if count},
        decoded_whole=sums["whole"],
        cache_hits=int(main["hits"]),
        cache_misses=int(main["misses"]),
        errors=int(main["errors"]),
        restarts=sums["restarts"],
        cpus=machine.cpus,
        cpu_s=main["cpu_s"] + (0.0 if now.gauges["elsewhere"] else sums["cpu_ns"] / 1e9),
        workers_cpu_s=sums["cpu_ns"] / 1e9,
        workers_queued_s=sums["queued_ns"] / 1e9,
        totals=now,
        **now.gauges,
    )
    return replace(stats, advice=advice(stats, machine))


def _counted(main: dict[str, float], kind: str) -> dict[str, int]:
    return {name.removeprefix(kind): int(count) for name, count in main.items() if name.startswith(kind)}


def _decoders(main: dict[str, float], sums: dict[str, int]) -> dict[str, int]:
    """Images by decoder: the device's and those of this process, and workers'."""
    found = _counted(main, DECODED)
    found |= {name: found.get(name, 0) + sums[name] for name in DECODERS}
    return {name: count for name, count in found.items() if count}


def _parts(main: dict[str, float], sums: dict[str, int], *, started: int, at_home: bool) -> Iterator[Part]:
    """What took the time; `started`: how many workers did; `at_home`: the main process does what workers do."""
    for name, field, counter in WORK:
        if (sums[field] or name in ("read", "decode")) and not (at_home and name == "idle"):
            count = sums[counter] if counter else started
            yield Part(name, "main" if at_home else "workers", sums[field] / 1e9, count)
    batches, next_s = int(main["batches"]), main["next_s"]
    issued = {name: main[f"{name}_s"] for name in ("copy", "stage", "collate")}
    images = int(main.get("device_images", 0))
    decode_s = main.get("device_decode_s", 0.0)
    if not at_home:
        yield Part("wait", "main", main["waited_s"], batches)
    if main["held_s"]:
        yield Part("hold", "main", main["held_s"], batches)
    if main["refused"]:
        yield Part("slot wait", "main", main["full_s"], int(main["refused"]))
    if images:
        yield Part("device decode", "main", decode_s, images)
    for name, took in issued.items():
        yield Part(name, "main", took, batches)
    yield Part("rest", "main", max(0.0, next_s - decode_s - sum(issued.values())), batches)
    step_s = main["time_s"] - main["waited_s"] - main["held_s"] - next_s
    yield Part("step", "main", max(0.0, step_s), batches)
    if main["timed"]:
        for name in ("copy", "stage"):
            yield Part(name, "device", main[f"device_{name}_s"] / main["timed"] * batches, batches)


def _workers(rows: np.ndarray, seconds: float, count: int) -> Iterator[WorkerStats]:
    """The workers that there are, and those that were there."""
    names = "busy_ns", "idle_ns", "start_ns", "samples", "restarts"
    for number, row in enumerate(rows.tolist()):
        busy_ns, idle_ns, start_ns, samples, restarts = (row[place_of[name]] for name in names)
        if number < count or busy_ns or idle_ns or start_ns or restarts:
            ready_ns = max(1e9 * seconds - start_ns, 1)
            yield WorkerStats(number, min(1.0, busy_ns / ready_ns), samples, restarts)
