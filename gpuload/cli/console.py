"""What all commands say, and how: the console, progress, errors, JSON. Results go to stdout, errors to stderr.

In a terminal, sentences break between words, but a long path stays whole, so that it can be copied; progress is bars.
Elsewhere a line is never broken, and progress is a line for each tenth of the work, so that a log stays short. Colours
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

from gpuload.errors import LINES, visible
from gpuload.packing.durable import write_file

__all__ = [
    "FAILED", "STOPPED", "Tell", "count_of", "device_of", "fail", "make_console", "progress", "say",
    "warn_if_busy", "write_json", "write_text",
]  # fmt: skip

FAILED: Final = 1  # exit status: it was tried, and did not work; 2 is that of a command line that makes no sense
STOPPED: Final = 130  # by ctrl-C, as shells have it
WIDE: Final = 100  # columns of a terminal that has room for all there is to say of progress
STEPS: Final = 10  # lines for one task where there is no terminal


Tell = Callable[..., None]
"""Called with how much of a task is done, the total where it is known by now, and a note of a few words, as a rate:
``tell(3, 10, note="1,000 images/s")``."""


def make_console(*, stderr: bool = False) -> Console:
    """Make a console that colours only what it is told to colour."""
    return Console(highlight=False, emoji=False, stderr=stderr)


def say(console: Console, text: str, style: str | None = None, *, to_copy: bool = False) -> None:
    """Print text as it is: no markup, no emoji for ``:x:``. What a terminal would take for a command is written out,
    since names in data are anybody's. `to_copy`: a command or code, whose lines stay whole."""
    shown = visible(text, LINES)
    if console.is_terminal and not to_copy:
        shown = "\n".join(_wrapped(line, console.width) for line in shown.split("\n"))
    console.print(shown, style=style, markup=False, emoji=False, soft_wrap=True)


def _wrapped(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.lstrip(), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def fail(console: Console, error: object) -> int:
    """Say what went wrong, on stderr if the console is that of stdout. Return the exit status."""
    say(make_console(stderr=True) if console.file is sys.stdout else console, str(error), "red")
    return FAILED


@contextmanager
def progress(console: Console, what: str, total: int | None = None, *, transient: bool = True) -> Iterator[Tell]:
    """Show the progress of a task; `transient`: its bar goes away at the end."""
    if not console.is_terminal:
        yield _lines(console, what, total)
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
    with Progress(*columns, console=console, transient=transient, refresh_per_second=4) as bars:
        task = bars.add_task(what, total=total, note="")
        # A total of None leaves it as it is.
        yield lambda done, total=None, note="": bars.update(task, completed=done, total=total, note=note)


def _lines(console: Console, what: str, known: int | None) -> Tell:
    printed = 0

    def tell(done: int, total: int | None = None, note: str = "") -> None:
        nonlocal printed, known
        known = known if total is None else total
        if known and (step := min(done, known) * STEPS // known) > printed:
            printed = step
            say(console, f"{done:,} of {known:,} {what}" + (f", {note}" if note else ""))

    return tell


def count_of(number: int, one: str, many: str = "") -> str:
    """Return ``1 image``, ``2 images``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def warn_if_busy(console: Console) -> None:
    """Say so before anything is measured if the machine is busy."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > cpus / 2:
        text = f"This machine is busy: a load of {load:.1f} on {cpus} CPUs. Figures depend on what else runs"
        say(console, text, "yellow")


def device_of(name: str | None) -> Any:
    """Return the torch device of ``--device``, by default a GPU if there is one.

    Raises:
        ValueError: it is not a device, or there is no such device.
    """
    from gpuload.stage import device as devices
    from gpuload.stage.plan import check_device

    device = check_device(name or devices.usual_type())
    if device.type not in ("cpu", devices.usual_type()):
        kind = device.type.upper()
        raise ValueError(f"--device {device}, but torch finds no {kind} device; leave --device out to run on the CPU")
    return device


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write JSON to a file; ``-`` is stdout."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        print(text, end="")
    else:
        write_text(path, text)


def write_text(path: str, text: str) -> None:
    """Write a file; one that was there is replaced when the new one is complete."""
    write_file(path, text.encode(), os.path.dirname(path) or ".", lasting=False)
