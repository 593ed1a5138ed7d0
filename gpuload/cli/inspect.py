"""``gpuload inspect``: inspects datasets, writes the page, and prints the most important findings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuload import __version__
from gpuload.cli.console import (
    STOPPED,
    echo,
    format_count,
    make_console,
    progress,
    report_error,
    write_json,
    write_text,
)
from gpuload.cli.source import default_recipe, load_recipe, open_source
from gpuload.datasets.files import EXTENSIONS, FORMAT_BY_ENDING
from gpuload.datasets.sample import read
from gpuload.datasets.stores.opening import is_url
from gpuload.errors import GpuloadError, visible
from gpuload.inspection.measure import measure_files, measure_pixels
from gpuload.inspection.page import (
    SIDE,
    choose_rows,
    duplicate_rows,
    format_bytes,
    make_contact_sheet,
    make_pictures,
    render,
)
from gpuload.inspection.summary import Advice, advise, count_ignored_files, is_bad, summarise
from gpuload.loader.limits import usable_cpus

__all__ = ["BAD", "run"]

BAD: Final = 3  # exit status if there are damaged images, or the same image in several datasets
MAX_LISTED: Final = 10  # maximum number of damaged images, and of groups of duplicates, that the terminal lists
STYLES: Final = {"bad": "bold red", "odd": "yellow", "note": "cyan"}
LABELS: Final = {"bad": "fix", "odd": "check", "note": "info"}
SMALL_SIDE: Final = 112  # longer side of a duplicate's picture, in pixels


def run(
    data: Sequence[str],
    *,
    recipe: str | None = None,
    html: str = "",
    as_json: str | None = None,
    limit: int | None = None,
    pixels: str = "4000",
    images: int = 8,
    draws: int = 6,
    seed: int = 0,
    workers: int | None = None,
    extensions: str | None = None,
    console: Console | None = None,
    **store: str | None,
) -> int:
    """Run the inspection. Return the exit status: 0, `BAD`, or 1 if it failed. `store` has the options of
    `open_source`."""
    workers = usable_cpus() if workers is None else workers
    store["extensions"] = extensions and extensions.lower()
    console = console or make_console(stderr=as_json == "-")
    try:
        # The page shows images before Normalize, so drop it from the default recipe.
        transforms = default_recipe()[:-1] if recipe is None else load_recipe(recipe)
        datasets = [_open_dataset(source, store) for source in data]
        ignored = [_count_ignored(dataset, store.get("extensions")) for dataset in datasets]
        with progress(console, "files checked") as update_progress:
            measurements = measure_files(
                datasets, _unique_names(data), limit=limit, seed=seed, workers=workers, update_progress=update_progress
            )
        if pixels != "0":
            max_images = None if pixels == "all" else int(pixels)
            with progress(console, "images decoded") as update_progress:
                measure_pixels(
                    measurements, max_images=max_images, seed=seed, workers=workers, update_progress=update_progress
                )
        summary = summarise(measurements, ignored=ignored)
        advice = advise(summary)
        if html:
            page_workers, rows = min(workers, 2), choose_rows(measurements, images)
            sides = dict.fromkeys(duplicate_rows(summary), SMALL_SIDE) | dict.fromkeys(rows, SIDE)
            sheet = make_contact_sheet(measurements, rows, transforms, draws=draws, seed=seed, workers=page_workers)
            originals, recipe_text = (
                make_pictures(measurements, sides, workers=page_workers),
                "\n".join(map(repr, transforms)),
            )
            write_text(
                html, render(summary, advice, sheet, originals, recipe=recipe_text, seed=seed, version=__version__)
            )
        if as_json is not None:
            write_json(as_json, {**summary, "advice": [item._asdict() for item in advice]})
    except (GpuloadError, OSError, ValueError, TypeError, ImportError) as error:
        return report_error(console, error)
    except KeyboardInterrupt:
        echo(console, "stopped", "yellow")
        return STOPPED
    _print_summary(console, summary, advice)
    if html:
        size = format_bytes(os.path.getsize(html))
        echo(console, f"{visible(html)}: {size}; opens offline in any browser")
    return BAD if is_bad(summary) else 0


def _open_dataset(data: str, store: Mapping[str, str | None]) -> Any:
    """Return a dataset from any source that `gpuload pack` accepts, or from a single image."""
    if os.path.isfile(data) and data.lower().endswith(tuple(FORMAT_BY_ENDING)):
        return [read(data)]
    return open_source(data, store)


def _unique_names(data: Sequence[str]) -> list[str]:
    """Return a name for each dataset: the last parts of its path, as few as the names need to be unique."""
    paths = [source if is_url(source) else os.path.abspath(source) for source in data]
    parts = [[part for part in path.split(os.sep) if part] or [path] for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(path_parts[-count:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(data, 1)]


def _count_ignored(dataset: object, endings: str | None) -> dict[str, int]:
    root, kind = getattr(dataset, "root", None), type(dataset).__name__
    if kind not in ("ImageFolder", "ImageFiles") or not isinstance(root, str) or is_url(root):
        return {}
    extensions = EXTENSIONS if endings is None else tuple(endings.split(","))
    return count_ignored_files(root, extensions, classes=kind == "ImageFolder")


def _print_summary(console: Console, summary: dict[str, Any], advice: Sequence[Advice]) -> None:
    """Print the summary as a table in a terminal, otherwise as plain lines."""
    facts = [(name, visible(value)) for name, value in _summary_lines(summary)]
    if console.is_terminal:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts:
            table.add_row(name, Text(value))
        console.print(table)
    else:
        for name, value in facts:
            echo(console, f"{name}: {value}")
    for kind in summary["pixels"]["kinds"][:1]:
        if kind["normalize"]:
            echo(console, kind["normalize"], to_copy=True)
    for line, style in _finding_lines(summary):
        echo(console, line, style)
    if console.is_terminal:
        console.print()
    for item in advice:
        echo(console, f"{LABELS[item.level]}: {visible(item.title)}", STYLES[item.level])
        for code_line in item.code.splitlines():
            echo(console, f"    {code_line}", to_copy=True)


def _finding_lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines that name damaged files and duplicates, each with its style."""
    damaged = summary["damaged"]
    for image in damaged["listed"][:MAX_LISTED]:
        yield f"damaged: {visible(image['path'])}: {visible(image['cause'])}", "red"
    if (remaining := damaged["count"] - MAX_LISTED) > 0:
        yield f"damaged: {remaining:,} more", "red"
    for kind, label in (("files", "same file"), ("pixels", "same pixels")):
        duplicates = summary["duplicates"][kind]
        has_several_data = len(summary["data"]) > 1
        for group in duplicates["listed"][:MAX_LISTED]:
            names = [
                f"{image['data'] + ': ' if has_several_data else ''}{image['name']}"
                for image in group["images"][:MAX_LISTED]
            ]
            suffix = f", and {group['count'] - MAX_LISTED:,} more" if group["count"] > MAX_LISTED else ""
            yield f"{label}: {', '.join(map(visible, names))}{suffix}", "yellow"
        if (remaining := duplicates["groups"] - MAX_LISTED) > 0:
            yield f"{label}: {remaining:,} more", "yellow"


