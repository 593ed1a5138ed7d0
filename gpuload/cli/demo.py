"""``gpuload demo``: real photographs through gpuload and through torch's DataLoader, side by side, then training.

Everything runs in the foreground of one process and its workers; output goes to `Settings.out`.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gpuload as gl
from gpuload.cli.console import bars, count_of, fail, make_console, progress, say
from gpuload.cli.measure import Cost, images_of, measure
from gpuload.cli.output import busy, device_of
from gpuload.cli.pictures import PhotographsMissing, make_folder
from gpuload.cli.recipe import MEAN, SIZE, STD, usual_recipe
from gpuload.cli.sheet import ContactSheet, to_uint8
from gpuload.cli.torch_way import Pictures, usual_way
from gpuload.cli.training import Trainer
from gpuload.loader.limits import usable_cpus

__all__ = ["Settings", "compared", "run", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command line; see `gpuload.cli.app.demo`."""

    data: Path | None
    out: Path
    workers: int | None
    batch_size: int
    epochs: int
    device: str | None
    images: int


def run(settings: Settings, console: Console | None = None) -> int:
    """Run the demo. Returns the exit status."""
    console = console or make_console()
    try:
        dataset, origin = _dataset(settings, console)
        device = device_of(settings.device)
    except (PhotographsMissing, OSError, ValueError, RuntimeError) as error:
        return fail(console, error)
    workers = min(8, usable_cpus()) if settings.workers is None else settings.workers
    way = usual_way()
    classes = list(getattr(dataset, "classes", []))
    of_classes = f" of {count_of(len(classes), 'class', 'classes')}" if classes else ""
    console.print(
        f"[bold]gpuload {gl.__version__}[/] on {device}: {count_of(workers, 'worker')}, "
        f"{count_of(usable_cpus(), 'CPU')}, batches of {settings.batch_size}, torch {torch.__version__}",
        soft_wrap=True,
    )
    say(console, f"{count_of(len(dataset), 'image')}{of_classes} in {origin}")
    say(console, f"The DataLoader decodes with {way.name} ({way.note})\n")
    if remark := busy(os.getloadavg()[0], os.cpu_count() or 1):
        say(console, remark, "yellow")
    loader = gl.Loader(
        dataset,
        batch_size=settings.batch_size,
        shuffle=True,
        transforms=usual_recipe(),
        num_workers=workers,
        device=device,
    )
    peer = torch.utils.data.DataLoader(
        Pictures(dataset, way.decode, SIZE, MEAN, STD),
        batch_size=settings.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type != "cpu",
    )
    peers_name = f"DataLoader, {way.name}"
    with bars(console, transient=False) as begin:

        def timed(name: str, batches: Any) -> Cost:
            tell, done, started = begin(f"images, {name}", settings.epochs * len(dataset)), 0, time.perf_counter()

            def on_batch(count: int) -> None:
                nonlocal done
                done += count
                tell(done, note=f"{done / (time.perf_counter() - started):,.0f} images/s")

            return measure(batches, settings.epochs, device, on_batch)

        costs = {"gpuload": timed("gpuload", loader), peers_name: timed(peers_name, peer)}
    del peer  # ends its workers
    console.print(_table(costs, settings.epochs))

    sheet = ContactSheet(classes)
    loader.set_epoch(0)  # the same batches as above once more: the draws are a function of seed, epoch and position
    if classes:
        _train(loader, sheet, len(classes), settings.epochs, device, console)
    else:
        console.print("\nNo folders of classes in the data, so nothing is trained on it.\n", soft_wrap=True)
        for batch in loader:
            sheet.add(to_uint8(images_of(batch), MEAN, STD), None)
            if sheet.full:
                break
    loader.close()
    path = settings.out / "contact-sheet.png"
    sheet.write(path)
    console.print(f"Contact sheet of augmented images: [bold]{path.resolve()}[/]", soft_wrap=True)
    return 0


