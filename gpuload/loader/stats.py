"""What `Loader.stats` gives: a frozen snapshot of what loading took, as numbers, as a table, and as HTML.

Plain values, which refer to nothing of their loader, and can be kept, compared and pickled. A snapshot is made of the
difference of two `Counters`; `gpuload.loader.meter` reads these, and `gpuload.loader.advice` writes the last sentence.
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

__all__ = ["COLUMNS", "NOTHING", "Counters", "Part", "Stats", "WorkerStats", "size_of"]

NOTHING: Final = "nothing was loaded yet: ask again after some batches"
COLUMNS: Final = 80  # the width of the table
HEADS: Final = ("part", "where", "share", "total", "each", "rate")


@dataclass(frozen=True, slots=True, eq=False)
class Counters:
    """Counts of a session up to a moment: numbers that only grow, so two moments can be subtracted.

    Attributes:
        session: the session's number in this process.
        main: of the main process, by name.
        decoded, refused: images for the device's decoder, by decoder, and by the reason why it refused them.
        workers: a row for each worker, int64 (workers, `gpuload.workers.counters.FIELDS`).
    """

    session: int
    main: Counter[str] = field(default_factory=Counter)
    decoded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    workers: np.ndarray = field(default_factory=lambda: np.zeros((), np.int64))

    def __sub__(self, earlier: Counters) -> Counters:
        """Return what was counted since an earlier moment of the session. Numbers that do not grow are 0: the rows of
        workers are read while these write them."""
        main, decoded = self.main - earlier.main, self.decoded - earlier.decoded
        refused, workers = self.refused - earlier.refused, np.maximum(self.workers - earlier.workers, 0)
        return Counters(self.session, main, decoded, refused, workers)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the work.

    Attributes:
        name: ``"start"`` (of workers, until they can take a chunk), ``"read"`` (the dataset gives a sample),
            ``"header"`` (samples taken apart, headers read, regions drawn),
            ``"decode"``, ``"pack"`` (labels and descriptions to the slot), ``"collate"``, ``"plan"`` (of batches, for
            the fused kernels), ``"idle"`` (workers without a chunk), ``"wait"`` (the loop, for a batch), ``"hold"``
            (the host, for a device that is behind), ``"device decode"`` (the host, for images that the device decodes),
            ``"slot wait"`` (chunks, for room in the ring), ``"copy"``, ``"stage"`` (the transforms), ``"rest"`` (what
            else ``next()`` does), ``"step"`` (the loop itself).
        where: who does it: the ``"workers"``, all together; the ``"main"`` process; or the ``"device"``, whose times
            are measured for one batch of eight and scaled up.
        seconds: how long it took.
        count: how often: samples for what workers do to each, chunks or batches otherwise.
    """

    name: str
    where: Literal["workers", "main", "device"]
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Statistics of a worker.

    Attributes:
        number: its number, as in `get_worker_info().id`.
        busy: the share of the time since its start ended in which it had something to do, 0 to 1.
        samples: how many it did.
        restarts: how often it died, and another took its place.
    """

    number: int
    busy: float
    samples: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of a `Loader` since its epoch began, or since an earlier snapshot: ``print(loader.stats())``.

    Only time within epochs counts: not what lies between two of them.

    Attributes:
        epoch: the number of the last epoch that began.
        seconds: how long the snapshot covers.
        batches, images, images_per_s: what the loop was given; samples count as images.
        waiting: the share of the time that the loop waited in ``next()`` for a batch, 0 to 1.
        next_ms: host time of a ``next()``, milliseconds, without that waiting.
        first_s: how long it waited for the first batch of the epoch, seconds, if that is covered.
        start: how long the workers that there are now took to start, and what took it, whenever that was; all 0 without
            workers on this machine, and until they are ready.
        parts: what took the time.
        workers: those that there are, and those that left meanwhile; none with ``num_workers=0``, where the main
            process does their parts.
        chunks_ready, batches_ready: done and not given yet, at this moment.
        ring_used_bytes, ring_bytes, ring_limit_bytes: shared memory of slots in use, of all slots, and the most that
            there may be, at this moment; ring_segments: slots there are, ring_grown: slots that were made,
            ring_spilled: chunks that were moved out of a full ring into ordinary memory.
        pinned_bytes: of `ring_bytes`, what is page-locked; pinning_refused: the driver refused to lock some.
        bytes_read: of image files and arrays, as the dataset gave them.
        bytes_decoded: of pixels that went to the slots.
        decoders: how many images each decoder did; ``"cut"``: crops cut out of a JPEG with restart markers first;
            ``"scaled"``: images decoded smaller and resized, with ``Decode(scale="fast")``.
        device_refused: how many images the device's decoder refused, by its reasons; the CPU got them, in this process.
        decode_peak_bytes: the most that was decoded at a time on the device, before it was cropped.
        decoded_whole: JPEGs decoded whole for a part of them, since nvImageCodec cannot be used.
        cache_hits, cache_misses: of `Cached` datasets, by all processes of this machine that share them; and samples of
            a `DeviceCached`. resident_bytes: the pixels that this one keeps on the device.
        errors: samples that failed; restarts: workers that died.
        device: where the batches go; placement: where workers and ring are on a machine with several NUMA nodes, or why
            they are anywhere; "" for batches on the CPU.
        num_workers: how many workers there are; elsewhere: they are on other machines; chunk_size: how many samples one
            does at a time, at most; prefetch_factor: how many batches are in work beside the one in use.
        cpus: how many CPUs this process may use; cpu_s: CPU seconds of this process and its workers together;
            workers_cpu_s: those of workers; workers_queued_s: for how long busy workers were runnable while others had
            the CPUs, where the kernel tells.
        untried: what could help and is not in use: ``"block"`` (``shuffle="block"``, of data sets with several samples
            in a file), ``"cache"`` (`Cached`), ``"persistent"`` (``persistent_workers=True``).
        advice: what the bottleneck is, and what to do about it, in one sentence.

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
    resident_bytes: int = 0
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
    advice: str = NOTHING
    totals: Counters | None = field(default=None, repr=False, compare=False)  # for `since=`

    def part(self, name: str, where: str | None = None) -> Part:
        """Return the part of this name; one of 0 seconds if there is none. Several (of workers and main) are summed up,
        unless `where` says which."""
        parts = [part for part in self.parts if part.name == name and where in (None, part.where)]
        if len(parts) == 1:
            return parts[0]
        seconds, count = sum(part.seconds for part in parts), sum(part.count for part in parts)
        return Part(name, parts[0].where if parts else "main", seconds, count)

    @property
    def busy(self) -> float:
        """How many workers were busy, on average, since they were started."""
        return sum(worker.busy for worker in self.workers)

    @property
    def waiting_later(self) -> float:
        """The share of the time after the first batch that the loop waited, 0 to 1."""
        later_s = self.seconds - self.first_s
        return max(0.0, self.waiting * self.seconds - self.first_s) / later_s if later_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        values = asdict(replace(self, totals=None))
        del values["totals"]
        return values | {name: list(values[name]) for name in ("parts", "workers")}

    def __str__(self) -> str:
        lines = [_headline(self), ""]
        if self.seconds:
            rows = [HEADS, *_rows(self)]
            width = max(11, *(len(part) + 1 for part, *_ in rows))
            lines += [*(_line(row, width) for row in rows), ""]
            lines += [*(f"{name:<9} {text}" for name, text in _facts(self)), ""]
        return "\n".join([*lines, *textwrap.wrap(self.advice, COLUMNS)])

    def _repr_html_(self) -> str:
        tables = [table(_headline(self), HEADS, _rows(self)), table("", (), _facts(self))] if self.seconds else []
        return "\n".join([*(tables or [paragraph(_headline(self))]), paragraph(self.advice)])


def size_of(nbytes: float) -> str:
    """Write a number of bytes in the unit that leaves up to four digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 9_999.5:
            return f"{nbytes:,.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.0f} TB"


