"""The result of `Loader.stats`: a frozen snapshot of the loading statistics, as numbers, as a table, and as HTML.

A snapshot holds plain values without references to the loader, so it can be stored, compared and pickled. Figures of
one subject are in a group, which prints itself. A snapshot is computed from the difference of two `Counters`, which
`gpuload.loader.meter` reads; `gpuload.loader.advice` writes the last sentence.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gpuload.stage.plan import paragraph, table
from gpuload.workers.start import Start

__all__ = [
    "COLUMNS", "NOTHING_LOADED", "CacheStats", "Counters", "CpuStats", "DecodeStats", "FaultStats", "Part",
    "RingStats", "StageStats", "Stats", "WorkerStats", "format_bytes", "replace_figures",
]  # fmt: skip

NOTHING_LOADED: Final = "nothing has been loaded yet: ask again after a few batches"
COLUMNS: Final = 80  # the width of the table
HEADINGS: Final = ("part", "where", "share", "total", "each", "rate")
# The groups that have the attributes that `Stats` itself had before.
MOVED: Final = {
    "ring_used_bytes": "ring.used_bytes", "ring_bytes": "ring.bytes", "ring_limit_bytes": "ring.limit_bytes",
    "ring_segments": "ring.slots", "ring_grown": "ring.grown", "ring_spilled": "ring.spilled",
    "device": "stage.device", "pinned_bytes": "stage.pinned_bytes", "pinning_refused": "stage.pinning_refused",
    "bytes_read": "decode.read_bytes", "bytes_decoded": "decode.bytes", "decoders": "decode.counts",
    "device_refused": "decode.refused", "decode_peak_bytes": "decode.peak_bytes", "decoded_whole": "decode.whole",
    "cache_hits": "cache.hits", "cache_misses": "cache.misses",
    "errors": "faults.errors", "restarts": "faults.restarts", "placement": "cpu.placement", "cpus": "cpu.count",
    "cpu_s": "cpu.seconds", "workers_cpu_s": "cpu.workers_s", "workers_queued_s": "cpu.queued_s",
}  # fmt: skip

Facts = Iterator[tuple[str, str]]  # names and texts of figures; a text without a name continues the previous text


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


@dataclass(frozen=True, slots=True)
class CpuStats:
    """How many CPUs this process may use; CPU seconds of this process and its workers together, and of the workers; how
    long busy workers were runnable but waited for a CPU, if the kernel reports it; and where workers and ring are
    placed on a machine with several NUMA nodes, or why they are not ("" for batches on the CPU)."""

    count: int = 1
    seconds: float = 0.0
    workers_s: float = 0.0
    queued_s: float = 0.0
    placement: str = ""

    def facts(self, stats: Stats) -> Facts:
        if self.placement:
            yield from _wrap_fact("placed", self.placement)


@dataclass(frozen=True, slots=True)
class RingStats:
    """Shared memory of the slots in use, of all slots, and its limit, at this moment; the number of slots, the number
    of slots allocated so far (`grown`), and of chunks moved from a full ring into ordinary memory (`spilled`)."""

    used_bytes: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    slots: int = 0
    grown: int = 0
    spilled: int = 0

    def facts(self, stats: Stats) -> Facts:
        used = f"{format_bytes(self.used_bytes)} of {format_bytes(self.bytes)} in use"
        slots = f"{self.slots} slots, {self.grown} allocated so far"
        yield "ring", f"{used}, limit {format_bytes(self.limit_bytes)}; {slots}"


@dataclass(frozen=True, slots=True)
class StageStats:
    """Where the batches go, the page-locked part of the ring, and whether the driver refused to lock a part."""

    device: str = "cpu"
    pinned_bytes: int = 0
    pinning_refused: bool = False

    def facts(self, stats: Stats) -> Facts:
        if self.device != "cpu":
            refusal_note = "; the driver refused to lock more" if self.pinning_refused else ""
            yield "", f"{format_bytes(self.pinned_bytes)} page-locked{refusal_note}"


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """Figures of reading and decoding.

    Attributes:
        read_bytes: bytes of image files and arrays that the dataset returned.
        bytes: bytes of pixels written to the slots.
        counts: the number of images per decoder; ``"cut"`` counts crops that were first cut from a JPEG with restart
            markers, ``"scaled"`` images decoded at a smaller size and resized, with ``Decode(scale="fast")``.
        refused: the number of images that the device's decoder refused, by reason; this process decoded these on the
            CPU.
        peak_bytes: the largest size of images decoded together on the device, before cropping.
        whole: the number of JPEGs fully decoded where a part would do, because nvImageCodec cannot be used.
    """

    read_bytes: int = 0
    bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    whole: int = 0

    def facts(self, stats: Stats) -> Facts:
        rate = self.read_bytes / stats.seconds
        yield "read", f"{format_bytes(self.read_bytes)}, {format_bytes(rate)}/s; decoded {format_bytes(self.bytes)}"
        if self.counts:
            yield "decoders", ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        for reason, count in self.refused.items():
            yield "refused", f"{count:,} by the device's decoder: {reason}"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The number of samples that were, and were not, in the caches: of `Cached` datasets, summed over all processes on
    this machine that share them."""

    hits: int = 0
    misses: int = 0

    def facts(self, stats: Stats) -> Facts:
        if samples := self.hits + self.misses:
            yield "cache", f"{self.hits:,} hits, {self.misses:,} misses: {self.hits / samples:.0%}"


