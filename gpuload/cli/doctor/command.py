"""The command ``gpuload doctor``, and its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gpuload.cli.doctor.finding import Finding

__all__ = ["EXAMPLES", "doctor", "show"]

EXAMPLES: Final = (
    "gpuload doctor",
    "gpuload doctor --json > doctor.json",
)

COLOURS: Final = {"works": "green", "improve": "yellow", "broken": "red", "not needed": "dim"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON, and nothing else.")] = False,
) -> None:
    """Say what works on this machine, what does not, and how to fix it.

    It looks at processors, memory, limits, the driver, torch and the GPUs.

    It really tries each decoder, a worker, and what else is installed, in processes of their own.

    Exit status: 0 if all that is needed works; 1 if something is broken.
    """
    from gpuload.cli.console import make_console, progress
    from gpuload.cli.doctor.finding import as_dict, exit_status
    from gpuload.cli.doctor.gather import examine

    # stderr: what is printed is JSON alone
    with progress(make_console(stderr=True), "checks") as tell:
        findings = examine(tell)
    if as_json:
        typer.echo(json.dumps(as_dict(findings), indent=2))
    else:
        show(findings)
    raise typer.Exit(exit_status(findings))


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print the findings as a table, what to do about them, and the summary."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from gpuload.cli.console import make_console, say
    from gpuload.cli.doctor.finding import exit_status, summary

    console = console or make_console()
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = COLOURS[finding.state]
        table.add_row(Text(finding.state, style), finding.name, Text(finding.found, "dim" * (style == "dim")))
    console.print(table)
    mending = [finding for finding in findings if finding.mend]
    if mending:
        console.print("What to do:\n", style="bold")
        for finding in mending:
            say(console, f"  {finding.name}: {finding.mend}")
        console.print()
    console.print(summary(findings), style="bold red" if exit_status(findings) else "bold", markup=False)
