"""How fast each store is read: images/s, cold and warm, in order and in a random one, bytes and decoded batches.

    python -m benchmarks.sources --photos DIR [--files 2000] [--rounds 3] [--json FILE]

Beside gpuload's datasets stand other libraries' readers of the same photographs (`natives`), and memcpy. Each reader,
level and order has a process of its own; all of them run in every round, in an order that changes from round to round.
Ratios are taken within rounds. What each level and state is, `reading` says.

Other libraries' packages are looked for in ``CACHE/peers``, an environment that ``--install`` makes (their own
requirements do not go together with each other's, so they are installed without them), else in the one that runs this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import running
from benchmarks.photos import copy_photos, find_photos
from benchmarks.sources.reading import LEVELS, MEMCPY, NATIVE, ORDERS, STATES, best_drop
from benchmarks.sources.stores import STORES, write

MEMCPY_SHARE: Final = 0.8  # of memcpy's rate, for ArrayFile

LIMIT_S: Final = 600
# Memory that was freed stays with the process, as it does in one that has been at work for a while; for all readers.
MALLOC: Final = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=134217728:glibc.malloc.mmap_threshold=33554432"}
# The packages, and what they import of others that gpuload's tests do not bring.
PEERS: Final = (
    "webdataset==1.0.2", "braceexpand==0.1.7",
    "litdata==0.2.76", "boto3==1.44.5", "botocore==1.44.5", "s3transfer==0.19.3", "jmespath==1.1.0", "obstore==0.12.1",
    "mosaicml-streaming==0.13.0", "Brotli==1.2.1", "python-snappy==0.7.3", "cramjam==2.14.0", "zstd==1.5.7.2",
    "catalogue==2.0.10",
)  # fmt: skip


def install(cache: Path) -> None:
    """Make the environment of other libraries: it sees the packages of this one too."""
    place = cache / "peers"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    own = next(place.glob("lib/python*/site-packages"))
    (own / "shared.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--no-deps", *PEERS]
    subprocess.run(pip, check=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    numbers = {"files": 2000, "rounds": 3, "workers": 2, "batch_size": 64}
    parser = running.make_parser("sources", __doc__, "photos", "cache", "json", **numbers)
    readers = [*STORES, MEMCPY, *NATIVE]
    parser.add_argument("--only", help=f"readers, separated by semicolons, of: {'; '.join(readers)}")
    parser.add_argument("--level", choices=LEVELS, help="one level (default: both)")
    parser.add_argument(
        "--drop",
        choices=("kernel", "files"),
        default=best_drop(),
        help="how the page cache is emptied: by the kernel, all of it (default, where allowed), or file by file",
    )
    parser.add_argument("--install", action="store_true", help="install other libraries in CACHE/peers first")
    parser.add_argument("--quick", action="store_true", help="a dry run: one round of the bytes alone")
    options = parser.parse_args(arguments)
    options.readers = [name.strip() for name in options.only.split(";")] if options.only else readers
    if unknown := set(options.readers) - set(readers):
        parser.error(f"--only takes some of {'; '.join(readers)}; got {'; '.join(sorted(unknown))}")
    options.levels = [options.level] if options.level else ["raw"] if options.quick else list(LEVELS)
    if options.quick:
        options.rounds, options.drop = 1, "files"
    return options


Round = Mapping[str, Mapping[str, Any]]
"""By reader, then by level and order: the figures of each state, or None if the reader has none."""


def values_of(rounds: Sequence[Round], reader: str, kind: str, state: str, figure: str) -> list[float]:
    """Return one figure, of each round that has it."""
    states = [(one.get(reader, {}).get(kind) or {}).get(state) for one in rounds]
    return [figures[figure] for figures in states if figures is not None]


def rates_table(level: str, readers: Sequence[str], rounds: Sequence[Round], failed: Mapping[str, str]) -> str:
    """Format a row for each reader, with its rates and CPU times at this level."""
    kinds, rows = list(itertools.product(ORDERS, STATES)), []
    for reader in readers:
        if reader in failed:
            absent = "not installed" if "ModuleNotFoundError" in failed[reader] else "failed"
            rows.append([reader, *[absent] * len(kinds), ""])
            continue
        cells = []
        for order, state in kinds:
            kind = f"{level}, {order}"
            rates, cpu = (values_of(rounds, reader, kind, state, figure) for figure in ("images_per_s", "cpu_us"))
            cells.append(f"{statistics.median(rates):,.0f} ({statistics.median(cpu):,.0f})" if rates else "–")
        disk = [mb for order in ORDERS for mb in values_of(rounds, reader, f"{level}, {order}", "cold", "disk_mb")]
        rows.append([reader, *cells, f"{statistics.median(disk):,.0f} MB" if disk else ""])
    headings = ["reader", *map(", ".join, kinds), "from disk, cold"]
    return running.table(headings, rows, f"{level}: images/s (CPU µs of an image)")


def judge(rounds: Sequence[Round], natives: Sequence[str]) -> list[running.Verdict]:
    """Judge the goals for which figures were measured: `TarShards` at or above the fastest of others' readers,
    `ArrayFile` at 80% of memcpy."""
    verdicts = []
    for level, order, state in itertools.product(LEVELS, ORDERS, STATES):
        ratio, fastest = ratio_to_fastest(rounds, "TarShards", natives, f"{level}, {order}", state)
        if ratio is not None:
            text = f"TarShards, {level}, {order}, {state}: {ratio:.2f} times the fastest other ({fastest})"
            verdicts.append(running.Verdict(text, ratio >= 1))
    for order, state in itertools.product(ORDERS, STATES):
        ratio, _ = ratio_to_fastest(rounds, "ArrayFile", [MEMCPY], f"raw, {order}", state)
        if ratio is not None:
            text = f"ArrayFile, {order}, {state}: at least {MEMCPY_SHARE:.0%} of memcpy: {ratio:.0%}"
            verdicts.append(running.Verdict(text, ratio >= MEMCPY_SHARE))
    return verdicts


def ratio_to_fastest(
    rounds: Sequence[Round], own: str, others: Sequence[str], kind: str, state: str
) -> tuple[float | None, str]:
    """Divide the rate by that of the fastest of others, within each round that has both. Returns the median, and who
    was the fastest last."""
    ratios, fastest = [], ""
    for one in rounds:
        rates = {name: values_of([one], name, kind, state, "images_per_s") for name in (own, *others)}
        theirs = {name: rates[name][0] for name in others if rates[name]}
        if rates[own] and theirs:
            fastest = max(theirs, key=theirs.__getitem__)
            ratios.append(rates[own][0] / theirs[fastest])
    return (statistics.median(ratios) if ratios else None), fastest


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where a reader that is installed could not be measured."""
    options = parse(arguments)
    if options.install:
        install(options.cache)
    python = options.cache / "peers" / "bin" / "python"
    python = str(python) if python.exists() else sys.executable
    source, _ = find_photos(options.cache, options.photos)
    base = copy_photos(source, options.cache, options.files).parent
    write(base, [name for name in options.readers if name in STORES] + ["ArrayFile"] * (MEMCPY in options.readers))

    failed: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}

    def measure(reader: str) -> dict[str, Any]:
        """All levels and orders of a reader."""
        figures: dict[str, Any] = {}
        for level in options.levels:
            for order in ORDERS:
                task = [reader, str(base), level, order == "random", options.drop, options.workers, options.batch_size]
                command = ["benchmarks.sources.reading", json.dumps(task)]
                figures[f"{level}, {order}"] = result = running.run_module(command, LIMIT_S, python=python, more=MALLOC)
                if "error" in result:
                    return result
                versions.update(result.pop("versions"))
        return figures

    rounds = running.in_turns(options.readers, options.rounds, measure, failed)
    errors = {reader: result["error"] for reader, result in failed.items()}
    for level in options.levels:
        print(f"\n{rates_table(level, options.readers, rounds, errors)}\n")
    running.say_verdicts(verdicts := judge(rounds, list(NATIVE)))
    nbytes = sum(path.stat().st_size for path in (base / "train").rglob("*.jpg")) / options.files / 1000
    print(
        f"\n{options.files:,} photographs of {nbytes:.0f} KB on average, from {source}; medians of {options.rounds}\n"
        f"cold: the page cache emptied {'by the kernel' if options.drop == 'kernel' else 'of these files'}; decoded: "
        f"RandomResizedCrop(224), flip, normalise, batch {options.batch_size}, {options.workers} workers\n"
        f"machine: {running.machine()['cpu']}, {running.machine()['cpus']} CPUs\n"
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    )
    photos = {"source": str(source), "files": options.files, "mean_kb": nbytes}
    everything = {"photos": photos, "drop": options.drop, "versions": versions, "rounds": rounds, "failed": errors}
    running.write_results(options.json, everything, verdicts)
    absent = [error for error in errors.values() if "ModuleNotFoundError" in error]
    return 1 if len(errors) > len(absent) else 0


if __name__ == "__main__":
    sys.exit(main())
