"""`Loader` and `Stats` as small HTML tables, which notebooks show. Runs in the main process."""

from __future__ import annotations

from reprlib import Repr
from typing import TYPE_CHECKING

from gpuload.stage.html import LONGEST, paragraph, shortened, table

if TYPE_CHECKING:
    from gpuload.loader.loader import Loader
    from gpuload.loader.stats import Part, Stats

__all__ = ["loader_html", "stats_html"]


def stats_html(stats: Stats) -> str:
    """The figures of a snapshot, where the time went, and the advice."""

    def row(part: Part) -> tuple[str, ...]:
        each = f"{1e3 * part.seconds / part.count:.3f} ms" if part.count else ""
        return part.name, part.where, f"{part.seconds:.2f} s", f"{part.count:,}", each

    busy = sum(worker.busy for worker in stats.workers)
    workers = f"{busy:.1f} of {len(stats.workers)} busy" if stats.workers else "none"
    found = stats.cache_hits + stats.cache_misses
    used, taken, most = map(_mb, (stats.ring_used_bytes, stats.ring_bytes, stats.ring_limit_bytes))
    figures = [
        ("images/s", f"{stats.images_per_s:,.0f}"),
        ("waiting in next()", f"{stats.waiting:.0%} of {stats.seconds:.1f} s"),
        ("next() that does not wait", f"{stats.next_ms:.2f} ms"),
        ("batches, images", f"{stats.batches:,}, {stats.images:,}"),
        ("workers", workers),
        ("ready", f"batches {stats.batches_ready}, chunks {stats.chunks_ready}"),
        ("ring", f"{used} used of {taken}, at most {most}"),
        ("page-locked", _mb(stats.pinned_bytes)),
        ("read", _mb(stats.bytes_read)),
        ("decoders", ", ".join(f"{name} {count:,}" for name, count in stats.decoders.items()) or "none"),
        *([("cache", f"{stats.cache_hits:,} of {found:,} found")] if found else []),
        ("failed samples, restarts", f"{stats.errors:,}, {stats.restarts:,}"),
    ]
    parts = table("Where the time went", ("part", "where", "time", "times", "each"), map(row, stats.parts))
    return "\n".join([table(f"Epoch {stats.epoch}", (), figures), parts, paragraph(stats.advice)])


def loader_html(loader: Loader) -> str:
    """The options that matter, and where it stands. Starts nothing, and asks no device."""
    options = loader._options
    device = options.stage.device if loader._session is None else loader._session.stage.device
    samples = options.order.samples
    transforms = " → ".join(repr(transform) for transform in options.chain.transforms)
    last = options.chain.last
    short = Repr()
    short.maxother = short.maxstring = LONGEST
    rows = [
        ("dataset", shortened(short.repr(loader.dataset))),
        ("samples", "not known" if samples is None else f"{samples:,}"),
        ("batch_size", str(loader.batch_size)),
        ("shuffle, seed", f"{loader.shuffle}, {options.order.seed}"),
        ("transforms", " → ".join(filter(None, (transforms, last))) or "none"),
        ("workers", str(loader.num_workers)),
        ("device", "the current GPU, or the CPU" if device is None else str(device)),
        ("epoch", f"{loader.epoch}, {'not begun' if loader._session is None else 'begun'}"),
    ]
    return table("gpuload.Loader", (), rows)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
