"""Read rates of each store: images/s, cold and warm, in sequential and random order, of bytes and decoded batches.

    python -m benchmarks.sources --photos DIR [--files 2000] [--rounds 3] [--json FILE]

gpuload's datasets are compared with other libraries' readers of the same photographs (`natives`), and with memcpy. Each
combination of reader, level and order runs in its own process. Every round runs all of them, in an order that changes
from round to round, and ratios are computed within rounds. The module `reading` explains the levels and states.

Other libraries' packages are imported from ``CACHE/peers``, an environment that ``--install`` creates, or else from the
current environment. Their requirements conflict with each other, so they are installed without dependencies.
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

MEMCPY_SHARE: Final = 0.8  # goal of ArrayFile: share of memcpy's rate

LIMIT_S: Final = 600
# For all readers: keep freed memory in the process, as in a process that has been running for a while.
MALLOC: Final = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=134217728:glibc.malloc.mmap_threshold=33554432"}
# The packages, and their dependencies that are not installed with gpuload's tests.
PEERS: Final = (
    "webdataset==1.0.2", "braceexpand==0.1.7",
    "litdata==0.2.76", "boto3==1.44.5", "botocore==1.44.5", "s3transfer==0.19.3", "jmespath==1.1.0", "obstore==0.12.1",
    "mosaicml-streaming==0.13.0", "Brotli==1.2.1", "python-snappy==0.7.3", "cramjam==2.14.0", "zstd==1.5.7.2",
    "catalogue==2.0.10",
)  # fmt: skip


def install(cache: Path) -> None:
    """Create the environment of other libraries, which also sees the packages of the current environment."""
    environment = cache / "peers"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-deps", *PEERS]
    subprocess.run(pip, check=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    numbers = {"files": 2000, "rounds": 3, "workers": 2, "batch_size": 64}
    parser = running.make_parser("sources", __doc__, "photos", "cache", "json", **numbers)
    readers = [*STORES, MEMCPY, *NATIVE]
    parser.add_argument("--only", help=f"readers, separated by semicolons, from: {'; '.join(readers)}")
    parser.add_argument("--level", choices=LEVELS, help="one level (default: both)")
    parser.add_argument(
        "--drop",
        choices=("kernel", "files"),
        default=best_drop(),
        help="empty the entire page cache through the kernel (default where permitted), or file by file",
    )
    parser.add_argument("--install", action="store_true", help="install other libraries in CACHE/peers first")
    parser.add_argument("--quick", action="store_true", help="a dry run: one round, only the raw bytes")
    options = parser.parse_args(arguments)
    options.readers = [name.strip() for name in options.only.split(";")] if options.only else readers
    if unknown := set(options.readers) - set(readers):
        parser.error(f"--only takes any of {'; '.join(readers)}; got {'; '.join(sorted(unknown))}")
    options.levels = [options.level] if options.level else ["raw"] if options.quick else list(LEVELS)
    if options.quick:
        options.rounds, options.drop = 1, "files"
    return options


Round = Mapping[str, Mapping[str, Any]]
"""By reader, then by level and order: the figures of each state, or None if the reader does not support the case."""


def values_of(rounds: Sequence[Round], reader: str, kind: str, state: str, figure: str) -> list[float]:
    """Return one figure of each round that has it."""
    states = [(readers.get(reader, {}).get(kind) or {}).get(state) for readers in rounds]
    return [figures[figure] for figures in states if figures is not None]


def rates_table(level: str, readers: Sequence[str], rounds: Sequence[Round], failed: Mapping[str, str]) -> str:
    """Format a table with a row for each reader: its rates and CPU times at this level."""
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
    return running.format_table(headings, rows, f"{level}: images/s (CPU µs per image)")


def judge(rounds: Sequence[Round], natives: Sequence[str]) -> list[running.Verdict]:
    """Check the goals whose figures were measured: `TarShards` at least as fast as the fastest other reader, and
    `ArrayFile` at 80% of memcpy's rate."""
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
    rounds: Sequence[Round], ours: str, others: Sequence[str], kind: str, state: str
) -> tuple[float | None, str]:
    """Divide the rate of `ours` by that of the fastest of `others`, within each round that has both. Return the
    median, and the fastest of `others` in the last round."""
    ratios, fastest = [], ""
    for readers in rounds:
        rates = {name: values_of([readers], name, kind, state, "images_per_s") for name in (ours, *others)}
        theirs = {name: rates[name][0] for name in others if rates[name]}
        if rates[ours] and theirs:
            fastest = max(theirs, key=theirs.__getitem__)
            ratios.append(rates[ours][0] / theirs[fastest])
    return (statistics.median(ratios) if ratios else None), fastest


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if an installed reader could not be measured."""
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
        """Measure all levels and orders of a reader."""
        figures: dict[str, Any] = {}
        for level in options.levels:
            for order in ORDERS:
                task = [reader, str(base), level, order == "random", options.drop, options.workers, options.batch_size]
                command = ["benchmarks.sources.reading", json.dumps(task)]
                figures[f"{level}, {order}"] = result = running.run_module(
                    command, LIMIT_S, python=python, variables=MALLOC
                )
                if "error" in result:
                    return result
                versions.update(result.pop("versions"))
        return figures

    rounds = running.run_rounds(options.readers, options.rounds, measure, failed)
    errors = {reader: result["error"] for reader, result in failed.items()}
    for level in options.levels:
        print(f"\n{rates_table(level, options.readers, rounds, errors)}\n")
    running.print_verdicts(verdicts := judge(rounds, list(NATIVE)))
    nbytes = sum(path.stat().st_size for path in (base / "train").rglob("*.jpg")) / options.files / 1000
    print(
        f"\n{options.files:,} photographs of {nbytes:.0f} KB on average, from {source}; medians of {options.rounds}\n"
        f"cold: {'page cache dropped by the kernel' if options.drop == 'kernel' else 'files dropped'}; decoded: "
        f"RandomResizedCrop(224), flip, normalise, batch {options.batch_size}, {options.workers} workers\n"
        f"machine: {running.describe_machine()['cpu']}, {running.describe_machine()['cpus']} CPUs\n"
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    )
    photos = {"source": str(source), "files": options.files, "mean_kb": nbytes}
    everything = {"photos": photos, "drop": options.drop, "versions": versions, "rounds": rounds, "failed": errors}
    running.write_results(options.json, everything, verdicts)
    absent = [error for error in errors.values() if "ModuleNotFoundError" in error]
    return 1 if len(errors) > len(absent) else 0


if __name__ == "__main__":
    sys.exit(main())
