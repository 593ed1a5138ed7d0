"""The result of `Loader.stats`: a frozen snapshot of the loading statistics, as numbers, as a table, and as HTML.

A snapshot holds plain values without references to the loader, so it can be stored, compared and pickled. It is
computed from the difference of two `Counters`, which `gpuload.loader.meter` reads; `gpuload.loader.advice` writes the
last sentence.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from gpuload.stage.plan import paragraph, table
from gpuload.workers.start import Start

__all__ = ["COLUMNS", "NOTHING_LOADED", "Counters", "Part", "Stats", "WorkerStats", "format_bytes"]

NOTHING_LOADED: Final = "nothing has been loaded yet: ask again after a few batches"
COLUMNS: Final = 80  # the width of the table
HEADINGS: Final = ("part", "where", "share", "total", "each", "rate")


@dataclass(frozen=True, slots=True, eq=False)
class Counters:
    """The counters of a session at one moment. Counters only grow, so earlier ones can be subtracted.

    Attributes:
        session: the session's number in this process.
        main: counters of the main process, keyed by name.
        decoded, refused: images sent to the device's decoder: `decoded` counts images per decoder, `refused` counts
            images per reason for refusing them.
        workers: one row per worker, int64 (workers, `gpuload.workers.counters.FIELDS`).
    """

    session: int
    main: Counter[str] = field(default_factory=Counter)
    decoded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    workers: np.ndarray = field(default_factory=lambda: np.zeros((), np.int64))

    def __sub__(self, earlier: Counters) -> Counters:
        """Return the counts since an earlier moment of the session. Negative differences, which occur because workers
        write their counters while they are being read, become 0."""
        main, decoded = self.main - earlier.main, self.decoded - earlier.decoded
        refused, workers = self.refused - earlier.refused, np.maximum(self.workers - earlier.workers, 0)
        return Counters(self.session, main, decoded, refused, workers)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the work.

    Attributes:
        name: ``"start"`` (workers start, until they can process a chunk), ``"read"`` (the dataset returns a sample),
            ``"header"`` (samples are unpacked, image headers are read, and crop regions are drawn), ``"decode"``,
            ``"pack"`` (labels and metadata are written to the slot), ``"collate"``, ``"plan"`` (batches are planned for
            the fused kernels), ``"idle"`` (workers have no chunk), ``"wait"`` (the loop waits for a batch), ``"hold"``
            (the host waits for a device that is behind), ``"device decode"`` (the host waits for images that the device
            decodes), ``"slot wait"`` (chunks wait for room in the ring), ``"copy"``, ``"stage"`` (the transforms),
            ``"rest"`` (everything else in ``next()``), ``"step"`` (the loop itself).
        where: ``"workers"``, summed over all workers; ``"main"``, the main process; or ``"device"``, measured for one
            batch in eight and extrapolated.
        seconds: the total time.
        count: how often the part ran: samples for parts that process each sample, otherwise chunks or batches.
    """

    name: str
    where: Literal["workers", "main", "device"]
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Statistics of a worker.

    Attributes:
        number: the worker's index, as in `get_worker_info().id`.
        busy: the share of the time since the worker became ready that it spent working, 0 to 1.
        samples: the number of samples that it processed.
        restarts: how often the worker died and was replaced.
    """

    number: int
    busy: float
    samples: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of a `Loader` since its epoch began, or since an earlier snapshot: ``print(loader.stats())``.

    The figures cover the time within epochs, not the time between them.

    Attributes:
        epoch: the number of the last epoch that began.
        seconds: the time that the snapshot covers.
        batches, images, images_per_s: the number of batches and images yielded, and the throughput; each sample counts
            as an image.
        waiting: the share of the time that the loop waited in ``next()`` for a batch, 0 to 1.
        next_ms: mean host time of ``next()`` without waiting, milliseconds.
        first_s: seconds the loop waited for the epoch's first batch, if the snapshot covers it.
        start: how long each step of starting the current workers took, even if that was before the time covered; all 0
            without workers on this machine, and until workers are ready.
        parts: the parts of the work, with their times.
        workers: current workers, and workers that ended during the time covered. Empty with ``num_workers=0``, where
            the main process does their work.
        chunks_ready, batches_ready: the number of chunks and batches that are ready but not yet yielded, at this
            moment.
        ring_used_bytes, ring_bytes, ring_limit_bytes: shared memory of the slots in use, shared memory of all slots,
            and its limit, at this moment; ring_segments: the number of slots; ring_grown: the number of slots
            allocated so far; ring_spilled: the number of chunks moved from a full ring into ordinary memory.
        pinned_bytes: the page-locked part of `ring_bytes`; pinning_refused: whether the driver refused to lock a part.
        bytes_read: bytes of image files and arrays that the dataset returned.
        bytes_decoded: bytes of pixels written to the slots.
        decoders: the number of images per decoder; ``"cut"`` counts crops that were first cut from a JPEG with restart
            markers, ``"scaled"`` images decoded at a smaller size and resized, with ``Decode(scale="fast")``.
        device_refused: the number of images that the device's decoder refused, by reason; this process decoded these on
            the CPU.
        decode_peak_bytes: the largest size of images decoded together on the device, before cropping.
        decoded_whole: the number of JPEGs fully decoded where a part would do, because nvImageCodec cannot be used.
        cache_hits, cache_misses: the number of samples that were, and were not, in the caches: of `Cached` datasets,
            summed over all processes on this machine that share them.
        errors: the number of samples that failed; restarts: the number of workers that died.
        device: where the batches go; placement: where workers and ring are placed on a machine with several NUMA nodes,
            or why they are not; "" for batches on the CPU.
        num_workers: the number of workers; elsewhere: whether they run on other machines; chunk_size: the maximum
            number of samples that a worker processes at a time; prefetch_factor: batches prepared ahead of the one in
            use, if they fit in a quarter of the ring or were requested (per worker for an iterable dataset).
        cpus: how many CPUs this process may use; cpu_s: CPU seconds of this process and its workers together;
            workers_cpu_s: CPU seconds of the workers; workers_queued_s: how long busy workers were runnable but waited
            for a CPU, if the kernel reports it.
        untried: options that could help and are not used: ``"block"`` (``shuffle="block"``, for datasets with several
            samples per file), ``"cache"`` (`Cached`), ``"persistent"`` (``persistent_workers=True``).
        advice: the bottleneck and a remedy, in one sentence.

    Example:
        >>> import gpuload as gl, numpy as np
        >>> pictures = [np.zeros((40, 60, 3), np.uint8)] * 64
        >>> loader = gl.Loader(pictures, batch_size=8, num_workers=0, device="cpu")
        >>> for images in loader:
        ...     pass
        >>> stats = loader.stats()
        >>> stats.batches, stats.images, stats.errors
        (8, 64, 0)
    """

    epoch: int = 0
    seconds: float = 0.0
    batches: int = 0
    images: int = 0
    images_per_s: float = 0.0
    waiting: float = 0.0
    next_ms: float = 0.0
    first_s: float = 0.0
    start: Start = field(default_factory=Start)
    parts: tuple[Part, ...] = ()
    workers: tuple[WorkerStats, ...] = ()
    chunks_ready: int = 0
    batches_ready: int = 0
    ring_used_bytes: int = 0
    ring_bytes: int = 0
    ring_limit_bytes: int = 0
    ring_segments: int = 0
    ring_grown: int = 0
    ring_spilled: int = 0
    pinned_bytes: int = 0
    pinning_refused: bool = False
    bytes_read: int = 0
    bytes_decoded: int = 0
    decoders: dict[str, int] = field(default_factory=dict)
    device_refused: dict[str, int] = field(default_factory=dict)
    decode_peak_bytes: int = 0
    decoded_whole: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    errors: int = 0
    restarts: int = 0
    device: str = "cpu"
    placement: str = ""
    num_workers: int = 0
    elsewhere: bool = False
    chunk_size: int = 1
    prefetch_factor: int = 2
    cpus: int = 1
    cpu_s: float = 0.0
    workers_cpu_s: float = 0.0
    workers_queued_s: float = 0.0
    untried: tuple[str, ...] = ()
    advice: str = NOTHING_LOADED
    totals: Counters | None = field(default=None, repr=False, compare=False)  # for `since=`

    def part(self, name: str, where: str | None = None) -> Part:
        """Return the part with this name, or an empty part if there is none. Without `where`, add up the parts of the
        workers and the main process."""
        parts = [part for part in self.parts if part.name == name and where in (None, part.where)]
        if len(parts) == 1:
            return parts[0]
        seconds, count = sum(part.seconds for part in parts), sum(part.count for part in parts)
        return Part(name, parts[0].where if parts else "main", seconds, count)

    @property
    def busy(self) -> float:
        """The average number of busy workers since they started."""
        return sum(worker.busy for worker in self.workers)

    @property
    def waiting_later(self) -> float:
        """The share of the time after the first batch that the loop waited, 0 to 1."""
        later_s = self.seconds - self.first_s
        return max(0.0, self.waiting * self.seconds - self.first_s) / later_s if later_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all values as a dict that can be stored as JSON."""
        values = asdict(replace(self, totals=None))
        del values["totals"]
        return values | {name: list(values[name]) for name in ("parts", "workers")}

    def __str__(self) -> str:
        lines = [_headline(self), ""]
        if self.seconds:
            rows = [HEADINGS, *_rows(self)]
            width = max(11, *(len(part) + 1 for part, *_ in rows))
            lines += [*(_format_line(row, width) for row in rows), ""]
            lines += [*(f"{name:<9} {text}" for name, text in _facts(self)), ""]
        return "\n".join([*lines, *textwrap.wrap(self.advice, COLUMNS)])

    def _repr_html_(self) -> str:
        tables = [table(_headline(self), HEADINGS, _rows(self)), table("", (), _facts(self))] if self.seconds else []
        return "\n".join([*(tables or [paragraph(_headline(self))]), paragraph(self.advice)])


def format_bytes(nbytes: float) -> str:
    """Format a size with at most four digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 9_999.5:
            return f"{nbytes:,.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.0f} TB"


