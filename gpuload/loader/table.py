"""`Stats` as a table: plain text of up to 80 columns, and the advice below it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpuload.loader.stats import Part, Stats

__all__ = ["COLUMNS", "HEADS", "facts", "headline", "rows_of", "size_of", "table_of"]

COLUMNS: Final = 80
HEADS: Final = ("part", "where", "share", "total", "each", "rate")


def table_of(stats: Stats) -> str:
    """The table."""
    lines = [headline(stats), ""]
    if stats.seconds:
        rows = [HEADS, *rows_of(stats)]
        width = max(11, *(len(part) + 1 for part, *_ in rows))
        lines += [*(_line(row, width) for row in rows), "", *(f"{name:<9} {text}" for name, text in facts(stats)), ""]
    return "\n".join([*lines, *textwrap.wrap(stats.advice, COLUMNS)])


def size_of(nbytes: float) -> str:
    """A number of bytes, in the unit that leaves up to four digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 9_999.5:
            return f"{nbytes:,.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.0f} TB"


def headline(stats: Stats) -> str:
    """What was given, in a line."""
    return (
        f"epoch {stats.epoch}: {stats.seconds:,.1f} s, {_count(stats.batches, 'batch')}, "
        f"{_count(stats.images, 'image')}, "
        f"{stats.images_per_s:,.0f} images/s"
    )


def _line(cells: Sequence[str], width: int) -> str:
    part, where, share, total, each, rate = cells
    return f"{part:<{width}}{where:<9}{share:>6}{total:>11}{each:>13}{rate:>16}"


def rows_of(stats: Stats) -> Iterator[tuple[str, ...]]:
    """A row for each part: the cells under `HEADS`."""
    workers = max(1, stats.num_workers)
    for part in stats.parts:
        time = stats.seconds * (workers if part.where == "workers" else 1)
        share = f"{min(1.0, part.seconds / time):.0%}" if time else ""
        yield part.name, part.where, share, _seconds(part.seconds), _each(part), _rate(part)


def _each(part: Part) -> str:
    return _seconds(part.seconds / part.count) if part.count else ""


def _rate(part: Part) -> str:
    return f"{part.count / part.seconds:,.0f}/s" if part.count and part.seconds >= 1e-6 else ""


def _seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def facts(stats: Stats) -> Iterator[tuple[str, str]]:
    """What else there is to say: names, and texts; without a name it goes on with the one before."""
    yield "next()", f"waited {stats.waiting:.1%} of the time; besides that it takes {stats.next_ms:.2f} ms"
    if stats.first_s:
        yield "", f"after the first batch it waited {stats.waiting_later:.1%}"
    if stats.num_workers:
        shown = " ".join(f"{worker.busy:.0%}" for worker in stats.workers[:8])
        more = " …" if len(stats.workers) > 8 else ""
        yield "workers", f"{stats.busy:.1f} of {stats.num_workers} busy: {shown}{more}"
        yield "ready", f"{_count(stats.chunks_ready, 'chunk')}; {_count(stats.batches_ready, 'batch')}"
    if stats.placement:
        first, *others = textwrap.wrap(stats.placement, COLUMNS - 10)
        yield from (("placed", first), *(("", line) for line in others))
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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
