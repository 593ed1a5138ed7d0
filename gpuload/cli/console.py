"""What all commands say, and how: the console, progress, errors. Results go to stdout, errors to stderr.

In a terminal progress is bars; elsewhere it is a line for each tenth of the work, so that a log stays short. Colours
follow rich's rules: none without a terminal, and none with ``NO_COLOR``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpuload.errors import LINES, visible

__all__ = ["FAILED", "STOPPED", "Begin", "Tell", "bars", "count_of", "fail", "make_console", "progress", "say"]

FAILED: Final = 1  # exit status: it was tried, and did not work; 2 is that of a command line that makes no sense
STOPPED: Final = 130  # by ctrl-C, as shells have it
WIDE: Final = 100  # columns of a terminal that has room for all there is to say of progress
STEPS: Final = 10  # lines for one task where there is no terminal


class Tell(Protocol):
    """Says how far a task is. `total`, where it is known by now; `note`: a few words, such as a rate."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


class Begin(Protocol):
    """Begins another task; `total` is None as long as it is not known."""

    def __call__(self, what: str, total: int | None = None) -> Tell: ...


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours only what it is told to colour."""
    return Console(highlight=False, emoji=False, stderr=stderr)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: no markup, no emoji for ``:x:``, and no line breaks, so that a path can be copied. What a
    terminal would take for a command is written out, since names in data are anybody's."""
    console.print(visible(text, LINES), style=style, markup=False, emoji=False, soft_wrap=True)


def fail(console: Console, error: object, status: int = FAILED) -> int:
    """Say what went wrong, on stderr if the console is that of stdout. Returns the exit status."""
    say(make_console(stderr=True) if console.file is sys.stdout else console, str(error), "red")
    return status


@contextmanager
def bars(console: Console, *, transient: bool = True) -> Iterator[Begin]:
    """The progress of several tasks, one after the other or side by side; `transient`: bars go away at the end."""
    if not console.is_terminal:
        yield lambda what, total=None: _lines(console, what, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        *((TimeElapsedColumn(),) if console.width >= WIDE else ()),
        TimeRemainingColumn(),
    )
    # Few refreshes: they take processor time from what is measured.
    with Progress(*columns, console=console, transient=transient, refresh_per_second=4) as shown:

        def begin(what: str, total: int | None = None) -> Tell:
            task = shown.add_task(what, total=total, note="")

            def tell(done: int, total: int | None = None, note: str = "") -> None:
                shown.update(task, completed=done, total=total, note=note)  # None leaves the total as it is

            return tell

        yield begin


@contextmanager
def progress(console: Console, what: str, total: int | None = None) -> Iterator[Tell]:
    """The progress of one task."""
    with bars(console) as begin:
        yield begin(what, total)


def _lines(console: Console, what: str, known: int | None) -> Tell:
    told = 0

    def tell(done: int, total: int | None = None, note: str = "") -> None:
        nonlocal told, known
        known = known if total is None else total
        if known and (step := min(done, known) * STEPS // known) > told:
            told = step
            say(console, f"{done:,} of {known:,} {what}" + (f", {note}" if note else ""))

    return tell


def count_of(number: int, one: str, many: str = "") -> str:
    """``1 image``, ``2 images``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
