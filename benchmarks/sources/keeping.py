"""What it costs to keep the samples of a chunk: CPU time and page faults of an image, read from the page cache.

    python -m benchmarks.sources.keeping --photos DIR [--json FILE]

`gl.TarShards` and torchvision's ImageFolder give the bytes of the same photographs; each sample is dropped before the
next one is read, or all 32 of a chunk are kept until it ends. Beside them, what any reader of an archive has to do: a
`pread` of each photograph, to memory of its own, or to one buffer that is there already and has room for one or for a
chunk. All of it once with malloc as it is, and once told to keep the memory that it was given back, as gpuload's
workers are.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu_model, versions
from benchmarks.photos import copy_photos, find_photos
from benchmarks.sources.reading import CHUNK
from benchmarks.sources.stores import STORES, order, write

__all__ = ["MALLOCS", "WAYS", "main"]

REPOSITORY: Final = Path(__file__).parents[2]
KEEPS: Final = "glibc.malloc.trim_threshold=134217728:glibc.malloc.mmap_threshold=33554432"
MALLOCS: Final = {"malloc as it is": "", "malloc keeps memory": KEEPS}
WAYS: Final = (
    "gl.TarShards",
    "torchvision ImageFolder",
    "pread",
    "gl.TarShards, 32 kept",
    "torchvision ImageFolder, 32 kept",
    "pread, 32 kept",
    "pread to a buffer for one",
    "pread to a buffer for 32",
)


def _file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def readers(base: Path, random: bool) -> dict[str, Callable[[], object]]:
    """Each reads all photographs once."""
    from benchmarks.peers.torchvision_import import torchvision
    from gpuload.datasets.kinds import each_of

    archives = STORES["TarShards"].open(str(base))
    files = torchvision.datasets.ImageFolder(str(base / "train"), loader=_file)
    numbers = order(len(files), random)
    chunks = [numbers[at : at + CHUNK] for at in range(0, len(numbers), CHUNK)]
    descriptors = [os.open(path, os.O_RDONLY) for path in archives.shards]
    plans = [archives._plan(number) for number in range(len(archives))]
    spans = [(descriptors[shard], begin, size) for shard, _, _, ((_, begin, size), *_) in plans]
    room = max(sum(spans[number][2] for number in chunk) for chunk in chunks)
    buffer = memoryview(bytearray(b"\1" * room))

    def each(chunk: list[int]) -> Callable[[int], Any]:
        found = each_of(archives, chunk)
        assert found is not None
        return found

    def pread(number: int) -> bytes:
        descriptor, begin, size = spans[number]
        return os.pread(descriptor, size, begin)

    def one_by_one(get: Callable[[list[int]], Callable[[int], Any]]) -> Callable[[], None]:
        def run() -> None:
            for chunk in chunks:
                read = get(chunk)
                for row in range(len(chunk)):
                    read(row)

        return run

    def kept(get: Callable[[list[int]], Callable[[int], Any]]) -> Callable[[], None]:
        def run() -> None:
            held: list[Any] = []
            for chunk in chunks:
                read = get(chunk)
                held.clear()
                held.extend(map(read, range(len(chunk))))

        return run

    def to_buffer(chunk_wide: bool) -> Callable[[], None]:
        def run() -> None:
            for chunk in chunks:
                at = 0
                for number in chunk:
                    descriptor, begin, size = spans[number]
                    os.preadv(descriptor, [buffer[at : at + size]], begin)
                    at += size * chunk_wide

        return run

    gets = (each, lambda chunk: lambda row: files[chunk[row]], lambda chunk: lambda row: pread(chunk[row]))
    runs = [*map(one_by_one, gets), *map(kept, gets), to_buffer(False), to_buffer(True)]
    return dict(zip(WAYS, runs, strict=True))


def measure(base: Path, rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For in order and random, by way: of each round CPU µs and page faults of an image."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for random in (False, True):
        ways = readers(base, random)
        images = sum(1 for _ in (base / "train").rglob("*.jpg"))
        for run in ways.values():
            run()
        of = found.setdefault("random" if random else "in order", {})
        for _ in range(rounds):
            for name, run in ways.items():
                faults, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
                run()
                cpu_us = 1e6 * (time.process_time() - cpu) / images
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
                of.setdefault(name, []).append((cpu_us, faults / images))
    return found


def table(found: dict[str, dict[str, dict[str, list[tuple[float, float]]]]]) -> Table:
    """A row for each way: medians."""
    made = Table(title="CPU µs of an image (page faults of an image)", title_justify="left", box=box.SIMPLE)
    made.add_column("")
    for malloc, orders in found.items():
        for name in orders:
            made.add_column(f"{malloc},\n{name}", justify="right")
    for way in WAYS:
        cells = []
        for orders in found.values():
            for ways in orders.values():
                cpu_us, faults = map(statistics.median, zip(*ways[way], strict=True))
                cells.append(f"{cpu_us:.0f} ({faults:.1f})")
        made.add_row(way, *cells)
    return made


def ratio(rounds: dict[str, list[tuple[float, float]]], way: str, other: str) -> float:
    """How many times as fast one is as another by CPU time: the median of the rounds' ratios."""
    return statistics.median(theirs[0] / own[0] for own, theirs in zip(rounds[way], rounds[other], strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sources.keeping", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--photos", type=Path, help="folder of JPEGs (default: scikit-image's photographs, varied)")
    parser.add_argument("--files", type=int, default=1000, help="how many files they are copied to (default 1000)")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".data", help="where the stores are kept")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is read (default 15)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.rounds)))
        return 0
    source = options.photos or find_photos(options.cache)[0]
    base = copy_photos(source, options.cache, options.files).parent
    write(base, ["TarShards"])
    found = {}
    for name, tunables in MALLOCS.items():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        asked = [sys.executable, "-m", "benchmarks.sources.keeping", "--measure", base, "--rounds", str(options.rounds)]
        done = subprocess.run(
            asked, cwd=REPOSITORY, env={**environment, "GLIBC_TUNABLES": tunables}, check=True, stdout=subprocess.PIPE
        )
        found[name] = json.loads(done.stdout)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    console.print(
        f"{options.files:,} photographs from {source}; {cpu_model()}; medians of {options.rounds}", soft_wrap=True
    )
    console.print(table(found))
    for malloc, orders in found.items():
        for name, rounds in orders.items():
            alike = [ratio(rounds, f"gl.TarShards{end}", f"torchvision ImageFolder{end}") for end in ("", ", 32 kept")]
            mixed = ratio(rounds, "gl.TarShards, 32 kept", "torchvision ImageFolder")
            console.print(
                f"{malloc}, {name}: gl.TarShards over torchvision ImageFolder: {alike[0]:.2f}; both keep 32: "
                f"{alike[1]:.2f}; gl.TarShards keeps 32, the other one: {mixed:.2f}",
                soft_wrap=True,
            )
    if options.json:
        everything = {"machine": cpu_model(), "versions": versions(), "files": options.files, "found": found}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
