"""Shared code of the benchmarks: options, runs in separate processes and in rounds, tables, goals, and results files.

Every round runs all ways, in an order that changes from round to round. If other work slows the machine down for a
while, it slows down all ways alike, so ratios within a round stay valid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.machine import cpu_model

REPOSITORY: Final = Path(__file__).parent.parent
PATHS: Final[dict[str, dict[str, Any]]] = {
    "photos": {"help": "folder of JPEGs (default: scikit-image's photographs, varied)"},
    "cache": {"help": "folder for copies and stores (default .data)", "default": REPOSITORY / ".data"},
    "json": {"help": "write all results to this file"},
}
NUMBERS: Final = {
    "files": "number of files to copy the photographs to",
    "rounds": "number of times to run each way",
    "workers": "worker processes",
    "batch_size": "images per batch",
}
MARKS: Final = {True: "met   ", False: "MISSED", None: "–     "}


class Verdict(NamedTuple):
    """A goal with its measured figure, and whether the figure meets it; None if nothing was measured."""

    text: str
    met: bool | None


def make_parser(module: str, doc: str | None, *paths: str, **numbers: float) -> argparse.ArgumentParser:
    """Make a parser with options that many benchmarks share: `paths` are names from `PATHS`; `numbers` are names from
    `NUMBERS` with their defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=(doc or "").splitlines()[0])
    for name in paths:
        parser.add_argument(f"--{name}", type=Path, **PATHS[name])
    for name, default in numbers.items():
        description = f"{NUMBERS[name]} (default {default:,})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=description)
    return parser


def check_minimums(parser: argparse.ArgumentParser, options: argparse.Namespace, **minimums: int) -> None:
    """End the program with a message if an option is less than its minimum."""
    for name, minimum in minimums.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            parser.error(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def run_module(
    arguments: Sequence[str],
    limit_s: float,
    *,
    python: str = sys.executable,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a module in its own process, with additional `variables` in its environment. Return the last line of output,
    parsed as JSON; if the module failed, a dict with `error` and, unless it timed out, `stderr`."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": {**os.environ, **(variables or {}), "PYTHONPATH": path}}
    try:
        process = subprocess.run(
            [python, "-m", *arguments], capture_output=True, text=True, timeout=limit_s, check=False, **options
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {limit_s:g} s"}
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        last_line = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        return {"error": last_line[0], "stderr": process.stderr}
    return json.loads(lines[-1])


def run_rounds(
    ways: Sequence[str],
    rounds: int,
    run: Callable[[str], dict[str, Any]],
    failed: dict[str, dict[str, Any]],
    describe: Callable[[str, dict[str, Any]], str] = lambda way, result: way,
) -> list[dict[str, dict[str, Any]]]:
    """Run all ways in every round. Return the results of each round, keyed by way. A way that fails is recorded in
    `failed` and does not run again. `describe` formats a result for the line printed after each run."""
    results: list[dict[str, dict[str, Any]]] = []
    for round_index in range(rounds):
        results.append({})
        first_way = round_index % len(ways)
        for way in (*ways[first_way:], *ways[:first_way]):
            if way in failed:
                continue
            result = run(way)
            if "error" in result:
                failed[way] = result
                print(f"{way} could not be measured: {result['error']}", flush=True)
                continue
            results[-1][way] = result
            print(f"round {round_index + 1} of {rounds}: {describe(way, result)}", flush=True)
    return results


def take_turns(count: int, counter: Synchronized[int], at_once: int) -> Iterator[int]:
    """Yield the numbers below `count` that no other process gets: each process takes the next `at_once` numbers
    whenever it is done with its last. With a fixed share each, all processes would wait for the slowest one.

    `taken` counts the numbers that processes have taken, and is shared by them.
    """
    while True:
        with counter.get_lock():
            start = counter.value
            counter.value = stop = min(start + at_once, count)
        if start == stop:
            return
        yield from range(start, stop)


def median(values: Sequence[float] | None) -> float | None:
    """Return the median; None if there are no values."""
    return statistics.median(values) if values else None


def describe_machine() -> dict[str, Any]:
    """Describe the machine that the measurements ran on."""
    return {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def format_table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """Format a table as text: the first column is left-aligned, all other columns are right-aligned, and long headings
    are wrapped."""
    rows, heading_lines = list(rows), []
    for heading, *cells in zip(headings, *rows, strict=True):
        width = max(10, *map(len, cells)) if cells else 10
        heading_lines.append(textwrap.wrap(heading, width, break_long_words=False) or [""])
    lines = [list(line) for line in itertools.zip_longest(*heading_lines, fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, *rows, strict=True)]
    lines += [["─" * width for width in widths], *map(list, rows)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join([title] * bool(title) + ["  ".join(cells).rstrip() for cells in padded])


def format_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], rule: Sequence[str] = ()) -> str:
    """Format a table in Markdown; `rule` has the cells of the line below the headings, by default only dashes."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (headings, rule or ["---"] * len(headings), *rows))


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """Print each goal and whether it is met."""
    for verdict in verdicts:
        print(MARKS[verdict.met], verdict.text)


def write_results(path: Path | None, figures: dict[str, Any], verdicts: Sequence[Verdict] = ()) -> None:
    """Write a description of the machine, all figures and the goals to a file, unless `path` is None."""
    goals = [{"goal": verdict.text, "met": verdict.met} for verdict in verdicts]
    write_json(path, {"machine": describe_machine(), **figures, "goals": goals})


def write_json(path: Path | None, content: Any) -> None:
    """Write a JSON file, unless `path` is None. If the program is killed while writing, the previous file survives."""
    if path is not None:
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(path)
