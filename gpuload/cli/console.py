"""The output of all commands: the console, progress, errors, JSON. Results go to stdout, errors to stderr.

In a terminal, progress is shown as bars, and sentences wrap between words, but a long path is never broken, so that it
can be copied. Otherwise, lines are never wrapped, and progress is one line every 10%, which keeps logs short. Colours
follow rich's rules: none without a terminal, and none with ``NO_COLOR``.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpuload.errors import UNESCAPED_WHITESPACE, visible
from gpuload.packing.durable import write_file

__all__ = [
    "FAILED", "STOPPED", "ProgressCallback", "echo", "format_count", "make_console", "progress", "report_error",
    "select_device", "warn_if_busy", "write_json", "write_text",
]  # fmt: skip

FAILED: Final = 1  # exit status of a command that failed; an invalid command line exits with 2
STOPPED: Final = 130  # exit status after ctrl-C, as in shells
WIDE: Final = 100  # columns of a terminal with room for all progress columns
STEPS: Final = 10  # number of progress lines per task without a terminal


ProgressCallback = Callable[..., None]
"""A progress callback. It takes the completed amount, the total (None if unknown or unchanged), and a short note, such
as a rate: ``update_progress(3, 10, note="1,000 images/s")``."""


def make_console(*, stderr: bool = False) -> Console:
    """Create a console that colours only text with an explicit style."""
    return Console(highlight=False, emoji=False, stderr=stderr)


def echo(console: Console, text: str, style: str | None = None, *, to_copy: bool = False) -> None:
    """Print text without interpreting markup or emoji codes such as ``:x:``. Control characters are escaped, since
    names in data are untrusted. With `to_copy`, for commands and code, lines are not wrapped."""
    visible_text = visible(text, UNESCAPED_WHITESPACE)
    if console.is_terminal and not to_copy:
        visible_text = "\n".join(_wrap_line(line, console.width) for line in visible_text.split("\n"))
    console.print(visible_text, style=style, markup=False, emoji=False, soft_wrap=True)


def _wrap_line(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.lstrip(), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def report_error(console: Console, error: object) -> int:
    """Print an error (to stderr if the console writes to stdout), and return the exit status `FAILED`."""
    echo(make_console(stderr=True) if console.file is sys.stdout else console, str(error), "red")
    return FAILED


@contextmanager
def progress(console: Console, description: str, total: int | None = None) -> Iterator[ProgressCallback]:
    """Show the progress of a task: yield a callback that updates it. A bar is removed at the end."""
    if not console.is_terminal:
        yield _line_reporter(console, description, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        *((TimeElapsedColumn(),) if console.width >= WIDE else ()),
        TimeRemainingColumn(),
    )
    # Refreshing uses CPU time, which would affect the measurements, so do it rarely.
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        task = bars.add_task(description, total=total, note="")
        # `total=None` leaves the total unchanged.
        yield lambda done, total=None, note="": bars.update(task, completed=done, total=total, note=note)


def _line_reporter(console: Console, description: str, known_total: int | None) -> ProgressCallback:
    printed_steps = 0

    def update_progress(completed: int, total: int | None = None, note: str = "") -> None:
        nonlocal printed_steps, known_total
        known_total = known_total if total is None else total
        if known_total and (step := min(completed, known_total) * STEPS // known_total) > printed_steps:
            printed_steps = step
            echo(console, f"{completed:,} of {known_total:,} {description}" + (f", {note}" if note else ""))

    return update_progress


def format_count(count: int, singular: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 image``, ``2 images``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def warn_if_busy(console: Console) -> None:
    """Print a warning if the machine is busy, which would affect measurements."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > cpus / 2:
        text = (
            f"This machine is busy: its load is {load:.1f} on {cpus} CPUs. Other programs will affect the measurements"
        )
        echo(console, text, "yellow")


def select_device(name: str | None) -> Any:
    """Return the torch device for ``--device``; the default is a GPU if there is one.

    Raises:
        ValueError: the name is not a device, or the device does not exist.
    """
    from gpuload.stage import device as devices
    from gpuload.stage.plan import check_device

    device = check_device(name or devices.default_device_type())
    if device.type not in ("cpu", devices.default_device_type()):
        kind = device.type.upper()
        raise ValueError(f"--device {device}, but torch finds no {kind} device; omit --device to run on the CPU")
    return device


def write_json(path: str, value: Mapping[str, object]) -> None:
    """Write JSON to a file; ``-`` is stdout."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        print(text, end="")
    else:
        write_text(path, text)


def write_text(path: str, text: str) -> None:
    """Write a file. An existing file is replaced only when the new file is complete."""
    write_file(path, text.encode(), os.path.dirname(path) or ".", sync=False)
