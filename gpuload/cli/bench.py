"""``gpuload bench``: how fast the user's data load here, with which setting, what the bottleneck is, and how that
compares to torch's DataLoader with the same work.

The Loader is measured with several settings, and the DataLoader (`gpuload.cli.torch_way`) with several numbers of
workers; then the best of both take turns. What each part of loading could do follows from the statistics of the best
setting. Runs in the main process.

A sample that cannot be loaded is left out on both sides, and counted once, however often it comes.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves

import gpuload as gl
from gpuload.cli.console import count_of, device_of, fail, make_console, progress, say, warn_if_busy, write_json
from gpuload.cli.processes import cpu_seconds
from gpuload.cli.source import load_recipe, source_of, usual_recipe
from gpuload.cli.torch_way import DECODER, data_loader
from gpuload.errors import GpuloadError, LimitError
from gpuload.loader.advice import better_setting
from gpuload.loader.limits import default_workers, usable_cpus

__all__ = [
    "PREFETCH", "Bench", "Pairs", "Row", "bottleneck", "candidates", "comparison", "forever", "images_of",
    "measure_settings", "medians", "parts_of", "recommended", "remark_on", "reporting", "run",
]  # fmt: skip

PREFETCH: Final = 2  # batches ahead, gpuload's in total, DataLoader's for each worker: the defaults of both
MOST_MORE: Final = 2  # settings that are tried since ``loader.stats()`` names them
NEAR: Final = 0.97  # of the best rate: as good, with fewer processes
# What `loader.stats()` calls the parts of the work for an image.
PARTS: Final = {"read": ("read",), "decode": ("header", "decode", "pack"), "augment": ("copy", "stage")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rate, and of what.

    Attributes:
        name: ``"read"``, ``"decode"``, ``"augment"``, ``"Loader"`` or ``"DataLoader"``.
        where: who did it.
        images_per_s: the rate; of a part of the work, what it could do if it were all there is to do.
        cpu_s_per_1000: processor seconds of all processes for 1,000 images; None means not known.
        image_bytes: bytes of an image that were read or decoded, on average; None means not known.
        num_workers, prefetch_factor: of a Loader or DataLoader.
        stats: of a Loader.
        better: the ``num_workers`` and ``prefetch_factor`` that these statistics name, if they do.
    """

    name: str = ""
    where: str = ""
    images_per_s: float = 0.0
    cpu_s_per_1000: float | None = None
    image_bytes: float | None = None
    num_workers: int = 0
    prefetch_factor: int = 0
    stats: gl.Stats | None = field(default=None, repr=False)
    better: tuple[int, int] | None = None

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (10⁶) a second."""
        return None if self.image_bytes is None else self.images_per_s * self.image_bytes / 1e6

    @property
    def workers(self) -> str:
        return count_of(self.num_workers, "worker")

    @property
    def ahead(self) -> int:
        """How many batches may be made ahead."""
        return self.prefetch_factor * (max(1, self.num_workers) if self.name == "DataLoader" else 1)

    def as_dict(self) -> dict[str, Any]:
        """Return what there is to say of it, for JSON."""
        left_out = {"stats", "better", *(() if "Loader" in self.name else ("num_workers", "prefetch_factor"))}
        values = {**vars(self), "mb_per_s": self.mb_per_s}
        return {name: value for name, value in values.items() if value is not None and name not in left_out}


Report = Callable[[Row], Row]  # tells how far it is, and returns the row
Pairs = list[tuple[Row, Row]]  # rounds: gpuload's row, then the DataLoader's


def images_of(batch: Any) -> torch.Tensor:
    """Return the images of a batch: its first tensor of images, or else its first tensor.

    Raises:
        ValueError: there is none.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    images = next((tensor for tensor in tensors if tensor.ndim >= 4), next(iter(tensors), None))
    if images is None:
        raise ValueError(f"a batch has no tensors, but is a {type(batch).__name__}")
    return images


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other. ValueError if an epoch has no image."""
    while True:
        images = 0
        for batch in loader:
            images += len(images_of(batch))
            yield batch
        if not images:
            raise ValueError("an epoch has no images: no sample can be loaded; gpuload inspect says why")


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A measurement, with options as for `Loader`, and for how many seconds: each measurement takes at least one
    batch. `failed`: the indices of the samples that could not be loaded, by either side."""

    dataset: Any
    transforms: Sequence[Any]
    batch_size: int
    device: torch.device
    seconds: float
    failed: set[Any] = field(default_factory=set)

    def alone(self, name: str, workers: int, prefetch: int) -> Row:
        """Measure a Loader or DataLoader, without a training step."""
        where = count_of(workers, "worker") + (f", prefetch {prefetch}" if name == "Loader" else "")
        row = Row(name=name, where=where, num_workers=workers, prefetch_factor=prefetch)
        with self.batches(row) as (batches, loader):
            self._take(batches, 1 + row.ahead)  # workers start
            before = None if loader is None else loader.stats()
            row = self.measured(row, batches)
            stats = None if loader is None else loader.stats(since=before)
        return replace(row, stats=stats, better=better_setting(stats) if stats else None)

    def take_turns(self, mine: Row, peer: Row, rounds: int, report: Report) -> Pairs:
        """Measure two by turns. Each turn begins with batches that do not count: what was made ahead during the other
        one's turn."""
        with self.batches(mine) as (first, _), self.batches(peer) as (second, _):
            sides = ((mine, first), (peer, second))
            measured = [
                report(self.measured(row, batches, skip=1 + row.ahead)) for _ in range(rounds) for row, batches in sides
            ]
        return list(zip(measured[::2], measured[1::2], strict=True))

    @contextmanager
    def batches(self, row: Row) -> Iterator[tuple[Iterator[Any], gl.Loader | None]]:
        """Yield the batches of a Loader or DataLoader, of one epoch after the other, and the Loader. Samples that fail
        are left out and noted. A Loader's workers end with it."""
        size, workers, on_cpu = self.batch_size, row.num_workers, self.device.type == "cpu"
        if row.name == "DataLoader":
            yield (
                self._noted(data_loader(self.dataset, batch_size=size, num_workers=workers, pin_memory=not on_cpu)),
                None,
            )
            return
        options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "prefetch_factor": row.prefetch_factor}
        faults = gl.Faults(on_error="skip", max_error_rate=1.0, max_restarts=100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that a sample is left out: they are counted
            with gl.Loader(
                self.dataset, size, transforms=self.transforms, device=self.device, faults=faults, **options
            ) as loader:
                yield forever(loader), loader
                self.failed.update(record.index for record in loader.errors)

    def _noted(self, loader: Iterable[Any]) -> Iterator[torch.Tensor]:
        for images, failed in forever(loader):
            self.failed.update(failed)
            yield images

    def measured(self, row: Row, batches: Iterator[Any], *, skip: int = 0) -> Row:
        """Take batches to the device, and return the row with its rate and its cost. The first ones do not count."""
        self._take(batches, skip)
        self._wait()
        images, cpu_before_s, began_s = 0, cpu_seconds(os.getpid()), time.perf_counter()
        while not images or time.perf_counter() - began_s < self.seconds:
            images += self._take(batches, 1)
        self._wait()
        wall_s, cpu_s = time.perf_counter() - began_s, cpu_seconds(os.getpid()) - cpu_before_s
        return replace(row, images_per_s=images / wall_s, cpu_s_per_1000=1000 * cpu_s / images)

    def _take(self, batches: Iterator[Any], count: int) -> int:
        return sum(len(images_of(next(batches)).to(self.device, non_blocking=True)) for _ in range(count))

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure_settings(bench: Bench, numbers: Sequence[int], report: Report, remark: Callable[[str], None]) -> list[Row]:
    """Measure the Loader with these numbers of workers, with those that ``loader.stats()`` of the best one names (if
    there are several), and the best of all with twice the batches ahead. `remark` is told why one is left out.

    Raises:
        LimitError: not even one of them can be started.
    """
    rows: list[Row] = []
    to_try = [(workers, PREFETCH) for workers in numbers]
    while to_try:
        try:
            rows.append(report(bench.alone("Loader", *to_try.pop(0))))
        except LimitError as error:  # too few files or too little memory for so many
            if not rows:
                raise
            remark(str(error))
            continue
        if not to_try and 1 < len(numbers) <= len(rows) < len(numbers) + MOST_MORE:
            better = recommended(rows).better
            if better is not None and better[0] > max(row.num_workers for row in rows):
                to_try.append(better)
    best = recommended(rows)
    rows.append(report(bench.alone("Loader", best.num_workers, 2 * best.prefetch_factor)))
    return rows


def medians(pairs: Pairs) -> dict[str, float]:
    """Return the medians of rounds. A ratio is the median of the ratios within the rounds: above 1, gpuload is faster,
    or takes less."""
    costs = [(mine.cpu_s_per_1000 or 0.0, peer.cpu_s_per_1000 or 0.0) for mine, peer in pairs]
    values = {
        "images_per_s": [mine.images_per_s for mine, _ in pairs],
        "peer_images_per_s": [peer.images_per_s for _, peer in pairs],
        "rate_ratio": [mine.images_per_s / peer.images_per_s for mine, peer in pairs],
        "cpu_s_per_1000": [cost for cost, _ in costs],
        "peer_cpu_s_per_1000": [cost for _, cost in costs],
        "cpu_ratio": [peer / (mine or peer or 1) for mine, peer in costs],
    }
    return {name: statistics.median(each) for name, each in values.items()}


# -- the verdict ------------------------------------------------------------------------------------------------------


def candidates(cpus: int, usual: int) -> list[int]:
    """Return the numbers of workers that are tried: one, half the CPUs, the default, all CPUs, and half as many again,
    which help where workers wait for a disk."""
    return sorted({1, max(1, cpus // 2), usual, cpus, cpus + max(1, cpus // 2)})


def recommended(rows: Sequence[Row]) -> Row:
    """Return, of those that are nearly as fast as the fastest, the one with the fewest workers, then batches ahead."""
    best = max(row.images_per_s for row in rows)
    good = [row for row in rows if row.images_per_s >= NEAR * best]
    return min(good, key=lambda row: (row.num_workers, row.prefetch_factor))


def remark_on(best: Row, rows: Sequence[Row]) -> str:
    """Explain a recommended row whose ``loader.stats()`` names more workers, since these reckon what was measured here;
    "" if they do not."""
    workers = best.num_workers
    if best.better is None or best.better[0] <= workers:
        return ""
    wanted = best.better[0]
    names = f"Of the Loader with {best.workers}, loader.stats() may say that {wanted} would be faster"
    more = [row for row in rows if row.num_workers > workers]
    if not more or wanted > max(row.num_workers for row in more):
        return f"{names}. So many were not measured: try --workers {wanted}"
    row = min(more, key=lambda row: abs(row.num_workers - wanted))
    return f"{names}, as it cannot try them: measured, {row.workers} load {row.images_per_s:,.0f} images/s"


def parts_of(row: Row, device: torch.device) -> list[Row]:
    """Return what reading, decoding and augmenting could do, each alone, by the statistics of a Loader: its workers if
    they did nothing else; the device, or this process on the CPU. Parts that took no time are left out."""
    stats, workers = row.stats or gl.Stats(), row.num_workers
    by_workers = ("workers", row.workers, workers) if workers else ("main", "this process", 1)
    by_device = ("main" if device.type == "cpu" else "device", device.type.upper(), 1)
    rows = []
    for name, names in PARTS.items():
        where, who, count = by_device if name == "augment" else by_workers
        seconds = sum(stats.part(one, where).seconds for one in names)
        if seconds and stats.images:
            nbytes = {"read": stats.bytes_read, "decode": stats.bytes_decoded}.get(name, 0) / stats.images
            rate = count * stats.images / seconds
            rows.append(Row(name=name, where=who, images_per_s=rate, image_bytes=nbytes or None))
    return rows


def bottleneck(row: Row, parts: Sequence[Row]) -> tuple[str, str]:
    """Return which of the parts of a Loader is the bottleneck, and a sentence with the figures. Workers read and decode
    one after the other, so the slower of both is it if they are slower together than what augments. Empty texts if
    there are no parts."""
    rates = {part.name: part.images_per_s for part in parts}
    if not rates:
        return "", ""
    work = {name: rate for name, rate in rates.items() if name != "augment"}
    together = 1 / sum(1 / rate for rate in work.values()) if work else math.inf
    slowest = min(work, key=lambda name: work[name]) if together < rates.get("augment", math.inf) else "augment"
    name = {"read": "reading", "decode": "decoding", "augment": "augmenting"}[slowest]
    figures = [f"reading and decoding would do {together:,.0f} images/s"] if work else []
    figures += [f"augmenting {rates['augment']:,.0f}"] if "augment" in rates else []
    workers = f"with {row.workers}, " if row.num_workers else ""
    return name, f"{name} is the bottleneck: {workers}{', '.join(figures)}{', each alone' * (len(figures) > 1)}"


# -- the command ------------------------------------------------------------------------------------------------------


def run(
    data: str,
    *,
    recipe: str | None,
    workers: int | None,
    batch_size: int,
    seconds: float,
    rounds: int,
    device: str | None,
    as_json: str | None,
    **store: str | None,
) -> int:
    """Measure and tell. Return the exit status. `store`: the options of `source_of`."""
    console = make_console(stderr=as_json == "-")
    try:
        dataset, place = source_of(data, store), device_of(device)
        transforms = usual_recipe() if recipe is None else load_recipe(recipe)
        bench = Bench(dataset=dataset, transforms=transforms, batch_size=batch_size, device=place, seconds=seconds)
        _introduce(console, bench, recipe)
        settings, peers, pairs = _measure(bench, console, workers, 0 if recipe else rounds)
        best = recommended(settings)
        setting = {"num_workers": best.num_workers, "prefetch_factor": best.prefetch_factor}
        parts = parts_of(best, place)
        bound, why = bottleneck(best, parts)
        console.print(_table([parts, settings, peers], best))
        if pairs:
            console.print(comparison(best, recommended(peers), pairs))
        for text, style in ((_failures(bench, data), "yellow"), (why, None), (remark_on(best, settings), None)):
            if text:
                say(console, text, style)
        say(console, f"Recommended: {', '.join(f'{name}={value}' for name, value in setting.items())}", "bold")
        if as_json is not None:
            report = {
                "data": data, "recipe": recipe, "seconds": seconds, **_context(bench), "failed": len(bench.failed),
                "parts": [row.as_dict() for row in parts], "settings": [row.as_dict() for row in settings],
                "bound": bound, "why": why, "recommended": setting,
            }  # fmt: skip
            if pairs:
                rounds_made = [{"gpuload": mine.as_dict(), "peer": peer.as_dict()} for mine, peer in pairs]
                report["peer"] = {"decoder": DECODER, "settings": [row.as_dict() for row in peers]}
                report["peer"] |= {**medians(pairs), "rounds": rounds_made}
            write_json(as_json, report)
    except (GpuloadError, OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        return fail(console, error)
    return 0


def _context(bench: Bench) -> dict[str, Any]:
    return {
        "dataset": repr(bench.dataset),
        "images": len(bench.dataset),
        "batch_size": bench.batch_size,
        "device": str(bench.device),
        "cpus": usable_cpus(),
        "machine": platform.machine(),
        "gpuload": gl.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _introduce(console: Console, bench: Bench, recipe: str | None) -> None:
    cpus, usual = count_of(usable_cpus(), "CPU"), recipe or "the usual recipe"
    say(console, repr(bench.dataset))
    say(console, f"on {bench.device}: {cpus}, batches of {bench.batch_size}, {usual}, torch {torch.__version__}")
    if recipe is None:
        say(console, f"The DataLoader does the same with {DECODER} and torch's own resize")
    else:
        say(console, "torch's DataLoader is measured with the usual recipe only, so not now")
    warn_if_busy(console)


def _measure(bench: Bench, console: Console, workers: int | None, rounds: int) -> tuple[list[Row], list[Row], Pairs]:
    """Return the Loader's settings, the DataLoader's, and the rounds of the best of both. No rounds: no DataLoader."""
    cpus = usable_cpus()
    numbers = candidates(cpus, default_workers(cpus, 1)) if workers is None else [workers]
    of_peer = sorted({max(1, cpus // 2), cpus}) if workers is None else [workers]
    with reporting(console, "measurements", len(numbers) + 1 + (len(of_peer) + 2 * rounds if rounds else 0)) as report:
        settings = measure_settings(bench, numbers, report, lambda remark: say(console, remark, "yellow"))
        if not rounds:
            return settings, [], []
        peers = [report(bench.alone("DataLoader", number, PREFETCH)) for number in of_peer]
        return settings, peers, bench.take_turns(recommended(settings), recommended(peers), rounds, report)


@contextmanager
def reporting(console: Console, what: str, total: int) -> Iterator[Report]:
    """Show the progress of measurements, each with its rate."""
    done = 0
    with progress(console, what) as tell:

        def report(row: Row) -> Row:
            nonlocal done
            done += 1
            where = f", {row.where}" if row.where else ""
            tell(done, max(total, done), f"{row.name}{where}: {row.images_per_s:,.0f} images/s")
            return row

        yield report


def _table(groups: Sequence[Sequence[Row]], best: Row) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("", "images/s", "MB/s", "CPU s per 1,000"):
        table.add_column(name, justify="left" if not name else "right")
    for rows in groups:
        for row in rows:
            mb = "" if row.mb_per_s is None else f"{row.mb_per_s:,.0f}"
            cost = "" if row.cpu_s_per_1000 is None else f"{row.cpu_s_per_1000:.2f}"
            style = "bold" if row is best else None
            table.add_row(f"{row.name}, {row.where}", f"{row.images_per_s:,.0f}", mb, cost, style=style)
        table.add_section()
    return table


def _failures(bench: Bench, data: str) -> str:
    if not (failed := len(bench.failed)):
        return ""
    was, them = ("was", "it") if failed == 1 else ("were", "them")
    return f"{count_of(failed, 'sample')} cannot be loaded, and {was} left out: gpuload inspect {data} names {them}"


def comparison(mine: Row, peer: Row, pairs: Pairs) -> Table:
    """Return the table of rounds in which these two took turns."""
    values = medians(pairs)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("by turns")
    for name in (f"gpuload,\n{mine.workers}", f"{peer.name},\n{peer.workers}", "ratio"):
        table.add_column(name, justify="right", vertical="bottom")
    rates, costs = (("images_per_s", "peer_images_per_s"), ("cpu_s_per_1000", "peer_cpu_s_per_1000"))
    table.add_row("images/s", *(f"{values[name]:,.0f}" for name in rates), f"{values['rate_ratio']:.2f}")
    table.add_row("CPU s per 1,000 images", *(f"{values[name]:.2f}" for name in costs), f"{values['cpu_ratio']:.2f}")
    return table