def _dataset(settings: Settings, console: Console) -> tuple[Any, str]:
    """The images, with or without classes, and where they are, for the user to read."""
    if settings.data is not None:
        data = settings.data
        if not data.is_dir():
            raise FileNotFoundError(f"--data {data}: there is no such folder")
        has_classes = any(entry.is_dir() for entry in data.iterdir())
        return (gl.ImageFolder(data) if has_classes else gl.ImageFiles(data)), str(data)
    with bars(console) as begin:
        root = make_folder(
            settings.out / "photographs",
            count=settings.images,
            progress=begin("photographs made", settings.images),
        )
    return gl.ImageFolder(root), f"{root}, made from scikit-image's photographs"


def _table(costs: dict[str, Cost], epochs: int) -> Table:
    """The results: a line for each figure, the figures of both loaders, and how many times better the first is."""
    first, second = costs.values()
    work = f"decode, random crop to {SIZE}×{SIZE}, flip, normalise"
    table = Table(title=f"{count_of(epochs, 'epoch')}: {work}", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in costs:
        table.add_column(name, justify="right")
    table.add_column("", justify="right")

    def row(name: str, key: str, form: str, higher_is_better: bool) -> None:
        mine, theirs = getattr(first, key), getattr(second, key)
        if mine is None or theirs is None:
            return
        table.add_row(name, form.format(mine), form.format(theirs), compared(mine, theirs, higher_is_better))

    row("images per second", "images_per_s", "{:,.0f}", True)
    row("CPU seconds per 1,000 images", "cpu_s_per_1000", "{:.2f}", False)
    row("seconds to the first batch", "first_batch_s", "{:.2f}", False)
    row("memory per worker, MB", "worker_mb", "{:,.0f}", False)
    return table


def compared(mine: float, theirs: float, higher_is_better: bool) -> str:
    """The first figure compared to the second: "2.0 × more"; "" if one of them is missing."""
    ratio = mine / theirs if mine and theirs else math.nan
    if math.isnan(ratio):
        return ""
    if ratio > 1:
        word = "more"
    elif higher_is_better:
        word = "of that"
    else:
        ratio, word = 1 / ratio, "less"
    return "the same" if f"{ratio:.1f}" == "1.0" else f"{ratio:.1f} × {word}"


def _train(
    loader: gl.Loader, sheet: ContactSheet, classes: int, epochs: int, device: torch.device, console: Console
) -> None:
    """Train a small network on the batches, report the loss, and keep some images for the sheet."""
    console.print("\nThe same batches once more, with a small network training on them:")
    trainer = Trainer(classes, device)
    threads = torch.get_num_threads()
    # On two cores, two spinning threads beside two workers: a step took 290 ms, with one thread 39 ms.
    torch.set_num_threads(max(1, usable_cpus() - loader.num_workers))
    losses: list[float] = []
    report: list[str] = []
    with progress(console, "images trained on", epochs * len(loader.dataset)) as tell:
        for epoch in range(epochs):
            of_epoch, right, seen = [], 0, 0
            for images, labels in loader:
                if not sheet.full:
                    sheet.add(to_uint8(images, MEAN, STD), labels.tolist())
                loss, hits = trainer.step(images, labels)
                of_epoch.append(loss)
                right, seen = right + hits, seen + len(images)
                tell(epoch * len(loader.dataset) + seen, note=f"loss {loss:.2f}")
            losses += of_epoch
            mean = sum(of_epoch) / len(of_epoch)
            report.append(f"epoch {epoch + 1}: loss {mean:.2f}, {right / seen:.0%} of the images classified correctly")
    torch.set_num_threads(threads)
    console.print("\n".join(report), soft_wrap=True)
    console.print(f"loss of each step: {losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}\n", soft_wrap=True)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as a row of bars, averaged to at most `width` of them.

    >>> sparkline([1.0, 0.5, 0.0])
    '█▅▁'
    """
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
