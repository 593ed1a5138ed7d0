"""What ``gpuload inspect`` does: looks at data sets, writes the page, says the most important things."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from gpuload.cli.console import STOPPED, bars, count_of, fail, make_console, say
from gpuload.cli.recipe import load_recipe
from gpuload.cli.source import source_of
from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.sample import read
from gpuload.datasets.stores.opening import is_url
from gpuload.errors import GpuloadError, visible
from gpuload.inspection.advice import Advice, advise, is_bad
from gpuload.inspection.files import NAMED
from gpuload.inspection.gather import Gathered, gather, gather_pixels
from gpuload.inspection.ignored import ignored_in
from gpuload.inspection.page import GROUPS_SHOWN, IMAGES_SHOWN, bytes_text, render
from gpuload.inspection.sheet import SIDE, chosen, contact_sheet, default_recipe, thumbnails
from gpuload.inspection.summary import summarise
from gpuload.loader.limits import usable_cpus

__all__ = ["FOUND", "Settings", "run"]

FOUND: Final = 3  # exit status: it was done, and there are damaged images, or the same in several data sets
LISTED: Final = 10  # damaged images in the terminal
STYLES: Final = {"bad": "bold red", "odd": "yellow", "note": "cyan"}
WORDS: Final = {"bad": "mend", "odd": "check", "note": "to know"}
SMALL_SIDE: Final = 112  # of pictures of duplicates


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command line; see `gpuload.cli.inspect`. `pixels`: None for all."""

    data: Sequence[str]
    recipe: str | None = None
    html: str | None = "inspect.html"
    json: str | None = None
    limit: int | None = None
    pixels: int | None = 4000
    images: int = 8
    draws: int = 6
    seed: int = 0
    workers: int | None = None
    given: dict[str, str] | None = None


def run(settings: Settings, console: Console | None = None) -> int:
    """Inspect. Returns the exit status: 0, `FOUND`, or 1 if it cannot be done."""
    console = console or make_console()
    talk = make_console(stderr=True) if settings.json == "-" else console  # stdout is for a program
    try:
        recipe = default_recipe() if settings.recipe is None else load_recipe(settings.recipe)
        datasets = [_dataset(data, settings) for data in settings.data]
        names = _names(settings.data)
        endings = (settings.given or {}).get("extensions")
        extensions = EXTENSIONS if endings is None else tuple(endings.split(","))
        ignored = [_ignored(dataset, extensions) for dataset in datasets]
        workers = usable_cpus() if settings.workers is None else settings.workers
        with bars(talk) as begin:
            found = gather(
                datasets, names, limit=settings.limit, seed=settings.seed, workers=workers, told=begin("files")
            )
            if settings.pixels != 0:
                gather_pixels(found, most=settings.pixels, seed=settings.seed, workers=workers, told=begin("pixels"))
        summary = summarise(found, ignored=ignored)
        advice = advise(summary)
        if settings.html is not None:
            _write(found, summary, advice, recipe, workers, settings)
        if settings.json is not None:
            text = json.dumps({**summary, "advice": [one._asdict() for one in advice]}, indent=1)
            if settings.json == "-":
                print(text)
            else:
                _replace(settings.json, text + "\n")
    except (GpuloadError, OSError, ValueError, TypeError, ImportError) as error:
        return fail(talk, error)
    except KeyboardInterrupt:
        say(talk, "stopped", "yellow")
        return STOPPED
    _show(talk, summary, advice)
    if settings.html is not None:
        size = bytes_text(os.path.getsize(settings.html))
        say(talk, f"{visible(settings.html)}: {size}; it opens in any browser, and needs no network")
    return FOUND if is_bad(summary) else 0


def _dataset(data: str, settings: Settings) -> Any:
    """What `gpuload pack` takes as a source; or a single image."""
    if os.path.isfile(data) and data.lower().endswith(tuple(NAMED)):
        return [read(data)]
    dataset = source_of(data, settings.given or {})
    if not len(dataset):
        raise ValueError(f"{data!r} has no samples in it")
    return dataset


