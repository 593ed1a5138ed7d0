"""What a read from the page cache depends on: CPU time of an image, by how the cache was filled, and what is kept.

    python -m benchmarks.sources.keeping --photos DIR [--json FILE]

`gl.TarShards` and torchvision's ImageFolder give the bytes of the same photographs; each sample is dropped before the
next one is read, or all 32 of a chunk are kept until it ends. Beside them, what any reader of an archive has to do: a
`pread` of each photograph, to memory of its own, or to one buffer that is there already and has room for one or for a
chunk; and of the single files, which are open already. All read in a random order; once after archives and files came
from the disk from beginning to end, which the kernel may keep in larger pieces of memory, once after the samples came
in a random order.
"""

from __future__ import annotations

import argparse
import json
import os
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

import gpuload as gl
from benchmarks.machine import cpu_model, versions
from benchmarks.photos import copy_photos, find_photos
from benchmarks.sources.__main__ import MALLOC
from benchmarks.sources.pages import drop
from benchmarks.sources.reading import CHUNK
from benchmarks.sources.stores import STORES, order, write

__all__ = ["FILLED", "WAYS", "main"]

REPOSITORY: Final = Path(__file__).parents[2]
FILLED: Final = {"filled in order": False, "filled at random": True}
WAYS: Final = (
    "gl.TarShards",
    "torchvision ImageFolder",
    "pread",
    "pread of files, open already",
    "gl.TarShards, 32 kept",
    "torchvision ImageFolder, 32 kept",
    "pread, 32 kept",
    "pread to a buffer for one",
    "pread to a buffer for 32",
)


def _file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def readers(base: Path) -> dict[str, Callable[[], object]]:
    """Each reads all photographs once."""
    from benchmarks.peers.torchvision_import import torchvision
    from gpuload.datasets.kinds import each_of

    archives = STORES["TarShards"].open(str(base))
    files = torchvision.datasets.ImageFolder(str(base / "train"), loader=_file)
    numbers = order(len(files), True)
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

    opened = [(descriptor := os.open(path, os.O_RDONLY), os.fstat(descriptor).st_size) for path, _ in files.samples]
    whole = one_by_one(lambda chunk: lambda row: os.pread(*opened[chunk[row]], 0))
    gets = (each, lambda chunk: lambda row: files[chunk[row]], lambda chunk: lambda row: pread(chunk[row]))
    runs = [*map(one_by_one, gets), whole, *map(kept, gets), to_buffer(False), to_buffer(True)]
    return dict(zip(WAYS, runs, strict=True))


def fill(base: Path, random: bool) -> None:
    """Have the page cache read all archives and files: from beginning to end, or sample by sample in a random order."""
    drop(base, "files")
    if random:
        for dataset in (STORES["TarShards"].open(str(base)), gl.ImageFolder(base / "train")):
            for number in order(len(dataset), random):
                dataset[number]
        return
    for path in (*sorted((base / "stores").glob("*.tar")), *sorted((base / "train").rglob("*.jpg"))):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def measure(base: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By how the page cache was filled, and way: CPU µs of an image, in each round."""
    found: dict[str, dict[str, list[float]]] = {}
    ways = readers(base)
    images = sum(1 for _ in (base / "train").rglob("*.jpg"))
    for filled, random in FILLED.items():
        fill(base, random)
        for _ in range(rounds):
            for name, run in ways.items():
                cpu = time.process_time()
                run()
                cpu_us = 1e6 * (time.process_time() - cpu) / images
                found.setdefault(filled, {}).setdefault(name, []).append(cpu_us)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> Table:
    """A row for each way: medians."""
    made = Table(title="CPU µs of an image", title_justify="left", box=box.SIMPLE)
    made.add_column("")
    for filled in found:
        made.add_column(filled, justify="right")
    for way in WAYS:
        made.add_row(way, *(f"{statistics.median(ways[way]):.0f}" for ways in found.values()))
    return made


def ratio(rounds: dict[str, list[float]], way: str, other: str) -> float:
    """How many times as fast one is as another by CPU time: the median of the rounds' ratios."""
    return statistics.median(theirs / own for own, theirs in zip(rounds[way], rounds[other], strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources.keeping", description=about)
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
    asked = [sys.executable, "-m", "benchmarks.sources.keeping", "--measure", base, "--rounds", str(options.rounds)]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **MALLOC, "PYTHONPATH": path}
    done = subprocess.run(asked, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    load = os.getloadavg()[0]
    console = Console(highlight=False)
    about = f"{options.files:,} photographs from {source}; {cpu_model()}, load {load:.1f}; medians of {options.rounds}"
    console.print(about, soft_wrap=True)
    console.print(table(found))
    for filled, rounds in found.items():
        alike = [ratio(rounds, f"gl.TarShards{end}", f"torchvision ImageFolder{end}") for end in ("", ", 32 kept")]
        mixed = ratio(rounds, "gl.TarShards, 32 kept", "torchvision ImageFolder")
        console.print(
            f"{filled}: gl.TarShards over torchvision ImageFolder: {alike[0]:.2f}; both keep 32: {alike[1]:.2f}; "
            f"gl.TarShards keeps 32, the other one: {mixed:.2f}",
            soft_wrap=True,
        )
    if options.json:
        machine = {"cpu": cpu_model(), "load": load}
        everything = {"machine": machine, "versions": versions(), "files": options.files, "cpu_us": found}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