def _summary_lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    images, sizes, classes = summary["images"], summary["sizes"], summary["classes"]
    for dataset in summary["data"]:
        yield "data", dataset["kind"] or dataset["name"]
    selection = "" if images["looked_at"] == images["samples"] else f" of {images['samples']:,}, drawn at random"
    yield "images", f"{images['looked_at']:,}{selection}, {format_bytes(images['bytes'])}"
    if sizes:
        median = f"{sizes['width']['median']:,.0f}×{sizes['height']['median']:,.0f}"
        smallest, largest = ("×".join(map(str, sizes[name])) for name in ("smallest", "largest"))
        yield (
            "sizes",
            f"median {median}, smallest {smallest}, largest {largest}; {format_count(sizes['distinct'], 'size')}",
        )
        median, smallest, largest = (format_bytes(sizes["bytes"][name]) for name in ("median", "least", "most"))
        yield "files", f"median {median}, {smallest} to {largest}"
        for kind in ("formats", "modes", "sampling"):
            if counts := summary["formats"][kind]:
                yield kind, ", ".join(f"{name} {number:,}" for name, number in counts.items())
    if classes:
        largest, smallest = (
            f"{row['name']} with {row['count']:,}" for row in (classes["listed"][0], classes["listed"][-1])
        )
        yield "classes", f"{classes['count']:,}; the largest is {largest}, the smallest {smallest}"
    files, pixels = (summary["duplicates"][kind]["surplus"] for kind in ("files", "pixels"))
    decoded = f"{images['decoded']:,} images decoded"
    yield "duplicates", f"{format_count(files, 'identical file')}; {pixels:,} with identical pixels ({decoded})"
    yield "damaged", f"{summary['damaged']['count']:,}; over a Decode limit: {summary['refused']['count']:,}"
    for kind in summary["pixels"]["kinds"][:1]:
        for name in ("mean", "std"):
            yield name, ", ".join(f"{value:.4f}" for value in kind[name])