@dataclass(frozen=True, slots=True)
class FaultStats:
    """The number of samples that failed, and of workers that died."""

    errors: int = 0
    restarts: int = 0

    def facts(self, stats: Stats) -> Facts:
        yield "faults", f"{_format_count(self.errors, 'error')}, {_format_count(self.restarts, 'restart')}"


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
        parts: the parts of the work, with their times.
        workers: current workers, and workers that ended during the time covered. Empty with ``num_workers=0``, where
            the main process does their work.
        chunks_ready, batches_ready: the number of chunks and batches that are ready but not yet yielded, at this
            moment.
        num_workers: the number of workers; elsewhere: whether they run on other machines; chunk_size: the maximum
            number of samples that a worker processes at a time; prefetch_factor: batches prepared ahead of the one in
            use, if they fit in a quarter of the ring or were requested (per worker for an iterable dataset).
        untried: options that could help and are not used: ``"block"`` (``shuffle="block"``, for datasets with several
            samples per file), ``"cache"`` (`Cached`), ``"persistent"`` (``persistent_workers=True``).
        start: how long each step of starting the current workers took, even if that was before the time covered; all 0
            without workers on this machine, and until workers are ready.
        cpu, ring, stage, decode, cache, faults: groups of figures.
        advice: the bottleneck and a remedy, in one sentence.

    Example:
        >>> import gpuload as gl, numpy as np
        >>> pictures = [np.zeros((40, 60, 3), np.uint8)] * 64
        >>> loader = gl.Loader(pictures, batch_size=8, num_workers=0, device="cpu")
        >>> for images in loader:
        ...     pass
        >>> stats = loader.stats()
        >>> stats.batches, stats.images, stats.faults.errors
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
    parts: tuple[Part, ...] = ()
    workers: tuple[WorkerStats, ...] = ()
    chunks_ready: int = 0
    batches_ready: int = 0
    num_workers: int = 0
    elsewhere: bool = False
    chunk_size: int = 1
    prefetch_factor: int = 2
    untried: tuple[str, ...] = ()
    start: Start = field(default_factory=Start)
    cpu: CpuStats = field(default_factory=CpuStats)
    ring: RingStats = field(default_factory=RingStats)
    stage: StageStats = field(default_factory=StageStats)
    decode: DecodeStats = field(default_factory=DecodeStats)
    cache: CacheStats = field(default_factory=CacheStats)
    faults: FaultStats = field(default_factory=FaultStats)
    advice: str = NOTHING_LOADED
    totals: Counters | None = field(default=None, repr=False, compare=False)  # for `since=`

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            path = f": it is stats.{MOVED[name]}" if name in MOVED else ""
            raise AttributeError(f"Stats has no attribute {name!r}{path}")

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
        """Return all values as a dict that can be stored as JSON, with a dict for each group."""
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


def replace_figures(stats: Stats, figures: Mapping[str, object]) -> Stats:
    """Return the statistics with other figures, which are keyed by their paths, such as ``"ring.bytes"``."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for path, value in figures.items():
        group, _, name = path.rpartition(".")
        groups.setdefault(group, {})[name] = value
    values = groups.pop("")
    return replace(stats, **values, **{name: replace(getattr(stats, name), **group) for name, group in groups.items()})


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


def _facts(stats: Stats) -> Facts:
    """Yield the figures that are not in the table."""
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
    for group in (stats.cpu, stats.ring, stats.stage, stats.decode, stats.cache, stats.faults):
        yield from group.facts(stats)


def _wrap_fact(name: str, text: str) -> Iterator[tuple[str, str]]:
    first_line, *more_lines = textwrap.wrap(text, COLUMNS - 10)
    yield from ((name, first_line), *(("", line) for line in more_lines))


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"
