"""The command ``gpuload bench``: its options, the order of measurements, the report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpuload.cli.arguments import Data, Device, Fields, Image, JsonFile, Plot, Recipe, Target
from gpuload.cli.bench.verdict import Part, Setting

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "bench", "run"]

EXAMPLES: Final = (
    "gpuload bench imagenet/train",
    "gpuload bench 'shards/train-*.tar' --recipe recipe.py:train --batch-size 256",
    "gpuload bench images --json bench.json --plot bench.png",
)


def bench(
    data: Data,
    recipe: Recipe = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 3.0,
    device: Device = None,
    fields: Fields = None,
    image: Image = None,
    target: Target = None,
    as_json: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure what this machine reads, decodes, augments, copies and loads, and recommend a setting.

    Each part is measured alone, then the Loader with several numbers of workers.

    Files come from the disk or from the kernel's cache, as in an epoch that begins now.

    Exit status: 0; 1 if the data or an option cannot be used.
    """
    given = {"fields": fields, "image": image, "target": target}
    options = {"recipe": recipe, "batch_size": batch_size, "seconds": seconds, "device": device}
    raise typer.Exit(run(data, given=given, as_json=as_json, plot=plot, **options))


def run(
    data: str,
    *,
    given: dict[str, str | None],
    recipe: str | None,
    batch_size: int,
    seconds: float,
    device: str | None,
    as_json: str | None = None,
    plot: str | None = None,
    console: Console | None = None,
) -> int:
    """Measure and tell. Returns the exit status."""
    from gpuload.cli.bench.parts import Bench, measure_all
    from gpuload.cli.bench.verdict import bound_by, recommended
    from gpuload.cli.console import count_of, fail, make_console, progress, say
    from gpuload.cli.output import busy, check_plot, context, device_of, draw_bars, opened, write_json
    from gpuload.cli.recipe import load_recipe, usual_recipe
    from gpuload.errors import GpuloadError
    from gpuload.loader.limits import usable_cpus

    console = console or make_console(stderr=as_json == "-")
    try:
        check_plot(plot)
        dataset, place, cpus = opened(data, given), device_of(device), usable_cpus()
        transforms = usual_recipe() if recipe is None else load_recipe(recipe)
        say(console, f"{dataset!r}")
        say(console, f"on {place}: {count_of(cpus, 'CPU')}, batches of {batch_size}, {recipe or 'the usual recipe'}\n")
        measured = Bench(dataset=dataset, transforms=transforms, batch_size=batch_size, device=place, seconds=seconds)
        if remark := busy(os.getloadavg()[0], os.cpu_count() or 1):
            say(console, remark, "yellow")
        with progress(console, "measurements") as tell:

            def report(done: int, total: int, made: Part | Setting) -> None:
                name = made.name if isinstance(made, Part) else f"Loader, {made.name}"
                tell(done, total, f"{name}: {made.images_per_s:,.0f} images/s")

            found = measure_all(measured, cpus, report, lambda remark: say(console, remark, "yellow"))
        best = recommended(found.settings)
        on_cpu = place.type == "cpu"
        bound, why = bound_by(
            read=found.read, decode=found.decode, augment=found.augment, copy=found.copy, cpus=cpus, on_cpu=on_cpu
        )
        console.print(_table(found.parts, found.settings, best))
        if found.failed:
            say(console, f"{count_of(found.failed, 'sample')} cannot be loaded and were left out", "yellow")
        say(console, why)
        if best.advice:
            say(console, f"Of the Loader with {best.name}, stats() says: {best.advice}")
        say(console, f"Recommended: num_workers={best.num_workers}, prefetch_factor={best.prefetch_factor}", "bold")
        if as_json is not None:
            write_json(
                as_json,
                {
                    **context(data, dataset, place),
                    "recipe": recipe,
                    "batch_size": batch_size,
                    "seconds": seconds,
                    "parts": [{**asdict(part), "mb_per_s": part.mb_per_s} for part in found.parts],
                    "settings": [asdict(setting) for setting in found.settings],
                    "failed": found.failed,
                    "bound": bound,
                    "why": why,
                    "recommended": {"num_workers": best.num_workers, "prefetch_factor": best.prefetch_factor},
                },
            )
        if plot is not None:
            shown = ("decode", "augment", *(("read",) if bound == "reading" else ()))  # others are far beyond
            bars = [(f"{part.name}, {part.where}", part.images_per_s) for part in found.parts if part.name in shown]
            bars += [(f"Loader, {setting.name}", setting.images_per_s) for setting in found.settings]
            draw_bars(plot, f"gpuload bench {data}, on {place}", {"images/s": bars})
    except (GpuloadError, OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        return fail(console, error)
    return 0


def _table(parts: Sequence[Part], settings: Sequence[Setting], best: Setting) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("", "images/s", "MB/s", "CPU s per 1,000"):
        table.add_column(name, justify="left" if not name else "right")
    for part in parts:
        mb = "" if part.mb_per_s is None else f"{part.mb_per_s:,.0f}"
        table.add_row(f"{part.name}, {part.where}", f"{part.images_per_s:,.0f}", mb, f"{part.cpu_s_per_1000:.2f}")
    table.add_section()
    for setting in settings:
        row = (f"Loader, {setting.name}", f"{setting.images_per_s:,.0f}", "", f"{setting.cpu_s_per_1000:.2f}")
        table.add_row(*row, style="bold" if setting is best else None)
    return table
