"""``gpuload bench``: measures how fast the user's data loads on this machine, recommends a setting, names the
bottleneck, and compares the result with torch's DataLoader doing the same work.

The Loader is measured with several settings, and the DataLoader (`gpuload.cli.torch_way`) with several numbers of
workers; then the best settings of both alternate. No measurement waits for the end of an epoch, which can take an hour;
only the batches until all workers have started do not count. The throughput of each part of loading is computed from
the statistics of the best setting. Runs in the main process.

A sample that cannot be loaded is skipped in both loaders, and counted once, however often it is requested.
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
from gpuload.cli.console import (
    echo,
    format_count,
    make_console,
    progress,
    report_error,
    select_device,
    warn_if_busy,
    write_json,
)
from gpuload.cli.processes import cpu_seconds
from gpuload.cli.source import default_recipe, load_recipe, open_source
from gpuload.cli.torch_way import DECODER, data_loader
from gpuload.errors import GpuloadError, LimitError
from gpuload.loader.advice import better_setting
from gpuload.loader.limits import default_workers, usable_cpus

__all__ = [
    "PREFETCH", "Bench", "Pairs", "Row", "comparison_table", "explain_suggestion", "find_bottleneck", "images_of",
    "measure_settings", "medians", "part_rows", "recommend", "repeat_epochs", "report_rows", "run", "worker_counts",
]  # fmt: skip

PREFETCH: Final = 2  # prefetched batches: in total in gpuload, per worker in the DataLoader; the default of each
MAX_SUGGESTED: Final = 2  # settings suggested by ``loader.stats()`` that are tried
GOOD_ENOUGH: Final = 0.97  # a setting with this fraction of the best rate is preferred if it has fewer workers
# The parts of the work per image, each with its names in `loader.stats()`.
PARTS: Final = {"read": ("read",), "decode": ("header", "decode", "pack"), "augment": ("copy", "stage")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured or computed rate.

    Attributes:
        name: ``"read"``, ``"decode"``, ``"augment"``, ``"Loader"`` or ``"DataLoader"``.
        where: a description of the workers or the device that did the work.
        images_per_s: the rate; for a part of the work, the rate that it would reach without the other parts.
        cpu_s_per_1000: the CPU seconds of all processes per 1,000 images; None if unknown.
        image_bytes: the average number of bytes read or decoded per image; None if unknown.
        num_workers, prefetch_factor: the setting of a Loader or DataLoader.
        stats: the statistics of a Loader.
        suggested_setting: the ``num_workers`` and ``prefetch_factor`` that `stats` suggests, if any.
    """

    name: str = ""
    where: str = ""
    images_per_s: float = 0.0
    cpu_s_per_1000: float | None = None
    image_bytes: float | None = None
    num_workers: int = 0
    prefetch_factor: int = 0
    stats: gl.Stats | None = field(default=None, repr=False)
    suggested_setting: tuple[int, int] | None = None

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (10⁶ bytes) per second."""
        return None if self.image_bytes is None else self.images_per_s * self.image_bytes / 1e6

    @property
    def workers(self) -> str:
        return format_count(self.num_workers, "worker")

    @property
    def max_prefetched(self) -> int:
        """The maximum number of prefetched batches."""
        return self.prefetch_factor * (max(1, self.num_workers) if self.name == "DataLoader" else 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dict for JSON, without values that are None."""
        omitted = {"stats", "suggested_setting", *(() if "Loader" in self.name else ("num_workers", "prefetch_factor"))}
        values = {**vars(self), "mb_per_s": self.mb_per_s}
        return {name: value for name, value in values.items() if value is not None and name not in omitted}


RowCallback = Callable[[Row], Row]  # reports progress with a row, and returns the row unchanged
Pairs = list[tuple[Row, Row]]  # one pair per round: gpuload's row, then the DataLoader's


