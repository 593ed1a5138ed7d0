"""The page: one HTML file that needs nothing else, no network and no script.

What comes from the data (names of files, classes, causes) is untrusted: jinja2 escapes all of it, characters that
cannot be seen are written out, and a content security policy forbids everything but the page's own pictures and style.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from gpuload.errors import visible
from gpuload.inspection.advice import Advice
from gpuload.inspection.sheet import Strip

__all__ = ["GROUPS_SHOWN", "IMAGES_SHOWN", "render"]

GROUPS_SHOWN: Final = 12  # groups of duplicates that are shown with pictures, of each kind
IMAGES_SHOWN: Final = 4  # pictures of each
LISTED: Final = 200  # damaged images
BARS: Final = 24  # classes with a bar each
WIDTH, HEIGHT = 320, 96  # of a chart, in its own units


def render(
    summary: dict[str, Any],
    advice: Sequence[Advice],
    sheet: Sequence[Strip],
    pictures: dict[int, str],
    *,
    recipe: str,
    seed: int,
    version: str,
) -> str:
    """The page, as text.

    Args:
        summary, advice: what was found.
        sheet: the contact sheet.
        pictures: data URIs of images that the summary lists, by row.
        recipe: the transforms, as text.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(visible=visible, size=bytes_text, count=lambda number: f"{number:,}", short=_short)
    environment.globals.update(bars=_bars, levels=_levels, line=_line, share=_share, WIDTH=WIDTH, HEIGHT=HEIGHT)
    template = environment.from_string(files("gpuload.inspection").joinpath("page.html").read_text("utf-8"))
    return template.render(
        summary=summary,
        advice=advice,
        sheet=sheet,
        pictures=pictures,
        recipe=recipe,
        seed=seed,
        version=version,
        made=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        groups_shown=GROUPS_SHOWN,
        images_shown=IMAGES_SHOWN,
        listed=LISTED,
        bars_shown=BARS,
    )


def bytes_text(nbytes: float) -> str:
    """A number of bytes with a unit, such as ``1.2 GB``."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.2f}"


def _share(part: int, whole: int) -> str:
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    return "<0.1%" if share < 0.1 else f"{share:.1f}%" if share < 10 or 99 < share < 100 else f"{share:.0f}%"


def _bars(spread: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of a histogram: place, height, and what they are."""
    counts, bounds = spread["counts"], spread["bounds"]
    each, most = WIDTH / len(counts), max(counts)
    return [
        {
            "x": round(number * each + 0.5, 2),
            "width": round(max(0.8, each - 1), 2),
            "height": round(max(1.5, HEIGHT * count / most), 2) if count else 0,
            "count": count,
            "low": bounds[number],
            "high": bounds[number + 1],
        }
        for number, count in enumerate(counts)
    ]


def _levels(counts: list[int], most: int) -> str:
    """The outline of how often each level is there, as the points of a polygon. The ends, where clipped levels pile up,
    may leave the picture."""
    points = [
        f"{WIDTH * level / 255:.1f},{HEIGHT * (1 - min(1.0, count / most)):.1f}" for level, count in enumerate(counts)
    ]
    return " ".join(["0," + str(HEIGHT), *points, f"{WIDTH},{HEIGHT}"])


def _line(counts: list[int]) -> str:
    """The outline of the sizes of all classes, the largest first."""
    picked = counts if len(counts) <= WIDTH else [counts[at * len(counts) // WIDTH] for at in range(WIDTH)]
    each, most = WIDTH / len(picked), max(picked)
    points = []
    for number, count in enumerate(picked):
        y = f"{HEIGHT * (1 - count / most):.1f}"
        points += [f"{number * each:.1f},{y}", f"{(number + 1) * each:.1f},{y}"]
    return " ".join(["0," + str(HEIGHT), *points, f"{WIDTH},{HEIGHT}"])