def _headline(stats: Stats) -> str:
    return (
        f"epoch {stats.epoch}: {stats.seconds:,.1f} s, {_format_count(stats.batches, 'batch')}, "
        f"{_format_count(stats.images, 'image')}, "
        f"{stats.images_per_s:,.0f} images/s"
    )


def _format_line(cells: Sequence[str], width: int) -> str:
    part, where, share, total, mean, rate = cells
    return f"{part:<{width}}{where:<9}{share:>6}{total:>11}{mean:>13}{rate:>16}"


def _rows(stats: Stats) -> Iterator[tuple[str, ...]]:
    """Yield the cells of one row per part, in the order of `HEADINGS`."""
    workers = max(1, stats.num_workers)
    for part in stats.parts:
        time = stats.seconds * (workers if part.where == "workers" else 1)
        share = f"{min(1.0, part.seconds / time):.0%}" if time else ""
        mean = _format_seconds(part.seconds / part.count) if part.count else ""
        rate = f"{part.count / part.seconds:,.0f}/s" if part.count and part.seconds >= 1e-6 else ""
        yield part.name, part.where, share, _format_seconds(part.seconds), mean, rate


def _format_seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def _facts(stats: Stats) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all other figures; a text without a name continues the previous text."""
    yield "next()", f"waited {stats.waiting:.1%} of the time; takes {stats.next_ms:.2f} ms without waiting"
    if stats.first_s:
        yield "", f"after the first batch it waited {stats.waiting_later:.1%}"
    if stats.num_workers:
        busy_shares = " ".join(f"{worker.busy:.0%}" for worker in stats.workers[:8])
        ellipsis = " …" if len(stats.workers) > 8 else ""
        yield "workers", f"{stats.busy:.1f} of {stats.num_workers} busy: {busy_shares}{ellipsis}"
        yield "ready", f"{_format_count(stats.chunks_ready, 'chunk')}; {_format_count(stats.batches_ready, 'batch')}"
    if stats.start.seconds:
        text = f"{_format_seconds(stats.start.seconds)} until workers were ready: {stats.start.describe()}"
        yield from _wrap_fact("start", text)
    if stats.placement:
        yield from _wrap_fact("placed", stats.placement)
    used = f"{format_bytes(stats.ring_used_bytes)} of {format_bytes(stats.ring_bytes)} in use"
    slots = f"{stats.ring_segments} slots, {stats.ring_grown} allocated so far"
    yield "ring", f"{used}, limit {format_bytes(stats.ring_limit_bytes)}; {slots}"
    if stats.device != "cpu":
        refusal_note = "; the driver refused to lock more" if stats.pinning_refused else ""
        yield "", f"{format_bytes(stats.pinned_bytes)} page-locked{refusal_note}"
    rate = stats.bytes_read / stats.seconds if stats.seconds else 0.0
    yield (
        "read",
        f"{format_bytes(stats.bytes_read)}, {format_bytes(rate)}/s; decoded {format_bytes(stats.bytes_decoded)}",
    )
    if stats.decoders:
        yield "decoders", ", ".join(f"{name} {count:,}" for name, count in stats.decoders.items())
    for reason, count in stats.device_refused.items():
        yield "refused", f"{count:,} by the device's decoder: {reason}"
    if stats.cache_hits or stats.cache_misses:
        share = stats.cache_hits / (stats.cache_hits + stats.cache_misses)
        yield "cache", f"{stats.cache_hits:,} hits, {stats.cache_misses:,} misses: {share:.0%}"
    yield "faults", f"{_format_count(stats.errors, 'error')}, {_format_count(stats.restarts, 'restart')}"


def _wrap_fact(name: str, text: str) -> Iterator[tuple[str, str]]:
    first_line, *more_lines = textwrap.wrap(text, COLUMNS - 10)
    yield from ((name, first_line), *(("", line) for line in more_lines))


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"
