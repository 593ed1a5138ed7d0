"""What benchmarks have in common: ways in processes of their own and in turns, the machine in words, goals, results.

All ways run in every round, in an order that changes from round to round: so a machine that other work slows down for a
while slows them all, and ratios taken within a round stay true.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.machine import cpu_model

__all__ = [
    "REPOSITORY", "Verdict", "in_turns", "machine", "make_console", "run_module", "say_verdicts", "write_results",
]  # fmt: skip

REPOSITORY: Final = Path(__file__).parent.parent


@dataclass(frozen=True)
class Verdict:
    """A goal, what was measured, and whether that meets it."""

    text: str
    met: bool


def make_console(width: int) -> Console:
    """Return a console that does not break tables where there is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def run_module(
    arguments: Sequence[str], limit_s: float, *, python: str = sys.executable, more: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a module in a process of its own, with more environment variables. Returns the last line that it prints, as
    JSON; or `error`, and `stderr`, where it failed."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": {**os.environ, **(more or {}), "PYTHONPATH": path}}
    try:
        done = subprocess.run(
            [python, "-m", *arguments], capture_output=True, text=True, timeout=limit_s, check=False, **options
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {limit_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last_words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"error": last_words[0], "stderr": done.stderr}
    return json.loads(lines[-1])


def in_turns(
    ways: Sequence[str],
    rounds: int,
    run: Callable[[str], dict[str, Any]],
    console: Console,
    failed: dict[str, dict[str, Any]],
    said: Callable[[str, dict[str, Any]], str] = lambda way, result: "",
) -> list[dict[str, dict[str, Any]]]:
    """Run all ways in every round. Returns the results of each round, by way; a way that fails goes to `failed`, and
    does not run again. `said` makes a line of a result."""
    results: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        results.append({})
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            if way in failed:
                continue
            with console.status(f"round {number + 1} of {rounds}: {way}"):
                result = run(way)
            if "error" in result:
                failed[way] = result
                console.print(f"[red]{way} could not be measured:[/] {result['error']}", soft_wrap=True)
                continue
            results[-1][way] = result
            if line := said(way, result):
                console.print(f"[dim]round {number + 1}: {line}[/]")
    return results


def machine() -> dict[str, Any]:
    """Return what was measured on."""
    return {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def say_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Print each goal, and whether it is met."""
    for verdict in verdicts:
        console.print(f"{'[green]met   [/]' if verdict.met else '[red]missed[/]'} {verdict.text}", soft_wrap=True)


def write_results(path: Path | None, everything: dict[str, Any], verdicts: Sequence[Verdict] = ()) -> None:
    """Write all figures and goals to a file, if there is one."""
    if path is not None:
        goals = [{"goal": verdict.text, "met": verdict.met} for verdict in verdicts]
        path.write_text(json.dumps({"machine": machine(), **everything, "goals": goals}, indent=1) + "\n")