def images_of(batch: object) -> torch.Tensor:
    """Return the images of a batch: its first tensor with at least 4 axes, or else its first tensor.

    Raises:
        ValueError: the batch has no tensors.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    images = next((tensor for tensor in tensors if tensor.ndim >= 4), next(iter(tensors), None))
    if images is None:
        raise ValueError(f"a batch has no tensors; it is a {type(batch).__name__}")
    return images


def repeat_epochs(loader: Iterable[object]) -> Iterator[Any]:
    """Yield the batches of one epoch after another. Raise ValueError if an epoch has no images."""
    while True:
        image_count = 0
        for batch in loader:
            image_count += len(images_of(batch))
            yield batch
        if not image_count:
            raise ValueError("an epoch has no images: no sample can be loaded; run gpuload inspect to see why")


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark of one dataset, with options as for `Loader`. Each measurement takes `seconds`, but at least one
    batch. `failed` has the indices of the samples that a loader could not load."""

    dataset: Any
    transforms: Sequence[Any]
    batch_size: int
    device: torch.device
    seconds: float
    failed: set[Any] = field(default_factory=set)

    def measure_setting(self, name: str, workers: int, prefetch: int) -> Row:
        """Measure a Loader or DataLoader, without a training step."""
        where = format_count(workers, "worker") + (f", prefetch {prefetch}" if name == "Loader" else "")
        row = Row(name=name, where=where, num_workers=workers, prefetch_factor=prefetch)
        with self.batches(row) as (batches, loader):
            self._copy_batches(batches, 1 + row.max_prefetched)  # wait until the workers have started
            stats_before = None if loader is None else loader.stats()
            row = self.measure(row, batches)
            stats = None if loader is None else loader.stats(since=stats_before)
        return replace(row, stats=stats, suggested_setting=better_setting(stats) if stats else None)

    def measure_alternately(self, gpuload_row: Row, peer: Row, rounds: int, report: RowCallback) -> Pairs:
        """Measure two loaders alternately, and return a pair of rows for each round. The first batches of each turn do
        not count, since they were prefetched during the other loader's turn."""
        with self.batches(gpuload_row) as (gpuload_batches, _), self.batches(peer) as (peer_batches, _):
            sides = ((gpuload_row, gpuload_batches), (peer, peer_batches))
            rows = [
                report(self.measure(row, batches, skip=1 + row.max_prefetched))
                for _ in range(rounds)
                for row, batches in sides
            ]
        return list(zip(rows[::2], rows[1::2], strict=True))

    @contextmanager
    def batches(self, row: Row) -> Iterator[tuple[Iterator[Any], gl.Loader | None]]:
        """Yield an endless iterator over the batches of a Loader or DataLoader, and the Loader (None for a DataLoader).
        Samples that fail are skipped and recorded. Leaving the context stops a Loader's workers."""
        size, workers, on_cpu = self.batch_size, row.num_workers, self.device.type == "cpu"
        if row.name == "DataLoader":
            yield (
                self._record_failures(
                    data_loader(self.dataset, batch_size=size, num_workers=workers, pin_memory=not on_cpu)
                ),
                None,
            )
            return
        options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "prefetch_factor": row.prefetch_factor}
        options |= {"rank": 0, "world_size": 1}
        faults = gl.Faults(on_error="skip", max_error_rate=1.0, max_restarts=100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # warnings about skipped samples, which are counted
            with gl.Loader(
                self.dataset, size, transforms=self.transforms, device=self.device, faults=faults, **options
            ) as loader:
                yield repeat_epochs(loader), loader
                self.failed.update(record.index for record in loader.errors)

    def _record_failures(self, loader: Iterable[object]) -> Iterator[torch.Tensor]:
        for images, failed in repeat_epochs(loader):
            self.failed.update(failed)
            yield images

    def measure(self, row: Row, batches: Iterator[object], *, skip: int = 0) -> Row:
        """Copy batches to the device, and return the row with its rate and cost. The first `skip` batches do not
        count."""
        self._copy_batches(batches, skip)
        self._synchronize()
        image_count, cpu_before_s, start_s = 0, cpu_seconds(os.getpid()), time.perf_counter()
        while not image_count or time.perf_counter() - start_s < self.seconds:
            image_count += self._copy_batches(batches, 1)
        self._synchronize()
        wall_s, cpu_s = time.perf_counter() - start_s, cpu_seconds(os.getpid()) - cpu_before_s
        return replace(row, images_per_s=image_count / wall_s, cpu_s_per_1000=1000 * cpu_s / image_count)

    def _copy_batches(self, batches: Iterator[object], count: int) -> int:
        """Copy the next `count` batches to the device, and return the number of images."""
        return sum(len(images_of(next(batches)).to(self.device, non_blocking=True)) for _ in range(count))

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure_settings(
    bench: Bench, counts: Sequence[int], report: RowCallback, report_skip: Callable[[str], None]
) -> list[Row]:
    """Measure the Loader with these numbers of workers; if there are several, also with the larger numbers that the
    best setting's ``loader.stats()`` suggests. Then measure the best setting again with twice as many prefetched
    batches. If a setting is skipped, call `report_skip` with the reason.

    Raises:
        LimitError: the first setting cannot be started.
    """
    rows: list[Row] = []
    settings_to_try = [(workers, PREFETCH) for workers in counts]
    while settings_to_try:
        try:
            rows.append(report(bench.measure_setting("Loader", *settings_to_try.pop(0))))
        except LimitError as error:  # too few open files or too little memory for this many workers
            if not rows:
                raise
            report_skip(str(error))
            continue
        if not settings_to_try and 1 < len(counts) <= len(rows) < len(counts) + MAX_SUGGESTED:
            suggested_setting = recommend(rows).suggested_setting
            if suggested_setting is not None and suggested_setting[0] > max(row.num_workers for row in rows):
                settings_to_try.append(suggested_setting)
    best = recommend(rows)
    rows.append(report(bench.measure_setting("Loader", best.num_workers, 2 * best.prefetch_factor)))
    return rows


def medians(pairs: Pairs) -> dict[str, float]:
    """Return the medians over all rounds. A ratio is the median of the ratios within the rounds; if it is above 1,
    gpuload is faster, or uses less CPU time."""
    costs = [(gpuload_row.cpu_s_per_1000 or 0.0, peer.cpu_s_per_1000 or 0.0) for gpuload_row, peer in pairs]
    values = {
        "images_per_s": [gpuload_row.images_per_s for gpuload_row, _ in pairs],
        "peer_images_per_s": [peer.images_per_s for _, peer in pairs],
        "rate_ratio": [gpuload_row.images_per_s / peer.images_per_s for gpuload_row, peer in pairs],
        "cpu_s_per_1000": [cost for cost, _ in costs],
        "peer_cpu_s_per_1000": [cost for _, cost in costs],
        "cpu_ratio": [peer_cost / (gpuload_cost or peer_cost or 1) for gpuload_cost, peer_cost in costs],
    }
    return {name: statistics.median(samples) for name, samples in values.items()}


# -- the verdict ------------------------------------------------------------------------------------------------------


def worker_counts(cpus: int, default_count: int) -> list[int]:
    """Return the numbers of workers to try: one, half the CPUs, the default, all CPUs, and one and a half times the
    CPUs, which helps if workers wait for a disk."""
    return sorted({1, max(1, cpus // 2), default_count, cpus, cpus + max(1, cpus // 2)})


def recommend(rows: Sequence[Row]) -> Row:
    """Among the rows that are nearly as fast as the fastest, return the row with the fewest workers, then the fewest
    prefetched batches."""
    best_rate = max(row.images_per_s for row in rows)
    good_rows = [row for row in rows if row.images_per_s >= GOOD_ENOUGH * best_rate]
    return min(good_rows, key=lambda row: (row.num_workers, row.prefetch_factor))


def explain_suggestion(best: Row, rows: Sequence[Row]) -> str:
    """Return an explanation for the user if ``loader.stats()`` suggests more workers than the recommended row has;
    otherwise "". The statistics are only estimates; the rates of the rows were measured."""
    workers = best.num_workers
    if best.suggested_setting is None or best.suggested_setting[0] <= workers:
        return ""
    suggested = best.suggested_setting[0]
    suggestion = f"With {best.workers}, loader.stats() may suggest {suggested} workers"
    rows_with_more = [row for row in rows if row.num_workers > workers]
    if not rows_with_more or suggested > max(row.num_workers for row in rows_with_more):
        return f"{suggestion}. That number was not measured: try --workers {suggested}"
    row = min(rows_with_more, key=lambda row: abs(row.num_workers - suggested))
    return f"{suggestion}, but this is an estimate. Measured: {row.workers} load {row.images_per_s:,.0f} images/s"


def part_rows(row: Row, device: torch.device) -> list[Row]:
    """Return one row each for reading, decoding and augmenting, with the rate that the part would reach without the
    others, computed from the statistics of a Loader. Workers read and decode; the device augments, or this process if
    the device is the CPU. Parts that took no time are omitted."""
    stats, workers = row.stats or gl.Stats(), row.num_workers
    worker_process = ("workers", row.workers, workers) if workers else ("main", "this process", 1)
    augmenting_process = ("main" if device.type == "cpu" else "device", device.type.upper(), 1)
    rows = []
    for name, stat_names in PARTS.items():
        process, label, count = augmenting_process if name == "augment" else worker_process
        seconds = sum(stats.part(part, process).seconds for part in stat_names)
        if seconds and stats.images:
            nbytes = {"read": stats.decode.read_bytes, "decode": stats.decode.bytes}.get(name, 0) / stats.images
            rate = count * stats.images / seconds
            rows.append(Row(name=name, where=label, images_per_s=rate, image_bytes=nbytes or None))
    return rows


def find_bottleneck(row: Row, parts: Sequence[Row]) -> tuple[str, str]:
    """Return the name of the bottleneck, and a sentence with the figures; both are "" if there are no parts. Workers
    read and then decode, so if the combined rate of these parts is below the rate of augmenting, the slower of the two
    is the bottleneck."""
    rates = {part.name: part.images_per_s for part in parts}
    if not rates:
        return "", ""
    worker_rates = {name: rate for name, rate in rates.items() if name != "augment"}
    combined_rate = 1 / sum(1 / rate for rate in worker_rates.values()) if worker_rates else math.inf
    slowest = (
        min(worker_rates, key=lambda name: worker_rates[name])
        if combined_rate < rates.get("augment", math.inf)
        else "augment"
    )
    name = {"read": "reading", "decode": "decoding", "augment": "augmenting"}[slowest]
    alone = " alone" * ("augment" in rates)
    figures = [f"reading and decoding{alone} would reach {combined_rate:,.0f} images/s"] if worker_rates else []
    figures += [f"augmenting alone {rates['augment']:,.0f}"] if "augment" in rates else []
    workers = f"with {row.workers}, " if row.num_workers else ""
    return name, f"{name} is the bottleneck: {workers}{', '.join(figures)}"


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
    """Run the benchmark and print the results. Return the exit status: 0, or `FAILED`. `store` has the options of
    `open_source`."""
    console = make_console(stderr=as_json == "-")
    try:
        dataset, torch_device = open_source(data, store), select_device(device)
        transforms = default_recipe() if recipe is None else load_recipe(recipe)
        bench = Bench(
            dataset=dataset, transforms=transforms, batch_size=batch_size, device=torch_device, seconds=seconds
        )
        _print_setup(console, bench, recipe)
        settings, peers, pairs = _measure(bench, console, workers, 0 if recipe else rounds)
        best = recommend(settings)
        setting = {"num_workers": best.num_workers, "prefetch_factor": best.prefetch_factor}
        parts = part_rows(best, torch_device)
        bottleneck_name, why = find_bottleneck(best, parts)
        console.print(_table([parts, settings, peers], best))
        if pairs:
            console.print(comparison_table(best, recommend(peers), pairs))
        for text, style in (
            (_describe_failures(bench, data), "yellow"),
            (why, None),
            (explain_suggestion(best, settings), None),
        ):
            if text:
                echo(console, text, style)
        echo(console, f"Recommended: {', '.join(f'{name}={value}' for name, value in setting.items())}", "bold")
        if as_json is not None:
            report = {
                "data": data, "recipe": recipe, "seconds": seconds, **_context(bench), "failed": len(bench.failed),
                "parts": [row.as_dict() for row in parts], "settings": [row.as_dict() for row in settings],
                "bound": bottleneck_name, "why": why, "recommended": setting,
            }  # fmt: skip
            if pairs:
                round_rows = [{"gpuload": gpuload_row.as_dict(), "peer": peer.as_dict()} for gpuload_row, peer in pairs]
                report["peer"] = {"decoder": DECODER, "settings": [row.as_dict() for row in peers]}
                report["peer"] |= {**medians(pairs), "rounds": round_rows}
            write_json(as_json, report)
    except (GpuloadError, OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        return report_error(console, error)
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


def _print_setup(console: Console, bench: Bench, recipe: str | None) -> None:
    cpus, recipe_name = format_count(usable_cpus(), "CPU"), recipe or "the default recipe"
    echo(console, repr(bench.dataset))
    echo(console, f"on {bench.device}: {cpus}, batches of {bench.batch_size}, {recipe_name}, torch {torch.__version__}")
    if recipe is None:
        echo(console, f"The DataLoader does the same work with {DECODER} and torch's own resize")
    else:
        echo(console, "torch's DataLoader is not measured: it supports only the default recipe")
    warn_if_busy(console)


def _measure(bench: Bench, console: Console, workers: int | None, rounds: int) -> tuple[list[Row], list[Row], Pairs]:
    """Return the rows of the Loader's settings, the rows of the DataLoader's settings, and the rounds of the best two.
    Without rounds, the DataLoader is not measured."""
    cpus = usable_cpus()
    counts = worker_counts(cpus, default_workers(cpus, 1)) if workers is None else [workers]
    peer_counts = sorted({max(1, cpus // 2), cpus}) if workers is None else [workers]
    with report_rows(
        console, "measurements", len(counts) + 1 + (len(peer_counts) + 2 * rounds if rounds else 0)
    ) as report:
        settings = measure_settings(bench, counts, report, lambda reason: echo(console, reason, "yellow"))
        if not rounds:
            return settings, [], []
        peers = [report(bench.measure_setting("DataLoader", count, PREFETCH)) for count in peer_counts]
        return settings, peers, bench.measure_alternately(recommend(settings), recommend(peers), rounds, report)


@contextmanager
def report_rows(console: Console, description: str, total: int) -> Iterator[RowCallback]:
    """Show the progress of measurements: yield a function that reports each row with its rate."""
    completed = 0
    with progress(console, description) as update_progress:

        def report(row: Row) -> Row:
            nonlocal completed
            completed += 1
            where = f", {row.where}" if row.where else ""
            update_progress(completed, max(total, completed), f"{row.name}{where}: {row.images_per_s:,.0f} images/s")
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


def _describe_failures(bench: Bench, data: str) -> str:
    if not (failed := len(bench.failed)):
        return ""
    was, them = ("was", "it") if failed == 1 else ("were", "them")
    return (
        f"{format_count(failed, 'sample')} cannot be loaded, and {was} skipped; find {them} with gpuload inspect {data}"
    )


def comparison_table(gpuload_row: Row, peer: Row, pairs: Pairs) -> Table:
    """Return the table of the rounds in which two loaders alternated."""
    values = medians(pairs)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("head to head")
    for name in (f"gpuload,\n{gpuload_row.workers}", f"{peer.name},\n{peer.workers}", "ratio"):
        table.add_column(name, justify="right", vertical="bottom")
    rates, costs = (("images_per_s", "peer_images_per_s"), ("cpu_s_per_1000", "peer_cpu_s_per_1000"))
    table.add_row("images/s", *(f"{values[name]:,.0f}" for name in rates), f"{values['rate_ratio']:.2f}")
    table.add_row("CPU s per 1,000 images", *(f"{values[name]:.2f}" for name in costs), f"{values['cpu_ratio']:.2f}")
    return table