def _headline(stats: Stats) -> str:
    return (
        f"epoch {stats.epoch}: {stats.seconds:,.1f} s, {_count(stats.batches, 'batch')}, "
        f"{_count(stats.images, 'image')}, "
        f"{stats.images_per_s:,.0f} images/s"
    )


def _line(cells: Sequence[str], width: int) -> str:
    part, where, share, total, each, rate = cells
    return f"{part:<{width}}{where:<9}{share:>6}{total:>11}{each:>13}{rate:>16}"


def _rows(stats: Stats) -> Iterator[tuple[str, ...]]:
    """Yield a row for each part: the cells under `HEADS`."""
    workers = max(1, stats.num_workers)
    for part in stats.parts:
        time = stats.seconds * (workers if part.where == "workers" else 1)
        share = f"{min(1.0, part.seconds / time):.0%}" if time else ""
        each = _seconds(part.seconds / part.count) if part.count else ""
        rate = f"{part.count / part.seconds:,.0f}/s" if part.count and part.seconds >= 1e-6 else ""
        yield part.name, part.where, share, _seconds(part.seconds), each, rate


def _seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def _facts(stats: Stats) -> Iterator[tuple[str, str]]:
    """Yield names and texts of all other figures; a text without a name continues the one before."""
    yield "next()", f"waited {stats.waiting:.1%} of the time; besides that it takes {stats.next_ms:.2f} ms"
    if stats.first_s:
        yield "", f"after the first batch it waited {stats.waiting_later:.1%}"
    if stats.num_workers:
        shown = " ".join(f"{worker.busy:.0%}" for worker in stats.workers[:8])
        more = " …" if len(stats.workers) > 8 else ""
        yield "workers", f"{stats.busy:.1f} of {stats.num_workers} busy: {shown}{more}"
        yield "ready", f"{_count(stats.chunks_ready, 'chunk')}; {_count(stats.batches_ready, 'batch')}"
    if stats.start.seconds:
        text = f"{_seconds(stats.start.seconds)} until workers were ready: {stats.start.describe()}"
        yield from _wrapped("start", text)
    if stats.placement:
        yield from _wrapped("placed", stats.placement)
    yield (
        "ring",
        (
            f"{size_of(stats.ring_used_bytes)} in use of {size_of(stats.ring_bytes)}, at most "
            f"{size_of(stats.ring_limit_bytes)}; {stats.ring_segments} slots, {stats.ring_grown} new"
        ),
    )
    if stats.device != "cpu":
        refused = ": the driver refused more" if stats.pinning_refused else ""
        yield "", f"{size_of(stats.pinned_bytes)} page-locked{refused}"
    rate = stats.bytes_read / stats.seconds if stats.seconds else 0.0
    yield "read", f"{size_of(stats.bytes_read)}, {size_of(rate)}/s; decoded {size_of(stats.bytes_decoded)}"
    if stats.decoders:
        yield "decoders", ", ".join(f"{name} {count:,}" for name, count in stats.decoders.items())
    for why, count in stats.device_refused.items():
        yield "refused", f"{count:,} by the device's decoder: {why}"
    if stats.resident_bytes:
        yield "kept", f"{size_of(stats.resident_bytes)} on {stats.device}"
    if stats.cache_hits or stats.cache_misses:
        share = stats.cache_hits / (stats.cache_hits + stats.cache_misses)
        yield "cache", f"{stats.cache_hits:,} hits, {stats.cache_misses:,} misses: {share:.0%}"
    yield "faults", f"{_count(stats.errors, 'error')}, {_count(stats.restarts, 'restart')}"


def _wrapped(name: str, text: str) -> Iterator[tuple[str, str]]:
    first, *others = textwrap.wrap(text, COLUMNS - 10)
    yield from ((name, first), *(("", line) for line in others))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
