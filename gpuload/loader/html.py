"""`Loader` and `Stats` as small HTML tables, which notebooks show. Runs in the main process."""

from __future__ import annotations

from reprlib import Repr
from typing import TYPE_CHECKING

from gpuload.loader.table import HEADS, facts, headline, rows_of
from gpuload.stage.html import LONGEST, paragraph, shortened, table

if TYPE_CHECKING:
    from gpuload.loader.loader import Loader
    from gpuload.loader.stats import Stats

__all__ = ["loader_html", "stats_html"]


def stats_html(stats: Stats) -> str:
    """The same as `Stats` prints: what was given, where the time went, the other figures, the advice."""
    tables = [table(headline(stats), HEADS, rows_of(stats)), table("", (), facts(stats))] if stats.seconds else []
    return "\n".join([*(tables or [paragraph(headline(stats))]), paragraph(stats.advice)])


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