def _names(data: Sequence[str]) -> list[str]:
    """What data sets are called: the last parts of their paths, as many as tell them apart."""
    parts = [[part for part in one.split(os.sep) if part] or [one] for one in map(_absolute, data)]
    for some in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(one[-some:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(data, 1)]


def _absolute(data: str) -> str:
    return data if is_url(data) else os.path.abspath(data)


def _ignored(dataset: Any, extensions: Sequence[str]) -> dict[str, int]:
    root = getattr(dataset, "root", None)
    if type(dataset).__name__ not in ("ImageFolder", "ImageFiles") or not isinstance(root, str) or is_url(root):
        return {}
    return ignored_in(root, extensions, classes=type(dataset).__name__ == "ImageFolder")


def _write(
    found: Gathered,
    summary: dict[str, Any],
    advice: Sequence[Advice],
    recipe: list[Any],
    workers: int,
    options: Settings,
) -> None:
    """Make and write the page."""
    from gpuload import __version__

    assert options.html is not None
    few = min(workers, 2)
    strips = chosen(found, options.images)
    doubles = [
        image["row"]
        for kind in ("files", "pixels", "looks")
        for group in summary["duplicates"][kind]["listed"][:GROUPS_SHOWN]
        for image in group["images"][:IMAGES_SHOWN]
    ]
    pictures = thumbnails(found, dict.fromkeys(doubles, SMALL_SIDE) | dict.fromkeys(strips, SIDE), workers=few)
    sheet = contact_sheet(found, strips, recipe, pictures, draws=options.draws, seed=options.seed, workers=few)
    text = render(
        summary,
        advice,
        sheet,
        pictures,
        recipe="\n".join(map(repr, recipe)),
        seed=options.seed,
        version=__version__,
    )
    _replace(options.html, text)


def _replace(path: str, text: str) -> None:
    """Write a file; one that was there is replaced when the new one is whole."""
    draft = f"{path}.part"
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


def _show(console: Console, summary: dict[str, Any], advice: Sequence[Advice]) -> None:
    """The summary: tables in a terminal, plain lines elsewhere."""
    facts = [(name, visible(value)) for name, value in _facts(summary)]
    to_paste = [kind["normalize"] for kind in summary["pixels"]["kinds"][:1] if kind["normalize"]]
    told = [(WORDS[one.level], STYLES[one.level], visible(one.title), one.code) for one in advice]
    damaged = summary["damaged"]["listed"][:LISTED]
    if console.is_terminal:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts:
            table.add_row(name, _plain(value))
        console.print(table)
        for line in to_paste:  # not in the table, whose columns would break it
            say(console, line)
        console.print()
    else:
        for name, value in facts:
            say(console, f"{name}: {value}")
        for line in to_paste:
            say(console, line)
    for one in damaged:
        say(console, f"damaged: {visible(one['path'])}: {visible(one['cause'])}", "red")
    if (more := summary["damaged"]["count"] - len(damaged)) > 0:
        say(console, f"damaged: {more:,} more", "red")
    if console.is_terminal and damaged:
        console.print()
    for word, style, title, code in told:
        say(console, f"{word}: {title}", style)
        for line in code.splitlines():
            say(console, f"    {line}")


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _facts(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    images, sizes, classes = summary["images"], summary["sizes"], summary["classes"]
    for one in summary["data"]:
        yield "data", one["kind"] or one["name"]
    some = "" if images["looked_at"] == images["samples"] else f" of {images['samples']:,}, drawn at random"
    yield "images", f"{images['looked_at']:,}{some}, {bytes_text(images['bytes'])}"
    if sizes:
        width, height = sizes["width"], sizes["height"]
        yield (
            "sizes",
            (
                f"median {width['median']:,.0f}×{height['median']:,.0f}, "
                f"smallest {'×'.join(map(str, sizes['smallest']))}, "
                f"largest {'×'.join(map(str, sizes['largest']))}; {count_of(sizes['distinct'], 'size')}"
            ),
        )
        spread = sizes["bytes"]
        yield (
            "files",
            f"median {bytes_text(spread['median'])}, {bytes_text(spread['least'])} to {bytes_text(spread['most'])}",
        )
        for name, kind in (("formats", "formats"), ("modes", "modes"), ("sampling", "sampling")):
            if counts := summary["formats"][kind]:
                yield name, ", ".join(f"{what} {number:,}" for what, number in counts.items())
    if classes:
        least, most = classes["listed"][-1], classes["listed"][0]
        yield (
            "classes",
            (
                f"{classes['count']:,}; the largest is {most['name']} with {most['count']:,}, "
                f"the smallest {least['name']} with {least['count']:,}"
            ),
        )
    doubles = summary["duplicates"]
    yield (
        "duplicates",
        (
            f"{count_of(doubles['files']['surplus'], 'file')}; among {images['decoded']:,} decoded images "
            f"{doubles['pixels']['surplus']:,} by pixels, {doubles['looks']['surplus']:,} that look alike"
        ),
    )
    yield "damaged", f"{summary['damaged']['count']:,}; refused by a limit {summary['refused']['count']:,}"
    for kind in summary["pixels"]["kinds"][:1]:
        for name in ("mean", "std"):
            yield name, ", ".join(f"{value:.4f}" for value in kind[name])
